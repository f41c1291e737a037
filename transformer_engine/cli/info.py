"""`te info`: the device, the libraries, the recipes that run here, and the backend of every operation."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .._version import __version__
from ..common import optional
from ..common.dispatch import LATER
from ..pytorch.runtime.device import cuda_version, get_cudnn_version, get_device_compute_capability, has_cuda
from .jax_machine import JaxMachine, jax_machine
from .survey import Survey, survey

# Distribution name, and the sentence for a machine without it.
LIBRARIES = {
    "torch": "not installed; pip install torch",
    "triton": "not installed; it comes with the CUDA builds of torch",
    "nvmath-python": f"not installed; {optional.install_command('cuda')}",
    "nvidia-cudnn-frontend": f"not installed; {optional.install_command('cuda')}",
    "flash-attn-4": f"not installed; {optional.install_command('flash')}",
}


@dataclass(frozen=True)
class Machine:
    """The device and the libraries; a version that is missing is a sentence that says how to get it."""

    version: str
    python: str
    device: str
    capability: str
    memory: str
    libraries: dict[str, str]
    jax: JaxMachine


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs")] = False,
) -> None:
    """Describe this machine: device, libraries, recipes and the backend that each operation uses."""
    described, found = machine(), survey("cuda" if has_cuda() else "cpu")
    if as_json:
        typer.echo(json.dumps(as_dict(described, found), indent=2))
        return
    console = Console(highlight=False)
    _print_machine(console, described)
    _print_recipes(console, found)
    _print_backends(console, found)


def machine() -> Machine:
    """The facts about this machine."""
    if has_cuda():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        device, memory = properties.name, f"{properties.total_memory / 2**30:.0f} GiB"
        capability = ".".join(map(str, get_device_compute_capability()))
    else:
        device, memory = f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)", "the host's"
        capability = "none: torch finds no CUDA device"
    versions = {name: _version(name, sentence) for name, sentence in LIBRARIES.items()}
    versions["torch"] = str(
        torch.__version__
    )  # with its build, which the distribution's metadata may leave out
    versions["CUDA"] = _dotted(cuda_version(), "none: this torch is built without CUDA")
    versions["cuDNN"] = _dotted(get_cudnn_version(), "none: torch loads it with a CUDA device only")
    return Machine(
        __version__, platform.python_version(), device, capability, memory, versions, jax_machine()
    )


def as_dict(described: Machine, found: Survey) -> dict[str, Any]:
    """The same facts as plain data: keys machine, recipes, operations and unused_operations."""
    return {
        "machine": asdict(described),
        "recipes": [asdict(report) for report in found.recipes],
        "operations": [
            {
                "operation": finding.operation,
                "recipes": list(finding.recipes),
                "chosen": finding.chosen,
                "backends": [asdict(verdict) for verdict in finding.verdicts],
            }
            for finding in found.findings
        ],
        "unused_operations": list(found.unused),
    }


def _version(name: str, sentence: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return sentence


def _dotted(version: tuple[int, ...], sentence: str) -> str:
    return ".".join(map(str, version)) if any(version) else sentence


def _print_machine(console: Console, described: Machine) -> None:
    table = Table(title=f"transformer-engine {described.version}", show_header=False, title_justify="left")
    rows = {
        "device": described.device,
        "memory": described.memory,
        "compute capability": described.capability,
        "python": described.python,
        **described.libraries,
        **described.jax.versions,
        "JAX devices": described.jax.devices,
        "JAX FP8": described.jax.fp8 or "none: there is no JAX",
    }
    for name, value in rows.items():
        table.add_row(name, escape(value))
    console.print(table)


def _print_recipes(console: Console, found: Survey) -> None:
    table = Table("recipe", "runs", "products by", "why", title="recipes", title_justify="left")
    for report in found.recipes:
        table.add_row(report.recipe, report.status, ", ".join(report.products), escape(report.reason or ""))
    console.print(table)
    if any(report.status == "on request" for report in found.recipes):
        console.print("on request: emulated once TE_EMULATE=1 is set or te.emulate() is called")


def _names(recipes: Sequence[str], known: Sequence[str]) -> str:
    """Recipes in a few words: any, with or without none, or their names."""
    missing = [name for name in known if name not in recipes]
    if missing in ([], ["none"]):
        return "any or none" if not missing else "any"
    return ", ".join(recipes)


def _print_backends(console: Console, found: Survey) -> None:
    table = Table(
        "operation", "recipes", "backend", "why not the others", title="backends", title_justify="left"
    )
    for finding in found.findings:
        refused = [v for v in finding.verdicts if not v.chosen and v.refusal != LATER]
        refusals = [f"{v.backend}: {v.refusal}" for v in refused]
        later = [v.backend for v in finding.verdicts if v.refusal == LATER]
        if later:
            refusals.append(f"later in order: {', '.join(later)}")
        table.add_row(
            finding.operation,
            _names(finding.recipes, [report.recipe for report in found.recipes]),
            finding.chosen or "none",
            escape("\n".join(refusals)),
        )
    console.print(table)
    console.print(
        "The layer that was asked is small (hidden 128, 128 tokens); te.explain(module, x) answers for your own calls.",
        soft_wrap=True,
    )
    if found.unused:
        console.print(f"not used by a TransformerLayer: {', '.join(found.unused)}")
