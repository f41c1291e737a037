"""Backend choice for an attention: the first that supports the call, in its class's order.

`TABLE` is the only backend list; each declares the features that it supports. A new backend is a
file in backends/, a row in `TABLE` and a place in `preference`.
"""

from __future__ import annotations

import logging
from typing import cast

import torch

from ....common.dispatch import Table, Unsupported, Verdict
from . import reference
from .backends import (
    cudnn,
    flash2,
    flash3,
    flash4,
    flex,
    torch_cudnn,
    torch_flash,
    torch_sdpa,
    triton,
)
from .call import AttentionCall
from .passes import Bound, Passes

# Query tokens up to which attention to a cache is bound by reading keys and values.
DECODE_QUERIES = 16

# Inference over short sequences with small heads: H200, 32 sequences with 512 tokens, head size 64:
# cudnn 0.072 ms, flash4 0.102; from 2048 tokens on they are equal.
SHORT, SMALL_HEAD = 1024, 64

# q k^T multiply-adds below which every backend's GPU time is shorter than its host time. torch's own attention, one
# node in C++, needs the least host time: H200, forward and backward of a 128-token layer, 1.42 ms; flash4 1.67 ms.
LAUNCH_BOUND = 1 << 29


def preference(call: AttentionCall) -> tuple[str, ...]:
    """Return the backend names, fastest first for calls in this class; docs/attention.md has measurements."""
    if call.device_type != "cuda":
        return _ON_A_CPU
    if call.cached and call.seqlen_q <= DECODE_QUERIES:
        return _DECODE
    if call.dtype == torch.float32:
        return _FLOAT32
    if _is_launch_bound(call):
        return _LAUNCH_BOUND
    if not call.needs_gradient and call.seqlen_q <= SHORT and call.head_dim_qk <= SMALL_HEAD:
        return _SHORT
    if call.hardware.has("flash attention 4") and not call.hardware.has("early flash attention 4"):
        return _CUDNN_FIRST
    return _DEFAULT


def _is_launch_bound(call: AttentionCall) -> bool:
    """Return whether host time dominates, under a mask that torch's own attention supports without a mask tensor."""
    if call.batch * call.heads * call.seqlen_q * call.seqlen_kv * call.head_dim_qk > LAUNCH_BOUND:
        return False
    unmasked = call.mask.name == "no_mask" and not call.mask.banded
    return unmasked or (call.plain_causal and call.seqlen_q == call.seqlen_kv)


_DEFAULT = (
    "flash4",
    "cudnn",
    "flash3",
    "torch_cudnn",
    "triton",
    "flash2",
    "torch_flash",
    "torch_sdpa",
    "flex",
    "reference",
)
_DECODE = ("triton", *(name for name in _DEFAULT if name != "triton"))
# GPUs for which the young library has kernels that no test in this project has run.
_CUDNN_FIRST = ("cudnn", *(name for name in _DEFAULT if name != "cudnn"))
_SHORT = (
    "cudnn",
    "torch_cudnn",
    *(name for name in _DEFAULT if name not in ("cudnn", "torch_cudnn")),
)
# Exact float32 products do not use tensor cores: cuBLAS, which torch calls, is faster than plain FMA kernels.
_LAUNCH_BOUND = _FLOAT32 = ("torch_sdpa", *(name for name in _DEFAULT if name != "torch_sdpa"))
_ON_A_CPU = (
    "torch_sdpa",
    "reference",
    *(name for name in _DEFAULT if name not in ("torch_sdpa", "reference")),
)

TABLE: Table[AttentionCall] = Table(
    "attention",
    (
        flash4.BACKEND,
        cudnn.BACKEND,
        flash3.BACKEND,
        torch_cudnn.BACKEND,
        triton.BACKEND,
        flash2.BACKEND,
        torch_flash.BACKEND,
        torch_sdpa.BACKEND,
        flex.BACKEND,
        reference.BACKEND,
    ),
    describe=lambda call: call,
    order=preference,
)

logger = logging.getLogger("DotProductAttention")


class NoBackend(Unsupported, ValueError):
    """No backend supports an attention; also a ValueError, which callers of NVIDIA's engine catch."""


def choose(call: AttentionCall) -> Bound:
    """Return the backend bound to a call; NVTE_DEBUG=1 logs the choice, NVTE_DEBUG_LEVEL=2 all reasons.

    Raises:
        NoBackend: No backend supports the call; the message lists every reason.
    """
    try:
        bound = cast(Bound, TABLE.bind(call))
    except Unsupported as reasons:
        raise NoBackend(f"No dot product attention backend is available: {reasons}") from None
    if logger.isEnabledFor(logging.INFO):
        logger.info("Selected backend = %s", bound.name)
        for verdict in explain(call):
            logger.debug("%s: %s", verdict.backend, verdict.reason or "selected")
        logger.debug("%s", call)
    return bound


def check(call: AttentionCall) -> None:
    """Raise NoBackend unless a backend supports the call; nothing is planned and observers are not called."""
    try:
        TABLE.name_of((call,))
    except Unsupported as reasons:
        raise NoBackend(f"No dot product attention backend is available: {reasons}") from None


def choose_passes(call: AttentionCall) -> Passes:
    """Choose the first backend that supports the call and has separate forward and backward functions."""
    bound = TABLE.bind(call)
    if isinstance(bound, Passes):
        return bound
    for backend in TABLE.candidates(call):
        if backend.rejection_reason(call) is None:
            assert backend.bind is not None
            bound = backend.bind(call)
            if isinstance(bound, Passes):
                return bound
    return reference.PASSES


def explain(call: AttentionCall) -> list[Verdict]:
    """Return every backend with the reason why it is not used, and which one `choose` returns."""
    return TABLE.explain(call)
