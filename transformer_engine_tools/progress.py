"""Output from `te train`: a run's description, its progress, TensorBoard scalars and the results table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from transformer_engine.common import optional

from .demo.config import HIGH_PRECISION
from .demo.records import Progress as Record
from .demo.records import summarize
from .failure import Failure

if TYPE_CHECKING:
    from .demo.trainer import Trainer


def describe(console: Console, trainer: Trainer) -> None:
    """Print the text, the model and the runs of a trainer."""
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
        f"{layers}, hidden {config.hidden}, {config.heads} heads{experts}, in {config.framework} on {config.device}",
        soft_wrap=True,
    )
    console.print(
        f"runs    {' and '.join(config.label(name) for name in config.runs)}, seed {config.seed}, "
        f"{config.steps} steps of {config.batch} x {config.sequence} bytes"
    )
    if trainer.step:
        console.print(f"resume  after step {trainer.step}")


def train_with_progress(
    console: Console,
    trainer: Trainer,
    stop: Callable[[], bool],
    log_every: int | None,
    tensorboard: bool,
) -> bool:
    """Train with a progress bar or progress lines; return whether the run has finished."""
    every = log_every or max(1, trainer.config.steps // 20)
    display = _bar(console, trainer) if console.is_terminal else _lines(console, trainer, every)
    with display as show, _scalars(trainer, tensorboard) as write:

        def observe(record: Record) -> None:
            show(record)
            write()

        return trainer.train(observe, stop)


def _progress(trainer: Trainer, record: Record) -> tuple[str, str]:
    """Format the losses of a step and its token rate, as text."""
    losses = "  ".join(
        f"{trainer.config.label(name)} {loss:.3f}" for name, loss in record.loss.items()
    )
    tokens = len(record.loss) * trainer.config.tokens_per_step / sum(record.seconds.values())
    return losses, f"{tokens:,.0f} tokens/s"


@contextmanager
def _bar(console: Console, trainer: Trainer) -> Iterator[Callable[[Record], None]]:
    """Show a progress bar on a terminal, redrawn after every step."""
    columns = (
        TextColumn("step {task.completed:>4}/{task.total}"),
        BarColumn(bar_width=16),
        TextColumn("{task.fields[losses]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(
            "", total=trainer.config.steps, completed=trainer.step, losses="", speed=""
        )

        def show(record: Record) -> None:
            losses, speed = _progress(trainer, record)
            bar.update(task, completed=record.step, losses=losses, speed=speed)

        yield show


@contextmanager
def _lines(console: Console, trainer: Trainer, every: int) -> Iterator[Callable[[Record], None]]:
    """Print a progress line every `every` steps and for the last step, in files and pipes."""
    start, first, due = time.perf_counter(), trainer.step, (trainer.step // every + 1) * every

    def show(record: Record) -> None:
        nonlocal due
        steps = trainer.config.steps
        if record.step < min(due, steps):
            return
        due = (record.step // every + 1) * every
        left = (time.perf_counter() - start) / (record.step - first) * (steps - record.step)
        remaining = timedelta(seconds=round(left))
        text = "  ".join(
            (f"step {record.step}/{steps}", *_progress(trainer, record), f"{remaining} left")
        )
        console.print(text, soft_wrap=True)

    yield show


def check_tensorboard() -> None:
    """Raise Failure if the writer, which is torch's, or TensorBoard is missing."""
    missing = [name for name in ("torch", "tensorboard") if not optional.installed(name)]
    if missing:
        raise Failure(
            f"--tensorboard needs {' and '.join(missing)}; pip install {' '.join(missing)}, "
            "or leave the option out and read metrics.jsonl"
        )


@contextmanager
def _scalars(trainer: Trainer, enabled: bool) -> Iterator[Callable[[], None]]:
    """Yield a function that writes the new records of a run for TensorBoard, or does nothing if not enabled."""
    if not enabled:
        yield lambda: None
        return
    from torch.utils.tensorboard import SummaryWriter

    written = len(trainer.history)
    with SummaryWriter(str(trainer.folder / "tensorboard"), purge_step=trainer.step + 1) as writer:

        def write() -> None:
            nonlocal written
            for record in trainer.history[written:]:
                for kind, losses in (
                    ("train", record.loss),
                    ("validation", record.validation or {}),
                ):
                    for name, loss in losses.items():
                        writer.add_scalar(f"{kind}/{trainer.config.label(name)}", loss, record.step)
                writer.add_scalar("learning rate", record.learning_rate, record.step)
            written = len(trainer.history)

        yield write


def results_table(trainer: Trainer) -> Table:
    """Build the table of final losses and speeds."""
    config = trainer.config
    results = summarize(config, trainer.history)
    base = results[-1]
    table = Table(
        title=f"{config.steps} steps in {config.framework} on {config.device}, losses in nats per byte"
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
            f"{result.tokens_per_second:,.0f}",
            f"{result.seconds:.1f} s",
        )
    return table


def printable(text: bytes) -> str:
    """Decode bytes to text; bytes that are not UTF-8 and control characters become the replacement character."""
    characters = text.decode("utf-8", errors="replace")
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in characters
    )
