"""NVIDIA's paths for functions on Triton kernels, computed by the primitives of this package on any device.

| module | functions |
| --- | --- |
| `permutation` | token permutation by a mask, and of chunks |
| `cross_entropy` | loss and gradient of a sharded vocabulary |
| `grouped_dbias_dscales` | gradients of the biases and row scales of grouped products |
| `pad` | padding of block scales |
| `mhc` | manifold-constrained hyper-connections |

Layers do not use these modules: they call `transformer_engine.pytorch.permutation` and the like, which check their
arguments. The functions here take sizes as NVIDIA's do, and check little.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...common import absent

__all__ = ["group_sums"]

absent.install_getter(__name__)


def group_sums(x: Tensor, offsets: Tensor, num_groups: int, *, out: Tensor | None = None) -> Tensor:
    """Sum the rows per group in float32; the host does not wait for the device.

    Args:
        x: Floating-point matrix [T, N].
        offsets: First row per group and the end of the last one, integers [num_groups + 1]. Rows
            outside are ignored.
        num_groups: Group count G.
        out: float32 [G, N] to which the sums are added.

    Returns:
        Sums float32 [G, N]; `out` if it is given.
    """
    rows = torch.arange(x.shape[0], device=x.device)
    # Group 0 collects the rows before the first group, and group G + 1 those behind the last.
    group = torch.bucketize(rows, offsets.to(x.device, torch.int64), right=True)
    sums = torch.zeros((num_groups + 2, x.shape[1]), dtype=torch.float32, device=x.device)
    sums = sums.index_add_(0, group, x.float())[1 : num_groups + 1]
    return sums if out is None else out.add_(sums)


def check_float32(name: str, value: Tensor | None, shape: Sequence[int]) -> None:
    """Raise AssertionError, as NVIDIA's engine does, unless a buffer is None or float32 with the shape."""
    if value is not None and (value.dtype != torch.float32 or tuple(value.shape) != tuple(shape)):
        raise AssertionError(
            f"{name} is {value.dtype} {list(value.shape)}; give float32 {list(shape)}, or None"
        )
