"""`te doctor`: the findings of each check for constructed environments and for this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.command import te as run_te
from tests.support.programs import search_path
from transformer_engine import __version__
from transformer_engine.common.hardware import hardware_named, nvidia
from transformer_engine_tools.doctor import environment as gathering
from transformer_engine_tools.doctor.checks import (
    CHECKS,
    Finding,
    as_dict,
    as_text,
    examine,
    healthy,
)
from transformer_engine_tools.doctor.clients import CLIENTS, installed, pins
from transformer_engine_tools.doctor.environment import Distribution, Gpu, Installation, gather


def having(**versions: str) -> dict[str, tuple[Distribution, ...]]:
    return {name.replace("_", "-"): (Distribution(version),) for name, version in versions.items()}


LIBRARIES = having(
    transformer_engine=__version__,
    torch="2.11.0",
    triton="3.6.0",
    nvmath_python="1.0.1",
    nvidia_cudnn_frontend="1.23.0",
    rich="14",
    matplotlib="3.10",
)
H200 = Installation(
    distributions=LIBRARIES,
    extension="transformer_engine_torch/__init__.py",
    driver="580.65.06",
    gpu=Gpu((13, 0), "NVIDIA H200", nvidia(9, 0), (9, 19, 0)),
)
CPU = replace(
    H200,
    distributions={
        name: several
        for name, several in LIBRARIES.items()
        if not name.startswith("nv") and name != "triton"
    },
    driver=None,
    gpu=Gpu(),
)


def with_another(environment: Installation, **versions: str) -> Installation:
    """The environment with these versions installed."""
    return replace(environment, distributions={**environment.distributions, **having(**versions)})


def said(environment: Installation, check: str) -> list[Finding]:
    return [finding for finding in examine(environment) if finding.check == check]


@pytest.mark.parametrize("environment", [H200, CPU], ids=["H200", "CPU"])
def test_a_sound_environment_has_no_problem(environment: Installation):
    findings = examine(environment)
    assert healthy(findings)
    assert {finding.check for finding in findings} <= {check.name for check in CHECKS}
    assert all(bool(finding.remedy) is (finding.status != "good") for finding in findings)


JAX = having(jax="0.11.2", flax="0.12.12")
PROBLEMS = {
    "an old Python": (
        replace(H200, python=(3, 9)),
        ("python", "Python 3.9; 3.10 to 3.14 is supported", "Python 3.14"),
    ),
    "no metadata": (
        replace(CPU, distributions={}),
        ("package", "without package metadata", 'pip install ".[pytorch]"'),
    ),
    "two versions": (
        replace(
            H200,
            distributions={
                **LIBRARIES,
                "transformer-engine": (Distribution(__version__, "a"), Distribution("2.21.0", "b")),
            },
        ),
        ("package", "2.21.0 in b", "pip uninstall -y transformer-engine"),
    ),
    "metadata of another version": (
        with_another(H200, transformer_engine="2.21.0"),
        ("package", "the metadata says 2.21.0", "pip uninstall -y transformer-engine"),
    ),
    "another copy on the path": (
        replace(H200, copies=(("elsewhere/transformer_engine", "2.19.0"),)),
        ("package", "2.19.0 is also on the import path, in elsewhere", "remove this folder"),
    ),
    "the original is installed too": (
        with_another(H200, transformer_engine_torch="2.20.2"),
        ("original", "transformer-engine-torch 2.20.2", "pip uninstall -y transformer-engine"),
    ),
    "the original's extension": (
        replace(H200, extension="site-packages/transformer_engine_torch.cpython-312.so"),
        (
            "original",
            "would load the original's site-packages/transformer_engine_torch",
            "pip uninstall",
        ),
    ),
    "an old torch": (
        with_another(CPU, torch="2.8.0"),
        ("torch", "torch 2.8.0 is installed, torch>=2.11 is needed", 'pip install ".[pytorch]"'),
    ),
    "a broken torch": (
        replace(CPU, failures={"torch": "importing torch failed: OSError: libcudart.so.13"}),
        ("torch", "libcudart.so.13", 'pip install ".[pytorch]"'),
    ),
    "torch without CUDA": (
        replace(H200, gpu=Gpu()),
        ("gpu", "built without CUDA", "install a CUDA build of torch"),
    ),
    "an old driver": (
        replace(H200, driver="470.1", gpu=Gpu((13, 0))),
        ("gpu", "torch for CUDA 13.0 finds no device under driver 470.1", "update the driver"),
    ),
    "a GPU without triton": (
        replace(
            H200, distributions={name: each for name, each in LIBRARIES.items() if name != "triton"}
        ),
        ("triton", "triton is not installed", "pip install triton"),
    ),
    "a triton that does not compile for the GPU": (
        replace(H200, gpu=Gpu((13, 0), "NVIDIA Thor", nvidia(11, 0), (9, 24, 0))),
        (
            "triton",
            "Triton 3.6 does not compile for compute capability 11.0",
            "pip install --upgrade 'triton>=3.7'",
        ),
    ),
    "another frontend of cuDNN": (
        with_another(H200, nvidia_cudnn_frontend="1.26.0"),
        (
            "libraries",
            "nvidia-cudnn-frontend 1.26.0 needs cuDNN 9.20, found 9.19.0",
            'pip install ".[cuda]"',
        ),
    ),
    "bindings that do not load": (
        replace(H200, failures={"nvmath": "importing nvmath failed: OSError: libcublasLt"}),
        ("libraries", "libcublasLt", 'pip install ".[cuda]"'),
    ),
    "a broken flash-attn": (
        replace(
            H200,
            failures={"flash_attn": "importing flash_attn failed: ImportError: undefined symbol"},
        ),
        ("flash-attention", "undefined symbol", "pip uninstall flash-attn"),
    ),
    "a broken FlashAttention 4": (
        replace(
            H200,
            failures={"flash_attn.cute.interface": "importing flash_attn.cute.interface failed"},
        ),
        ("flash-attention", "flash_attn.cute.interface failed", "pip uninstall flash-attn-4"),
    ),
    "a driver that does not answer": (
        replace(
            H200,
            gpu=Gpu(),
            failures={"torch.cuda": "torch.cuda raises RuntimeError: unknown error"},
        ),
        ("gpu", "torch.cuda raises RuntimeError: unknown error", "nvidia-smi"),
    ),
    "a platform that JAX lacks": (
        replace(
            CPU,
            distributions={**CPU.distributions, **JAX},
            failures={"jax.devices": "jax.devices raises RuntimeError: Unknown backend cuda"},
        ),
        ("jax", "Unknown backend cuda", "JAX_PLATFORMS"),
    ),
    "a JAX out of range": (
        replace(CPU, distributions={**CPU.distributions, **JAX, **having(jax="0.13.0")}),
        ("jax", "jax 0.13.0 is installed, jax>=0.10.2,<0.13 is needed", 'pip install ".[jax]"'),
    ),
    "our side does not import": (
        replace(
            CPU,
            distributions={**CPU.distributions, **JAX},
            failures={
                "transformer_engine.jax": "importing transformer_engine.jax failed: TypeError"
            },
        ),
        ("jax", "importing transformer_engine.jax failed", 'pip install ".[jax]"'),
    ),
    "a client that asks for metadata": (
        replace(CPU, distributions=having(accelerate="1.15.0")),
        (
            "clients",
            "accelerate 1.15.0 will not detect this package",
            "pip uninstall -y transformer-engine",
        ),
    ),
    "a variable": (
        replace(CPU, variables="NVTE_DEBUG='x' is not a flag"),
        ("variables", "NVTE_DEBUG='x'", "docs/environment.md"),
    ),
    "a cache that cannot be written": (
        replace(CPU, cache="/cache: Permission denied"),
        ("cache", "Permission denied", "TE_CACHE_DIR"),
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_is_named_with_its_remedy(name: str):
    environment, (check, words, remedy) = PROBLEMS[name]
    problems = [finding for finding in said(environment, check) if finding.status == "problem"]
    assert any(words in result.message and remedy in result.remedy for result in problems), problems
    assert not healthy(examine(environment))


TOOLS = having(
    transformer_engine=__version__,
    rich="14",
    matplotlib="3.10",
    optax="0.2.8",
    orbax_checkpoint="0.12",
)
NOTES = {
    "no JAX": (CPU, "jax", "jax, flax not installed"),
    "no JAX on an old Python": (
        replace(CPU, python=(3, 10)),
        "jax",
        "transformer_engine.jax needs Python 3.11 or newer",
    ),
    "no torch": (
        replace(CPU, distributions=having(transformer_engine=__version__)),
        "torch",
        "torch not inst",
    ),
    "no commands": (
        replace(CPU, distributions=having(transformer_engine=__version__)),
        "command",
        "matplotlib not installed",
    ),
    "commands with JAX alone": (
        replace(CPU, distributions={**TOOLS, **JAX}),
        "command",
        "only te train --framework jax and te doctor are available",
    ),
    "no optimizer for JAX": (
        with_another(CPU, jax="0.11.2", flax="0.12.12", optax="0.2.8"),
        "command",
        "orbax-checkpoint not installed, which te train --framework jax needs",
    ),
    "JAX on the CPU": (
        replace(H200, distributions={**LIBRARIES, **JAX}, jax_devices=("cpu",)),
        "jax",
        "JAX runs on the CPU although an NVIDIA driver is installed",
    ),
    "an A100": (
        replace(H200, gpu=Gpu((13, 0), "A100", nvidia(8, 0), (9, 19, 0))),
        "gpu",
        "no FP8 matrix products",
    ),
    "an old cuDNN": (
        replace(H200, gpu=replace(H200.gpu, cudnn=(9, 10, 2))),
        "libraries",
        "cuDNN 9.10.2; cuDNN attention needs 9.13.1",
    ),
    "a client for another version": (
        replace(
            CPU,
            distributions={
                **CPU.distributions,
                "llm-foundry": (
                    Distribution("0.22.0", requires=("transformer-engine[pytorch]<2.0,>=1.13",)),
                ),
            },
        ),
        "clients",
        "llm-foundry 0.22.0 requires transformer-engine<2.0,>=1.13",
    ),
}


@pytest.mark.parametrize("name", NOTES)
def test_an_optional_improvement_is_a_note(name: str):
    environment, check, words = NOTES[name]
    notes = [finding for finding in said(environment, check) if finding.status == "note"]
    assert any(words in note.message and note.remedy for note in notes), notes
    assert healthy(examine(environment))


@pytest.mark.parametrize("bindings", [True, False], ids=["installed", "missing"])
def test_libraries_of_nvidia_are_no_matter_on_gpus_of_amd(bindings: bool):
    row = hardware_named("amd", "gfx942")
    results = {
        name: each for name, each in LIBRARIES.items() if bindings or not name.startswith("nv")
    }
    failures = {"nvmath": "importing nvmath failed: OSError: libcublasLt"} if bindings else {}
    amd = replace(
        H200, distributions=results, failures=failures, gpu=Gpu((7, 0), "MI300X", row, (0, 0, 0))
    )
    assert said(amd, "libraries") == []


def test_the_command_with_jax_alone_does_not_suggest_torch():
    alone = replace(
        CPU, distributions=having(transformer_engine=__version__, jax="0.11.2", flax="0.12.12")
    )
    note = said(alone, "command")[0]
    assert note.status == "note" and note.remedy.startswith('pip install ".[cli-jax]"')
    everything = with_another(
        CPU, jax="0.11.2", flax="0.12.12", optax="0.2.8", orbax_checkpoint="0.12"
    )
    assert [finding.message for finding in said(everything, "command")] == [
        "all commands are available"
    ]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_finds_the_package(client):
    environment = replace(
        CPU, distributions={**CPU.distributions, client.name: (Distribution("1"),)}
    )
    (finding,) = said(environment, "clients")
    assert (
        finding.status == "good"
        and finding.message == f"{client.name} 1 detects this package by {client.by}"
    )


def test_a_requirement_on_the_package_makes_a_client():
    needs = Distribution(
        "0.7", requires=("numpy", "this is; no requirement", "Transformer_Engine>=2.19")
    )
    assert pins(needs) == ">=2.19"
    assert pins(Distribution("1", requires=("torch",))) is None
    assert pins(Distribution("1", requires=("transformer-engine",))) == ""
    environment = replace(CPU, distributions={**CPU.distributions, "theirs": (needs,)})
    assert [name for name, *_ in installed(environment)] == ["theirs"]
    assert (
        said(environment, "clients")[0].message
        == "theirs 0.7 detects this package by its requirement"
    )


def test_the_version_satisfies_the_requirements_of_clients():
    for requested in (">=2.19.0", "<3,>=2", ">=2.14.0", "==2.20.2", ""):
        needs = (Distribution("1", requires=(f"transformer-engine[pytorch]{requested}",)),)
        environment = replace(CPU, distributions={**CPU.distributions, "theirs": needs})
        assert said(environment, "clients")[0].status == "good", requested


def test_text_and_json_have_the_same_findings():
    findings = examine(PROBLEMS["a broken torch"][0])
    text, data = as_text(findings), as_dict(findings)
    assert data["healthy"] is False
    assert text.count("FAIL") == 2 and text.endswith("1 problem(s), marked FAIL")
    assert all(finding.message in text and finding.remedy in text for finding in findings)
    assert as_text(examine(CPU)).endswith("no problem found")


def test_the_command_prints_json_and_exits_with_1_on_problems(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("transformer_engine_tools.doctor.checks.gather", lambda: CPU)
    sound = run_te("doctor", "--json")
    assert sound.exit_code == 0 and json.loads(sound.output)["healthy"] is True
    monkeypatch.setattr(
        "transformer_engine_tools.doctor.checks.gather", lambda: PROBLEMS["a variable"][0]
    )
    broken = run_te("doctor")
    assert broken.exit_code == 1 and "NVTE_DEBUG='x'" in broken.output


def test_doctor_runs_without_torch_and_without_the_command_line(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u, sys\nhidden = ('torch', 'rich')\nfind = u.find_spec\n"
        "sys.modules.update(dict.fromkeys(hidden))\n"
        "u.find_spec = lambda name, *a: None if name in hidden else find(name, *a)\n"
    )
    path = {"PYTHONPATH": search_path(tmp_path), "NVTE_DEBUG": "maybe"}
    done = subprocess.run(
        [sys.executable, "-m", "transformer_engine", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **path},
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stderr
    variables = [f for f in json.loads(done.stdout)["findings"] if f["check"] == "variables"]
    assert variables[0]["status"] == "problem" and "NVTE_DEBUG='maybe'" in variables[0]["message"]


def test_packages_that_raise_on_import_are_named(tmp_path: Path):
    """flash-attn raises TypeError, FlashAttention 4 fails in a submodule, JAX_PLATFORMS names an unknown platform."""
    installed_packages = {
        "flash_attn": ("flash-attn", "2.8.0", "__init__.py", "raise TypeError('no such operand')"),
        "flash_attn/cute": (
            "flash-attn-4",
            "4.0.0b36",
            "interface.py",
            "import a_part_that_is_missing",
        ),
    }
    findings = []
    for number, (folder, (name, version, file, text)) in enumerate(installed_packages.items()):
        site = tmp_path / str(number)
        (site / folder).mkdir(parents=True)
        (site / folder / file).write_text(text)
        metadata = site / f"{name.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        if number > 0:
            (site / "jax.py").write_text(
                "raise ImportError('importing JAX twice would take two seconds')"
            )
        environment = {**os.environ, "PYTHONPATH": search_path(site), "JAX_PLATFORMS": "nosuch"}
        done = forked.Program(
            ["-m", "transformer_engine", "doctor", "--json"], tmp_path, environment
        )
        assert done.finish() == 1, done.errors
        findings += json.loads(done.printed)["findings"]
    problems = [finding["message"] for finding in findings if finding["status"] == "problem"]
    assert any("flash_attn failed: TypeError: no such operand" in words for words in problems)
    assert any("No module named 'a_part_that_is_missing'" in words for words in problems)
    if importlib.util.find_spec("jax") is not None and importlib.util.find_spec("flax") is not None:
        assert any(words.startswith("jax.devices raises") for words in problems)


def test_an_unknown_option_is_rejected():
    result = run_te("doctor", "--verbose")
    assert result.exit_code == 2
    assert "unrecognized arguments: --verbose" in result.output


def test_gathered_facts_describe_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import torch

    other = tmp_path / "transformer_engine"
    other.mkdir()
    (other / "__init__.py").touch()
    (other / "_version.py").write_text('__version__ = "2.0.0"\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TE_CACHE_DIR", str(other / "_version.py"))
    result = gather()
    assert result.python == sys.version_info[:2] and result.version == __version__
    assert (str(other), "2.0.0") in result.copies
    assert result.cache is not None and str(other / "_version.py") in result.cache
    assert result.version_of("torch") is not None and not set(result.failures) & {"torch", "jax"}
    assert (result.gpu.name is None) is not torch.cuda.is_available()
    assert result.extension is not None and result.extension.endswith("__init__.py")


def test_metadata_of_two_versions_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for version in ("2.20.2", "2.21.0"):
        folder = tmp_path / f"Transformer_Engine-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: Transformer_Engine\nVersion: {version}\n"
        )
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    several = gathering._distributions()["transformer-engine"]
    assert {each.version for each in several} == {"2.20.2", "2.21.0"}
