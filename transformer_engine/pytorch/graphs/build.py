"""Warm up, then record: the blocks in a make_graphed_callables call, step by step in replay order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...common.numbers import with_article
from ..distributed.rng import get_all_rng_states
from ..runtime.capture import (
    CudaRecorder,
    Recorder,
    alias_unowned,
    set_capture_end,
    set_capture_start,
)
from ..runtime.device import has_cuda
from .arguments import CaptureRequest
from .order import ScheduledStep, StepKind
from .recorded_block import RecordedBlock
from .saved_state import state_restored
from .static_block import StaticBlock


@dataclass(frozen=True)
class CapturePlan:
    """Recording settings.

    Attributes:
        warm_ups: Warm-up run count.
        steps: Pass order.
        modules: Modules whose state is restored afterwards.
        around: Hooks before and after the warm-up.
        hooks: Observing hooks of each graph.
        reuses_buffers: Whether later graphs may overwrite the outputs of earlier ones.
    """

    warm_ups: int
    steps: tuple[ScheduledStep, ...]
    modules: Sequence[torch.nn.Module]
    around: tuple[Callable[[], Any] | None, Callable[[], Any] | None] = (None, None)
    hooks: Sequence[dict[str, dict[int, Any]]] = ()
    reuses_buffers: bool = False

    @staticmethod
    def of(request: CaptureRequest) -> CapturePlan:
        options = request.options
        around = options.pre_warmup_hook, options.post_warmup_hook
        hooks = [request.hooks[which] for which in request.which]
        return CapturePlan(
            options.warm_ups, request.steps, request.modules, around, hooks, options.reuses_buffers
        )


def recorded(
    graphs: list[RecordedBlock], plan: CapturePlan, recorder: Recorder
) -> list[RecordedBlock]:
    """Record the graphs and return them; the state that the warm-up changed is restored."""
    blocks = [graph.block for graph in graphs]
    hooks = plan.hooks or [{}] * len(graphs)
    separate = {step.callable for step in plan.steps if step.kind is StepKind.WEIGHT_GRADIENT}
    with capturing(), state_restored(plan.modules):
        before, after = plan.around
        if before is not None:
            before()
        for graph in graphs:
            graph.clear_announcements()
        with recorder.warming():
            # At least once: states, workspaces and kernels must exist before the recording.
            for turn in range(max(1, plan.warm_ups)):
                for step in plan.steps:
                    _run(blocks[step.callable], step.kind, hooks[step.callable], first=turn == 0)
                for block in blocks:
                    block.forget()
        if after is not None:
            after()
        for graph in graphs:
            graph.note_side_effects()
        for step in plan.steps:
            number = step.callable
            _record(
                graphs[number],
                step.kind,
                hooks[number],
                recorder,
                plan.reuses_buffers,
                number in separate,
            )
    return graphs


def graph_recorder(pool: Any = None) -> Recorder | None:
    """Return the graph recorder in a memory pool (None: a new pool), or None without a GPU."""
    if not has_cuda():
        return None
    states = get_all_rng_states().values()
    return CudaRecorder(pool, [state for state in states if isinstance(state, torch.Generator)])


@contextmanager
def capturing() -> Iterator[None]:
    """Set the flag of `is_graph_capturing` inside the block."""
    set_capture_start()
    try:
        yield
    finally:
        set_capture_end()


def build_blocks(request: CaptureRequest) -> list[StaticBlock]:
    """Build a block for each sample."""
    inputs = _inputs(request)
    blocks: list[StaticBlock] = []
    for number, (which, sample) in enumerate(zip(request.which, request.samples, strict=True)):
        function = request.callables[which]
        module = function if isinstance(function, torch.nn.Module) else None
        # Megatron-core's layers define `__call__` to choose the part that is captured.
        has_own_call = module is not None and type(module).__call__ is not torch.nn.Module.__call__
        blocks.append(
            StaticBlock(
                function if module is None or has_own_call else module.forward,
                module,
                sample.leaves.structure,
                inputs[number],
                request.quantizations[which],
                caches=request.options.caches,
                training=module is None or module.training,
                retain_graph=request.options.retain_graph,
                allow_unused_input=request.options.allow_unused_input,
                positions=sample.leaves.positions,
                constants=sample.leaves.constants,
            )
        )
    return blocks


def _inputs(request: CaptureRequest) -> list[list[Tensor]]:
    """Return the static inputs per block: its sample or, with reuses_buffers, the inputs of a finished block."""
    if not request.options.reuses_buffers:
        return [[_leaf(tensor) for tensor in sample.leaves.tensors] for sample in request.samples]
    free: dict[Any, list[list[Tensor]]] = defaultdict(list)
    buffers: dict[int, list[Tensor]] = {}
    for step in request.steps:
        sample = request.samples[step.callable]
        kind = tuple(
            (t.shape, t.dtype, t.layout, t.device, t.requires_grad) for t in sample.leaves.tensors
        )
        if step.kind is StepKind.FORWARD:
            buffers[step.callable] = (
                free[kind].pop() if free[kind] else [_leaf(t) for t in sample.leaves.tensors]
            )
        elif step.kind is StepKind.BACKWARD:
            free[kind].append(buffers[step.callable])
    return [buffers[number] for number in range(len(request.samples))]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)


def _run(block: StaticBlock, kind: StepKind, hooks: dict[str, dict[int, Any]], first: bool) -> None:
    """Run a step eagerly, as warm-up."""
    if kind is StepKind.FORWARD:
        _between_hooks(hooks, "forward", block, lambda: block.forward(first))
    elif kind is StepKind.BACKWARD and block.training:
        block.prepare_grad_outputs()
        _between_hooks(hooks, "backward", block, block.backward)
        if block.delayed:
            block.weight_gradients()


def _record(
    graph: RecordedBlock,
    kind: StepKind,
    hooks: dict[str, dict[int, Any]],
    recorder: Recorder,
    reuses_buffers: bool,
    separate: bool,
) -> None:
    """Record a step. With `separate`, delayed weight gradients have their own step."""
    block = graph.block
    if kind is StepKind.FORWARD:
        graph.forward = _between_hooks(
            hooks, "forward", block, lambda: recorder.record(block.forward)
        )
    elif kind is StepKind.BACKWARD and block.training:
        block.prepare_grad_outputs()
        graph.backward = _between_hooks(
            hooks, "backward", block, lambda: recorder.record(block.backward)
        )
        if reuses_buffers:
            # Later recordings may overwrite the outputs of this block, which replays in schedule order have read.
            for recording in (graph.forward, graph.backward):
                if recording is not None and hasattr(recording, "graph"):
                    recording.results = [
                        None if r is None else alias_unowned(r) for r in recording.results
                    ]  # pyright: ignore
        if block.delayed and not separate:
            graph.weight_gradients = recorder.record(block.weight_gradients)
    elif kind is StepKind.WEIGHT_GRADIENT and block.delayed:
        graph.weight_gradients = recorder.record(block.weight_gradients)


def _between_hooks(
    hooks: dict[str, dict[int, Any]], direction: str, block: StaticBlock, run: Callable[[], Any]
) -> Any:
    """Call run() between the caller's hooks, which observe and change nothing."""
    for hook in hooks.get(f"{direction}_pre_hooks", {}).values():
        _call_hook(hook, block)
    result = run()
    for hook in hooks.get(f"{direction}_hooks", {}).values():
        _call_hook(hook, block)
    return result


def _call_hook(hook: Callable[..., Any], block: StaticBlock) -> None:
    returned = hook(block.module)
    if returned is not None:
        raise RuntimeError(
            f"a hook of capture_time_hooks returned {with_article(type(returned))}; it has to return None"
        )
