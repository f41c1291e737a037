"""Bits and times for casts to FP8 blocks, with the plan's warp count and with other counts, on a GPU.

    PYTHONPATH=. python benchmarks/cast_plans.py [--json FILE] [--only TEXT]

Uneven casts read matrices whose sizes are not multiples of a tile: their accesses are predicated and need more
registers. Identity casts also add the matrix columns, in one pass. All plans for a case are measured in turns,
with the L2 cache overwritten before each call; the bits are compared with the reference's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from record import GPU, machine, options, parser, select_cases, write
from torch import Tensor

from transformer_engine.common import formats
from transformer_engine.common.dispatch import use_backend
from transformer_engine.common.kernels import block_cast, block_fused, grouped_block_cast
from transformer_engine.common.kernels.block_fused import FusedPlan
from transformer_engine.common.kernels.launch import Launch, Machine
from transformer_engine.pytorch.primitives.grouped_gemm import make_groups
from transformer_engine.pytorch.primitives.quantize import QuantizeSpec, quantize
from transformer_engine.pytorch.runtime.launching import processors, run
from transformer_engine_tools.bench.measure import measure_in_turns

SCALING = {"power_of_two": True, "epsilon": 0.0, "value_for_inf": formats.FLOAT32_MAX}
NO_CONSTANTS = (7.0, 1.7, 1.0)
SHAPES = ((8192, 14336), (8200, 14344), (8191, 4104), (1000, 1000), (1001, 1000))
RUNS = 15


class Case(NamedTuple):
    """A cast of a matrix by several plans; the first one is the package's."""

    name: str
    plans: dict[str, Launch]
    inputs: tuple[Tensor | None, ...]
    expected: tuple[Tensor | None, ...]


def matrix(rows: int, depth: int) -> Tensor:
    x = torch.randn(rows, depth, device=GPU) * torch.exp2(
        torch.randint(-6, 6, (rows, 1), device=GPU).float()
    )
    return x.bfloat16()


def reference(x: Tensor, spec: QuantizeSpec) -> tuple[Tensor | None, ...]:
    """Reference codes and scales, for the matrix and its transpose."""
    with use_backend(quantize="reference"):
        q = quantize(x, spec)
    return q.codes, q.scale, q.codes_t, q.scale_t


def with_warps(launch: Launch, *warps: int) -> dict[str, Launch]:
    """The launch itself, and copies with other warp counts."""
    plans = {f"{launch.warps} warps": launch}
    for number in warps:
        if number != launch.warps:
            plans[f"{number} warps"] = replace(launch, warps=number, handles={}, makers={})
    return plans


def cases() -> Iterator[Case]:
    computer = Machine(*processors(torch.cuda.current_device()), 2)
    for rows, depth in SHAPES:
        x, shape = matrix(rows, depth), (rows, depth)
        uneven = bool(rows % 128 or depth % 128)
        for square in (False, True):
            form = formats.BLOCK_2D if square else formats.BLOCK_1D
            spec = QuantizeSpec(form, formats.E4M3, columnwise=True, power_of_two=True)
            expected = reference(x, spec)
            size, kind = f"{rows} x {depth}", "128x128" if square else "1x128"
            if uneven:
                if square:
                    launch = block_cast.square_blocks(shape, formats.E4M3, True, True, **SCALING)
                    rows_alone = block_cast.square_blocks(
                        shape, formats.E4M3, True, False, **SCALING
                    )
                    yield Case(
                        f"cast {kind} rows {size}",
                        with_warps(rows_alone, 4, 8),
                        (x,),
                        (*expected[:2], None, None),
                    )
                else:
                    launch = block_cast.row_blocks(
                        shape, formats.E4M3, True, True, **SCALING, machine=computer
                    )
                yield Case(f"cast {kind} {size}", with_warps(launch, 8, 4), (x,), expected)
            yield identity(x, square, computer, expected, size)
    yield groups((1000, 3000, 96, 4104), 8008)


def identity(
    x: Tensor, square: bool, computer: Machine, expected: tuple[Tensor | None, ...], size: str
) -> Case:
    """A cast in both directions with per-tile column sums."""
    shape = (x.shape[0], x.shape[1])
    blocks = block_cast.Blocks(formats.E4M3, True, square, True, 0.0, formats.FLOAT32_MAX)
    build = partial(
        block_fused.backward,
        "identity",
        False,
        shape,
        (shape[1], 0),
        NO_CONSTANTS,
        blocks,
        True,
        computer,
    )
    plan = block_fused._plan("identity", blocks, shape, computer)
    launch = build()
    plans = {f"{launch.warps} warps": launch}
    rest = (
        (FusedPlan(4, 2, 3), FusedPlan(8, 1, 3))
        if plan.resident
        else (FusedPlan(8, 0, 1), FusedPlan(16, 0, 1))
    )
    plans |= {f"{other.warps} warps": build(plan=other) for other in rest if other != plan}
    return Case(f"identity {'128x128' if square else '1x128'} {size}", plans, (x, None), expected)


def groups(splits: tuple[int, ...], depth: int) -> Case:
    """Grouped rows, with a width that needs single-element accesses."""
    x = matrix(sum(splits), depth)
    layout = make_groups(splits, sum(splits), x.device).layout
    shape = (x.shape[0], depth)
    launch = grouped_block_cast.row_blocks(
        shape, len(splits), formats.E4M3, True, 0.0, formats.FLOAT32_MAX, True, False
    )
    spec = QuantizeSpec(formats.BLOCK_1D, formats.E4M3, power_of_two=True)
    codes, _, _, _ = reference(x, spec)
    return Case(
        "rows of groups, depth % 16 == 8",
        with_warps(launch, 8),
        (x, None, layout),
        (codes, None, None, None),
    )


def equal(results: list[Tensor], expected: tuple[Tensor | None, ...]) -> bool:
    """Whether the results that the reference has are equal in every byte."""
    pairs = [(a, b) for a, b in zip(results, expected, strict=False) if b is not None]
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in pairs
    )


def main() -> None:
    chosen = options(parser(__doc__))
    found = []
    for case in select_cases(cases(), chosen.only):
        calls = [partial(run, launch, case.inputs) for launch in case.plans.values()]
        same = [equal(call(), case.expected) for call in calls]
        times = measure_in_turns(calls, RUNS)
        plans = {
            name: {"ms": round(ms, 5), "equal": bits}
            for name, ms, bits in zip(case.plans, times, same, strict=True)
        }
        found.append({"name": case.name, "plans": plans})
        print(case.name, plans, flush=True)
        if chosen.json is not None:
            write(chosen.json, machine(), cases=found)


if __name__ == "__main__":
    main()
