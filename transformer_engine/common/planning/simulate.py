"""Time and memory for a layer's passes: buffer shapes, a cost for every step, and two timelines.

The steps are in `layer_steps.py`, in the order in which a GPU runs them. A GPU's kernels run on one timeline and
collectives on another; a `.wait` step waits for its collective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..memory import Memory
from .hardware import DEFAULT_LINKS, HIGH_PRECISION, FormatCost, GpuRates, LinkRates
from .layer_steps import (
    BEGIN,
    WAIT,
    LinearFacts,
    Pass,
    Step,
    grouped_passes,
    linear_passes,
    norm_linear_passes,
    norm_mlp_passes,
)

VALUE = 2.0  # bytes per bfloat16 element
_KINDS = {
    "product": "products",
    "weight_gradient": "products",
    "cast": "casts",
    "transpose": "casts",
    "norm": "norms",
    "norm_backward": "norms",
    "activation": "activations",
    "activation_backward": "activations",
}


# Operations whose result is their input under another name, where dtypes agree.
SAME_MEMORY = ("convert", "grouped_convert", "dense")


class Extent(NamedTuple):
    """A buffer's shape and the bytes per element, scales included.

    Attributes:
        rows: Number of rows.
        columns: Number of columns.
        element: Bytes per element.
    """

    rows: float
    columns: float
    element: float = VALUE

    @property
    def size(self) -> float:
        """Buffer size in bytes."""
        return self.rows * self.columns * self.element


@dataclass(frozen=True, slots=True)
class LinearSize:
    """Local sizes for a linear layer: input rows after a gather, input columns and output columns.

    Attributes:
        rows: Input rows after a gather.
        inputs: Input columns.
        outputs: Output columns.
        groups: Number of groups; 1 for a plain linear layer.
    """

    rows: float
    inputs: int
    outputs: int
    groups: int = 1


def _zeros() -> defaultdict[str, float]:
    return defaultdict(float)


@dataclass
class Cost:
    """Milliseconds for kernels by kind, for collectives, and for waits; memory in bytes.

    Attributes:
        kernels: Milliseconds by step type.
        communication: Collective milliseconds by mesh axis.
        exposed: Milliseconds by axis in which no kernel runs because it waits for a collective.
        launches: Number of kernels that the host launches.
        flops: Floating-point operations.
        saved: Bytes that the forward pass keeps for the backward pass.
        peak: Most bytes in the pass's buffers, without its inputs and without the saved buffers of other parts.
    """

    kernels: defaultdict[str, float] = field(default_factory=_zeros)
    communication: defaultdict[str, float] = field(default_factory=_zeros)
    exposed: defaultdict[str, float] = field(default_factory=_zeros)
    launches: int = 0
    flops: float = 0.0
    saved: float = 0.0
    peak: float = 0.0

    @property
    def compute(self) -> float:
        """Milliseconds for all kernels."""
        return sum(self.kernels.values())

    @property
    def total(self) -> float:
        """Milliseconds for kernels and exposed communication."""
        return self.compute + sum(self.exposed.values())

    def spend(self, kind: str, milliseconds: float, launches: int = 1) -> None:
        """Add kernel time."""
        self.kernels[kind] += milliseconds
        self.launches += launches

    def communicate(self, axis: str, milliseconds: float, exposed: float | None = None) -> None:
        """Add a collective, which is exposed by default."""
        if milliseconds:
            self.communication[axis] += milliseconds
            self.exposed[axis] += milliseconds if exposed is None else exposed

    def add(self, other: Cost, times: float = 1.0) -> None:
        """Add another cost, repeated; the peak includes the buffers that earlier parts saved."""
        for name in ("kernels", "communication", "exposed"):
            for key, value in getattr(other, name).items():
                getattr(self, name)[key] += times * value
        self.launches += round(times * other.launches)
        self.flops += times * other.flops
        self.peak = max(self.peak, self.saved + other.peak)
        self.saved += times * other.saved


@dataclass(frozen=True, slots=True)
class RankMachine:
    """The hardware of one rank: GPU, format, links, and tensor parallelism.

    Attributes:
        gpu: The GPU.
        format: Recipe costs.
        links: The links.
        tp: Number of tensor-parallel ranks, next to each other.
        sequence_parallel: Activations between the layers are sharded over them.
        attention: Attention backend, a key in `GpuRates.attention`.
        loaded: Products and attention run at long-loop rates.
    """

    gpu: GpuRates
    format: FormatCost
    links: LinkRates = DEFAULT_LINKS
    tp: int = 1
    sequence_parallel: bool = True
    attention: str = "cudnn"
    loaded: bool = True

    @property
    def matrix_time(self) -> float:
        """Time factor for products and attention."""
        return 1 / self.gpu.sustained if self.loaded else 1.0

    def facts(self, layer: str, mode: str | None = None, bias: bool = False) -> LinearFacts:
        """Facts about a linear layer in training: "column" or "row" for a tensor-parallel one."""
        return LinearFacts(
            layer,
            bias=bias,
            mode=mode if self.tp > 1 else None,
            plain=self.format.name == HIGH_PRECISION,
            sequence=self.sequence_parallel,
            row_codes=self.format.row_codes,
        )


def layer_passes(
    kind: str,
    machine: RankMachine,
    activation: str = "",
    mode: str | None = None,
    bias: bool = False,
) -> tuple[Pass, Pass]:
    """Forward and backward pass of a layer as a GPU runs them.

    Args:
        kind: "linear", "grouped", "norm_linear" or "norm_mlp".
        machine: The machine.
        activation: Activation in a "norm_mlp".
        mode: "column" or "row" for a tensor-parallel "linear"; the other kinds have one.
        bias: The products add a bias.
    """
    if kind == "norm_mlp":
        facts = (machine.facts("fc1", "column", bias), machine.facts("fc2", "row", bias))
    else:
        facts = (machine.facts("linear", "column" if kind == "norm_linear" else mode, bias),)
    return _PASSES[kind, facts, activation, machine.format.reads > 1 and activation.endswith("glu")]


def _built(key: tuple[str, tuple[LinearFacts, ...], str, bool]) -> tuple[Pass, Pass]:
    """Passes for a layer by its kind, facts, activation, and whether the activation's gradient makes no codes."""
    kind, facts, activation, separate = key
    centered = facts[0].bias
    if kind == "linear":
        return linear_passes(facts[0])
    if kind == "grouped":
        return grouped_passes(facts[0])
    if kind == "norm_linear":
        return norm_linear_passes(facts[0], centered)
    return norm_mlp_passes(facts[0], facts[1], activation, centered, gradient_casts=not separate)


_PASSES: Memory[tuple[str, tuple[LinearFacts, ...], str, bool], tuple[Pass, Pass]] = Memory(
    _built, 256
)


class PassRun:
    """Simulates one layer's passes: buffer extents survive from the forward to the backward pass."""

    def __init__(
        self, machine: RankMachine, sizes: Mapping[str, LinearSize], inputs: Mapping[str, Extent]
    ) -> None:
        self.machine = machine
        self.sizes = sizes
        self.extents = dict(inputs)
        self.kept: set[str] = set()  # saved by the forward pass, freed in the backward pass

    def run(self, pass_: Pass, cost: Cost) -> Cost:
        """Add the time and the memory of a pass to a cost, and return it."""
        now = idle_link = live_bytes = 0.0
        finished: dict[str, float] = {}
        inputs = set(pass_.inputs)  # and other names for their memory
        for step, freed in zip(pass_.steps, pass_.buffers_to_free(), strict=True):
            if step.op in SAME_MEMORY and step.inputs[0] in inputs:
                inputs.update(step.makes())
            if step.op.endswith(BEGIN):
                took = self._collective(step)
                start = max(now, idle_link)
                idle_link = start + took
                finished[step.makes()[0]] = idle_link
                cost.communication["tp"] += took
            elif step.op.endswith(WAIT):
                waited = max(0.0, finished[step.reads()[0]] - now)
                now += waited
                cost.exposed["tp"] += waited
                self.extents[step.makes()[0]] = self.extents[step.reads()[0]]
                live_bytes -= self.extents[step.reads()[0]].size  # the pending buffer is the result
            else:
                now += self._kernel(step, cost)
            # An activation's gradient replaces the product that it reads.
            replaced = step.multiplies_gradient or step.op == "activation_backward"
            if replaced:
                live_bytes -= sum([self.extents[name].size for name in freed if name in self.kept])
            # Weight gradients are counted with the parameters.
            if step.op not in (*SAME_MEMORY, "weight_gradient", "grouped_weight_gradient"):
                live_bytes += sum([self.extents[name].size for name in step.makes()])
            cost.peak = max(cost.peak, live_bytes)
            live_bytes -= sum(
                [
                    self.extents[name].size
                    for name in freed
                    if name not in inputs or (name in self.kept and not replaced)
                ]
            )
        saved = [name for name in pass_.saved if name not in inputs]
        cost.saved += sum([self.extents[name].size for name in saved])
        self.kept.update(saved)
        return cost

    def _collective(self, step: Step) -> float:
        """Set the extent of a collective's result and return its milliseconds."""
        machine = self.machine
        (read,), (output,) = step.reads(), step.makes()
        kind = step.op[: -len(BEGIN)]
        extent = self.extents[read]
        size = machine.tp
        if kind == "all_gather":
            result = Extent(extent.rows * size, extent.columns, extent.element)
            full_size = result.size
        else:
            result = extent if kind == "all_reduce" else Extent(extent.rows / size, extent.columns)
            full_size = extent.size
        self.extents[output] = result
        return machine.links.collective_ms(kind, full_size, size, 1)  # pyright: ignore[reportArgumentType]

    def _kernel(self, step: Step, cost: Cost) -> float:
        """Set the extents of a step's results; add its time to the cost and return it."""
        machine, gpu = self.machine, self.machine.gpu
        read = [self.extents[name] for name in step.reads()]
        op = step.op.removeprefix("grouped_")
        if op in ("convert", "dense"):
            self.extents[step.makes()[0]] = read[0]
            return 0.0
        if op in ("product", "weight_gradient"):
            took = self._product(step, read, cost)
        else:
            self._set_extents(step, read)
            outputs = [self.extents[name] for name in step.makes()]
            reads = machine.format.reads if step.casts else 1
            codes = [extent for extent in outputs if extent.element < VALUE]
            efficiency = machine.format.efficiency[len(codes) > 1] if step.casts else 0.95
            moved_bytes = reads * sum([extent.size for extent in read]) + sum(
                [extent.size for extent in outputs]
            )
            took = gpu.copy_ms(moved_bytes, efficiency) + (reads - 1) * gpu.launch
        cost.spend(_KINDS.get(op, "other"), took)
        return took

    def _product(self, step: Step, read: list[Extent], cost: Cost) -> float:
        size = self.sizes[step.layer]
        shapes = {
            "forward": Extent(size.rows, size.outputs),
            "grad_input": Extent(size.rows, size.inputs),
            "grad_weight": Extent(size.outputs * size.groups, size.inputs),
        }
        output = shapes[step.product]
        self.extents.update(dict.fromkeys(step.makes(), output))
        flops = 2.0 * size.rows * size.inputs * size.outputs
        kind = self.machine.format.products[list(shapes).index(step.product)]
        moved_bytes = sum([extent.size for extent in read]) + output.size * len(step.makes())
        tiled = output.rows * output.columns if size.groups > 1 else 0.0
        cost.flops += flops
        return self.machine.matrix_time * self.machine.gpu.product_ms(
            kind, flops, moved_bytes, tiled
        )

    def _set_extents(self, step: Step, read: list[Extent]) -> None:
        """Set the result extents for a step that is neither a product nor a collective."""
        rows, columns, element = read[0]
        op = step.op.removeprefix("grouped_")
        if op in ("activation", "activation_backward"):
            inner = self.sizes["fc2"].inputs
            columns = inner if op == "activation" else self.sizes["fc1"].outputs
        code = self.machine.format.code if step.casts else element
        named = list(step.results)
        if step.casts:
            transposed = Extent(columns, rows, code)
            for name, extent in zip(
                named[:2], (Extent(rows, columns, code), transposed), strict=True
            ):
                if name is not None:
                    self.extents[name] = extent
            named = named[2:]
        elif named[0] is not None and op != "column_sum":
            result = (
                Extent(columns, rows, element)
                if op == "transpose"
                else Extent(rows, columns, element)
            )
            self.extents[named.pop(0) or ""] = result
        # The other results are vectors: row statistics, or sums over rows.
        vector = Extent(rows, 1, 4.0) if op == "norm" else Extent(1, columns)
        self.extents.update({name: vector for name in named if name is not None})
