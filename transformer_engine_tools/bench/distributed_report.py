"""The `te bench --distributed` run in each rank: measurement, the table and rank 0's JSON file."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.cuda import nccl

from transformer_engine._version import __version__

from ..devices import join_group
from ..failure import writing
from .distributed import FULL_ON_RANKS, MEANING, QUICK_ON_RANKS, Groups, RanksRow, run_on_ranks
from .distributed_cases import RanksCase, ranks_cases
from .report import write

# Field: heading and format.
HEADINGS = {
    "one_ms": ("one ms", "{:.3f}"),
    "eager_ms": ("ranks ms", "{:.3f}"),
    "speedup": ("speedup", "{:.2f}"),
    "compute_ms": ("compute ms", "{:.3f}"),
    "exposed": ("exposed", "{:.1%}"),
    "rate": ("GB/s", "{:.3g}"),
    "host_ms": ("host ms", "{:.3f}"),
    "graphed_ms": ("graph ms", "{:.3f}"),
    "graphed_speedup": ("graph speedup", "{:.2f}"),
    "graphed_exposed": ("graph exposed", "{:.1%}"),
    "one_mib": ("one MiB", "{:.0f}"),
    "peak_mib": ("rank MiB", "{:.0f}"),
}


@dataclass(frozen=True)
class RanksRequest:
    """Settings for a measurement on every rank.

    Attributes:
        device: "cuda" or "cpu".
        recipes: Layer recipes.
        families: RANKS_FAMILIES members; empty: all.
        only: Parts of case names; empty: all.
        quick: Small sizes and few repetitions.
        json: File for the figures, or None.
    """

    device: str
    recipes: tuple[str, ...]
    families: tuple[str, ...]
    only: tuple[str, ...]
    quick: bool
    json: Path | None

    def cases(self, ranks: int) -> list[RanksCase]:
        """Cases for a number of ranks.

        Raises:
            ValueError: No case is left.
        """
        selected_cases = [
            case
            for case in ranks_cases(self.recipes, self.quick, ranks, self.families)
            if not self.only or any(part in case.name for part in self.only)
        ]
        if not selected_cases:
            raise ValueError(
                "no benchmark matches --family, --recipe and --only together; remove one of these options"
            )
        return selected_cases


def measure_on_ranks(request: RanksRequest) -> None:
    """Measure the cases of a request on this rank; rank 0 prints the table and writes the file after every case."""
    console = Console(highlight=False)
    rows: list[RanksRow] = []
    with join_group(request.device) as device:
        groups = Groups.create_groups()
        ranks, first = dist.get_world_size(), dist.get_rank() == 0
        if first:
            console.print(f"{ranks} ranks on {_device_name(device)}, {dist.get_backend()}")
        effort = QUICK_ON_RANKS if request.quick else FULL_ON_RANKS
        for row in run_on_ranks(request.cases(ranks), groups, device, effort):
            rows.append(row)
            if first and request.json is not None:
                with writing(
                    request.json, "free some space there, or choose another file with --json"
                ):
                    write(request.json, as_dict(rows, ranks))
    if first:
        print_rows(console, rows)
        if request.json is not None:
            console.print(f"wrote {escape(str(request.json))}", soft_wrap=True)


def print_rows(console: Console, rows: Sequence[RanksRow]) -> None:
    """Print one table per family, without columns that no family row fills."""
    for family in dict.fromkeys(row.family for row in rows):
        members = [row for row in rows if row.family == family]
        columns = [
            name for name in HEADINGS if any(getattr(row, name) is not None for row in members)
        ]
        table = Table(title=family, title_justify="left")
        table.add_column("case", overflow="fold")
        for name in columns:
            table.add_column(HEADINGS[name][0], justify="right")
        if any(row.error for row in members):
            table.add_column("error", overflow="fold")
        for row in members:
            values = [(HEADINGS[name][1], getattr(row, name)) for name in columns]
            cells = ["" if value is None else form.format(value) for form, value in values]
            error = [escape(row.error)] if row.error else []
            table.add_row(row.case.partition("/")[2], *cells, *error)
        console.print(table)


def as_dict(rows: Sequence[RanksRow], ranks: int) -> dict[str, Any]:
    """JSON file content: machine, ranks, torch, command, meaning and results."""
    # Not `transformer_engine_tools.machine`: it starts JAX, which changes the process's current GPU.
    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    )
    return {
        "machine": device,
        "ranks": ranks,
        "backend": dist.get_backend(),
        "package": __version__,
        "torch": str(torch.__version__),
        "nccl": ".".join(map(str, nccl.version())) if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "command": " ".join(["te", *sys.argv[1:]]),
        "meaning": MEANING,
        "results": [row.as_dict() for row in rows],
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "a CPU"
