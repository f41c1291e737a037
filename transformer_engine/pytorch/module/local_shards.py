"""Layers with DTensor parameters: local computation on this rank's shard between distributed tensors.

| weight [N, K] | input | output | gradient of the input | gradient of norm parameters |
| --- | --- | --- | --- | --- |
| Shard(0) | Replicate | Shard(last) | Partial | summed over the ranks |
| Shard(1) | Shard(last) | Partial | Shard(last) | - |
| Replicate | unchanged | as the input | as the input | summed if the input is sharded |

The input is redistributed if it has another placement, as by DTensor operators. The collective that sums a
Partial result belongs to the code around the layer, such as the `torch.distributed.tensor.parallel` hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..runtime.autograd import Function
from ..runtime.checks import is_distributed
from ..runtime.double_backward import once_differentiable
from .arguments import CallSwitches


class _SummedGradient(Function):
    """Identity on a replicated DTensor, whose gradient is summed over the ranks if it is Partial."""

    @staticmethod
    def forward(ctx: Any, replicated: Tensor) -> Tensor:
        ctx.placements = replicated.placements  # pyright: ignore[reportAttributeAccessIssue]
        return replicated.view_as(replicated)

    @staticmethod
    @once_differentiable("a layer with DTensor parameters")
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient.redistribute(placements=ctx.placements)


class _BiasOfFirstRank(Function):
    """Add the bias on the first rank only, before a sum over ranks; all ranks receive the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, is_first: bool) -> Tensor:
        ctx.axes, ctx.dtype = tuple(range(y.dim() - 1)), bias.dtype
        return y + bias if is_first else y.clone()

    @staticmethod
    @once_differentiable("a layer with DTensor parameters")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        bias = gradient.sum(ctx.axes, dtype=torch.float32) if ctx.axes else gradient
        return gradient, bias.to(ctx.dtype), None


def _common_mesh(kind: str, arguments: Mapping[str, Any]) -> Any:
    """Return the common mesh of the tensors, some of which may be None.

    Raises:
        TypeError: Some tensors are DTensors and others are not.
        ValueError: The tensors have different meshes.
        NotImplementedError: The mesh has several dimensions.
    """
    tensors = {name: value for name, value in arguments.items() if value is not None}
    plain = [name for name, value in tensors.items() if not is_distributed(value)]
    if plain:
        raise TypeError(
            f"{', '.join(plain)} of {kind} and other tensors of the call mix torch.Tensor and DTensor; use the styles "
            "of transformer_engine.pytorch.integrations.tensor_parallel, or DTensor.from_local"
        )
    meshes = {value.device_mesh for value in tensors.values()}
    if len(meshes) > 1:
        raise ValueError(
            f"the DTensors of {kind} have {len(meshes)} device meshes, {meshes}; give all of them one mesh"
        )
    (mesh,) = meshes
    if mesh.ndim != 1:
        raise NotImplementedError(
            f"the DTensors of {kind} have a mesh of {mesh.ndim} dimensions {mesh.mesh_dim_names}; shard the layer over "
            'one of them, for example mesh["tp"]'
        )
    return mesh


def _whole_or_sharded_rows(x: Any, features: int) -> Any:
    """Return x with whole features, sharded along another dimension or replicated.

    Args:
        x: DTensor over a one-dimensional mesh.
        features: Trailing dimensions that a rank needs as a whole.
    """
    from torch.distributed.tensor import Replicate

    (placement,) = x.placements
    if placement.is_replicate() or (placement.is_shard() and placement.dim < x.dim() - features):
        return x
    return x.redistribute(placements=[Replicate()])


def _local(parameter: Any, summed: bool) -> Tensor:
    """Return this rank's part of a parameter, whose gradient is summed over the ranks if requested."""
    from torch.distributed.tensor import Partial

    if not summed:
        return parameter.to_local()
    return _SummedGradient.apply(parameter).to_local(grad_placements=[Partial()])


def _local_of_replicated(parameter: Any, summed: bool) -> Tensor | None:
    """Return the whole parameter, see `_local`; None for None."""
    from torch.distributed.tensor import Replicate

    return (
        None
        if parameter is None
        else _local(parameter.redistribute(placements=[Replicate()]), summed)
    )


def normalized_shards(
    kind: str,
    compute: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    x: Any,
    weight: Any,
    bias: Any,
    features: int,
) -> Any:
    """Return the normalized DTensor, placed like the input.

    Args:
        kind: Layer class name.
        compute: `compute(x, weight, bias)` on local tensors.
        x: Input. If a rank has a part of the normalized dimensions, the input is redistributed.
        weight: Replicated weight.
        bias: Replicated bias, or None.
        features: Normalized dimension count.

    Raises:
        TypeError, ValueError, NotImplementedError: See `local_linear`.
    """
    from torch.distributed.tensor import DTensor

    mesh = _common_mesh(kind, {"the input": x, "weight": weight, "bias": bias})
    placed = _whole_or_sharded_rows(x, features)
    sharded = placed.placements[0].is_shard()
    local = [_local_of_replicated(value, sharded) for value in (weight, bias)]
    y = compute(placed.to_local(), *local)  # pyright: ignore[reportArgumentType]
    return DTensor.from_local(
        y, mesh, placed.placements, run_check=False, shape=placed.shape, stride=placed.stride()
    )


def local_linear(
    kind: str,
    compute: Callable[..., Tensor],
    x: Any,
    weight: Any,
    bias: Any,
    norm: Mapping[str, Any],
) -> Any:
    """Return the output of a linear layer as a DTensor; see the table of this file.

    Args:
        kind: Layer class name.
        compute: `compute(x, weight, bias, *norm parameters)` on local tensors.
        x: Input [.., K].
        weight: Weight [N, K].
        bias: Bias [N], or None.
        norm: {name: parameter} for a norm before the product; None for an absent parameter, empty without a norm.

    Raises:
        TypeError: Some tensors are DTensors and others are not.
        ValueError: The tensors have different meshes, or a norm would see a part of the features.
        NotImplementedError: The mesh has several dimensions, or the weight has an unsupported placement.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = _common_mesh(kind, {"the input": x, "weight": weight, "bias": bias, **norm})
    (placement,) = weight.placements
    last = x.dim() - 1
    column, row = placement.is_shard(0), placement.is_shard(1)
    if not (column or row or placement.is_replicate()):
        raise NotImplementedError(
            f"the weight of {kind} is placed {placement}; shard its rows, Shard(0), or its columns, Shard(1)"
        )
    if row and norm:
        raise ValueError(
            f"the weight of {kind} is placed {placement}: a rank would normalize a part of the features; use Shard(0), "
            "or a norm followed by a Linear"
        )
    if row:
        redistributed = x.redistribute(placements=[Shard(last)])
    else:
        redistributed = (
            x.redistribute(placements=[Replicate()]) if column else _whole_or_sharded_rows(x, 1)
        )
    # Each rank has a part of the sum over outputs or rows.
    summed = column or redistributed.placements[0].is_shard()
    local_x = (
        redistributed.to_local(grad_placements=[Partial()]) if column else redistributed.to_local()
    )
    replicated = [_local_of_replicated(value, summed) for value in norm.values()]
    # the whole weight is applied to a part of the rows
    rows_alone = summed and not column and not row
    of_rows = [Shard(0)] if column else [Replicate()]
    local_bias = None
    if bias is not None:
        local_bias = _local(bias.redistribute(placements=of_rows), rows_alone)
    local_weight = _local(weight, rows_alone)
    y = compute(local_x, local_weight, None if row else local_bias, *replicated)
    if row and local_bias is not None:
        y = _BiasOfFirstRank.apply(y, local_bias.to(y.dtype), mesh.get_local_rank() == 0)
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    placed = [Shard(last)] if column else [Partial()] if row else redistributed.placements
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, mesh, placed, run_check=False, shape=shape, stride=stride)


def output_of_shards(
    module: Any,
    switches: CallSwitches,
    x: Any,
    weight: Any,
    bias: Any,
    norm: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Return the output from a layer with DTensor parameters: y, or (y, bias) with return_bias.

    Args:
        module: Layer whose `_compute_output(switches, x, weight, bias, *norm parameters)` computes with local tensors.
        switches: Call switches.
        x: Input; the remaining arguments as in `local_linear`.
        weight: Weight.
        bias: Bias, or None.
        norm: Norm parameters.

    Raises:
        NotImplementedError: A layer setting does not work with DTensor parameters.
        TypeError, ValueError: See `local_linear`.
    """
    kind, config = type(module).__name__, module._config
    unsupported = {
        "fp8_output": switches.fp8_output,
        "fp8_grad": switches.fp8_grad,
        "parallel_mode": config.is_sharded and config.parallel_mode,
        "fuse_wgrad_accumulation": config.fuse_wgrad_accumulation,
        "delay_wgrad_compute": module.wgrad_store is not None,
        "return_layernorm_output": config.return_layernorm_output,
        "parameters_split": len(config.weight_names) > 1,
    }
    for name, value in unsupported.items():
        if value:
            raise NotImplementedError(
                f"{name}={value!r} is not supported by {kind} with DTensor parameters; leave it out, or shard the "
                "layer with tp_group and parallel_mode"
            )

    def compute(x: Tensor, *parameters: Tensor | None) -> Tensor:
        results = module._compute_output(switches, x, *parameters)
        return results[0] if config.return_bias else results

    y = local_linear(kind, compute, x, weight, None if config.return_bias else bias, norm)
    return (y, bias) if config.return_bias else y
