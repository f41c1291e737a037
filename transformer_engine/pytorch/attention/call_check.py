"""What an attention layer is called with is checked before its first projection: a refused call records nothing.

Projections record amaxes, caches take keys, dropout draws from generators; the core attention, which knows most of what
can be wrong, comes behind the first of them. So its checks run once more ahead, on the shapes that the projections will
give. What a call is judged by is a key: one that was judged before is not looked at again, except for numbers in
tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common import env
from ...common.dispatch import undisturbed
from ...common.memory import Memory
from ..primitives.attention.choose import check
from ..primitives.rope import Positions, RopeSpec, check_rotation
from ..quantization.autocast import AutocastState
from ..runtime.checks import floating
from ..runtime.device import autocast_dtype
from ..runtime.warn_once import warn_once
from .dot_product_attention import DotProductAttention
from .dot_product_attention.arguments import accepted_angles, check_cache_kind
from .dot_product_attention.facts import described_arguments, facts_of
from .dot_product_attention.fp8_recipe import attention_recipe, scaling_of
from .dot_product_attention.in_order import Judged, in_order
from .dot_product_attention.prepare import Modes, judged
from .dot_product_attention.sequences import Cached, Sequences, demand_lengths
from .dot_product_attention.settings import (
    NOTHING_GIVEN,
    AttentionConfig,
    CallArguments,
    Described,
    described_of,
)
from .layer_settings import LayerConfig, warn_without_norm
from .rotation import Rotation, rotation_of

# Calls of a layer that were found right, before they are all forgotten.
MAX_CALLS = 256


class LayerCall(NamedTuple):
    """The parts of a key.

    config, core    settings of the layer, and of its core attention; core: None where a caller has put another there
    training        the core's
    *_shape, _dtype, _device   of hidden_states
    encoder         encoder_output, described
    turned          shapes of the tables of queries and keys, and the spec, of a rotation that reads no numbers
    gradient        torch's mode;  lowered  torch.autocast's dtype;  deterministic  torch's switch
    environment     env.generation()
    given, cached, same    as in the core's `Call`
    """

    config: LayerConfig
    core: AttentionConfig | None
    training: bool
    x_shape: torch.Size
    x_dtype: torch.dtype
    x_device: torch.device
    gradient: bool
    lowered: torch.dtype | None
    deterministic: bool
    environment: int
    encoder: Described | None = None
    turned: tuple[torch.Size, torch.Size, RopeSpec] | None = None
    given: tuple[Any, ...] | None = None
    cached: Cached | None = None
    same: bool = True


Key = tuple[Any, ...]


def judge(key: Key) -> Sequences | None:
    """The sequences of a call that its core attention will take; None where the core is not ours."""
    call = LayerCall(*key)
    return _judge(call, NOTHING_GIVEN if call.given is None else described_arguments(call.given))


def _judge(call: LayerCall, a: CallArguments) -> Sequences | None:
    qkv, core = _projections_of(call), call.core
    if call.turned is not None:
        *tables, spec = call.turned
        for heads, shape in zip(qkv, tables, strict=False):
            angles: Any = Described(shape, torch.float32, call.x_device, False)
            check_rotation(heads, angles, Positions(), spec, heads.shape[-1])  # pyright: ignore[reportArgumentType]
    if core is None:
        return None
    modes = Modes(call.gradient, call.deterministic)
    request, sequences = judged(core, core.numbers(call.training), qkv, a, modes, call.cached, call.same)
    check(request)
    return sequences


def _projections_of(call: LayerCall) -> tuple[Described, Described, Described]:
    """q, k, v as the projections of a call will give them, whose inputs are right; ValueError if they are not."""
    x = Described(call.x_shape, call.x_dtype, call.x_device, call.gradient)
    _check_inputs(call.config, x, call.encoder, call.lowered is not None)
    return _projections(call.config, x, call.encoder, call.lowered)


def check_variant(
    fuse_wgrad_accumulation: bool, fuse_qkv_params: bool, return_layernorm_output: bool, input_layernorm: bool
) -> None:
    """Check options of the constructor that depend on each other, and warn once about one without effect.

    Raises:
        ValueError: The weight gradient is to be accumulated into a weight that is made of several parameters.
    """
    if fuse_wgrad_accumulation and not fuse_qkv_params:
        raise ValueError(
            "fuse_wgrad_accumulation=True needs one weight a projection; set fuse_qkv_params=True"
        )
    warn_without_norm(return_layernorm_output, input_layernorm)


_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


def check_layer_call(
    memory: Memory[Key, Sequences | None],
    config: LayerConfig,
    core: Any,
    x: Any,
    encoder_output: Any,
    arguments: CallArguments,
    rotation: Rotation | None,
    state: AutocastState,
) -> Judged | None:
    """Raise what a call that no compiler traces would be refused with, before anything is recorded.

    core   the core attention;  rotation  how q and k turn, which has numbers to be looked at in each call
    Returns what the core need not find out again; None where it is given nothing, or is not ours.
    """
    if (config.attention_type == "cross") != (encoder_output is not None):
        check_encoder(config, encoder_output)
    if state.enabled and (recipe := attention_recipe(state.recipe)) is not None:
        scaling_of(recipe)
    if type(x) not in _PLAIN_TENSORS or not x.is_floating_point():
        floating("hidden_states", x)
    encoder = None
    if encoder_output is not None:
        floating("encoder_output", encoder_output)
        encoder = described_of(encoder_output)
    ours = isinstance(core, DotProductAttention)
    turned = None if rotation is None else rotation.facts()
    device = x.device
    lowered = autocast_dtype(device.type)
    key: Key = (
        config,
        core._config if ours else None,
        ours and core.training,
        x.shape,
        x.dtype,
        device,
        torch.is_grad_enabled(),
        lowered,
        torch.are_deterministic_algorithms_enabled(),
        env.generation(),
        encoder,
        turned,
    )
    found = None
    if arguments is not NOTHING_GIVEN and ours:
        found = _judged_with(memory, key, core._config, arguments)
    elif undisturbed():
        memory[key]
    else:
        judge(key)
    if rotation is not None and turned is None:
        rotation.check(*_projections(config, described_of(x), encoder, lowered)[:2])
    return found


def check_encoder(config: LayerConfig, encoder_output: Any) -> Any:
    """Return the encoder output that a layer reads: None for self attention, with a warning once if it gets one.

    Raises:
        ValueError: Cross attention gets no encoder_output.
    """
    if config.attention_type == "cross":
        if encoder_output is None:
            raise ValueError("attention_type='cross' needs encoder_output, which is None; match the two")
        return encoder_output
    if encoder_output is not None:
        warn_once(
            "encoder_output of self attention",
            "encoder_output has no effect on a MultiheadAttention with attention_type='self'; make the layer with "
            "attention_type='cross', or leave it None",
        )
    return None


def _judged_with(
    memory: Memory[Key, Sequences | None], key: Key, core: AttentionConfig, arguments: CallArguments
) -> Judged:
    """What the core attention would refuse of q, k and v; key: without the arguments."""
    ordered = in_order(core, arguments, lambda: _projections_of(LayerCall(*key)))
    a, same, _, cached = ordered
    try:
        facts = facts_of(a)
        key = (*key, facts, cached, same)
        sequences = memory[key] if undisturbed() else judge(key)
    except (AttributeError, TypeError) as error:
        stumbled = error
    else:
        assert sequences is not None, "a core of ours has sequences"
        if sequences.bounded:
            demand_lengths(sequences, a)
        return Judged(ordered, facts, sequences)
    # An argument of a wrong kind is no part of a key; the checks say what it should be.
    _judge(LayerCall(*key[:12], cached=cached, same=same), a)
    raise stumbled


def rotation_of_call(
    config: LayerConfig, rotary_pos_emb: Tensor | tuple[Tensor, Tensor], arguments: CallArguments
) -> Rotation:
    """How queries and keys turn; TypeError or ValueError where the angles are none, or do not reach."""
    rotary_pos_emb = accepted_angles(rotary_pos_emb)
    if arguments.inference_params is not None:
        check_cache_kind(arguments.inference_params)
    return rotation_of(
        rotary_pos_emb,
        RopeSpec(config.qkv_format, config.rotary_pos_interleaved),
        config.attention_type == "self",
        arguments.inference_params,
        arguments.cu_seqlens,
        arguments.cu_seqlens_padded,
    )


def _check_inputs(config: LayerConfig, x: Described, encoder: Described | None, lowered: bool) -> None:
    """ValueError unless the inputs are [.., hidden] as qkv_format says, of one dtype and device."""
    axes = len(config.qkv_format) - 1
    for name, given in (("hidden_states", x), ("encoder_output", encoder)):
        if given is None:
            continue
        if len(given.shape) != axes or given.shape[-1] != config.hidden_size:
            raise ValueError(
                f"{name} is {list(given.shape)}, qkv_format={config.qkv_format!r} needs {axes} axes that end in "
                f"hidden_size={config.hidden_size}"
            )
        if given.device.type == "meta":
            raise ValueError(f"{name} is on {given.device} and has no values; make it on the layer's device")
        if (given.dtype != x.dtype and not lowered) or given.device != x.device:
            raise ValueError(
                f"{name} is {given.dtype} on {given.device}, hidden_states {x.dtype} on {x.device}; convert"
            )


def _projections(
    config: LayerConfig, x: Described, encoder: Described | None, lowered: torch.dtype | None
) -> tuple[Described, Described, Described]:
    """q, k, v as the projections will give them."""
    heads = config.heads
    k = _projected(config, x if encoder is None else encoder, heads.groups, lowered or x.dtype)
    if encoder is None and heads.groups == heads.queries:
        return k, k, k
    return _projected(config, x, heads.queries, lowered or x.dtype), k, k


def _projected(config: LayerConfig, x: Described, heads: int, dtype: torch.dtype) -> Described:
    """x [.., hidden] by heads; those of a sequence-parallel layer gather the ranks' tokens."""
    shape = torch.Size((x.shape[0] * config.ranks, *x.shape[1:-1], heads, config.heads.size))
    return Described(shape, dtype, x.device, False)
