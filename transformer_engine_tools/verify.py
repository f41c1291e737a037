"""`te verify`: a parallel, quantized model against one device in float32, or the casts of this machine."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from transformer_engine.common.documentation import page

from .demo.config import RECIPES, make_recipe
from .failure import FAILED, reporting
from .options import add_choice, add_device, add_flag, minimum_converter, torch_device

REQUIRED = ("model_fn", "batch")
OPTIONAL = ("loss_fn", "shard_fn", "reduce_fn")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        help="Python file with the functions model_fn(mesh) and batch()",
    )
    add_flag(
        parser,
        "--casts",
        "compare the casts of this machine with their definition, instead of a model",
    )
    add_flag(parser, "--complete", "with --casts: all float32 numbers instead of a sample")
    parser.add_argument("--json", type=Path, help="with --casts: file for the comparisons as JSON")
    add_choice(
        parser, "--recipe", RECIPES, "recipe that quantizes the matrix products (default: none)"
    )
    for option, text in (
        ("--dp", "data-parallel ranks"),
        ("--fsdp", "ranks that shard parameters with fully_shard"),
        ("--cp", "context-parallel ranks"),
        ("--tp", "tensor-parallel ranks"),
    ):
        parser.add_argument(
            option, type=minimum_converter(1), default=1, help=f"{text} (default: 1)"
        )
    add_flag(
        parser, "--sequence-parallel", "inputs and outputs are sharded along the tokens over tp"
    )
    add_device(parser)


def run(args: argparse.Namespace) -> None:
    """Compare a parallel, quantized model in a Python file with the same model on one device in float32."""
    if args.casts:
        _verify_casts(args)
        return
    console = Console(highlight=False)
    sizes = {"dp": args.dp, "fsdp": args.fsdp, "cp": args.cp, "tp": args.tp}
    with reporting(console):
        if args.file is None:
            raise ValueError(
                f"no file was given; pass a Python file ({page('verify')} shows one) or --casts"
            )
        if not args.file.is_file():
            raise ValueError(
                f"{args.file} does not exist; pass a Python file that defines {' and '.join(REQUIRED)}"
            )
        functions = runpy.run_path(str(args.file), run_name="te_verify")
        missing = [name for name in REQUIRED if not callable(functions.get(name))]
        if missing:
            raise ValueError(
                f"{args.file} does not define {' and '.join(missing)}; {page('verify')} shows such a file"
            )
        import torch.distributed as dist

        from transformer_engine.pytorch.inspect.verification import verify as compare

        mesh = _mesh(
            {name: size for name, size in sizes.items() if size > 1}, torch_device(args.device).type
        )
        try:
            verification = compare(
                functions["model_fn"],
                functions["batch"](),
                mesh=mesh,
                recipe=None if args.recipe is None else make_recipe(args.recipe),
                sequence_parallel=args.sequence_parallel,
                **{name: functions[name] for name in OPTIONAL if name in functions},
            )
            if mesh is None or dist.get_rank() == 0:
                console.print(verification.table())
                console.print(verification.summary(), soft_wrap=True)
        finally:
            if mesh is not None:
                dist.destroy_process_group()
    if not verification.equal:
        raise SystemExit(FAILED)


def _verify_casts(args: argparse.Namespace) -> None:
    """Print the comparisons for all casts; exit code 1 if a byte differs."""
    from transformer_engine.pytorch.inspect.cast_verification import verify_casts

    verification = verify_casts(
        args.complete,
        torch_device(args.device),
        progress=lambda result: print(
            f"{result.seconds:6.1f} s  {result.line()}", file=sys.stderr, flush=True
        ),
    )
    print(verification.report())
    if args.json is not None:
        args.json.write_text(json.dumps(verification.as_dict(), indent=1) + "\n", encoding="utf-8")
    if not verification.equal:
        raise SystemExit(FAILED)


def _mesh(sizes: dict[str, int], device: str) -> Any:
    """Build the mesh over all processes, or None for one process; ValueError if their numbers differ."""
    import torch
    import torch.distributed as dist

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
