"""scaled_dot_product_attention of a module, computed by DotProductAttention while the module's forward pass runs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ....common.recipe import Recipe
from ...quantization.autocast import autocast
from ..huggingface import masks, sdpa
from ..huggingface.core import DTYPES, CoreSettings, attend, cast_to_autocast, find_core
from ..huggingface.injection import InjectedForward

_CORES = "_te_cores"


@dataclass(eq=False)
class EngineAttention:
    """out [b, h, q, d_v] for torch's scaled_dot_product_attention; calls that it does not support run in torch.

    Attributes:
        module: The module whose attention this is.
        recipe: Recipe with FP8 attention; None: the caller's autocast recipe.
    """

    module: nn.Module
    recipe: Recipe | None

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
        if unsupported_call(q, k, v, attn_mask, dropout_p, enable_gqa):
            return sdpa.original()(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        masking = masks.maskless_masking(is_causal, q.shape[2], k.shape[2], None)
        factor: float = q.shape[3] ** -0.5 if scale is None else scale
        settings = CoreSettings(
            q.shape[1], k.shape[1], q.shape[3], v.shape[3], factor, causal=masking.causal
        )
        with nullcontext() if self.recipe is None else autocast(recipe=self.recipe):
            core = find_core(self.module, settings)
            return attend(core, q, k, v, masking).transpose(1, 2)


def unsupported_call(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, grouped: bool
) -> str | None:
    """Reason why a scaled_dot_product_attention call stays in torch; None if the engine computes it."""
    if mask is not None:
        return "called with a mask tensor"
    if dropout:
        return "called with dropout, whose random numbers would differ"
    if not q.ndim == k.ndim == v.ndim == 4:
        return f"called with tensors of {q.ndim} dimensions; 4 are supported"
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        return f"called with {q.dtype}, {k.dtype} and {v.dtype}; one of float32, bfloat16 and float16 is supported"
    if k.shape[1] != v.shape[1] or (k.shape[1] != q.shape[1] and not grouped):
        return "called with numbers of heads that differ"
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        return "called with batches that are broadcast"
    return None


def convert_attention(module: Any, recipe: Recipe | None) -> None:
    """Replace torch's attention in the forward pass of a module.

    The new forward is a bound method: torch.compile guards the identity of other callable objects, so that each layer
    would have a graph of its own.
    """
    attends = recipe is not None and any(
        getattr(recipe, name, False) for name in ("fp8_dpa", "fp8_mha")
    )
    injected = InjectedForward(module.forward, EngineAttention(module, recipe if attends else None))
    module.forward = injected.__call__


def has_engine_attention(module: nn.Module) -> bool:
    """Whether `convert_attention` converted a module."""
    injected = getattr(vars(module).get("forward"), "__self__", None)
    return isinstance(injected, InjectedForward) and isinstance(
        injected.replacement, EngineAttention
    )


def restore_attention(module: nn.Module) -> None:
    """Undo `convert_attention`."""
    del vars(module)["forward"]
    vars(module).pop(_CORES, None)


def unsupported_module(module: nn.Module) -> str | None:
    """Reason why the attention of a module cannot be replaced; None if it can."""
    if "forward" in vars(module):
        return "its forward was replaced"
    name = sdpa.find_imported_name(module)
    if name is not None:
        return (
            f"its file imports scaled_dot_product_attention as {name}; call torch.nn.functional's"
        )
    return None
