"""Import each given module as the product's first module in a process; print the failures as a JSON object.

    python import_first.py MODULE..

The frameworks are imported once, and modules are imported in forked processes. Python imports a package before its
submodules, so a process that has just imported a package has the state in which each submodule would be
imported first. It forks again for every submodule not yet loaded.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

# Imported once, so that forked processes do not repeat it.
FRAMEWORKS = ("torch", "jax", "flax", "triton", "triton.language", "nvdlfw_inspect.api")


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name.partition(".")[0]) is not None


def visit(name: str, submodules: Mapping[str, Sequence[str]], report: Path) -> None:
    """Import a module in a forked process, then its submodules; append a line to report for each failure."""
    child = 0 if name in sys.modules else os.fork()
    if child:
        os.waitpid(child, 0)
        return
    loaded = name in sys.modules
    try:
        importlib.import_module(name)
        for submodule in submodules.get(name, ()):
            visit(submodule, submodules, report)
    except ModuleNotFoundError as error:
        if error.name is None or is_installed(error.name):
            record(report, name)
    except BaseException:
        record(report, name)
    if not loaded:
        os._exit(0)


def record(report: Path, name: str) -> None:
    with report.open("a") as file:
        file.write(json.dumps([name, traceback.format_exc(limit=-4)]) + "\n")


def failures(names: Sequence[str]) -> dict[str, str]:
    """{module: traceback} for modules that cannot be imported first."""
    submodules: dict[str, list[str]] = {}
    for name in names:
        submodules.setdefault(name.rpartition(".")[0], []).append(name)
    # Packages that contain the other modules, which are imported with them.
    roots = [name for name in names if name.rpartition(".")[0] not in names]
    # Each package is also imported after a bare `import transformer_engine`.
    submodules.setdefault("transformer_engine", []).extend(
        [root for root in roots if "." not in root and root != "transformer_engine"]
    )
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        report.touch()
        for root in roots:
            visit(root, submodules, report)
        return dict(json.loads(line) for line in report.read_text().splitlines())


if __name__ == "__main__":
    for framework in filter(is_installed, FRAMEWORKS):
        importlib.import_module(framework)
    gc.freeze()  # a collection in a forked process would visit, and so copy, the frameworks' objects
    gc.disable()
    print(json.dumps(failures(sys.argv[1:])))
