# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# Lays the sievemla wheel over vLLM's image. The build fails if the packages of vLLM's image changed, or if the plugin
# is not found there.
#   docker build -f docker/vllm.Dockerfile --build-arg VLLM=vllm/vllm-openai@sha256:DIGEST --build-context wheel=DIST .
ARG VLLM
FROM ${VLLM}
RUN python3 -m pip freeze --exclude sievemla > /opt/packages-before
RUN --mount=from=wheel,target=/wheel python3 -m pip install --no-deps --no-index /wheel/sievemla-*.whl \
 && python3 -m pip freeze --exclude sievemla | diff /opt/packages-before - \
 && python3 -c "from importlib.metadata import entry_points; \
assert [e.name for e in entry_points(group='vllm.general_plugins')].count('sievemla') == 1" \
 && python3 -m sievemla info
