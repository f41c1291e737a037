"""`te verify`: a parallel, quantized model of a Python file against the same model on one device in float32."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from ..pytorch.inspect.verification import verify as compare
from .demo.config import make_recipe
from .failure import FAILED, reporting
from .train import DeviceName, RecipeName

REQUIRED = ("model_fn", "batch")
OPTIONAL = ("loss_fn", "shard_fn", "reduce_fn")


def verify(
    file: Annotated[Path, typer.Argument(help="Python file with the functions model_fn(mesh) and batch()")],
    recipe: Annotated[
        RecipeName | None,  # pyright: ignore[reportInvalidTypeForm]
        typer.Option(help="Recipe that quantizes the matrix products (default: none)"),
    ] = None,
    dp: Annotated[int, typer.Option(help="Data-parallel ranks", min=1)] = 1,
    fsdp: Annotated[int, typer.Option(help="Ranks that shard parameters with fully_shard", min=1)] = 1,
    cp: Annotated[int, typer.Option(help="Context-parallel ranks", min=1)] = 1,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks", min=1)] = 1,
    sequence_parallel: Annotated[
        bool,
        typer.Option("--sequence-parallel", help="Inputs and outputs are sharded along the tokens over tp"),
    ] = False,
    device: Annotated[
        DeviceName, typer.Option(help="auto: CUDA, or the CPU without a GPU")
    ] = DeviceName.auto,
) -> None:
    """Compare a parallel, quantized model of a Python file with the same model on one device in float32."""
    console = Console(highlight=False)
    sizes = {"dp": dp, "fsdp": fsdp, "cp": cp, "tp": tp}
    with reporting(console):
        if not file.is_file():
            raise ValueError(
                f"{file} does not exist; pass a Python file that defines {' and '.join(REQUIRED)}"
            )
        functions = runpy.run_path(str(file), run_name="te_verify")
        missing = [name for name in REQUIRED if not callable(functions.get(name))]
        if missing:
            raise ValueError(
                f"{file} does not define {' and '.join(missing)}; docs/verify.md shows such a file"
            )
        mesh = _mesh({name: size for name, size in sizes.items() if size > 1}, device.value)
        try:
            verification = compare(
                functions["model_fn"],
                functions["batch"](),
                mesh=mesh,
                recipe=None if recipe is None else make_recipe(recipe.value),
                sequence_parallel=sequence_parallel,
                **{name: functions[name] for name in OPTIONAL if name in functions},
            )
            if mesh is None or dist.get_rank() == 0:
                console.print(verification.table())
                console.print(verification.summary(), soft_wrap=True)
        finally:
            if mesh is not None:
                dist.destroy_process_group()
    if not verification.equal:
        raise typer.Exit(FAILED)


def _mesh(sizes: dict[str, int], device: str) -> Any:
    """Return the mesh of all processes, or None for one process; ValueError if their numbers differ."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks, processes = 1, int(os.environ.get("WORLD_SIZE", "1"))
    for size in sizes.values():
        ranks *= size
    if ranks != processes:
        raise ValueError(
            f"the mesh {sizes} has {ranks} ranks and there are {processes} processes; run torchrun --nproc-per-node "
            f"{ranks} -m transformer_engine verify ..."
        )
    if ranks == 1:
        return None
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return dist.init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
