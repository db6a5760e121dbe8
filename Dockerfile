# GPU image: the tested versions on CUDA 13 and Python 3.12. Build: docker build -t megatron-rl .
# Run: docker run --gpus all --ipc host -v "$PWD/runs:/srv/megatron_rl/runs" megatron-rl rl @ examples/reverse_text/rl.toml
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS build

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential cmake git ninja-build python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3.12 -m venv /venv && /venv/bin/pip install --no-cache-dir uv==0.13.9
ENV PATH=/venv/bin:$PATH VIRTUAL_ENV=/venv UV_NO_CACHE=1

COPY requirements/gpu.txt /tmp/gpu.txt
RUN uv pip install -r /tmp/gpu.txt

# transformer_engine_torch comes as source: C++ only, against the headers of the nvidia wheels. About 11 minutes on two cores.
ARG MAX_JOBS=8
RUN NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1 MAX_JOBS=${MAX_JOBS} \
    uv pip install --no-build-isolation --no-deps transformer-engine-torch==2.20.2

FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential python3.12 python3.12-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 trainer \
    && mkdir /srv/megatron_rl && chown trainer /srv/megatron_rl

COPY --from=build /venv /venv
COPY --chown=trainer . /srv/megatron_rl
RUN /venv/bin/uv pip install --python /venv/bin/python --no-cache --no-deps --editable /srv/megatron_rl
ENV PATH=/venv/bin:$PATH HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

USER 10001
WORKDIR /srv/megatron_rl
ENTRYPOINT ["megatron-rl"]
CMD ["doctor"]
