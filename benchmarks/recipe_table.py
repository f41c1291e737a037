"""Loss and next-byte accuracy of recipes and options against bfloat16, over seeds and model sizes.

    python benchmarks/recipe_table.py RECORDS [--sizes 57M 125M] [--arms NAME ...] [--seeds 3] [--seconds N]
        [--packages NAME ...] [--steps N] [--earlier FILE] [--json FILE]
    python benchmarks/recipe_table.py RECORDS --queue SIZE:ARM:SEED[:STEPS] ... [--seconds N] [--earlier FILE] ..
    python benchmarks/recipe_table.py RECORDS --summary [--json FILE]

Each training is a record RECORDS/SIZE-ARM-STEPS-SEED.json. The command continues where it stopped: it skips trainings
that have a record, and trainings that another process with the same folder has locked. Start one process per GPU.
With --seconds it starts no training that would end later. With --earlier it continues the records in a file that --json
wrote, if they have the same text. With --queue it runs these trainings, in this order, each after its baseline.

All arms of a seed start from the same weights and see the same batches. Native recipes and options train on 50
million tokens of 16384 each step, emulated ones on 15 million, and bfloat16 on both. The text is the Python source of
installed packages, or --data; the last 5 % are for validation. The accuracy is the share of validation bytes that have
the largest logit. A gap is the mean difference from bfloat16 with the same seed; its standard error is over the seeds.
The final loss of a training that diverges is null in its record; the table leaves it out.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import hashlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from convergence import CHUNK, chunks
from record import machine, write
from torch import Tensor, nn

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine_tools.demo.config import RunConfig, make_recipe, resolve
from transformer_engine_tools.demo.data import SKIPPED, Batch, Corpus, load_corpus
from transformer_engine_tools.demo.model import ByteGPT
from transformer_engine_tools.demo.optimizer import OPTIMIZERS, FusedAdamW
from transformer_engine_tools.demo.run import Run
from transformer_engine_tools.demo.trainer import EVALUATION_BATCHES

BATCH: dict[str, Any] = {"batch": 32, "sequence": 512}
SIZES: dict[str, dict[str, Any]] = {
    "57M": {**BATCH, "layers": 8, "hidden": 768, "heads": 12, "learning_rate": 1e-3},
    "57M-short": {
        **BATCH,
        "batch": 16,
        "layers": 8,
        "hidden": 768,
        "heads": 12,
        "learning_rate": 1e-3,
    },
    "125M": {**BATCH, "layers": 18, "hidden": 768, "heads": 12, "learning_rate": 6e-4},
    "tiny": {
        "batch": 2,
        "sequence": 32,
        "layers": 2,
        "hidden": 64,
        "heads": 2,
        "learning_rate": 3e-3,
    },
}
NATIVE_STEPS, EMULATED_STEPS = 3052, 916  # 50 and 15 million tokens
PACKAGES = ("torch", "scipy", "sympy", "pandas", "scikit-learn", "statsmodels", "matplotlib", "jax")
BASELINE = "bfloat16"
# Chunks after which the end of a training is estimated: the first ones compile and capture.
LEAST_CHUNKS = 4
RECOMPUTED = {"weight_columns": "recomputed", "norm_columns": "recomputed"}


@dataclass(frozen=True)
class Arm:
    """A recipe, and an option that is off by default.

    Attributes:
        recipe: Constructor for the recipe.
        option: "columns": the backward pass casts weights and norm outputs along columns; "cached": the same, and
            activation inputs are saved in FP8; "head": the head computes under the recipe; "loss":
            `fused_linear_cross_entropy`.
        emulated: No GPU before Blackwell multiplies the format.
        adam: Settings for FusedAdam; None: torch's AdamW with float32 moments and masters.
    """

    recipe: Callable[[], recipes.Recipe | None]
    option: str = ""
    emulated: bool = False
    adam: dict[str, Any] | None = None

    @property
    def steps(self) -> int:
        return EMULATED_STEPS if self.emulated else NATIVE_STEPS


def _nearest(**options: Any) -> recipes.Recipe:
    """NVFP4 without the Hadamard transform and stochastic rounding, which its variants do not support."""
    return NVFP4(disable_rht=True, disable_stochastic_rounding=True, **options)


def _bfloat16() -> None:
    """No recipe."""


CURRENT = recipes.Float8CurrentScaling
FP8_MOMENTS = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
BLOCK_MOMENTS: dict[str, Any] = {**FP8_MOMENTS, "block_scaled_states": True}
STOCHASTIC = {"stochastic_rounding": True}
NVFP4 = recipes.NVFP4BlockScaling
ARMS = {
    BASELINE: Arm(_bfloat16),
    "current": Arm(CURRENT),
    "delayed": Arm(lambda: make_recipe("delayed")),
    "block": Arm(recipes.Float8BlockScaling),
    "current+attention": Arm(lambda: CURRENT(fp8_dpa=True)),
    "current+cached": Arm(CURRENT, "cached"),
    "current+head": Arm(CURRENT, "head"),
    "current+loss": Arm(CURRENT, "loss"),
    "current+columns": Arm(CURRENT, "columns"),
    "mxfp8": Arm(recipes.MXFP8BlockScaling, emulated=True),
    "nvfp4": Arm(NVFP4, emulated=True),
    "nvfp4-4over6": Arm(lambda: _nearest(nvfp4_4over6="all"), emulated=True),
    "nvfp4-row-scaled": Arm(lambda: _nearest(row_scaled_activation=True), emulated=True),
    "nvfp4-nearest": Arm(_nearest, emulated=True),
    # Optimizer states: block-scaled moments, and bfloat16 parameters without masters. "adam" is the control.
    "adam": Arm(_bfloat16, adam={}),
    "adam-block": Arm(_bfloat16, adam=BLOCK_MOMENTS | STOCHASTIC),
    "adam-block-nearest": Arm(_bfloat16, adam=BLOCK_MOMENTS),
    "adam-tensor": Arm(_bfloat16, adam={**FP8_MOMENTS, "capturable": False}),
    "adam-block-rounded": Arm(
        _bfloat16, adam=BLOCK_MOMENTS | STOCHASTIC | {"master_weights": False}
    ),
    "adam-rounded": Arm(_bfloat16, adam=STOCHASTIC | {"master_weights": False}),
    "adam-nearest": Arm(_bfloat16, adam={"master_weights": False}),
}


@dataclass(frozen=True)
class Job:
    """One training."""

    size: str
    arm: str
    steps: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.size}-{self.arm}-{self.steps}-{self.seed}"


class ArmModel(ByteGPT):
    """The demonstration's model with an arm's option; the initial weights do not depend on the option."""

    head_weight: nn.Parameter  # of the option "loss"

    def __init__(self, config: RunConfig, option: str) -> None:
        super().__init__(config)
        self.option = option
        assert isinstance(self.head, nn.Linear)
        weight = self.head.weight
        if option == "head":
            self.head = te.Linear(
                config.hidden,
                weight.shape[0],
                bias=False,
                params_dtype=weight.dtype,
                device=torch.device(config.device),
            )
            with torch.no_grad():
                self.head.weight.copy_(weight)
        if option == "loss":
            self.head = nn.Identity()
            self.head_weight = nn.Parameter(weight)
        if option == "cached":
            for module in self.modules():
                if isinstance(module, te.LayerNormMLP):
                    module.cache_quantized_activation_input = True

    def logits(self, tokens: Tensor) -> Tensor:
        """Compute logits [batch, sequence, 256]."""
        output = self(tokens)
        return F.linear(output, self.head_weight) if self.option == "loss" else output

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.option == "loss":
            return te.fused_linear_cross_entropy(self(tokens), self.head_weight, targets)
        return super().loss(tokens, targets)


class ArmRun(Run):
    """One model with its optimizer, whose steps are captured in a CUDA graph."""

    def __init__(self, arm: Arm, config: RunConfig) -> None:
        self.config, self.recipe, self.option = config, arm.recipe(), arm.option
        torch.manual_seed(config.seed)
        self.model = ArmModel(config, arm.option)
        parameters = self.model.parameters()
        self.optimizer = (
            OPTIMIZERS[config.optimizer](parameters)
            if arm.adam is None
            else FusedAdamW(parameters, **arm.adam)
        )
        self.observation = None
        # A step with one FP8 scale per tensor cannot be captured.
        self.captured = config.device == "cuda" and (arm.adam or {}).get("capturable", True)
        self._update: Any = te.graphed(self._eager_update) if self.captured else self._eager_update

    @property
    def eager_reason(self) -> str | None:
        """Reason why the last step did not replay a graph, or None."""
        return self._update.reason if self.captured else "the step is not captured"

    @contextmanager
    def precision(self) -> Iterator[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The recipe, and the backends of the option."""
        with ExitStack() as stack:
            if self.option in ("columns", "cached"):
                stack.enter_context(te.use_backend(**RECOMPUTED))
            stack.enter_context(te.autocast(enabled=self.recipe is not None, recipe=self.recipe))
            yield

    @torch.no_grad()
    def validate(self, batches: list[Batch]) -> tuple[float, float]:
        """Compute the mean loss, and the share of targets with the largest logit."""
        self.model.eval()
        found: list[Tensor] = []
        for inputs, targets in map(self._placed, batches):
            with self.precision():
                logits = self.model.logits(inputs).float().flatten(0, 1)
            loss = F.cross_entropy(logits, targets.flatten())
            found.append(
                torch.stack((loss, (logits.argmax(-1) == targets.flatten()).float().mean()))
            )
        loss, accuracy = torch.stack(found).mean(0).tolist()
        return loss, accuracy


def train(job: Job, config: RunConfig, corpus: Corpus, seconds: float) -> dict[str, Any] | None:
    """Train to the end and return the record; None if the training would take longer than `seconds`."""
    start = time.perf_counter()
    run = ArmRun(ARMS[job.arm], config)
    losses: list[float] = []
    times: list[float] = []
    for batches, rates in chunks(config, corpus):
        begin = time.perf_counter()
        losses += run.train(batches, rates, len(losses))
        times.append((time.perf_counter() - begin) / len(rates))
        remaining = times[-1] * (config.steps - len(losses))
        if len(times) == LEAST_CHUNKS and time.perf_counter() - start + remaining > seconds:
            return None
    final, accuracy = run.validate(
        corpus.validation_batches(EVALUATION_BATCHES, config.batch, config.sequence)
    )
    return {
        "size": job.size,
        "arm": job.arm,
        "seed": job.seed,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "recipe": str(run.recipe),
        "config": {name: value for name, value in config.as_dict().items() if name != "recipe"},
        "text": {
            "source": corpus.source,
            "bytes": corpus.train.size + corpus.validation.size,
            "fingerprint": corpus.fingerprint,
        },
        "machine": machine(),
        "eager": run.eager_reason,
        "tokens": config.steps * config.tokens_per_step,
        "losses": [
            round(mean, 5) if math.isfinite(mean) else None
            for mean in (
                statistics.mean(losses[i : i + CHUNK]) for i in range(0, len(losses), CHUNK)
            )
        ],
        "final": final if math.isfinite(final) else None,
        "accuracy": accuracy,
        "seconds": round(time.perf_counter() - start, 1),
        "step_ms": round(1e3 * statistics.median(times), 3),
    }


def jobs(sizes: Iterable[str], arms: Iterable[str], seeds: int, steps: int | None) -> list[Job]:
    """All trainings, each arm after the baseline of its length."""
    found: dict[Job, None] = {}
    for size in sizes:
        for arm in arms:
            length = steps or ARMS[arm].steps
            for name in (BASELINE, arm):
                found |= {Job(size, name, length, seed): None for seed in range(seeds)}
    return list(found)


def queued_jobs(queue: Iterable[str]) -> list[Job]:
    """Trainings named SIZE:ARM:SEED or SIZE:ARM:SEED:STEPS, each after its baseline.

    Raises:
        ValueError: A name has another form, or an unknown size or arm.
    """
    found: dict[Job, None] = {}
    for name in queue:
        size, arm, *numbers = name.split(":")
        if size not in SIZES or arm not in ARMS or not all(map(str.isdecimal, numbers)):
            raise ValueError(f"{name!r} is not SIZE:ARM:SEED[:STEPS] with a known size and arm")
        if len(numbers) not in (1, 2):
            raise ValueError(f"{name!r} has {len(numbers)} numbers; give SIZE:ARM:SEED[:STEPS]")
        steps = int(numbers[1]) if len(numbers) == 2 else ARMS[arm].steps
        for each in (BASELINE, arm):
            found[Job(size, each, steps, int(numbers[0]))] = None
    return list(found)


def take_earlier(folder: Path, file: Path, corpus: Corpus) -> None:
    """Write the records of a file into the folder, unless it has them; leave out those with another text."""
    folder.mkdir(parents=True, exist_ok=True)
    other_text = 0
    for record in json.loads(file.read_text())["records"]:
        if record["text"]["fingerprint"] != corpus.fingerprint:
            other_text += 1
            continue
        job = Job(record["size"], record["arm"], record["config"]["steps"], record["seed"])
        path = folder / f"{job.name}.json"
        if not path.exists():
            path.write_text(json.dumps(record) + "\n")
    if other_text:
        print(f"{other_text} records of {file} have another text than {corpus.source}", flush=True)


def run_jobs(folder: Path, todo: list[Job], device: str, corpus: Corpus, seconds: float) -> bool:
    """Run the trainings that have no record, in their order, as long as they fit in the time.

    Returns:
        Whether none failed; a failed one has its traceback in the output and no record.
    """
    start = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    succeeded = True
    for job in todo:
        path = folder / f"{job.name}.json"
        left = seconds - (time.perf_counter() - start)
        if left < 1.05 * _known_seconds(folder, job):
            continue
        with _lock(path.with_suffix(".lock")) as locked:
            if not locked or path.exists():
                continue
            config = resolve(
                device, {**SIZES[job.size], "recipe": "none", "steps": job.steps, "seed": job.seed}
            )
            try:
                record = train(job, config, corpus, left)
            except Exception:
                print(f"{job.name}: failed\n{traceback.format_exc()}", flush=True)
                succeeded = False
                continue
            if record is None:
                print(f"{job.name}: it does not fit in {left:.0f} s", flush=True)
            else:
                partial = path.with_suffix(".partial")
                partial.write_text(json.dumps(record) + "\n")
                os.replace(partial, path)
                print(
                    f"{job.name}: loss {record['final']}, accuracy {record['accuracy']:.4f}, "
                    f"{record['seconds']} s",
                    flush=True,
                )
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return succeeded


def _known_seconds(folder: Path, job: Job) -> float:
    """Seconds of the same training with another seed, else of the fastest other arm, or 0."""
    for arm in (job.arm, "*"):
        found = [
            json.loads(path.read_text())["seconds"]
            for path in folder.glob(f"{job.size}-{arm}-{job.steps}-?.json")
        ]
        if found:
            return min(found)
    return 0.0


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Lock a file, which ends with the process; yields False if another process has it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def load_packages(names: Iterable[str], sequence: int) -> Corpus:
    """Load the Python source of installed packages, tests excluded, in an order that mixes them."""
    names = list(names)
    sources: dict[bytes, Path] = {}
    for name in names:
        for file in distribution(name).files or ():
            if file.suffix == ".py" and not {*SKIPPED, "testing"} & set(file.parts[:-1]):
                sources[hashlib.sha256(file.as_posix().encode()).digest()] = Path(
                    str(file.locate())
                )
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        with text.open("wb") as output:
            for _, file in sorted(sources.items()):
                if b"\0" not in (content := file.read_bytes()):
                    output.write(content.decode("utf-8", "ignore").encode())
        corpus = load_corpus(str(text), sequence)
    versions = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in names)
    return replace(corpus, source=f"Python source of {versions}")


def summarize(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per size, arm and length, of the seeds that the baseline has too; without trainings that diverged.

    Raises:
        ValueError: The records have different texts.
    """
    cells: dict[tuple[str, str, int], dict[int, dict[str, Any]]] = {}
    texts: set[str] = set()
    for record in records:
        texts.add(record["text"]["fingerprint"])
        if record["final"] is None:
            continue
        cells.setdefault((record["size"], record["arm"], record["config"]["steps"]), {})[
            record["seed"]
        ] = record
    if len(texts) > 1:
        raise ValueError(
            f"the records have {len(texts)} different texts; give folders with one text"
        )
    rows: list[dict[str, Any]] = []
    for (size, arm, steps), cell in cells.items():
        base = cells.get((size, BASELINE, steps), {})
        seeds = sorted(set(cell) & set(base))
        if not seeds:
            continue
        row: dict[str, Any] = {"size": size, "arm": arm, "steps": steps, "seeds": len(seeds)}
        row["tokens"] = cell[seeds[0]]["tokens"]
        for figure, key in (("loss", "final"), ("accuracy", "accuracy")):
            differences = [cell[seed][key] - base[seed][key] for seed in seeds]
            row[figure] = statistics.mean(cell[seed][key] for seed in seeds)
            row[f"{figure}_gap"] = statistics.mean(differences)
            row[f"{figure}_error"] = (
                statistics.stdev(differences) / math.sqrt(len(seeds)) if len(seeds) > 1 else None
            )
        rows.append(row)
    order = list(ARMS)
    return sorted(
        rows,
        key=lambda row: (list(SIZES).index(row["size"]), -row["steps"], order.index(row["arm"])),
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| size | recipe | million tokens | seeds | loss | gap | accuracy | gap |",
        "| --- | --- |" + " ---: |" * 6,
    ]
    for row in rows:
        gaps = [
            f"{scale * row[f'{figure}_gap']:+.{digits}f} ± {scale * (row[f'{figure}_error'] or 0):.{digits}f}"
            for figure, scale, digits in (("loss", 1, 4), ("accuracy", 100, 2))
        ]
        lines.append(
            f"| {row['size']} | {row['arm']} | {row['tokens'] / 1e6:.0f} | {row['seeds']} | {row['loss']:.4f} "
            f"| {gaps[0]} | {100 * row['accuracy']:.2f} % | {gaps[1]} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", type=Path, help="folder with one record per training")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["57M", "125M"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--queue", nargs="+", metavar="SIZE:ARM:SEED[:STEPS]", default=[])
    parser.add_argument("--earlier", type=Path, help="file of --json whose records are continued")
    parser.add_argument("--steps", type=int, help="other than the 50 or 15 million tokens")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="time in which trainings may run"
    )
    parser.add_argument(
        "--packages", nargs="+", default=PACKAGES, help="packages whose source is the text"
    )
    parser.add_argument("--data", help="another text, a file or a folder")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--summary", action="store_true", help="train nothing")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    options = parser.parse_args()
    succeeded = True
    if not options.summary:
        os.environ["TE_EMULATE"] = "1"  # formats that the GPU lacks take part too
        device = resolve(options.device, {"framework": "torch"}).device
        todo = jobs(options.sizes, options.arms, options.seeds, options.steps)
        if options.queue:
            todo = queued_jobs(options.queue)
        longest = max(SIZES[job.size]["sequence"] for job in todo)
        corpus = (
            load_packages(options.packages, longest)
            if options.data is None
            else load_corpus(options.data, longest)
        )
        if options.earlier is not None:
            take_earlier(options.records, options.earlier, corpus)
        succeeded = run_jobs(options.records, todo, device, corpus, options.seconds)
    records = [json.loads(path.read_text()) for path in sorted(options.records.glob("*.json"))]
    rows = summarize(records)
    print(table(rows))
    write(
        options.json, about=records[0]["machine"] if records else None, rows=rows, records=records
    )
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
