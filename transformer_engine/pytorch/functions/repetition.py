"""A layer's passes, each as a straight line once it has been the same a few times.

A pass is a plain function of the tensors that it is given and of facts that the layer's spec decides. It answers
tensors, and what is no tensor (`told`: the forms of saved operands), which is the same in every call of a kind. The
third call of a kind is recorded (`runtime/recording.py`); those after it run the line. The pass itself stays the one
place where anything is decided, and runs whenever something else than the kind of call could decide: a forced backend,
an observer, a dispatch mode, an offloading context.

A kind is what the spec leaves open: how the tensors lie, and the settings of quantizers. Of what a forward has saved
its backward looks at the caller's own tensors, which may have got other memory meanwhile, and at all of it where hooks
gave it back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...common.memory import Memory
from ..offload.marks import active as offloading
from ..primitives.gemm import undisturbed_in_eager_mode
from ..runtime.recording import Recording, Result
from ..runtime.straight_line import Line, straight_line
from ..tensor.quantizer import Quantizer
from .saving import keep, take_early

# (given, *facts) -> (results, told); given is emptied
Pass = Callable[..., "tuple[tuple[Any, ...], Any]"]

_RECORDED = 3  # the call of a kind that is recorded: what the first ones compile and plan is there by then
_TRIES = 8
_KEPT = 16
_NATIVE = (Tensor, torch.nn.Parameter, type(None))
_SUBCLASS = "a tensor is of a subclass"
_hooks_on_saved: Any = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]


class Kind:
    """The calls of a pass whose tensors lie alike.

    told     by the pass
    given    which of the results are tensors that the pass was given
    refusal  why there is no line; None: not yet, or there is one
    """

    __slots__ = ("calls", "given", "line", "refusal", "told")

    def __init__(self, told: Any = None) -> None:
        self.calls = 0
        self.line: Line | None = None
        self.told = told
        self.given: tuple[int, ...] = ()
        self.refusal: str | None = None


def _kind(key: tuple[Any, ...]) -> Kind:
    return Kind()


class Repeated:
    """A pass of one spec on one device; None: it does what no line does, and is always called as it is.

    quantizers   whose settings and states it reads, beside what it is given
    """

    __slots__ = ("device", "kinds", "passed", "quantizers")

    def __init__(self, passed: Pass, device: torch.device | None, quantizers: Sequence[Quantizer]):
        self.passed = passed
        self.device = device
        self.quantizers = tuple([quantizer for quantizer in quantizers if not quantizer.is_identity])
        self.kinds: Memory[Any, Kind] = Memory(_kind, _KEPT)

    def __call__(
        self, key: list[Any], given: list[Any], facts: tuple[Any, ...], beside: Sequence[Tensor] = ()
    ) -> tuple[tuple[Any, ...], Kind]:
        """The results of what is given, whose kind the key and the quantizers tell; beside: tensors in facts."""
        states = [*beside]
        for quantizer in self.quantizers:
            kept = quantizer.kept()
            if kept is None:
                return self.as_it_is(given, facts)
            key.append(kept[0])
            states += kept[1]
        kind = self.kinds[tuple(key)]
        if kind.line is not None:
            given += states  # one list, which the line empties: it alone holds what is saved
            results = kind.line(given)
            if results is not None:
                return results, kind
            del given[len(given) - len(states) :]
        elif kind.calls < _RECORDED + _TRIES and self.device is not None:
            return self._learnt(kind, given, states, facts, self.device)
        return self.as_it_is(given, facts)

    def as_it_is(self, given: list[Any], facts: tuple[Any, ...]) -> tuple[tuple[Any, ...], Kind]:
        results, told = self.passed(given, *facts)
        return results, Kind(told)

    def _learnt(
        self, kind: Kind, given: list[Any], states: list[Tensor], facts: tuple[Any, ...], device: torch.device
    ) -> tuple[tuple[Any, ...], Kind]:
        """The pass, recorded when its time has come."""
        kind.calls += 1
        if any(type(tensor) not in _NATIVE for tensor in given):
            kind.calls, kind.refusal = _RECORDED + _TRIES, _SUBCLASS
        if kind.calls < _RECORDED or kind.refusal == _SUBCLASS or _is_captured(device):
            return self.as_it_is(given, facts)
        with Recording([*given, *states], device) as recording:
            results, told = self.passed(given, *facts)
        answered = recording.results(results)
        line = straight_line(recording, answered) if recording.refusal is None else None
        if recording.refusal is None:
            kind.told, kind.given = told, _given(answered, recording.given)
            kind.line = line
        elif not recording.passing:
            kind.calls = _RECORDED + _TRIES
        kind.refusal = recording.refusal
        return results, Kind(told)


class Repeats:
    """The passes of a layer.

    answers   how many of the forward's results are not saved, and how many gradients the backward is given
    """

    __slots__ = ("_answers", "_backward", "_forward")

    def __init__(self, forward: Repeated, backward: Repeated, answers: int):
        self._forward = forward
        self._backward = backward
        self._answers = answers

    @property
    def passes(self) -> tuple[Repeated, Repeated]:
        return self._forward, self._backward

    def forward(
        self, given: list[Any], spec: Any, beside: Sequence[Tensor] = ()
    ) -> tuple[tuple[Any, ...], Kind]:
        """(results, the kind of the call); the spec says all of what is given but its strides.

        beside   the tensors of weights that the spec holds as they were quantized for an earlier microbatch
        """
        if _is_disturbed():
            return self._forward.as_it_is(given, (spec,))
        key = [None if tensor is None else tensor.stride() for tensor in given]
        if not beside:
            return self._forward(key, given, (spec,))
        key += [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in beside]
        return self._forward(key, given, (spec,), beside)

    def save(self, ctx: Any, kept: Sequence[Tensor | None], kind: Kind, update: Any) -> None:
        """`saving.save` of what a forward of a kind has answered."""
        keep(ctx, kept)
        ctx.forms, ctx.scale_update = kind.told, update
        ctx.kind, ctx.hooked = kind, _hooks_on_saved(False) is not None

    def backward(self, ctx: Any, grads: Sequence[Tensor | None], spec: Any) -> tuple[Any, ...]:
        """The gradients, of those of the forward's answers."""
        kind: Kind = ctx.kind
        given = [*grads, *take_early(ctx)]
        if kind.line is None or _is_disturbed() or (ctx.hooked and offloading.used):
            return self._backward.as_it_is(given, (spec, ctx))[0]
        key: list[Any] = [kind]
        looked_at = given if ctx.hooked else [*grads, *[given[i] for i in kind.given]]
        for tensor in looked_at:
            key += (None,) if tensor is None else (type(tensor), tensor.shape, tensor.stride(), tensor.dtype)
        del looked_at
        return self._backward(key, given, (spec, ctx))[0]


def repeats_on(device: torch.device) -> bool:
    """Do passes on a device come down to launches? On a CPU torch computes them, which no line is made of."""
    return device.type == "cuda"


def _is_disturbed() -> bool:
    """May something else decide than the kind of a call?"""
    return offloading.synchronizer is not None or not undisturbed_in_eager_mode()


def _given(results: Sequence[Result | None], given: int) -> tuple[int, ...]:
    return tuple(
        [i for i, result in enumerate(results) if result is not None and result.place.buffer < given]
    )


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
