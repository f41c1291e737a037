"""sums [groups, N] = the sum of every group's rows of x [total, N], in float32: gradients of biases."""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.kernels import launch
from ...runtime.launching import run
from ..grouped_gemm import Groups


def row_sums(x: Tensor, groups: Groups) -> Tensor:
    """float32 [groups, N]; the host waits for nothing on a GPU with Triton."""
    if not x.is_cuda or launch.missing() is not None:
        return torch.stack([part.sum(0, dtype=torch.float32) for part in groups.split(x)])
    from ....common.kernels import grouped_gemm

    return run(grouped_gemm.row_sums(x.shape[1], groups.count), (x, groups.layout))[0]
