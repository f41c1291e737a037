"""Steps of a schedule, in the order in which they are recorded and replayed.

Without an order, these are all forward passes and then all backward passes in reverse. An order
describes a pipeline over model chunks and microbatches: +c is the forward pass of chunk c (from 1),
-c its backward pass, each for the next microbatch, and -c - 0.5 the delayed weight gradients of
that backward pass. Callables are numbered by chunk, then by microbatch, then by layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ...common.numbers import to_int


class StepKind(Enum):
    """The pass that a step runs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT_GRADIENT = "weight gradient"


@dataclass(frozen=True)
class ScheduledStep:
    """One step of one callable."""

    kind: StepKind
    callable: int


@dataclass(frozen=True)
class ModelChunks:
    """A model in chunks with given layer counts, each called with every microbatch."""

    layers: tuple[int, ...]
    microbatches: int

    def callables(self, chunk: int, microbatch: int) -> range:
        """Return a chunk's callable numbers for a microbatch, both counted from 0."""
        start = sum(self.layers[:chunk]) * self.microbatches + microbatch * self.layers[chunk]
        return range(start, start + self.layers[chunk])

    def layer(self, callable: int) -> int:
        """Return the layer index that a callable runs."""
        first = 0
        for layers in self.layers:
            if callable < layers * self.microbatches:
                return first + callable % layers
            callable -= layers * self.microbatches
            first += layers
        raise IndexError(callable)


def plain_steps(callables: int) -> list[ScheduledStep]:
    """Return the forward passes in order, then the backward passes in reverse."""
    forwards = [ScheduledStep(StepKind.FORWARD, i) for i in range(callables)]
    return forwards + [ScheduledStep(StepKind.BACKWARD, i) for i in reversed(range(callables))]


def list_chunks(
    order: Sequence[float], layers: int, layers_per_chunk: Sequence[int] | int | None
) -> ModelChunks:
    """Return the chunks of an order; raise ValueError unless its counts fit the layers."""
    if not order:
        raise ValueError(
            "_order is empty; name the forward and the backward of each chunk and microbatch"
        )
    integral = [step for step in order if step == int(step)]
    if any(step == 0 for step in order):
        raise ValueError(
            f"_order={list(order)} holds 0; give chunks from 1 on, their backwards as negative numbers"
        )
    count = int(max(integral, default=0))
    if count < 1:
        raise ValueError(f"_order={list(order)} has no forward; write chunk c's as c")
    forwards = [sum(step == chunk + 1 for step in integral) for chunk in range(count)]
    backwards = [sum(step == -chunk - 1 for step in integral) for chunk in range(count)]
    if len(set(forwards + backwards)) != 1 or len(integral) != 2 * count * forwards[0]:
        raise ValueError(
            f"_order={list(order)} names the {count} chunks {forwards} times forward and {backwards} times backward; "
            "give each once forward and once backward per microbatch"
        )
    if layers_per_chunk is None:
        if layers % count:
            raise ValueError(
                f"{layers} modules cannot be split evenly into {count} chunks; give _num_layers_per_chunk"
            )
        sizes = (layers // count,) * count
    else:
        listed = (
            layers_per_chunk.tolist() if hasattr(layers_per_chunk, "tolist") else layers_per_chunk  # pyright: ignore[reportAttributeAccessIssue]
        )
        if isinstance(listed, Sequence) and not isinstance(listed, (str, bytes)):
            sizes = tuple(to_int("an entry of _num_layers_per_chunk", size) for size in listed)
        else:
            sizes = (to_int("_num_layers_per_chunk", listed),) * count
    if len(sizes) != count or sum(sizes) != layers:
        raise ValueError(
            f"_num_layers_per_chunk={list(sizes)} is not for {count} chunks of {layers} modules altogether"
        )
    if len(integral) < len(order) and set(sizes) != {1}:
        raise ValueError(
            "weight gradients in _order need _num_layers_per_chunk of 1; record them with their backward"
        )
    return ModelChunks(sizes, forwards[0])


def order_steps(order: Sequence[float], chunks: ModelChunks) -> list[ScheduledStep]:
    """Return the steps of an order; raise ValueError for a backward pass before its forward pass."""
    completed_steps = {kind: [0] * len(chunks.layers) for kind in StepKind}
    steps: list[ScheduledStep] = []
    for entry in order:
        if entry == int(entry):
            kind, before = (
                (StepKind.FORWARD, None) if entry > 0 else (StepKind.BACKWARD, StepKind.FORWARD)
            )
        elif math.ceil(entry) - entry == 0.5:
            kind, before = StepKind.WEIGHT_GRADIENT, StepKind.BACKWARD
        else:
            raise ValueError(f"_order holds {entry}; a weight gradient of chunk c is -c - 0.5")
        chunk = int(abs(math.ceil(entry))) - 1
        microbatch = completed_steps[kind][chunk]
        if before is not None and microbatch >= completed_steps[before][chunk]:
            raise ValueError(
                f"_order={list(order)}: a {kind.value} of chunk {chunk + 1} has no {before.value} before it; "
                "give them in the order of a step"
            )
        completed_steps[kind][chunk] += 1
        callables = chunks.callables(chunk, microbatch)
        steps += [
            ScheduledStep(kind, i)
            for i in (callables if kind is StepKind.FORWARD else reversed(callables))
        ]
    return steps
