"""The plan of an attention layer's call, made before its first projection: a call that raises has no effects.

Projections record amaxes, caches store keys, dropout draws from generators. The core attention,
which has most of the checks, runs after the first projection. Therefore its call is planned first,
for the shapes that the projections will produce, and the plan is passed on to it. Everything that a
plan depends on is in its key, so that an equal call checks only tensor values again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common import env
from ...common.dispatch import interventions
from ...common.memory import Memory
from ..functions.attention.context_parallel.attention import check_divisible
from ..functions.attention.context_parallel.contiguous import piece_of_rank
from ..functions.attention.context_parallel.groups import ContextGroups
from ..primitives.attention.choose import check
from ..primitives.attention.packed import sequence_lengths
from ..primitives.rope import Positions, RopeSpec, check_rotation
from ..quantization.autocast import AutocastState
from ..runtime.autograd import gradients_expected
from ..runtime.checks import floating
from ..runtime.device import autocast_dtype, autocast_is_active
from ..runtime.warn_once import warn_once
from .dot_product_attention import DotProductAttention
from .dot_product_attention.arguments import accept_angles, check_cache_kind
from .dot_product_attention.fp8_recipe import attention_recipe, scaling_kind
from .dot_product_attention.last_choice import last_choice
from .dot_product_attention.plan import (
    PLAIN,
    AttentionPlan,
    CheckedArguments,
    PlanKey,
    check_arguments,
    make_plan,
)
from .dot_product_attention.policies import check_policies
from .dot_product_attention.sequences import Cached, Sequences, demand_lengths
from .dot_product_attention.settings import (
    NO_ARGUMENTS,
    AttentionArguments,
    AttentionConfig,
    TensorFacts,
    tensor_metadata,
)
from .layer_settings import MultiheadAttentionConfig, warn_without_norm
from .rotation import Rotation, plan_rotation

# Plans per layer before its cache is emptied.
MAX_LAYER_PLANS = 256


class LayerKey(NamedTuple):
    """Everything that a layer call's plan depends on.

    Attributes:
        config: Layer settings.
        core: Settings of its core attention; None if the core is a module of another class.
        gradient: torch's gradient mode, or True if the call may have a second run with gradients.
        x_shape, x_dtype, x_device: hidden_states metadata.
        lowered: torch.autocast dtype.
        encoder: encoder_output metadata.
        turned: Query and key table shapes, and the spec, for a rotation that reads no tensor values.

    The other fields are as in `PlanKey`.
    """

    config: MultiheadAttentionConfig
    core: AttentionConfig | None
    training: bool
    gradient: bool
    deterministic: int
    environment: int
    renewed: int
    given: tuple[Any, ...] | None
    cached: Cached | None
    same_lengths: bool
    x_shape: torch.Size
    x_dtype: torch.dtype
    x_device: torch.device
    lowered: torch.dtype | None
    encoder: TensorFacts | None
    turned: tuple[torch.Size, torch.Size, RopeSpec] | None

    def of_core(self) -> PlanKey | None:
        """Return the core attention's plan key, after checking the layer's inputs."""
        q, k, v = _projections(
            self.config, self.x_shape, self.x_dtype, self.x_device, self.lowered, self.encoder
        )
        if self.turned is not None:
            *tables, spec = self.turned
            for heads, shape in zip((q, k), tables, strict=True):
                angles: Any = TensorFacts(shape, torch.float32, self.x_device, False)
                check_rotation(heads, angles, Positions(), spec, heads.shape[-1])  # pyright: ignore[reportArgumentType]
        if self.core is None:
            return None
        tensors: Any = [
            x[index] for index in range(3) for x in (q, k, v)
        ]  # shapes, dtypes, devices
        return PlanKey(
            self.core, *self[2:7], None, None, self.given, self.cached, self.same_lengths, *tensors
        )


Key = tuple[Any, ...]


def plan_layer(key: Key) -> AttentionPlan | None:
    """Plan the call of a `LayerKey`; None if the core attention is a module of another class."""
    of_core = LayerKey(*key).of_core()
    return None if of_core is None else make_plan(tuple(of_core))


def check_weight_fusion(
    fuse_wgrad_accumulation: bool,
    fuse_qkv_params: bool,
    return_layernorm_output: bool,
    input_layernorm: bool,
) -> None:
    """Check constructor options that depend on each other, and warn once about one without effect.

    Raises:
        ValueError: The weight gradient is to be accumulated into a weight that consists of several parameters.
    """
    if fuse_wgrad_accumulation and not fuse_qkv_params:
        raise ValueError(
            "fuse_wgrad_accumulation=True needs one weight per projection; set fuse_qkv_params=True"
        )
    warn_without_norm(return_layernorm_output, input_layernorm)


_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


def check_layer_call(
    memory: Memory[Key, AttentionPlan | None],
    config: MultiheadAttentionConfig,
    core: Any,
    x: Any,
    arguments: AttentionArguments,
    encoder_output: Any,
    rotary_pos_emb: Any,
    state: AutocastState,
    tracing: bool,
) -> tuple[Rotation | None, CheckedArguments | None]:
    """Check and plan a layer's call before any effect.

    Args:
        memory: Plans of the layer.
        config: Layer settings.
        core: Core attention.
        x: hidden_states.
        arguments: Core attention arguments.
        encoder_output: Input for keys and values in cross attention.
        rotary_pos_emb: Query and key angles, or None.
        state: autocast state.
        tracing: A compiler traces the call.

    Returns:
        The q and k rotation, and the checked arguments with their plan. The second is None if the
        core is a module of another class, and while a compiler traces the core's own checks.

    Raises:
        TypeError, ValueError: The call cannot be computed.
    """
    rotation, ours = None, isinstance(core, DotProductAttention)
    context = core._config.context if ours else None
    if rotary_pos_emb is not None:
        rotation = _rotation_of_call(config, context, x, rotary_pos_emb, arguments)
    if tracing:
        check_encoder(config, encoder_output)
        return rotation, None
    if (config.attention_type == "cross") != (encoder_output is not None):
        check_encoder(config, encoder_output)
    if state.enabled and (recipe := attention_recipe(state.recipe)) is not None:
        scaling_kind(recipe)
    if ours and arguments.thd_attention_policies is not None and isinstance(x, Tensor):
        # The core plans an attention for each policy.
        check_policies(core._config, arguments, x.device, state, False)
        return rotation, None
    if type(x) not in _PLAIN_TENSORS or not x.is_floating_point():
        floating("hidden_states", x)
    encoder = None
    if encoder_output is not None:
        floating("encoder_output", encoder_output)
        encoder = tensor_metadata(encoder_output)
    rotation_facts = None if rotation is None else rotation.facts()
    device = x.device
    autocast = autocast_dtype(device.type) if autocast_is_active() else None
    inputs = (x.shape, x.dtype, device, autocast, encoder)
    checked = PLAIN
    if ours and arguments is not NO_ARGUMENTS:
        checked = check_arguments(core._config, arguments, lambda: _projections(config, *inputs))
    key = (
        config,
        core._config if ours else None,
        ours and core.training,
        torch.is_grad_enabled()
        or (ours and arguments.inference_params is None and gradients_expected(core.training)),
        torch.get_deterministic_debug_mode(),  # `torch_determinism()` in eager mode
        env.generation(),
        last_choice.renewals,
        checked.facts,
        checked.cached,
        checked.same_lengths,
        *inputs,
        rotation_facts,
    )
    plan, sequences = None, None
    if interventions:
        sequences = _check_sequences(key)
    elif (plan := memory[key]) is not None:
        sequences = plan.sequences
    if rotation is not None and rotation_facts is None:
        rotation.check(*_projections(config, *inputs)[:2])
    if sequences is None:
        return rotation, None
    if sequences.bounded:
        demand_lengths(sequences, checked.arguments)
    return rotation, CheckedArguments(*checked[:5], plan, sequences)


def _check_sequences(key: Key) -> Sequences | None:
    """Check a call without planning it: observers are called, and backends forced, when the core attention plans."""
    of_core = LayerKey(*key).of_core()
    if of_core is None:
        return None
    call, sequences = of_core.described()
    context = of_core.config.context
    if context is None:
        check(call)
    else:
        check_divisible(call, context)
    return sequences


def check_encoder(config: MultiheadAttentionConfig, encoder_output: Any) -> Any:
    """Return the encoder output that a layer reads: None for self attention, with a warning once if it gets one.

    Raises:
        ValueError: Cross attention gets no encoder_output.
    """
    if config.attention_type == "cross":
        if encoder_output is None:
            raise ValueError(
                "attention_type='cross' needs encoder_output, which is None; match the two"
            )
        return encoder_output
    if encoder_output is not None:
        warn_once(
            "encoder_output of self attention",
            "encoder_output has no effect on a MultiheadAttention with attention_type='self'; make the layer with "
            "attention_type='cross', or leave it None",
        )
    return None


def _rotation_of_call(
    config: MultiheadAttentionConfig,
    context: ContextGroups | None,
    x: Tensor,
    rotary_pos_emb: Tensor | tuple[Tensor, Tensor],
    arguments: AttentionArguments,
) -> Rotation:
    """Return the query and key rotation; context-parallel ranks rotate by the positions of their chunks.

    Raises:
        TypeError: The angles are not floating-point tensors.
        ValueError: The tables are too short.
    """
    rotary_pos_emb = accept_angles(rotary_pos_emb)
    if arguments.inference_params is not None:
        check_cache_kind(arguments.inference_params)
    if context is not None and not context.balanced and arguments.cu_seqlens_q is not None:
        # Token positions in a contiguous piece.
        cu_seqlens, padded = arguments.cu_seqlens_q, arguments.cu_seqlens_q_padded
        starts, tokens = cu_seqlens if padded is None else padded, x.shape[0] * config.ranks
        piece = piece_of_rank(sequence_lengths(cu_seqlens), starts, tokens, context.rank)
        before = (context.rank * tokens - starts[:-1]).clamp(min=0)
        spec = RopeSpec(config.qkv_format, config.rotary_pos_interleaved)._replace(clamps=True)
        tables = (
            rotary_pos_emb
            if isinstance(rotary_pos_emb, tuple)
            else (rotary_pos_emb, rotary_pos_emb)
        )
        return Rotation(tables, spec, before, (piece.starts_q, piece.starts_q))
    ranks = (1, 0) if context is None else (context.size, context.rank)
    return plan_rotation(
        rotary_pos_emb,
        RopeSpec(config.qkv_format, config.rotary_pos_interleaved, *ranks),
        config.attention_type == "self",
        arguments.inference_params,
        (arguments.cu_seqlens_q, arguments.cu_seqlens_kv),
        (arguments.cu_seqlens_q_padded, arguments.cu_seqlens_kv_padded),
    )


def _projections(
    config: MultiheadAttentionConfig,
    x_shape: torch.Size,
    x_dtype: torch.dtype,
    x_device: torch.device,
    lowered: torch.dtype | None,
    encoder: TensorFacts | None,
) -> tuple[TensorFacts, TensorFacts, TensorFacts]:
    """Return q, k, v as the projections will produce them; the arguments are as in `LayerKey`.

    Raises:
        ValueError: The inputs are not [.., hidden] as qkv_format requires, or have several dtypes or devices.
    """
    x = TensorFacts(x_shape, x_dtype, x_device, False)
    axes = len(config.qkv_format) - 1
    for name, tensor in (("hidden_states", x), ("encoder_output", encoder)):
        if tensor is None:
            continue
        if len(tensor.shape) != axes or tensor.shape[-1] != config.hidden_size:
            raise ValueError(
                f"{name} is {list(tensor.shape)}, qkv_format={config.qkv_format!r} needs {axes} axes that end in "
                f"hidden_size={config.hidden_size}"
            )
        if (tensor.dtype != x_dtype and lowered is None) or tensor.device != x_device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, hidden_states {x_dtype} on {x_device}; "
                f"convert one of them"
            )
    heads, shapes = config.heads, []
    for source, count in ((x, heads.queries), (encoder or x, heads.groups)):
        # Projections of a sequence-parallel layer gather the ranks' tokens.
        tokens = (source.shape[0] * config.ranks, *source.shape[1:-1])
        shapes.append(torch.Size((*tokens, count, heads.size)))
    q, k = (TensorFacts(shape, lowered or x_dtype, x_device, False) for shape in shapes)
    return q, k, k
