"""heads, groups, size = layout(attention): query, key and value heads, from an attention's projections.

Read once, when a model is prepared. A projection is a Linear, a module with only a weight,
transformers' Conv1D, or a wrapper around these; it may be on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# (query, key, value) as three modules; one module for all three.
SEPARATE = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"))
FUSED = ("qkv_proj", "query_key_value", "c_attn", "qkv", "Wqkv", "W_pack")

_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
_GROUPS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_SIZE = ("head_dim", "attention_head_size", "head_size")
_SCALE = ("scaling", "scale", "softmax_scale")
# Modules that contain the projection that they modify: Gemma's clipped Linear, PEFT's adapters.
_WRAPPED = ("linear", "base_layer")


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """size: query and key head size; groups: key and value heads; window: keys that a query sees, its own included."""

    heads: int
    groups: int
    size: int
    size_v: int
    scale: float
    window: int | None

    @property
    def repeats(self) -> int:
        """Query heads that read the same keys."""
        return self.heads // self.groups


def module_layout(module: torch.nn.Module) -> HeadLayout | None:
    """Return the layout of an attention module; None for other modules and unknown projections."""
    layout = _separate_layout(module) or _fused_layout(module)
    if layout is None:
        return None
    heads, groups, size, size_v = layout
    if min(layout) < 1 or heads % groups:
        return None
    scale = next(
        (s for name in _SCALE if isinstance(s := getattr(module, name, None), float)), None
    )
    return HeadLayout(
        heads, groups, size, size_v, size**-0.5 if scale is None else scale, _window(module)
    )


def _window(module: torch.nn.Module) -> int | None:
    """Return the module's sliding window; None also for a module that declares full attention in a windowed model."""
    window = getattr(module, "sliding_window", None)
    if not isinstance(window, int) or window <= 0:
        return None
    kinds: Any = getattr(getattr(module, "config", None), "layer_types", None)
    index: Any = getattr(module, "layer_idx", None)
    listed = isinstance(kinds, list | tuple) and isinstance(index, int) and index < len(kinds)
    unlimited = getattr(module, "is_sliding", None) is False or (
        listed and kinds[index] == "full_attention"
    )
    return None if unlimited else window


def out_features(projection: object) -> int | None:
    """Return the output features of a projection, from its attributes, its weight, or the module that it wraps."""
    if not isinstance(projection, torch.nn.Module):
        return None
    for name in ("out_features", "nf"):
        features = getattr(projection, name, None)
        if isinstance(features, int):
            return features
    for name in _WRAPPED:
        inner = projection._modules.get(name)
        if inner is not None:
            return out_features(inner)
    weight = getattr(projection, "weight", None)
    return weight.shape[0] if isinstance(weight, torch.Tensor) and weight.ndim == 2 else None


def _separate_layout(module: torch.nn.Module) -> tuple[int, int, int, int] | None:
    for names in SEPARATE:
        widths = [out_features(module._modules.get(name)) for name in names]
        q, k, v = widths
        if q is None or k is None or v is None:
            continue
        size = _stated_number(module, _SIZE)
        heads = _stated_number(module, _HEADS)
        if size is None:
            if heads is None or q % heads:
                return None
            size = q // heads
        if q % size or k % size:
            return None
        # Projections have the share of a tensor-parallel rank; attributes and configs describe the whole layer.
        heads, groups = q // size, k // size
        return (heads, groups, size, v // groups) if groups and v % groups == 0 else None
    return None


def _fused_layout(module: torch.nn.Module) -> tuple[int, int, int, int] | None:
    for name in FUSED:
        width = out_features(module._modules.get(name))
        heads = _stated_number(module, _HEADS)
        if width is None or heads is None:
            continue
        groups = _stated_number(module, _GROUPS) or heads
        size = _stated_number(module, _SIZE) or width // (heads + 2 * groups)
        if width == (heads + 2 * groups) * size:
            return heads, groups, size, size
    return None


def _stated_number(module: torch.nn.Module, names: tuple[str, ...]) -> int | None:
    """Return a number under one of these names in the module, or otherwise in its config."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value: Any = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None
