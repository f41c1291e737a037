"""graphed(module): the module, whose calls are captured automatically after three calls with equal signatures.

Calls run eagerly until their signature has occurred often enough, or if a replay cannot reproduce them; `te.explain`
prints the reason. Results are bit-equal to eager calls and are not overwritten by later calls.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...common.dispatch import Backend, Table, interventions
from ..quantization.autocast import AutocastState, here
from ..runtime.device import has_cuda
from . import build
from .build import CapturePlan, recorded
from .caching import write_first_flag
from .order import plain_steps
from .recorded_block import RecordedBlock
from .signature import ArgumentLeaves, call_signature, module_standing, unsupported_leaf_reason
from .static_block import StaticBlock

CAPTURED, EAGER = "captured", "eager"
OBSERVED = "an observer such as te.explain is active; it sees operations of eager calls only"
_FIRST = "is_first_microbatch"
_WARM_UPS = 2
# Maximum number of signatures without a graph.
EAGER_SIGNATURES = 64


class GraphSituation(NamedTuple):
    """A call to a graphed module.

    Attributes:
        obstacle: Why the call cannot be captured or replayed now, or None.
        is_kept: Whether its signature has a graph.
        calls: Eager calls with its signature so far.
        after: Eager calls before the capture.
        kept: Number of graphs of the module.
        most: Maximum graph count.
    """

    obstacle: str | None
    is_kept: bool
    calls: int
    after: int
    kept: int
    most: int


def describe_situation(obstacle: str | None, entry: Any, graphs: Any) -> GraphSituation:
    """Return the situation of a call: its obstacle, the entry of its signature, and the graph counts."""
    calls = min(entry.calls, graphs.after)
    return GraphSituation(
        obstacle, entry.graph is not None, calls, graphs.after, graphs.kept, graphs.signatures
    )


def free_graphs(entries: dict[Any, Any]) -> None:
    """Free the graphs of all signatures, and clear the signatures."""
    for entry in entries.values():
        if entry.graph is not None:
            entry.graph.reset()
    entries.clear()


def unsupported_reason(call: GraphSituation) -> str | None:
    """Return why the backend does not support the call, or None."""
    if call.obstacle is not None:
        return call.obstacle
    if call.is_kept:
        return None
    if call.kept >= call.most:
        return f"{call.most} signatures are kept already; call reset(), or give graphed a larger signatures="
    if call.calls < call.after:
        return f"{call.calls} calls of this signature so far; it is captured after {call.after}"
    return None


TABLE: Table[GraphSituation] = Table(
    "graphed",
    (Backend(CAPTURED, unsupported_reason=unsupported_reason), Backend(EAGER)),
    describe=GraphSituation,
)


@dataclass(eq=False)
class _Entry:
    """The state of one signature: the number of calls, the graph, or why its capture failed.

    Attributes:
        calls: Number of calls with the signature.
        graph: The captured graph, or None before the capture.
        failure: Reason why the capture failed, or None.
    """

    calls: int = 0
    graph: RecordedBlock | None = None
    failure: str | None = None


class AutomaticGraph:
    """The forward of a graphed module, or a graphed function.

    Attributes:
        call: The eager forward or function.
        reason: Why the last call ran eagerly; None if it replayed a graph.
    """

    def __init__(
        self, call: Callable[..., Any], module: torch.nn.Module | None, after: int, signatures: int
    ):
        self.call = call
        self.module = module
        self.after = after
        self.signatures = signatures
        self.reason: str | None = "it has not been called yet"
        self._entries: dict[tuple[Any, ...], _Entry] = {}
        try:
            names = list(inspect.signature(call).parameters)
        except ValueError:
            # a function written in C may have no signature, and has no such argument
            names = []
        self._first_at = names.index(_FIRST) if _FIRST in names else None
        self.name = (
            getattr(call, "__name__", type(call).__name__)
            if module is None
            else type(module).__name__
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.call(*args, **kwargs)
        first, rest, named = None, args, kwargs
        if _FIRST in kwargs:  # a flag on the device passes it to the graph
            named = dict(kwargs)
            first = named.pop(_FIRST)
        elif self._first_at is not None and len(args) > self._first_at:
            at = self._first_at
            first, rest = args[at], (*args[:at], None, *args[at + 1 :])
        leaves = ArgumentLeaves.of(rest, named)
        status = module_standing(self.module)
        thread = here()
        obstacle = (
            unsupported_leaf_reason(leaves)
            or status.obstacle
            or capture_obstacle(leaves, thread.recomputes)
        )
        entry = _Entry()
        if obstacle is None:
            signature = call_signature(leaves, status, thread.state, first is not None)
            entry = self._entry(signature)
            obstacle = entry.failure
            if obstacle is None and entry.graph is not None and entry.graph.waits:
                obstacle = "an earlier call waits for its backward, whose saved tensors a replay would overwrite"
        situation = describe_situation(obstacle, entry, self)
        self.reason = unsupported_reason(situation)
        chosen = TABLE.choose(situation)
        if chosen == CAPTURED and interventions:
            self.reason = chosen = OBSERVED
        if chosen != CAPTURED:
            entry.calls += 1
            return self.call(*args, **kwargs)
        graph = entry.graph
        if graph is None:
            graph = self._capture(entry, leaves, thread.state, first)
            if graph is None:
                return self.call(*args, **kwargs)
        if first is not None:
            write_first_flag(first)
        return graph.run(leaves.tensors, first)

    def _entry(self, signature: tuple[Any, ...]) -> _Entry:
        """Return the entry of a signature.

        A new entry replaces the least recently used one that only counts calls, where there are EAGER_SIGNATURES
        such entries. Graphs and failed captures are kept: either would otherwise be captured again.
        """
        entry = self._entries.get(signature)
        if entry is None:
            counting = [
                key
                for key, known in self._entries.items()
                if known.graph is None and known.failure is None
            ]
            if len(counting) >= EAGER_SIGNATURES:
                del self._entries[counting[0]]
            entry = self._entries[signature] = _Entry()
        elif entry.graph is None and entry.failure is None:
            self._entries.pop(signature, None)
            self._entries[signature] = entry  # at the end: used last
        return entry

    def _capture(
        self, entry: _Entry, leaves: ArgumentLeaves, state: AutocastState, first: bool | None
    ) -> RecordedBlock | None:
        """Capture the graph of a signature; if the capture fails, warn once and return None."""
        recorder = build.graph_recorder()
        assert recorder is not None, "the table chooses a capture only with a GPU"
        inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in leaves.tensors]
        wants = torch.is_grad_enabled() and (
            any(t.requires_grad for t in inputs)
            or (self.module is not None and any(p.requires_grad for p in self.module.parameters()))
        )
        block = StaticBlock(
            self.call,
            self.module,
            leaves.structure,
            inputs,
            state,
            caches=first is not None,
            training=wants,
            positions=leaves.positions,
            constants=leaves.constants,
        )
        graph = RecordedBlock(block, clones_outputs=True)
        modules = [] if self.module is None else [self.module]
        try:
            recorded([graph], CapturePlan(_WARM_UPS, tuple(plain_steps(1)), modules), recorder)
        except RuntimeError as error:
            # A capture fails with many different errors, for example if the host reads a value.
            entry.failure = f"it could not be captured: {str(error).splitlines()[0]}"
            warnings.warn(f"graphed: {self.name} runs eagerly; {entry.failure}", stacklevel=4)
            return None
        entry.graph = graph
        return graph

    @property
    def kept(self) -> int:
        """Signatures with a graph."""
        return sum([entry.graph is not None for entry in self._entries.values()])

    def reset(self) -> None:
        """Free all graphs and clear all signatures."""
        free_graphs(self._entries)

    def __deepcopy__(self, memo: dict[int, Any]) -> AutomaticGraph:
        """Copy the module without graphs."""
        module = copy.deepcopy(self.module, memo)
        call = self.call if module is None else functools.partial(type(module).forward, module)
        return AutomaticGraph(call, module, self.after, self.signatures)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (
            self.module,
            self.call if self.module is None else None,
            self.after,
            self.signatures,
        )


def _rebuilt(
    module: torch.nn.Module | None, call: Any, after: int, signatures: int
) -> AutomaticGraph:
    if module is not None:
        call = functools.partial(type(module).forward, module)
    return AutomaticGraph(call, module, after, signatures)


def capture_obstacle(leaves: ArgumentLeaves, recomputes: bool) -> str | None:
    """Return why a call cannot be captured at this moment, or None."""
    if not leaves.tensors:
        return "no argument is a tensor"
    away = [tensor.device.type for tensor in leaves.tensors if not records(tensor.device)]
    if away:
        return f"an argument is on {away[0]}; a CUDA graph takes tensors of a GPU"
    if recomputes:
        return "the call is run a second time by a checkpoint"
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:  # pyright: ignore
        return "saved tensors go through hooks, which a replay would not call"
    if has_cuda() and torch.cuda.is_current_stream_capturing():
        return "another graph is being captured"
    return None


def records(device: torch.device) -> bool:
    """Return whether operations on a device can be recorded."""
    return device.type == "cuda"
