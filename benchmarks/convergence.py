"""The demonstration model's final loss under every recipe against high precision, with seeds for the noise.

    python benchmarks/convergence.py [--framework torch|jax] [--device auto|cpu|cuda] [--seeds 3] [--steps N]
        [--size demo|57M] [--recipes delayed,current] [--cached-inputs] [--experts N] [--out FOLDER]

Every recipe starts from the same weights and sees the same batches as the high-precision run with its seed. It
passes when its mean final validation loss lies within the larger of 1 % (NVFP4: 2 %) and three standard
deviations over the high-precision seeds. Writes convergence.json, .md and .png (with experts convergence_experts.*,
of JAX convergence_jax.*); exits 1 when one fails.

`--cached-inputs` also trains each recipe with `cache_quantized_activation_input`, as "RECIPE+cached". Runs with one
seed share weights and batches, so that their differences deviate less than the losses over seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import transformer_engine
from transformer_engine_tools.demo.config import (
    FRAMEWORKS,
    HIGH_PRECISION,
    RECIPES,
    RunConfig,
    learning_rate,
    resolve,
)
from transformer_engine_tools.demo.data import Batch, Corpus, load_corpus
from transformer_engine_tools.demo.plot import smooth
from transformer_engine_tools.demo.trainer import EVALUATION_BATCHES, ModelRun, framework_runs

SIZES = {
    "cpu": {"steps": 400, "batch": 8, "sequence": 64, "layers": 2, "hidden": 128, "heads": 4},
    "cuda": {"steps": 300, "batch": 16, "sequence": 512, "layers": 4, "hidden": 512, "heads": 8},
    "57M": {"steps": 2000, "batch": 16, "sequence": 512, "layers": 8, "hidden": 768, "heads": 12},
}
RELATIVE_LIMIT = {"nvfp4": 0.02}
CACHED = "+cached"  # suffix of a recipe's runs with cache_quantized_activation_input
CHUNK = 20  # steps between two synchronizations with a GPU


@dataclass(frozen=True)
class Curve:
    """One training: the loss in every step and the final validation loss.

    Attributes:
        name: Recipe name, perhaps with the suffix `CACHED`, or `HIGH_PRECISION`.
        seed: Seed for weights and batches.
        losses: Loss in each step.
        final: Validation loss after the last step.
        seconds: Time for all steps, kernel compilation included.
        step_ms: Median time per step, over groups of `CHUNK` steps.
    """

    name: str
    seed: int
    losses: list[float]
    final: float
    seconds: float
    step_ms: float


@dataclass(frozen=True)
class Row:
    """A recipe over all seeds: mean final loss, distance from high precision, and its limit.

    Attributes:
        name: Name of the runs.
        mean: Mean final loss.
        deviation: Final loss's sample deviation.
        difference: Mean difference from high precision with the same seed.
        paired: Sample deviation for this difference.
        limit: Limit for the difference.
    """

    name: str
    mean: float
    deviation: float
    difference: float
    paired: float
    limit: float

    @property
    def passes(self) -> bool:
        return abs(self.difference) <= self.limit


def train(name: str, config: RunConfig, corpus: Corpus) -> Curve:
    """Train one model to the end."""
    recipe = name.removesuffix(CACHED)
    run = framework_runs(config.framework).Run(recipe, config)
    if recipe != name:
        cache_inputs(run)
    start = time.perf_counter()
    curve: list[float] = []
    times: list[float] = []
    for batches, rates in chunks(config, corpus):
        begin = time.perf_counter()
        curve += run.train(batches, rates, len(curve))
        times.append((time.perf_counter() - begin) / len(rates))
    seconds = time.perf_counter() - start
    validation = corpus.validation_batches(EVALUATION_BATCHES, config.batch, config.sequence)
    final = run.evaluate(validation)
    return Curve(name, config.seed, curve, final, seconds, 1e3 * statistics.median(times))


def chunks(config: RunConfig, corpus: Corpus) -> Iterator[tuple[list[Batch], list[float]]]:
    """Batches and learning rates of `CHUNK` steps at a time."""
    for first in range(0, config.steps, CHUNK):
        steps = range(first, min(first + CHUNK, config.steps))
        batches = [corpus.batch(config.seed, step, config.batch, config.sequence) for step in steps]
        yield batches, [learning_rate(step, config.steps, config.learning_rate) for step in steps]


def cache_inputs(run: ModelRun) -> None:
    """Set `cache_quantized_activation_input` on all MLPs in a run's torch model."""
    from transformer_engine.pytorch import LayerNormMLP

    layers = [module for module in run.model.modules() if isinstance(module, LayerNormMLP)]  # pyright: ignore
    assert layers, "the model has no LayerNormMLP"
    for layer in layers:
        layer.cache_quantized_activation_input = True


def names_of_runs(recipes: Sequence[str], cached: bool) -> list[str]:
    """Names of the runs, high precision last."""
    pairs = [(name, name + CACHED) if cached else (name,) for name in recipes]
    return [*(name for pair in pairs for name in pair), HIGH_PRECISION]


def run_names(curves: list[Curve]) -> list[str]:
    """Trained run names, high precision last."""
    names = dict.fromkeys(curve.name for curve in curves)
    return [*(name for name in names if name != HIGH_PRECISION), HIGH_PRECISION]


def compare(curves: list[Curve]) -> list[Row]:
    """Return one Row per name, high precision last; deviations are sample deviations."""
    finals = {
        name: [curve.final for curve in curves if curve.name == name] for name in run_names(curves)
    }
    base = statistics.mean(finals[HIGH_PRECISION])
    noise = _deviation(finals[HIGH_PRECISION])
    differences = {
        name: [
            value - reference
            for value, reference in zip(values, finals[HIGH_PRECISION], strict=True)
        ]
        for name, values in finals.items()
    }
    return [
        Row(
            name=name,
            mean=statistics.mean(values),
            deviation=_deviation(values),
            difference=statistics.mean(differences[name]),
            paired=_deviation(differences[name]),
            limit=max(RELATIVE_LIMIT.get(name.removesuffix(CACHED), 0.01) * base, 3 * noise),
        )
        for name, values in finals.items()
    ]


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def markdown(config: RunConfig, curves: list[Curve], rows: list[Row], machine: str) -> str:
    """The table as a separate page."""
    seeds = len({curve.seed for curve in curves})
    experts = f", {config.experts} experts" if config.experts else ""
    lines = [
        "# Convergence of the recipes",
        "",
        f"Byte-level GPT, {config.layers} layers, hidden {config.hidden}{experts}, {config.steps} steps of "
        f"{config.batch} x {config.sequence} bytes, {seeds} seeds, {machine}. "
        "Losses are validation losses in nats per byte after the last step.",
        "",
        "| run | mean final loss | deviation over seeds | difference | its deviation | limit | passes "
        "| seconds per run |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    for row in rows:
        seconds = statistics.mean(curve.seconds for curve in curves if curve.name == row.name)
        relative = 100 * row.difference / (row.mean - row.difference)
        lines.append(
            f"| {config.label(row.name)} | {row.mean:.4f} | {row.deviation:.4f} | {row.difference:+.4f} "
            f"({relative:+.2f} %) | {row.paired:.4f} | {row.limit:.4f} | {'yes' if row.passes else 'no'} "
            f"| {seconds:.1f} |"
        )
    return "\n".join(lines) + "\n"


def plot(path: Path, config: RunConfig, curves: list[Curve]) -> None:
    """Mean training loss over the seeds above, relative difference from high precision below."""
    means = {}
    for name in run_names(curves):
        losses = [curve.losses for curve in curves if curve.name == name]
        means[name] = smooth([statistics.mean(values) for values in zip(*losses, strict=True)])
    figure = Figure(figsize=(8, 6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    steps = range(1, config.steps + 1)
    base = means[HIGH_PRECISION]
    upper.plot(steps, base, color="#555555", linewidth=2.4, label=config.label(HIGH_PRECISION))
    lower.axhspan(-1, 1, color="#16a34a", alpha=0.12, label="within 1 %")
    lower.axhline(0, color="#555555", linewidth=0.8)
    for index, name in enumerate(run_names(curves)[:-1]):
        upper.plot(steps, means[name], "--", color=f"C{index}", linewidth=1.2, label=name)
        difference = [
            100 * (value / reference - 1)
            for value, reference in zip(means[name], base, strict=True)
        ]
        lower.plot(steps, difference, color=f"C{index}", linewidth=1.2)
    upper.set_ylabel("training loss (nats per byte)")
    lower.set_ylabel("difference (%)")
    lower.set_xlabel("step")
    for panel in (upper, lower):
        panel.grid(alpha=0.25)
        panel.legend(frameon=False)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    all_recipes = ",".join(name for name in RECIPES if name != "none")
    parser.add_argument("--framework", default="torch", choices=FRAMEWORKS)
    parser.add_argument("--recipes", default=all_recipes, help="names, separated by commas")
    parser.add_argument(
        "--cached-inputs", action="store_true", help="also train with quantized saved inputs"
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--size", default="demo", choices=("demo", "57M"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    if options.cached_inputs and options.framework == "jax":
        parser.error(
            "--cached-inputs sets an option of the PyTorch model; remove it, or use --framework torch"
        )
    os.environ["TE_EMULATE"] = "1"  # formats that the GPU lacks take part too
    device = resolve(options.device, {"framework": options.framework}).device
    sizes: dict[str, Any] = {
        **SIZES[device if options.size == "demo" else options.size],
        "data": options.data,
    }
    sizes |= {"steps": options.steps} if options.steps else {}
    sizes |= {"framework": options.framework, "experts": options.experts}
    configs = [resolve(device, {**sizes, "seed": seed}) for seed in range(options.seeds)]
    corpus = load_corpus(options.data, configs[0].sequence)
    curves = []
    for config in configs:
        for name in names_of_runs(options.recipes.split(","), options.cached_inputs):
            curves.append(train(name, config, corpus))
            print(
                f"seed {config.seed}  {name:15} {curves[-1].final:.4f}  {curves[-1].seconds:.1f} s, "
                f"{curves[-1].step_ms:.2f} ms per step",
                flush=True,
            )
    rows = compare(curves)
    machine = (
        f"{'GPU' if device == 'cuda' else 'CPU'}, {options.framework} {version(options.framework)}"
    )
    machine += f", transformer-engine {transformer_engine.__version__}"
    stem = "convergence" if options.framework == "torch" else f"convergence_{options.framework}"
    stem += "_experts" if options.experts else ""
    page = markdown(configs[0], curves, rows, machine)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{stem}.md").write_text(page)
    record = {
        "machine": machine,
        "config": configs[0].as_dict(),
        "rows": [{**asdict(row), "passes": row.passes} for row in rows],
        "curves": [asdict(curve) for curve in curves],
    }
    (options.out / f"{stem}.json").write_text(json.dumps(record) + "\n")
    plot(options.out / f"{stem}.png", configs[0], curves)
    print(page)
    return 0 if all(row.passes for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
