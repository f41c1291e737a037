"""The element type and its largest magnitude that a recipe gives to the tensors of one pass."""

from __future__ import annotations

import torch

from ...common.recipe import Format, Recipe
from ..constants import DType


def _is_e4m3(fp8_recipe: Recipe, fprop_tensor: bool) -> bool:
    format = fp8_recipe.fp8_format
    return format is Format.E4M3 or (format is Format.HYBRID and fprop_tensor)


def get_fp8_te_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> DType:
    """E4M3, except E5M2 for the backward pass of HYBRID."""
    return DType.kFloat8E4M3 if _is_e4m3(fp8_recipe, fprop_tensor) else DType.kFloat8E5M2


def get_fp8_torch_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> torch.dtype:
    """The same as a torch dtype."""
    return torch.float8_e4m3fn if _is_e4m3(fp8_recipe, fprop_tensor) else torch.float8_e5m2


def get_fp4_te_dtype(fp4_recipe: Recipe) -> DType:
    """E2M1, the one 4-bit element type."""
    return DType.kFloat4E2M1


def get_fp8_max(fp8_recipe: Recipe, fprop_tensor: bool = True) -> float:
    """448 for E4M3, 57344 for E5M2."""
    largest = fp8_recipe.fp8_format.value
    return largest.max_fwd if fprop_tensor else largest.max_bwd
