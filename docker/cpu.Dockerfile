# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# docker build -f docker/cpu.Dockerfile -t sievemla-cpu . && docker run --rm sievemla-cpu verify
# Builds, and runs the demo while it does: an image that exists has passed it. No GPU anywhere.
FROM debian:12
WORKDIR /sievemla
COPY . .
RUN ./dev install-deps build && ./dev demo && rm -rf /var/lib/apt/lists/*
ENV PATH=/sievemla/build/cpu/bin:$PATH
ENTRYPOINT ["sievemla"]
CMD ["doctor"]
