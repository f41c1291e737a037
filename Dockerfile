# Images with this package and PyTorch. Nothing is compiled, so the CUDA image needs no compiler and no CUDA toolkit:
# PyTorch's wheels contain CUDA's libraries, and the driver is that of the host.
#
#   docker build --target cpu -t transformer-engine:cpu .
#   docker build --target cuda -t transformer-engine:cuda .
#   docker run --gpus all -it --rm transformer-engine:cuda te doctor --self-test
#
# PIP_FLAGS are further options for pip. With PyTorch's index of CPU builds, the image `cpu` is gigabytes smaller:
#   docker build --target cpu --build-arg PIP_FLAGS="--extra-index-url ..." -t transformer-engine:cpu .
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS base
ARG PIP_FLAGS=""
ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /opt/transformer-engine
COPY . .

FROM base AS cpu
RUN python -m pip install ${PIP_FLAGS} -c constraints.txt ".[cli]"
WORKDIR /workspace
CMD ["te", "doctor"]

# Triton compiles a small launcher in C when a process first runs a kernel.
FROM base AS cuda
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python -m pip install ${PIP_FLAGS} -c constraints.txt ".[cli,cuda]"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /workspace
CMD ["te", "doctor", "--self-test"]
