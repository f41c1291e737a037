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

# NVIDIA's recommendation for compute capability 9.0; smaller GPUs need less
WORKSPACE_BYTES = 32 << 20
ALGORITHM_BYTES = 64  # sizeof(cublasLtMatmulAlgo_t)
HEURISTIC_BYTES = (
    96  # sizeof(cublasLtMatmulHeuristicResult_t): the algorithm, then the workspace it needs
)

# cudaDataType_t
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
def missing() -> str | None:
    """Return the reason why cuBLASLt cannot be called, or None."""
    return _missing()


@functools.cache
def _missing() -> str | None:
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
def handle(device: int) -> int:
    """Return the cuBLASLt handle of a CUDA device, which all threads share."""
    with torch.cuda.device(device):
        return bindings().create()


_workspaces: dict[tuple[int, int], tuple[int, Tensor]] = {}


def workspace(device: int, stream: int) -> int:
    """Return the address of a stream's workspace. Products on one stream run in order, so they share it."""
    buffer = _workspaces.get((device, stream))
    if buffer is None:
        memory = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=indexed_device(device))
        buffer = _workspaces[device, stream] = (memory.data_ptr(), memory)
    return buffer[0]


def indexed_device(device: int) -> torch.device:
    """Return the torch.device with this index."""
    return torch.device("cuda", device)


def current_stream(device: int) -> int:
    """Return the handle for the device's current CUDA stream."""
    return torch._C._cuda_getCurrentRawStream(device)


def current_device() -> int:
    """Return the calling thread's current CUDA device index."""
    return torch._C._cuda_getDevice()


_cublas_workspace = (
    None  # not read here: callers of NVIDIA's engine assign their own workspace to this name
)


_callers_workspaces: Memory[torch.device, Tensor] = Memory(
    lambda device: torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device), 8
)


def get_workspace() -> Tensor:
    """Return scratch memory on the current device, uint8 [WORKSPACE_BYTES], for callers that pass it on to products.

    This package's products do not use it: see `workspace`.
    """
    return _callers_workspaces[canonical_device("cuda")]
