"""`te bench`: measure the engine, plain PyTorch and other libraries, or compare two figure files."""

from __future__ import annotations

import argparse
from pathlib import Path

from transformer_engine.common.planning import FORMATS

from ..options import add_flag

# Table names; the tables import the frameworks.
RECIPES = ("bf16", *(name for name in FORMATS if name != "none"))
PROVIDERS = ("te", "torch", "torch.compile", "torchao", "liger", "quack", "jax", "xla")
FAMILIES = (
    "quantize",
    "norm",
    "linear",
    "dense",
    "layernorm_linear",
    "layernorm_mlp",
    "grouped_linear",
    "ops",
    "attention",
    "layer",
    "layer_small",
    "layer_graphed",
    "layer_recomputed",
    "layer_observed",
    "offload",
    "rope",
    "permute",
    "padding",
    "router",
    "cross_entropy",
    "linear_cross_entropy",
    "adam",
    "sgd",
    "kernel",
)
RANKS_FAMILIES = (
    "collective",
    "attention_cp",
    "layer_tp",
    "layer_sp",
    "layer_ub",
    "layer_cp",
    "layers_fsdp",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument(
        "--family",
        action="append",
        metavar="NAME",
        help=f"one of {', '.join(FAMILIES)}; with --distributed one of {', '.join(RANKS_FAMILIES)}; repeatable",
    )
    parser.add_argument(
        "--recipe",
        action="append",
        metavar="NAME",
        help=f"one of {', '.join(RECIPES)}; bf16, or none, is bfloat16 without a recipe; repeatable",
    )
    parser.add_argument(
        "--only",
        default="",
        help="only cases whose name contains one of these comma-separated texts",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write machine, command and figures to this file"
    )
    parser.add_argument(
        "--plot-dir", type=Path, metavar="FOLDER", help="write one plot per family to this folder"
    )
    add_flag(parser, "--quick", "small sizes and few repetitions")
    parser.add_argument(
        "--provider",
        action="append",
        metavar="NAME",
        help=f"one of {', '.join(PROVIDERS)}; repeatable",
    )
    parser.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar="FILE",
        help="compare two files of figures, without measuring: print second / first",
    )
    add_flag(
        parser, "--distributed", "time collectives, and layers on several ranks against one device"
    )
    parser.add_argument(
        "--devices",
        type=int,
        help="ranks of --distributed, unless torchrun starts them (default: all GPUs, 2 on a CPU)",
    )


def run(args: argparse.Namespace) -> None:
    """Time the engine, plain PyTorch and other libraries on this machine; or compare two figure files."""
    from .measurement import BenchRequest, measure

    measure(
        BenchRequest(args.family or [], args.recipe, args.only, args.provider, args.quick),
        json=args.json,
        plot_dir=args.plot_dir,
        compare=args.compare,
        distributed=args.distributed,
        devices=args.devices,
    )
