"""plan = plan_of(facts): one call of an attention as data, and what computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common import env
from ....common.dispatch import undisturbed
from ....common.memory import Memory
from ...primitives.attention.choose import choose
from ...primitives.attention.mask import Mask
from ...primitives.attention.operators import choose_when_traced
from ...primitives.attention.passes import Bound
from ...primitives.attention.request import (
    AttentionInputs,
    AttentionRequest,
    Device,
    Options,
    Shape,
    Switches,
)
from ...runtime.backward_thread import keep_backward_here
from ...runtime.device import get_device_compute_capability
from .arguments import check_bias
from .last_choice import last_choice
from .sequences import Sequences
from .settings import Described

# Plans of a process, before it forgets them all; those with a score_mod, which may hold tensors, are fewer.
MAX_PLANS = 1024
MAX_SCORE_MODS = 64


class Settings(NamedTuple):
    """The settings of a call that are no tensors; the fields of the request's records of the same names."""

    mask: Mask
    q_format: str
    kv_format: str
    bias: str
    softmax: str
    scale: float
    dropout: float
    max_logit: bool
    page_size: int
    num_splits: int
    cached: bool
    score_mod: Callable[..., Tensor] | None


class Prepared(NamedTuple):
    """The arguments of a call, checked and in order."""

    settings: Settings
    sequences: Sequences
    inputs: AttentionInputs
    slopes_given: bool


class Facts(NamedTuple):
    """All that the choice of a backend depends on: the settings, what tensors are like, and what is in force.

    padding_tensors   padding came as mask tensors;  generation  of the environment's variables
    """

    settings: Settings
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    batch: int
    max_q: int
    max_kv: int
    padded_between: bool
    needs_gradient: bool
    same_lengths: bool
    padding_tensors: bool
    bias: Described | None
    bias_gradient: bool
    slopes_shape: tuple[int, ...] | None
    slopes_given: bool
    masked_shape: tuple[int, ...] | None
    deterministic: bool
    generation: int


class Plan(NamedTuple):
    """A request and the backend that takes it."""

    request: AttentionRequest
    backend: Bound


def facts_of(settings: Settings, sequences: Sequences, inputs: AttentionInputs, slopes_given: bool) -> Facts:
    """What a call's request follows from, in a form that costs little to make and to look up."""
    q, bias, slopes, masked = inputs.q, inputs.bias, inputs.slopes, inputs.masked
    gradient = torch.is_grad_enabled()
    return Facts(
        settings,
        q.shape,
        inputs.k.shape,
        inputs.v.shape,
        q.dtype,
        q.device,
        sequences.batch,
        sequences.max_q,
        sequences.max_kv,
        sequences.padded_between,
        gradient and _wants_gradient(inputs),
        inputs.lengths_q is not None and inputs.lengths_q is inputs.lengths_kv,
        inputs.masked_q is not None or inputs.masked_kv is not None,
        None if bias is None else Described(bias.shape, bias.dtype, bias.device, bias.requires_grad),
        gradient and bias is not None and bias.requires_grad,
        None if slopes is None else slopes.shape,
        slopes_given,
        None if masked is None else masked.shape,
        torch.are_deterministic_algorithms_enabled(),
        0 if torch.compiler.is_compiling() else env.generation(),
    )


def _wants_gradient(inputs: AttentionInputs) -> bool:
    if inputs.q.requires_grad or inputs.k.requires_grad or inputs.v.requires_grad:
        return True
    bias, sink = inputs.bias, inputs.sink
    return (bias is not None and bias.requires_grad) or (sink is not None and sink.requires_grad)


def request_of(facts: Facts) -> AttentionRequest:
    """The request of a call; ValueError when its bias does not fit."""
    s, device = facts.settings, facts.device.type
    shape = Shape(
        dtype=facts.dtype,
        batch=known(facts.batch),
        heads=known(facts.q_shape[-2]),
        groups=known(facts.k_shape[-2]),
        seqlen_q=known(facts.max_q),
        seqlen_kv=known(facts.max_kv),
        head_dim_qk=known(facts.q_shape[-1]),
        head_dim_v=known(facts.v_shape[-1]),
        q_format=s.q_format,
        kv_format=s.kv_format,
        page_size=s.page_size,
        bias_shape=None if facts.bias is None else _known(facts.bias.shape),
        slopes_shape=_known(facts.slopes_shape),
        masked_shape=_known(facts.masked_shape),
    )
    options = Options(
        mask=s.mask,
        scale=s.scale,
        bias=s.bias,
        softmax=s.softmax,
        dropout=s.dropout,
        padded_between=facts.padded_between,
        max_logit=s.max_logit,
        needs_gradient=facts.needs_gradient,
        bias_gradient=facts.bias_gradient,
        slopes_given=facts.slopes_given,
        padding_tensors=facts.padding_tensors,
        same_lengths=facts.same_lengths,
        num_splits=s.num_splits,
        cached=s.cached,
        score_mod=s.score_mod,
    )
    capability = get_device_compute_capability() if device == "cuda" else (0, 0)
    where = Device(device, capability, _is_deterministic(facts), Switches.from_environment())
    request = AttentionRequest(shape, options, where)
    check_bias(request, facts.bias)
    return request


def known(size: int) -> int:
    """The size; where a tracing compiler has a symbol for it, the number, which its graph is then guarded by.

    A choice is made for numbers: each longest sequence has a graph of its own. The tokens of packed sequences, which
    no choice depends on, stay a symbol.
    """
    # The bounds of a range are what every version of the tracer wants a number for.
    return len(range(size)) if torch.compiler.is_compiling() else size


def _known(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if shape is None else tuple(known(size) for size in shape)


def _is_deterministic(facts: Facts) -> bool:
    """Must gradients be bitwise repeatable?"""
    return not env.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") or facts.deterministic


def plan_of(facts: Facts) -> Plan:
    """The request of a call and the backend that takes it."""
    request = request_of(facts)
    plan = Plan(request, choose(request))
    if request.device.type == "cuda":
        keep_backward_here()
    return plan


PLANS: Memory[Facts, Plan] = Memory(plan_of, MAX_PLANS)
SCORE_MOD_PLANS: Memory[Facts, Plan] = Memory(plan_of, MAX_SCORE_MODS)
MEMORIES: list[Memory[Any, Plan]] = [PLANS, SCORE_MOD_PLANS]


def plan_for(call: Prepared) -> Plan:
    """The plan of a call, looked up where one like it was met before; `last_choice` learns of it."""
    facts = facts_of(*call)
    return plan_with(PLANS if facts.settings.score_mod is None else SCORE_MOD_PLANS, facts)


def plan_with(memory: Memory[Any, Plan], key: Any) -> Plan:
    """What the memory has for a key, made anew while backends are forced or requests observed."""
    if undisturbed():
        if last_choice.requires_update:
            forget_plans()
            last_choice.requires_update = False
        plan = memory[key]
    else:
        plan = memory.build(key)
    last_choice.seen = plan
    return plan


def forget_plans() -> None:
    """Have the next call of every layer choose its backend again."""
    for memory in MEMORIES:
        memory.clear()


def plan_when_traced(call: Prepared) -> Plan:
    """The plan of a call that a compiler traces."""
    request = request_of(facts_of(*call))
    return Plan(request, choose_when_traced(request))
