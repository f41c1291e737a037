"""FP8 attention as requested by the recipe of `autocast` and by environment variables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....common import env
from ....common.memory import Memory
from ....common.recipe import DelayedScaling, Format, Recipe
from ...functions.attention.autograd import Attending
from ...functions.attention.context_parallel.attention import ContextParallelAttention
from ...functions.attention.context_parallel.contiguous import (
    ContiguousAttention,
    UnsupportedStrategy,
)
from ...functions.attention.context_parallel.fp8 import FP8ContextAttention
from ...functions.attention.fp8 import choose_fp8
from ...functions.attention.fp8_attention import AttentionQuantizers, FP8Attention
from ...module.base import TransformerEngineBaseModule
from ...module.layernorm_linear import LayerNormLinear
from ...module.linear import Linear
from ...primitives.attention.call import AttentionCall
from ...quantization import QuantizerRole
from ...quantization.autocast import AutocastState
from ...quantization.family import all_families, find_family


def _from_environment(texts: tuple[str | None, ...]) -> Recipe | None:
    """Return the recipe that NVTE_DPA_FP8_RECIPE names; None for F16. texts are the _VARIABLES values."""
    kind = env.get("NVTE_DPA_FP8_RECIPE")
    common: dict[str, Any] = {
        "fp8_format": Format[str(env.get("NVTE_DPA_FP8_FORMAT"))],
        "fp8_dpa": env.flag("NVTE_DPA_FP8_RECIPE_DPA"),
        "fp8_mha": env.flag("NVTE_DPA_FP8_RECIPE_MHA"),
    }
    if kind == "DelayedScaling":
        return DelayedScaling(
            amax_history_len=int(env.get("NVTE_DPA_FP8DS_AMAX_HISTLEN") or 1),
            amax_compute_algo=str(env.get("NVTE_DPA_FP8DS_AMAX_ALGO")),
            reduce_amax=env.flag("NVTE_DPA_FP8DS_REDUCE_AMAX"),
            **common,
        )
    chosen: list[Any] = [
        family.recipe for family in all_families() if family.recipe.__name__ == kind
    ]
    return chosen[0](**common) if chosen else None


_VARIABLES = (
    "NVTE_DPA_FP8_RECIPE",
    "NVTE_DPA_FP8_FORMAT",
    "NVTE_DPA_FP8_RECIPE_DPA",
    "NVTE_DPA_FP8_RECIPE_MHA",
    "NVTE_DPA_FP8DS_AMAX_HISTLEN",
    "NVTE_DPA_FP8DS_AMAX_ALGO",
    "NVTE_DPA_FP8DS_REDUCE_AMAX",
)
_requested_recipe = env.watch(_VARIABLES[0])
_requested_backward = env.watch("NVTE_FP8_DPA_BWD")
_RECIPES: Memory[tuple[str | None, ...], Recipe | None] = Memory(_from_environment, 64)


def attention_recipe(recipe: Recipe | None) -> Recipe | None:
    """Return the recipe for an attention under the recipe of its layers; None without FP8 attention."""
    if recipe is None:
        return None
    if _requested_recipe() is not None and env.get(_VARIABLES[0]):
        recipe = _RECIPES[env.texts(_VARIABLES)]
    # A recipe of a caller may lack the two fields.
    if getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False):
        return recipe
    return None


def outputs_codes(state: AutocastState) -> bool:
    """Return whether an attention's projections pass it codes and take its output as codes (fp8_mha).

    A compiled graph has no quantized tensors between its modules.
    """
    if not getattr(state.recipe, "fp8_mha", False) or torch.compiler.is_compiling():
        return False
    recipe = attention_recipe(state.recipe)
    return recipe is not None and recipe is state.recipe and find_family(recipe).kind == "fp8"


def projects_codes(projection: Linear | LayerNormLinear, state: AutocastState, x: Tensor) -> bool:
    """Return whether a projection of x computes in FP8, so that its output slot can produce codes, row-wise only.

    False under delayed scaling, whose scales depend on the values that a slot has seen: compiled calls and calls
    with a cache use the attention's own slot, so all calls have to. False in training with a 16-bit backward pass,
    which would dequantize the codes: on an H200 (2 sequences of 2048, 32 query and 8 key heads of 128) both layer
    passes take 1.94 ms instead of 1.76 with codes, while a forward pass alone takes 0.50 instead of 0.55.
    """
    assert state.recipe is not None
    if find_family(state.recipe).follows_history or (
        projection.training and not env.flag("NVTE_FP8_DPA_BWD")
    ):
        return False
    extents = (projection.in_features, projection.out_features)
    (product,) = projection.quantizable_products(state, x, (extents,))
    if product.output.is_identity:
        return False
    # Attention contracts the head size: no product reads these codes column-wise.
    product.output.set_usage(columnwise=False)
    return True


def find_requested_backward(bf16_backward: bool | None) -> Any:
    """Return the requested backward pass: False for high precision, True for FP8, None for the faster one."""
    if bf16_backward:
        return False
    return None if _requested_backward() is None else env.get("NVTE_FP8_DPA_BWD")


def scaling_kind(recipe: Recipe) -> str:
    """Return "delayed", "current", "mxfp8" or "block".

    Args:
        recipe: Attention recipe.

    Raises:
        ValueError: The tensors of the recipe are not FP8.
    """
    scaling = find_family(recipe).attention
    if scaling is not None:
        return scaling
    raise ValueError(
        f"{type(recipe).__name__} has no FP8 attention; set NVTE_DPA_FP8_RECIPE=DelayedScaling or "
        "Float8CurrentScaling with NVTE_DPA_FP8_RECIPE_DPA=1, or leave fp8_dpa and fp8_mha False"
    )


def fp8_attention(
    layer: TransformerEngineBaseModule,
    state: AutocastState,
    call: AttentionCall,
    backend: Any,
    fp8_output: bool,
    requested: bool | None,
) -> tuple[Attending, FP8Attention]:
    """Build the FP8 attention for a call with the quantizers of a layer, and its part on this rank.

    Args:
        layer: The layer, which owns the quantizer state.
        state: autocast state, with the attention recipe.
        call: The attention.
        backend: Backend of the call in 16 bits, or its division among context-parallel ranks.
        fp8_output: Return a Float8Tensor.
        requested: Result from `find_requested_backward`.
    """
    if isinstance(backend, ContiguousAttention):
        raise UnsupportedStrategy(
            "NO_LOAD_BALANCE with FP8 attention; set fp8_dpa and fp8_mha to False"
        )
    shared = isinstance(backend, ContextParallelAttention)
    of_rank = backend.inner_call if shared else call
    assert state.recipe is not None
    scaling = scaling_kind(state.recipe)
    products, active = layer._product_quantizers(state), layer.numerics.cached.recipe
    direct = scaling == "delayed" and active is not None and products is active.products
    fp8 = FP8Attention(
        of_rank,
        scaling,
        AttentionQuantizers.of(*products),
        layer.fp8_meta["scaling_fwd"] if direct else None,
        choose_fp8(of_rank, scaling, requested),
        fp8_output,
        layer._scale_update(state, of_rank.needs_gradient),
    )
    return (FP8ContextAttention(backend, fp8, requested, state) if shared else fp8), fp8


def attention_roles(name: str, fwd: bool, num_quantizers: int) -> list[QuantizerRole | None]:
    """Quantizer roles for an attention's products.

    All slots of a product have the same role as the slot that the attention uses. The output and
    the input gradients belong to no layer: their roles have no module_type.
    """
    qkv, softmax, grad_output, grad_softmax = (
        QuantizerRole("dpa", tensor, name) for tensor in ("qkv", "s", "do", "dp")
    )
    if fwd:
        tensors = (qkv, QuantizerRole(name=f"{name}.dpa_output"), softmax)
    else:
        tensors = (QuantizerRole(name=f"{name}.dpa_grad_input"), grad_output, grad_softmax)
    return [role for role in tensors for _ in range(num_quantizers // len(tensors))]
