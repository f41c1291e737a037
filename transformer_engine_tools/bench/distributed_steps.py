"""Steps for `te bench --distributed`: one forward and backward pass, or one collective, on this rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from transformer_engine import pytorch as te
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding

from .distributed_cases import RanksCase
from .providers.engine import recipe_named, transformer_layer
from .workload import Workload

BF16 = torch.bfloat16
Step = Callable[[], object]


def build_step(case: RanksCase, group: Any, device: torch.device, graphed: bool = False) -> Step:
    """Build a case's step on this rank of a group, or on one device without communication if group is None.

    Args:
        case: The case.
        group: Process group, or None.
        device: Device of the step.
        graphed: Capture the passes of a tensor-parallel layer in CUDA graphs.
    """
    if graphed:
        return _tensor_parallel_layer(case, group, device, graphed)
    builders: dict[str, Callable[[RanksCase, Any, torch.device], Step]] = {
        "collective": _collective,
        "attention_cp": _attention,
        "layer_tp": _tensor_parallel_layer,
        "layer_sp": _tensor_parallel_layer,
        "layer_ub": _tensor_parallel_layer,
        "layer_cp": _context_parallel_layer,
        "layers_fsdp": _sharded,
    }
    return builders[case.family](case, group, device)


def _collective(case: RanksCase, group: Any, device: torch.device) -> Step:
    operation, ranks = case.arguments["operation"], dist.get_world_size(group)
    full = torch.zeros(case.arguments["size"] // BF16.itemsize, dtype=BF16, device=device)
    part, other = full.new_zeros(full.numel() // ranks), torch.empty_like(full)
    if operation == "all_gather":
        return lambda: dist.all_gather_into_tensor(full, part, group=group)
    if operation == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, full, group=group)
    if operation == "all_to_all":
        return lambda: dist.all_to_all_single(other, full, group=group)
    if operation == "all_reduce":
        return lambda: dist.all_reduce(full, group=group)
    rank = dist.get_rank(group)

    def ring() -> None:
        """Send to the next rank and receive from the previous one."""
        exchanges = [
            dist.P2POp(dist.isend, full, (rank + 1) % ranks, group),
            dist.P2POp(dist.irecv, other, (rank - 1) % ranks, group),
        ]
        for work in dist.batch_isend_irecv(exchanges):
            work.wait()

    return ring


def _precision(case: RanksCase, group: Any, **options: Any) -> Callable[[], te.autocast]:
    """Build the context of the recipe; delayed scaling reduces its maxima over the group, if there is one."""
    if case.recipe == "delayed" and group is None:
        options["reduce_amax"] = False
    recipe = recipe_named(case.recipe, **options)
    return functools.partial(
        te.autocast, enabled=recipe is not None, recipe=recipe, amax_reduction_group=group
    )


def _ranks(group: Any) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _share_sequence(module: Any, case: RanksCase, group: Any, device: torch.device) -> None:
    """Share a module's sequence among the ranks of a group."""
    stream = torch.cuda.Stream() if device.type == "cuda" else None
    scheme = case.arguments["scheme"]
    used = _two_levels(group) if scheme == "a2a+p2p" else group
    module.set_context_parallel_group(used, list(range(dist.get_world_size(group))), stream, scheme)


@functools.cache
def _two_levels(group: Any) -> list[Any]:
    """Create this rank's groups for a2a+p2p: a pair of neighbors, and the ranks with the same place in their pairs."""
    ranks, backend = dist.get_world_size(group), dist.get_backend(group)
    pairs, _ = dist.new_subgroups_by_enumeration(
        [[first, first + 1] for first in range(0, ranks, 2)], backend=backend
    )
    rings, _ = dist.new_subgroups_by_enumeration(
        [list(range(place, ranks, 2)) for place in range(2)], backend=backend
    )
    return [pairs, rings]


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=BF16)


def _attention(case: RanksCase, group: Any, device: torch.device) -> Step:
    a = case.arguments
    module = te.DotProductAttention(
        a["heads"],
        a["width"],
        num_gqa_groups=a["groups"],
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type="causal",
    )
    if group is not None:
        _share_sequence(module, case, group, device)
    tokens = a["sequence"] // _ranks(group)
    qkv = tuple(
        _random(device, 1, tokens, heads, a["width"])
        for heads in (a["heads"], a["groups"], a["groups"])
    )
    options = {} if case.recipe == "bf16" else {"fp8_dpa": True}
    return Workload(module, qkv, context=_precision(case, group, **options)).step(backward=True)


def _layer_step(
    module: torch.nn.Module,
    case: RanksCase,
    group: Any,
    tokens: int,
    device: torch.device,
    graphed: bool = False,
) -> Step:
    a = case.arguments
    angles = RotaryPositionEmbedding(a["hidden"] // a["heads"])(max_seq_len=a["sequence"]).to(
        device
    )
    x = _random(device, tokens, 1, a["hidden"])
    context = _precision(case, group)
    if graphed:
        te.make_graphed_callables(
            module,
            (x.clone().requires_grad_(),),
            sample_kwargs={"rotary_pos_emb": angles},
            enabled=case.recipe != "bf16",
            recipe=recipe_named(case.recipe),
            amax_reduction_group=group,
            clone_param_grads_on_return=False,
        )
    return Workload(module, (x,), {"rotary_pos_emb": angles}, context).step(backward=True)


def _tensor_parallel_layer(
    case: RanksCase, group: Any, device: torch.device, graphed: bool = False
) -> Step:
    """Build the step of a tensor-parallel layer: with sequence parallelism in layer_sp, with overlap in layer_ub."""
    sequence, overlap = case.family != "layer_tp", case.family == "layer_ub"
    options: dict[str, Any] = {}
    if group is not None:
        options = {
            "set_parallel_mode": True,
            "tp_group": group,
            "tp_size": _ranks(group),
            "sequence_parallel": sequence,
            "ub_tp_comm_overlap": overlap,
        }
        if overlap:
            te.destroy_ub()
            te.initialize_ub([case.arguments["sequence"], case.arguments["hidden"]], _ranks(group))
    module = transformer_layer(case.arguments, device, **options)
    tokens = case.arguments["sequence"] // (_ranks(group) if sequence else 1)
    return _layer_step(module, case, group, tokens, device, graphed)


def _context_parallel_layer(case: RanksCase, group: Any, device: torch.device) -> Step:
    module = transformer_layer(case.arguments, device)
    if group is not None:
        _share_sequence(module, case, group, device)
    return _layer_step(module, case, group, case.arguments["sequence"] // _ranks(group), device)


class Stack(torch.nn.Module):
    """y = layers(x), all with the same keyword arguments."""

    def __init__(self, layers: list[te.TransformerLayer]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: Tensor, **keywords: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, **keywords)
        return x


def _sharded(case: RanksCase, group: Any, device: torch.device) -> Step:
    """Build a step for layers whose parameters are sharded over the group."""
    a = case.arguments
    with te.quantized_model_init(enabled=a["quantized"], recipe=recipe_named(case.recipe)):
        module = Stack([transformer_layer(a, device) for _ in range(a["layers"])])
    if group is not None:
        # Importing FSDP takes as long as importing the rest of the package.
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(group, device.type)
        for layer in module.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    return _layer_step(module, case, group, a["sequence"], device)
