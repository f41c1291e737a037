"""codes [R, K] = e2m1(x / (s * g)): s an E4M3 scale for 16 elements, g one float32 scale for the matrix.

Two-level scaling of "Pretraining Large Language Models with NVFP4" (arXiv:2509.25149).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .....common.formats import E2M1, E4M3, NVFP4, float32_max
from ....runtime.launching import Performed
from ...operand import Operand
from .. import tiles
from ..e2m1 import decode_e2m1, encode_e2m1, pack_fp4, unpack_fp4
from ..float8 import absolute_maximum, cast, divide, widen
from ..format_row import FormatRow, Given, PlannedCall
from ..hadamard import GROUP, hadamard_transform
from ..spec import Quantized, QuantizeSpec, Request
from ..tile_scaled import scale_a_row, transposed
from ..triton_float8 import as_float32


def _range() -> float:
    return E2M1.maximum * E4M3.maximum


def global_encode_scale(amax: Tensor) -> Tensor:
    """S = 6 * 448 / amax, at most FLOAT32_MAX; 1 where amax or S is 0."""
    scale = divide(_range(), amax).clamp(max=float32_max())
    return torch.where((amax == 0.0) | (scale == 0.0), 1.0, scale)


def global_decode_scale(amax: Tensor) -> Tensor:
    """g = amax / (6 * 448): a value is code * block scale * g."""
    return torch.div(amax, torch.full_like(amax, _range()))


def encode(x: Tensor, spec: QuantizeSpec, amax: Tensor, random: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [R, K], amax [1] -> unpacked codes uint8 [R, K], block scales e4m3 [ceil(R/r), ceil(K/16)]."""
    assert spec.tile is not None
    cut = tiles.cut(x, spec.tile)
    encode_scale = global_encode_scale(amax)
    wanted = tiles.tile_amax(cut) * (encode_scale * (1.0 / E2M1.maximum))
    block_scale = cast(wanted.clamp(max=float32_max()), E4M3)
    multiplier = (block_scale.to(torch.float32) * encode_scale.reciprocal()).reciprocal()
    multiplier = multiplier.clamp(max=float32_max())
    random_tiles = None if random is None else tiles.cut(random, spec.tile)
    codes = encode_e2m1(cut * tiles.spread(multiplier), random_tiles)
    return tiles.join(codes, (x.shape[0], x.shape[1])), block_scale


def quantize(x: Tensor, spec: QuantizeSpec, given: Given) -> Quantized:
    """x [M, K] -> packed codes, block scales and maxima of the directions that spec asks for."""
    _, amax, amax_t, random, _ = given
    random_rows, random_columns = random if spec.stochastic and random is not None else (None, None)
    codes = scales = codes_t = scales_t = None
    if amax is None and (spec.rowwise or not spec.hadamard):
        amax = absolute_maximum(x)
    if amax is not None and (spec.rowwise or spec.transposes):
        codes, scales = encode(x, spec, amax, random_rows)
    if spec.columnwise:
        if codes is not None and scales is not None and spec.transposes:
            codes_t, scales_t, amax_t = transposed(codes), transposed(scales), amax
        else:
            x_t = transposed(x)
            if spec.hadamard:
                x_t = hadamard_transform(x_t, spec.random_sign)
            if amax_t is None:
                amax_t = absolute_maximum(x_t) if spec.hadamard else amax
            assert amax_t is not None
            codes_t, scales_t = encode(x_t, spec, amax_t, random_columns)
    return Quantized(
        codes=pack_fp4(codes) if spec.rowwise and codes is not None else None,
        scale=scale_a_row(scales, spec, x.shape[0]) if spec.rowwise else None,
        codes_t=None if codes_t is None else pack_fp4(codes_t),
        scale_t=scale_a_row(scales_t, spec, x.shape[1]),
        amax=amax if spec.rowwise else None,
        amax_t=amax_t if spec.columnwise else None,
    )


def dequantize(operand: Operand, scale: Tensor) -> Tensor:
    """code * block scale * global scale."""
    if operand.amax is None:
        raise ValueError(
            "an nvfp4 operand needs the tensor's amax for its second scale, which is None; "
            "pass the one that `quantize` returned"
        )
    assert NVFP4.block is not None
    codes = tiles.cut(decode_e2m1(unpack_fp4(operand.codes)), NVFP4.block)
    # The first product has at most 6 significant bits and is exact, so only the second rounds.
    values = codes * tiles.spread(widen(scale)) * global_decode_scale(operand.amax)
    return tiles.join(values.to(operand.dtype), (operand.rows, operand.depth))


def check(rows: int, depth: int, spec: QuantizeSpec) -> None:
    """ValueError where codes do not fill bytes, or rows the transform's groups."""
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
    """The absolute maxima of the two directions, those given and those measured here."""
    if amax is None and (spec.rowwise or not spec.hadamard):
        amax = absolute_maximum(x)
    if not spec.columnwise or spec.transposes:
        return amax, amax
    if amax_t is None:
        amax_t = absolute_maximum(hadamard_transform(x.t(), spec.random_sign)) if spec.hadamard else amax
    return amax, amax_t


def _plan(request: Request) -> PlannedCall:
    spec, bound = request.spec, functools.cache(functools.partial(_performed, request))

    def call(
        x: Tensor, multiplier: Tensor | None, amax: Tensor | None, amax_t: Tensor | None,
        record: Tensor | None, random: tuple[Tensor, Tensor] | None = None,
    ) -> Quantized:  # fmt: skip
        rows, columns = random if spec.stochastic and random is not None else (None, None)
        if spec.transposes and rows is not None:
            columns = rows.t()
        uniform = [None if values is None else values.contiguous() for values in (rows, columns)]
        maxima = [as_float32(given) for given in (amax, amax_t) if given is not None]
        performed = bound(amax is not None, amax_t is not None)
        return Quantized(*performed(x.contiguous(), *uniform, *maxima))

    return call


def _performed(request: Request, amax_given: bool, amax_t_given: bool) -> Performed:
    from .....common.kernels import nvfp4  # it imports triton

    spec = request.spec
    program = nvfp4.program(
        request.shape,
        spec.rowwise,
        spec.columnwise,
        square=spec.two_dimensional,
        hadamard=spec.hadamard,
        random_sign=spec.random_sign,
        amax_given=amax_given,
        amax_t_given=amax_t_given,
    )
    return Performed(program, request.device)


ROWS = (FormatRow(NVFP4, quantize, dequantize, check, _plan, maxima),)
