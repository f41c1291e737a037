"""graphed(step): a whole training step in one CUDA graph, captured after some eager calls with equal signatures.

The eager calls are training steps like all others. The capture itself computes nothing, and its first replay is the
step of that call. A step with a new signature (another shape, another setting) begins with eager calls again.
"""

from __future__ import annotations

import inspect
import os
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...common.checks import described, suggests_keywords, whole
from ...common.dispatch import interventions
from ..quantization.autocast import here
from ..runtime.capture import Recorder
from . import automatic, build
from .recorded_step import RecordedStep
from .signature import ArgumentLeaves, Standing, call_signature, unsupported_leaf_reason
from .step_state import Facts, StepState, change_between, host_random_state, observe_optimizers

Function = TypeVar("Function", bound=Callable[..., Any])
_PACKAGE = Path(__file__).parents[2]
_OWN = tuple([f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, _PACKAGE)])
_NO_WAITING = (
    "a capture cannot wait for the GPU or copy from pageable memory: move .item(), .tolist(), .cpu(), print(tensor), "
    "indexing by a mask, and torch.tensor(...) on the GPU out of the step"
)


@dataclass(eq=False)
class _StepEntry:
    """The state of one signature.

    Attributes:
        constants: Results of the last call that are not tensors.
        failure: Why the capture failed.
        graph: The recorded step.
        calls: Eager calls that changed nothing on the host.
    """

    constants: tuple[Any, ...] | None = None
    failure: str | None = None
    graph: RecordedStep | None = None
    calls: int = 0


@dataclass(eq=False)
class TrainingStep:
    """A graphed training step.

    Attributes:
        function: The eager step.
        after: Eager calls with a signature before its capture, besides those that change state on the host.
        signatures: Maximum graph count.
        optimizers: Optimizers that a call has stepped.
        reason: Why the last call ran eagerly; None if it replayed a graph.
    """

    function: Callable[..., Any]
    after: int
    signatures: int
    optimizers: Sequence[torch.optim.Optimizer] = ()
    reason: str | None = "the step has not been called yet"
    _entries: dict[Any, _StepEntry] = field(default_factory=dict)
    _facts: Facts | None = None
    _change: str | None = None
    _pool: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return detach_result(self.function(*args, **kwargs))
        leaves = ArgumentLeaves.of(args, kwargs)
        state = StepState.of(self.function, self.optimizers)
        thread = here()
        obstacle = (
            unsupported_leaf_reason(leaves)
            or state.obstacle
            or self._obstacle_now(leaves, state, (args, kwargs))
        )
        if obstacle is not None:
            self._choose(obstacle, _StepEntry())
            return detach_result(self.function(*args, **kwargs))
        status = Standing(state.signature, None)
        entry = self._entry(call_signature(leaves, status, thread.state, caches=False))
        if entry.graph is not None and entry.graph.is_stale:
            entry.graph, entry.calls = None, 0
        chosen = self._choose(entry.failure or self._describe_change(entry, state), entry)
        if entry.failure is not None:
            return detach_result(self.function(*args, **kwargs))
        if chosen == automatic.CAPTURED and interventions:
            self.reason = chosen = automatic.OBSERVED
        if chosen != automatic.CAPTURED:
            return self._run_eagerly(entry, state, leaves, args, kwargs)
        graph = entry.graph or self._capture(entry, leaves, state)
        if graph is None:
            return detach_result(self.function(*args, **kwargs))
        self._facts = state.facts
        return graph.replay(leaves.tensors)

    @property
    def kept(self) -> int:
        """Signatures with a graph."""
        return sum([entry.graph is not None for entry in self._entries.values()])

    def reset(self) -> None:
        """Free all graphs and clear all signatures."""
        automatic.free_graphs(self._entries)
        self._facts = self._change = None

    def _choose(self, obstacle: str | None, entry: _StepEntry) -> str:
        """Choose between a graph and an eager call, and note the reason."""
        situation = automatic.describe_situation(obstacle, entry, self)
        self.reason = automatic.unsupported_reason(situation)
        return automatic.TABLE.choose(situation)

    def _describe_change(self, entry: _StepEntry, state: StepState) -> str | None:
        """Return what the previous call changed on the host, or what changed since, as a reason; or None."""
        if entry.graph is not None:
            return None
        if self._change is not None:
            return f"the previous call changed {self._change}, which a replay would not repeat"
        between = None if self._facts is None else change_between(self._facts, state.facts)
        return None if between is None else f"since the previous call, this changed: {between}"

    def _entry(self, signature: Any) -> _StepEntry:
        """Return the entry of a signature, and limit how many entries only count calls."""
        entry = self._entries.pop(signature, None) or _StepEntry()
        counting = [
            key for key, e in self._entries.items() if e.graph is None and e.failure is None
        ]
        if len(counting) >= automatic.EAGER_SIGNATURES:
            del self._entries[counting[0]]
        self._entries[signature] = entry
        return entry

    def _run_eagerly(
        self,
        entry: _StepEntry,
        state: StepState,
        leaves: ArgumentLeaves,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call the step, and count the call if it leaves the state on the host unchanged.

        It runs on the capture stream, so that the libraries' workspaces and autograd's accumulators
        of this stream exist before the capture.
        """
        random = host_random_state(state.generators)
        versions = [tensor._version for tensor in leaves.tensors]
        recorder = self._recorder()
        with recorder.capture_stream_context():
            result = detach_result(self.function(*args, **kwargs))
        recorder.keep_until_read(_result_tensors(result, state.parameters))
        after = StepState.of(self.function, self.optimizers)
        change = change_between(state.facts, after.facts)
        if change is None:
            change = _find_written_argument(self.function, leaves, versions, (args, kwargs))
        drawn = change_between(random, host_random_state(state.generators))
        if change is None and drawn is not None:
            change = f"a random generator of the host ({drawn}); draw on the GPU, or pass the numbers as an argument"
        constants = tuple(
            [leaf for leaf in pytree.tree_leaves(result) if not isinstance(leaf, Tensor)]
        )
        if change is None and entry.constants is not None and constants != entry.constants:
            change = f"its result {constants}, which is no tensor; return a tensor"
        entry.constants = constants
        entry.calls += change is None
        self._change, self._facts = change, after.facts
        return result

    def _recorder(self) -> Recorder:
        """Return a recorder in the memory pool of the stored graphs, or in a new one.

        The graphs of one step share a pool, because they never run at the same time. A pool ends with its last graph.
        """
        if self.kept == 0:
            self._pool = None
        recorder = build.graph_recorder(self._pool)
        assert recorder is not None, "without a GPU there is an obstacle"
        return recorder

    def _capture(
        self, entry: _StepEntry, leaves: ArgumentLeaves, state: StepState
    ) -> RecordedStep | None:
        """Capture the graph of a signature; if the capture fails, warn once and return None."""
        recorder = self._recorder()
        try:
            with build.capturing():
                entry.graph = RecordedStep(self.function, leaves, state, recorder)
        except RuntimeError as error:
            # torch raises RuntimeError and its subclasses for operations that cannot be captured.
            # Other errors come from the step.
            failure = f"it could not be captured: {_describe_error(error)}"
            self.reason = failure
            if isinstance(error, torch.OutOfMemoryError):
                entry.calls = 0  # another capture may succeed
            else:
                entry.failure = failure
            name = getattr(self.function, "__name__", type(self.function).__name__)
            warnings.warn(f"graphed: {name} runs eagerly; {failure}", stacklevel=4)
        else:
            self._pool = getattr(recorder, "pool", None)
        return entry.graph

    def _obstacle_now(self, leaves: ArgumentLeaves, state: StepState, arguments: Any) -> str | None:
        """Return why a call cannot be captured at this moment, or None."""
        for tensor, position in zip(leaves.tensors, leaves.positions, strict=True):
            obstacle = _argument_obstacle(tensor)
            if obstacle is not None:
                return f"argument {_argument_name(self.function, arguments, position)} {obstacle}"
        away = next((p.device for p in state.parameters if not automatic.records(p.device)), None)
        if away is not None:
            return f"a parameter is on {away}; a CUDA graph takes tensors of a GPU"
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            ranks = torch.distributed.get_world_size()
            if ranks > 1:
                return f"the step runs on {ranks} ranks; graph the modules instead, with te.graphed(module)"
        return automatic.capture_obstacle(leaves, here().recomputes)


def _argument_obstacle(tensor: Tensor) -> str | None:
    """Return why an argument prevents a capture, or None."""
    if tensor.requires_grad:
        return "requires a gradient; pass it detached, or graph the module instead"
    if not automatic.records(tensor.device):
        return f"is on {tensor.device}; a CUDA graph takes tensors of a GPU"
    if tensor.is_inference():
        return "is an inference tensor, whose writes are not counted; pass a clone"
    return None


def _argument_name(function: Callable[..., Any], arguments: Any, position: int) -> str:
    """Return the name of an (args, kwargs) leaf, such as batch['tokens']."""
    path = pytree.tree_flatten_with_path(arguments)[0][position][0]
    key: Any = path[1]
    if hasattr(key, "key"):
        name = str(key.key)
    else:
        names = list(inspect.signature(function).parameters)
        name = names[key.idx] if key.idx < len(names) else str(key.idx)
    return name + pytree.keystr(path[2:])


def _find_written_argument(
    function: Callable[..., Any], leaves: ArgumentLeaves, versions: list[int], arguments: Any
) -> str | None:
    """Return an argument that a call has written; a replay writes the static copy of the argument instead."""
    for tensor, position, version in zip(leaves.tensors, leaves.positions, versions, strict=True):
        if tensor._version != version:
            return f"argument {_argument_name(function, arguments, position)}"
    return None


def detach_result(result: Any) -> Any:
    """Return the result of an eager call without its autograd graph, which a replay does not have either."""
    return pytree.tree_map_only(
        Tensor, lambda leaf: leaf.detach() if leaf.requires_grad else leaf, result
    )


def _result_tensors(result: Any, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in a result, and parameter gradients."""
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    return tensors + [parameter.grad for parameter in parameters if parameter.grad is not None]


def _describe_error(error: BaseException) -> str:
    """Return the first line of an error, the line in the caller's code, and the remedy."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    cause = error.__cause__ or error
    frames = [
        f for f in traceback.extract_tb(cause.__traceback__) if not f.filename.startswith(_OWN)
    ]
    location = (
        f" in {Path(frames[-1].filename).name}:{frames[-1].lineno}, `{frames[-1].line}`"
        if frames
        else ""
    )
    remedy = f"; {_NO_WAITING}" if "captur" in text else ""
    return f"{text}{location}{remedy}"


class GraphedFunction:
    """A graphed function: a training step if its first calls step an optimizer or compute parameter gradients.

    Other functions are captured like the forward pass of a module.

    Args:
        function: The function.
        after: Eager calls with a signature before its capture.
        signatures: Maximum graph count.
    """

    def __init__(self, function: Callable[..., Any], after: int, signatures: int):
        self.function = function
        self.after = after
        self.signatures = signatures
        self._graph: automatic.AutomaticGraph | TrainingStep
        self._graph = automatic.AutomaticGraph(function, None, after, signatures)
        self._undecided = after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._undecided <= 0 or torch.compiler.is_compiling():
            return self._graph(*args, **kwargs)
        self._undecided -= 1
        parameters = StepState.of(self.function).parameters
        before = [(p.grad, None if p.grad is None else p.grad._version) for p in parameters]
        leaves = ArgumentLeaves.of(args, kwargs)
        records = automatic.capture_obstacle(leaves, here().recomputes) is None
        recorder = build.graph_recorder() if records else None
        stream = nullcontext() if recorder is None else recorder.capture_stream_context()
        with observe_optimizers() as stepped, stream:
            result = self._graph(*args, **kwargs)
        if recorder is not None:
            recorder.keep_until_read(_result_tensors(result, parameters))
        if stepped or any(
            p.grad is not grad or (grad is not None and grad._version != version)
            for p, (grad, version) in zip(parameters, before, strict=True)
        ):
            self._graph = TrainingStep(self.function, self.after, self.signatures, tuple(stepped))
            self._undecided = 0
            return detach_result(result)
        return result

    @property
    def kept(self) -> int:
        """Signatures with a graph."""
        return self._graph.kept

    @property
    def reason(self) -> str | None:
        """Why the last call ran eagerly; None if it replayed a graph."""
        return self._graph.reason

    def reset(self) -> None:
        """Free all graphs and clear all signatures."""
        self._graph.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedFunction:
        return GraphedFunction(self.function, self.after, self.signatures)

    def __reduce__(self) -> tuple[Any, ...]:
        return GraphedFunction, (self.function, self.after, self.signatures)


@suggests_keywords
def graphed(module: Function, *, after: int = 3, signatures: int = 4) -> Function:
    """Turn calls to a module, a function or a training step into CUDA graphs, without sample arguments.

    A function whose first calls step an optimizer or compute parameter gradients is a training
    step: its forward and backward pass, the optimizer and everything else that it computes on the
    GPU become one graph. The eager calls before the capture are steps like all others.

    Args:
        module: A module, which is modified, or a function, which is wrapped. Tensors that a function reads besides its
            arguments must keep their addresses.
        after: Eager calls with a signature before its capture. A signature covers shapes, dtypes, modes,
            recipe and parameter addresses. For a training step, calls that change state on the host are not
            counted, nor is the call that first steps an optimizer or computes gradients.
        signatures: Maximum graph count; calls with further signatures run eagerly.

    Returns:
        The module, or the wrapped function. `reset()` on either frees all graphs. The attribute
        `reason` of a wrapped function is the reason why its last call ran eagerly, or None if it
        replayed a graph. Results of a training step have no `grad_fn`.

    Raises:
        TypeError: module is not callable.
        ValueError: module is graphed already, or a number is below its limit.

    `te.explain(module, x)` reports whether a call is captured, and why not. Outputs and gradients are bit-equal to
    eager calls. Outputs, and input gradients, are not overwritten by later calls; the parameter gradients that a
    training step leaves in `.grad` are. A second forward pass before the backward pass of the first runs eagerly.
    """
    if not callable(module):
        raise TypeError(f"module={described(module)} cannot be called; give a module or a function")
    whole("after", after)
    whole("signatures", signatures)
    if isinstance(getattr(module, "forward", None), automatic.AutomaticGraph) or isinstance(
        module, GraphedFunction
    ):
        raise ValueError("the module is graphed already; call graphed() once")
    if not isinstance(module, torch.nn.Module):
        return cast(Function, GraphedFunction(module, after, signatures))
    forward = automatic.AutomaticGraph(module.forward, module, after, signatures)
    vars(module).update(forward=forward, reset=forward.reset)
    return cast(Function, module)
