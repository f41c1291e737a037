"""result = computed(backend, request, inputs, ..): an attention at once, in a fork of random numbers, or recomputed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ...distributed.recompute import checkpoint as recompute_checkpoint
from ...functions.attention.autograd import attend
from ...functions.attention.fp8 import Attention, Recomputed
from ...functions.attention.projected import Projection, attend_projection, split_anew
from ...primitives.attention.passes import Bound, Passes, Whole, passes_apart
from ...primitives.attention.request import AttentionInputs, AttentionRequest, AttentionResult


class Forks(NamedTuple):
    """How an attention is computed where that is not straight away.

    tracker     of the random states, in whose fork it runs; None: in none
    recompute   in the backward once more
    """

    tracker: Callable[[], Any] | None
    recompute: bool
    tp_group: Any


def computed(
    backend: Bound | Attention | Recomputed,
    request: AttentionRequest,
    inputs: AttentionInputs,
    projection: Projection | None = None,
    forks: Forks | None = None,
) -> AttentionResult:
    """The attention by what was chosen for it; projection: what q, k and v are views of, unknown to autograd."""
    if projection is not None:
        passes = passes_apart(backend, request, inputs) if forks is None else None
        if passes is not None:
            return attend_projection(passes, request, projection, inputs)
        inputs = split_anew(inputs, request, projection)
    if forks is not None:
        return _forked(backend, request, inputs, forks)
    if type(backend) is Whole:
        return backend.run(request, inputs)
    if isinstance(backend, Passes):
        return attend(backend, request, inputs)
    return backend.run(request, inputs)  # pyright: ignore[reportAttributeAccessIssue]


def _forked(
    backend: Bound | Attention | Recomputed, request: AttentionRequest, inputs: AttentionInputs, forks: Forks
) -> AttentionResult:
    """The same in the fork of a random state, if there is a tracker of one; recomputed in the backward if asked."""
    tracker, recompute, tp_group = forks

    def run(*tensors: Tensor | None) -> AttentionResult:
        with nullcontext() if tracker is None else tracker().fork():
            return computed(backend, request, AttentionInputs(*tensors))  # pyright: ignore[reportArgumentType]

    if not recompute:
        return run(*inputs)
    if tracker is None:
        return torch_checkpoint(run, *inputs, use_reentrant=False)  # pyright: ignore[reportReturnType]
    return recompute_checkpoint(
        run, *inputs, get_rng_state_tracker=tracker, tp_group=tp_group, use_reentrant=False
    )
