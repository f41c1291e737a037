"""AttentionPlan: an AttentionCall with its backend, cached by everything that both depend on.

A layer plans before its projections compute and passes the plan to its core attention; otherwise
the core attention plans itself. No tensor value is part of a plan: equal calls share it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common import env
from ....common.dispatch import interventions
from ....common.memory import Memory
from ...fast import run_backward_on_calling_thread
from ...functions.attention.context_parallel.attention import (
    ContextParallelAttention,
    choose_shared,
)
from ...functions.attention.context_parallel.contiguous import ContiguousAttention
from ...primitives.attention.call import AttentionCall, AttentionInputs
from ...primitives.attention.choose import choose
from ...primitives.attention.operators import choose_when_exported, choose_when_traced
from ...primitives.attention.passes import Bound
from ...primitives.attention.visible import default_slopes
from ...runtime import checks
from ...runtime.autograd import gradients_expected
from ...runtime.determinism import torch_determinism
from ...runtime.tracing import export_mode, run_eagerly
from ..inference import CachedKeysValues
from .arguments import check_cache, check_tensors, settle_arguments, sink_logit
from .describe import describe_call, describe_sequences, mask_name
from .last_choice import last_choice
from .sequences import (
    Cached,
    Sequences,
    are_same,
    bucket_longest,
    cached_tensors,
    demand_lengths,
    sequence_tensors,
)
from .settings import (
    NO_ARGUMENTS,
    AttentionArguments,
    AttentionConfig,
    TensorFacts,
    argument_facts,
    describe_arguments,
)

# Plans per layer before its cache is emptied; for all layers with a score_mod, which may hold tensors.
MAX_PLANS = 256
MAX_SCORE_MODS = 64


class AttentionPlan(NamedTuple):
    """A call, the backend bound to it, and how sequence lengths follow from the arguments.

    Attributes:
        tensors: Shapes, dtypes and devices of q, k and v, as at the end of `PlanKey`; () while a compiler traces.
    """

    call: AttentionCall
    backend: Bound | ContextParallelAttention | ContiguousAttention
    sequences: Sequences
    tensors: tuple[Any, ...] = ()


class PlanKey(NamedTuple):
    """Everything that a plan depends on.

    Attributes:
        config, training: The layer's settings and mode.
        gradient: An input gradient is needed, or may be needed in a second run of the call.
        deterministic: torch_determinism().
        environment: env.generation().
        renewed: How often callers requested a new choice for all backends.
        qkv_format, attn_mask_type: Names given to the call.
        given: `argument_facts` the arguments; None if no others than the two names are given.
        cached, same_lengths: See `describe_sequences`.
    """

    config: AttentionConfig
    training: bool
    gradient: bool
    deterministic: int
    environment: int
    renewed: int
    qkv_format: str | None
    attn_mask_type: str | None
    given: tuple[Any, ...] | None
    cached: Cached | None
    same_lengths: bool
    q_shape: torch.Size
    k_shape: torch.Size
    v_shape: torch.Size
    q_dtype: torch.dtype
    k_dtype: torch.dtype
    v_dtype: torch.dtype
    q_device: torch.device
    k_device: torch.device
    v_device: torch.device

    def described(self) -> tuple[AttentionCall, Sequences]:
        """Return the call and its sequences, after every check."""
        if self.given is None:
            a = NO_ARGUMENTS._replace(
                qkv_format=self.qkv_format, attn_mask_type=self.attn_mask_type
            )
        else:
            a = describe_arguments(self.given)
        qkv = (
            TensorFacts(self.q_shape, self.q_dtype, self.q_device, False),
            TensorFacts(self.k_shape, self.k_dtype, self.k_device, False),
            TensorFacts(self.v_shape, self.v_dtype, self.v_device, False),
        )
        modes = (self.gradient, self.deterministic)
        return describe_call(
            self.config, self.training, qkv, a, *modes, self.cached, self.same_lengths
        )


Key = tuple[Any, ...]
_TENSORS = PlanKey._fields.index("q_shape")


def make_plan(key: Key) -> AttentionPlan:
    """Plan the call of a `PlanKey`, after every check."""
    call, sequences = PlanKey(*key).described()
    context = key[0].context
    backend = choose(call) if context is None else choose_shared(call, context)
    plan = AttentionPlan(call, backend, sequences, key[_TENSORS:])
    if call.device_type == "cuda":
        run_backward_on_calling_thread()
    return plan


SCORE_MOD_PLANS: Memory[Key, AttentionPlan] = Memory(make_plan, MAX_SCORE_MODS)


class CheckedArguments(NamedTuple):
    """Call arguments in key types, checked as far as a key cannot hold them.

    Attributes:
        arguments: The arguments.
        facts: `argument_facts` the arguments; None if nothing is given, and while a compiler traces.
        same_lengths: `are_same` for the arguments.
        upcoming: Keys and values that the cache will return, before anything is written; None without a cache, and
            if only a custom manager knows them.
        cached: `upcoming` metadata.
        ahead: Plan that an attention layer made for the results of its projections.
        sequences: Sequences whose values a layer has checked already.
    """

    arguments: AttentionArguments
    facts: tuple[Any, ...] | None = None
    same_lengths: bool = True
    upcoming: CachedKeysValues | None = None
    cached: Cached | None = None
    ahead: AttentionPlan | None = None
    sequences: Sequences | None = None


PLAIN = CheckedArguments(NO_ARGUMENTS)


def check_arguments(
    config: AttentionConfig,
    arguments: AttentionArguments,
    qkv: Callable[[], tuple[Any, Any, Any]],
    tracing: bool = False,
) -> CheckedArguments:
    """Check and convert the arguments of a call; qkv() returns the three tensors or their descriptions.

    Raises:
        TypeError, ValueError: An argument cannot be used.
    """
    a = settle_arguments(config, arguments)
    same_lengths = are_same(a)
    tensor_format = config.qkv_format if a.qkv_format is None else a.qkv_format
    if a.alibi_slopes is not None:
        checks.floating("alibi_slopes", a.alibi_slopes)
        checks.same_device("alibi_slopes", a.alibi_slopes, "query_layer", qkv()[0].device)
        if a.alibi_slopes.ndim not in (1, 2) or a.alibi_slopes.shape[-1] != config.heads:
            raise ValueError(
                f"alibi_slopes {list(a.alibi_slopes.shape)} does not end in {config.heads} heads; "
                "give [h], or [b, h]"
            )
    upcoming = cached = None
    if a.inference_params is not None:
        upcoming, cached = _upcoming_keys_values(config, a, tensor_format, qkv, tracing)
    elif tensor_format == "thd" and (a.max_seqlen_q is None or a.max_seqlen_kv is None):
        # Finding the longest sequence lengths waits for the device.
        tensors = sequence_tensors(describe_sequences(config, qkv(), a, None, same_lengths)[1], a)
        size_q, size_kv = a.max_seqlen_q, a.max_seqlen_kv
        if size_q is None:
            size_q = bucket_longest("q", tensors.lengths_q)
        if size_kv is None:
            size_kv = bucket_longest("kv", tensors.lengths_kv)
        a = a._replace(max_seqlen_q=size_q, max_seqlen_kv=size_kv)
    facts = None
    if not tracing:
        try:
            facts = argument_facts(a)
        except AttributeError:
            # An object of another kind in the place of a tensor: this raises the error that names it.
            describe_sequences(config, qkv(), a, cached, same_lengths)
            raise
    return CheckedArguments(a, facts, same_lengths, upcoming, cached)


def _upcoming_keys_values(
    config: AttentionConfig,
    a: AttentionArguments,
    tensor_format: str,
    qkv: Callable[[], tuple[Any, Any, Any]],
    tracing: bool,
) -> tuple[CachedKeysValues | None, Cached | None]:
    """Return the keys and values that the cache will return, and their metadata."""
    cache: Any = a.inference_params
    number = config.layer_number
    if not tracing and number is not None:
        foreseen = cache.foreseen(number, tensor_format, Cached.of)
        if foreseen is not None:
            return foreseen.upcoming, foreseen.described
    q, k, v = qkv()
    check_tensors(q, k, v, tensor_format, config)
    mask_name(config, a)  # raises for a mask type that no cache supports
    number = check_cache(number, cache.dtype, q.dtype)
    if not cache.foresees:
        return None, None
    limits = cache.limits(tensor_format)
    limits.check(k, v, tensor_format)
    cache.allocate_memory(number)
    upcoming = cache.upcoming(number)
    return upcoming, Cached.of(upcoming, limits)


Append = Callable[[], object]


def prepare(
    memory: Memory[Key, AttentionPlan] | None,
    config: AttentionConfig,
    training: bool,
    offset: Tensor | None,
    qkv: tuple[Tensor, Tensor, Tensor],
    checked: CheckedArguments,
    joint: bool = False,
    names: tuple[str | None, str | None] = (None, None),
) -> tuple[AttentionPlan, AttentionInputs, Append | None]:
    """Plan a call, or find its cached plan, and collect its tensors.

    Args:
        memory: Plans of the layer; None while a compiler traces.
        config: Layer settings.
        training: Layer mode.
        offset: The layer's learnable softmax_offset.
        qkv: Queries, keys and values.
        checked: Result from `check_arguments`, or PLAIN.
        joint: q, k and v are views, unknown to autograd, of a projection that needs a gradient.
        names: qkv_format and attn_mask_type for a call with PLAIN.

    Returns:
        The plan, the tensors, and a function that writes a step's keys and values into its cache once nothing can
        raise. The function is None without a cache, and if a custom manager had to write them first.
    """
    q, k, v = qkv
    a, bias, sink = checked.arguments, checked.arguments.core_attention_bias, None
    if config.softmax_type != "vanilla":
        sink = sink_logit(config.softmax_type, offset, config.heads, q.device)
    gradient = torch.is_grad_enabled() and (
        joint
        or q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sink is not None and sink.requires_grad)
    )
    if not gradient and a.inference_params is None and not export_mode.onnx:
        gradient = gradients_expected(training)
    settings, plan = (config, training, gradient), checked.ahead
    if (
        plan is None
        or plan.call.needs_gradient is not gradient
        or plan.tensors
        != (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
    ):
        plan = _find(memory, settings, qkv, checked, names)
    append = upcoming = None
    if a.inference_params is not None:
        plan, upcoming, append = _step(memory, settings, qkv, checked, plan)
        k, v = upcoming.key, upcoming.value
    elif memory is not None and plan.sequences.bounded and plan.sequences != checked.sequences:
        demand_lengths(plan.sequences, a)
    if memory is not None:
        last_choice.seen = plan
    if q.stride(-1) != 1:
        q = q.contiguous()
    if k.stride(-1) != 1:
        k = k.contiguous()
    if v.stride(-1) != 1:
        v = v.contiguous()
    if memory is not None and a is NO_ARGUMENTS:
        return (
            plan,
            AttentionInputs(q, k, v) if sink is None else AttentionInputs(q, k, v, sink=sink),
            None,
        )
    if upcoming is not None:
        lengths = cached_tensors(upcoming, plan.sequences.queries.tokens is not None)
    else:
        lengths = sequence_tensors(plan.sequences, a)
    slopes = None if a.core_attention_bias_type != "alibi" else _slopes(config, a, q.device)
    pages = None if upcoming is None else upcoming.page_table
    return plan, AttentionInputs(q, k, v, *lengths, bias, slopes, sink, pages), append


def _find(
    memory: Memory[Key, AttentionPlan] | None,
    settings: tuple[AttentionConfig, bool, bool],
    qkv: tuple[Tensor, Tensor, Tensor],
    checked: CheckedArguments,
    names: tuple[str | None, str | None] = (None, None),
) -> AttentionPlan:
    """Return the cached plan of a call; while a compiler traces, plan it."""
    a, deterministic = checked.arguments, torch_determinism()
    if memory is None:
        config, training, gradient = settings
        modes = (gradient, deterministic, checked.cached, checked.same_lengths)
        if config.context is not None:
            if export_mode.onnx:
                raise NotImplementedError(
                    "an attention with a cp_group cannot be exported: ONNX has no collectives; export without one"
                )
            return _shared_outside_of_graphs(config, training, qkv, a, *modes)
        call, sequences = describe_call(config, training, qkv, a, *modes)
        chosen = choose_when_exported(call) if export_mode.onnx else choose_when_traced(call)
        return AttentionPlan(call, chosen, sequences)
    q, k, v = qkv
    # A plain tuple, which is created twice as fast as a PlanKey.
    key = (
        *settings,
        deterministic,
        env.generation(),
        last_choice.renewals,
        *names,
        checked.facts,
        checked.cached,
        checked.same_lengths,
        q.shape,
        k.shape,
        v.shape,
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
    )
    if interventions:
        return make_plan(key)
    return memory[key] if a.score_mod is None else SCORE_MOD_PLANS[key]


@run_eagerly("attention of context-parallel ranks communicates")
def _shared_outside_of_graphs(config: AttentionConfig, *described: Any) -> AttentionPlan:
    """Plan a context-parallel attention in eager mode: it communicates, which ends a compiled graph."""
    call, sequences = describe_call(config, *described)
    assert config.context is not None
    return AttentionPlan(call, choose_shared(call, config.context), sequences)


def _step(
    memory: Memory[Key, AttentionPlan] | None,
    settings: tuple[AttentionConfig, bool, bool],
    qkv: tuple[Tensor, Tensor, Tensor],
    checked: CheckedArguments,
    plan: AttentionPlan,
) -> tuple[AttentionPlan, CachedKeysValues, Append | None]:
    """Return the plan for a step over a cache, its keys and values, and the function that writes the new ones."""
    (config, _, _), (_, k, v), a = settings, qkv, checked.arguments
    cache: Any = a.inference_params
    assert config.layer_number is not None
    tensor_format = config.qkv_format if a.qkv_format is None else a.qkv_format
    new = (config.layer_number, k, v, tensor_format)
    if checked.upcoming is not None:
        return plan, checked.upcoming, partial(cache.write, *new)
    upcoming = cache.step(*new)
    cached = Cached.of(upcoming, None, tensor_format == "thd" and not a.max_seqlen_q)
    return _find(memory, settings, qkv, checked._replace(cached=cached)), upcoming, None


def _slopes(config: AttentionConfig, a: AttentionArguments, device: torch.device) -> Tensor:
    """Return the ALiBi slopes for this rank's heads, given or the usual ones."""
    if a.alibi_slopes is not None:
        return a.alibi_slopes
    rank = torch.distributed.get_rank(config.tp_group) if config.tp_group is not None else 0
    slopes = default_slopes(config.num_attention_heads, device)
    return slopes[rank * config.heads : (rank + 1) * config.heads]
