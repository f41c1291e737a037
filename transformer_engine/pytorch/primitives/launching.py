"""outputs = run(launch, inputs): a kernel launch, described in plain numbers and names, on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...common.kernels.launch import MISSING, Launch, start
from ..device import get_device_compute_capability

DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def run(launch: Launch, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """The launch's outputs, allocated on the device of the first input; None where the launch has none."""
    first = inputs[0]
    assert first is not None
    outputs = [
        None if output is None else torch.empty(output.shape, dtype=_DTYPES[output.dtype], device=first.device)
        for output in launch.outputs
    ]
    device = first.get_device()
    if first.is_cuda and torch.cuda.current_device() != device:
        with torch.cuda.device(device):
            start(launch, (*inputs, *outputs), device)
    else:
        start(launch, (*inputs, *outputs), device)
    return outputs  # pyright: ignore[reportReturnType]


def refuses_elementwise(device: torch.device, *dtypes: torch.dtype) -> str | None:
    """Why a Triton kernel that reads and writes 16- and 32-bit floats cannot run here; None if it can."""
    if device.type != "cuda":
        return f"it needs a CUDA device, the tensors are on {device.type}"
    if MISSING is not None:
        return MISSING
    for dtype in dtypes:
        if dtype not in DTYPE_NAMES:
            return f"a tensor is {dtype}; it takes float32, float16 and bfloat16"
    capability = get_device_compute_capability()
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]} < 8.0"
    return None
