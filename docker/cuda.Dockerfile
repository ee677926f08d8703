# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# docker build -f docker/cuda.Dockerfile -t sievemla . && docker run --rm --gpus all sievemla verify --backend cuda
# Every CUDA config, or those of --build-arg ARCHS="90;120"; building needs no GPU. What runs it needs a driver from 580 on.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS build
ARG ARCHS=""
WORKDIR /sievemla
COPY . .
RUN ./dev install-deps build \
 && cmake --preset release -DSIEVEMLA_CUDA=ON "-DSIEVEMLA_CUDA_ARCHS=$ARCHS" && cmake --build --preset release \
 && cmake --install build/release --prefix /opt/sievemla

FROM nvidia/cuda:13.0.2-base-ubuntu24.04
RUN apt-get update && apt-get install --yes --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/sievemla /usr/local
ENTRYPOINT ["sievemla"]
CMD ["doctor"]
