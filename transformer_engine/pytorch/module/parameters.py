"""Parameters of a layer: one weight, or several named pieces of it, and their initialization."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...common.checks import described
from ...common.numbers import to_int, with_article
from ..runtime.device import canonical_device
from ..tensor.grouped_tensor import StackQuantizer
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.quantizer import Quantizer
from .products import FORWARD_SLOTS

InitMethod = Callable[[Tensor], object]

DEFAULT_STANDARD_DEVIATION = 0.023


def default_init_method(weight: Tensor) -> Tensor:
    """Fill a weight from N(0, 0.023)."""
    return torch.nn.init.normal_(weight, mean=0.0, std=DEFAULT_STANDARD_DEVIATION)


@dataclass(frozen=True)
class ParameterInit:
    """Initialization of a parameter, and the forward quantizer that quantizes it.

    Attributes:
        init: Fills a tensor in place.
        rng_tracker: Returns the tracker of the tensor-parallel random states, or None.
        rng_tracker_name: Name of the random state in the tracker.
        fp8_meta_index: Slot of the forward quantizer; None: the parameter stays in high precision.
        members: Number of weights in a stack, each with a separate quantizer; None: the parameter is a single weight.
    """

    init: InitMethod
    rng_tracker: Callable | None = None
    rng_tracker_name: str | None = None
    fp8_meta_index: int | None = None
    members: int | None = None

    def quantizer_among(self, forward: Sequence[Quantizer]) -> Quantizer:
        """Return a copy of the quantizer of the parameter's slot; for a stack, its members' quantizers combined."""
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
    """Return {prefix: rows} of the parameters that form the weight [rows, K], split along its first axis.

    Args:
        parameters_split: A sequence of names splits evenly; a mapping gives the unsharded rows of each name. None:
            one weight, whose prefix is "".
        rows: Rows of the weight on this rank.
        tp_size: Number of ranks that share the weight's rows.

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
            name: to_int(f"parameters_split[{name!r}]", size, 1) for name, size in parameters_split.items()
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


def parameter_of(module: torch.nn.Module, name: str) -> Any:
    """Return a parameter by name, without the exception (1 us) that nn.Module's attribute look-up raises first."""
    held = module._parameters
    return held[name] if name in held else getattr(module, name)


def empty_like(param: Tensor) -> Tensor:
    """Return a tensor for init methods: the parameter's own storage, or new high-precision memory."""
    if isinstance(param, QuantizedTensor):
        return torch.empty(param.shape, dtype=param.dtype, device=param.device)
    if param.is_meta:
        return torch.empty_like(param, device=canonical_device("cuda"), requires_grad=False)
    return param
