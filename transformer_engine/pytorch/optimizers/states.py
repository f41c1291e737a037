"""Optimizer states: float32 numbers in fewer bits, by state dtype, and optimizers with full copies.

* float32: unchanged.
* bfloat16: rounded.
* float16: x / scale, scale = max|x| / 32752: half the largest float16, so that a sum of two still fits.
* uint8: FP8 (E4M3) codes of x / scale, scale = max|x| / 448.
* uint8, block-scaled: FP8 codes with one exponent per 128 values; see `primitives/multi_tensor/block_states.py`.
* int16: the lower 16 bits of float32 numbers; the bfloat16 parameter is the number, rounded half up.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..constants import DType
from ..primitives.multi_tensor.block_states import (
    LEAST_EXPONENT,
    BlockFormat,
    block_count,
    decode,
    encode,
)
from ..tensor.float8_tensor import Float8Quantizer, Float8Tensor

RANGES = {torch.float16: torch.finfo(torch.float16).max / 2.0, torch.uint8: 448.0}


def zeros(like: Tensor, dtype: torch.dtype, block_format: BlockFormat | None = None) -> Tensor:
    """Return a zero state with the shape of a tensor, block-scaled if a format is given."""
    if dtype == torch.uint8 and block_format is None:
        nothing = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
        return Float8Tensor.from_storage(_writer(like.device).encode(nothing, True, False))
    return torch.zeros(like.shape, dtype=dtype, device=like.device)


def make_writable(state: Tensor) -> None:
    """Give a quantizer to a state from a pickle, which contains none."""
    if isinstance(state, Float8Tensor) and state._quantizer is None:
        state._quantizer = _writer(state.device)


def _writer(device: torch.device) -> Float8Quantizer:
    one = torch.ones(1, dtype=torch.float32, device=device)
    return Float8Quantizer(one, torch.zeros_like(one), DType.kFloat8E4M3, columnwise=False)


def zero_scale(like: Tensor, block_format: BlockFormat | None) -> Tensor:
    """Return the scale of a zero state: float32 [1], or the exponents of its blocks."""
    if block_format is None:
        return torch.ones(1, dtype=torch.float32, device=like.device)
    exponents = torch.empty(block_count(like.numel()), dtype=torch.uint8, device=like.device)
    return exponents.fill_(LEAST_EXPONENT)


def unscale(state: Tensor, scale: Tensor | None, block_format: BlockFormat | None = None) -> Tensor:
    """Return the values of a state in float32; float32 and int16 states are returned unchanged."""
    if block_format is not None and scale is not None:
        return decode(state, scale, block_format)
    if isinstance(state, Float8Tensor):
        return state.dequantize(dtype=torch.float32)
    if state.dtype in (torch.float32, torch.int16):
        return state
    values = state.to(torch.float32)
    return values if scale is None else values * scale.view(())


def store(
    values: Tensor, state: Tensor, scale: Tensor | None, block_format: BlockFormat | None = None
) -> None:
    """Write float32 numbers into a state, rounded to nearest, and their scale into scale."""
    if block_format is not None and scale is not None:
        codes, exponents = encode(values, block_format)
        state.copy_(codes)
        scale.copy_(exponents)
        return
    if scale is None:
        state.copy_(values)
        return
    dtype = torch.uint8 if isinstance(state, Float8Tensor) else state.dtype
    largest = values.abs().amax() if values.numel() else values.new_zeros(())
    scale.copy_((largest.to(torch.float32) / RANGES[dtype]).view(1))
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    if isinstance(state, Float8Tensor):
        quantizer, of_codes = state._quantizer, state._scale_inv
        assert isinstance(quantizer, Float8Quantizer) and of_codes is not None
        quantizer.scale.copy_(inverse)
        state.quantize_(values)
        of_codes.copy_(scale)  # 0 if all values are 0: the inverse of 0 would decode to NaN
    else:
        state.copy_(values * inverse.view(()))


class CopiedWhole(torch.optim.Optimizer):
    """torch.optim.Optimizer whose copy.deepcopy and pickle include the attributes named in SETTINGS.

    torch's pickles include only parameter groups and states. Other attributes are omitted: a
    scheduler replaces the `step` of an optimizer by a closure, and hooks are closures.
    """

    SETTINGS: ClassVar[tuple[str, ...]] = ()

    def __getstate__(self) -> dict[str, Any]:
        attributes = vars(self)
        return super().__getstate__() | {
            name: attributes[name] for name in self.SETTINGS if name in attributes
        }
