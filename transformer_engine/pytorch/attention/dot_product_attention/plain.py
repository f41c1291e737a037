"""plan, inputs = plain_call(config, ...): a call that is given q, k, v and names alone: one key, one look-up.

Everything that such a call can be refused for follows from the key: there are no numbers in tensors to look at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....common import env
from ....common.memory import Memory
from ...primitives.attention.choose import check
from ...primitives.attention.request import AttentionInputs
from .arguments import sink_of
from .call import MAX_PLANS, MEMORIES, Facts, Plan, facts_of, plan_of, plan_with, request_of
from .prepare import prepared
from .settings import CallArguments, Config, Described

# What num_splits is unless a caller says otherwise; True, which equals it, is another object.
ONE = 1
_NAMES = (type(None), str)

Key = tuple[Any, ...]


def is_plain(q: Any, k: Any, v: Any, qkv_format: Any, attn_mask_type: Any) -> bool:
    """Are these torch's own tensors and names, of which a key can be made?"""
    return (
        type(q) is Tensor
        and type(k) is Tensor
        and type(v) is Tensor
        and type(qkv_format) in _NAMES
        and type(attn_mask_type) in _NAMES
    )


def plain_call(
    config: Config,
    offset: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qkv_format: str | None,
    attn_mask_type: str | None,
) -> tuple[Plan, AttentionInputs]:
    """The plan of a call and its inputs; offset: the layer's learnable softmax_offset."""
    sink = None
    gradient = torch.is_grad_enabled()
    if gradient:
        gradient = q.requires_grad or k.requires_grad or v.requires_grad
    if config.softmax_type != "vanilla":
        sink = sink_of(config.softmax_type, offset, config.heads, q.device)
        gradient = gradient or (torch.is_grad_enabled() and sink is not None and sink.requires_grad)
    key = (
        config,
        qkv_format,
        attn_mask_type,
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
    )
    plan = plan_with(_PLAIN, key)
    if q.stride(-1) != 1:
        q = q.contiguous()
    if k.stride(-1) != 1:
        k = k.contiguous()
    if v.stride(-1) != 1:
        v = v.contiguous()
    return plan, AttentionInputs(q, k, v) if sink is None else AttentionInputs(q, k, v, sink=sink)


def check_plain(
    config: Config, q: Described, k: Described, v: Described, deterministic: bool, generation: int
) -> None:
    """Raise what a call of such tensors and nothing else would be refused with."""
    facts = _facts(config, (q, k, v), (None, None))
    gradient = q.requires_grad
    check(
        request_of(
            facts._replace(needs_gradient=gradient, deterministic=deterministic, generation=generation)
        )
    )


def _plan(key: Key) -> Plan:
    """The plan of a key, after every check that the call's tensors and names need."""
    config, qkv_format, attn_mask_type, *facts, gradient, deterministic, generation = key
    q, k, v = (Described(*x, requires_grad=False) for x in zip(facts[:3], facts[3:6], facts[6:], strict=True))
    found = _facts(config, (q, k, v), (qkv_format, attn_mask_type))
    return plan_of(
        found._replace(needs_gradient=gradient, deterministic=deterministic, generation=generation)
    )


def _facts(
    config: Config, qkv: tuple[Described, Described, Described], names: tuple[str | None, str | None]
) -> Facts:
    """What the tensors and names make of a call, checked; what is in force round it is the caller's to say."""
    qkv_format, attn_mask_type = names
    arguments = CallArguments(qkv_format=qkv_format, attn_mask_type=attn_mask_type)
    # The sink, which is there, is no part of the key.
    call, _ = prepared(config._replace(softmax_type="vanilla"), None, *qkv, arguments, only_shapes=True)
    return facts_of(*call._replace(settings=call.settings._replace(softmax=config.softmax_type)))


_PLAIN: Memory[Key, Plan] = Memory(_plan, MAX_PLANS)
MEMORIES.append(_PLAIN)
