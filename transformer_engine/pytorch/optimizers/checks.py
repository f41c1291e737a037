"""Optimizer checks: settings, group numbers, parameters, gradients, states and saved states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ...common.checks import described, number
from ...common.numbers import to_bool, to_float, to_int, with_article
from ..runtime.checks import is_distributed
from ..tensor.float8_tensor import Float8Quantizer
from ..tensor.quantized_tensor import QuantizedTensor
from .multi_tensor_apply import local_part

_PLAIN = (torch.float32, torch.float16, torch.bfloat16)
_MASTERS = (torch.float32, torch.float16)
_MOMENTS = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)


def check_dtypes(
    master_weights: bool, master: Any, first: Any, second: Any, block_scaled: bool
) -> None:
    """Raise RuntimeError for dtypes that are unsupported for states."""
    if master_weights and master not in _MASTERS:
        raise RuntimeError(
            f"master_weight_dtype={described(master)}; give torch.float32 or torch.float16"
        )
    for name, dtype in (("exp_avg_dtype", first), ("exp_avg_sq_dtype", second)):
        if dtype not in _MOMENTS:
            raise RuntimeError(
                f"{name}={described(dtype)}; give torch.float32, torch.float16, torch.bfloat16 or torch.uint8 (FP8)"
            )
        if block_scaled and dtype != torch.uint8:
            raise RuntimeError(
                f"{name}={dtype} with block_scaled_states=True, which is for FP8 moments; give torch.uint8 for both"
            )


def check_capturable(
    master_weights: bool,
    master: torch.dtype,
    first: torch.dtype,
    second: torch.dtype,
    remainders: bool,
    block_scaled: bool,
) -> None:
    """Raise RuntimeError for states that a captured step does not support."""
    if master_weights and master != torch.float32:
        raise RuntimeError(f"capturable=True with master_weight_dtype={master}; give torch.float32")
    if not block_scaled and (first != second or first not in (torch.float32, torch.bfloat16)):
        raise RuntimeError(
            f"capturable=True with exp_avg_dtype={first} and exp_avg_sq_dtype={second}; give torch.float32 for both, "
            "torch.bfloat16, or torch.uint8 with block_scaled_states=True"
        )
    if remainders:
        raise RuntimeError("capturable=True keeps no remainders; use store_param_remainders=False")


NUMBERS = ("lr", "betas", "eps", "weight_decay", "bias_correction")


def check_numbers(group: dict[str, Any]) -> None:
    """Raise TypeError, ValueError or RuntimeError for numbers that no step can be computed with.

    As in the original, the learning rate, epsilon and the weight decay may be negative.
    """
    for name in ("lr", "eps", "weight_decay"):
        one_number(name, group.get(name))
    read_pair(group.get("betas"))
    to_bool("bias_correction", group.get("bias_correction"))
    reject_unsupported(group, "FusedAdam", "torch.optim.AdamW")


def read_pair(betas: Any) -> tuple[float, float]:
    """Convert two numbers in [0, 1), in any sequence, array or tensor, to floats; raise ValueError for others."""
    listed = betas.tolist() if hasattr(betas, "tolist") else betas
    is_pair = (
        isinstance(listed, Sequence) and not isinstance(listed, (str, bytes)) and len(listed) == 2
    )
    if not is_pair or any(value is None or isinstance(value, str) for value in listed):
        raise ValueError(
            f"betas={described(betas)} are not two numbers in [0, 1); give for example (0.9, 0.999)"
        )
    first, second = (to_float("betas", value) for value in listed)
    if not (0.0 <= first < 1.0 and 0.0 <= second < 1.0):
        raise ValueError(
            f"betas={described(betas)} are not two numbers in [0, 1); give for example (0.9, 0.999)"
        )
    return first, second


def one_number(name: str, value: Any) -> float | None:
    """Return the value as a finite float, None for a tensor on a device, which is not read.

    Raises:
        TypeError: The value is not a number.
        ValueError: The value is not finite, or a tensor with several elements.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name}={described(value)} has {value.numel()} numbers; give one")
        if not value.is_cpu:
            return None
    found = to_float(name, value)
    number(name, found)
    return found


def check_parameter(
    parameter: Tensor, grad: Tensor, master_weights: bool, capturable: bool
) -> None:
    """Raise RuntimeError or ValueError for a parameter that cannot be stepped with this gradient."""
    if grad.is_sparse:
        raise RuntimeError("FusedAdam takes no sparse gradients; use torch.optim.SparseAdam")
    local, local_grad = local_part(parameter), local_part(grad)
    if isinstance(local, QuantizedTensor):
        delayed = isinstance(getattr(local, "_quantizer", None), Float8Quantizer)
        if not master_weights and not delayed:
            raise RuntimeError(
                f"{with_article(type(local))} cannot be stepped without masters; use FusedAdam(master_weights=True)"
            )
        if capturable and not master_weights:
            raise RuntimeError(
                "capturable=True steps quantized parameters with master_weights=True only; set it"
            )
    elif local.dtype not in _PLAIN:
        raise RuntimeError(f"a parameter is {local.dtype}; give float32, float16 or bfloat16 ones")
    if is_distributed(parameter) != is_distributed(grad):
        raise AssertionError(
            "of a parameter and its gradient one is a DTensor; both have to be, or neither"
        )
    if local_grad.device != local.device:
        raise ValueError(
            f"a parameter is on {local.device}, its gradient on {local_grad.device}; move one of them"
        )
    if local_grad.shape != local.shape:
        raise ValueError(
            f"a parameter is {list(local.shape)}, its gradient {list(local_grad.shape)}; give both one shape"
        )
    if local_grad.dtype not in _PLAIN:
        raise TypeError(f"a gradient is {local_grad.dtype}; give float32, float16 or bfloat16 ones")
    for name, tensor in (("parameter", local), ("gradient", local_grad)):
        if not tensor.is_contiguous():
            raise ValueError(
                f"a {name} of {list(tensor.shape)} has strides {tensor.stride()}; give contiguous tensors"
            )


def check_states(parameter: Tensor, states: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise ValueError if a state belongs to a parameter with another size or device than the present one."""
    local = local_part(parameter)
    for name in names:
        state = states.get(name)
        if not isinstance(state, Tensor):
            continue
        local_state = local_part(state)
        if local_state.numel() != local.numel():
            raise ValueError(
                f"{name} of a parameter is {list(local_state.shape)}, the parameter {list(local.shape)}: its data was "
                "replaced after the state was made; delete the parameter's entry of optimizer.state, which then starts "
                "from zero, or load a state of this shape with load_state_dict()"
            )
        if local_state.device != local.device:
            raise ValueError(
                f"{name} of a parameter is on {local_state.device}, the parameter on {local.device}; move "
                f"the states with "
                "optimizer.load_state_dict(optimizer.state_dict()), which copies them to their parameters' devices"
            )


Group = dict[str, Any]
# Group settings of torch's optimizers that are unsupported here.
UNSUPPORTED = ("maximize", "amsgrad", "differentiable")


class GroupChecks:
    """The check of the numbers of each group, repeated only when a group holds other objects.

    A caller may write into the groups of an optimizer between any two steps. A number that can change while
    it stays the same object, in a list or in a tensor on the host, is checked in every step.
    """

    def __init__(self, names: Sequence[str], check_group: Callable[[Group], None]) -> None:
        self.names = (*names, *UNSUPPORTED)
        self.check_group = check_group
        self.known: list[list[Any]] = []

    def check(self, groups: Sequence[Group]) -> None:
        """Raise TypeError, ValueError or RuntimeError for the first number that no step can be computed with."""
        values = [list(map(group.get, self.names)) for group in groups]
        previous = self.known
        if len(previous) == len(values) and all(
            all(map(is_, ours, theirs)) for ours, theirs in zip(values, previous, strict=True)
        ):
            return
        for group in groups:
            self.check_group(group)
        self.known = (
            []
            if any(map(_can_change, (value for of_group in values for value in of_group)))
            else values
        )


def reject_unsupported(group: Group, ours: str, theirs: str) -> None:
    """Raise RuntimeError for a torch optimizer setting that changes a step."""
    for name in UNSUPPORTED:
        if group.get(name):
            raise RuntimeError(
                f"{name}={group[name]} in a parameter group is unsupported by {ours}; use "
                f"{theirs}, or set the group's {name} to False"
            )


def _can_change(value: Any) -> bool:
    """Return whether the number may change in place: in a list, an array or a tensor on the host."""
    if isinstance(value, Tensor):
        return value.is_cpu
    if isinstance(value, tuple):
        return any(map(_can_change, value))
    return not (value is None or isinstance(value, (int, float)))


_PARTS = ("exp_avg", "exp_avg_sq", "master_param")


def check_saved(
    saved: dict[str, Any], groups: Sequence[dict[str, Any]], defaults: dict[str, Any], masters: bool
) -> list[int | None]:
    """Check a saved Adam state before any part is loaded; return the steps of `step_of_torchs` per group.

    Args:
        saved: The saved state.
        groups: Groups to load into; torch's load_state_dict checks their number and sizes.
        defaults: Default settings of a group.
        masters: Whether masters are loaded too.

    Raises:
        TypeError, ValueError: The state cannot be loaded.
    """
    states = saved["state"]
    steps = [step_of_torchs(group, states) for group in saved["param_groups"]]
    has_masters = masters and any(
        state.get("master_param") is not None for state in states.values()
    )
    parts = _PARTS if has_masters else _PARTS[:2]
    for group, into in zip(saved["param_groups"], groups, strict=False):
        check_numbers({**defaults, **group})
        step = group.get("step", 0)
        if isinstance(step, Tensor) and step.numel() != 1:
            raise ValueError(
                f"step={described(step)} has {step.numel()} numbers; give one per group"
            )
        to_int("step", step, 0)
        for index, parameter in zip(group["params"], into["params"], strict=False):
            if states.get(index):
                _check_parts(index, states[index], parts, local_part(parameter))
    return steps


def step_of_torchs(group: dict[str, Any], of_parameters: dict[Any, dict[str, Any]]) -> int | None:
    """Return the step count for a saved group from torch's optimizers, which count per parameter; None if absent."""
    if "step" in group:
        return None
    counts = [of_parameters.get(index, {}).get("step") for index in group["params"]]
    found = {int(count) for count in counts if count is not None}
    if len(found) > 1:
        raise ValueError(
            f"parameters of one group have made {sorted(found)} steps, and FusedAdam counts by group; load into "
            "groups of parameters that have made one number of steps, or go on with torch.optim.AdamW"
        )
    return found.pop() if found else None


def _check_parts(index: Any, state: dict[str, Any], parts: tuple[str, ...], local: Tensor) -> None:
    """Check that each part has the parameter's shape, or one dimension."""
    for name in parts:
        value = state.get(name)
        if value is None:
            raise ValueError(
                f"the state of parameter {index} has no {name}; give {', '.join(parts)}, or leave out its whole state, "
                "which then starts from zero"
            )
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} of parameter {index} is {described(value)}; give a tensor")
        halves = name == "master_param" and value.dtype == torch.int16
        if not (value.is_floating_point() or halves):
            raise TypeError(
                f"{name} of parameter {index} is {value.dtype}; give floating-point numbers"
            )
        local_value = local_part(value)
        if local_value.numel() != local.numel() or local_value.shape not in (
            local.shape,
            (local.numel(),),
        ):
            raise ValueError(
                f"{name} of parameter {index} is {list(local_value.shape)}, the parameter "
                f"{list(local.shape)}; load the state "
                "of these parameters, in their order"
            )
