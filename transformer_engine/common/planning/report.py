"""A predicted training step: its mesh, memory, figures, and its table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .hardware import GIB, HIGH_PRECISION
from .models import ModelShape

DOES_NOT_FIT = "does not fit"  # the first words of the warning


@dataclass(frozen=True, slots=True)
class Mesh:
    """Rank counts by axis; ep is part of dp * fsdp * cp, the others multiply to the number of devices.

    Attributes:
        dp: Ranks with replicated parameters (data parallel).
        fsdp: Ranks that share the parameters (fully sharded data parallel).
        tp: Tensor-parallel ranks.
        cp: Context-parallel ranks.
        pp: Pipeline-parallel ranks.
        ep: Expert-parallel ranks.
    """

    dp: int
    fsdp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1

    def __str__(self) -> str:
        sizes = [f"{name} {size}" for name, size in asdict(self).items() if size > 1]
        return ", ".join(sizes) or "one device"

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.dp * self.fsdp * self.tp * self.cp * self.pp

    @property
    def data(self) -> int:
        """Number of ranks with different tokens and equal weights."""
        return self.dp * self.fsdp * self.cp

    @property
    def shards(self) -> int:
        """Number of ranks that share parameters, gradients and optimizer state outside experts."""
        return self.fsdp * self.cp if self.fsdp > 1 else 1


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes on the rank that needs the most.

    Attributes:
        parameters: bfloat16 parameters of the rank.
        gradients: Their gradients, in float32 if several micro-batches are accumulated, otherwise in bfloat16.
        optimizer: Master weights and moments of FusedAdam in float32.
        activations: Tensors between their save in the forward pass and their use in the backward pass.
        buffers: Gathered parameters, results and operands in transit, logits, and library memory.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def peak(self) -> float:
        """Sum over all parts."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """A predicted training step; `str()` is a table and `as_dict()` the figures.

    Attributes:
        model: Model shape.
        gpu: GPU name.
        recipe: Recipe name.
        mesh: Rank counts.
        parts: Milliseconds by work type on the slowest rank; with the exposed communication, their sum is step_ms.
        sequence: Tokens per sequence.
        micro_batch: Sequences per micro-batch on a data-parallel rank.
        micro_batches: Micro-batches that a rank accumulates in a step.
        recompute: "full" if the backward pass repeats the forward pass of each layer, or "none".
        step_ms: Milliseconds per training step.
        communication: Collective milliseconds by axis, hidden or not.
        exposed: Milliseconds by axis in which the GPU only waits for communication.
        memory: Bytes on the rank that needs the most.
        memory_limit: GPU bytes that can be filled.
        tokens_per_s: Tokens per second over all devices.
        utilization: Model FLOP relative to all devices' bfloat16 peak, without recomputation.
        peak: FLOP/ms of dense bfloat16 products in the data sheet of the GPU.
        calibrated: The rates of the GPU were measured; otherwise they follow from its data sheet.
        rates: Rates behind the figures, by name, each marked "measured", "data sheet" or "assumed".
        warnings: What makes the plan less certain, or less useful.
    """

    model: ModelShape
    parts: Mapping[str, float]
    gpu: str
    recipe: str
    mesh: Mesh
    sequence: int
    micro_batch: int
    micro_batches: int
    communication: Mapping[str, float]
    recompute: str
    memory: StepMemory
    memory_limit: float
    step_ms: float
    tokens_per_s: float
    exposed: Mapping[str, float]
    utilization: float
    peak: float
    calibrated: bool
    rates: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def global_batch(self) -> int:
        """Sequences per training step."""
        return self.micro_batch * self.micro_batches * self.mesh.dp * self.mesh.fsdp

    @property
    def fits(self) -> bool:
        """Does the step fit into the memory of the GPU?"""
        return self.memory.peak <= self.memory_limit

    def as_dict(self) -> dict[str, Any]:
        """Figures as data for JSON."""
        fields = asdict(self)
        fields["devices"], fields["global_batch"], fields["fits"] = (
            self.mesh.devices,
            self.global_batch,
            self.fits,
        )
        fields["parameters"] = self.model.parameters()
        fields["memory"]["peak"] = self.memory.peak
        return fields

    def __str__(self) -> str:
        unfit, others = [], list(self.warnings)
        if not self.fits:
            unfit = ["", *[text for text in others if text.startswith(DOES_NOT_FIT)]]
            others = [text for text in others if text not in unfit]
        rate = [] if unfit else [self._rate_line()]
        return "\n".join(
            [
                *self._heading(),
                *unfit,
                "",
                *(["times of GPUs with enough memory:"] if unfit else []),
                *self._times(),
                "",
                *self._sizes(),
                "",
                *rate,
                f"rates: {', '.join(f'{name} {rate}' for name, rate in self.rates.items())}",
                *[f"warning: {text}" for text in others],
            ]
        )

    def _heading(self) -> list[str]:
        model, mesh = self.model, self.mesh
        recipe = (
            "no recipe (bfloat16)" if self.recipe == HIGH_PRECISION else f"recipe {self.recipe}"
        )
        return [
            f"{model.name}, {model.parameters() / 1e9:.1f} B parameters, {recipe}, on {mesh.devices} x {self.gpu}"
            f" ({mesh}); predicted, not measured",
            f"{self.global_batch} sequences of {self.sequence} tokens: {self.micro_batches} "
            f"micro-batch{'es' * (self.micro_batches > 1)} of {self.micro_batch} for each replica, "
            f"recomputation: {self.recompute}",
        ]

    def _times(self) -> list[str]:
        rows = [(kind, took) for kind, took in self.parts.items() if took >= 5e-3]
        rows += [
            (f"exposed communication ({axis})", took)
            for axis, took in self.exposed.items()
            if took >= 5e-3
        ]
        rows.append(("step", self.step_ms))
        hidden = sum(self.communication.values()) - sum(self.exposed.values())
        return [
            *[f"{name:<32}{took:>12.2f} ms {took / self.step_ms:>7.1%}" for name, took in rows],
            f"{'hidden communication':<32}{max(hidden, 0.0):>12.2f} ms",
        ]

    def _sizes(self) -> list[str]:
        sizes = [
            *asdict(self.memory).items(),
            ("peak", self.memory.peak),
            ("limit", self.memory_limit),
        ]
        return [f"{name:<32}{size / GIB:>12.2f} GiB" for name, size in sizes]

    def _rate_line(self) -> str:
        faster = "" if self.recipe == HIGH_PRECISION else ", which FP8 and FP4 products exceed"
        peak = f"the bfloat16 peak ({self.peak / 1e9:.0f} TFLOP/s per device{faster})"
        return (
            f"{self.tokens_per_s:,.0f} tokens/s ({self.tokens_per_s / self.mesh.devices:,.0f} per device), model FLOP "
            f"utilization {self.utilization:.1%} of {peak}"
        )
