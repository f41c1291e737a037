"""`te generate`: text drawn from a model that `te train` has trained, byte by byte, with a paged KV cache."""

from __future__ import annotations

import codecs
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from .demo import checkpoint
from .demo.config import HIGH_PRECISION, RunConfig, saved_config
from .demo.data import printable
from .demo.model import ByteGPT
from .demo.sample import generate as draw
from .failure import fitting, reporting
from .train import DeviceName

# Bytes drawn before the clock starts: the prompt's step and the first single-byte step compile and warm up.
WARM_UP = 2


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue")] = "def ",
    count: Annotated[
        int | None, typer.Option(help="Bytes to generate (default: up to the sequence length of the model)")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the run that te train saved")] = "delayed",
    out: Annotated[Path, typer.Option(help="Folder of the runs")] = Path("runs"),
    high_precision: Annotated[
        bool, typer.Option("--high-precision", help="Use the high-precision model of the run")
    ] = False,
    temperature: Annotated[
        float,
        typer.Option(help="0: always the most likely byte; 1: sample from the probabilities of the model"),
    ] = 0.7,
    seed: Annotated[int, typer.Option(help="Seed of the sampling")] = 0,
    cache: Annotated[
        bool,
        typer.Option("--cache/--no-cache", help="Cache keys and values, or recompute them for every byte"),
    ] = True,
    page_size: Annotated[int, typer.Option(help="Bytes per page of the cache; 0: a contiguous cache")] = 16,
    device: Annotated[
        DeviceName, typer.Option(help="auto: CUDA, or the CPU without a GPU")
    ] = DeviceName.auto,
) -> None:
    """Generate text with a model that te train has trained, and report the tokens (bytes) per second."""
    console = Console(highlight=False)
    with reporting(console), fitting("use --device cpu, or free the GPU"):
        if page_size < 0:
            raise ValueError(f"page_size={page_size} is below 0; give a positive number, or 0 for no pages")
        model, config = load(out / name / "checkpoint", device.value, high_precision)
        start = prompt.encode(errors="surrogateescape")
        shown = _Shown(console, start)
        drawn = draw(
            model,
            config,
            start,
            max(1, config.sequence - len(start)) if count is None else count,
            temperature=temperature,
            seed=seed,
            cached=cache,
            page_size=page_size or None,
            observe=shown,
        )
    kind = "no cache" if not cache else f"KV cache in pages of {page_size}" if page_size else "KV cache"
    console.print(f"\n{len(drawn)} bytes on {config.device}, {kind}{shown.speed()}", soft_wrap=True)


class _Shown:
    """Prints the prompt and then bytes as text while they come, and takes the time of each.

    The prompt is printed with the first byte, so that invalid options print no incomplete line.
    """

    def __init__(self, console: Console, prompt: bytes):
        self.console, self.prompt = console, prompt
        self.times: list[float] = []
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, byte: int) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) == 1:
            self.console.print(f"[bold]{escape(printable(self.prompt))}[/bold]", end="", soft_wrap=True)
        text = self.decoder.decode(bytes([byte]))
        if text:
            self.console.print(escape(printable(text.encode())), end="", soft_wrap=True)

    def speed(self) -> str:
        """Return tokens per second after the first ones, or an empty text if too few were drawn."""
        timed = self.times[WARM_UP - 1 :]
        if len(timed) < 2:
            return ""
        return f", {(len(timed) - 1) / (timed[-1] - timed[0]):,.0f} tokens/s"


def load(path: Path, device: str, high_precision: bool) -> tuple[ByteGPT, RunConfig]:
    """Load the model of a checkpoint of te train on a device; raise ValueError without one."""
    if not path.is_file():
        raise ValueError(
            f"there is no checkpoint at {path}; write one with te train, or fix --name and --out"
        )
    state: dict[str, Any] = checkpoint.load(path)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    config = replace(saved_config({**state["config"], "device": "cpu"}, str(path)), device=device)
    run = HIGH_PRECISION if high_precision else config.runs[0]
    model = ByteGPT(config)
    saved = state["runs"].get(run)
    mismatch = (
        "it has no such run" if saved is None else checkpoint.misfit(saved["model"], model.state_dict())
    )
    if mismatch is not None:
        raise ValueError(
            f"{path} does not fit the model of the run {run}: {mismatch}; train it again with te train"
        )
    model.load_state_dict(state["runs"][run]["model"])
    return model, config
