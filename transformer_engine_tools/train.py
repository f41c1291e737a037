"""`te train`: the demonstration under a recipe and in high precision, then a table, a plot and a sample."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    missing_libraries,
    resolve,
    restore,
)
from .failure import Failure, fitting, reporting, reporting_failures, writing
from .invocation import program
from .options import add_choice, add_device, add_flag, add_switch, minimum_converter
from .progress import check_tensorboard, describe, printable, results_table, train_with_progress

if TYPE_CHECKING:
    from .demo.trainer import Trainer

SMALLER = "give a smaller --batch, --seq, --hidden or --layers"
ELSEWHERE = "choose another folder with --out, or make this one writable"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    add_choice(
        parser, "--recipe", RECIPES, "recipe that quantizes the matrix products (default: delayed)"
    )
    add_choice(
        parser,
        "--framework",
        FRAMEWORKS,
        "torch, or jax for the same model in Flax (default: jax if it is installed and torch is not)",
    )
    add_device(parser)
    _add_model(parser.add_argument_group("model"))
    _add_training(parser.add_argument_group("training"))
    _add_execution(parser.add_argument_group("execution"))
    _add_run(parser.add_argument_group("run"))
    _add_devices(parser.add_argument_group("several devices"))


def _add_sized(group: argparse._ArgumentGroup, option: str, size: str, text: str) -> None:
    """Add an option whose default depends on the device."""
    group.add_argument(
        option,
        type=type(CPU_SIZES[size]),
        help=f"{text} (default: {CPU_SIZES[size]} on a CPU, {CUDA_SIZES[size]} on CUDA)",
    )


def _add_model(group: argparse._ArgumentGroup) -> None:
    _add_sized(group, "--layers", "layers", "Transformer layers")
    _add_sized(group, "--hidden", "hidden", "width, a multiple of 32 (128 suits block scaling)")
    _add_sized(group, "--heads", "heads", "attention heads")
    group.add_argument(
        "--experts",
        type=int,
        help="experts per layer, two of which compute each byte (default: 0, none)",
    )


def _add_training(group: argparse._ArgumentGroup) -> None:
    _add_sized(group, "--steps", "steps", "optimizer steps")
    _add_sized(group, "--batch", "batch", "sequences per step")
    _add_sized(group, "--seq", "sequence", "bytes per sequence, a multiple of 32")
    _add_sized(group, "--lr", "learning_rate", "peak learning rate")
    group.add_argument(
        "--seed", type=int, help="seed of weights and batches, -2^40 to 2^40 (default: 0)"
    )
    group.add_argument(
        "--data", help="text file or folder (default: this Python's standard library)"
    )
    add_choice(
        group,
        "--optimizer",
        OPTIMIZERS,
        "adamw: torch.optim.AdamW; fused_adam: te.optimizers.FusedAdam (default: adamw)",
    )


def _add_execution(group: argparse._ArgumentGroup) -> None:
    add_switch(
        group,
        "--graphs",
        "capture training steps in CUDA graphs (default: on CUDA, without experts)",
    )
    group.add_argument(
        "--offload-layers",
        type=int,
        default=0,
        help="layers whose activations are offloaded to host memory until the backward pass (default: 0)",
    )
    add_flag(
        group,
        "--observe",
        "report underflow, saturation and error of every tensor, every tenth step",
    )


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--name", help="name of the run and of its folder (default: the name of the recipe)"
    )
    group.add_argument(
        "--out", type=Path, default=Path("runs"), help="folder of the runs (default: runs)"
    )
    add_flag(
        group, "--resume", "continue from the checkpoint of the run; --steps extends a finished run"
    )
    add_flag(group, "--overwrite", "start again and replace the checkpoint of the run")
    group.add_argument(
        "--log-every",
        type=int,
        help="steps per line of progress if the output is not a terminal (default: steps / 20)",
    )
    add_flag(group, "--tensorboard", "write losses for TensorBoard to OUT/NAME/tensorboard")


def _add_devices(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--devices",
        type=minimum_converter(1),
        help="number of GPUs, or of CPU processes, to train on",
    )
    add_flag(group, "--distributed", "train on the processes that torchrun has started")
    for option, text in (
        ("--tp", "ranks that shard the weights of each layer"),
        ("--cp", "ranks that shard each sequence"),
        ("--fsdp", "ranks that shard parameters and optimizer states"),
    ):
        group.add_argument(
            option, type=minimum_converter(1), default=1, help=f"{text} (default: 1)"
        )


def run(args: argparse.Namespace) -> None:
    """Train a byte-level GPT under a recipe and in high precision, side by side, and compare the losses."""
    console = Console(highlight=False)
    options: dict[str, Any] = {
        "recipe": args.recipe,
        "steps": args.steps,
        "batch": args.batch,
        "sequence": args.seq,
        "layers": args.layers,
        "hidden": args.hidden,
        "heads": args.heads,
        "experts": args.experts,
        "learning_rate": args.lr,
        "seed": args.seed,
        "data": args.data,
        "optimizer": args.optimizer,
        "framework": args.framework,
    }
    execution = Execution(
        graphs=args.graphs, offload_layers=args.offload_layers, observe=args.observe
    )
    suffix = "-jax" if (options["framework"] or default_framework()) == "jax" else ""
    folder = args.out / (args.name or (options["recipe"] or "delayed") + suffix)
    with reporting(console), fitting(SMALLER):
        if args.name and (args.name in (".", "..") or "/" in args.name or "\\" in args.name):
            raise ValueError(
                f"--name {args.name!r} is a path; pass a name without separators, and the parent folder as --out"
            )
        if args.log_every is not None and args.log_every < 1:
            raise ValueError(
                f"--log-every {args.log_every} is below 1; give a positive number of steps"
            )
        if args.tensorboard:
            check_tensorboard()
        # torchrun starts the same command again after the failure of a rank.
        if args.distributed and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            args.resume, args.overwrite = (folder / "checkpoints").exists(), False
        _check_replacing(folder, args.resume, args.overwrite)
        if args.devices is not None or args.distributed:
            # Several devices need torch, which `te train --framework jax` does without.
            _demand("torch")
            from .train_devices import TrainRequest, train_on_devices

            switches = (args.resume, args.overwrite, args.log_every, args.tensorboard)
            request = TrainRequest(
                args.device, options, execution, folder, *switches, args.tp, args.cp, args.fsdp
            )
            train_on_devices(request, args.devices, args.distributed)
            return
        if max(args.tp, args.cp, args.fsdp) > 1:
            raise ValueError(
                "--tp, --cp and --fsdp need several devices; add --devices or --distributed"
            )
        trainer = _prepare(folder, args.device, options, execution, args.resume)
    describe(console, trainer)
    with _interrupts(console) as stopping, reporting_failures(console), fitting(SMALLER):
        finished = train_with_progress(
            console, trainer, lambda: bool(stopping), args.log_every, args.tensorboard
        )
    if not finished:
        console.print(
            f"stopped after step {trainer.step} of {trainer.config.steps}; the checkpoint is saved.\n"
            f"Continue with: {program()} train --resume --name {escape(folder.name)} --out {escape(str(args.out))}",
            soft_wrap=True,
        )
        raise SystemExit(130)
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


def _prepare(
    folder: Path, device: str, options: dict[str, Any], execution: Execution, resume: bool
) -> Trainer:
    """Prepare a trainer at its first step, or at the step in the folder's checkpoint."""
    from .demo.data import load_corpus
    from .demo.trainer import Trainer, framework_runs

    if not resume:
        _demand(options["framework"] or default_framework())  # before its devices are queried
        config = resolve(device, options)
        trainer = Trainer(config, load_corpus(config.data, config.sequence), folder, execution)
        with writing(folder, ELSEWHERE):
            folder.mkdir(parents=True, exist_ok=True)
            trainer.metrics_path.unlink(missing_ok=True)
            trainer.observation_path.unlink(missing_ok=True)
        return trainer
    path = folder / "checkpoint"
    if path.with_name("checkpoints").is_dir():
        raise ValueError(
            f"{folder} is a run of several devices; continue it with the same --devices, --tp, --cp and --fsdp"
        )
    # A torch checkpoint is a file, a JAX checkpoint a folder, possibly not yet renamed.
    if path.is_file():
        framework = "torch"
    elif path.is_dir() or path.with_name("checkpoint.old").is_dir():
        framework = "jax"
    else:
        framework = options["framework"] or default_framework()
    _demand(framework)
    state = framework_runs(framework).load(path)
    config = restore(state["config"], device, options, str(path), state["step"])
    trainer = Trainer(config, load_corpus(config.data, config.sequence), folder, execution)
    trainer.load(state)
    return trainer


def _demand(framework: str) -> None:
    """Exit with an error unless everything that a run in the framework needs is installed."""
    missing = missing_libraries(framework)
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
    from .demo.plot import plot_losses

    with writing(
        folder / "loss.png", f"free some space there; {program()} train --resume draws it again"
    ):
        plot_losses(folder / "loss.png", config, trainer.history)
    console.print(results_table(trainer))
    _show_observed(console, trainer)
    prompt = bytes(trainer.corpus.validation[: min(32, config.sequence // 2)].tolist())
    run = trainer.runs[config.runs[0]]
    text = run.sample(prompt, config.sequence - len(prompt))
    console.print(
        f"sample of the {config.label(config.runs[0])} model, after {len(prompt)} bytes of prompt:"
    )
    console.print(
        f"[bold]{escape(printable(prompt))}[/bold]{escape(printable(text))}", soft_wrap=True
    )
    console.print(
        f"wrote {escape(str(folder))}/{{loss.png,metrics.jsonl,checkpoint}}", soft_wrap=True
    )


def _show_observed(console: Console, trainer: Trainer) -> None:
    """Show the quantization statistics in the last observed step, and a plot with all observed steps."""
    observation = trainer.observation
    if observation is None or observation.report is None:
        return
    observation.close()
    console.print(observation.table())
    path = trainer.folder / "observed.png"
    with writing(path, "free some space there"):
        observation.plot(path)
    console.print(
        f"wrote {escape(str(trainer.observation_path))} and {escape(str(path))}", soft_wrap=True
    )
