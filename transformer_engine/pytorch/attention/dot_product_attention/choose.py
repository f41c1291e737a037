"""Which backend computes an attention: the first row of TABLE that does not refuse the request.

A new backend is a file in backends/ and a row here.
"""

from __future__ import annotations

import logging

import torch

from ....common.dispatch import Backend, Table, Verdict
from .backends import reference, torch_sdpa
from .request import AttentionRequest

TABLE: Table[AttentionRequest] = Table("attention", (torch_sdpa.BACKEND, reference.BACKEND))

logger = logging.getLogger("DotProductAttention")


def choose(request: AttentionRequest) -> Backend[AttentionRequest]:
    """The backend that takes the request; NVTE_DEBUG=1 logs it, NVTE_DEBUG_LEVEL=2 the refusals too."""
    backend = TABLE.select(request)
    if not torch.compiler.is_compiling() and logger.isEnabledFor(logging.INFO):
        logger.info("Selected backend = %s", backend.name)
        for verdict in explain(request):
            logger.debug("%s: %s", verdict.backend, verdict.refusal or "selected")
        logger.debug("%s", request)
    return backend


def explain(request: AttentionRequest) -> list[Verdict]:
    """Every backend with its refusal, and which one choose() returns."""
    return TABLE.explain(request)
