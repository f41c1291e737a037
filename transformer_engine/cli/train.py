"""`te train`: the demonstration under a recipe and in high precision, then a table, a plot and a sample."""

from __future__ import annotations

import enum
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from .demo.config import (
    CPU_SIZES,
    CUDA_SIZES,
    FRAMEWORKS,
    OPTIMIZERS,
    RECIPES,
    Execution,
    default_framework,
    missing_for,
    resolve,
    restore,
)
from .demo.data import load_corpus, printable
from .demo.plot import plot_losses
from .demo.trainer import Trainer, runs_of
from .failure import Failure, fitting, reporting, reporting_failures, writing
from .progress import check_tensorboard, describe, results_table, train_with_progress

SMALLER = "give a smaller --batch, --seq, --hidden or --layers"
ELSEWHERE = "choose another folder with --out, or make this one writable"

# The recipes and optimizers in typer's form.
RecipeName = enum.Enum("RecipeName", {name: name for name in RECIPES}, type=str)
OptimizerName = enum.Enum("OptimizerName", {name: name for name in OPTIMIZERS}, type=str)
FrameworkName = enum.Enum("FrameworkName", {name: name for name in FRAMEWORKS}, type=str)


# The panels of `te train --help`.
_MODEL, _TRAINING, _EXECUTION, _RUN, _DEVICES = "Model", "Training", "Execution", "Run", "Several devices"


def _option(text: str, panel: str) -> Any:
    return typer.Option(help=text, rich_help_panel=panel)


def _sized(text: str, size: str, panel: str = _TRAINING) -> Any:
    """Return an option whose help text has the default sizes."""
    return _option(f"{text} (default: {CPU_SIZES[size]} on a CPU, {CUDA_SIZES[size]} on CUDA)", panel)


class DeviceName(str, enum.Enum):
    """Where to train."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def train(
    recipe: Annotated[
        RecipeName | None,  # pyright: ignore[reportInvalidTypeForm]
        typer.Option(help="Recipe that quantizes the matrix products (default: delayed)"),
    ] = None,
    framework: Annotated[
        FrameworkName | None,  # pyright: ignore[reportInvalidTypeForm]
        typer.Option(help="torch, or jax for the same model in Flax (default: torch if it is installed)"),
    ] = None,
    device: Annotated[
        DeviceName, typer.Option(help="auto: CUDA, or the CPU without a GPU")
    ] = DeviceName.auto,
    steps: Annotated[int | None, _sized("Optimizer steps", "steps")] = None,
    batch: Annotated[int | None, _sized("Sequences per step", "batch")] = None,
    seq: Annotated[int | None, _sized("Bytes per sequence, a multiple of 32", "sequence")] = None,
    layers: Annotated[int | None, _sized("Transformer layers", "layers", _MODEL)] = None,
    hidden: Annotated[
        int | None, _sized("Width, a multiple of 32 (128 suits block scaling)", "hidden", _MODEL)
    ] = None,
    heads: Annotated[int | None, _sized("Attention heads", "heads", _MODEL)] = None,
    experts: Annotated[
        int | None, _option("Experts per layer, two of which compute each byte (0: none)", _MODEL)
    ] = None,
    lr: Annotated[float | None, _sized("Peak learning rate", "learning_rate")] = None,
    seed: Annotated[
        int | None, _option("Seed of weights and batches, -2^40 to 2^40 (default: 0)", _TRAINING)
    ] = None,
    data: Annotated[
        str | None, _option("Text file or folder (default: this Python's standard library)", _TRAINING)
    ] = None,
    optimizer: Annotated[
        OptimizerName | None,  # pyright: ignore[reportInvalidTypeForm]
        _option("adamw: torch.optim.AdamW; fused_adam: te.optimizers.FusedAdam (default: adamw)", _TRAINING),
    ] = None,
    graphs: Annotated[
        bool, typer.Option("--graphs", help="Capture the model as CUDA graphs", rich_help_panel=_EXECUTION)
    ] = False,
    offload_layers: Annotated[
        int,
        _option("Layers whose activations are offloaded to host memory until the backward pass", _EXECUTION),
    ] = 0,
    observe: Annotated[
        bool,
        typer.Option(
            "--observe",
            help="Report underflow, saturation and error of every tensor, every tenth step",
            rich_help_panel=_EXECUTION,
        ),
    ] = False,
    name: Annotated[
        str | None, _option("Name of the run and of its folder (default: the name of the recipe)", _RUN)
    ] = None,
    out: Annotated[Path, _option("Folder of the runs", _RUN)] = Path("runs"),
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue from the checkpoint of the run; --steps extends a finished run",
            rich_help_panel=_RUN,
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Start again and replace the checkpoint of the run", rich_help_panel=_RUN
        ),
    ] = False,
    log_every: Annotated[
        int | None,
        _option("Steps per line of progress if the output is not a terminal (default: steps / 20)", _RUN),
    ] = None,
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard", help="Write losses for TensorBoard to OUT/NAME/tensorboard", rich_help_panel=_RUN
        ),
    ] = False,
    devices: Annotated[
        int | None,
        typer.Option(
            help="Number of GPUs, or of CPU processes, to train on", min=1, rich_help_panel=_DEVICES
        ),
    ] = None,
    distributed: Annotated[
        bool,
        typer.Option(
            "--distributed", help="Train on the processes that torchrun has started", rich_help_panel=_DEVICES
        ),
    ] = False,
    tp: Annotated[
        int, typer.Option(help="Ranks that shard the weights of each layer", min=1, rich_help_panel=_DEVICES)
    ] = 1,
    cp: Annotated[
        int, typer.Option(help="Ranks that shard each sequence", min=1, rich_help_panel=_DEVICES)
    ] = 1,
    fsdp: Annotated[
        int,
        typer.Option(
            help="Ranks that shard parameters and optimizer states", min=1, rich_help_panel=_DEVICES
        ),
    ] = 1,
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
                f"--name {name!r} is a path; pass a name without separators, and the parent folder as --out"
            )
        if log_every is not None and log_every < 1:
            raise ValueError(f"--log-every {log_every} is below 1; give a positive number of steps")
        if tensorboard:
            check_tensorboard()
        # torchrun starts the same command again after the failure of a rank.
        if distributed and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            resume, overwrite = (folder / "checkpoints").exists(), False
        _check_replacing(folder, resume, overwrite)
        if devices is not None or distributed:
            # Several devices need torch, which `te train --framework jax` does without.
            from .train_devices import TrainRequest, train_on_devices

            switches = (resume, overwrite, log_every, tensorboard)
            request = TrainRequest(device.value, given, execution, folder, *switches, tp, cp, fsdp)
            train_on_devices(request, devices, distributed)
            return
        if max(tp, cp, fsdp) > 1:
            raise ValueError("--tp, --cp and --fsdp need several devices; add --devices or --distributed")
        trainer = _prepare(folder, device.value, given, execution, resume)
    describe(console, trainer)
    with _interrupts(console) as stopping, reporting_failures(console), fitting(SMALLER):
        finished = train_with_progress(console, trainer, lambda: bool(stopping), log_every, tensorboard)
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
        stands = (folder / "checkpoint").exists() or (folder / "checkpoints").exists()
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
    if path.with_name("checkpoints").is_dir():
        raise ValueError(
            f"{folder} is a run of several devices; continue it with the same --devices, --tp, --cp and --fsdp"
        )
    # A checkpoint of torch is a file, one of JAX a folder, possibly not yet renamed.
    if path.is_file():
        framework = "torch"
    elif path.is_dir() or path.with_name("checkpoint.old").is_dir():
        framework = "jax"
    else:
        framework = given["framework"] or default_framework()
    _demand(framework)
    state = runs_of(framework).load(path)
    config = restore(state["config"], device, given, str(path), state["step"])
    trainer = Trainer(config, load_corpus(config.data, config.sequence), folder, execution)
    trainer.load(state)
    return trainer


def _demand(framework: str) -> None:
    """Exit with an error unless everything that a run in the framework needs is installed."""
    missing = missing_for(framework)
    if missing is not None:
        raise Failure(missing)


@contextmanager
def _interrupts(console: Console) -> Iterator[list[bool]]:
    """Stop after the current step on the first Ctrl-C, and at once on the second."""
    interrupts: list[bool] = []

    def request_stop(signum, frame) -> None:
        if interrupts:
            raise KeyboardInterrupt
        interrupts.append(True)
        console.print("stopping after this step (Ctrl-C again to stop without saving)")

    previous = signal.signal(signal.SIGINT, request_stop)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, previous)


def _conclude(console: Console, trainer: Trainer) -> None:
    config, folder = trainer.config, trainer.folder
    if not trainer.history:
        raise Failure(
            f"{trainer.metrics_path} holds no step of this run, nothing can be drawn; train anew without --resume"
        )
    with writing(folder / "loss.png", "free some space there; te train --resume draws it again"):
        plot_losses(folder / "loss.png", config, trainer.history)
    console.print(results_table(trainer))
    _show_observed(console, trainer)
    prompt = bytes(trainer.corpus.validation[: min(32, config.sequence // 2)].tolist())
    run = trainer.runs[config.runs[0]]
    text = run.sample(prompt, config.sequence - len(prompt))
    console.print(f"sample of the {config.label(config.runs[0])} model, after {len(prompt)} bytes of prompt:")
    console.print(f"[bold]{escape(printable(prompt))}[/bold]{escape(printable(text))}", soft_wrap=True)
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
