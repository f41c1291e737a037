"""inject_te_attention(model): attention layers compute scaled_dot_product_attention by DotProductAttention.

A layer's forward remains its library's. While it runs, torch's scaled_dot_product_attention is replaced by
`Replacement`, which passes supported calls to DotProductAttention and all others to torch, and counts both (`stats`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ....common.checks import described
from ...attention import DotProductAttention
from . import masks, sdpa
from .core import DTYPES, Cores, CoreSettings, attend, cast_to_autocast, count
from .layouts import HeadLayout, module_layout

logger = logging.getLogger(__name__)

# Scales with a smaller difference are equal numbers, rounded differently.
SCALE_TOLERANCE = 1e-6


def inject_te_attention(model: torch.nn.Module) -> None:
    """Inject into every attention layer in a model, after its weights are loaded and before it is sharded.

    Layers with an `attn_module` are not changed. model._te_attention_injected is True if any layer was changed.

    Args:
        model: Model with Hugging Face Transformers attention layers.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"model={described(model)} is not a torch.nn.Module; give a model, or a layer of one"
        )
    injected = sum([inject_te_attention_into_module(module) for module in list(model.modules())])
    if injected:
        object.__setattr__(model, "_te_attention_injected", True)
        implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
        if isinstance(implementation, str) and implementation not in ("sdpa", "transformer_engine"):
            logger.warning(
                "%s computes its attention as %r, without scaled_dot_product_attention, and nothing changes; call "
                'model.set_attn_implementation("sdpa")',
                type(model).__name__,
                implementation,
            )
    else:
        logger.warning(
            "no attention layer of %s was changed: none has projections of a known layout, such as q_proj, k_proj and "
            'v_proj; transformers\' attn_implementation="transformer_engine" needs none',
            type(model).__name__,
        )


def inject_te_attention_into_module(module: torch.nn.Module) -> bool:
    """Inject into one attention layer; return False for other layers, unknown layouts, and those with attn_module.

    Args:
        module: The attention layer.
    """
    if hasattr(module, "attn_module"):
        return False
    layout = module_layout(module)
    if layout is None:
        return False
    name = sdpa.find_imported_name(module)
    if name is not None:
        logger.warning(
            "%s is not changed: its file imports scaled_dot_product_attention as %s, which cannot be replaced; "
            "change it to call torch.nn.functional.scaled_dot_product_attention",
            type(module).__name__,
            name,
        )
        return False
    replacement = Replacement(layout)
    object.__setattr__(module, "attn_module", replacement.core(0.0, causal=True))
    module.forward = InjectedForward(module.forward, replacement)
    return True


class ForwardWrapper:
    """A module's forward with an operation replaced; an object, so that module copies call their own.

    Args:
        forward: The module's own forward.
        replacement: Function or torch function mode that computes the operation.
    """

    def __init__(self, forward: Any, replacement: Any) -> None:
        self.forward, self.replacement = forward, replacement

    @property
    def __wrapped__(self) -> Any:
        """The function that `inspect.signature` reads; excluded from pickles, which store functions by name."""
        return self.forward


class InjectedForward(ForwardWrapper):
    """A layer's forward with torch's attention replaced by a function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return sdpa.traced(self.replacement, self.forward, *args, **kwargs)
        with sdpa.replaced(self.replacement):
            return self.forward(*args, **kwargs)


@dataclass(eq=False)
class Replacement:
    """out [b, h, q, d_v] of torch's scaled_dot_product_attention for queries, keys and values of one layer."""

    layout: HeadLayout
    cores: Cores = field(default_factory=Cores)
    warned: bool = False

    def core(self, dropout: float, causal: bool) -> DotProductAttention:
        """Return the layer's DotProductAttention with this dropout, for causal masks or for others."""
        a = self.layout
        return self.cores.of(
            CoreSettings(a.heads, a.groups, a.size, a.size_v, a.scale, dropout, causal)
        )

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        q, k, v = cast_to_autocast(query, key, value)
        masking = None
        k, v = self._once(k), self._once(v)
        reason = self._fallback_reason(q, k, v, scale)
        if reason is None:
            if attn_mask is None:
                masking = masks.maskless_masking(
                    is_causal, q.shape[2], k.shape[2], self.layout.window
                )
            elif not is_causal:
                masking = masks.mask_masking(attn_mask, q.shape[0])
            reason = "fallback_mask" if masking is None else None
        count(reason or "te_hits")
        if masking is None or reason is not None:
            return sdpa.original()(
                query,
                key,
                value,
                attn_mask=attn_mask,
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        core = self.core(dropout_p, masking.causal)
        return attend(core, q, k, v, masking).transpose(1, 2)

    def _once(self, x: Tensor) -> Tensor:
        """Return keys or values without the repetitions for the query heads of a group."""
        a = self.layout
        repeated = a.repeats > 1 and x.ndim == 4 and x.shape[1] == a.heads
        return x[:, :: a.repeats] if repeated else x

    def _fallback_reason(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> str | None:
        a = self.layout
        shapes = (q.shape[1:2], k.shape[1:2], v.shape[1:2], q.shape[3:], k.shape[3:], v.shape[3:])
        if (
            q.ndim != 4
            or k.ndim != 4
            or v.ndim != 4
            or q.dtype not in DTYPES
            or not q.dtype == k.dtype == v.dtype
        ):
            return "fallback_input"
        if shapes != ((a.heads,), (a.groups,), (a.groups,), (a.size,), (a.size,), (a.size_v,)):
            return "fallback_input"
        requested = a.size**-0.5 if scale is None else scale
        if abs(requested - a.scale) > SCALE_TOLERANCE:
            if not (self.warned or torch.compiler.is_compiling()):
                self.warned = True
                logger.warning(
                    "scale=%s, the layer was injected with %s, its own; its attention is left to torch. transformers' "
                    'attn_implementation="transformer_engine" takes the scale of every call',
                    requested,
                    self.layout.scale,
                )
            return "fallback_scale_mismatch"
        return None
