"""`te convert`: another library's checkpoint as a TransformerLayer stack, or such a stack as their checkpoint."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from transformer_engine.common import optional
from transformer_engine.common.formats import SERVING_FORMATS

from .failure import Failure, reporting, writing
from .options import add_choice

DTYPES = ("float32", "bfloat16", "float16")
GIGABYTE = 1_000_000_000
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # owner/name
# Settings, weights and tokenizers.
DOWNLOADED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument(
        "source", help="folder of a checkpoint, or its id on the Hugging Face hub (owner/name)"
    )
    parser.add_argument("folder", type=Path, help="folder to create; it must not exist")
    add_choice(parser, "--dtype", DTYPES, "dtype of all tensors (default: unchanged)")
    parser.add_argument(
        "--quantize",
        metavar="|".join(SERVING_FORMATS),
        help="write a quantized Hugging Face checkpoint for servers (default: unquantized)",
    )
    parser.add_argument(
        "--shard-size",
        type=float,
        default=5.0,
        help="maximum gigabytes per file of weights (default: 5)",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a checkpoint on the hub")


def run(args: argparse.Namespace) -> None:
    """Convert a Hugging Face checkpoint to TransformerLayer stacks, or back."""
    console = Console(highlight=False)
    with (
        reporting(console),
        writing(args.folder, "free some space there, or choose another folder"),
    ):
        if not 0 < args.shard_size < float("inf"):
            raise ValueError(
                f"--shard-size {args.shard_size:g} is not a positive number; give gigabytes, for example 5"
            )
        import torch

        from transformer_engine.pytorch import conversion

        try:
            checkpoint = conversion.convert(
                local_folder(args.source, args.revision),
                args.folder,
                None if args.dtype is None else getattr(torch, args.dtype),
                max(1, int(args.shard_size * GIGABYTE)),
                args.quantize,
            )
        except ImportError as error:
            raise Failure(str(error)) from error
    matches, family = checkpoint.correspondence.matches, checkpoint.correspondence.family.model_type
    original_count = sum(len(match.theirs) for match in matches)
    read, written = (
        (len(matches), original_count) if checkpoint.ours else (original_count, len(matches))
    )
    parameters = sum(math.prod(match.shape) for match in matches)
    kind = f"{family} of Hugging Face" if checkpoint.ours else "TransformerLayer stack"
    counted = f"{read} tensors made {written}"
    if args.quantize is not None:
        kind, counted = (
            f"{family} of Hugging Face",
            f"{read} tensors read, quantized to {args.quantize}",
        )
    console.print(
        f"{family}: {parameters:,} parameters, {counted}\nwrote {escape(str(args.folder))}, a {kind}",
        soft_wrap=True,
    )


def local_folder(source: str, revision: str | None = None) -> Path:
    """Find the folder of a checkpoint, which is downloaded if `source` is an id on the Hugging Face hub.

    Raises:
        ValueError: source is an id, but huggingface_hub is not installed; or revision is given for a folder.
        Failure: The hub has no such checkpoint, or it cannot be reached.
    """
    folder = Path(source)
    if folder.exists() or not HUB_ID.fullmatch(source):
        if revision is not None:
            raise ValueError(
                f"--revision {revision} is for ids on the hub, and {source} is a folder; leave it out"
            )
        return folder
    if not optional.installed("huggingface_hub"):
        raise ValueError(
            f"there is no folder {source}; to download it as an id of the Hugging Face hub, "
            "pip install huggingface_hub"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                source, revision=revision, allow_patterns=list(DOWNLOADED), ignore_patterns=["*/*"]
            )
        )
    except OSError as error:  # also the base class of the hub's errors
        line = str(error).strip().partition("\n")[0]
        raise Failure(
            f"there is no folder {source}, and downloading it from the Hugging Face hub failed: {line}; "
            "check the id and the connection, log in with `hf auth login` if access is restricted, or give a folder"
        ) from error
