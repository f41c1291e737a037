"""`te plan`: time and memory of a training step on many devices, predicted by a simulator; no device is needed."""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from transformer_engine.common.planning import FORMATS, GPUS, MODELS, TrainingPlan, search
from transformer_engine.common.planning import plan as predicted
from transformer_engine.common.planning.hardware import GIB, OWN_RATES, gpu_named, host_links
from transformer_engine.common.planning.layer import Scheme
from transformer_engine.common.planning.training import Recompute

from .failure import FAILED, reporting
from .options import add_flag, minimum_converter

# Options without a default: if one is omitted, the model's or the planner's value applies.
_AXES = ("dp", "fsdp", "tp", "cp", "pp", "ep", "micro_batch", "global_batch")
_SIZES = (
    "hidden",
    "layers",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn",
    "vocabulary",
    "experts",
    "experts_per_token",
)
_LINKS = ("devices_per_host", "network")
OPTIONAL = (*_AXES, "recompute", *_SIZES)
# Argument names that messages replace by option names. No message contains `model`, `links` or `sizes`.
_NAMED = (
    *(inspect.signature(predicted).parameters.keys() - {"model", "links", "sizes"}),
    *_SIZES,
    *_LINKS,
)
_ARGUMENT = re.compile(rf"(?<![\w-])({'|'.join(sorted(_NAMED))})(?![\w-])(=\w[^\s,;()]*|='[^']*')?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--devices", type=int, required=True, help="number of GPUs")
    parser.add_argument(
        "--model",
        help=f"{', '.join(MODELS)}; the path of a Hugging Face config.json; or any name with --hidden, --layers and "
        "--heads (default: custom, with sizes)",
    )
    _add_named(parser, "--gpu", GPUS, "GPU of every device", "h100")
    _add_named(parser, "--recipe", FORMATS, "recipe of the matrix products; none: bfloat16", "none")
    parser.add_argument("--seq", type=int, default=8192, help="tokens per sequence (default: 8192)")
    parser.add_argument("--micro-batch", type=int, help="sequences per micro-batch")
    parser.add_argument("--global-batch", type=int, help="sequences per step, over all devices")
    _add_named(
        parser,
        "--recompute",
        get_args(Recompute),
        "full: repeat the forward pass of each layer in the backward pass (default: none)",
    )
    _add_named(parser, "--attention", ("cudnn", "flash4"), "backend of attention", "cudnn")
    add_flag(parser, "--graphs", "CUDA graphs: the host never delays the GPU")
    add_flag(parser, "--json", "print the figures as JSON for programs")
    _add_mesh(parser.add_argument_group("mesh"))
    _add_sizes(parser.add_argument_group("sizes of the model (default: as --model has them)"))


def _add_named(
    parser: argparse._ActionsContainer,
    option: str,
    names: Iterable[str],
    text: str,
    default: str | None = None,
) -> None:
    """Add an option for one of `names`; the planner rejects other values with its own message."""
    text = text if default is None else f"{text} (default: {default})"
    parser.add_argument(option, default=default, metavar="|".join(names), help=text)


def _add_mesh(group: argparse._ArgumentGroup) -> None:
    """Declare the options of the mesh: rank counts per axis, hosts and network."""
    for option, text in (
        ("--dp", "replicas (default: devices / (fsdp * tp * cp * pp))"),
        ("--fsdp", "ranks that shard parameters, together with the cp ranks"),
        ("--tp", "tensor-parallel ranks, with sequence parallelism"),
        ("--cp", "context-parallel ranks"),
        ("--pp", "pipeline stages"),
        ("--ep", "ranks that shard experts; divides dp * fsdp * cp"),
    ):
        group.add_argument(option, type=int, help=text)
    _add_named(group, "--scheme", get_args(Scheme), "exchange of keys and values", "p2p")
    group.add_argument(
        "--devices-per-host",
        type=int,
        default=8,
        help="GPUs per host, connected by NVLink (default: 8)",
    )
    group.add_argument(
        "--network",
        type=float,
        default=45.0,
        help="bandwidth of each GPU to other hosts in GB/s (default: 45)",
    )
    add_flag(group, "--search", "find the fastest mesh that fits; axes with a value are fixed")
    group.add_argument(
        "--count",
        type=minimum_converter(1),
        default=5,
        help="number of plans of a search (default: 5)",
    )


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    for option, text in (
        ("--hidden", "hidden size"),
        ("--layers", "number of layers"),
        ("--heads", "number of query heads"),
        ("--kv-heads", "number of key and value heads"),
        ("--head-dim", "size of a head"),
        ("--ffn", "hidden size of the MLP or of one expert"),
        ("--vocabulary", "size of the vocabulary"),
        ("--experts", "number of experts per layer"),
        ("--experts-per-token", "experts that process each token"),
    ):
        group.add_argument(option, type=int, help=text)


def run(args: argparse.Namespace) -> None:
    """Predict time and memory of a training step on many devices, or find the fastest mesh that fits.

    The exit code is 1 if the step does not fit into the memory of a GPU.
    """
    settings = vars(args)
    options: dict[str, Any] = {
        name: settings[name] for name in OPTIONAL if settings[name] is not None
    }
    console = Console(highlight=False)
    with reporting(console, _in_options):
        options |= {
            "gpu": args.gpu,
            "recipe": args.recipe,
            "sequence": args.seq,
            "scheme": args.scheme,
            "attention": args.attention,
            "graphs": args.graphs,
            "links": host_links(
                gpu_named(args.gpu),
                devices_per_host=args.devices_per_host,
                network=1e6 * args.network,
            ),
        }
        model = _custom_model(options) if args.model is None else args.model
        if args.search:
            plans = search(model, args.devices, count=args.count, **options)
        else:
            plans = [predicted(model, args.devices, **options)]
    if args.json:
        data = [candidate.as_dict() for candidate in plans]
        print(json.dumps(data if args.search else data[0], indent=2))
    else:
        if args.search:
            console.print(_ranking(plans))
        best = replace(plans[0], warnings=tuple(_in_options(text) for text in plans[0].warnings))
        console.print(str(best), soft_wrap=True)
    if not plans[0].fits:
        raise SystemExit(FAILED)


def _custom_model(options: Mapping[str, Any]) -> str:
    """Name of a model that the options describe by sizes alone."""
    if {"hidden", "layers", "heads"} <= options.keys():
        return "custom"
    raise ValueError(
        f"no model; give --model, one of {', '.join(MODELS)}, or hidden, layers and heads"
    )


def _in_options(message: str) -> str:
    """Replace the arguments of `te.plan` in a message by the options of the command: tp=3 by --tp 3."""

    def option(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        if value is None and name not in _AXES and "_" not in name:  # a word of the sentence
            return match[0]
        flag = "--seq" if name == "sequence" else f"--{name.replace('_', '-')}"
        return flag if value in (None, "=True") else f"{flag} {value[1:].strip(chr(39))}"

    message = message.replace(OWN_RATES, "").replace(
        "hidden, layers and heads", "--hidden, --layers and --heads"
    )
    return _ARGUMENT.sub(option, message)


def _ranking(plans: list[TrainingPlan]) -> Table:
    """Build the table of a search's plans, the fastest first."""
    table = Table(
        *("mesh", "batches", "recompute", "step ms", "tokens/s", "MFU", "GiB"),
        caption="MFU: model FLOP utilization, relative to the bfloat16 peak of all devices",
    )
    for candidate in plans:
        table.add_row(
            str(candidate.mesh),
            f"{candidate.micro_batches} x {candidate.micro_batch}",
            candidate.recompute,
            f"{candidate.step_ms:.1f}",
            f"{candidate.tokens_per_s:,.0f}",
            f"{candidate.utilization:.1%}",
            f"{candidate.memory.peak / GIB:.1f}",
        )
    return table
