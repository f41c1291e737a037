"""`te generate`: text drawn from a model that `te train` has trained, byte by byte, with a paged KV cache."""

from __future__ import annotations

import argparse
import codecs
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from .demo.config import HIGH_PRECISION, RunConfig, read_saved_config
from .failure import fitting, reporting
from .options import add_device, add_flag, torch_device
from .progress import printable

if TYPE_CHECKING:
    from .demo.model import ByteGPT

# Bytes drawn before the clock starts: the prompt's step and the first single-byte step compile and warm up.
WARM_UP = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument(
        "prompt", nargs="?", default="def ", help="text to continue (default: %(default)r)"
    )
    parser.add_argument(
        "--count",
        type=int,
        help="bytes to generate (default: up to the sequence length of the model)",
    )
    parser.add_argument(
        "--name", default="delayed", help="name of the run that te train saved (default: delayed)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs"), help="folder of the runs (default: runs)"
    )
    add_flag(parser, "--high-precision", "use the high-precision model of the run")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        help="0: always the most likely byte; 1: sample from the probabilities of the model (default: 0.7)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument(
        "--cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="cache keys and values, or recompute them for every byte",
    )
    parser.add_argument(
        "--page-size",
        type=int,
        default=16,
        help="bytes per page of the cache; 0: a contiguous cache (default: 16)",
    )
    add_device(parser)


def run(args: argparse.Namespace) -> None:
    """Generate text with a model that te train has trained, and report the tokens (bytes) per second."""
    console = Console(highlight=False)
    with reporting(console), fitting("use --device cpu, or free the GPU"):
        if args.page_size < 0:
            raise ValueError(
                f"--page-size {args.page_size} is below 0; give a positive number, or 0 for no pages"
            )
        model, config = load(args.out / args.name / "checkpoint", args.device, args.high_precision)
        start = args.prompt.encode(errors="surrogateescape")
        display = _Shown(console, start)
        from .demo.sample import generate as draw

        drawn = draw(
            model,
            config,
            start,
            max(1, config.sequence - len(start)) if args.count is None else args.count,
            temperature=args.temperature,
            seed=args.seed,
            cached=args.cache,
            page_size=args.page_size or None,
            observe=display,
        )
    kind = (
        "no cache"
        if not args.cache
        else f"KV cache in pages of {args.page_size}"
        if args.page_size
        else "KV cache"
    )
    console.print(
        f"\n{len(drawn)} bytes on {config.device}, {kind}{display.speed()}", soft_wrap=True
    )


class _Shown:
    """Prints the prompt and then bytes as text while they come, and times each byte.

    The prompt is printed with the first byte, so that invalid options print no incomplete line.
    """

    def __init__(self, console: Console, prompt: bytes):
        self.console, self.prompt = console, prompt
        self.times: list[float] = []
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, byte: int) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) == 1:
            self.console.print(
                f"[bold]{escape(printable(self.prompt))}[/bold]", end="", soft_wrap=True
            )
        text = self.decoder.decode(bytes([byte]))
        if text:
            self.console.print(escape(printable(text.encode())), end="", soft_wrap=True)

    def speed(self) -> str:
        """Tokens per second after the first ones, or an empty text if too few were drawn."""
        timed = self.times[WARM_UP - 1 :]
        if len(timed) < 2:
            return ""
        return f", {(len(timed) - 1) / (timed[-1] - timed[0]):,.0f} tokens/s"


def load(path: Path, device: str, high_precision: bool) -> tuple[ByteGPT, RunConfig]:
    """Load the model from a te train checkpoint on a device; raise ValueError without one."""
    if not path.is_file():
        raise ValueError(
            f"there is no checkpoint at {path}; write one with te train, or fix --name and --out"
        )
    from .demo import checkpoint
    from .demo.model import ByteGPT

    device_type = torch_device(device).type
    state: dict[str, Any] = checkpoint.load(path)
    config = replace(
        read_saved_config({**state["config"], "device": "cpu"}, str(path)), device=device_type
    )
    run = HIGH_PRECISION if high_precision else config.runs[0]
    model = ByteGPT(config)
    saved = state["runs"].get(run)
    mismatch = (
        "it has no such run"
        if saved is None
        else checkpoint.misfit(saved["model"], model.state_dict())
    )
    if mismatch is not None:
        raise ValueError(
            f"{path} does not fit the model of the run {run}: {mismatch}; train it again with te train"
        )
    model.load_state_dict(state["runs"][run]["model"])
    return model, config
