"""graphed(module): the module, whose calls are captured by themselves once three have been alike.

A call whose signature has been met so often is captured and replayed, the others run eagerly. So do calls that a
replay could not stand for; the table says why, and `te.explain` prints it. Results have the bits of eager calls, and
belong to the caller.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from ...common.checks import described, whole
from ...common.dispatch import Backend, Table, undisturbed
from ..quantization.autocast import AutocastState, here
from ..runtime.device import has_cuda
from . import recorder
from .block import Block
from .build import Plan, recorded
from .caching import say_first
from .order import plain_steps
from .replayed import Replayed
from .signature import Leaves, obstacle_of, signature_of, standing_of

CAPTURED, EAGER = "captured", "eager"
_FIRST = "is_first_microbatch"
_WARM_UPS = 2
# Maximum number of signatures without a graph.
EAGER_SIGNATURES = 64
Function = TypeVar("Function", bound=Callable[..., Any])


class Situation(NamedTuple):
    """A call of a graphed module.

    obstacle   what stands in the way of capturing it, or of replaying now; None: nothing
    is_kept    is there a graph of its signature?
    calls      eager calls of its signature so far, of the `after` that are waited for
    kept       graphs that the module has, of `most` that it may have
    """

    obstacle: str | None
    is_kept: bool
    calls: int
    after: int
    kept: int
    most: int


def _refuses(call: Situation) -> str | None:
    if call.obstacle is not None:
        return call.obstacle
    if call.is_kept:
        return None
    if call.kept >= call.most:
        return f"{call.most} signatures are kept already; call reset(), or give graphed a larger signatures="
    if call.calls < call.after:
        return f"{call.calls} calls of this signature so far; it is captured after {call.after}"
    return None


TABLE: Table[Situation] = Table(
    "graphed", (Backend(CAPTURED, refuses=_refuses), Backend(EAGER)), describe=Situation
)


class _Entry:
    """What is known of a signature."""

    def __init__(self) -> None:
        self.calls = 0
        self.graph: Replayed | None = None
        self.failure: str | None = None


class AutomaticGraph:
    """The forward of a graphed module, or a graphed function.

    call   what runs eagerly
    """

    def __init__(self, call: Callable[..., Any], module: torch.nn.Module | None, after: int, signatures: int):
        self.call = call
        self.module = module
        self.after = after
        self.signatures = signatures
        self._entries: dict[tuple[Any, ...], _Entry] = {}
        self._first_at = _place_of_first(call)
        self.name = (
            getattr(call, "__name__", type(call).__name__) if module is None else type(module).__name__
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.call(*args, **kwargs)
        first, rest, named = self._without_first(args, kwargs)
        leaves = Leaves.of(rest, named)
        standing = standing_of(self.module)
        thread = here()
        obstacle = obstacle_of(leaves) or standing.obstacle or _obstacle_now(leaves, thread.recomputes)
        entry = _Entry()
        if obstacle is None:
            signature = signature_of(leaves, standing, thread.state, first is not None)
            entry = self._entry(signature)
            obstacle = entry.failure
            if obstacle is None and entry.graph is not None and entry.graph.waits:
                obstacle = (
                    "an earlier call waits for its backward, whose saved tensors a replay would overwrite"
                )
        situation = Situation(
            obstacle,
            entry.graph is not None,
            min(entry.calls, self.after),
            self.after,
            self.kept,
            self.signatures,
        )
        chosen = TABLE.choose(situation)
        if chosen == EAGER or not undisturbed():  # whoever observes wants to see what happens inside
            entry.calls += 1
            return self.call(*args, **kwargs)
        graph = entry.graph
        if graph is None:
            graph = self._capture(entry, leaves, thread.state, first)
            if graph is None:
                return self.call(*args, **kwargs)
        if first is not None:
            say_first(first)
        return graph.run(leaves.tensors, first)

    def _entry(self, signature: tuple[Any, ...]) -> _Entry:
        """The entry of a signature. The oldest one without a graph makes room where there are too many."""
        entry = self._entries.get(signature)
        if entry is None:
            eager = [key for key, known in self._entries.items() if known.graph is None]
            if len(eager) >= EAGER_SIGNATURES:
                del self._entries[eager[0]]
            entry = self._entries[signature] = _Entry()
        return entry

    def _without_first(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any, dict[str, Any]]:
        """(is_first_microbatch, the other arguments): a flag on the device says it to a graph."""
        if _FIRST in kwargs:
            rest = dict(kwargs)
            return rest.pop(_FIRST), args, rest
        at = self._first_at
        if at is not None and len(args) > at:
            return args[at], (*args[:at], None, *args[at + 1 :]), kwargs
        return None, args, kwargs

    def _capture(
        self, entry: _Entry, leaves: Leaves, state: AutocastState, first: bool | None
    ) -> Replayed | None:
        """The graph of a signature; None, with one warning, where it cannot be captured."""
        made = recorder.recorder_here()
        assert made is not None, "the table has seen a GPU"
        inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in leaves.tensors]
        wants = torch.is_grad_enabled() and (
            any(t.requires_grad for t in inputs)
            or (self.module is not None and any(p.requires_grad for p in self.module.parameters()))
        )
        block = Block(
            self.call, self.module, leaves.structure, inputs, state, caches=first is not None, training=wants,
            positions=leaves.positions, constants=leaves.constants,
        )  # fmt: skip
        graph = Replayed(block, clones_outputs=True)
        modules = [] if self.module is None else [self.module]
        try:
            recorded([graph], Plan(_WARM_UPS, tuple(plain_steps(1)), modules), made)
        except RuntimeError as error:
            # A capture refuses what it cannot hold, such as a value that the host reads, by errors of many texts.
            entry.failure = f"it could not be captured: {str(error).splitlines()[0]}"
            warnings.warn(f"graphed: {self.name} runs eagerly; {entry.failure}", stacklevel=4)
            return None
        entry.graph = graph
        return graph

    @property
    def kept(self) -> int:
        """How many signatures have a graph."""
        return sum([entry.graph is not None for entry in self._entries.values()])

    def reset(self) -> None:
        """Free all graphs and forget all signatures."""
        for entry in self._entries.values():
            if entry.graph is not None:
                entry.graph.reset()
        self._entries.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> AutomaticGraph:
        """A copy of a module begins without graphs, on its own parameters."""
        module = copy.deepcopy(self.module, memo)
        call = self.call if module is None else functools.partial(type(module).forward, module)
        return AutomaticGraph(call, module, self.after, self.signatures)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.module, self.call if self.module is None else None, self.after, self.signatures)


def _place_of_first(call: Callable[..., Any]) -> int | None:
    """Which positional argument is_first_microbatch is; None where there is none."""
    try:
        names = list(inspect.signature(call).parameters)
    except ValueError:  # a function written in C may have no signature, and has no such argument
        return None
    return names.index(_FIRST) if _FIRST in names else None


def _again(module: torch.nn.Module | None, call: Any, after: int, signatures: int) -> AutomaticGraph:
    if module is not None:
        call = functools.partial(type(module).forward, module)
    return AutomaticGraph(call, module, after, signatures)


def _obstacle_now(leaves: Leaves, recomputes: bool) -> str | None:
    """What of the moment stands in the way."""
    if not leaves.tensors:
        return "no argument is a tensor"
    away = [tensor.device.type for tensor in leaves.tensors if not records(tensor.device)]
    if away:
        return f"an argument is on {away[0]}; a CUDA graph takes tensors of a GPU"
    if recomputes:
        return "the call will be, or is, run a second time by a checkpoint"
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:  # pyright: ignore
        return "saved tensors go through hooks, which a replay would not call"
    if has_cuda() and torch.cuda.is_current_stream_capturing():
        return "a graph is being captured round the call"
    return None


def records(device: torch.device) -> bool:
    """Can what runs on a device be recorded?"""
    return device.type == "cuda"


def graphed(module: Function, *, after: int = 3, signatures: int = 4) -> Function:
    """The module itself, whose calls become CUDA graphs: after three alike, without sample arguments.

    after        eager calls of one signature before it is captured: of shapes, types, modes, recipe, parameters' places
    signatures   graphs that are kept at most; calls of further ones run eagerly

    `te.explain(module, x)` says whether a call is captured, and why not. Outputs and gradients are the caller's own,
    with the bits of eager calls. A second forward before the first one's backward runs eagerly. `module.reset()` frees
    all graphs. A function is wrapped; tensors that it reads beside its arguments must stay where they are.
    """
    if not callable(module):
        raise TypeError(f"module={described(module)} cannot be called; give a module or a function")
    whole("after", after)
    whole("signatures", signatures)
    if isinstance(getattr(module, "forward", None), AutomaticGraph) or isinstance(module, AutomaticGraph):
        raise ValueError("the module is graphed already; call graphed() once")
    if not isinstance(module, torch.nn.Module):
        return AutomaticGraph(module, None, after, signatures)  # pyright: ignore[reportReturnType]
    forward = AutomaticGraph(module.forward, module, after, signatures)
    vars(module).update(forward=forward, reset=forward.reset)
    return module  # pyright: ignore[reportReturnType]
