"""Which backend computes an attention: the first that does not refuse the request, in the order of its class.

A new backend is a file in backends/, a row in TABLE and a place in `preference`.
"""

from __future__ import annotations

import logging

import torch

from ....common.dispatch import Backend, Table, Unsupported, Verdict
from ...tracing import constant_while_tracing
from .autograd import Kernels
from .backends import (
    cudnn,
    flash2,
    flash3,
    flash4,
    flex,
    reference,
    torch_cudnn,
    torch_flash,
    torch_sdpa,
    triton,
)
from .request import AttentionRequest
from .text import as_text, from_text

# Tokens of a query up to which an attention to a cache is bound by the reading of keys and values.
DECODE_QUERIES = 16

# Inference over short sequences with small heads: H200, 32 sequences of 512, heads of 64: cudnn 0.072 ms, flash4 0.102;
# from 2048 tokens on they are equal.
SHORT, SMALL_HEAD = 1024, 64

# Multiply-adds of q k^T below which every backend's GPU time is shorter than its host time. torch's own attention, one
# node in C++, takes the host least: H200, a layer of 128 tokens both ways, 1.42 ms with it, 1.67 with flash4.
LAUNCH_BOUND = 1 << 29

# The kernels of one backend, for those that compute a sequence in parts and put the parts together themselves.
_KERNELS: dict[str, Kernels] = {
    module.KERNELS.name: module.KERNELS
    for module in (flash4, cudnn, torch_cudnn, triton, torch_flash, reference)
}


def preference(request: AttentionRequest) -> tuple[str, ...]:
    """The names of the backends, fastest first for the class of requests that this one belongs to.

    docs/attention.md has the measurements.
    """
    if request.device_type != "cuda":
        return _ON_A_CPU
    if request.cached and request.seqlen_q <= DECODE_QUERIES:
        return _DECODE
    if request.dtype == torch.float32:
        return _FLOAT32
    if _is_launch_bound(request):
        return _LAUNCH_BOUND
    if not request.needs_gradient and request.seqlen_q <= SHORT and request.head_dim_qk <= SMALL_HEAD:
        return _SHORT
    return _DEFAULT


def _is_launch_bound(request: AttentionRequest) -> bool:
    """Does the GPU finish before the host has queued the call, under a mask that torch's own attention has by name?"""
    extent = request.seqlen_q * request.seqlen_kv
    if request.batch * request.heads * extent * request.head_dim_qk > LAUNCH_BOUND:
        return False
    plain_causal = request.mask.name.startswith("causal") and request.mask.window == (-1, 0)
    aligned = request.seqlen_q == request.seqlen_kv
    return (request.mask.name == "no_mask" and not request.mask.banded) or (plain_causal and aligned)


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
    preference,
)

logger = logging.getLogger("DotProductAttention")


class NoBackend(Unsupported, ValueError):
    """No backend takes an attention; a ValueError too, which callers of the original catch."""


def choose(request: AttentionRequest) -> Backend[AttentionRequest]:
    """The backend that takes the request, else NoBackend; NVTE_DEBUG=1 logs it, NVTE_DEBUG_LEVEL=2 the refusals."""
    try:
        backend = TABLE.select(request)
    except Unsupported as refusals:
        raise _no_backend(refusals) from None
    if logger.isEnabledFor(logging.INFO):
        logger.info("Selected backend = %s", backend.name)
        for verdict in explain(request):
            logger.debug("%s: %s", verdict.backend, verdict.refusal or "selected")
        logger.debug("%s", request)
    return backend


def check(request: AttentionRequest) -> None:
    """NoBackend unless a backend takes the request; nobody is told of it."""
    try:
        TABLE.prospect(request, lambda: request)
    except Unsupported as refusals:
        raise _no_backend(refusals) from None


def _no_backend(refusals: Unsupported) -> NoBackend:
    return NoBackend(f"No dot product attention backend is available: {refusals}")


def choose_when_traced(request: AttentionRequest) -> Backend[AttentionRequest]:
    """choose(request) for a tracing compiler, which sees a constant: refusals may ask libraries."""
    if request.score_mod is not None:
        return TABLE.select(request)
    return TABLE.named(_chosen_name(as_text(request)))


@constant_while_tracing
def _chosen_name(text: str) -> str:
    return choose(from_text(text)).name


def kernels(request: AttentionRequest) -> Kernels:
    """The forward and backward functions of the first backend that takes the request and has them apart."""
    chosen = TABLE.select(request)
    if chosen.name in _KERNELS:
        return _KERNELS[chosen.name]
    for backend in TABLE.candidates(request):
        if backend.name in _KERNELS and backend.refuses(request) is None:
            return _KERNELS[backend.name]
    return reference.KERNELS


def kernels_when_traced(request: AttentionRequest) -> Kernels:
    """kernels(request) for a tracing compiler."""
    return _KERNELS[_name_of_kernels(as_text(request))]


@constant_while_tracing
def _name_of_kernels(text: str) -> str:
    return kernels(from_text(text)).name


def explain(request: AttentionRequest) -> list[Verdict]:
    """Every backend with its refusal, and which one choose() returns."""
    return TABLE.explain(request)
