"""The `te info` report: device, libraries, the recipes that run here, and every operation's backend."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from transformer_engine._version import __version__
from transformer_engine.common import optional
from transformer_engine.common.dispatch import LATER
from transformer_engine.common.hardware import NO_GPU, Hardware
from transformer_engine.pytorch.runtime.device import (
    cuda_version,
    current_hardware,
    get_cudnn_version,
    get_device_compute_capability,
    has_cuda,
)

from .invocation import program
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
class MachineReport:
    """The device and the libraries; a missing version is a sentence on its installation.

    `hardware` is the device's row in the hardware table; empty without a GPU.
    """

    version: str
    python: str
    device: str
    capability: str
    hardware: dict[str, Any]
    memory: str
    libraries: dict[str, str]
    jax: JaxMachine


def print_report(console: Console, why: bool) -> None:
    """Print the machine, the recipes and the backend of every operation; with `why`, also the reasons."""
    described, surveyed = machine(), survey("cuda" if has_cuda() else "cpu")
    _print_machine(console, described)
    columns = ("recipe", "runs", "products by", *(["why"] if why else []))
    table = Table(*columns, title="recipes", title_justify="left")
    for report in surveyed.recipes:
        reason = [escape(report.reason or "")] if why else []
        table.add_row(report.recipe, report.status, ", ".join(report.products), *reason)
    console.print(table)
    if any(report.status == "on request" for report in surveyed.recipes):
        console.print("on request: emulated once TE_EMULATE=1 is set or te.emulate() is called")
    if why:
        _print_reasons(console, surveyed)
    else:
        _print_backends(console, surveyed)
        console.print(
            f"{program()} info --why prints the reason that each other backend is not used.",
            soft_wrap=True,
        )


def print_json() -> None:
    """Print the same report as JSON."""
    print(json.dumps(as_dict(machine(), survey("cuda" if has_cuda() else "cpu")), indent=2))


def machine() -> MachineReport:
    """Gather the facts about this machine."""
    if has_cuda():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        device, memory = properties.name, f"{properties.total_memory / 2**30:.0f} GiB"
        capability = ".".join(map(str, get_device_compute_capability()))
        hardware = asdict(current_hardware())
    else:
        count = torch.get_num_threads()
        device = f"CPU ({platform.machine()}, {count} thread{'s' if count > 1 else ''})"
        memory = _host_memory()
        capability = "none: torch finds no CUDA device"
        hardware = {}
    versions = {name: _version(name, sentence) for name, sentence in LIBRARIES.items()}
    # with its build, which the distribution's metadata may leave out
    versions["torch"] = str(torch.__version__)
    versions["CUDA"] = _format_version(cuda_version(), "none: this torch is built without CUDA")
    versions["cuDNN"] = _format_version(
        get_cudnn_version(), "none: torch loads it with a CUDA device only"
    )
    # JAX makes the last GPU that it finds the current device of the thread.
    with torch.cuda.device(torch.cuda.current_device()) if has_cuda() else nullcontext():
        of_jax = jax_machine()
    return MachineReport(
        __version__,
        platform.python_version(),
        device,
        capability,
        hardware,
        memory,
        versions,
        of_jax,
    )


def as_dict(described: MachineReport, surveyed: Survey) -> dict[str, Any]:
    """Convert the same facts to plain data: keys machine, recipes, operations and unused_operations."""
    return {
        "machine": asdict(described),
        "recipes": [asdict(report) for report in surveyed.recipes],
        "operations": [
            {
                "operation": finding.operation,
                "recipes": list(finding.recipes),
                "chosen": finding.chosen,
                "backends": [asdict(verdict) for verdict in finding.verdicts],
            }
            for finding in surveyed.findings
        ],
        "unused_operations": list(surveyed.unused),
    }


def _host_memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (
        AttributeError,
        OSError,
        ValueError,
    ):  # no such number on this system, for example on Windows
        return "host memory"
    return f"{size / 2**30:.0f} GiB of host memory"


def _version(name: str, sentence: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return sentence


def _format_version(version: tuple[int, ...], sentence: str) -> str:
    return ".".join(map(str, version)) if any(version) else sentence


def _print_machine(console: Console, described: MachineReport) -> None:
    table = Table(
        title=f"transformer-engine {described.version}", show_header=False, title_justify="left"
    )
    rows = {
        "device": described.device,
        "memory": described.memory,
        "compute capability": described.capability,
        "table of hardware": _row(described.hardware),
        "python": described.python,
        **described.libraries,
        **described.jax.versions,
        "JAX devices": described.jax.devices,
        "JAX FP8": described.jax.fp8 or "none: JAX is not installed",
    }
    for name, value in rows.items():
        table.add_row(name, escape(value))
    console.print(table)


def _row(hardware: Mapping[str, Any]) -> str:
    """Format a hardware table row as text."""
    if not hardware:
        return "none: operations run on the CPU"
    like = f", treated as {hardware['likeness']}" if hardware["likeness"] else ""
    gpus = f" ({', '.join(hardware['gpus'])})" if hardware["gpus"] else ""
    versions = ""
    if any(hardware["triton"]):
        versions = f"; kernels from Triton {'.'.join(map(str, hardware['triton']))} on"
    if "mxfp8 products" in hardware["capabilities"]:
        versions += f", block-scaled products from {'.'.join(map(str, hardware['scaled_dot']))} on"
    title = f"{hardware['vendor']} {hardware['architecture']}{gpus}{like}"
    return f"{title}: {', '.join(hardware['capabilities'])}{versions}"


def _names(recipes: Sequence[str], recipe_names: Sequence[str]) -> str:
    """Describe a recipe set: "all, none" (no recipe), "all", or their names."""
    missing = [name for name in recipe_names if name not in recipes]
    if missing in ([], ["none"]):
        return "all, none" if not missing else "all"
    return ", ".join(recipes)


def _print_backends(console: Console, surveyed: Survey) -> None:
    """Print the backends of each operation, in one row."""
    recipe_names = [report.recipe for report in surveyed.recipes]
    by_operation: dict[str, dict[str, set[str]]] = {}
    for finding in surveyed.findings:
        users = by_operation.setdefault(finding.operation, {})
        users.setdefault(finding.chosen or "none", set()).update(finding.recipes)
    table = Table("operation", "backend (recipes)", title="backends", title_justify="left")
    for operation, users in by_operation.items():
        named = [
            f"{backend} ({_names([name for name in recipe_names if name in recipes], recipe_names)})"
            for backend, recipes in users.items()
        ]
        table.add_row(operation, ", ".join(named))
    console.print(table)


def _print_reasons(console: Console, surveyed: Survey) -> None:
    """Print every request to an operation with its backend and the reasons against the others."""
    recipe_names = [report.recipe for report in surveyed.recipes]
    table = Table(
        "operation",
        "recipes",
        "backend",
        "why the others are not used",
        title="backends",
        title_justify="left",
    )
    for finding in surveyed.findings:
        rejected = [v for v in finding.verdicts if not v.chosen and v.reason != LATER]
        reasons = [f"{v.backend}: {v.reason}" for v in rejected]
        later = [v.backend for v in finding.verdicts if v.reason == LATER]
        if later:
            reasons.append(f"lower priority: {', '.join(later)}")
        table.add_row(
            finding.operation,
            _names(finding.recipes, recipe_names),
            finding.chosen or "none",
            escape("\n".join(reasons)),
        )
    console.print(table)
    console.print(
        "The requests are those of a small layer (hidden size 128, 128 tokens); te.explain(module, x) reports "
        "the backends of your own call.",
        soft_wrap=True,
    )
    if surveyed.unused:
        console.print(
            f"operations that a TransformerLayer does not use: {', '.join(surveyed.unused)}"
        )


@dataclass(frozen=True)
class JaxMachine:
    """jax, jaxlib and flax versions, devices, and how FP8 products are computed; without JAX, only `devices`."""

    versions: Mapping[str, str] = field(default_factory=dict)
    devices: str = ""
    fp8: str = ""


def jax_machine() -> JaxMachine:
    """Gather the facts about JAX on this machine; initializes its backends."""
    if not optional.installed("jax"):
        return JaxMachine(devices=f"not installed; {optional.install_command('jax')}")
    versions = {
        name: _version(name, f"not installed; {optional.install_command('jax')}")
        for name in ("jax", "jaxlib", "flax")
    }
    reason = optional.failure("transformer_engine.jax")
    if reason is not None:
        return JaxMachine(versions, reason)
    import jax

    from transformer_engine.jax.primitives.gemm.float8 import FLAG
    from transformer_engine.jax.runtime import platform

    devices = ", ".join(
        f"{device.platform}:{device.id} ({device.device_kind})" for device in jax.devices()
    )
    row = platform.hardware() if platform.has_gpu() else NO_GPU
    return JaxMachine(versions, devices, fp8_route(row, FLAG, platform.xla_flag(FLAG)))


def fp8_route(row: Hardware, flag: str, value: str | None) -> str:
    """Describe how FP8 products with one scale per tensor are computed on a hardware table row."""
    setting = f"--{flag} is {'not set' if value is None else value}"
    if row is NO_GPU:
        return f"reference, in float32 on the CPU; {setting}"
    if (reason := row.lacks("fp8 products")) is not None:
        return f"reference: {reason}; {setting}"
    if value in ("false", "0"):
        return f"scaled: cuBLASLt multiplies by the scales; {setting}"
    return f"direct: scales are applied after cuBLASLt; {setting}, set XLA_FLAGS=--{flag}=false before jax starts"
