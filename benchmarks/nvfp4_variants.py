"""The demonstration model's final loss under NVFP4 variants against plain NVFP4, with seeds for the noise.

    python benchmarks/nvfp4_variants.py [--device auto|cpu|cuda] [--seeds 3] [--steps 120] [--out FOLDER]

Every variant starts from the same weights and sees the same batches as plain NVFP4 with its seed, and runs in a
separate process, whose environment variables choose it. A variant passes if its mean final validation loss differs from
that of plain NVFP4 by at most the larger of 2 % and three standard deviations over the seeds. Writes
nvfp4_variants.json; exits 1 if a variant fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIMIT = 0.02
# All variants omit the Hadamard transform, which activation variants exclude.
COMMON = {"NVTE_NVFP4_DISABLE_RHT": "1"}
ROWS = {"NVTE_NVFP4_ROW_SCALED_ACTIVATION": "1"}
PLAIN = "plain"
VARIANTS: dict[str, dict[str, str]] = {
    PLAIN: {},
    "rows": ROWS,
    "4over6": {"NVTE_NVFP4_4OVER6": "all"},
    "4over6 of weights, MSE, 448": {
        "NVTE_NVFP4_4OVER6": "weights",
        "NVTE_NVFP4_4OVER6_ERR_MODE": "MSE",
        "NVTE_NVFP4_4OVER6_E4M3_USE_256": "none",
    },
    "rows and 4over6": {**ROWS, "NVTE_NVFP4_4OVER6": "all"},
}


def demo_options(steps: int) -> dict[str, Any]:
    """Model and training as demonstration options."""
    size = {"batch": 8, "sequence": 64, "layers": 2, "hidden": 128, "heads": 4}
    return {"recipe": "nvfp4", "framework": "torch", "steps": steps, **size}


def train_here(device: str, steps: int, seeds: int) -> list[dict[str, Any]]:
    """Train every seed in this process, whose environment decides the variant."""
    import torch
    from convergence import train

    from transformer_engine_tools.demo.config import resolve
    from transformer_engine_tools.demo.data import load_corpus

    torch.set_num_threads(1)
    curves = []
    for seed in range(seeds):
        config = resolve(device, {**demo_options(steps), "seed": seed})
        curves.append(asdict(train("nvfp4", config, load_corpus(None, config.sequence))))
    return curves


def train_variant(variant: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Train every seed of a variant in a separate process."""
    command = [sys.executable, __file__, "--child", "--device", arguments.device]
    command += ["--steps", str(arguments.steps), "--seeds", str(arguments.seeds)]
    environment = os.environ | COMMON | VARIANTS[variant] | {"TE_EMULATE": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare_variants(curves: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row per variant: mean final loss, its distance from plain NVFP4, and the limit of that distance."""
    finals = {name: [curve["final"] for curve in of_name] for name, of_name in curves.items()}
    base = statistics.mean(finals[PLAIN])
    noise = statistics.stdev(finals[PLAIN]) if len(finals[PLAIN]) > 1 else 0.0
    limit = max(LIMIT * base, 3 * noise)
    rows = []
    for name, values in finals.items():
        difference = statistics.mean(values) - base
        rows.append(
            {
                "variant": name,
                "environment": COMMON | VARIANTS[name],
                "finals": values,
                "mean": statistics.mean(values),
                "difference": difference,
                "limit": limit,
                "passes": abs(difference) <= limit,
                "seconds": statistics.mean(curve["seconds"] for curve in curves[name]),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--machine", default=platform.processor() or platform.machine())
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(train_here(arguments.device, arguments.steps, arguments.seeds)))
        return 0
    curves = {}
    for variant in VARIANTS:
        curves[variant] = train_variant(variant, arguments)
        print(variant, [round(curve["final"], 4) for curve in curves[variant]], flush=True)
    rows = compare_variants(curves)
    result = {
        "command": f"python benchmarks/nvfp4_variants.py --device {arguments.device} --seeds {arguments.seeds} "
        f"--steps {arguments.steps}",
        "machine": arguments.machine,
        "versions": {"torch": version("torch"), "python": platform.python_version()},
        "settings": demo_options(arguments.steps),
        "rows": rows,
        "losses": {
            name: [curve["losses"] for curve in of_name] for name, of_name in curves.items()
        },
    }
    (arguments.out / "nvfp4_variants.json").write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(
            f"{row['variant']:30} {row['mean']:.4f} {row['difference']:+.4f} of {row['limit']:.4f} {row['passes']}"
        )
    return 0 if all(row["passes"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
