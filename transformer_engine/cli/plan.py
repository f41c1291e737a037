"""`te plan`: time and memory of a training step on many devices, predicted by a simulator; no device is needed."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..common.planning import FORMATS, GPUS, MODELS, TrainingPlan, search
from ..common.planning import plan as predicted
from ..common.planning.hardware import GIB, gpu_named, links_of
from .failure import reporting

_OF_MODEL = " (default: that of --model)"


def plan(
    devices: Annotated[int, typer.Option(help="Number of GPUs")],
    model: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(MODELS)}; the path of a Hugging Face config.json; or any name with sizes"
        ),
    ] = "custom",
    gpu: Annotated[str, typer.Option(help=", ".join(GPUS))] = "h100",
    recipe: Annotated[
        str, typer.Option(help=f"Recipe of the matrix products: {', '.join(FORMATS)}; none is bf16")
    ] = "bf16",
    dp: Annotated[
        int | None, typer.Option(help="Replicas (default: devices / (fsdp * tp * cp * pp))")
    ] = None,
    fsdp: Annotated[
        int | None, typer.Option(help="Ranks that shard parameters, together with those of cp")
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks, with sequence parallelism")] = None,
    cp: Annotated[int | None, typer.Option(help="Context-parallel ranks")] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages")] = None,
    ep: Annotated[int | None, typer.Option(help="Ranks that shard experts; divides dp * fsdp * cp")] = None,
    sequence: Annotated[int, typer.Option("--seq", help="Tokens per sequence")] = 8192,
    micro_batch: Annotated[int | None, typer.Option(help="Sequences per micro-batch")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences per step, over all devices")] = None,
    recompute: Annotated[
        str | None,
        typer.Option(help="none, or full: repeat the forward pass of each layer in the backward pass"),
    ] = None,
    scheme: Annotated[str, typer.Option(help="Exchange of keys and values: p2p, all_gather, a2a")] = "p2p",
    attention: Annotated[str, typer.Option(help="Backend of attention: cudnn, flash4")] = "cudnn",
    graphs: Annotated[
        bool, typer.Option("--graphs", help="CUDA graphs: the host never delays the GPU")
    ] = False,
    hidden: Annotated[int | None, typer.Option(help="Hidden size" + _OF_MODEL)] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers" + _OF_MODEL)] = None,
    heads: Annotated[int | None, typer.Option(help="Number of query heads" + _OF_MODEL)] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Number of key and value heads" + _OF_MODEL)] = None,
    head_dim: Annotated[int | None, typer.Option(help="Size of a head" + _OF_MODEL)] = None,
    ffn: Annotated[
        int | None, typer.Option(help="Hidden size of the MLP or of one expert" + _OF_MODEL)
    ] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Size of the vocabulary" + _OF_MODEL)] = None,
    experts: Annotated[int | None, typer.Option(help="Number of experts per layer" + _OF_MODEL)] = None,
    experts_per_token: Annotated[
        int | None, typer.Option(help="Experts that process each token" + _OF_MODEL)
    ] = None,
    devices_per_host: Annotated[int, typer.Option(help="GPUs per host, connected by NVLink")] = 8,
    network: Annotated[float, typer.Option(help="Bandwidth of each GPU to other hosts in GB/s")] = 45.0,
    find: Annotated[
        bool, typer.Option("--search", help="Find the fastest mesh that fits; given axes are fixed")
    ] = False,
    count: Annotated[int, typer.Option(help="Number of plans of a search", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON for programs")] = False,
) -> None:
    """Predict time and memory of a training step on many devices, or find the fastest mesh that fits."""
    optional: dict[str, Any] = {
        "dp": dp,
        "fsdp": fsdp,
        "tp": tp,
        "cp": cp,
        "pp": pp,
        "ep": ep,
        "micro_batch": micro_batch,
        "global_batch": global_batch,
        "recompute": recompute,
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": ffn,
        "vocabulary": vocabulary,
        "experts": experts,
        "experts_per_token": experts_per_token,
    }
    options = {name: value for name, value in optional.items() if value is not None}
    console = Console(highlight=False)
    with reporting(console):
        options |= {
            "gpu": gpu,
            "recipe": recipe,
            "sequence": sequence,
            "scheme": scheme,
            "attention": attention,
            "graphs": graphs,
            "links": links_of(gpu_named(gpu), devices_per_host=devices_per_host, network=1e6 * network),
        }
        found = (
            search(model, devices, count=count, **options) if find else [predicted(model, devices, **options)]
        )
    if as_json:
        data = [each.as_dict() for each in found]
        typer.echo(json.dumps(data if find else data[0], indent=2))
        return
    if find:
        console.print(_ranking(found))
    console.print(str(found[0]), soft_wrap=True)


def _ranking(found: list[TrainingPlan]) -> Table:
    """Return the table of the plans of a search, the fastest first."""
    table = Table("mesh", "batches", "recompute", "step ms", "tokens/s", "MFU", "GiB")
    for each in found:
        table.add_row(
            str(each.mesh),
            f"{each.micro_batches} x {each.micro_batch}",
            each.recompute,
            f"{each.step_ms:.1f}",
            f"{each.tokens_per_s:,.0f}",
            f"{each.utilization:.1%}",
            f"{each.memory.peak / GIB:.1f}",
        )
    return table
