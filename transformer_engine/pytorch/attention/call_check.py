"""What an attention layer is called with is checked before its first projection: a refused call records nothing.

Projections record amaxes, caches take keys, dropout draws from generators; the core attention, which knows most of what
can be wrong, comes behind the first of them. So its checks run once more ahead, on the shapes that the projections will
give. A call whose shapes and options were met before is not looked at again, except for numbers in tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...common import env
from ...common.bounded import Bounded
from ..quantization.autocast import AutocastState
from .dot_product_attention import DotProductAttention
from .dot_product_attention.call import CHOICE_VARIABLES, Described
from .dot_product_attention.fp8 import attention_recipe, scaling_of
from .dot_product_attention.prepare import CallArguments
from .dot_product_attention.sequences import demand_lengths
from .rotation import Rotation

if TYPE_CHECKING:
    from .multi_head_attention import MultiheadAttention

REMEMBERED = 64


Checked = Bounded[Any, bool]


def check_layer_call(
    layer: MultiheadAttention,
    checked: Checked,
    hidden_states: Any,
    encoder_output: Any,
    arguments: CallArguments,
    rotation: Rotation | None,
    state: AutocastState,
) -> None:
    """Raise what the call would be refused with, before anything is recorded; checked: calls that passed."""
    if torch.compiler.is_compiling():
        return
    core = layer.core_attention
    if state.enabled and (recipe := attention_recipe(state.recipe)) is not None:
        scaling_of(recipe)
    if not isinstance(hidden_states, Tensor):
        _check_inputs(layer, hidden_states, encoder_output)
    try:
        key = _key(layer, hidden_states, encoder_output, arguments)
        passed = key in checked
    except TypeError:  # an argument that cannot be hashed, so of a wrong type
        key, passed = None, False
    lengths = _uses_lengths(layer, arguments)
    if passed and rotation is None and not lengths:
        return
    if not passed:
        _check_inputs(layer, hidden_states, encoder_output)
    q, k, v = _projections(layer, hidden_states, encoder_output)
    if not passed:
        if isinstance(core, DotProductAttention):  # a caller may have put another in its place
            core.check_call(q, k, v, arguments)
        if key is not None:
            checked.keep(key, True)
    elif lengths:
        demand_lengths(
            (q, k),
            layer.qkv_format,
            arguments.cu_seqlens,
            arguments.cu_seqlens_padded,
            arguments.max_seqlens,
        )
    if rotation is not None:
        rotation.check(q, k)


def _uses_lengths(layer: MultiheadAttention, a: CallArguments) -> bool:
    """Are there cumulative lengths that the attention reads?"""
    if a.cu_seqlens[0] is None or a.inference_params is not None:
        return False
    name = layer.attn_mask_type if a.attn_mask_type is None else a.attn_mask_type
    return layer.qkv_format == "thd" or "padding" in str(name)


def _key(layer: MultiheadAttention, x: Any, encoder_output: Any, a: CallArguments) -> tuple[Any, ...]:
    """What the checks depend on, apart from numbers in tensors."""
    cache, mask = a.inference_params, a.attention_mask
    tensors = (encoder_output, *a.cu_seqlens, *a.cu_seqlens_padded, a.bias, a.alibi_slopes)
    device = x.device
    return (
        x.shape,
        x.dtype,
        device,
        tuple([t if t is None else _facts(t) for t in tensors]),
        tuple(map(_facts, mask)) if isinstance(mask, tuple) else _facts(mask),
        a[4:9],
        None if cache is None else cache.step_facts(),
        a.pad_between_seqs,
        layer.qkv_format,
        layer.training,
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
        torch.are_deterministic_algorithms_enabled(),
        env.stored(CHOICE_VARIABLES),
    )


def _facts(x: Any) -> Any:
    return (x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x


def _check_inputs(layer: MultiheadAttention, hidden_states: Any, encoder_output: Any) -> None:
    """ValueError unless both are tensors [.., hidden] as qkv_format says."""
    given = {"hidden_states": hidden_states}
    if layer.attention_type == "cross":
        given["encoder_output"] = encoder_output
    axes = len(layer.qkv_format) - 1
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; give a tensor [.., {layer.hidden_size}]")
        if x.ndim != axes or x.shape[-1] != layer.hidden_size:
            raise ValueError(
                f"{name} is {list(x.shape)}, qkv_format={layer.qkv_format!r} needs {axes} axes that end in "
                f"hidden_size={layer.hidden_size}"
            )
        mixed = x.dtype != hidden_states.dtype and not torch.is_autocast_enabled(x.device.type)
        if mixed or x.device != hidden_states.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}, hidden_states {hidden_states.dtype} on {hidden_states.device}; "
                "convert"
            )


def _projections(
    layer: MultiheadAttention, hidden_states: Tensor, encoder_output: Tensor | None
) -> tuple[Described, Described, Described]:
    """q, k, v as the projections will give them; those of a sequence-parallel layer gather the ranks' tokens."""
    keys_from = hidden_states if encoder_output is None else encoder_output
    ranks = layer.tp_size if layer.sequence_parallel else 1
    device = hidden_states.device
    lowered = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if lowered else hidden_states.dtype
    gradient = torch.is_grad_enabled()

    def projected(x: Tensor, heads: int) -> Described:
        leading = (x.shape[0] * ranks, *x.shape[1:-1])
        return Described(torch.Size((*leading, heads, layer.heads.size)), dtype, device, gradient)

    keys = projected(keys_from, layer.heads.groups)
    return projected(hidden_states, layer.heads.queries), keys, keys
