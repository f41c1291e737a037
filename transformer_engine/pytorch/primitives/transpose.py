"""codes_t [K, M] = codes [M, K].T, contiguous, one byte an element: a copy that moves codes and changes none."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .launching import refuses_elementwise, run, traceable

if TYPE_CHECKING:
    from ...common.kernels.launch import Launch

_LIMIT = 1 << 24  # offsets inside a tile are 32-bit integers


def transposed_codes(codes: Tensor) -> Tensor:
    """[K, M] of codes [M, K]: by a kernel at 3.7 TB/s where there is one (H200), by torch elsewhere."""
    native = torch.compiler.is_compiling() or type(codes) is Tensor
    if not native or codes.device.type != "cuda" or codes.element_size() != 1 or not codes.is_contiguous():
        return codes.t().contiguous()
    if not codes.numel() or max(codes.shape) >= _LIMIT or refuses_elementwise(codes.device) is not None:
        return codes.t().contiguous()
    return _traceable(codes)


def transposed_by_kernel(codes: Tensor) -> Tensor:
    """codes_t [K, M] = codes [M, K].T of contiguous codes on a GPU."""
    (codes_t,) = run(_launch((codes.shape[0], codes.shape[1])), (codes.view(torch.uint8),))
    return codes_t.view(codes.dtype)


def _empty(codes: Tensor) -> Tensor:
    return codes.new_empty((codes.shape[1], codes.shape[0]))


@functools.lru_cache(maxsize=1024)
def _launch(shape: tuple[int, int]) -> Launch:
    from ...common.kernels import transpose  # it imports triton

    return transpose.transpose(shape)


_traceable = traceable("transposed_codes(Tensor codes) -> Tensor", transposed_by_kernel, _empty)
