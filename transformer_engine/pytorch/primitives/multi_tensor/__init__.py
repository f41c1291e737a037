"""One operation on all tensors in parallel lists: scaling, sums of squares, an Adam or a gradient descent step.

Lists are on one device; the tensors in one list have one dtype, and the i-th tensors of all lists have equal
element counts and are contiguous. A caller that repeats steps passes the `Extents`, which hold these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....common.dispatch import Table
from ....common.operation_settings import Adam, Sgd
from . import reference, triton
from .addresses import Extents
from .reference import MultiTensorRequest, halves, join_halves

__all__ = [
    "TABLE",
    "Extents",
    "MultiTensorRequest",
    "adam_rates",
    "adam_step",
    "copy_to_device",
    "halves",
    "join_halves",
    "scale_all",
    "sgd_step",
    "squares_of_all",
]

TABLE: Table[MultiTensorRequest] = Table(
    "multi_tensor", (triton.BACKEND, reference.BACKEND), describe=MultiTensorRequest
)

Lists = Sequence[Sequence[Tensor]]


def scale_all(lists: Lists, factor: Tensor, flag: Tensor) -> None:
    """lists[1][i] = lists[0][i] * factor [1], in float32; flag int32 [1] becomes 1 if an input is not finite."""
    TABLE.bound(("scale", *_facts(lists)))(
        lists, Extents(map(Tensor.numel, lists[0])), factor, flag
    )


def squares_of_all(tensors: Sequence[Tensor], factor: Tensor | None = None) -> Tensor:
    """Return float32 [n]: the sum of (x * factor [1])^2 over each tensor."""
    lists = (tensors,)
    return TABLE.bound(("squares", *_facts(lists)))(
        lists, Extents(map(Tensor.numel, lists[0])), factor
    )


def adam_step(
    lists: Lists,
    rates: Tensor,
    how: Adam,
    flag: Tensor | None = None,
    extents: Extents | None = None,
) -> None:
    """Compute one Adam step on [gradients, parameters, first moments, second moments(, masters)], in place.

    Gradients are not changed. The parameters copy the masters, which have higher precision. int16 masters are
    the lower halves of float32 numbers whose upper halves, rounded half up, are the parameters. With
    `how.block_scaled`, moments are codes, and the lists of both moments' exponents follow them (`block_states`).

    Args:
        lists: The tensor lists.
        rates: float32 [12] from `adam_rates`.
        how: Step settings.
        flag: int32 [1]: nothing is changed if it is not 0.
        extents: Tensor sizes, for repeated steps.
    """
    facts = _facts(lists)
    extents = Extents(map(Tensor.numel, lists[0])) if extents is None else extents
    TABLE.bound(("adam", *facts, how, flag is not None))(lists, extents, rates, flag)


def sgd_step(lists: Lists, rates: Tensor, how: Sgd, flag: Tensor) -> None:
    """Compute one step on [gradients, parameters, momenta(, parameter copies)], in place except for gradients.

    Args:
        lists: The tensor lists.
        rates: float32 [5]: weight decay, momentum, 1 - dampening, learning rate, gradient factor.
        how: Step settings.
        flag: int32 [1]: nothing is changed if it is not 0.
    """
    TABLE.bound(("sgd", *_facts(lists), how, True))(
        lists, Extents(map(Tensor.numel, lists[0])), rates, flag
    )


def adam_rates(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
    bias_correction: bool,
    weight_decay: float,
    first_chunk: int = 0,
) -> tuple[float, ...]:
    """Return the numbers for `adam_step`, in double precision: 1 - 0.999 in float32 has relative error 5e-5.

    Step and first chunk determine the random bits of stochastic rounding.
    """
    first, second = betas
    corrections = (1.0 - first**step, 1.0 - second**step) if bias_correction else (1.0, 1.0)
    numbers = (lr, first, 1.0 - first, second, 1.0 - second, eps, weight_decay, *corrections)
    return (*numbers, 1.0, float(step), float(first_chunk))


def copy_to_device(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Return float32 [n] on a device, by an asynchronous copy."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.float32, device=device)
    return torch.tensor(numbers, dtype=torch.float32, pin_memory=True, device="cpu").to(
        device, non_blocking=True
    )


def _facts(lists: Lists) -> tuple[torch.device, tuple[torch.dtype, ...]]:
    return lists[0][0].device, tuple([tensors[0].dtype for tensors in lists])
