"""Export to ONNX: the mode in which layers compute in operators that ONNX can express, and their translation.

with torch.no_grad(), te.autocast(recipe=recipe), te.onnx_export(enabled=True):
    torch.onnx.export(
        model, (x,), "model.onnx", dynamo=True, opset_version=21, custom_translation_table=te_translation_table
    )
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..common.checks import suggests_keywords
from ..common.formats import float32_max
from ..common.numbers import to_bool
from .primitives.quantize import exported as tex
from .runtime.tracing import export_mode

__all__ = ["assert_warmed_up", "is_in_onnx_export_mode", "onnx_export", "te_translation_table"]


@suggests_keywords
@contextmanager
def onnx_export(enabled: bool = False) -> Iterator[None]:
    """Context manager: layers of this thread compute in operators that ONNX can express.

    `torch.onnx.export` and `torch.export.export` are called inside. The mode also applies in eager mode, so that a
    model can be compared with its export; it is restored on exit, also after an error.

    Args:
        enabled: Turn the mode on or off within the block.
    """
    previous, export_mode.onnx = export_mode.onnx, to_bool("enabled", enabled)
    try:
        yield
    finally:
        export_mode.onnx = previous


def is_in_onnx_export_mode() -> bool:
    """Return whether layers of this thread compute in operators that ONNX can express."""
    return export_mode.onnx


def assert_warmed_up(module: torch.nn.Module) -> None:
    """Assert that a layer has run under its recipe, so that its quantizers and scales exist.

    Raises:
        AssertionError: The layer has no quantizers.
    """
    numerics = getattr(module, "numerics", None)
    if numerics is None or not numerics.initialized:
        raise AssertionError(
            f"{type(module).__name__} has no quantizers yet; run one forward pass under autocast before the export"
        )


def _opset(version: int) -> Any:
    """Return the operators of an opset: QuantizeLinear has float8 codes since 19, and value blocks since 21.

    The exporter converts a model to the requested opset, if it is not older.

    Raises:
        ImportError: onnxscript, which torch.onnx.export(dynamo=True) needs too, is not installed.
    """
    try:
        import onnxscript
    except ImportError as error:
        raise ImportError(
            f"the export to ONNX needs onnxscript ({error}); install transformer-engine[onnx]"
        ) from error
    return getattr(onnxscript, f"opset{version}")


def _float32(op: Any, x: Any) -> Any:
    return op.Cast(x, to=1)


def _floor_to_power_of_two(op: Any, x: Any) -> Any:
    """Return the largest power of two <= x > 0; two comparisons correct a logarithm that is off by one."""
    two = op.Constant(value_float=2.0)
    power = op.Pow(two, op.Floor(op.Div(op.Log(x), op.Constant(value_float=0.6931471805599453))))
    power = op.Where(op.Greater(power, x), op.Div(power, two), power)
    return op.Where(op.LessOrEqual(op.Mul(power, two), x), op.Mul(power, two), power)


def _codes(op: Any, x: Any, scale_inv: Any, dtype: int) -> Any:
    """Quantize float32 x to codes with one scale; the type of the zero point is the code type."""
    return op.QuantizeLinear(x, scale_inv, op.Cast(op.Constant(value_float=0.0), to=int(dtype)))


def _fp8_quantize(tensor: Any, scale: Any, dtype: int) -> Any:
    op = _opset(19)
    return _codes(op, _float32(op, tensor), op.Squeeze(op.Reciprocal(scale)), dtype)


def _fp8_cs_quantize(tensor: Any, dtype: int, amax_epsilon: float, power_of_two: bool) -> Any:
    op = _opset(19)
    x = _float32(op, tensor)
    amax = op.ReduceMax(op.Abs(x), keepdims=0)
    if amax_epsilon > 0.0:
        amax = op.Max(amax, op.Constant(value_float=float(amax_epsilon)))
    one, largest = op.Constant(value_float=1.0), op.Constant(value_float=float32_max())
    usable = op.And(op.Greater(amax, op.Constant(value_float=0.0)), op.LessOrEqual(amax, largest))
    amax = op.Where(usable, amax, one)
    scale = op.Min(op.Div(op.Constant(value_float=_maximum(dtype)), amax), largest)
    if power_of_two:
        scale = _floor_to_power_of_two(op, scale)
    scale_inv = op.Where(usable, op.Reciprocal(scale), one)
    return _codes(op, x, scale_inv, dtype), op.Reshape(scale_inv, op.Constant(value_ints=[1]))


def _fp8_dequantize(codes: Any, scale_inv: Any) -> Any:
    op = _opset(19)
    return op.DequantizeLinear(codes, op.Squeeze(scale_inv))


def _mxfp8_quantize(tensor: Any, dtype: int) -> Any:
    op = _opset(21)
    x = _float32(op, tensor)
    blocks = op.Reshape(x, op.Constant(value_ints=[0] * (len(tensor.shape) - 1) + [-1, tex.BLOCK]))
    amax = op.ReduceMax(op.Abs(blocks), op.Constant(value_ints=[-1]), keepdims=0)
    # The smallest power of two >= amax / maximum: at least 2^-126, the least normal float32.
    least = op.Constant(value_float=2.0**-126)
    scale = op.Max(op.Mul(amax, op.Constant(value_float=1.0 / _maximum(dtype))), least)
    below = _floor_to_power_of_two(op, scale)
    scale_inv = op.Where(op.Less(below, scale), op.Mul(below, op.Constant(value_float=2.0)), below)
    codes = op.QuantizeLinear(x, scale_inv, axis=-1, block_size=tex.BLOCK, output_dtype=int(dtype))
    return codes, scale_inv


def _mxfp8_dequantize(codes: Any, scale_inv: Any) -> Any:
    return _opset(21).DequantizeLinear(codes, scale_inv, axis=-1, block_size=tex.BLOCK)


# float8 dtype numbers in ONNX, and the largest values of the formats.
_MAXIMA = {17: 448.0, 19: 57344.0}


def _maximum(dtype: int) -> float:
    return _MAXIMA[int(dtype)]


te_translation_table: dict[Callable[..., Any], Callable[..., Any]] = {
    tex.fp8_quantize: _fp8_quantize,
    tex.fp8_dequantize: _fp8_dequantize,
    tex.fp8_cs_quantize: _fp8_cs_quantize,
    tex.mxfp8_quantize: _mxfp8_quantize,
    tex.mxfp8_dequantize: _mxfp8_dequantize,
}
