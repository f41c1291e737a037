"""FP8 codes that a kernel writes instead of its result: conditions and kernel arguments.

The codes have one scale per tensor (`one_scale`), or one per block, which needs no scale beforehand (`blocks`,
`has_block_scales`, `has_blocks_in_rows`).

Codes, scales and maxima are as from separate steps: the result is rounded to its dtype before it is scaled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ....common.formats import BLOCK_1D, BLOCK_2D, FLOAT8, FLOAT32_MAX
from . import TABLE
from .spec import CastRequest, QuantizeRequest, QuantizeSpec

if TYPE_CHECKING:
    from ....common.kernels.block_cast import Blocks
    from ....common.kernels.cast import OneScale

_FORMATS = (FLOAT8.name, BLOCK_1D.name, BLOCK_2D.name)


def cast_request(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    spec: QuantizeSpec | None,
    has_multiplier: bool,
    records: bool,
) -> CastRequest | None:
    """Return the request for a cast of a result [M, N]; None without a cast."""
    if spec is None:
        return None
    return CastRequest(
        spec, has_multiplier, records, fuses(shape, dtype, device, spec, has_multiplier)
    )


def fuses(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    spec: QuantizeSpec,
    has_multiplier: bool,
) -> bool:
    """Return whether a kernel's own codes equal `quantize`'s codes: scales per tensor or block, row-wise, Triton."""
    if (
        spec.format.name not in _FORMATS
        or not spec.rowwise
        or 0 in shape
        or torch.compiler.is_compiling()
    ):
        return False
    return TABLE.name_of((spec, shape, dtype, device, has_multiplier, False)) == "triton"


def report(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, cast: CastRequest
) -> None:
    """Report a fused quantization to observers; `quantize` reports all others."""
    TABLE.report(lambda: QuantizeRequest(cast.spec, shape, dtype, device, cast.given))


def has_block_scales(spec: QuantizeSpec) -> bool:
    """Return whether scales belong to blocks, so that a kernel quantizes each block independently."""
    return spec.format.block is not None


def has_blocks_in_rows(spec: QuantizeSpec) -> bool:
    """Return whether blocks lie within rows, in the row direction only, so that a kernel quantizes each row."""
    return spec.format == BLOCK_1D and not spec.columnwise


def gradient_fuses(spec: QuantizeSpec, sums_columns: bool) -> bool:
    """Return whether a fused dx cast is faster than a separate one: not for row blocks with column sums.

    H200, 8192 x 14336 bfloat16, SwiGLU and GELU, both directions: 0.507 and 0.298 ms (0.548 and 0.304 in two steps),
    with sums 0.679 and 0.373 (0.677 and 0.380, but dx is stored then); rows only 0.285 and 0.219 (0.444 and 0.254),
    with sums 0.772 and 0.434 (0.573 and 0.328).
    """
    return not (sums_columns and has_blocks_in_rows(spec))


def blocks(spec: QuantizeSpec, dtype: torch.dtype) -> Blocks:
    """Return the kernels' settings for a spec, for a result that is rounded to dtype."""
    from ....common.kernels.block_cast import Blocks

    return Blocks(
        spec.element,
        spec.columnwise,
        spec.format == BLOCK_2D,
        spec.power_of_two,
        spec.epsilon,
        min(torch.finfo(dtype).max, FLOAT32_MAX),
    )


def one_scale(cast: CastRequest) -> OneScale:
    """Return the kernels' settings for a cast with one scale per tensor."""
    from ....common.kernels.cast import OneScale

    spec = cast.spec
    return OneScale(
        spec.element,
        spec.columnwise,
        cast.given,
        cast.given and cast.records,
        spec.power_of_two,
        spec.epsilon,
    )
