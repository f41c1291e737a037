"""Which backend computes an attention: the first that does not refuse the request, in the order of its class.

A new backend is a file in backends/, a row in TABLE and a place in `preference`.
"""

from __future__ import annotations

import logging
from typing import cast

import torch

from ....common.dispatch import Table, Unsupported, Verdict
from . import reference
from .backends import cudnn, flash2, flash3, flash4, flex, torch_cudnn, torch_flash, torch_sdpa, triton
from .passes import Bound, Passes
from .request import AttentionRequest

# Tokens of a query up to which an attention to a cache is bound by the reading of keys and values.
DECODE_QUERIES = 16

# Inference over short sequences with small heads: H200, 32 sequences of 512, heads of 64: cudnn 0.072 ms, flash4 0.102;
# from 2048 tokens on they are equal.
SHORT, SMALL_HEAD = 1024, 64

# Multiply-adds of q k^T below which every backend's GPU time is shorter than its host time. torch's own attention, one
# node in C++, takes the host least: H200, a layer of 128 tokens both ways, 1.42 ms with it, 1.67 with flash4.
LAUNCH_BOUND = 1 << 29


def preference(request: AttentionRequest) -> tuple[str, ...]:
    """The names of the backends, fastest first for the class of requests that this one belongs to.

    docs/attention.md has the measurements.
    """
    if request.device.type != "cuda":
        return _ON_A_CPU
    if request.options.cached and request.shape.seqlen_q <= DECODE_QUERIES:
        return _DECODE
    if request.shape.dtype == torch.float32:
        return _FLOAT32
    if _is_launch_bound(request):
        return _LAUNCH_BOUND
    if (
        not request.options.needs_gradient
        and request.shape.seqlen_q <= SHORT
        and request.shape.head_dim_qk <= SMALL_HEAD
    ):
        return _SHORT
    return _DEFAULT


def _is_launch_bound(request: AttentionRequest) -> bool:
    """Does the GPU finish before the host has queued the call, under a mask that torch's own attention has by name?"""
    extent = request.shape.seqlen_q * request.shape.seqlen_kv
    if request.shape.batch * request.shape.heads * extent * request.shape.head_dim_qk > LAUNCH_BOUND:
        return False
    plain_causal = request.options.mask.name.startswith("causal") and request.options.mask.window == (-1, 0)
    aligned = request.shape.seqlen_q == request.shape.seqlen_kv
    return (request.options.mask.name == "no_mask" and not request.options.mask.banded) or (
        plain_causal and aligned
    )


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
_SHORT = ("cudnn", "torch_cudnn", *(name for name in _DEFAULT if name not in ("cudnn", "torch_cudnn")))
# Exact float32 products have no tensor cores: what torch computes with cuBLAS is faster than kernels of plain FMAs.
_LAUNCH_BOUND = _FLOAT32 = ("torch_sdpa", *(name for name in _DEFAULT if name != "torch_sdpa"))
_ON_A_CPU = (
    "torch_sdpa",
    "reference",
    *(name for name in _DEFAULT if name not in ("torch_sdpa", "reference")),
)

TABLE: Table[AttentionRequest] = Table(
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
    describe=AttentionRequest,
    order=preference,
)

logger = logging.getLogger("DotProductAttention")


class NoBackend(Unsupported, ValueError):
    """No backend takes an attention; a ValueError too, which callers of the original catch."""


def choose(request: AttentionRequest) -> Bound:
    """What computes the request, else NoBackend; NVTE_DEBUG=1 logs the choice, NVTE_DEBUG_LEVEL=2 the refusals."""
    try:
        bound = cast(Bound, TABLE.bind(request))
    except Unsupported as refusals:
        raise _no_backend(refusals) from None
    if logger.isEnabledFor(logging.INFO):
        logger.info("Selected backend = %s", bound.name)
        for verdict in explain(request):
            logger.debug("%s: %s", verdict.backend, verdict.refusal or "selected")
        logger.debug("%s", request)
    return bound


def check(request: AttentionRequest) -> None:
    """NoBackend unless a backend takes the request before it plans; nobody is told of it."""
    try:
        TABLE.name_of((request.shape, request.options, request.device))
    except Unsupported as refusals:
        raise _no_backend(refusals) from None


def _no_backend(refusals: Unsupported) -> NoBackend:
    return NoBackend(f"No dot product attention backend is available: {refusals}")


def passes_of(request: AttentionRequest) -> Passes:
    """The forward and backward functions of the first backend that takes the request and has them apart."""
    bound = TABLE.bind(request)
    if isinstance(bound, Passes):
        return bound
    for backend in TABLE.candidates(request):
        if backend.refusal(request) is None:
            assert backend.bind is not None
            bound = backend.bind(request)
            if isinstance(bound, Passes):
                return bound
    return reference.PASSES


def explain(request: AttentionRequest) -> list[Verdict]:
    """Every backend with its refusal, and which one choose() takes."""
    return TABLE.explain(request)
