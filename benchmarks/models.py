"""Tokens/s and peak memory for training whole models: this engine, another engine, torch with torchao, and Liger.

    python benchmarks/models.py [--json FILE] [--only TEXT] [--size NAME ...] [--runs N] [--original FOLDER]
    python benchmarks/models.py --trace ARM [--size NAME ...] [--json FILE]

A step is forward, backward and torch's fused AdamW in bfloat16 with a bfloat16 head. Arms:

- te:{bf16,delayed,current,block}: the Transformer Engine on the path. The loss gradient overwrites the logits
  if the release has this option (`overwrite_input`);
- pt:{bf16,tensorwise,rowwise}: torch with each layer compiled, cuDNN's attention, torchao's float8 training;
- liger:bf16: Liger's kernels, with its loss, which computes the head in chunks;
- te:current+*: engine options that are off by default (`--opt-ins`): `model_arms.EngineModel` lists them;
- original:*: the arms of te with FOLDER first on the path, in which another release is installed (`--original`).

Every arm runs in its own process, arms alternate within each of N runs, and the table shows medians over the runs. Peak
GiB is the memory allocated within a step, parameters and optimizer states included. Host ms is the time in which the
host queues a forward and a backward pass. This engine runs backward passes on the calling thread; users of the others
could do the same with `torch.autograd.set_multithreading_enabled(False)`, which `--one-thread` does for all arms.

`--trace` prints one step's kernels as JSON: by part of the step (layers, attention, head, optimizer), by name, and
the time in which no kernel runs. Without a GPU, `--size tiny --eager` shows that everything runs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from model_arms import ARMS, OPT_INS, SIZES
from record import parser, write

STEP = Path(__file__).with_name("model_step.py")
FIGURES = ("step_ms", "tokens_per_second", "peak_gib", "host_ms", "launches")
Row = dict[str, Any]


def main() -> None:
    options = parser(__doc__, "run the arms whose name contains this")
    options.add_argument("--size", nargs="+", choices=SIZES, default=["57M", "1B", "8Bx4"])
    options.add_argument("--runs", type=int, default=3)
    options.add_argument(
        "--original", type=Path, help="folder with another release of transformer_engine"
    )
    options.add_argument("--trace", metavar="ARM", help="print the kernels of one step of this arm")
    options.add_argument("--eager", action="store_true", help="do not compile the layers of pt")
    options.add_argument("--opt-ins", action="store_true", help="also run the arms te:current+*")
    options.add_argument(
        "--one-thread", action="store_true", help="backward passes on the calling thread"
    )
    chosen = options.parse_args()
    extra = [
        *(["--eager"] if chosen.eager else []),
        *(["--one-thread"] if chosen.one_thread else []),
    ]
    if chosen.trace:
        rows = run_arm(chosen.trace, chosen.size, [*extra, "--trace"], chosen.original)
        print(json.dumps(rows, indent=1))
        write(chosen.json, traces=rows)
        return
    names = arm_names(chosen.original, chosen.opt_ins)
    arms = [arm for arm in names if chosen.only in arm]
    if not arms:
        options.error(f"--only {chosen.only!r} matches none of {', '.join(names)}")
    rows = []
    for run in range(chosen.runs):
        for arm in arms:
            measured = run_arm(arm, chosen.size, extra, chosen.original)
            rows += [row | {"run": run} for row in measured]
            print(f"run {run + 1} of {chosen.runs}: {arm}", file=sys.stderr, flush=True)
    summary = medians(rows)
    print(table(summary))
    write(chosen.json, medians=summary, runs=rows)


def arm_names(original: Path | None, opt_ins: bool = False) -> list[str]:
    """All arms; the arms of te are repeated as original:* if a folder with another release is given."""
    repeated = [arm.replace("te:", "original:") for arm in ARMS if arm.startswith("te:")]
    return [*ARMS, *(OPT_INS if opt_ins else ()), *(repeated if original is not None else [])]


def run_arm(arm: str, sizes: list[str], extra: list[str], original: Path | None) -> list[Row]:
    """Run `model_step.py` in a new process; returns its rows, named by `arm`."""
    environment = dict(os.environ)
    if arm.startswith("original:"):
        path = [str(original), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    command = [sys.executable, str(STEP), arm.replace("original:", "te:"), "--size", *sizes, *extra]
    finished = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    rows = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith('{"arm"')]
    for missing in sizes[len(rows) :]:
        rows.append(
            {"size": missing, "error": f"exit status {finished.returncode} of {' '.join(command)}"}
        )
    return [row | {"arm": arm} for row in rows]


def medians(rows: list[Row]) -> list[Row]:
    """Median figures over the runs with one arm and size, in the first run's order."""
    summary = []
    for size, arm in sorted(
        {(row["size"], row["arm"]): None for row in rows}, key=lambda key: list(SIZES).index(key[0])
    ):
        same = [row for row in rows if (row["size"], row["arm"]) == (size, arm)]
        measured = [row for row in same if "error" not in row]
        row: Row = {"size": size, "arm": arm, "runs": len(measured)}
        if len(measured) < len(same):
            row["error"] = next(row["error"] for row in same if "error" in row)
        for figure in FIGURES:
            values = [row[figure] for row in measured if row[figure] is not None]
            row[figure] = statistics.median(values) if values else None
        summary.append(row)
    return summary


def table(summary: list[Row]) -> str:
    """The medians as a Markdown table."""
    lines = [
        "| size | arm | tokens/s | ms | peak GiB | host ms | launches |",
        "| --- | --- |" + " ---: |" * 5,
    ]
    for row in summary:
        figures = [
            _text(row["tokens_per_second"], ",.0f"),
            _text(row["step_ms"], ".2f"),
            _text(row["peak_gib"], ".2f"),
            _text(row["host_ms"], ".2f"),
            _text(row["launches"], ",.0f"),
        ]
        error = f" {row['error'].splitlines()[0]}" if "error" in row else ""
        lines.append(f"| {row['size']} | {row['arm']} | {' | '.join(figures)} |{error}")
    return "\n".join(lines)


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


if __name__ == "__main__":
    main()
