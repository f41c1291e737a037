"""The `te bench` measurements: the engine, plain PyTorch and other libraries, or a comparison between two files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.markup import escape

from transformer_engine.common import optional
from transformer_engine.common.planning import HIGH_PRECISION
from transformer_engine.pytorch.quantization import format_support

from ..devices import default_devices, is_torchrun_rank, launch
from ..failure import reporting, reporting_failures, writing
from ..options import torch_device
from ..survey import KINDS
from .cases import RECIPES, Case, cases
from .compare import print_comparison
from .distributed_report import RanksRequest, measure_on_ranks
from .measure import FULL, QUICK
from .providers import PROVIDERS, Provider
from .report import as_dict, print_roofs, print_rows, write
from .roofs import measure_roofs
from .run import Row, run


class BenchRequest(NamedTuple):
    """The cases to measure, and the providers.

    Attributes:
        families: Family names; empty: all.
        recipes: Recipe names; None: all supported ones.
        only: Parts of case names, separated by commas; empty: all.
        providers: Provider names; None: all that are not on request.
        quick: Small sizes and few repetitions.
    """

    families: list[str]
    recipes: list[str] | None
    only: str
    providers: list[str] | None
    quick: bool


def measure(
    request: BenchRequest,
    *,
    json: Path | None,
    plot_dir: Path | None,
    compare: tuple[Path, Path] | None,
    distributed: bool,
    devices: int | None,
) -> None:
    """Measure and print a request's cases, on one device or on several ranks; or compare two figure files.

    Args:
        request: Cases and providers.
        json: File for the figures.
        plot_dir: Folder for the plots.
        compare: Two figure files, which are compared without measuring.
        distributed: Time collectives, and layers on several ranks against one device.
        devices: Number of ranks, unless torchrun starts them.
    """
    console = Console(highlight=False)
    with reporting(console):
        if compare is not None:
            print_comparison(console, *compare)
            return
        device = torch_device("auto")
        quick = request.quick or device.type == "cpu"
        _check_file(json)
        ranks = None
        if distributed:
            _check_distributed(devices, request.providers, plot_dir)
            recipes = _recipes(
                request.recipes or (["bf16", "current"] if device.type == "cpu" else None), device
            )
            parts = tuple(part for part in request.only.split(",") if part)
            ranks = RanksRequest(device.type, recipes, tuple(request.families), parts, quick, json)
            ranks.cases(devices or default_devices())  # raises before processes are started
        elif devices is not None:
            raise ValueError(
                "--devices has no effect without --distributed; add it, or leave --devices out"
            )
    if ranks is not None:
        with reporting(console):
            if is_torchrun_rank():
                measure_on_ranks(ranks)
            else:
                launch(measure_on_ranks, devices or default_devices(), ranks)
        return
    with reporting(console):
        chosen = _choose_cases(
            _recipes(request.recipes, device), quick, request.families, request.only
        )
        providers = _providers(request.providers)
        if plot_dir is not None and plot_dir.exists() and not plot_dir.is_dir():
            raise ValueError(f"--plot-dir {plot_dir} is a file; pass a folder")
        if plot_dir is not None and not optional.installed("matplotlib"):
            raise ValueError(
                f"--plot-dir needs matplotlib; install with {optional.install_command('cli')}"
            )
    with reporting_failures(console):
        _measure(console, device, chosen, providers, quick, json, plot_dir)


def _check_file(json: Path | None) -> None:
    """Raise ValueError if the figure file cannot be written."""
    if json is not None and not json.parent.is_dir():
        raise ValueError(f"--json {json}: the folder {json.parent} does not exist; create it first")
    if json is not None and json.is_dir():
        raise ValueError(f"--json {json} is a folder; pass the path of a file")


def _check_distributed(
    devices: int | None, provider: list[str] | None, plot_dir: Path | None
) -> None:
    """Raise ValueError for options that --distributed does not support."""
    for name, value in (("--provider", provider), ("--plot-dir", plot_dir)):
        if value:
            raise ValueError(f"{name} has no effect with --distributed; remove one of the two")
    if devices is not None and is_torchrun_rank():
        raise ValueError(
            "--devices has no effect under torchrun, which starts the ranks; leave it out"
        )
    if devices is not None and devices < 2:
        raise ValueError(f"--devices {devices} is below 2; a comparison with one device needs more")
    available = torch.cuda.device_count()
    if torch.cuda.is_available() and (devices or available) > available:
        raise ValueError(
            f"--devices {devices} exceeds the {available} GPUs of this machine; give fewer"
        )
    if torch.cuda.is_available() and available < 2 and not is_torchrun_rank():
        raise ValueError(
            "--distributed needs two GPUs, this machine has one; use torchrun on several machines"
        )


def _recipes(names: list[str] | None, device: torch.device) -> tuple[str, ...]:
    """Recipes for --recipe, by default all that the hardware supports; on a CPU, the FP8 recipes.

    "none" is another name for "bf16": `te train` and `te plan` call high precision so.
    """
    names = [RECIPES[0] if name == HIGH_PRECISION else name for name in names or ()]
    for name in names:
        if name not in RECIPES:
            raise ValueError(f"recipe {name!r} does not exist; choose from {', '.join(RECIPES)}")
        support = format_support(KINDS[name]) if name in KINDS else None
        if support is not None and not support.available:
            raise ValueError(f"recipe {name}: {support.reason}")
    if names:
        return tuple(names)
    if device.type == "cpu":
        return ("bf16", "delayed", "current", "block")
    return (
        "bf16",
        *(name for name in RECIPES if name in KINDS and format_support(KINDS[name]).native),
    )


def _providers(names: list[str] | None) -> list[Provider]:
    providers = {provider.name: provider for provider in PROVIDERS}
    for name in names or ():
        if name not in providers:
            raise ValueError(
                f"provider {name!r} does not exist; choose from {', '.join(providers)}"
            )
    if names:
        return [provider for name, provider in providers.items() if name in names]
    return [provider for provider in providers.values() if not provider.on_request]


def _choose_cases(
    recipes: tuple[str, ...], quick: bool, family: list[str] | None, only: str
) -> list[Case]:
    parts = [part for part in only.split(",") if part]
    chosen_cases = [
        case
        for case in cases(recipes, quick, family or ())
        if not parts or any(part in case.name for part in parts)
    ]
    if chosen_cases:
        return chosen_cases
    if not parts:  # without --only every family has cases
        measured = [recipe for recipe in RECIPES if cases((recipe,), quick, family or ())]
        raise ValueError(
            f"--recipe {', '.join(recipes)} has no benchmark in --family {', '.join(family or ())}; choose from "
            f"{', '.join(measured)}"
        )
    raise ValueError(
        "no benchmark matches --family, --recipe and --only together; remove one of these options"
    )


def _measure(
    console: Console,
    device: torch.device,
    chosen: list[Case],
    providers: list[Provider],
    quick: bool,
    json: Path | None,
    plot_dir: Path | None,
) -> None:
    """Measure the cases with every available provider; print the figures, and write JSON and plots."""
    effort = QUICK if quick else FULL
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    if device.type == "cpu":
        console.print("torch finds no CUDA device: the figures are a CPU's, at small sizes")
    roofs = measure_roofs(device, effort)
    print_roofs(console, roofs)
    reasons = {provider.name: provider.unavailable_reason(device) for provider in providers}
    missing = {provider: reason for provider, reason in reasons.items() if reason is not None}
    for provider, reason in missing.items():
        console.print(f"without {provider}: {escape(reason)}", soft_wrap=True)
    rows: list[Row] = []
    try:
        with console.status("measuring") as status:
            doing = run(
                chosen, providers, device, roofs, effort, lambda name: status.update(escape(name))
            )
            for row in doing:
                rows.append(row)
                if json is not None:
                    with writing(json, "free some space there, or choose another file with --json"):
                        write(json, as_dict(rows, roofs, missing))
    except KeyboardInterrupt:
        console.print("stopped; figures until then:")
    print_rows(console, rows)
    if json is not None:
        console.print(f"wrote {escape(str(json))}", soft_wrap=True)
    if plot_dir is not None:
        from .plot import plot_families

        with writing(plot_dir, "free some space there, or choose another folder with --plot-dir"):
            for path in plot_families(plot_dir, rows, name):
                console.print(f"wrote {escape(str(path))}", soft_wrap=True)
