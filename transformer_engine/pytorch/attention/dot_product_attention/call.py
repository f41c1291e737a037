"""request = request_of(options, sequences, inputs): one call of an attention as the data that a choice is made by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common import env
from ....common.dispatch import Backend
from ...device import get_device_compute_capability
from .arguments import check_bias, one_of
from .mask import Mask
from .request import BIAS_TYPES, AttentionInputs, AttentionRequest, Switches
from .sequences import Sequences

# What else than its arguments a choice depends on.
CHOICE_VARIABLES = (
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "NVTE_UNFUSED_ATTN",
    "NVTE_FLASH_ATTN_V2",
    "NVTE_FLASH_ATTN_V3",
    "NVTE_FLASH_ATTN_V4",
    "NVTE_FUSED_ATTN_BACKEND",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
)


class Options(NamedTuple):
    """The settings of a call that are no tensors; the fields of AttentionRequest of the same names."""

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

    options: Options
    sequences: Sequences
    inputs: AttentionInputs
    slopes_given: bool


class Described(NamedTuple):
    """A tensor that is not there yet: what checks read of it."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def is_cuda(self) -> bool:
        """Is it on a GPU?"""
        return self.device.type == "cuda"


class Plan(NamedTuple):
    """A request and the backend that takes it."""

    request: AttentionRequest
    backend: Backend[AttentionRequest]


def request_of(
    options: Options, sequences: Sequences, inputs: AttentionInputs, slopes_given: bool
) -> AttentionRequest:
    """The request of a call; ValueError when its bias does not fit."""
    one_of("core_attention_bias_type", options.bias, BIAS_TYPES)
    q, k, v, bias = inputs.q, inputs.k, inputs.v, inputs.bias
    cuda = q.is_cuda
    request = AttentionRequest(
        dtype=q.dtype,
        device_type=q.device.type,
        batch=known(sequences.batch),
        heads=known(q.shape[-2]),
        groups=known(k.shape[-2]),
        seqlen_q=known(sequences.max_q),
        seqlen_kv=known(sequences.max_kv),
        head_dim_qk=known(q.shape[-1]),
        head_dim_v=known(v.shape[-1]),
        q_format=options.q_format,
        kv_format=options.kv_format,
        mask=options.mask,
        scale=options.scale,
        switches=Switches.from_environment(),
        bias=options.bias,
        softmax=options.softmax,
        dropout=options.dropout,
        padded_between=sequences.padded_between,
        max_logit=options.max_logit,
        needs_gradient=_needs_gradient(inputs),
        deterministic=is_deterministic(),
        capability=get_device_compute_capability() if cuda else (0, 0),
        bias_shape=_shape(bias),
        bias_gradient=bias is not None and bias.requires_grad and torch.is_grad_enabled(),
        slopes_shape=_shape(inputs.slopes),
        slopes_given=slopes_given,
        masked_shape=_shape(inputs.masked),
        padding_tensors=inputs.masked_q is not None or inputs.masked_kv is not None,
        same_lengths=inputs.lengths_q is not None and inputs.lengths_q is inputs.lengths_kv,
        page_size=options.page_size,
        num_splits=options.num_splits,
        cached=options.cached,
        score_mod=options.score_mod,
    )
    check_bias(request, bias)
    return request


def known(size: int) -> int:
    """The size; where a tracing compiler has a symbol for it, the number, which its graph is then guarded by.

    A choice is made for numbers: each longest sequence has a graph of its own. The tokens of packed sequences, which
    no choice depends on, stay a symbol.
    """
    # The bounds of a range are what every version of the tracer wants a number for.
    return len(range(size)) if torch.compiler.is_compiling() else size


def _shape(x: Tensor | None) -> tuple[int, ...] | None:
    return None if x is None else tuple(known(size) for size in x.shape)


def call_key(
    options: Options, sequences: Sequences, inputs: AttentionInputs, slopes_given: bool
) -> tuple[Any, ...]:
    """Everything that request_of reads, in a form that costs little to make and to look up."""
    q, k, v, bias, slopes, masked = (
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.bias,
        inputs.slopes,
        inputs.masked,
    )
    return (
        options,
        q.shape,
        k.shape,
        v.shape,
        q.dtype,
        q.device,
        sequences.batch,
        sequences.max_q,
        sequences.max_kv,
        sequences.padded_between,
        _needs_gradient(inputs),
        inputs.lengths_q is inputs.lengths_kv,
        inputs.masked_q is None and inputs.masked_kv is None,
        None if bias is None else (bias.shape, bias.requires_grad),
        None if slopes is None else (slopes.shape, slopes_given),
        None if masked is None else masked.shape,
        torch.are_deterministic_algorithms_enabled(),
        env.stored(CHOICE_VARIABLES),
    )


def _needs_gradient(inputs: AttentionInputs) -> bool:
    if not torch.is_grad_enabled():
        return False
    if inputs.q.requires_grad or inputs.k.requires_grad or inputs.v.requires_grad:
        return True
    bias, sink = inputs.bias, inputs.sink
    return (bias is not None and bias.requires_grad) or (sink is not None and sink.requires_grad)


def is_deterministic() -> bool:
    """Must gradients be bitwise repeatable?"""
    return not env.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") or torch.are_deterministic_algorithms_enabled()
