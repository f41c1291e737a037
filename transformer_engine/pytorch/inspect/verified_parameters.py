"""Parameters and gradients of a parallel model: gathered values, copies to the one-device model, and averages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..distributed.collectives import gather_along_first_dim, rank, world_size
from ..distributed.faults import transport_device
from ..module import LayerNorm, LayerNormMLP, RMSNorm
from ..primitives.activation import ACTIVATIONS
from ..tensor.quantized_tensor import QuantizedTensor
from .verified_runs import original_name, unwrap_model
from .verified_shards import ROLES, RankPlace, gather_parts, shard_parts, sharded_dim

# Relative difference between one value in two dtypes: half a step in the narrower one, and in E4M3 for codes.
_ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_CODES = 2.0**-4
# Parameters of fused layers that are replicated over tensor-parallel ranks.
_REPLICATED = ("layer_norm_weight", "layer_norm_bias", "fc2_bias")


@dataclass(frozen=True)
class Difference:
    """Error of a tensor on this rank, and the errors that noise explains; see `TensorCheck`."""

    error: float
    allowance: float
    gain: float | None = None
    gain_allowance: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class NamedParameter:
    """A parameter with its name, module and the name within the module.

    Attributes:
        name: Qualified name in the model.
        module: Module that owns the parameter.
        attribute: Name within the module.
        value: The parameter.
    """

    name: str
    module: nn.Module
    attribute: str
    value: nn.Parameter

    @property
    def parts(self) -> tuple[int, ...]:
        """Sizes of its parts along dimension 0, each sharded separately."""
        module = self.module
        parameter = getattr(module, self.attribute)
        count = getattr(parameter, "partition_stride", 1)
        if count == 1 and isinstance(module, LayerNormMLP) and self.attribute.startswith("fc1_"):
            count = 2 if ACTIVATIONS[module.activation].gated else 1
        return (self.value.shape[0] // count,) * count


def model_parameters(model: nn.Module) -> dict[str, NamedParameter]:
    """Return {name: parameter} of a model, with names that lack wrapper prefixes."""
    parameters: dict[str, NamedParameter] = {}
    for prefix, module in unwrap_model(model).named_modules():
        for attribute, value in module.named_parameters(recurse=False):
            name = original_name(prefix)
            name = f"{name}.{attribute}" if name else attribute
            parameters[name] = NamedParameter(name, module, attribute, value)
    return parameters


def plain(tensor: Tensor) -> Tensor:
    """Return a detached float32 copy of a plain, quantized or distributed tensor, gathered if it is distributed."""
    from torch.distributed.tensor import DTensor

    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        if isinstance(local, QuantizedTensor):
            local = local.dequantize()
        tensor = DTensor.from_local(
            local.float(),
            tensor.device_mesh,
            tensor.placements,
            shape=tensor.shape,
            stride=tensor.stride(),
            run_check=False,
        ).full_tensor()
    if isinstance(tensor, QuantizedTensor):
        tensor = tensor.dequantize()
    return tensor.float().clone()


def copy_parameters(
    parallel: nn.Module, copies: Sequence[nn.Module], rank_place: RankPlace, gathered: bool
) -> dict[str, Difference]:
    """Give the one-device models the parallel model's parameters, and compare the ranks' parameters.

    Args:
        parallel: Model with this rank's parameters.
        copies: One-device models; receive the parameters from rank 0 and its tensor-parallel group.
        rank_place: This rank's place in the mesh.
        gathered: Copy the parallel model's parameters. Otherwise the first model in `copies` keeps
            its own, which the others receive and the parallel model's parameters are compared with.

    Returns:
        The difference for each parameter on this rank, with its name as key.

    Raises:
        ValueError: The models have different parameters.
    """
    own = model_parameters(parallel)
    copied = [model_parameters(copy) for copy in copies]
    if own.keys() != copied[0].keys():
        missing = sorted(own.keys() ^ copied[0].keys())
        raise ValueError(
            f"model_fn(None) and model_fn(mesh) have different parameters: {', '.join(missing[:4])}; both need the "
            "same modules under the same names (fully_shard keeps names, FullyShardedDataParallel needs "
            "use_orig_params=True)"
        )
    differences: dict[str, Difference] = {}
    with torch.no_grad():
        for name, target in copied[0].items():
            local, note = plain(own[name].value), ""
            dim = sharded_dim(target.value.shape, local.shape, rank_place.tensor[1])
            parts = target.parts if dim == 0 else (target.value.shape[dim or 0],)
            value = plain(target.value)
            if gathered and dim is None:
                value = local.clone()
            elif gathered and dim is not None:
                value, shards = gather_parts(local, dim, rank_place.tensor_group, parts)
                note = _repetition_note(shards, rank_place.tensor[0])
            if world_size() > 1:
                sent = value.to(transport_device(None, value.device))
                dist.broadcast(sent, 0)
                value = sent.to(value.device)
            for copy in copied:
                copy[name].value.copy_(value)
            expected = value if dim is None else shard_parts(value, dim, rank_place.tensor, parts)
            error = float(
                (local.double() - expected.double()).norm()
                / expected.double().norm().clamp_min(1e-30)
            )
            allowance = 2.0**-24 if gathered else _rounding(own[name].value)
            differences[name] = Difference(error, allowance, note=note)
    return differences


def _rounding(parameter: Tensor) -> float:
    from torch.distributed.tensor import DTensor

    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return _CODES if isinstance(local, QuantizedTensor) else _ROUNDING.get(local.dtype, 2.0**-8)


def _repetition_note(shards: Sequence[Tensor], own: int) -> str:
    """Return a note if this rank's weight shard equals an earlier rank's shard."""
    own_shard = shards[own]
    if own_shard.dim() < 2 or own_shard.min() == own_shard.max():
        return ""
    equal = next((index for index in range(own) if torch.equal(shards[index], own_shard)), None)
    return "" if equal is None else f"equals the shard of tensor-parallel rank {equal}"


def average_gradients(model: nn.Module, position: RankPlace) -> None:
    """Average gradients over the data- and context-parallel ranks, unless the model's wrapper did.

    Gradients for parameters that see only a rank's tokens (sequence parallelism) are summed over the tensor-parallel
    ranks: parameters with the attribute `sequence_parallel`, and replicated parameters in modules with that attribute.
    """
    from torch.nn.parallel import DistributedDataParallel

    averaged = world_size(model.process_group) if isinstance(model, DistributedDataParallel) else 1
    for parameter in model_parameters(model).values():
        gradient: Any = parameter.value.grad
        if gradient is None:
            continue
        local = gradient
        # The number of data and context ranks over which the gradient has been averaged.
        averaged_ranks = averaged
        if hasattr(gradient, "to_local"):
            local, shards = gradient.to_local(), gradient.device_mesh
            names = shards.mesh_dim_names or ("",) * shards.ndim
            averaged_ranks = math.prod(
                [shards.size(i) for i, name in enumerate(names) if name not in ROLES["tensor"]]
            )
        if averaged_ranks == position.copies:
            groups = ()
        elif averaged_ranks == 1:
            groups = (*position.data_groups, *position.context_groups)
        elif averaged_ranks == position.data[1]:
            groups = position.context_groups
        else:
            raise ValueError(
                f"the model's wrapper averages gradients over {averaged_ranks} ranks; a mesh of "
                f"{position.data[1]} data-parallel and {position.context[1]} context-parallel ranks needs "
                f"{position.data[1]} or {position.copies}; pass reduce_fn"
            )
        for group in groups:
            dist.all_reduce(local, group=group)
            local.div_(world_size(group))
        if position.tensor[1] > 1 and _reads_local_tokens(parameter):
            dist.all_reduce(local, group=position.tensor_group)


def _reads_local_tokens(parameter: NamedParameter) -> bool:
    """Whether a replicated parameter is used for this rank's tokens only; fully_shard drops the attribute."""
    if hasattr(parameter.value, "sequence_parallel"):
        return bool(parameter.value.sequence_parallel)  # pyright: ignore[reportAttributeAccessIssue]
    if not getattr(parameter.module, "sequence_parallel", False):
        return False
    row = getattr(parameter.module, "parallel_mode", None) == "row"
    norm = isinstance(parameter.module, (LayerNorm, RMSNorm))
    return norm or parameter.attribute in _REPLICATED or (row and parameter.attribute == "bias")


def scaling_states(model: nn.Module, group: Any) -> Iterator[tuple[str, str, bool]]:
    """Compare delayed-scaling scales with the group's first rank.

    Yields:
        Module name, "scaling_fwd.scale" or "scaling_bwd.scale", and whether this rank's scales are equal.
    """
    for name, module in unwrap_model(model).named_modules():
        meta = getattr(module, "fp8_meta", None) or {}
        for direction in ("scaling_fwd", "scaling_bwd"):
            scale = getattr(meta.get(direction), "scale", None)
            if not isinstance(scale, Tensor):
                continue
            scales, _ = gather_along_first_dim(scale[None], group)
            yield (
                original_name(name),
                f"{direction}.scale",
                torch.equal(scales[0], scales[rank(group)]),
            )
