"""Combined parallelism, recipes, recomputation and graphs: all pairs of settings, with te.verify's findings.

`python -m tests.distributed.compositions` runs all of them and writes docs/compositions.json.
"""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import transformer_engine.pytorch as te
from tests.distributed.ranks import run_on_ranks
from tests.distributed.threaded_ranks import run_on_threads
from transformer_engine.common import recipe

FILE = Path(__file__).resolve().parents[2] / "docs" / "compositions.json"
HIDDEN, INNER, HEADS, TOKENS, BATCH, EXPERTS = 64, 128, 4, 64, 4, 2
RECIPES = {
    "none": lambda: None,
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=2),
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "nvfp4": lambda: recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
}


SWITCH, SIZES = (False, True), (1, 2)
# Values of each field of Composition, in order.
VALUES = (SIZES, SWITCH, SIZES, SIZES, SIZES, tuple(RECIPES), SWITCH, SWITCH)


@dataclass(frozen=True)
class Composition:
    """One way to train a layer; size one means that the ranks do not share this dimension.

    Experts are shared by data-parallel ranks. If both sizes are above one, these are the ranks of FSDP2.
    """

    tp: int
    sp: bool
    cp: int
    ep: int
    fsdp: int
    recipe: str
    recompute: bool
    graphs: bool

    @property
    def possible(self) -> bool:
        """Sequence parallelism is a part of tensor parallelism; at most four ranks run as processes.

        A graph never captures a call that a checkpoint will run again.
        """
        return (
            (self.tp > 1 or not self.sp)
            and self.ranks <= 4
            and not (self.recompute and self.graphs)
        )

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * max(self.ep, self.fsdp)

    @property
    def in_processes(self) -> bool:
        """Whether ranks must be processes: threads in one process share the delayed-scaling states."""
        return self.recipe == "delayed"

    def mesh(self, device: torch.device) -> Any:
        shape = (max(self.ep, self.fsdp), self.cp, self.tp)
        return init_device_mesh(device.type, shape, mesh_dim_names=(self.data, "cp", "tp"))

    @property
    def data(self) -> str:
        """The mesh dimension over which the batch is sharded."""
        return "fsdp" if self.fsdp > 1 or self.ep == 1 else "dp"


class Experts(nn.Module):
    """y = x + sum over all expert outputs, weighted by a router; each rank computes its own experts.

    All experts receive all tokens: routing is not continuous, and noise would change it. Each rank has all
    experts' parameters, so that `te.verify` averages gradients, which are 0 for other ranks' experts.
    """

    def __init__(self, device: torch.device, group: Any) -> None:
        super().__init__()
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False, device=device)
        options: dict[str, Any] = {"device": device, "params_dtype": torch.float32, "bias": False}
        self.experts = nn.ModuleList([te.Linear(HIDDEN, HIDDEN, **options) for _ in range(EXPERTS)])
        self.own = range(EXPERTS)
        if group is not None:
            count, rank = EXPERTS // self.ranks, dist.get_rank(group)
            self.own = range(rank * count, (rank + 1) * count)
            te.ep.ep_bootstrap(group, EXPERTS, TOKENS * BATCH, HIDDEN, EXPERTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, HIDDEN)
        weights = self.router(flat).softmax(dim=1)
        if self.ranks == 1:
            # `forward` instead of a call: a rank's experts see other tokens than on one device.
            parts = [
                expert.forward(flat) * weights[:, i, None] for i, expert in enumerate(self.experts)
            ]
            return x + torch.stack(parts).sum(0).view(x.shape)
        chosen = torch.arange(EXPERTS, device=x.device).expand(len(flat), -1).contiguous()
        buffer = te.ep.EpBuffer(EXPERTS, TOKENS * BATCH, HIDDEN, len(self.own))
        received, scales, counts = te.ep.ep_dispatch(buffer, flat, chosen, weights)
        rows = received.split(counts.tolist())
        outputs = [self.experts[i].forward(part) for i, part in zip(self.own, rows, strict=True)]
        # A zero gradient for other ranks' experts.
        idle = sum(
            expert.weight.sum() for i, expert in enumerate(self.experts) if i not in self.own
        )
        y = te.ep.ep_combine(
            buffer, torch.cat(outputs) * scales[:, None] + 0 * idle, num_local_tokens=len(flat)
        )
        return x + y.view(x.shape)


class Block(nn.Module):
    """A Transformer layer whose forward pass is computed again in the backward pass, if requested, and experts."""

    def __init__(self, row: Composition, device: torch.device, mesh: Any) -> None:
        super().__init__()
        self.recompute = row.recompute
        size = 1 if mesh is None else row.tp
        self.layer = te.TransformerLayer(
            HIDDEN,
            INNER,
            HEADS,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation="swiglu",
            self_attn_mask_type="causal",
            set_parallel_mode=size > 1,
            tp_group=None if mesh is None or size == 1 else mesh.get_group("tp"),
            tp_size=size,
            sequence_parallel=row.sp and size > 1,
            device=device,
            params_dtype=torch.float32,
        )
        if mesh is not None and row.cp > 1:
            ring = mesh.get_group("cp")
            self.layer.set_context_parallel_group(
                ring, dist.get_process_group_ranks(ring), None, "p2p"
            )
        if row.graphs:
            te.graphed(self.layer)
        self.experts = None
        if row.ep > 1:
            self.experts = Experts(device, None if mesh is None else mesh.get_group(row.data))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = te.checkpoint(self.layer, x) if self.recompute else self.layer(x)
        if self.experts is None:
            return y
        return te.checkpoint(self.experts, y) if self.recompute else self.experts(y)


def create_model(row: Composition, device: torch.device, mesh: Any) -> nn.Module:
    model = Block(row, device, mesh)
    shard = mesh.get_local_rank("tp") if mesh is not None else 0
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            seed = 100 * number + (shard if getattr(p, "tensor_model_parallel", False) else 0)
            initial = 0.15 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
            p.copy_(initial if p.dim() == 2 else p + initial.to(device))
    if mesh is not None and row.fsdp > 1:
        fully_shard(model, mesh=mesh["fsdp"])
    if model.experts is not None:
        for parameter in model.experts.parameters():  # `fully_shard` replaces parameters
            parameter.sequence_parallel = row.sp  # pyright: ignore[reportAttributeAccessIssue]
    return model


def pairwise() -> list[Composition]:
    """Select compositions greedily until every possible pair of settings occurs."""
    candidates = [
        row for value in itertools.product(*VALUES) if (row := Composition(*value)).possible
    ]
    uncovered = set(itertools.chain.from_iterable(map(pairs, candidates)))
    selected: list[Composition] = []
    while uncovered:
        best = max(candidates, key=lambda row: (len(pairs(row) & uncovered), -row.ranks))
        selected.append(best)
        uncovered -= pairs(best)
    return sorted(selected, key=lambda row: (row.in_processes, row.ranks, str(row)))


def pairs(row: Composition) -> set[tuple[tuple[str, Any], ...]]:
    """Pairs of settings in a composition."""
    return set(
        itertools.combinations([(field.name, getattr(row, field.name)) for field in fields(row)], 2)
    )


def verify_on_threads(row: Composition, device: torch.device) -> te.Verification:
    x = torch.randn(TOKENS, BATCH, HIDDEN, generator=torch.Generator().manual_seed(1))
    try:
        return te.verify(
            functools.partial(create_model, row, device),
            x.to(device),
            mesh=row.mesh(device),
            recipe=RECIPES[row.recipe](),
            sequence_parallel=row.sp,
        )
    finally:
        if row.ep > 1:
            te.ep.ep_finalize()


def verify_in_process(device: torch.device, row: Composition) -> str:
    with te.emulate():  # a GPU lacks some formats
        return _outcome(verify_on_threads(row, device))


def outcome(row: Composition) -> str:
    """Return "equal", or the first tensor that differs."""
    if row.in_processes and row.ranks > 1:
        with tempfile.TemporaryDirectory() as directory:
            run = functools.partial(verify_in_process, row=row)
            return run_on_ranks(run, row.ranks, Path(directory))[0]
    with te.emulate():
        return _outcome(
            run_on_threads(lambda rank: verify_on_threads(row, torch.device("cpu")), row.ranks)[0]
        )


def _outcome(report: te.Verification) -> str:
    return "equal" if report.first is None else f"differs: {report.first.name}"


def read_outcomes() -> list[dict[str, Any]]:
    return json.loads(FILE.read_text())["compositions"]


if __name__ == "__main__":
    rows: list[dict[str, Any]] = []
    for row in pairwise():
        rows.append(asdict(row) | {"ranks": row.ranks, "outcome": outcome(row)})
        print(rows[-1], flush=True)
    FILE.write_text(json.dumps({"compositions": rows}, indent=1) + "\n")
