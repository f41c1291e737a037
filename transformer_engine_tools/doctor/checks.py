"""The `te doctor` checks: a table with names and functions from the installation to findings.

A finding is good, a note (an optional part is missing) or a problem with a remedy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from packaging.version import Version

from transformer_engine.common import frameworks, optional
from transformer_engine.common.documentation import page
from transformer_engine.common.hardware import Hardware

from . import clients
from .clients import PACKAGE
from .environment import FLASH4, Installation, gather

Status = Literal["good", "note", "problem"]

PYTHONS = ((3, 10), (3, 14))
ORIGINALS = (
    "transformer-engine-torch",
    "transformer-engine-jax",
    "transformer-engine-cu12",
    "transformer-engine-cu13",
)
FLASH = {"flash_attn": "flash-attn", "flash_attn_interface": "flash-attn-3", FLASH4[0]: FLASH4[1]}
REINSTALL = (
    f"pip uninstall -y {PACKAGE} until none is left, then {optional.install_command('pytorch')}"
)


@dataclass(frozen=True)
class Finding:
    """A result of a check; `remedy` is empty if none is needed.

    Attributes:
        check: Name of the check.
        status: Result of the check.
        message: Observation, in one sentence.
        remedy: Remedy, in one sentence; empty if none is needed.
    """

    check: str
    status: Status
    message: str
    remedy: str = ""


Result = tuple[Status, str, str]
Results = Iterator[Result]


@dataclass(frozen=True)
class Check:
    """A check; `examine` yields (status, description, remedy)."""

    name: str
    examine: Callable[[Installation], Results]


def examine(environment: Installation) -> list[Finding]:
    """Collect all findings, in CHECKS order."""
    return [
        Finding(check.name, *answer) for check in CHECKS for answer in check.examine(environment)
    ]


def healthy(findings: list[Finding]) -> bool:
    """Whether no finding is a problem."""
    return all(finding.status != "problem" for finding in findings)


def _format_version(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _python(e: Installation) -> Results:
    least, most = PYTHONS
    if not least <= e.python <= most:
        words = f"Python {_format_version(e.python)}; {_format_version(least)} to {_format_version(most)} is supported"
        yield "problem", words, f"create an environment with Python {_format_version(most)}"
    else:
        yield "good", f"Python {_format_version(e.python)}", ""


def _package(e: Installation) -> Results:
    distributions = e.distributions.get(PACKAGE, ())
    if not distributions:
        yield (
            "problem",
            f"the code in {e.folder} runs without package metadata, which several clients read",
            optional.install_command("pytorch"),
        )
    elif len({installed.version for installed in distributions}) > 1:
        versions = ", ".join(
            f"{installed.version} in {installed.place}" for installed in distributions
        )
        yield "problem", f"the metadata of several versions is installed: {versions}", REINSTALL
    elif distributions[0].version != e.version:
        words = (
            f"the metadata says {distributions[0].version}, the code in {e.folder} is {e.version}"
        )
        yield "problem", words, REINSTALL
    else:
        yield "good", f"{PACKAGE} {e.version} in {e.folder}", ""
    for folder, version in e.copies:
        status = "note" if version == e.version else "problem"
        remedy = "remove this folder from sys.path: see PYTHONPATH and editable installs"
        yield status, f"{version} is also on the import path, in {folder}", remedy


def _original(e: Installation) -> Results:
    installed = [
        f"{name} {e.version_of(name)}" for name in ORIGINALS if e.version_of(name) is not None
    ]
    remedy = f"pip uninstall -y {PACKAGE} {' '.join(ORIGINALS)}, then {optional.install_command('pytorch')}"
    if installed:
        words = f"the original is installed in addition to this package, over the same files: {', '.join(installed)}"
        yield "problem", words, remedy
    foreign = e.extension is not None and not e.extension.endswith("__init__.py")
    if foreign:
        yield (
            "problem",
            f"import transformer_engine_torch would load the original's {e.extension}",
            remedy,
        )
    if not installed and not foreign:
        yield "good", "the original is not installed", ""


def _jax(e: Installation) -> Results:
    yield from _framework(e, frameworks.JAX)
    if "jax.devices" in e.failures:
        remedy = (
            "unset JAX_PLATFORMS, or set it to platforms of this machine; cpu is always available"
        )
        yield "problem", e.failures["jax.devices"], remedy
    if e.jax_devices:
        if e.driver is not None and e.jax_devices == ("cpu",):
            words = "JAX runs on the CPU although an NVIDIA driver is installed"
            yield "note", words, optional.install_command("jax-cuda13")
        else:
            yield "good", f"devices of JAX: {', '.join(e.jax_devices)}", ""


def _framework(e: Installation, framework: frameworks.Framework) -> Results:
    """Check the packages of a framework and their versions, and whether this package's modules for it import."""
    remedy = optional.install_command(framework.extra)
    missing = [package.name for package in framework.packages if e.version_of(package.name) is None]
    if missing and e.python < framework.python:
        words = f"transformer_engine.{framework.module} needs Python {_format_version(framework.python)} or newer"
        yield "note", words, f"make an environment with a newer Python, and {remedy}"
        return
    if missing:
        pronoun = "them" if len(missing) > 1 else "it"
        words = f"{', '.join(missing)} not installed; transformer_engine.{framework.module} needs {pronoun}"
        yield "note", words, remedy
        return
    for package in framework.packages:
        version = e.version_of(package.name) or ""
        reason = package.unsupported_reason(version) or e.failures.get(package.name)
        yield ("problem", reason, remedy) if reason else ("good", f"{package.name} {version}", "")
    ours = f"transformer_engine.{framework.module}"
    if ours in e.failures and not any(package.name in e.failures for package in framework.packages):
        yield "problem", e.failures[ours], remedy


def _gpu(e: Installation) -> Results:
    """Check that torch finds the GPU, and that the GPU has FP8 products."""
    if e.version_of("torch") is None:
        return
    if "torch.cuda" in e.failures:
        yield "problem", e.failures["torch.cuda"], "check the driver: nvidia-smi must list the GPU"
    elif e.gpu.name is not None:
        words = f"{e.gpu.name}, {e.gpu.hardware.title}, driver {e.driver}"
        yield "good", f"{words}, CUDA {_format_version(e.gpu.build)}", ""
        if not e.gpu.hardware.has("fp8 products"):
            yield (
                "note",
                "this GPU has no FP8 matrix products",
                "set TE_EMULATE=1 to emulate the recipes",
            )
    elif e.driver is None:
        yield "good", "no NVIDIA driver; all operations run on the CPU", ""
    elif e.gpu.build == (0, 0):
        words = f"the NVIDIA driver {e.driver} is installed, but this torch is built without CUDA"
        yield "problem", words, "install a CUDA build of torch, as pytorch.org describes"
    else:
        words = (
            f"torch for CUDA {_format_version(e.gpu.build)} finds no device under driver {e.driver}"
        )
        yield (
            "problem",
            words,
            "update the driver, or install torch for an older CUDA; check that CUDA_VISIBLE_DEVICES names a GPU",
        )


def _triton(e: Installation) -> Results:
    status: Status = "note" if e.gpu.name is None else "problem"
    if "triton" in e.failures:
        yield status, e.failures["triton"], "pip install --force-reinstall triton"
    elif e.version_of("triton") is None and e.gpu.name is not None:
        yield (
            "problem",
            "triton is not installed, and the kernels of this package need it",
            "pip install triton",
        )
    elif (version := e.version_of("triton")) is not None:
        yield _triton_for_gpu(e.gpu.hardware, version)
    else:
        yield "good", "triton is not installed; only GPUs need it", ""


def _triton_for_gpu(hardware: Hardware, version: str) -> Result:
    """Compare a Triton version with the first ones that support a GPU and its block-scaled products."""
    major, minor = (*Version(version).release, 0)[:2]
    status: Status = "problem"
    reason = optional.triton_problem(hardware, (major, minor))
    if reason is None and hardware.has("mxfp8 products"):
        status, reason = "note", optional.scaled_dot_problem(hardware, (major, minor))
    if reason is None:
        return "good", f"triton {version}", ""
    cause, _, remedy = reason.partition("; ")
    return status, cause, remedy


def _libraries(e: Installation) -> Results:
    """Check the cuBLASLt and cuDNN bindings, which GPUs from other vendors do not call."""
    if e.gpu.name is None or e.gpu.hardware.lacks("cublaslt") is not None:
        return
    for module, name, brings in (
        ("nvmath", "nvmath-python", "the fastest products"),
        ("cudnn", "nvidia-cudnn-frontend", "cuDNN attention, including FP8 attention"),
    ):
        version = e.version_of(name)
        if version is None:
            yield (
                "note",
                f"{name} is not installed; it provides {brings}",
                optional.install_command("cuda"),
            )
        elif module in e.failures:
            yield "problem", e.failures[module], optional.install_command("cuda")
        elif module == "cudnn" and (
            problem := optional.cudnn_versions_problem(
                version, max(e.gpu.cudnn, optional.MINIMUM_CUDNN)
            )
        ):
            yield "problem", problem, optional.install_command("cuda")
        else:
            yield "good", f"{name} {version}", ""
    if e.gpu.cudnn < (9, 13, 1):
        words = f"cuDNN {_format_version(e.gpu.cudnn)}; cuDNN attention needs 9.13.1"
        yield "note", words, "pip install --upgrade nvidia-cudnn-cu13 (or -cu12, as torch's build)"
    else:
        yield "good", f"cuDNN {_format_version(e.gpu.cudnn)}", ""


def _flash(e: Installation) -> Results:
    broken = [module for module in FLASH if module in e.failures]
    for module in broken:
        yield (
            "problem",
            e.failures[module],
            f"pip uninstall {FLASH[module]}, or build it for this torch",
        )
    names = ("flash-attn", "flash-attn-3", "flash-attn-4")
    installed = [f"{name} {e.version_of(name)}" for name in names if e.version_of(name) is not None]
    if not broken:
        yield "good", f"FlashAttention: {', '.join(installed) or 'not installed, not needed'}", ""


def _command(e: Installation) -> Results:
    """Check which commands run: `te train` with either framework, the others with torch."""
    has_torch, has_jax = (e.version_of(name) is not None for name in ("torch", "jax"))
    if e.version_of("matplotlib") is None:
        words = "matplotlib not installed, which te train and te bench --plot-dir need"
        # With JAX alone, the remedy does not install torch, which takes gigabytes.
        yield (
            "note",
            words,
            optional.install_command("cli-jax" if has_jax and not has_torch else "cli"),
        )
        return
    if has_torch:
        yield "good", "all commands are available", ""
    else:
        words = "torch not installed; only te train --framework jax and te doctor are available"
        yield "note", words, optional.install_command("cli")
    lacking = [name for name in ("optax", "orbax-checkpoint") if e.version_of(name) is None]
    if has_jax and lacking:
        words = f"{', '.join(lacking)} not installed, which te train --framework jax needs"
        yield "note", words, optional.install_command("cli-jax")


def _clients(e: Installation) -> Results:
    for name, distribution, row in clients.installed(e):
        pin, label = clients.pins(distribution), f"{name} {distribution.version}"
        if pin and not clients.takes(pin, e.version):
            words = f"{label} requires {PACKAGE}{pin}, but this is {e.version}: it may call missing functions"
            yield "note", words, f"install a version of {name} that accepts {e.version}"
        elif row is not None and row.metadata and e.version_of(PACKAGE) is None:
            yield (
                "problem",
                f"{label} will not detect this package: it looks for {row.by}",
                REINSTALL,
            )
        else:
            yield (
                "good",
                f"{label} detects this package by {row.by if row is not None else 'its requirement'}",
                "",
            )


def _variables(e: Installation) -> Results:
    if e.variables is None:
        yield "good", "all environment variables have valid values", ""
    else:
        yield "problem", e.variables, f"{page('environment')} has the table"


def _cache(e: Installation) -> Results:
    if e.cache is None:
        yield "good", "the cache folder is writable", ""
    else:
        words = f"the cache folder is not writable: {e.cache}"
        yield "problem", words, "set TE_CACHE_DIR to a writable folder"


CHECKS = (
    Check("python", _python),
    Check("package", _package),
    Check("original", _original),
    Check("torch", lambda e: _framework(e, frameworks.PYTORCH)),
    Check("gpu", _gpu),
    Check("triton", _triton),
    Check("libraries", _libraries),
    Check("flash-attention", _flash),
    Check("jax", _jax),
    Check("command", _command),
    Check("clients", _clients),
    Check("variables", _variables),
    Check("cache", _cache),
)


SIGNS = {"good": "ok  ", "note": "note", "problem": "FAIL"}


def run(as_json: bool) -> int:
    """Print the findings as lines or as JSON and return the exit code."""
    findings = examine(gather())
    print(as_text(findings) if not as_json else json.dumps(as_dict(findings), indent=2))
    return 0 if healthy(findings) else 1


def as_text(findings: list[Finding]) -> str:
    """Format one line per finding, with its remedy, and the total."""
    lines = []
    for finding in findings:
        lines.append(f"{SIGNS[finding.status]}  {finding.check:<16}{finding.message}")
        if finding.remedy:
            lines.append(f"      {'':<16}-> {finding.remedy}")
    problems = sum(finding.status == "problem" for finding in findings)
    lines.append("no problem found" if not problems else f"{problems} problem(s), marked FAIL")
    return "\n".join(lines)


def as_dict(findings: list[Finding]) -> dict[str, object]:
    """Convert the findings to a dict with the keys healthy and findings."""
    return {"healthy": healthy(findings), "findings": [asdict(finding) for finding in findings]}


def run_self_test(as_json: bool) -> int:
    """Run the self-test, print its report and return the exit code: 1 if a backend differs from the reference."""
    if not (optional.installed("torch") or optional.installed("jax")):
        needs = f"{optional.install_command('pytorch')}, or {optional.install_command('jax')}"
        print(f"error: the self-test needs torch or jax; {needs}", file=sys.stderr)
        return 2
    from .self_tests import run_all

    test = run_all(lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(test.as_dict(), indent=2) if as_json else test.report(), flush=True)
    return 1 if test.failed else 0
