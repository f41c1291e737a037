"""mypy and pyright on programs, in an environment where this package is installed as a user installs it.

Checkers treat the files of a checkout unlike the files of an installed package: only in the second do `py.typed`,
`__all__` and re-exports matter. The environment is a virtual one without pip. Its site-packages links to this checkout,
and a `.pth` file adds the other libraries of the running Python.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.source import PACKAGES, ROOT

# Libraries whose types no program here needs, or that may be absent. mypy reads every file that torch imports, and two
# thirds of them are these.
UNREAD = (
    "accelerate",
    "lightning",
    "optax",
    "peft",
    "sympy",
    "torch._decomp",
    "torch._dynamo",
    "torch._export",
    "torch._functorch",
    "torch._higher_order_ops",
    "torch._inductor",
    "torch._library",
    "torch._numpy",
    "torch._prims",
    "torch._prims_common",
    "torch._refs",
    "torch._subclasses",
    "torch.ao",
    "torch.export",
    "torch.fx",
    "torch.jit",
    "torch.onnx",
    "torch.sparse",
    "torch.testing",
    "torch.utils._sympy",
    "transformers",
    "triton",
    "nvdlfw_inspect",
    "megatron",
    "onnxscript",
)


@dataclass(frozen=True, order=True)
class Report:
    """One error of a checker: the program, the line from 1 on, the rule and the message."""

    program: str
    line: int
    rule: str
    message: str


def create_environment(folder: Path) -> Path:
    """Create the environment below a folder and return its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for package in PACKAGES:
        (packages / package).symlink_to(ROOT / package, target_is_directory=True)
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder / "bin" / "python"


def write(programs: Mapping[str, str], folder: Path) -> None:
    """Write each program to `<name>.py`."""
    folder.mkdir()
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")


def mypy(folder: Path, python: Path) -> list[Report]:
    """Errors of `mypy --strict --untyped-calls-exclude=torch`: torch's `Tensor.backward` has no annotations."""
    unread = ",".join(f"{module}.*,{module}" for module in UNREAD)
    settings = folder / "mypy.ini"
    settings.write_text(
        "[mypy]\nstrict = True\nuntyped_calls_exclude = torch\n"
        f"[mypy-{unread}]\nfollow_imports = skip\nignore_missing_imports = True\n",
        encoding="utf-8",
    )
    options = [
        "--config-file",
        str(settings),
        "--python-executable",
        str(python),
        "--cache-dir",
        "/dev/null",
    ]
    done = _run(["mypy", "--output", "json", *options, *_names(folder)], folder)
    results = [json.loads(line) for line in done.splitlines() if line.startswith("{")]
    assert results or not done.strip() or done.startswith("Success"), done
    return sorted(
        Report(Path(report["file"]).stem, report["line"], report["code"] or "", report["message"])
        for report in results
        if report["severity"] == "error"
    )


def pyright(folder: Path, python: Path, mode: str) -> list[Report]:
    """Errors of pyright in the programs of a folder; `mode` is "basic" or "strict"."""
    settings = folder / f"pyright_{mode}.json"
    settings.write_text(json.dumps({"include": ["."], "typeCheckingMode": mode}), encoding="utf-8")
    done = _run(
        ["pyright", "--outputjson", "-p", str(settings), "--pythonpath", str(python)], folder
    )
    return sorted(
        Report(
            Path(report["file"]).stem,
            report["range"]["start"]["line"] + 1,
            report.get("rule", ""),
            report["message"],
        )
        for report in json.loads(done)["generalDiagnostics"]
        if report["severity"] == "error"
    )


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.py"))


def _run(arguments: list[str], folder: Path) -> str:
    """Standard output of a module of the running Python; the exit status 1 means that there are errors."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
