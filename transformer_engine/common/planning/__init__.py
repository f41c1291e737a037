"""plan(model, devices, ..) predicts a training step; search(..) finds the fastest mesh that fits.

Rank order, innermost first: tp, cp, fsdp, dp, pp. Parameters are sharded over the fsdp and cp ranks together if fsdp is
larger than 1, and replicated otherwise; experts are spread over ep of the data and context ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any, get_args

from .hardware import FORMATS as FORMATS
from .hardware import (
    GIB,
    HIGH_PRECISION,
    FormatCost,
    GpuRates,
    LinkRates,
    format_named,
    gpu_named,
    host_links,
)
from .hardware import GPUS as GPUS
from .layer import MicroBatch, Scheme
from .models import MODELS as MODELS
from .models import ModelShape, model_shape
from .report import Mesh, TrainingPlan
from .simulate import RankMachine
from .training import Recompute, TrainingStep

MICRO_BATCHES = (1, 2, 4)  # that a search tries
_SIZES = frozenset({field.name for field in fields(ModelShape)} - {"name"})


def plan(
    model: str | Path | ModelShape,
    devices: int,
    *,
    gpu: str | GpuRates = "h100",
    recipe: str = HIGH_PRECISION,
    dp: int | None = None,
    fsdp: int = 1,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    ep: int = 1,
    sequence: int = 8192,
    micro_batch: int = 1,
    global_batch: int | None = None,
    recompute: Recompute = "none",
    scheme: Scheme = "p2p",
    attention: str = "cudnn",
    graphs: bool = False,
    links: LinkRates | None = None,
    **sizes: Any,
) -> TrainingPlan:
    """Predict time and memory of a training step, without devices and without a tensor library.

    Args:
        model: A name from `MODELS`, the path of a Hugging Face config.json, a `ModelShape`, or any name with `hidden`,
            `layers` and `heads`.
        devices: Number of GPUs.
        gpu: A name from `GPUS`, or a `GpuRates` with other rates.
        recipe: "none" (bfloat16), "delayed", "current", "block", "mxfp8" or "nvfp4".
        dp: Data-parallel replicas; by default the devices that the other axes leave.
        fsdp: Ranks that share parameters by `fully_shard`, with the context-parallel ranks.
        tp: Tensor-parallel ranks, with sequence parallelism.
        cp: Context-parallel ranks.
        pp: Pipeline stages, in the order one forward, one backward.
        ep: Ranks that share the experts; divides dp * fsdp * cp.
        sequence: Tokens per sequence.
        micro_batch: Sequences per micro-batch.
        global_batch: Sequences per step over all devices; by default one micro-batch for each rank with its own
            sequences, and four for each pipeline stage if there are several.
        recompute: "full" saves only the layers' inputs and repeats their forward pass in the backward pass.
        scheme: How context-parallel ranks exchange keys and values: "p2p", "all_gather" or "a2a".
        attention: Attention backend, "cudnn" or "flash4".
        graphs: Kernels are launched by CUDA graphs, so that the host never delays the GPU.
        links: LinkRates within and between hosts; by default NVLink in 8-GPU hosts, and 400 Gbit/s for each GPU between
            them.
        sizes: Fields of `ModelShape` that replace the model's.

    Returns:
        The plan. It may exceed the GPU's memory: see `TrainingPlan.fits`.

    Raises:
        ValueError: A name is unknown, the GPU does not compute the recipe, or sizes do not divide.
    """
    shape, device = model_shape(model, **sizes), gpu_named(gpu)
    row = format_named(recipe, device)
    _check_counts(
        devices=devices,
        fsdp=fsdp,
        tp=tp,
        cp=cp,
        pp=pp,
        ep=ep,
        sequence=sequence,
        micro_batch=micro_batch,
    )
    rest = fsdp * tp * cp * pp
    mesh = Mesh(devices // rest or 1 if dp is None else dp, fsdp, tp, cp, pp, ep)
    _check_counts(dp=mesh.dp)
    if mesh.devices != devices:
        remedy = (
            "change one of them, or leave dp out"
            if dp is not None
            else "give axes whose product divides devices"
        )
        raise ValueError(
            f"dp={mesh.dp} * fsdp={fsdp} * tp={tp} * cp={cp} * pp={pp} is {mesh.devices}, but devices={devices}; "
            f"{remedy}"
        )
    choices = {"recompute": (recompute, get_args(Recompute)), "scheme": (scheme, get_args(Scheme))}
    for name, (value, supported) in {
        **choices,
        "attention": (attention, tuple(device.attention)),
    }.items():
        if value not in supported:
            raise ValueError(f"{name}={value!r} is unknown; choose from {', '.join(supported)}")
    _check_division(shape, mesh, sequence, micro_batch, scheme, row)
    ranks = mesh.dp * mesh.fsdp
    if global_batch is None:
        global_batch = ranks * micro_batch * (4 * pp if pp > 1 else 1)
    _check_counts(global_batch=global_batch)
    if global_batch % (ranks * micro_batch):
        raise ValueError(
            f"global_batch={global_batch} is not divisible by dp * fsdp * micro_batch = {ranks * micro_batch}; use "
            f"{math.ceil(global_batch / (ranks * micro_batch)) * ranks * micro_batch}"
        )
    links = host_links(device) if links is None else links
    step = TrainingStep(
        shape,
        RankMachine(device, row, links, tp, tp > 1, attention),
        mesh,
        MicroBatch(sequence, micro_batch, cp, scheme, ep),
        global_batch // (ranks * micro_batch),
        recompute == "full",
        graphs,
    )
    return step.planned()


def _check_counts(**counts: Any) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r} must be an integer of at least 1")


def _check_division(
    shape: ModelShape, mesh: Mesh, sequence: int, micro_batch: int, scheme: str, row: FormatCost
) -> None:
    """Raise ValueError for the first size that a mesh axis does not divide."""
    tp, cp = mesh.tp, mesh.cp
    checks = [
        ("heads", shape.heads, "tp", tp),
        ("kv_heads", shape.kv_heads, "tp", tp),
        ("ffn", shape.ffn, "tp", tp),
        ("layers", shape.layers, "pp", mesh.pp),
        # A causal ring gives each rank an early and a late part of the sequence.
        ("sequence", sequence, "2 * cp" if cp > 1 else "cp", 2 * cp if cp > 1 else 1),
        ("sequence * micro_batch / cp", sequence * micro_batch // cp, "tp", tp),
        ("dp * fsdp * cp", mesh.data, "ep", mesh.ep),
    ]
    if cp > 1 and scheme == "a2a":
        checks.append(("kv_heads / tp", shape.kv_heads // tp, "cp with scheme='a2a'", cp))
    if mesh.ep > 1:
        if not shape.experts:
            raise ValueError(
                f"ep={mesh.ep} needs a model with experts, and {shape.name} has none; use ep=1"
            )
        checks.append(("experts", shape.experts, "ep", mesh.ep))
    if row.multiple > 1:
        checks += [
            (
                f"tokens of a rank ({row.name})",
                sequence * micro_batch // cp,
                "the block",
                row.multiple,
            ),
            (f"hidden ({row.name})", shape.hidden, "the block", row.multiple),
            (f"ffn / tp ({row.name})", shape.ffn // tp, "the block", row.multiple),
        ]
    for name, value, axis, size in checks:
        if not value % size:
            continue
        if axis == "the block":
            raise ValueError(
                f"{name} = {value} is not divisible by {size}, which its products need; pad it, or use recipe='none'"
            )
        changed = axis.partition(" with")[0].split()[-1]  # cp of "2 * cp"
        raise ValueError(
            f"{name}={value} is not divisible by {axis}={size}; choose {changed} from the divisors of {value}, or "
            f"change {name}"
        )


def search(
    model: str | Path | ModelShape,
    devices: int,
    *,
    count: int = 5,
    global_batch: int | None = None,
    **options: Any,
) -> list[TrainingPlan]:
    """Find the fastest plans that fit into memory, over meshes, micro-batches and recomputation.

    Args:
        model: As for `plan`.
        devices: Number of GPUs.
        count: Maximum number of plans.
        global_batch: Sequences per step, equal for all plans; by default one for each device.
        options: Further `plan` arguments. Mesh axes, micro_batch and recompute are fixed if passed.

    Raises:
        ValueError: An argument is invalid, or no mesh fits; the message names the one that needs the least memory.
    """
    _check_counts(devices=devices, count=count)
    shape = model_shape(
        model, **{name: options.pop(name) for name in list(options) if name in _SIZES}
    )
    links = options.get("links") or host_links(gpu_named(options.get("gpu", "h100")))
    plans: list[TrainingPlan] = []
    reasons: list[str] = []
    for candidate in _candidates(shape, devices, links, options):
        try:
            plans.append(
                plan(
                    shape, devices, global_batch=global_batch or devices, **{**options, **candidate}
                )
            )
        except ValueError as error:
            reasons.append(str(error))
    if not plans:
        raise ValueError(
            f"no mesh of {devices} devices is valid for {shape.name}; the first reason: {reasons[0] if reasons else ''}"
        )
    fitting = sorted([each for each in plans if each.fits], key=lambda each: each.step_ms)
    if not fitting:
        smallest = min(plans, key=lambda each: each.memory.peak)
        raise ValueError(
            f"no mesh of {devices} devices fits: {shape.name} needs at least "
            f"{smallest.memory.peak / GIB:.1f} GiB of the {smallest.memory_limit / GIB:.1f} GiB of each "
            f"{smallest.gpu} ({smallest.mesh}, recompute={smallest.recompute!r}); "
            "use more devices, a shorter sequence, or a gpu with more memory"
        )
    return fitting[:count]


def _candidates(
    shape: ModelShape, devices: int, links: LinkRates, options: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield `plan` arguments whose axes divide the model and the devices."""

    def sizes(name: str, most: int, total: int) -> list[int]:
        if options.get(name) is not None:
            return [options[name]]
        return [size for size in range(1, min(most, total) + 1) if total % size == 0]

    batches = [options["micro_batch"]] if "micro_batch" in options else MICRO_BATCHES
    for tp in sizes("tp", min(links.devices_per_host, shape.kv_heads), devices):
        for pp in sizes("pp", shape.layers, devices // tp):
            for cp in sizes("cp", 64, devices // tp // pp):
                rest = devices // (tp * pp * cp)
                experts = (
                    sizes("ep", shape.experts, rest * cp)
                    if shape.experts
                    else [options.get("ep", 1)]
                )
                for fsdp in sizes("fsdp", rest, rest):
                    # Several sequences per micro-batch cost nearly the same as a part of each on a rank.
                    for ep, batch in product(experts, batches if cp == 1 else batches[:1]):
                        axes = {
                            "tp": tp,
                            "pp": pp,
                            "cp": cp,
                            "fsdp": fsdp,
                            "ep": ep,
                            "micro_batch": batch,
                        }
                        for recompute in (
                            [options["recompute"]]
                            if "recompute" in options
                            else get_args(Recompute)
                        ):
                            yield {**axes, "recompute": recompute}
