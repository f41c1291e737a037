"""results, told = repeated(given, facts): a pass of a layer, as a straight line once it has been the same a few times.

A pass is a plain function of the tensors that it is given and of facts that the layer's spec decides. It answers
tensors, and what is no tensor (`told`: the forms of saved operands), which is the same in every call of a kind. The
third call of a kind is recorded (`runtime/recording.py`); those after it run the line. The pass itself stays the one
place where anything is decided, and runs whenever something else than the kind of call could decide: a forced backend,
an observer, a dispatch mode, an offloading context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.memory import Memory
from ..offload.marks import active as offloading
from ..primitives.gemm import undisturbed_products
from ..runtime.recording import Recording
from ..runtime.straight_line import Line, straight_line
from ..tensor.quantizer import Quantizer

# (given, *facts) -> (results, told); given is emptied
Pass = Callable[..., "tuple[tuple[Any, ...], Any]"]

_RECORDED = 3  # the call of a kind that is recorded: what the first ones compile and plan is there by then
_TRIES = 8
_KEPT = 16
_NATIVE = (Tensor, torch.nn.Parameter, type(None))
_SUBCLASS = "a tensor is of a subclass"


class _Kind:
    """The calls whose tensors lie alike.

    refusal   why there is no line; None: not yet, or there is one
    """

    __slots__ = ("calls", "line", "refusal", "told")

    def __init__(self) -> None:
        self.calls = 0
        self.line: Line | None = None
        self.told: Any = None
        self.refusal: str | None = None


def _kind(key: tuple[Any, ...]) -> _Kind:
    return _Kind()


class Repeated:
    """A pass of one spec on one device; None: it does what no line does, and is always called as it is.

    quantizers   whose settings and states it reads, beside what it is given
    """

    __slots__ = ("device", "kinds", "passed", "quantizers")

    def __init__(self, passed: Pass, device: torch.device | None, quantizers: Sequence[Quantizer]):
        self.passed = passed
        self.device = device
        self.quantizers = tuple([quantizer for quantizer in quantizers if not quantizer.is_identity])
        self.kinds: Memory[Any, _Kind] = Memory(_kind, _KEPT)

    def __call__(self, given: list[Any], *facts: Any) -> tuple[tuple[Any, ...], Any]:
        if self.device is None or offloading.synchronizer is not None or not undisturbed_products():
            return self.passed(given, *facts)
        key: list[Any] = [None if t is None else (type(t), t.shape, t.stride(), t.dtype) for t in given]
        states: list[Tensor] = []
        for quantizer in self.quantizers:
            kept = quantizer.kept()
            if kept is None:
                return self.passed(given, *facts)
            key.append(kept[0])
            states += kept[1]
        kind = self.kinds[tuple(key)]
        if kind.line is not None:
            results = kind.line([*given, *states])
            if results is not None:
                return results, kind.told
        elif kind.calls < _RECORDED + _TRIES:
            return self._learnt(kind, given, states, facts)
        return self.passed(given, *facts)

    def _learnt(
        self, kind: _Kind, given: list[Any], states: list[Tensor], facts: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], Any]:
        """The pass, recorded when its time has come."""
        assert self.device is not None
        kind.calls += 1
        if any(type(tensor) not in _NATIVE for tensor in given):
            kind.calls, kind.refusal = _RECORDED + _TRIES, _SUBCLASS
        if kind.calls < _RECORDED or kind.refusal == _SUBCLASS or _is_captured(self.device):
            return self.passed(given, *facts)
        with Recording([*given, *states], self.device) as recording:
            results, told = self.passed(given, *facts)
        answered = recording.results(results)
        line = straight_line(recording, answered) if recording.refusal is None else None
        if recording.refusal is None:
            kind.line, kind.told = line, told
        elif not recording.passing:
            kind.calls = _RECORDED + _TRIES
        kind.refusal = recording.refusal
        return results, told


class Repeats(NamedTuple):
    """The passes of a layer."""

    forward: Repeated
    backward: Repeated


def repeats_on(device: torch.device) -> bool:
    """Do passes on a device come down to launches? On a CPU torch computes them, which no line is made of."""
    return device.type == "cuda"


def save_repeated(ctx: Any, kept: Sequence[Tensor | None], forms: list[Any], update: Any) -> None:
    """`saving.save` of what a pass has packed."""
    ctx.save_for_backward(*kept)
    ctx.forms, ctx.scale_update = forms, update


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
