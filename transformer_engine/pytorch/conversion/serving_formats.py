"""Quantized weights in the layouts that vLLM, SGLang and transformers load, one `ServingFormat` for each.

A format writes a weight [out, in] as several tensors: codes and scales with value = code x scale. The codes equal the
codes from the quantizers of this engine, so a server multiplies with the training weights under the same recipe.

Sources: the package compressed-tensors 0.20, config.json of DeepSeek-V3, and ModelOpt exports.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..constants import DType
from ..tensor.float8_blockwise_tensor import Float8BlockQuantizer
from ..tensor.float8_tensor import Float8CurrentScalingQuantizer
from ..tensor.mxfp8_tensor import MXFP8Quantizer
from ..tensor.nvfp4_tensor import NVFP4Quantizer
from .safetensors import Described

E4M3 = torch.float8_e4m3fn
E4M3_MAXIMUM, E2M1_MAXIMUM = 448.0, 6.0

Shape = tuple[int, ...]
Layout = dict[str, Described]  # {tensor name suffix: dtype and shape}


class ServingFormat(ABC):
    """A quantized weight layout.

    Attributes:
        name: Name in `save_quantized` and `te convert --quantize`.
        joint: Whether matrices that a server concatenates (q, k, v; gate, up) share a scale.
        block: `in` must be a multiple of it.
        calibrated: Whether the format needs each layer's input maximum, from a sample batch.
        library: Reader class that `config.json` names, `quant_method`.
    """

    name: ClassVar[str]
    joint: ClassVar[bool] = False
    block: ClassVar[int] = 1
    calibrated: ClassVar[bool] = False
    library: ClassVar[str] = "compressed-tensors"

    @abstractmethod
    def layout(self, shape: Shape) -> Layout:
        """Dtypes and shapes of the tensors that hold a weight with `shape`, by name suffix."""

    @abstractmethod
    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        """Quantize a weight [out, in].

        Returns:
            Tensors as in `layout(weight.shape)`. A whole-matrix scale has one element.
        """

    def input_scale(self, maximum: float) -> dict[str, Tensor]:
        """Static scale for a layer's inputs whose absolute values reach `maximum`, by suffix; empty if dynamic."""
        return {}

    @abstractmethod
    def settings(self, unquantized: list[str], sampled: bool) -> dict[str, Any]:
        """`quantization_config` in config.json.

        Args:
            unquantized: Names of linear layers whose weights are not quantized.
            sampled: Whether the folder has static input scales, and key and value scales for an FP8 cache.
        """

    def files(self, unquantized: list[str], sampled: bool) -> dict[str, dict[str, Any]]:
        """Further JSON files in the folder, {file name: content}."""
        return {}


class _CompressedTensors(ServingFormat):
    """A format in the package compressed-tensors, which its `config_groups` describe."""

    layout_name: ClassVar[str]

    @abstractmethod
    def weights(self) -> dict[str, Any]:
        """Weight quantization arguments."""

    def inputs(self, sampled: bool) -> dict[str, Any] | None:
        """Input quantization arguments while serving; None multiplies inputs in high precision."""
        return None

    def settings(self, unquantized: list[str], sampled: bool) -> dict[str, Any]:
        group: dict[str, Any] = {"targets": ["Linear"], "weights": self.weights()}
        inputs = self.inputs(sampled)
        if inputs is not None:
            group["input_activations"] = inputs
        settings: dict[str, Any] = {
            "quant_method": self.library,
            "format": self.layout_name,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group | {"format": self.layout_name}},
            "ignore": unquantized,
        }
        if sampled:
            settings["kv_cache_scheme"] = _float_arguments(8, "tensor")
        return settings


def _float_arguments(bits: int, strategy: str, **others: Any) -> dict[str, Any]:
    """`QuantizationArgs` of compressed-tensors for static symmetric floating-point codes."""
    arguments = {
        "num_bits": bits,
        "type": "float",
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
    }
    return arguments | others


class Float8PerTensor(_CompressedTensors):
    """E4M3 codes and one float32 scale per matrix, maximum / 448; inputs have a static or a dynamic scale."""

    name = "fp8"
    joint = True
    layout_name = "float-quantized"

    def layout(self, shape: Shape) -> Layout:
        return {"weight": Described(E4M3, shape), "weight_scale": Described(torch.float32, (1,))}

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        quantizer = Float8CurrentScalingQuantizer(
            DType.kFloat8E4M3, device=weight.device, columnwise=False
        )
        quantized: Any = quantizer(weight)
        return {
            "weight": quantized._data.view(E4M3),
            "weight_scale": quantized._scale_inv.reshape(1),
        }

    def weights(self) -> dict[str, Any]:
        return _float_arguments(8, "tensor")

    def input_scale(self, maximum: float) -> dict[str, Tensor]:
        return {"input_scale": torch.tensor([maximum / E4M3_MAXIMUM or 1.0], device="cpu")}

    def inputs(self, sampled: bool) -> dict[str, Any] | None:
        return _float_arguments(8, "tensor", dynamic=not sampled)


class Float8PerChannel(_CompressedTensors):
    """E4M3 codes and one float32 scale per output feature, maximum / 448; inputs have one scale per token."""

    name = "fp8_channel"
    layout_name = "float-quantized"

    def layout(self, shape: Shape) -> Layout:
        return {
            "weight": Described(E4M3, shape),
            "weight_scale": Described(torch.float32, (shape[0], 1)),
        }

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        values = weight.float()
        scale = values.abs().amax(dim=1, keepdim=True) / E4M3_MAXIMUM
        scale = torch.where(scale > 0.0, scale, 1.0)
        codes = (values / scale).clamp(-E4M3_MAXIMUM, E4M3_MAXIMUM).to(E4M3)
        return {"weight": codes, "weight_scale": scale}

    def weights(self) -> dict[str, Any]:
        return _float_arguments(8, "channel")

    def inputs(self, sampled: bool) -> dict[str, Any] | None:
        return _float_arguments(8, "token", dynamic=True)


class Float8Blocks(ServingFormat):
    """E4M3 codes and one float32 scale, a power of two, per 128 x 128 block: the DeepSeek-V3 layout."""

    name = "fp8_block"
    library = "fp8"
    side: ClassVar[int] = 128

    def layout(self, shape: Shape) -> Layout:
        blocks = (-(-shape[0] // self.side), -(-shape[1] // self.side))
        return {
            "weight": Described(E4M3, shape),
            "weight_scale_inv": Described(torch.float32, blocks),
        }

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        quantizer = Float8BlockQuantizer(DType.kFloat8E4M3, columnwise=False, block_scaling_dim=2)
        quantized: Any = quantizer(weight)
        rows, columns = self.layout(tuple(weight.shape))["weight_scale_inv"].shape
        scales = quantized._rowwise_scale_inv[:rows, :columns]
        return {"weight": quantized._rowwise_data.view(E4M3), "weight_scale_inv": scales}

    def settings(self, unquantized: list[str], sampled: bool) -> dict[str, Any]:
        return {
            "quant_method": self.library,
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [self.side, self.side],
            "modules_to_not_convert": unquantized,
        }


class MXFP8(_CompressedTensors):
    """E4M3 codes and one E8M0 scale per 32 elements in a row."""

    name = "mxfp8"
    block = 32
    layout_name = "mxfp8-quantized"

    def layout(self, shape: Shape) -> Layout:
        scales = (shape[0], shape[1] // self.block)
        return {"weight": Described(E4M3, shape), "weight_scale": Described(torch.uint8, scales)}

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        quantizer = MXFP8Quantizer(DType.kFloat8E4M3, columnwise=False)
        quantized: Any = quantizer(_whole_rows(weight, self.block))
        rows, columns = weight.shape[0], weight.shape[1] // self.block
        scales = quantized._rowwise_scale_inv[:rows, :columns]
        return {"weight": quantized._rowwise_data[:rows].view(E4M3), "weight_scale": scales}

    def weights(self) -> dict[str, Any]:
        return _float_arguments(8, "group", group_size=self.block, scale_dtype="torch.uint8")

    def inputs(self, sampled: bool) -> dict[str, Any] | None:
        return self.weights() | {"dynamic": True}


class NVFP4(_CompressedTensors):
    """E2M1 codes, two per byte, one E4M3 scale per 16 elements in a row, and one float32 factor per matrix.

    The factor is 448 x 6 / maximum, by which the block scales are divided. With a sample, inputs are quantized to NVFP4
    with a static factor; otherwise they are multiplied in high precision.
    """

    name = "nvfp4"
    joint = True
    block = 16
    layout_name = "nvfp4-pack-quantized"

    def layout(self, shape: Shape) -> Layout:
        return {
            "weight_packed": Described(torch.uint8, (shape[0], shape[1] // 2)),
            "weight_scale": Described(E4M3, (shape[0], shape[1] // self.block)),
            "weight_global_scale": Described(torch.float32, (1,)),
        }

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        packed, scales, maximum = _nvfp4(weight, self.block)
        factor = torch.where(maximum > 0.0, E4M3_MAXIMUM * E2M1_MAXIMUM / maximum, 1.0)
        return {
            "weight_packed": packed,
            "weight_scale": scales,
            "weight_global_scale": factor.reshape(1),
        }

    def input_scale(self, maximum: float) -> dict[str, Tensor]:
        factor = E4M3_MAXIMUM * E2M1_MAXIMUM / maximum if maximum > 0.0 else 1.0
        return {"input_global_scale": torch.tensor([factor], device="cpu")}

    def weights(self) -> dict[str, Any]:
        return _float_arguments(
            4, "tensor_group", group_size=self.block, scale_dtype="torch.float8_e4m3fn"
        )

    def inputs(self, sampled: bool) -> dict[str, Any] | None:
        return self.weights() | {"dynamic": "local"} if sampled else None


class NVFP4ModelOpt(ServingFormat):
    """`NVFP4` with ModelOpt's export names; factors are the reciprocals, maximum / (448 x 6)."""

    name = "nvfp4_modelopt"
    joint = True
    block = 16
    calibrated = True
    library = "modelopt"
    algorithm = "NVFP4"

    def layout(self, shape: Shape) -> Layout:
        return {
            "weight": Described(torch.uint8, (shape[0], shape[1] // 2)),
            "weight_scale": Described(E4M3, (shape[0], shape[1] // self.block)),
            "weight_scale_2": Described(torch.float32, ()),
        }

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        packed, scales, maximum = _nvfp4(weight, self.block)
        factor = torch.where(maximum > 0.0, maximum / (E4M3_MAXIMUM * E2M1_MAXIMUM), 1.0)
        return {"weight": packed, "weight_scale": scales, "weight_scale_2": factor.reshape(())}

    def input_scale(self, maximum: float) -> dict[str, Tensor]:
        return {
            "input_scale": torch.tensor(
                maximum / (E4M3_MAXIMUM * E2M1_MAXIMUM) or 1.0, device="cpu"
            )
        }

    def settings(self, unquantized: list[str], sampled: bool) -> dict[str, Any]:
        arguments = {"num_bits": 4, "type": "float", "group_size": self.block, "dynamic": False}
        return {
            "quant_method": self.library,
            "quant_algo": self.algorithm,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": arguments,
                    "input_activations": arguments,
                }
            },
            "ignore": unquantized,
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
        }

    def files(self, unquantized: list[str], sampled: bool) -> dict[str, dict[str, Any]]:
        quantization = {
            "quant_algo": self.algorithm,
            "kv_cache_quant_algo": "FP8",
            "group_size": self.block,
            "exclude_modules": unquantized,
        }
        return {"hf_quant_config.json": {"quantization": quantization}}


def _whole_rows(weight: Tensor, count: int) -> Tensor:
    """Pad a weight with zero rows to a multiple of `count` rows, which the quantizer requires."""
    rows = -weight.shape[0] % count
    return torch.nn.functional.pad(weight, (0, 0, 0, rows)) if rows else weight


def _nvfp4(weight: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize to NVFP4: packed codes [out, in / 2], block scales [out, in / 16] in E4M3, and the maximum [1]."""
    quantized: Any = NVFP4Quantizer(columnwise=False)(_whole_rows(weight, block))
    rows, columns = weight.shape[0], weight.shape[1] // block
    scales = quantized._rowwise_scale_inv[:rows, :columns].contiguous().view(E4M3)
    return quantized._rowwise_data[:rows], scales, quantized._amax_rowwise


FORMATS: dict[str, ServingFormat] = {
    form.name: form
    for form in (
        Float8PerTensor(),
        Float8PerChannel(),
        Float8Blocks(),
        MXFP8(),
        NVFP4(),
        NVFP4ModelOpt(),
    )
}
