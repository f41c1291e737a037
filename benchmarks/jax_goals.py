"""JAX goals on an H200, from the rows in `te bench --provider te,jax,xla`: table and pictures.

    python benchmarks/jax_goals.py benchmarks/results/jax_h200.json [--write] [--plot PICTURE] [--families FOLDER]

Prints every goal with its measured value. --write adds the goals to the file, under "goals"; --plot draws all of them
in one picture, --families every provider's times, one picture per case family. No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from transformer_engine_tools.bench.cases import cases
from transformer_engine_tools.bench.plot import plot_families
from transformer_engine_tools.bench.run import Row

# {case: minimum throughput relative to plain Flax and jnp in bfloat16}
OVER_XLA = {
    "dense_fb/delayed/8192": 1.65, "dense_fb/current/8192": 1.6, "dense_fb/delayed/4096": 1.3,
    "dense_fb/delayed/2048": 1.0, "layernorm_mlp_fb/delayed/swiglu": 1.6, "layer_fb/bf16/llama8b": 1.0,
    "grouped_linear_fb/bf16/e8": 5.0, "grouped_linear_fb/bf16/e64": 5.0, "dpa_fb/bf16/causal_b2_s8192": 1 / 1.02,
}  # fmt: skip
# {case: maximum GPU time relative to this engine in PyTorch}
OVER_TORCH = {
    **{f"linear_fb/{recipe}/8192x4096x28672": 1.05 for recipe in ("delayed", "current", "block")},
    "layernorm_mlp_fb/delayed/swiglu": 1.05,
    **{f"layer_fb/{recipe}/llama8b": 1.08 for recipe in ("bf16", "delayed", "current", "block")},
    **{
        f"grouped_linear_fb/{recipe}/{size}": 1.1
        for size in ("e8", "e64")
        for recipe in ("bf16", "delayed")
    },
    "dpa_fb/bf16/thd": 1.02,
}
KERNELS = 1.1  # a kernel started from JAX over the same record started from torch
# {case: (figure of a row, unit, at most)}
FIGURES = {
    "layer_small_fb/bf16": ("eager_ms", "wall ms", 0.40),
    "layer_small_fb/delayed": ("eager_ms", "wall ms", 0.60),
    "quantize/delayed_row": ("gpu_ms", "ms", 0.090),
    "quantize/delayed_both": ("gpu_ms", "ms", 0.130),
    "norm_fb/LayerNorm/16384x8192": ("gpu_ms", "ms", 0.37),
    "norm_fb/RMSNorm/16384x8192": ("gpu_ms", "ms", 0.37),
    "layer_fb/delayed/llama8b": ("compile_s", "s to compile, cold", 40.0),
    "layer_fb/delayed/": ("cached_s", "s to compile, from JAX's cache", 5.0),
}
FP8_PEAK = 1.25  # layer memory under delayed scaling relative to bfloat16
WITHOUT_THE_FLAG = 30.0  # longest compile time for one of this package's programs, in seconds
OF_CUDNN = 0.6  # least rate of our attention where cuDNN does not support a case, over cuDNN's on the same rows
ATTENTION = [
    f"dpa_fb/bf16/{kind}_b2_s8192_h32_8_d128"
    for kind in ("causal", "bottom_right", "sinks", "packed", "packed_sinks")
]
# {program on two CPU cores: maximum}; the rows in "on_a_cpu".
ON_A_CPU = {"quickstart, ten eager steps, s": 30.0, "te train, step in FP8 over float32": 2.0}
# {(case, layout): work a second over one GPU's, at least}
TWO_GPUS = {
    ("layer_fb/delayed/llama8b_s8192", "tp 2"): 1.7, ("layer_fb/delayed/llama8b_s8192", "dp 2"): 1.9,
    ("dpa_fb/bf16/causal_b1_s65536_h32_8_d128", "cp 2 ring"): 1.7,
    ("dpa_fb/bf16/causal_b1_s65536_h32_8_d128", "cp 2 all_gather"): 1.7,
}  # fmt: skip

SHOWN = 2.0  # where a picture cuts its bars


@dataclass(frozen=True)
class Goal:
    """A limit that the value `found` must reach or not exceed; None is not measured."""

    what: str
    sense: str
    limit: float
    found: float | None
    note: str = ""

    @property
    def reached(self) -> bool | None:
        if self.found is None:
            return None
        return self.found >= self.limit if self.sense == ">=" else self.found <= self.limit

    @property
    def share(self) -> float:
        """Reached share: 1 at the limit, more beyond it."""
        assert self.found is not None
        return self.found / self.limit if self.sense == ">=" else self.limit / self.found

    def as_dict(self) -> dict[str, Any]:
        goal = f"{self.sense} {self.limit:.3g}"
        return {
            "what": self.what,
            "goal": goal,
            "found": self.found,
            "reached": self.reached,
            "note": self.note,
        }


def _figure(
    rows: list[dict[str, Any]], case: str, provider: str, key: str = "gpu_ms"
) -> float | None:
    """A value in the provider's first row whose case starts with this text."""
    found = (row for row in rows if row["provider"] == provider and row["case"].startswith(case))
    return next(found, {}).get(key)


def _ratio(first: float | None, second: float | None) -> float | None:
    return first / second if first and second else None


def goals(content: dict[str, Any]) -> Iterator[Goal]:
    """Every goal with the value in a file's rows, or None if the row or its value is missing."""
    yield from _ratio_goals(content["results"])
    yield from _figure_goals(content["results"])
    yield _longest_compile_time(content.get("without_the_flag", {}).get("results", []))
    attention = content.get("attention", {}).get("rows", [])
    for case in ATTENTION:
        row = _row(attention, case=case, by="triton")
        what = f"{case}: rate of our kernel over cuDNN's"
        yield Goal(what, ">=", OF_CUDNN, row.get("rate"), f"{row.get('gpu_ms')} ms")
    for what, limit in ON_A_CPU.items():
        yield Goal(f"CPU: {what}", "<=", limit, content.get("on_a_cpu", {}).get(what))
    for (case, layout), limit in TWO_GPUS.items():
        row = _row(content.get("two_gpus", {}).get("rows", []), case=case, layout=layout)
        what = f"{case}, {layout}: work a second over one GPU's"
        yield Goal(what, ">=", limit, row.get("speedup"), f"{row.get('eager_ms')} ms")


def _row(rows: list[dict[str, Any]], **names: str) -> dict[str, Any]:
    """The first row with these names; an empty row if the file has no such row."""
    return next((row for row in rows if all(row[key] == name for key, name in names.items())), {})


def _ratio_goals(rows: list[dict[str, Any]]) -> Iterator[Goal]:
    """Yield ratios to plain Flax and jnp, and to this engine in PyTorch."""
    for case, limit in OVER_XLA.items():
        family, _, size = case.split("/")
        ours, plain = _figure(rows, case, "jax"), _figure(rows, f"{family}/bf16/{size}", "xla")
        note = f"{ours} ms, plain {plain} ms"
        yield Goal(f"{case}: faster than XLA in bfloat16", ">=", limit, _ratio(plain, ours), note)
    kernels = [case.name for case in cases(["bf16"], False, ["kernel"])]
    for case, limit in (OVER_TORCH | dict.fromkeys(kernels, KERNELS)).items():
        ours, torch = _figure(rows, case, "jax"), _figure(rows, case, "te")
        yield Goal(
            f"{case}: time over torch's",
            "<=",
            limit,
            _ratio(ours, torch),
            f"{ours} ms, torch {torch} ms",
        )


def _figure_goals(rows: list[dict[str, Any]]) -> Iterator[Goal]:
    """Yield goals with a constant limit, or between two of this engine's figures."""
    for case, (key, unit, limit) in FIGURES.items():
        yield Goal(f"{case}: {unit}", "<=", limit, _figure(rows, case, "jax", key))
    narrow, wide = (
        _figure(rows, f"layer_fb/{recipe}", "jax", "peak_mib") for recipe in ("delayed", "bf16")
    )
    note = f"{narrow} and {wide} MiB"
    yield Goal(
        "layer_fb/delayed: peak memory over that in bfloat16",
        "<=",
        FP8_PEAK,
        _ratio(narrow, wide),
        note,
    )


def _longest_compile_time(rows: list[dict[str, Any]]) -> Goal:
    """The longest compile time; not measured if a time is missing and no time exceeds the limit."""
    compiled = {row["case"]: row.get("compile_s") for row in rows if row["provider"] == "jax"}
    recognized = {case: seconds for case, seconds in compiled.items() if seconds is not None}
    slowest = max(recognized, key=lambda case: recognized[case], default="")
    found, note = recognized.get(slowest), slowest
    absent = [case for case in compiled if case not in recognized]
    if absent and (found is None or found <= WITHOUT_THE_FLAG):
        found, note = None, f"no time of {', '.join(absent)}"
    return Goal(
        "without the flag: s to compile the slowest case", "<=", WITHOUT_THE_FLAG, found, note
    )


def plot(path: Path, found: list[Goal], title: str) -> None:
    """Draw one bar per goal: the share that is reached, labelled with the value and the limit."""
    listing = [goal for goal in found if goal.found is not None]
    figure = Figure(figsize=(8, 1 + 0.24 * len(listing)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    colours = ["#15803d" if goal.reached else "#c2410c" for goal in listing]
    bars = axis.barh(
        range(len(listing)), [min(goal.share, SHOWN) for goal in listing], color=colours
    )
    texts = [f"{goal.found:.3g} ({goal.sense} {goal.limit:.3g})" for goal in listing]
    axis.bar_label(bars, labels=texts, padding=3, fontsize=8.5)
    axis.axvline(1.0, color="#000000", linewidth=1.0)
    axis.set_yticks(range(len(listing)), [goal.what for goal in listing], fontsize=8.5)
    axis.set_xlim(0.0, SHOWN + 2.0)
    axis.set_xlabel(f"part of the goal (cut at {SHOWN:g})")
    axis.margins(y=0.01)
    axis.invert_yaxis()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path)


def main() -> None:
    instance = argparse.ArgumentParser(description=__doc__)
    instance.add_argument("file", type=Path, help="what te bench --json wrote")
    instance.add_argument("--write", action="store_true", help="put the goals into the file")
    instance.add_argument("--plot", type=Path, help="draw the goals into this file")
    instance.add_argument(
        "--families", type=Path, help="draw the times of all providers into this folder"
    )
    chosen = instance.parse_args()
    content = json.loads(chosen.file.read_text())
    found = list(goals(content))
    for goal in found:
        state = {True: "reached", False: "NOT reached", None: "not measured"}[goal.reached]
        figure = "" if goal.found is None else f"{goal.found:.3f}"
        print(f"{state:12} {figure:>8} {goal.sense} {goal.limit:<6.3g} {goal.what}  {goal.note}")
    if chosen.write:
        content["goals"] = [goal.as_dict() for goal in found]
        chosen.file.write_text(json.dumps(content, indent=1) + "\n")
    if chosen.plot is not None:
        plot(chosen.plot, found, f"transformer_engine.jax, {content['machine']}")
    if chosen.families is not None:
        recognized = {field.name for field in fields(Row)}
        rows = [
            Row(**{name: row[name] for name in recognized & set(row)}) for row in content["results"]
        ]
        plot_families(chosen.families, rows, content["machine"])


if __name__ == "__main__":
    main()
