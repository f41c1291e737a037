"""Layer parameters: one weight, or several named weight pieces, and their initialization."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...common.checks import described
from ...common.numbers import to_int, with_article
from ..distributed.tensor_parallel import set_tensor_model_parallel_attributes
from ..distributed_weight import whole_weights
from ..functions.pieces import whole
from ..runtime.device import canonical_device
from ..tensor.grouped_tensor import StackQuantizer
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.quantizer import Quantizer
from .products import FORWARD_SLOTS

InitMethod = Callable[[Tensor], object]
Split = Sequence[str] | Mapping[str, int] | None

DEFAULT_STANDARD_DEVIATION = 0.023
_ALIGNMENT = 512  # bytes; the alignment of a GPU allocation


def default_init_method(weight: Tensor) -> Tensor:
    """Fill a weight from N(0, 0.023)."""
    return torch.nn.init.normal_(weight, mean=0.0, std=DEFAULT_STANDARD_DEVIATION)


@dataclass(frozen=True)
class ParameterInit:
    """Parameter initialization, and the forward quantizer that quantizes it.

    Attributes:
        init: Fills a tensor in place.
        rng_tracker: Returns the tensor-parallel random state tracker, or None.
        rng_tracker_name: Random state name in the tracker.
        fp8_meta_index: Forward quantizer slot; None: the parameter stays in high precision.
        members: Weight count in a stack, each with a separate quantizer; None: the parameter is a single weight.
    """

    init: InitMethod
    rng_tracker: Callable | None = None
    rng_tracker_name: str | None = None
    fp8_meta_index: int | None = None
    members: int | None = None

    def quantizer_among(self, forward: Sequence[Quantizer]) -> Quantizer:
        """Return a copy of the quantizer for the parameter's slot; for a stack, its members' quantizers combined."""
        first = self.fp8_meta_index
        assert first is not None, "only such parameters are quantized"
        if self.members is None:
            return forward[first].copy()
        last = first + FORWARD_SLOTS * self.members
        return StackQuantizer([forward[slot].copy() for slot in range(first, last, FORWARD_SLOTS)])

    def fill(self, tensor: Tensor) -> None:
        """Initialize in place, under the tensor-parallel random state if there is one."""
        if self.rng_tracker is None:
            scope = nullcontext()
        else:
            name = self.rng_tracker_name
            scope = self.rng_tracker().fork() if name is None else self.rng_tracker().fork(name)
        with torch.no_grad(), scope:
            self.init(tensor)


def split_names(
    parameters_split: Sequence[str] | Mapping[str, int] | None, rows: int, tp_size: int = 1
) -> dict[str, int]:
    """Return {prefix: rows} for the parameters that form the weight [rows, K], split along its first axis.

    Args:
        parameters_split: A name sequence splits evenly; a mapping gives the unsharded rows per
            name. None: one weight, whose prefix is "".
        rows: Weight rows on this rank.
        tp_size: Rank count that shares the weight's rows.

    Raises:
        TypeError: The names are not strings.
        ValueError: The pieces do not add up to the weight.
    """
    if parameters_split is None:
        return {"": rows}
    if isinstance(parameters_split, str) or not isinstance(parameters_split, (Mapping, Iterable)):
        raise TypeError(
            f"parameters_split={described(parameters_split)} is {with_article(type(parameters_split))}; give names, or "
            "a dict of names and sizes"
        )
    for name in parameters_split:
        if not isinstance(name, str):
            raise TypeError(
                f"parameters_split holds {described(name)}, which is no name; give every piece a str"
            )
    if isinstance(parameters_split, Mapping):
        sizes = {
            name: to_int(f"parameters_split[{name!r}]", size, 1)
            for name, size in parameters_split.items()
        }
        uneven = [f"{name}={size}" for name, size in sizes.items() if size % tp_size]
        if uneven:
            raise ValueError(
                f"tp_size={tp_size} does not divide parameters_split {', '.join(uneven)}; pad them"
            )
        sizes = {name: size // tp_size for name, size in sizes.items()}
    else:
        names = list(parameters_split)
        if not names or rows % len(names):
            raise ValueError(
                f"parameters_split has {len(names)} names, which does not divide {rows} rows; give a dict of sizes"
            )
        sizes = {name: rows // len(names) for name in names}
    if sum(sizes.values()) != rows:
        raise ValueError(
            f"parameters_split sizes add up to {sum(sizes.values())}, the weight has {rows} rows"
        )
    return {name.rstrip("_") + "_": size for name, size in sizes.items()}


def get_parameter_value(module: torch.nn.Module, name: str) -> Any:
    """Return a parameter by name, without the exception (1 us) that nn.Module's attribute look-up raises first."""
    params = module._parameters
    return params[name] if name in params else getattr(module, name)


def get_parameter_values(module: torch.nn.Module, names: Sequence[str]) -> list[Any]:
    """Return the values of `get_parameter_value` for several names."""
    try:
        return [*map(module._parameters.__getitem__, names)]
    except KeyError:  # a parametrization or another attribute replaces a parameter
        return [getattr(module, name) for name in names]


def empty_like(param: Tensor) -> Tensor:
    """Return a tensor for init methods: the parameter's own storage, or new high-precision memory."""
    if isinstance(param, QuantizedTensor):
        return torch.empty(param.shape, dtype=param.dtype, device=param.device)
    if param.is_meta:
        return torch.empty_like(param, device=canonical_device("cuda"), requires_grad=False)
    return param


def create_parameters(
    module: Any,
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
        what = (
            "fuse_wgrad_accumulation" if config.fuse_wgrad_accumulation else "quantized_model_init"
        )
        raise ValueError(
            f"{what} needs one weight parameter, parameters_split makes {len(pieces)}; leave one out, or construct "
            "MultiheadAttention and TransformerLayer with fuse_qkv_params=True"
        )
    weights, biases = (
        [f"{prefix}weight" for prefix in pieces],
        [f"{prefix}bias" for prefix in pieces],
    )
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
    module._configure(
        weight_names=tuple(weights), bias_names=tuple(biases), _weights=(tuple(weights),)
    )


def mark_parameters(module: Any) -> None:
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


def weight_and_bias(module: Any) -> tuple[Tensor, Tensor | None]:
    """Return the parameters, or their concatenated pieces; None for a layer without bias."""
    config: Any = module._config
    weights, biases = config.weight_names, config.bias_names if config.use_bias else ()
    if len(weights) > 1:
        return _join_pieces(module, weights, biases)
    # As in `get_parameter_value`.
    params, weight, bias = module._parameters, weights[0], biases[0] if biases else None
    return (
        params[weight] if weight in params else getattr(module, weight),
        params[bias] if bias in params else getattr(module, bias) if bias else None,
    )


def _join_pieces(
    module: Any, weights: Sequence[str], biases: Sequence[str]
) -> tuple[Tensor, Tensor | None]:
    """Concatenate the weight and bias pieces in a layer with `parameters_split`."""
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
