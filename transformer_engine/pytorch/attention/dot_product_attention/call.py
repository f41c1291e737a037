"""plan = layer memory[key]: one call of an attention as data, and what computes it, found once for equal calls.

The key has all that a call is judged and planned by, and no number of a tensor: see `Call`. A call is given to
`plain_call` where it is q, k, v and names alone, else to `any_call`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common import env
from ....common.dispatch import undisturbed
from ....common.memory import Memory
from ...primitives.attention.alibi import default_slopes
from ...primitives.attention.choose import choose
from ...primitives.attention.operators import choose_when_traced
from ...primitives.attention.passes import Bound
from ...primitives.attention.request import AttentionInputs, AttentionRequest
from ...runtime.backward_thread import keep_backward_here
from ..inference import CachedKeysValues
from .arguments import sink_of
from .facts import described_arguments, facts_of
from .in_order import Judged, in_order
from .last_choice import last_choice
from .prepare import Modes, judged
from .sequences import (
    Cached,
    Sequences,
    cached_tensors,
    demand_lengths,
    tensors_of,
)
from .settings import NOTHING_GIVEN, AttentionConfig, CallArguments, Described

# Plans of a layer, before it forgets them all; of all layers with a score_mod, which may hold tensors.
MAX_PLANS = 256
MAX_SCORE_MODS = 64


class Plan(NamedTuple):
    """A request, the backend that takes it, and how the sequences' lengths follow from what a call is given."""

    request: AttentionRequest
    backend: Bound
    sequences: Sequences


class Call(NamedTuple):
    """The parts of a key.

    config, training     the layer's settings
    *_shape, _dtype, _device   of q, k, v
    gradient             is one wanted of any input?
    deterministic        torch's switch
    environment          env.generation()
    renewed              how often callers have had all layers choose their backends again
    given                `facts_of` the arguments, where there are more than names
    cached, same         see `judged`
    """

    config: AttentionConfig
    training: bool
    q_shape: torch.Size
    k_shape: torch.Size
    v_shape: torch.Size
    q_dtype: torch.dtype
    k_dtype: torch.dtype
    v_dtype: torch.dtype
    q_device: torch.device
    k_device: torch.device
    v_device: torch.device
    gradient: bool
    deterministic: bool
    environment: int
    renewed: int
    qkv_format: str | None
    attn_mask_type: str | None
    given: tuple[Any, ...] | None = None
    cached: Cached | None = None
    same: bool = True

    def judged(self) -> tuple[AttentionRequest, Sequences]:
        """The request and its sequences, after every check."""
        if self.given is None:
            given = NOTHING_GIVEN._replace(qkv_format=self.qkv_format, attn_mask_type=self.attn_mask_type)
        else:
            given = described_arguments(self.given)
        qkv = (
            Described(self.q_shape, self.q_dtype, self.q_device, False),
            Described(self.k_shape, self.k_dtype, self.k_device, False),
            Described(self.v_shape, self.v_dtype, self.v_device, False),
        )
        numbers, modes = self.config.numbers(self.training), Modes(self.gradient, self.deterministic)
        return judged(self.config, numbers, qkv, given, modes, self.cached, self.same)


Key = tuple[Any, ...]


def _key(
    config: AttentionConfig,
    training: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gradient: bool,
    qkv_format: str | None,
    attn_mask_type: str | None,
) -> Key:
    """The parts of a `Call` that every call has; a plain tuple, which is made in half the time of a named one."""
    return (
        config,
        training,
        q.shape,
        k.shape,
        v.shape,
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        gradient,
        torch.are_deterministic_algorithms_enabled(),
        env.generation(),
        last_choice.renewed,
        qkv_format,
        attn_mask_type,
    )


def plan_of(key: Key) -> Plan:
    """The plan of a key, after every check that the call's tensors and names need."""
    request, sequences = Call(*key).judged()
    plan = Plan(request, choose(request), sequences)
    if request.device.type == "cuda":
        keep_backward_here()
    return plan


SCORE_MOD_PLANS: Memory[Key, Plan] = Memory(plan_of, MAX_SCORE_MODS)


def plain_call(
    memory: Memory[Key, Plan],
    config: AttentionConfig,
    training: bool,
    offset: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qkv_format: str | None,
    attn_mask_type: str | None,
    wanted: bool = False,
) -> tuple[Plan, AttentionInputs]:
    """The plan of a call and its inputs; there are no numbers in tensors to look at.

    offset   the layer's learnable softmax_offset
    wanted   a gradient is, of what q, k and v are views of
    """
    sink = None
    if config.softmax_type != "vanilla":
        sink = sink_of(config.softmax_type, offset, config.heads, q.device)
    gradient = torch.is_grad_enabled() and (wanted or _any_wants(q, k, v, None, sink))
    key = _key(config, training, q, k, v, gradient, qkv_format, attn_mask_type)
    plan = memory[key] if undisturbed() else plan_of(key)
    last_choice.seen = plan
    if q.stride(-1) != 1:
        q = q.contiguous()
    if k.stride(-1) != 1:
        k = k.contiguous()
    if v.stride(-1) != 1:
        v = v.contiguous()
    return plan, AttentionInputs(q, k, v) if sink is None else AttentionInputs(q, k, v, sink=sink)


def _any_wants(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None) -> bool:
    return (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sink is not None and sink.requires_grad)
    )


class Prepared(NamedTuple):
    """A call that has been judged.

    append   writes a step's keys and values into its cache, when nothing can be refused; None without a cache, and
             where a custom manager had to write them in order to say what there is
    """

    plan: Plan
    inputs: AttentionInputs
    append: Callable[[], object] | None


def any_call(
    memory: Memory[Key, Plan] | None,
    config: AttentionConfig,
    training: bool,
    offset: Tensor | None,
    qkv: tuple[Tensor, Tensor, Tensor],
    arguments: CallArguments,
) -> Prepared:
    """A call with masks, lengths, a bias or a cache; memory: None while a compiler traces, which looks nothing up."""
    ordered = in_order(config, arguments, lambda: qkv, memory is None)
    return judged_call(memory, config, training, offset, qkv, Judged(ordered))


def judged_call(
    memory: Memory[Key, Plan] | None,
    config: AttentionConfig,
    training: bool,
    offset: Tensor | None,
    qkv: tuple[Tensor, Tensor, Tensor],
    judged_before: Judged,
    wanted: bool = False,
) -> Prepared:
    """The same of arguments in order; what the layer has found out is not found out again. wanted: as plain_call's."""
    (a, same, cached, facts), given, looked_at = judged_before
    q, k, v = qkv
    sink = None
    if config.softmax_type != "vanilla":
        sink = sink_of(config.softmax_type, offset, config.heads, q.device)
    gradient = torch.is_grad_enabled() and (wanted or _any_wants(q, k, v, a.bias, sink))
    known = (config, training, qkv, a, gradient, same)
    plan = _traced_plan(*known, facts) if memory is None else _found_plan(memory, *known, facts, given)
    cache, append = a.inference_params, None
    if cache is not None:
        tensor_format = config.qkv_format if a.qkv_format is None else a.qkv_format
        assert config.layer_number is not None
        if cached is not None:
            append = partial(cache.write, config.layer_number, k, v, tensor_format)
        else:
            cached = cache.step(config.layer_number, k, v, tensor_format)
            facts = Cached.of(cached, None, tensor_format == "thd" and not a.max_seqlens[0])
            plan = (
                _traced_plan(*known, facts) if memory is None else _found_plan(memory, *known, facts, given)
            )
    elif memory is not None and plan.sequences.bounded and plan.sequences != looked_at:
        demand_lengths(plan.sequences, a)
    slopes = None if a.bias_type != "alibi" else _slopes(config, a, q.device)
    return Prepared(plan, _inputs(plan.sequences, qkv, a, cached, slopes, sink), append)


def _found_plan(
    memory: Memory[Key, Plan],
    config: AttentionConfig,
    training: bool,
    qkv: tuple[Tensor, Tensor, Tensor],
    a: CallArguments,
    gradient: bool,
    same: bool,
    cached: Cached | None,
    given: tuple[Any, ...] | None,
) -> Plan:
    """The plan of a call, looked up where one like it was met before; `last_choice` learns of it.

    given   `facts_of` a where they are known
    """
    q, k, v = qkv
    try:
        plain = _key(config, training, q, k, v, gradient, a.qkv_format, a.attn_mask_type)
        key = (*plain, facts_of(a) if given is None else given, cached, same)
        if not undisturbed():
            plan = plan_of(key)
        else:
            plan = memory[key] if a.score_mod is None else SCORE_MOD_PLANS[key]
    except (AttributeError, TypeError) as error:
        stumbled = error
    else:
        last_choice.seen = plan
        return plan
    # An argument of a wrong kind is no part of a key; the checks say what it should be.
    modes = Modes(gradient, torch.are_deterministic_algorithms_enabled())
    judged(config, config.numbers(training), qkv, a, modes, cached, same)
    raise stumbled


def _traced_plan(
    config: AttentionConfig,
    training: bool,
    qkv: tuple[Tensor, Tensor, Tensor],
    a: CallArguments,
    gradient: bool,
    same: bool,
    cached: Cached | None,
) -> Plan:
    modes = Modes(gradient, torch.are_deterministic_algorithms_enabled())
    request, sequences = judged(config, config.numbers_when_traced(training), qkv, a, modes, cached, same)
    return Plan(request, choose_when_traced(request), sequences)


def _inputs(
    sequences: Sequences,
    qkv: tuple[Tensor, Tensor, Tensor],
    a: CallArguments,
    cached: CachedKeysValues | None,
    slopes: Tensor | None,
    sink: Tensor | None,
) -> AttentionInputs:
    """The tensors of a call whose plan is there."""
    q, k, v = qkv
    page_table = None
    if cached is not None:
        k, v, page_table = cached.key, cached.value, cached.page_table
        tensors = cached_tensors(cached, sequences.queries.tokens is not None)
    else:
        tensors = tensors_of(sequences, a)
    return AttentionInputs(
        q if q.stride(-1) == 1 else q.contiguous(),
        k if k.stride(-1) == 1 else k.contiguous(),
        v if v.stride(-1) == 1 else v.contiguous(),
        *tensors,
        a.bias,
        slopes,
        sink,
        page_table,
    )


def _slopes(config: AttentionConfig, a: CallArguments, device: torch.device) -> Tensor:
    """ALiBi's slopes of this rank's heads, as given or the usual ones."""
    if a.alibi_slopes is not None:
        return a.alibi_slopes
    rank = torch.distributed.get_rank(config.tp_group) if config.tp_group is not None else 0
    slopes = default_slopes(config.num_attention_heads, device)
    return slopes[rank * config.heads : (rank + 1) * config.heads]
