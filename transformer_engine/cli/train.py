"""`te train`: the demonstration under a recipe and in high precision, then a table, a plot and a sample."""

from __future__ import annotations

import enum
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .demo.config import (
    FRAMEWORKS,
    HIGH_PRECISION,
    OPTIMIZERS,
    RECIPES,
    SEEDS,
    Execution,
    default_framework,
    missing_for,
    resolve,
    restore,
)
from .demo.data import load_corpus
from .demo.plot import plot_losses
from .demo.records import Progress as Record
from .demo.records import summarize
from .demo.trainer import Trainer, runs_of
from .failure import Failure, fitting, reporting, reporting_failures, writing

SMALLER = "give a smaller --batch, --seq, --hidden or --layers"
ELSEWHERE = "choose another folder with --out, or make this one writable"

# The recipes and optimizers in typer's form.
RecipeName = enum.Enum("RecipeName", {name: name for name in RECIPES}, type=str)
OptimizerName = enum.Enum("OptimizerName", {name: name for name in OPTIMIZERS}, type=str)
FrameworkName = enum.Enum("FrameworkName", {name: name for name in FRAMEWORKS}, type=str)


class DeviceName(str, enum.Enum):
    """Where to train."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def train(
    recipe: Annotated[
        RecipeName | None,  # pyright: ignore[reportInvalidTypeForm]
        typer.Option(help="How the products are quantized (default: delayed)"),
    ] = None,
    framework: Annotated[
        FrameworkName | None,  # pyright: ignore[reportInvalidTypeForm]
        typer.Option(help="torch, or jax: the same model in Flax (default: torch where it is installed)"),
    ] = None,
    device: Annotated[DeviceName, typer.Option(help="auto takes CUDA when there is a GPU")] = DeviceName.auto,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences a step")] = None,
    seq: Annotated[int | None, typer.Option(help="Bytes a sequence, a multiple of 32")] = None,
    layers: Annotated[int | None, typer.Option(help="Transformer layers")] = None,
    hidden: Annotated[
        int | None, typer.Option(help="Width, a multiple of 32 (128 suits block scaling)")
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads")] = None,
    experts: Annotated[
        int | None,
        typer.Option(help="Experts of each feed-forward layer, of which two compute a byte (0: none)"),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate")] = None,
    seed: Annotated[
        int | None,
        typer.Option(help=f"Seed of weights and batches, -{SEEDS} to {SEEDS} without the ends (default: 0)"),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Text file or folder (default: this Python's standard library)")
    ] = None,
    optimizer: Annotated[
        OptimizerName | None,  # pyright: ignore[reportInvalidTypeForm]
        typer.Option(help="adamw is torch's, fused_adam te.optimizers.FusedAdam (default: adamw)"),
    ] = None,
    graphs: Annotated[bool, typer.Option("--graphs", help="Capture the model as CUDA graphs")] = False,
    offload_layers: Annotated[
        int, typer.Option(help="Layers whose activations wait in host memory for the backward")
    ] = 0,
    observe: Annotated[
        bool, typer.Option("--observe", help="Show what quantization does to every tensor, every tenth step")
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="Name of the run, one folder (default: the recipe's)")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs")] = Path("runs"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue exactly from the run's checkpoint")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Train anew where a run of that name has its checkpoint")
    ] = False,
) -> None:
    """Train a byte-level GPT under a recipe and in high precision, side by side, and compare the losses."""
    console = Console(highlight=False)
    given: dict[str, Any] = {
        "recipe": recipe.value if recipe is not None else None,
        "steps": steps,
        "batch": batch,
        "sequence": seq,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "experts": experts,
        "learning_rate": lr,
        "seed": seed,
        "data": data,
        "optimizer": optimizer.value if optimizer is not None else None,
        "framework": framework.value if framework is not None else None,
    }
    execution = Execution(graphs=graphs, offload_layers=offload_layers, observe=observe)
    beside = "-jax" if (given["framework"] or default_framework()) == "jax" else ""
    folder = out / (name or (given["recipe"] or "delayed") + beside)
    with reporting(console), fitting(SMALLER):
        if name and (name in (".", "..") or "/" in name or "\\" in name):
            raise ValueError(
                f"--name {name!r} is a path, and a run is one folder in that of --out; give a name without separators, "
                "and the folder as --out"
            )
        _check_replacing(folder, resume, overwrite)
        trainer = _prepare(folder, device.value, given, execution, resume)
    _describe(console, trainer)
    with _interrupts(console) as stopping, reporting_failures(console), fitting(SMALLER):
        finished = _train(console, trainer, stopping)
    if not finished:
        console.print(
            f"stopped after step {trainer.step} of {trainer.config.steps}; the checkpoint is saved.\n"
            f"Continue with: te train --resume --name {escape(folder.name)} --out {escape(str(out))}",
            soft_wrap=True,
        )
        raise typer.Exit(130)
    with reporting_failures(console):
        _conclude(console, trainer)


def _check_replacing(folder: Path, resume: bool, overwrite: bool) -> None:
    """Raise ValueError if a run would replace a checkpoint, possibly hours of work, without --overwrite."""
    if resume and overwrite:
        raise ValueError("--resume continues a run and --overwrite replaces it; give one of them")
    with writing(folder, ELSEWHERE):
        stands = (folder / "checkpoint").exists()
    if stands and not (resume or overwrite):
        raise ValueError(
            f"{folder} holds the checkpoint of an earlier run; name this one with --name, continue that one with "
            "--resume, or replace it with --overwrite"
        )


def _prepare(folder: Path, device: str, given: dict[str, Any], execution: Execution, resume: bool) -> Trainer:
    """Return a trainer at its first step, or at the step of the folder's checkpoint."""
    if not resume:
        _demand(given["framework"] or default_framework())  # before its devices are queried
        config = resolve(device, given)
        trainer = Trainer(config, load_corpus(config.data, config.sequence), folder, execution)
        with writing(folder, ELSEWHERE):
            folder.mkdir(parents=True, exist_ok=True)
            trainer.metrics_path.unlink(missing_ok=True)
            trainer.observed_path.unlink(missing_ok=True)
        return trainer
    path = folder / "checkpoint"
    # A checkpoint of torch is a file, one of JAX a folder, possibly not yet renamed.
    if path.is_file():
        framework = "torch"
    elif path.is_dir() or path.with_name("checkpoint.old").is_dir():
        framework = "jax"
    else:
        framework = given["framework"] or default_framework()
    _demand(framework)
    state = runs_of(framework).load(path)
    config = restore(state["config"], device, given, str(path))
    trainer = Trainer(config, load_corpus(config.data, config.sequence), folder, execution)
    trainer.load(state)
    return trainer


def _demand(framework: str) -> None:
    """Exit with an error unless everything that a run in the framework needs is installed."""
    missing = missing_for(framework)
    if missing is not None:
        raise Failure(missing)


def _describe(console: Console, trainer: Trainer) -> None:
    config, corpus = trainer.config, trainer.corpus
    layers = "1 layer" if config.layers == 1 else f"{config.layers} layers"
    parameters = next(iter(trainer.runs.values())).parameters
    console.print(
        f"text    {escape(corpus.source)}: {corpus.train.size + corpus.validation.size:,} bytes",
        soft_wrap=True,
    )
    experts = f", {config.experts} experts" if config.experts else ""
    console.print(
        f"model   {parameters:,} parameters in {config.label(HIGH_PRECISION)}, "
        f"{layers}, hidden {config.hidden}, {config.heads} heads{experts}, in {config.framework} on {config.device}"
    )
    console.print(
        f"runs    {' and '.join(config.label(name) for name in config.runs)}, seed {config.seed}, "
        f"{config.steps} steps of {config.batch} x {config.sequence} bytes"
    )
    if trainer.step:
        console.print(f"resume  after step {trainer.step}")


@contextmanager
def _interrupts(console: Console) -> Iterator[list[bool]]:
    """Stop after the current step on the first Ctrl-C, and at once on the second."""
    asked: list[bool] = []

    def ask(signum, frame) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(True)
        console.print("stopping after this step (Ctrl-C again to stop without saving)")

    previous = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, previous)


def _train(console: Console, trainer: Trainer, stopping: list[bool]) -> bool:
    columns = (
        TextColumn("step {task.completed:>4}/{task.total}"),
        BarColumn(bar_width=16),
        TextColumn("{task.fields[losses]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=trainer.config.steps, completed=trainer.step, losses="", speed="")

        def observe(record: Record) -> None:
            losses = "  ".join(
                f"{trainer.config.label(name)} {loss:.3f}" for name, loss in record.loss.items()
            )
            tokens = len(record.loss) * trainer.config.tokens_a_step / sum(record.seconds.values())
            bar.update(task, completed=record.step, losses=losses, speed=f"{tokens:,.0f} tokens/s")

        return trainer.train(observe, stop=lambda: bool(stopping))


def _conclude(console: Console, trainer: Trainer) -> None:
    config, folder = trainer.config, trainer.folder
    if not trainer.history:
        raise Failure(
            f"{trainer.metrics_path} holds no step of this run, nothing can be drawn; train anew without --resume"
        )
    with writing(folder / "loss.png", "free some space there; te train --resume draws it again"):
        plot_losses(folder / "loss.png", config, trainer.history)
    console.print(_table(trainer))
    _show_observed(console, trainer)
    prompt = bytes(trainer.corpus.validation[: min(32, config.sequence // 2)].tolist())
    run = trainer.runs[config.runs[0]]
    text = run.sample(prompt, config.sequence - len(prompt))
    console.print(
        f"sample of the {config.label(config.runs[0])} model (prompt in bold, drawn with a KV cache):"
    )
    console.print(f"[bold]{escape(_printable(prompt))}[/bold]{escape(_printable(text))}", soft_wrap=True)
    console.print(f"wrote {escape(str(folder))}/{{loss.png,metrics.jsonl,checkpoint}}", soft_wrap=True)


def _show_observed(console: Console, trainer: Trainer) -> None:
    """Show the statistics of quantization in the last observed step, and a plot of all observed steps."""
    observation = trainer.observation
    if observation is None or observation.report is None:
        return
    observation.close()
    console.print(observation.table())
    path = trainer.folder / "observed.png"
    with writing(path, "free some space there"):
        observation.plot(path)
    console.print(f"wrote {escape(str(trainer.observed_path))} and {escape(str(path))}", soft_wrap=True)


def _table(trainer: Trainer) -> Table:
    config = trainer.config
    results = summarize(config, trainer.history)
    base = results[-1]
    table = Table(
        title=f"{config.steps} steps in {config.framework} on {config.device}, losses in nats a byte"
    )
    table.add_column("run")
    for heading in ("train loss", "validation loss", "ratio", "tokens/s", "time"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(
            config.label(result.name),
            f"{result.train:.4f}",
            f"{result.validation:.4f}",
            f"{result.validation / base.validation:.4f}",
            f"{result.tokens_a_second:,.0f}",
            f"{result.seconds:.1f} s",
        )
    return table


def _printable(text: bytes) -> str:
    """Return bytes as text; control characters other than line breaks and tabs are shown as escapes."""
    characters = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in characters)
