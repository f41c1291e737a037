"""FakeQuant and PerTensorScaling: operands that features make instead of the layer's own quantizer."""

from __future__ import annotations

from typing import Any

import torch
from nvdlfw_inspect.registry import api_method
from torch import Tensor

from transformer_engine.debug.features.api import TEConfigAPIMapper, feature
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
)

FORMATS = {
    "FP8E4M3": (Float8CurrentScalingQuantizer, DType.kFloat8E4M3),
    "FP8E5M2": (Float8CurrentScalingQuantizer, DType.kFloat8E5M2),
    "MXFP8E4M3": (MXFP8Quantizer, DType.kFloat8E4M3),
    "MXFP8E5M2": (MXFP8Quantizer, DType.kFloat8E5M2),
}
_LARGEST = {DType.kFloat8E4M3: 448.0, DType.kFloat8E5M2: 57344.0}


def fake_quantize(tensor: Tensor, fp8_format: str, out: Tensor | None = None) -> Tensor:
    """Quantize a tensor [.., K] and return its decoded values.

    Args:
        tensor: The tensor.
        fp8_format: "FP8E4M3" or "FP8E5M2" with one scale, by the tensor's maximum; "MXFP8E4M3" or "MXFP8E5M2" with a
            scale per 32 row elements.
        out: Receives the values, if given.

    Raises:
        ValueError: The format is unknown.
    """
    if fp8_format not in FORMATS:
        raise ValueError(f"fp8_format={fp8_format!r} is unknown; choose from {', '.join(FORMATS)}")
    kind, dtype = FORMATS[fp8_format]
    with torch.no_grad():
        values = kind(dtype, rowwise=True, columnwise=False)(tensor.detach()).dequantize(
            dtype=tensor.dtype
        )
    return values if out is None else out.copy_(values)


def per_tensor_cast(
    tensor: Tensor, fp8_dtype: Any, out: Any = None, *, margin: int = 0, columnwise: bool = False
) -> Any:
    """Quantize a tensor to FP8 with one scale, by its own maximum.

    Args:
        tensor: The tensor.
        fp8_dtype: The element format.
        out: Quantized tensor that receives the codes.
        margin: The scale maps the maximum times 2^margin to the largest code.
        columnwise: Make the column-wise codes instead of the row-wise codes.
    """
    directions: dict[str, Any] = {"rowwise": not columnwise, "columnwise": columnwise}
    if margin == 0:
        return Float8CurrentScalingQuantizer(fp8_dtype, **directions).quantize(tensor, out=out)
    amax = tensor.abs().amax().float().reshape(1)
    usable = (amax > 0) & amax.isfinite()
    scale = torch.where(
        usable, _LARGEST[fp8_dtype] / torch.where(usable, amax, 1.0) / 2.0**margin, 1.0
    )
    quantizer = Float8Quantizer(scale, torch.zeros_like(scale), fp8_dtype, **directions)
    return quantizer.quantize(tensor, out=out)


@feature
class FakeQuant(TEConfigAPIMapper):
    """Computes products in high precision, with tensors that are quantized and decoded before.

    Scales come from the tensors themselves, whatever the layer's recipe. The products that the configuration names have
    both operands in high precision.

    Args:
        gemms: The products, or `gemms_struct`.
        tensors: The tensors, or `tensors_struct`.
        quant_format: "FP8E4M3", "FP8E5M2", "MXFP8E4M3" or "MXFP8E5M2".
    """

    @api_method
    def fp8_gemm_enabled(
        self, config: dict[str, Any], layer_name: str, gemm: str, iteration: int
    ) -> tuple[bool, int | None]:
        """Return False for the configured products."""
        return False, None

    @api_method
    def modify_tensor_enabled(
        self, config: dict[str, Any], layer_name: str, tensor_name: str, gemm: str, iteration: int
    ) -> tuple[bool, int | None]:
        """Return True for the configured tensors."""
        if config.get("quant_format") not in FORMATS:
            raise ValueError(
                f"quant_format={config.get('quant_format')!r}; choose from {', '.join(FORMATS)}"
            )
        return True, None

    @api_method
    def modify_tensor(
        self,
        config: dict[str, Any],
        layer_name: str,
        gemm: str,
        tensor_name: str,
        tensor: Tensor,
        default_quantizer: Any = None,
        iteration: int = 0,
        out: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Compute the decoded values."""
        result = fake_quantize(tensor, config["quant_format"], out)
        return result if dtype is None else result.to(dtype)


@feature
class PerTensorScaling(TEConfigAPIMapper):
    """Quantizes tensors by current scaling, by the maximum of the tensor itself, under the delayed scaling recipe.

    Args:
        gemms: The products, or `gemms_struct`.
        tensors: The tensors, or `tensors_struct`: "activation", "weight", "gradient".
        margin: The scale maps the maximum times 2^margin to the largest code; 0 by default.
    """

    @api_method
    def modify_tensor_enabled(
        self, config: dict[str, Any], layer_name: str, tensor_name: str, gemm: str, iteration: int
    ) -> tuple[bool, int | None]:
        """Return True for the configured tensors."""
        if tensor_name not in ("activation", "weight", "gradient"):
            raise ValueError(
                f"{tensor_name} is a result of a product, which stays in high precision; remove it"
            )
        return True, None

    @api_method
    def modify_tensor(
        self,
        config: dict[str, Any],
        layer_name: str,
        gemm: str,
        tensor_name: str,
        tensor: Tensor,
        default_quantizer: Any = None,
        iteration: int = 0,
        out: Any = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Compute the quantized tensor.

        Raises:
            AssertionError: The layer's recipe is not delayed scaling.
        """
        if not isinstance(default_quantizer, Float8Quantizer):
            raise AssertionError(
                f"the layer quantizes {tensor_name} by {type(default_quantizer).__name__}; use the recipe "
                "DelayedScaling"
            )
        columnwise = (tensor_name, gemm) in (
            ("activation", "wgrad"),
            ("weight", "dgrad"),
            ("gradient", "wgrad"),
        )
        results = per_tensor_cast(
            tensor,
            default_quantizer.dtype,
            margin=int(config.get("margin", 0)),
            columnwise=columnwise,
        )
        return results if out is None else out.copy_(results)
