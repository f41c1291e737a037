"""NVFP4: codes [R, K] = e2m1(x / (s * g)), an E4M3 scale s per 16 elements and a float32 scale g per matrix or row.

Two-level scaling from "Pretraining Large Language Models with NVFP4" (arXiv:2509.25149). The variants,
"4over6" and a second level per row, are described in `common/formats.py` and in docs/numerics.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .....common.dispatch import Backend, Table
from .....common.formats import E2M1, E4M3, NVFP4_FORMATS, TILED_FORMATS, TensorFormat, float32_max
from .....common.quantize_spec import FAST_MAE, FAST_MSE, MSE
from ....runtime.launching import Performed, run, unsupported_casts
from ...operand import Operand
from .. import tiles
from ..encodings import (
    GROUP,
    absolute_maximum,
    cast,
    decode_e2m1,
    encode_e2m1,
    hadamard_transform,
    pack_fp4,
    row_maxima,
    second_level_scale,
    transposed,
    unpack_fp4,
    widen,
)
from ..format_row import FormatRow, PlannedCall, QuantizeInputs, as_float32
from ..spec import Quantized, QuantizeRequest, QuantizeSpec
from ..tile_scaled import scale_a_row


def _range(form: TensorFormat) -> float:
    """Return 6 times the largest block scale: a matrix's maximum divided by its second-level scale."""
    assert form.unit_amax is not None
    return form.unit_amax


def encode(
    x: Tensor, spec: QuantizeSpec, form: TensorFormat, amax: Tensor, random: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Encode x [R, K] with amax [1] or [R]: unpacked uint8 codes [R, K], block scales e4m3 [ceil(R/r), ceil(K/16)]."""
    assert spec.tile is not None
    blocks = tiles.cut(x, spec.tile)
    amax = amax.view(-1, 1)
    encode_scale = second_level_scale(amax, _range(form))
    if spec.four_over_six:
        codes, block_scale = _four_or_six(blocks, spec.four_over_six, form, amax, encode_scale)
    else:
        ideal = tiles.tile_amax(blocks) * (encode_scale * (1.0 / E2M1.maximum))
        block_scale = cast(ideal.clamp(max=float32_max()), E4M3)
        random_tiles = None if random is None else tiles.cut(random, spec.tile)
        codes = encode_e2m1(
            blocks * tiles.spread(_multiplier(block_scale, encode_scale)), random_tiles
        )
    return tiles.join(codes, (x.shape[0], x.shape[1])), block_scale


def _multiplier(block_scale: Tensor, encode_scale: Tensor) -> Tensor:
    """Return the multiplier for a block's values, 1 / (block scale / S), at most FLOAT32_MAX."""
    multiplier = (block_scale.to(torch.float32) * encode_scale.reciprocal()).reciprocal()
    return multiplier.clamp(max=float32_max())


def _four_or_six(
    blocks: Tensor, measure: str, form: TensorFormat, amax: Tensor, encode_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Return codes and block scales with each tile's maximum mapped to 6, or to 4 if that makes a smaller error.

    A NaN error, from a tile or matrix that is not finite, is never smaller: such tiles map their maximum to 6.
    """
    tile_amax = tiles.tile_amax(blocks)
    base = torch.div(tile_amax, torch.full_like(tile_amax, E2M1.maximum)) * encode_scale
    candidates = []
    for ideal in (base, base * 1.5):
        scale = cast(ideal, E4M3)
        candidates.append(
            (encode_e2m1(blocks * tiles.spread(_multiplier(scale, encode_scale))), scale)
        )
    six, four = candidates
    error_six, error_four = (
        _tile_error(blocks, codes, scale, measure, form, amax, encode_scale)
        for codes, scale in (six, four)
    )
    takes_four = error_four < error_six
    codes = torch.where(tiles.spread(takes_four), four[0], six[0])
    scales = torch.where(takes_four, four[1].view(torch.uint8), six[1].view(torch.uint8))
    return codes, scales.view(torch.float8_e4m3fn)


def _tile_error(
    blocks: Tensor,
    codes: Tensor,
    block_scale: Tensor,
    measure: str,
    form: TensorFormat,
    amax: Tensor,
    encode_scale: Tensor,
) -> Tensor:
    """Return the error of a tile's codes, float32 [ceil(R/r), ceil(K/16)], summed in the order of the kernels."""
    # at most 6 significant bits: exact
    product = decode_e2m1(codes) * tiles.spread(widen(block_scale))
    if measure in (FAST_MAE, FAST_MSE):
        difference = product - blocks * tiles.spread(encode_scale)
    else:
        values = product * tiles.spread(amax)
        difference = torch.div(values, torch.full_like(values, _range(form))) - blocks
    terms = difference * difference if measure in (MSE, FAST_MSE) else difference.abs()
    error = terms[..., 0]
    for index in range(1, terms.shape[-1]):
        error = error + terms[..., index]
    while error.shape[1] > 1:  # rows of a square tile: 0 with 8, 1 with 9, .., then 0 with 4, ..
        first, second = error.chunk(2, dim=1)
        error = first + second
    return error.squeeze(1)


def quantize(x: Tensor, spec: QuantizeSpec, inputs: QuantizeInputs) -> Quantized:
    """Quantize x [M, K]: packed codes, block scales and maxima in the spec's directions."""
    _, amax, amax_t, random, _ = inputs
    random_rows, random_columns = random if spec.stochastic and random is not None else (None, None)
    amax, amax_t = maxima(x, spec, amax, amax_t)
    form = spec.format
    codes = scales = codes_t = scales_t = None
    if amax is not None and (spec.rowwise or spec.transposes):
        codes, scales = encode(x, spec, form, amax, random_rows)
    if spec.columnwise:
        if codes is not None and scales is not None and spec.transposes:
            codes_t, scales_t = transposed(codes), transposed(scales)
        else:
            assert amax_t is not None
            x_t = transposed(x)
            if spec.hadamard:
                x_t = hadamard_transform(x_t, spec.random_sign)
            codes_t, scales_t = encode(x_t, spec, form.columnwise, amax_t, random_columns)
    return Quantized(
        codes=pack_fp4(codes) if spec.rowwise and codes is not None else None,
        scale=scale_a_row(scales, spec, x.shape[0]) if spec.rowwise else None,
        codes_t=None if codes_t is None else pack_fp4(codes_t),
        scale_t=scale_a_row(scales_t, spec, x.shape[1]),
        amax=amax if spec.rowwise else None,
        amax_t=amax_t if spec.columnwise else None,
    )


def dequantize(operand: Operand, scale: Tensor) -> Tensor:
    """Return code * block scale * global scale."""
    form = operand.format
    assert form is not None and form.block is not None
    if operand.amax is None:
        raise ValueError(
            f"an {form.name} operand needs the tensor's amax for its second scale, which is None; "
            "pass the one that `quantize` returned"
        )
    codes = tiles.cut(decode_e2m1(unpack_fp4(operand.codes)), form.block)
    # The first product has at most 6 significant bits and is exact, so only the second rounds.
    # second = amax / (6 * largest block scale): a value is code * block scale * second.
    amax = operand.amax.view(-1, 1, 1, 1)
    second = torch.div(amax, torch.full_like(amax, _range(form)))
    values = codes * tiles.spread(widen(scale)) * second
    return tiles.join(values.to(operand.dtype), (operand.rows, operand.depth))


def check(rows: int, depth: int, spec: QuantizeSpec) -> None:
    """Raise ValueError if codes do not fill whole bytes, or rows do not fill the transform's groups."""
    if spec.rowwise and depth % 2:
        raise ValueError(f"K={depth} FP4 codes do not fill whole bytes; pad K to a multiple of 2")
    if spec.columnwise and rows % 2:
        raise ValueError(f"M={rows} FP4 codes do not fill whole bytes; pad M to a multiple of 2")
    if spec.columnwise and spec.hadamard and rows % GROUP:
        raise ValueError(
            f"M={rows} is not a multiple of {GROUP}, the Hadamard transform's group; "
            "pad M or set hadamard=False"
        )


def maxima(
    x: Tensor, spec: QuantizeSpec, amax: Tensor | None, amax_t: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the absolute maxima of the two directions; None is replaced by the measured maximum.

    Row-wise float32 [1], or [M] for a format with one scale per row; column-wise float32 [1].
    """
    per_row = spec.format.row_scaled
    if amax is None and spec.rowwise and per_row:
        amax = row_maxima(x)
    elif amax is None and not per_row and (spec.rowwise or not spec.hadamard):
        amax = absolute_maximum(x)
    if not spec.columnwise or spec.transposes:
        return amax, amax
    if amax_t is None and spec.hadamard:
        amax_t = absolute_maximum(hadamard_transform(transposed(x), spec.random_sign))
    elif amax_t is None:
        amax_t = absolute_maximum(x) if per_row else amax
    return amax, amax_t


class TransformedMaximumRequest(NamedTuple):
    """A matrix [rows, columns] whose transpose is Hadamard transformed.

    Attributes:
        rows, columns: Matrix extents.
        dtype: Its dtype.
        device: Its device.
        contiguous: Whether it is contiguous.
        random_sign: Whether the transform applies signs.
    """

    rows: int
    columns: int
    dtype: torch.dtype
    device: torch.device
    contiguous: bool
    random_sign: bool


def _unsupported_transformed_maximum(request: TransformedMaximumRequest) -> str | None:
    if (reason := unsupported_casts(request.device, request.dtype)) is not None:
        return reason
    if not request.rows * request.columns or request.rows % GROUP:
        return f"M={request.rows} is not a positive multiple of {GROUP}, the group of the transform, or K is 0"
    return None if request.contiguous else "it reads contiguous matrices"


def _bind_transformed_maximum(request: TransformedMaximumRequest) -> Callable[[Tensor], Tensor]:
    from .....common.kernels import nvfp4

    launch = nvfp4.hadamard_maximum((request.rows, request.columns), request.random_sign)
    return lambda x: run(launch, (x,))[0]


def _largest_transformed(x: Tensor, random_sign: bool) -> Tensor:
    return absolute_maximum(hadamard_transform(transposed(x), random_sign))


TRANSFORMED_MAXIMUM: Table[TransformedMaximumRequest] = Table(
    "hadamard_maximum",
    (
        Backend(
            "triton",
            unsupported_reason=_unsupported_transformed_maximum,
            bind=_bind_transformed_maximum,
        ),
        Backend(
            "reference",
            bind=lambda request: functools.partial(
                _largest_transformed, random_sign=request.random_sign
            ),
        ),
    ),
    describe=TransformedMaximumRequest,
)


def hadamard_maximum(x: Tensor, random_sign: bool) -> Tensor:
    """max|Hadamard transform of x.T| for a matrix x [M, K], as float32 [1].

    Args:
        x: The matrix.
        random_sign: Whether the transform applies signs.

    Raises:
        ValueError: M is not a multiple of the transform's group size, 16.
    """
    if torch.compiler.is_compiling():
        return _largest_transformed(x, random_sign)
    return TRANSFORMED_MAXIMUM.bound((*x.shape, x.dtype, x.device, x.is_contiguous(), random_sign))(
        x
    )


def _plan(request: QuantizeRequest) -> PlannedCall:
    from .....common.kernels import nvfp4

    spec = request.spec

    @functools.cache
    def bound(amax_given: bool, amax_t_given: bool) -> Performed:
        directions = (spec.rowwise, spec.columnwise)
        options = nvfp4.Options.of(spec)
        program = nvfp4.program(request.shape, *directions, options, amax_given, amax_t_given)
        return Performed(program, request.device)

    def call(x: Tensor, inputs: QuantizeInputs) -> Quantized:
        _, amax, amax_t, random, _ = inputs
        rows, columns = random if spec.stochastic and random is not None else (None, None)
        if spec.transposes and rows is not None:
            columns = rows.t()
        uniform = [None if values is None else values.contiguous() for values in (rows, columns)]
        maxima = [as_float32(maximum) for maximum in (amax, amax_t) if maximum is not None]
        performed = bound(amax is not None, amax_t is not None)
        return Quantized(*performed(x.contiguous(), *uniform, *maxima))

    return call


FORMAT_ROWS = tuple(
    FormatRow(form, quantize, dequantize, check, _plan, maxima)
    for plain in NVFP4_FORMATS.values()
    for form in (plain, TILED_FORMATS[plain])
)
