"""`te convert`: a checkpoint of another library as one of TransformerLayer stacks, or the way back."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape

from ..pytorch import conversion
from .failure import reporting, writing

# The dtypes as typer lists them.
DtypeName = enum.Enum("DtypeName", {name: name for name in ("float32", "bfloat16", "float16")}, type=str)
GIGABYTE = 1_000_000_000


def convert(
    source: Annotated[Path, typer.Argument(help="Folder of a checkpoint: theirs or ours")],
    folder: Annotated[Path, typer.Argument(help="Folder to be made")],
    dtype: Annotated[
        DtypeName | None,  # pyright: ignore[reportInvalidTypeForm]
        typer.Option(help="Of all tensors (default: as they are)"),
    ] = None,
    shard_size: Annotated[float, typer.Option(help="The most gigabytes of a file of weights")] = 5.0,
) -> None:
    """Convert a Hugging Face checkpoint to TransformerLayer stacks, or back."""
    console = Console(highlight=False)
    with reporting(console), writing(folder, "free some space there, or choose another folder"):
        if not 0 < shard_size < float("inf"):
            raise ValueError(
                f"shard_size={shard_size} is not a positive number; give gigabytes, for example 5"
            )
        checkpoint = conversion.convert(
            source,
            folder,
            None if dtype is None else getattr(torch, dtype.value),
            max(1, int(shard_size * GIGABYTE)),
        )
    matches, family = checkpoint.correspondence.matches, checkpoint.correspondence.family.model_type
    theirs = sum(len(match.theirs) for match in matches)
    numbers = (len(matches), theirs) if checkpoint.ours else (theirs, len(matches))
    parameters = sum(torch.Size(match.shape).numel() for match in matches)
    kind = f"{family} of Hugging Face" if checkpoint.ours else "TransformerLayer stack"
    console.print(
        f"{family}: {parameters:,} parameters, {numbers[0]} tensors made {numbers[1]}\n"
        f"wrote {escape(str(folder))}, a {kind}",
        soft_wrap=True,
    )
