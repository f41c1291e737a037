"""User CPU time for imports and for the te command, in fresh interpreters.

    python benchmarks/import_time.py [--runs 9] [--checkout NAME=FOLDER ..] [--json FILE]

Each round starts every program once in every checkout, so that a busy machine slows all of them alike. The record has
the median of the rounds. `--checkout before=FOLDER` compares with another checkout of this repository. Bytecode comes
from a temporary cache that one unmeasured round fills.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
PROGRAMS = {
    "import torch": ["-c", "import torch"],
    "import torch, transformer_engine.pytorch": ["-c", "import torch, transformer_engine.pytorch"],
    "import jax, flax": ["-c", "import jax, flax"],
    "import jax, flax, transformer_engine.jax": ["-c", "import jax, flax, transformer_engine.jax"],
    "te --help": ["-m", "transformer_engine", "--help"],
}
# Programs whose difference is this package's cost.
DIFFERENCES = {
    "transformer_engine.pytorch beyond torch": (
        "import torch, transformer_engine.pytorch",
        "import torch",
    ),
    "transformer_engine.jax beyond jax and flax": (
        "import jax, flax, transformer_engine.jax",
        "import jax, flax",
    ),
}


def user_seconds(arguments: list[str], checkout: Path, cache: str) -> float:
    """User CPU time for an interpreter with these arguments."""
    environment = {
        key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"
    }
    environment |= {
        "PYTHONPATH": str(checkout),
        "PYTHONPYCACHEPREFIX": cache,
        "OMP_NUM_THREADS": "1",
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        cwd=cache,
    )
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def measure(checkouts: dict[str, Path], runs: int) -> dict[str, dict[str, float]]:
    """{checkout: {program or difference: median seconds}}."""
    rounds: dict[str, dict[str, list[float]]] = {
        name: {program: [] for program in PROGRAMS} for name in checkouts
    }
    with tempfile.TemporaryDirectory() as cache:
        for run in range(runs + 1):
            for program, arguments in PROGRAMS.items():
                for name, folder in checkouts.items():
                    seconds = user_seconds(arguments, folder, cache)
                    if run:
                        rounds[name][program].append(seconds)
    found = {}
    for name, programs in rounds.items():
        medians = {program: statistics.median(times) for program, times in programs.items()}
        for difference, (full, part) in DIFFERENCES.items():
            pairs = zip(programs[full], programs[part], strict=True)
            medians[difference] = statistics.median([a - b for a, b in pairs])
        found[name] = {program: round(seconds, 2) for program, seconds in medians.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--checkout", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--json", type=Path, help="write the record to this file")
    options = parser.parse_args()
    checkouts = {
        name: Path(folder) for name, folder in (each.split("=", 1) for each in options.checkout)
    }
    rest = "".join(f" --checkout {name}=FOLDER" for name in checkouts)
    record = {
        "command": f"python benchmarks/import_time.py --runs {options.runs}{rest}",
        "machine": "two CPU cores",
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in ("torch", "jax", "flax")},
        "user_seconds": measure({**checkouts, "this checkout": HERE}, options.runs),
    }
    text = json.dumps(record, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
