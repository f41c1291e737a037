"""Expert choice on GPUs: logits are read once, and an expert row stays in registers until its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ...runtime.launching import DTYPE_NAMES, perform, run, unsupported_elementwise
from .reference import RouterRequest

_EXPERTS = 4096  # experts that a program can hold
_LIMIT = 1 << 31  # tokens are numbered in 32 bits


def unsupported_reason(request: RouterRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    rows, experts = request.shape
    if rows >= _LIMIT:
        return f"{rows} tokens; it numbers fewer than {_LIMIT}"
    if request.operation != "loss" and experts > _EXPERTS:
        return f"{experts} experts > {_EXPERTS}"
    return unsupported_elementwise(request.device, request.dtype, request.result_dtype)


def bind(request: RouterRequest) -> Callable[..., Any]:
    """Return a callable with the same arguments and results as `reference.bind`."""
    return {"choose": _choose, "gradient": _gradient, "loss": _loss, "margins": _margins}[
        request.operation
    ](request)


def _choose(request: RouterRequest) -> Callable[..., Any]:
    from ....common.kernels import router

    choice = request.choice
    launch = router.choose(
        *request.shape,
        choice.k,
        router.SCORES[choice.score],
        choice.all_weights,
        choice.groups,
        choice.scale,
        router.MAPS[choice.map],
        DTYPE_NAMES[request.result_dtype],
        request.saves_scores,
    )

    def choose(logits: Tensor, bias: Tensor | None, indices: Tensor | None) -> Any:
        bias = None if bias is None else bias.contiguous()
        return tuple(run(launch, (logits.contiguous(), bias, indices)))

    return choose


def _gradient(request: RouterRequest) -> Callable[..., Tensor]:
    from ....common.kernels import router

    choice = request.choice
    facts = (
        choice.k,
        router.SCORES[choice.score],
        choice.all_weights,
        choice.scale,
        router.MAPS[choice.map],
    )
    launch = router.gradient(*request.shape, *facts, DTYPE_NAMES[request.result_dtype])

    def gradient(map: Tensor | None, scores: Tensor, grad_probs: Tensor) -> Tensor:
        # Without a map, which a loss does not need, scores are passed as the first input, which determines the device.
        read = scores if map is None or choice.all_weights else map.contiguous()
        return run(launch, (read, scores.contiguous(), grad_probs.contiguous()))[0]

    return gradient


def _margins(request: RouterRequest) -> Callable[..., None]:
    from ....common.kernels import router_margins

    launch = router_margins.margins(*request.shape, request.choice.k, request.bins)

    def margins(logits: Tensor, bias: Tensor, histogram: Tensor, bounds: Tensor) -> None:
        run(launch, (logits.contiguous(), bias.contiguous(), histogram, bounds.contiguous()))

    return margins


def _loss(request: RouterRequest) -> Callable[..., Tensor]:
    rows, columns = request.shape
    if rows * columns == 0:
        return lambda probs, tokens, total: torch.zeros(1, dtype=probs.dtype, device=probs.device)
    from ....common.kernels import router

    program = router.loss(rows, columns, request.factor, DTYPE_NAMES[request.result_dtype])

    return lambda probs, tokens, total: perform(
        program, (probs.contiguous(), tokens.contiguous(), total)
    )[0]


BACKEND: Backend[RouterRequest] = Backend(
    "triton", unsupported_reason=unsupported_reason, bind=bind, opaque=True
)
