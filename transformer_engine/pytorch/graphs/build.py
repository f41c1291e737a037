"""Warm up, then record: the blocks of a call of make_graphed_callables, step by step in the order of their replay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..runtime.capture import Recorder, set_capture_end, set_capture_start, unowned
from .arguments import Asked, Sample
from .block import Block
from .kept import left_as_it_was
from .order import Kind, Step
from .replayed import Replayed


@dataclass(frozen=True)
class Plan:
    """How graphs are recorded.

    modules          whose state is as before afterwards
    hooks            what looks on, for each graph
    reuses_buffers   may later graphs write over what earlier ones leave?
    around           what is called before and after the warm-up
    """

    warm_ups: int
    steps: tuple[Step, ...]
    modules: Sequence[torch.nn.Module]
    around: tuple[Callable[[], Any] | None, Callable[[], Any] | None] = (None, None)
    hooks: Sequence[dict[str, dict[int, Any]]] = ()
    reuses_buffers: bool = False

    @staticmethod
    def of(asked: Asked) -> Plan:
        options = asked.options
        around = options.pre_warmup_hook, options.post_warmup_hook
        hooks = [asked.hooks[which] for which in asked.which]
        return Plan(options.warm_ups, asked.steps, asked.modules, around, hooks, options.reuses_buffers)


def recorded(graphs: list[Replayed], plan: Plan, recorder: Recorder) -> list[Replayed]:
    """The graphs, each with its recordings; what warming up has changed is put back."""
    blocks = [graph.block for graph in graphs]
    hooks = plan.hooks or [{}] * len(graphs)
    separate = {step.callable for step in plan.steps if step.kind is Kind.WEIGHT_GRADIENT}
    with capturing(), left_as_it_was(plan.modules):
        before, after = plan.around
        if before is not None:
            before()
        for graph in graphs:
            graph.expect_nothing()
        with recorder.warming():
            # At least once: states, workspaces and kernels have to be there before anything is recorded.
            for turn in range(max(1, plan.warm_ups)):
                for step in plan.steps:
                    _run(blocks[step.callable], step.kind, hooks[step.callable], first=turn == 0)
                for block in blocks:
                    block.forget()
        if after is not None:
            after()
        for graph in graphs:
            graph.note_what_showed()
        for step in plan.steps:
            number = step.callable
            _record(
                graphs[number], step.kind, hooks[number], recorder, plan.reuses_buffers, number in separate
            )
    return graphs


@contextmanager
def capturing() -> Iterator[None]:
    """Says that graphs are being captured, and that they are not, however the block is left."""
    set_capture_start()
    try:
        yield
    finally:
        set_capture_end()


def blocks_of(asked: Asked) -> list[Block]:
    """A block for each sample, nothing of which has run."""
    inputs = _inputs(asked)
    blocks: list[Block] = []
    for number, (which, sample) in enumerate(zip(asked.which, asked.samples, strict=True)):
        given = asked.callables[which]
        module = given if isinstance(given, torch.nn.Module) else None
        blocks.append(
            Block(
                given if module is None or _has_call(module) else module.forward,
                module,
                sample.leaves.structure,
                inputs[number],
                asked.quantizations[which],
                caches=asked.options.caches,
                training=module is None or module.training,
                retain_graph=asked.options.retain_graph,
                allow_unused_input=asked.options.allow_unused_input,
                positions=sample.leaves.positions,
                constants=sample.leaves.constants,
            )
        )
    return blocks


def _has_call(module: torch.nn.Module) -> bool:
    """Has its class a `__call__` of its own, by which it says what of it is captured, as Megatron-core's layers?"""
    return type(module).__call__ is not torch.nn.Module.__call__


def _inputs(asked: Asked) -> list[list[Tensor]]:
    """The static inputs of each block: its sample; with reuses_buffers, those of an earlier block that is through."""
    if not asked.options.reuses_buffers:
        return [[_leaf(tensor) for tensor in sample.leaves.tensors] for sample in asked.samples]
    free: dict[Any, list[list[Tensor]]] = defaultdict(list)
    held: dict[int, list[Tensor]] = {}
    for step in asked.steps:
        sample = asked.samples[step.callable]
        kind = _kind(sample)
        if step.kind is Kind.FORWARD:
            held[step.callable] = (
                free[kind].pop() if free[kind] else [_leaf(t) for t in sample.leaves.tensors]
            )
        elif step.kind is Kind.BACKWARD:
            free[kind].append(held[step.callable])
    return [held[number] for number in range(len(asked.samples))]


def _kind(sample: Sample) -> tuple[Any, ...]:
    return tuple((t.shape, t.dtype, t.layout, t.device, t.requires_grad) for t in sample.leaves.tensors)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)


def _run(block: Block, kind: Kind, hooks: dict[str, dict[int, Any]], first: bool) -> None:
    """A step in earnest, to warm up."""
    if kind is Kind.FORWARD:
        _looked_on(hooks, "forward", block, lambda: block.forward(first))
    elif kind is Kind.BACKWARD and block.training:
        block.prepare_grad_outputs()
        _looked_on(hooks, "backward", block, block.backward)
        if block.delayed:
            block.weight_gradients()


def _record(
    graph: Replayed,
    kind: Kind,
    hooks: dict[str, dict[int, Any]],
    recorder: Recorder,
    reuses_buffers: bool,
    separate: bool,
) -> None:
    """separate: have weight gradients that are put off a step of their own?"""
    block = graph.block
    if kind is Kind.FORWARD:
        graph.forward = _looked_on(hooks, "forward", block, lambda: recorder.record(block.forward))
    elif kind is Kind.BACKWARD and block.training:
        block.prepare_grad_outputs()
        graph.backward = _looked_on(hooks, "backward", block, lambda: recorder.record(block.backward))
        if reuses_buffers:
            _let_go(graph)
        if block.delayed and not separate:
            graph.weight_gradients = recorder.record(block.weight_gradients)
    elif kind is Kind.WEIGHT_GRADIENT and block.delayed:
        graph.weight_gradients = recorder.record(block.weight_gradients)


def _let_go(graph: Replayed) -> None:
    """Later recordings may write over the outputs of a block that is through; whoever replays in order reads before."""
    for recording in (graph.forward, graph.backward):
        if recording is not None and hasattr(recording, "graph"):
            recording.results = [None if r is None else unowned(r) for r in recording.results]  # pyright: ignore


def _looked_on(hooks: dict[str, dict[int, Any]], direction: str, block: Block, run: Callable[[], Any]) -> Any:
    """run(), between the caller's hooks, which look on and change nothing."""
    for hook in hooks.get(f"{direction}_pre_hooks", {}).values():
        _called(hook, block)
    result = run()
    for hook in hooks.get(f"{direction}_hooks", {}).values():
        _called(hook, block)
    return result


def _called(hook: Callable[..., Any], block: Block) -> None:
    answer = hook(block.module)
    if answer is not None:
        raise RuntimeError(
            f"a hook of capture_time_hooks returned a {type(answer).__name__}; it has to return None"
        )
