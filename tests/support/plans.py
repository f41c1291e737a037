"""A stand-in for a library's matrix product plans that counts how often plans are created and run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class PlanByAddress:
    """A plan that reads an operand's memory with its request's layout, whatever the operand's strides are."""

    made = runs = 0

    def __init__(self, request: Any):
        PlanByAddress.made += 1
        self.request = request

    def run(self, a: Any, b: Any, epilogue: Any) -> Tensor:
        PlanByAddress.runs += 1
        r = self.request
        dtype, bias, out, accumulate, exact = epilogue
        left = _as_described(a[0], (r.m, r.k), r.a_layout)
        right = _as_described(b[0], (r.n, r.k), r.b_layout)
        product = left.float() @ right.float().t()
        product = product if bias is None else product + bias.float()
        assert (dtype, accumulate, exact) == (r.dtype, False, r.exact)
        return product.to(dtype) if out is None else out.copy_(product.view(out.shape))


def _as_described(tensor: Tensor, shape: tuple[int, int], layout: Any) -> Tensor:
    strides = (layout.stride, 1) if layout.row_major else (1, layout.stride)
    return torch.as_strided(tensor, shape, strides)
