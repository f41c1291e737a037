"""Styles of `torch.distributed.tensor.parallel.parallelize_module` for the layers of this package.

torch's `ColwiseParallel` and `RowwiseParallel` accept `torch.nn.Linear` and `torch.nn.Embedding` only. The styles
here have the same names and arguments, accept the linear layers of this package too, and pass everything else on to
torch's. The parameters become DTensors; a layer computes its shard with the kernels and recipe in `te.autocast`.
torch's `SequenceParallel` works with `LayerNorm` and `RMSNorm` of this package unchanged.

    >>> import transformer_engine.pytorch as te  # doctest: +SKIP
    >>> from torch.distributed.tensor.parallel import parallelize_module
    >>> from transformer_engine.pytorch.integrations.tensor_parallel import ColwiseParallel, RowwiseParallel
    >>> model = torch.nn.Sequential(te.Linear(64, 256), torch.nn.GELU(), te.Linear(256, 64))
    >>> parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor import parallel as torch_styles

from ...common.numbers import with_article
from ..module import LayerNormLinear, Linear
from ..module.base import TransformerEngineBaseModule

__all__ = ["ColwiseParallel", "RowwiseParallel"]


def _shards_itself(module: torch.nn.Module, style: str, layers: tuple[type, ...]) -> bool:
    """Return whether a style shards a module itself; False for modules that torch's style handles.

    Raises:
        NotImplementedError: The layer has no such shard, or settings that DTensor parameters cannot have.
    """
    if not isinstance(module, TransformerEngineBaseModule):
        return False
    kind = type(module).__name__
    if not isinstance(module, layers):
        raise NotImplementedError(
            f"{style} does not shard {with_article(kind)}; give it {' or '.join(layer.__name__ for layer in layers)}, "
            f"or construct the {kind} with tp_group"
        )
    settings = {
        "parallel_mode": getattr(module, "parallel_mode", None),
        "quantized_model_init": module.primary_weights_in_fp8,
        "fuse_wgrad_accumulation": module.fuse_wgrad_accumulation,
        "delay_wgrad_compute": module.wgrad_store is not None,
        "parameters_split": "weight" not in module._parameters,
    }
    for name, value in settings.items():
        if value:
            raise NotImplementedError(
                f"{style} does not shard {with_article(kind)} with {name}={value!r}; leave it out, or construct the "
                "layer with tp_group"
            )
    return True


def _distributed(
    module: torch.nn.Module, mesh: DeviceMesh, style: Any, placements: dict[str, Placement]
) -> torch.nn.Module:
    """Return the module with parameters as DTensors, and the style's hooks around its forward pass.

    Args:
        module: The layer.
        mesh: One-dimensional mesh.
        style: The style, whose hooks convert the input and the output.
        placements: Placement per parameter; `Replicate()` unless named.
    """

    def partition(name: str, layer: torch.nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(layer.named_parameters(recurse=False)):
            placed = [placements.get(key, Replicate())]
            shards = distribute_tensor(parameter, mesh, placed, src_data_rank=style.src_data_rank)
            layer.register_parameter(
                key, torch.nn.Parameter(shards, requires_grad=parameter.requires_grad)
            )

    enter: Callable[..., Any] = functools.partial(
        style._prepare_input_fn, style.input_layouts, style.desired_input_layouts
    )
    leave: Callable[..., Any] = functools.partial(
        style._prepare_output_fn, style.output_layouts, style.use_local_output
    )
    return distribute_module(module, mesh, partition, enter, leave)


class ColwiseParallel(torch_styles.ColwiseParallel):
    """Shard the output features of a `Linear` or `LayerNormLinear`; see torch's class with this name.

    The parameters of the norm of a `LayerNormLinear` are replicated.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not _shards_itself(module, "ColwiseParallel", (Linear, LayerNormLinear)):
            return super()._apply(module, device_mesh)
        return _distributed(module, device_mesh, self, {"weight": Shard(0), "bias": Shard(0)})


class RowwiseParallel(torch_styles.RowwiseParallel):
    """Shard the input features of a `Linear`; see torch's class with this name. The bias is replicated."""

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not _shards_itself(module, "RowwiseParallel", (Linear,)):
            return super()._apply(module, device_mesh)
        self.desired_input_layouts = (Shard(-1),)
        return _distributed(module, device_mesh, self, {"weight": Shard(1)})
