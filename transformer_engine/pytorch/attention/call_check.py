"""What an attention layer is called with is checked before its first projection: a refused call records nothing.

Projections record amaxes, caches take keys, dropout draws from generators; the core attention, which knows most of what
can be wrong, comes behind the first of them. So its checks run once more ahead, on the shapes that the projections will
give. A call whose shapes and options were met before is not looked at again, except for numbers in tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common import env
from ...common.checks import described
from ...common.dispatch import undisturbed
from ...common.memory import Memory
from ..primitives.rope import RopeSpec
from ..quantization.autocast import AutocastState
from ..runtime.checks import floating
from ..runtime.device import autocast_dtype
from .dot_product_attention import DotProductAttention
from .dot_product_attention.arguments import check_angles, check_cache_kind
from .dot_product_attention.fp8_recipe import attention_recipe, scaling_of
from .dot_product_attention.plain import check_plain
from .dot_product_attention.sequences import demand_lengths
from .dot_product_attention.settings import NOTHING_GIVEN, CallArguments, Config, Described
from .rotation import Rotation, rotation_of

# Calls that passed, before they are all forgotten.
REMEMBERED = 64


class Door(NamedTuple):
    """What a MultiheadAttention's inputs have to be, and what its projections make of them.

    queries, groups, size   heads of a tensor-parallel rank;  ranks  that share the tokens of a sequence
    """

    attention_type: str
    attn_mask_type: str
    qkv_format: str
    interleaved_angles: bool
    hidden_size: int
    queries: int
    groups: int
    size: int
    ranks: int

    @classmethod
    def of(cls, layer: Any) -> Door:
        """That of a layer."""
        heads = layer.heads
        return cls(
            layer.attention_type,
            layer.attn_mask_type,
            layer.qkv_format,
            layer.rotary_pos_interleaved,
            layer.hidden_size,
            heads.queries,
            heads.groups,
            heads.size,
            layer.tp_size if layer.sequence_parallel else 1,
        )


class Passed(set[Any]):
    """Keys of calls of one layer that were found right, emptied before it holds more than REMEMBERED."""

    def keep(self, key: Any) -> None:
        """Remember that the call of a key is right."""
        if len(self) >= REMEMBERED:
            self.clear()
        self.add(key)


def check_variant(
    fuse_wgrad_accumulation: bool, fuse_qkv_params: bool, return_layernorm_output: bool, input_layernorm: bool
) -> None:
    """ValueError for options of a constructor that need one another."""
    if fuse_wgrad_accumulation and not fuse_qkv_params:
        raise ValueError(
            "fuse_wgrad_accumulation=True needs one weight a projection; set fuse_qkv_params=True"
        )
    if return_layernorm_output and not input_layernorm:
        raise ValueError(
            "return_layernorm_output=True without input_layernorm=True; there is no norm to return"
        )


def check_layer_call(
    door: Door,
    core: Any,
    passed: Passed,
    hidden_states: Any,
    encoder_output: Any,
    arguments: CallArguments,
    rotation: Rotation | None,
    state: AutocastState,
) -> None:
    """Raise what the call would be refused with, before anything is recorded; core: the core attention."""
    if (door.attention_type == "cross") != (encoder_output is not None):
        want = "needs" if door.attention_type == "cross" else "takes no"
        given = "None" if encoder_output is None else described(encoder_output)
        raise ValueError(
            f"attention_type={door.attention_type!r} {want} encoder_output, which is {given}; match the two"
        )
    if torch.compiler.is_compiling():
        return
    if arguments.inference_params is not None:
        check_cache_kind(arguments.inference_params)
    if state.enabled and (recipe := attention_recipe(state.recipe)) is not None:
        scaling_of(recipe)
    if arguments is NOTHING_GIVEN and encoder_output is None and rotation is None:
        # A caller may have put another core in the place of ours.
        ours = type(hidden_states) in _PLAIN_TENSORS and isinstance(core, DotProductAttention)
        if ours and hidden_states.is_floating_point():
            _check_plain(door, core.config(), hidden_states)
            return
    _check(door, core, passed, hidden_states, encoder_output, arguments, rotation)


_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)

Key = tuple[Any, ...]


def _check_plain(door: Door, config: Config, x: Tensor) -> None:
    """The check of a self attention to a tensor alone: one key, one look-up."""
    device = x.device
    key = (
        door,
        config,
        x.shape,
        x.dtype,
        device,
        torch.is_grad_enabled(),
        autocast_dtype(device.type),
        torch.are_deterministic_algorithms_enabled(),
        env.generation(),
    )
    if undisturbed():
        _PLAIN[key]
    else:
        _judge_plain(key)


def _judge_plain(key: Key) -> None:
    door, config, shape, dtype, device, gradient, lowered, deterministic, generation = key
    x = Described(shape, dtype, device, gradient)
    _check_inputs(door, x, None, bool(lowered))
    q, k = _projected(door, x, door.queries, lowered), _projected(door, x, door.groups, lowered)
    check_plain(config, q, k, k, deterministic, generation)


_PLAIN: Memory[Key, None] = Memory(_judge_plain, 1024)


def _check(
    door: Door,
    core: Any,
    passed: Passed,
    hidden_states: Any,
    encoder_output: Any,
    arguments: CallArguments,
    rotation: Rotation | None,
) -> None:
    """The check of any call, remembered by the kinds of its arguments."""
    if not isinstance(hidden_states, Tensor) or hidden_states.is_meta:
        _check_tensors(door, hidden_states, encoder_output)
    try:
        key = _key(door, core, hidden_states, encoder_output, arguments)
        known = key in passed
    except TypeError:  # an argument that cannot be hashed, so of a wrong type
        key, known = None, False
    lengths = _uses_lengths(door, arguments)
    if known and rotation is None and not lengths:
        return
    if not known:
        _check_tensors(door, hidden_states, encoder_output)
    q, k, v = _projections(door, hidden_states, encoder_output)
    if not known:
        if isinstance(core, DotProductAttention):
            core.check_call(q, k, v, arguments)
        if key is not None:
            passed.keep(key)
    elif lengths:
        demand_lengths(
            (q, k),
            door.qkv_format,
            arguments.cu_seqlens,
            arguments.cu_seqlens_padded,
            arguments.max_seqlens,
        )
    if rotation is not None:
        rotation.check(q, k)


def rotation_of_call(
    door: Door, rotary_pos_emb: Tensor | tuple[Tensor, Tensor], arguments: CallArguments
) -> Rotation:
    """How queries and keys turn; TypeError or ValueError where the angles are none, or do not reach."""
    check_angles(rotary_pos_emb)
    if arguments.inference_params is not None:
        check_cache_kind(arguments.inference_params)
    return rotation_of(
        rotary_pos_emb,
        RopeSpec(door.qkv_format, door.interleaved_angles),
        door.attention_type == "self",
        arguments.inference_params,
        arguments.cu_seqlens,
        arguments.cu_seqlens_padded,
    )


def _uses_lengths(door: Door, a: CallArguments) -> bool:
    """Are there cumulative lengths that the attention reads?"""
    if a.cu_seqlens[0] is None or a.inference_params is not None:
        return False
    name = door.attn_mask_type if a.attn_mask_type is None else a.attn_mask_type
    return door.qkv_format == "thd" or "padding" in str(name)


def _key(door: Door, core: Any, x: Any, encoder_output: Any, a: CallArguments) -> Key:
    """What the checks depend on, apart from numbers in tensors."""
    cache, mask = a.inference_params, a.attention_mask
    tensors = (encoder_output, *a.cu_seqlens, *a.cu_seqlens_padded, a.bias, a.alibi_slopes)
    device = x.device
    return (
        door,
        core.config() if isinstance(core, DotProductAttention) else None,
        x.shape,
        x.dtype,
        device,
        tuple([t if t is None else _facts(t) for t in tensors]),
        tuple(map(_facts, mask)) if isinstance(mask, tuple) else _facts(mask),
        a[4:9],
        None if cache is None else cache.step_facts(),
        a.pad_between_seqs,
        torch.is_grad_enabled(),
        autocast_dtype(device.type),
        torch.are_deterministic_algorithms_enabled(),
        env.generation(),
    )


def _facts(x: Any) -> Any:
    return (x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x


def _check_tensors(door: Door, hidden_states: Any, encoder_output: Any) -> None:
    """ValueError or TypeError unless the inputs are tensors with values, [.., hidden] as qkv_format says."""
    given = {"hidden_states": hidden_states}
    if door.attention_type == "cross":
        given["encoder_output"] = encoder_output
    for name, x in given.items():
        floating(name, x)
    _check_inputs(door, hidden_states, encoder_output, autocast_dtype(hidden_states.device.type) is not None)


def _check_inputs(door: Door, hidden_states: Any, encoder_output: Any, lowered: bool) -> None:
    """ValueError unless floating-point tensors, or descriptions of them, are [.., hidden] as qkv_format says."""
    given = {"hidden_states": hidden_states}
    if door.attention_type == "cross":
        given["encoder_output"] = encoder_output
    axes = len(door.qkv_format) - 1
    for name, x in given.items():
        if x.ndim != axes or x.shape[-1] != door.hidden_size:
            raise ValueError(
                f"{name} is {list(x.shape)}, qkv_format={door.qkv_format!r} needs {axes} axes that end in "
                f"hidden_size={door.hidden_size}"
            )
        if x.device.type == "meta":
            raise ValueError(f"{name} is on {x.device} and has no values; make it on the layer's device")
        if (x.dtype != hidden_states.dtype and not lowered) or x.device != hidden_states.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}, hidden_states {hidden_states.dtype} on {hidden_states.device}; "
                "convert"
            )


def _projections(
    door: Door, hidden_states: Tensor, encoder_output: Tensor | None
) -> tuple[Described, Described, Described]:
    """q, k, v as the projections will give them."""
    device = hidden_states.device
    lowered = autocast_dtype(device.type)
    gradient = torch.is_grad_enabled()
    keys_from = hidden_states if encoder_output is None else encoder_output
    described_as = (
        Described(x.shape, hidden_states.dtype, device, gradient) for x in (hidden_states, keys_from)
    )
    queries, keys = described_as
    k = _projected(door, keys, door.groups, lowered)
    return _projected(door, queries, door.queries, lowered), k, k


def _projected(door: Door, x: Described, heads: int, lowered: torch.dtype | None) -> Described:
    """x [.., hidden] by heads; those of a sequence-parallel layer gather the ranks' tokens."""
    shape = torch.Size((x.shape[0] * door.ranks, *x.shape[1:-1], heads, door.size))
    return x._replace(shape=shape, dtype=lowered or x.dtype)
