"""Other libraries' quantized checkpoints, read as checkpoints in high precision.

`dequantized(shards, settings)` replaces the codes and scales of each weight by the weight. A weight's layout
follows from the names and dtypes of its tensors, block sizes from the settings: E4M3 or E5M2 codes with scales per
tensor, row, block or group, MXFP8, MXFP4 and NVFP4, by compressed-tensors, DeepSeek's layout and ModelOpt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...common.checks import described as described_value
from ..primitives.quantize.encodings import decode_e2m1, e8m0_to_float, unpack_fp4, widen
from .safetensors import Described, Shards, read_json

LIBRARIES = ("compressed-tensors", "fp8", "modelopt")
SETTINGS, MODELOPT_FILE = "quantization_config", "hf_quant_config.json"

CODES, PACKED = "weight", "weight_packed"
SCALES = ("weight_scale", "weight_scale_inv")
FACTORS = ("weight_global_scale", "weight_scale_2")
# Input and cache scales, which only a server uses.
SERVING_SCALES = (
    "input_scale",
    "input_global_scale",
    "output_scale",
    "q_scale",
    "k_scale",
    "v_scale",
)

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class StoredWeight:
    """The tensors of one quantized weight.

    Attributes:
        codes: Float8 codes [out, in], or two E2M1 codes per byte [out, in / 2].
        scales: One value, one per row, or one per block.
        factor: Second scale of the matrix: block scales are divided by `weight_global_scale` and
            multiplied by `weight_scale_2`.
        shape: [out, in].
        block: Elements per scale along each dimension.
    """

    codes: str
    scales: str
    factor: str | None
    shape: tuple[int, ...]
    block: tuple[int, int]

    def read(self, shards: Shards) -> Tensor:
        """Decode the weight in float32."""
        scales = _float_scales(shards.read(self.scales))
        if self.factor is not None:
            factor = shards.read(self.factor).float().reshape(())
            scales = scales / factor if self.factor.endswith(FACTORS[0]) else scales * factor
        codes = shards.read(self.codes)
        if codes.dtype == torch.uint8:
            values = decode_e2m1(unpack_fp4(codes))
        else:
            values = widen(codes)
        if scales.numel() == 1:
            return values * scales.reshape(())
        for dimension, size in enumerate(self.block):
            scales = scales.repeat_interleave(size, dim=dimension) if size > 1 else scales
        return values * scales[: self.shape[0], : self.shape[1]]


@dataclass(frozen=True)
class QuantizedShards:
    """Tensors in a quantized folder as `Shards`: `files` lists them by the names in the unquantized checkpoint."""

    shards: Shards
    weights: Mapping[str, StoredWeight]
    files: Mapping[str, Any]
    dtype: torch.dtype

    @property
    def folder(self) -> Any:
        return self.shards.folder

    def described(self, name: str) -> Described:
        if name in self.weights:
            return Described(self.dtype, self.weights[name].shape)
        return self.shards.described(name)

    def read(self, name: str) -> Tensor:
        if name in self.weights:
            return self.weights[name].read(self.shards).to(self.dtype)
        return self.shards.read(name)


def dequantized(shards: Shards, settings: Mapping[str, Any]) -> Shards | QuantizedShards:
    """Present a checkpoint's quantized weights in high precision; one without quantization is returned unchanged.

    Args:
        shards: The files.
        settings: Their config.json.

    Raises:
        ValueError: The quantization library or layout is unsupported.
    """
    quantization = settings.get(SETTINGS)
    modelopt = shards.folder / MODELOPT_FILE
    if quantization is None and modelopt.is_file():
        quantization = {"quant_method": "modelopt", **read_json(modelopt).get("quantization", {})}
    if quantization is None:
        return shards
    source = f"{shards.folder}: {SETTINGS}"
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method not in LIBRARIES:
        raise ValueError(
            f"{source} has quant_method={described_value(method)}, which is not read; {', '.join(LIBRARIES)} are. "
            "Convert the unquantized checkpoint"
        )
    weights: dict[str, StoredWeight] = {}
    parts: set[str] = set()
    for name in shards.files:
        base, _, suffix = name.rpartition(".")
        if suffix == PACKED or (suffix == CODES and shards.described(name).dtype.itemsize == 1):
            stored = _find_stored_weight(shards, base, name, quantization, source)
            weights[f"{base}.{CODES}"] = stored
            parts |= {stored.codes, stored.scales, stored.factor or stored.codes}
        elif suffix in SERVING_SCALES:
            parts.add(name)
    unquantized = {name: file for name, file in shards.files.items() if name not in parts}
    left = [
        name
        for name in unquantized
        if name.rpartition(".")[2] in (*SCALES, *FACTORS, "weight_zero_point")
    ]
    if left:
        raise ValueError(
            f"{source}: {left[0]} belongs to no quantized weight; download the checkpoint again"
        )
    return QuantizedShards(shards, weights, unquantized | dict.fromkeys(weights), _dtype(settings))


def _find_stored_weight(
    shards: Shards, base: str, codes: str, quantization: Mapping[str, Any], source: str
) -> StoredWeight:
    """Find the tensors of the weight whose codes are the tensor `codes`, and its block shape."""
    found = [f"{base}.{suffix}" for suffix in SCALES if f"{base}.{suffix}" in shards.files]
    factors = [f"{base}.{suffix}" for suffix in FACTORS if f"{base}.{suffix}" in shards.files]
    stored = shards.described(codes)
    four_bits = stored.dtype == torch.uint8
    if len(found) != 1 or len(stored.shape) != 2 or not (four_bits or stored.dtype in _FLOAT8):
        raise ValueError(
            f"{source}: {codes}, {stored.dtype} {list(stored.shape)} with {len(found)} tensors of scales, is not "
            "read; float8 codes and packed FP4 codes [out, in] with one tensor of scales are"
        )
    rows, columns = stored.shape[0], stored.shape[1] * (2 if four_bits else 1)
    shape = shards.described(found[0]).shape
    configured = _block_size(quantization)
    if configured is not None and len(shape) == 2:
        block = configured
    elif math.prod(shape) == 1:
        block = (rows, columns)
    elif len(shape) == 1 or shape[1] == 1:
        block = (1, columns)
    else:
        block = (1, -(-columns // max(1, shape[1])))
    counts = (-(-rows // block[0]), -(-columns // block[1]))
    fits = math.prod(counts) == 1 if math.prod(shape) == 1 else shape == counts[: len(shape)]
    if not fits:
        raise ValueError(
            f"{source}: {found[0]} is {list(shape)}, which does not fit {codes} of [{rows}, {columns}] in blocks of "
            f"{list(block)}; download the checkpoint again"
        )
    return StoredWeight(codes, found[0], factors[0] if factors else None, (rows, columns), block)


def _block_size(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns in two-dimensional blocks, from the settings of either library; None without such blocks."""
    block = quantization.get("weight_block_size")
    for group in quantization.get("config_groups", {}).values():
        block = block or group.get("weights", {}).get("block_structure")
    return None if block is None else (int(block[0]), int(block[1]))


def _float_scales(scales: Tensor) -> Tensor:
    """Scales in float32, with at least one dimension per matrix dimension where there are several."""
    if scales.dtype in _EXPONENTS:
        scales = e8m0_to_float(scales.view(torch.uint8))
    scales = scales.float()
    return scales[:, None] if scales.dim() == 1 and scales.numel() > 1 else scales


def _dtype(settings: Mapping[str, Any]) -> torch.dtype:
    """Dtype of the decoded weights: as in config.json, by default bfloat16."""
    named = getattr(
        torch, str(settings.get("dtype") or settings.get("torch_dtype") or "bfloat16"), None
    )
    return named if isinstance(named, torch.dtype) else torch.bfloat16
