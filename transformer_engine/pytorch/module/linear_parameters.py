"""weight [out_features, in_features] and bias of a linear layer: whole, or in named pieces along the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..distributed.tensor_parallel import set_tensor_model_parallel_attributes
from ..distributed_weight import whole_weights
from ..functions.pieces import whole
from ..runtime.device import canonical_device
from .linear_base import ProductsModule
from .parameters import InitMethod, ParameterInit, default_init_method, parameter_of, split_names

_ALIGNMENT = 512  # bytes; that of an allocation on a GPU
Split = Sequence[str] | Mapping[str, int] | None


def create_parameters(
    module: ProductsModule,
    split: Split,
    dtype: torch.dtype | None,
    device: torch.device | str | int,
    init_method: InitMethod | None,
) -> None:
    """Register weight and bias (or {name}_weight, {name}_bias for each piece), unfilled; note their names."""
    config: Any = module._config
    pieces = split_names(
        split, config.out_features, config.tp_size if config.parallel_mode == "column" else 1
    )
    if len(pieces) > 1 and (config.fuse_wgrad_accumulation or config.primary_weights_in_fp8):
        what = "fuse_wgrad_accumulation" if config.fuse_wgrad_accumulation else "quantized_model_init"
        raise ValueError(
            f"{what} needs one weight parameter, parameters_split makes {len(pieces)}; leave one out, or construct "
            "MultiheadAttention and TransformerLayer with fuse_qkv_params=True"
        )
    weights, biases = [f"{prefix}weight" for prefix in pieces], [f"{prefix}bias" for prefix in pieces]
    init = ParameterInit(
        init_method or default_init_method,
        config.get_rng_state_tracker,
        config.rng_tracker_name,
        fp8_meta_index=1,
    )
    options: dict[str, Any] = {
        "dtype": dtype or torch.get_default_dtype(),
        "device": canonical_device(device),
    }
    rows = list(pieces.values())
    for name, values in zip(weights, _neighbours(rows, config.in_features, **options), strict=True):
        module.register_parameter(name, torch.nn.Parameter(values), init)
    if config.use_bias:
        zeros = ParameterInit(torch.nn.init.zeros_)
        for name, values in zip(biases, _neighbours(rows, **options), strict=True):
            module.register_parameter(name, torch.nn.Parameter(values), zeros)
    else:
        for name in biases:
            setattr(module, name, torch.empty(0, **options))
    module._configure(weight_names=tuple(weights), bias_names=tuple(biases), _weights=(tuple(weights),))


def mark_parameters(module: ProductsModule) -> None:
    """Mark how weight and bias are sharded over ranks; again whenever they are reset."""
    config: Any = module._config
    sharded = config.tp_size > 1 and config.parallel_mode is not None
    axis = 1 if config.parallel_mode == "row" else 0
    for name in config.weight_names:
        set_tensor_model_parallel_attributes(getattr(module, name), sharded, axis, 1)
    for name in config.bias_names if config.use_bias else ():
        if config.parallel_mode == "row":
            getattr(module, name).sequence_parallel = config.sequence_parallel
        elif config.parallel_mode == "column":
            set_tensor_model_parallel_attributes(getattr(module, name), sharded, 0, 1)


def weight_and_bias(module: ProductsModule) -> tuple[Tensor, Tensor | None]:
    """Return the parameters, or their concatenated pieces; None for a layer without bias."""
    config: Any = module._config
    weights, biases = config.weight_names, config.bias_names if config.use_bias else ()
    if len(weights) == 1:
        return parameter_of(module, weights[0]), parameter_of(module, biases[0]) if biases else None
    pieces = [getattr(module, name) for name in weights]
    of_biases = [getattr(module, name) for name in biases]
    if getattr(pieces[0], "is_distributed_weight", False):
        with whole_weights((pieces,), False, module.wgrad_store) as wholes:
            return whole(wholes, of_biases)
    return whole(pieces, of_biases)


def _neighbours(rows: Sequence[int], *columns: int, **options: Any) -> list[Tensor]:
    """Allocate adjacent uninitialized pieces [rows, *columns], if each is aligned like an allocation."""
    sizes = [row * prod(columns) * options["dtype"].itemsize for row in rows]
    if len(rows) == 1 or any(size % _ALIGNMENT for size in sizes):
        return [torch.empty(row, *columns, **options) for row in rows]
    return list(torch.empty(sum(rows), *columns, **options).split(list(rows)))
