"""cuBLASLt through nvmath-python's bindings: availability, constants, handles and workspaces."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from ....common import optional
from ....common.memory import Memory
from ...runtime.device import canonical_device
from ...runtime.tracing import constant_while_tracing

# 32 MiB, as NVIDIA recommends for compute capability 9.0 and later.
WORKSPACE_BYTES = 32 << 20
ALGORITHM_BYTES = 64  # sizeof(cublasLtMatmulAlgo_t)
# sizeof(cublasLtMatmulHeuristicResult_t): the algorithm, then its workspace size.
HEURISTIC_BYTES = 96

# torch dtype -> cudaDataType_t
DATA_TYPES = {
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
    torch.uint8: 33,  # CUDA_R_4F_E2M1: two codes in a byte
}
# cublasComputeType_t
COMPUTE_FLOAT32 = 68
COMPUTE_TF32 = 77


@constant_while_tracing
def unavailable_reason() -> str | None:
    """Return the reason why cuBLASLt cannot be called, or None."""
    return _unavailable_reason()


# Cached separately: Dynamo evaluates the function above as a constant, and does not trace the cache.
@functools.cache
def _unavailable_reason() -> str | None:
    if not optional.installed("nvmath"):
        return f"nvmath-python is not installed ({optional.install_command('cuda')})"
    try:
        version = bindings().get_version()
    except optional.FAILURES as error:
        return f"nvmath-python cannot load cuBLASLt: {' '.join(str(error).split())}"
    if version < 120_000:
        return f"cuBLASLt {version // 10_000}.{version // 100 % 100} < 12.0"
    return None


def bindings() -> ModuleType:
    """Import nvmath.bindings.cublasLt on first use, because the import takes about 0.2 s."""
    from nvmath.bindings import cublasLt

    return cublasLt


@functools.cache
def get_handle(device_index: int) -> int:
    """Return the cuBLASLt handle of a CUDA device, which all threads share."""
    with torch.cuda.device(device_index):
        return bindings().create()


_workspaces: dict[tuple[int, int], tuple[int, Tensor]] = {}


def workspace_address(device_index: int, stream: int) -> int:
    """Return the address of a stream's workspace. Products on one stream run in order, so they share it."""
    buffer = _workspaces.get((device_index, stream))
    if buffer is None:
        memory = torch.empty(
            WORKSPACE_BYTES, dtype=torch.uint8, device=indexed_device(device_index)
        )
        buffer = _workspaces[device_index, stream] = (memory.data_ptr(), memory)
    return buffer[0]


def indexed_device(device_index: int) -> torch.device:
    """Return the CUDA device with this index."""
    return torch.device("cuda", device_index)


def current_stream(device_index: int) -> int:
    """Return the handle of the device's current CUDA stream."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def current_device() -> int:
    """Return the calling thread's current CUDA device index."""
    return torch._C._cuda_getDevice()


# For code written for NVIDIA's engine, which reads the next two names. Products here use `workspace_address`.
_cublas_workspace = None
_callers_workspaces: Memory[torch.device, Tensor] = Memory(
    lambda device: torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
    most=8,
)


def get_workspace() -> Tensor:
    """Return scratch memory on the current device, uint8 [WORKSPACE_BYTES].

    It is for callers that pass a workspace to a product, as NVIDIA's API requires.
    """
    return _callers_workspaces[canonical_device("cuda")]
