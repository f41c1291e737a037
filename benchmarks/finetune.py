"""Compare this engine and torchao: tokens/s and peak memory for training 8 billion parameters on one GPU.

    python benchmarks/finetune.py [--json FILE] [--arms NAME ...] [--batch N ...] [--steps N] [--tiny] [--eager]
    python benchmarks/finetune.py --arms --earlier FILE ... --json FILE

A step is forward pass, backward pass and optimizer on sequences of 8192 tokens, with a bfloat16 head of 128,256 rows
and FP8 products with one scale per tensor in the layers. Arms:

- te:*: `examples/finetune_8b.py`. "stochastic": block-scaled FP8 moments, bfloat16 parameters rounded stochastically;
  "remainders": the same moments, float32 masters in two halves; "float32": float32 moments and masters; "quantized":
  FP8 parameters, block-scaled moments, float32 masters; "delayed", "block": recipes, with "stochastic";
- ao:*: torchao's float8 training, each layer and the head with its loss compiled, cuDNN's attention, and an optimizer
  of torchao with block-scaled moments whose updates of bfloat16 parameters are rounded stochastically.

Every arm runs in its own process. `--earlier` keeps the rows of earlier runs, except of arms that run again. Without a
GPU, `--tiny --eager` shows that everything runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from record import machine, write

PROGRAM = Path(__file__).resolve().parents[1] / "examples" / "finetune_8b.py"
EXAMPLE_OPTIONS = {
    "te:stochastic": [],
    "te:remainders": ["--optimizer", "remainders"],
    "te:float32": ["--optimizer", "float32"],
    "te:quantized": ["--quantized"],
    "te:delayed": ["--recipe", "delayed"],
    "te:block": ["--recipe", "block"],
}
TORCHAO_OPTIMIZERS = {"ao:AdamWFp8": "AdamWFp8", "ao:AdamW8bit": "AdamW8bit"}
ARMS = (*EXAMPLE_OPTIONS, *TORCHAO_OPTIMIZERS)
DEFAULT_ARMS = ("te:stochastic", "te:remainders", "ao:AdamWFp8")
TINY = {"layers": 2, "hidden": 64, "feed-forward": 128, "head-size": 32, "groups": 1}
TINY |= {"vocabulary": 512, "length": 64}
WARM_UP = 4
Row = dict[str, Any]


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--json", type=Path, help="write the figures to this file")
    options.add_argument(
        "--arms", nargs="*", default=DEFAULT_ARMS, metavar="NAME", help=", ".join(ARMS)
    )
    options.add_argument(
        "--earlier", nargs="+", type=Path, default=[], help="files of --json whose rows are kept"
    )
    options.add_argument("--batch", nargs="+", type=int, default=[1], help="sequences per step")
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--tiny", action="store_true", help="a model of 2 layers of width 64")
    options.add_argument("--eager", action="store_true", help="do not compile torchao's arms")
    options.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.arm is not None:
        print(json.dumps(measure(chosen.arm, chosen)))
        return
    if unknown := sorted(set(chosen.arms) - set(ARMS)):
        options.error(f"--arms: {', '.join(unknown)} are not among {', '.join(ARMS)}")
    about = machine()
    rows = [
        run_arm(arm, batch, chosen) | {"machine": about}
        for batch in chosen.batch
        for arm in chosen.arms
    ]
    rows = merge_rows((json.loads(path.read_text()) for path in chosen.earlier), rows)
    print(table(rows))
    write(chosen.json, about=rows[0]["machine"] if rows else None, rows=rows)
    if any("error" in row for row in rows):
        raise SystemExit(1)


def merge_rows(earlier: Iterable[dict[str, Any]], rows: list[Row]) -> list[Row]:
    """Rows of earlier files and of this run, by arm; the latest row of an arm and batch counts."""
    found: dict[tuple[str, int], Row] = {}
    for content in earlier:
        for row in content["rows"]:
            found[row["arm"], row["batch"]] = {"machine": content["machine"]} | row
    found |= {(row["arm"], row["batch"]): row for row in rows}
    order = list(ARMS)
    return [found[key] for key in sorted(found, key=lambda key: (order.index(key[0]), key[1]))]


def run_arm(arm: str, batch: int, chosen: argparse.Namespace) -> Row:
    """Run an arm in a new process; returns its figures."""
    switches = [f"--{name}" for name in ("tiny", "eager") if getattr(chosen, name)]
    numbers = ["--batch", str(batch), "--steps", str(chosen.steps)]
    command = [sys.executable, __file__, "--arm", arm, *numbers, *switches]
    start = time.perf_counter()
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    row: Row = {"arm": arm, "batch": batch}
    lines = [line for line in finished.stdout.splitlines() if line.startswith("{")]
    if finished.returncode or not lines:
        row["error"] = f"exit status {finished.returncode}"
    else:
        row |= json.loads(lines[-1])
    row["wall_s"] = round(time.perf_counter() - start, 1)
    print(json.dumps({k: v for k, v in row.items() if k != "losses"}), file=sys.stderr, flush=True)
    return row


def measure(arm: str, chosen: argparse.Namespace) -> Row:
    """Figures of an arm in this process."""
    (batch,) = chosen.batch
    if arm in EXAMPLE_OPTIONS:
        numbers = {"batch": batch, "steps": chosen.steps, "warm-up": WARM_UP}
        numbers |= TINY if chosen.tiny else {}
        arguments = [part for name, value in numbers.items() for part in (f"--{name}", str(value))]
        return example().main([*arguments, *EXAMPLE_OPTIONS[arm]])
    return measure_torchao(TORCHAO_OPTIMIZERS[arm], batch, chosen)


def example() -> Any:
    """`examples/finetune_8b.py` as a module."""
    spec = importlib.util.spec_from_file_location("finetune_8b", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure_torchao(optimizer_name: str, batch: int, chosen: argparse.Namespace) -> Row:
    """Figures of plain torch layers under torchao's float8 training and optimizer."""
    import torchao
    import torchao.optim
    from model_arms import Size, TorchModel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not chosen.eager:
        torch._dynamo.config.automatic_dynamic_shapes = False
        torch._dynamo.config.cache_size_limit = 64
    size = Size(32, 4096, 14336, 32, 8, 128256, batch=batch, length=8192)
    if chosen.tiny:
        size = Size(2, 64, 128, 2, 1, 512, batch=batch, length=64)
    torch.manual_seed(0)
    model = TorchModel(size, "tensorwise" if device == "cuda" else "bf16", device, not chosen.eager)
    optimizer = getattr(torchao.optim, optimizer_name)(
        model.parameters(), lr=1e-5, betas=(0.9, 0.95), bf16_stochastic_round=True
    )
    tokens, targets = torch.randint(
        size.vocabulary, (2, size.batch, size.length), device=device
    ).unbind()
    clock = example().StepClock(device == "cuda")
    losses = []
    for step in range(chosen.steps):
        if device == "cuda" and step == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        clock.mark()
    times = clock.seconds()
    seconds = statistics.median(times[WARM_UP:] or times)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_per_step": tokens.numel(),
        "tokens_per_second": tokens.numel() / seconds,
        "step_ms": 1e3 * seconds,
        "first_ms": 1e3 * times[0],
        "peak_gib": peak,
        "torchao": torchao.__version__,
        "losses": [loss.item() for loss in losses],
    }


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| arm | tokens per step | tokens/s | ms | peak GiB | planned GiB |"]
    lines.append("| --- |" + " ---: |" * 5)
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['arm']} | {row['error']} | - | - | - | - |")
            continue
        memory = [row["peak_gib"], row.get("planned_gib")]
        shown = ["-" if value is None else f"{value:.2f}" for value in memory]
        lines.append(
            f"| {row['arm']} | {row['tokens_per_step']:,} | {row['tokens_per_second']:,.0f} | {row['step_ms']:.1f} "
            f"| {shown[0]} | {shown[1]} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
