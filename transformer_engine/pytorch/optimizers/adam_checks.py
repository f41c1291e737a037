"""Checks of FusedAdam's settings, parameters and gradients; RuntimeError where the original raises it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...common.checks import described, number
from ...common.numbers import to_bool, to_float
from ..tensor.float8_tensor import Float8Quantizer
from ..tensor.quantized_tensor import QuantizedTensor
from .judged import refuse_absent
from .local import local_of

_PLAIN = (torch.float32, torch.float16, torch.bfloat16)
_MASTERS = (torch.float32, torch.float16)
_MOMENTS = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)


def check_dtypes(master_weights: bool, master: Any, first: Any, second: Any) -> None:
    """RuntimeError for dtypes that no state is kept in."""
    if master_weights and master not in _MASTERS:
        raise RuntimeError(f"master_weight_dtype={described(master)}; give torch.float32 or torch.float16")
    for name, dtype in (("exp_avg_dtype", first), ("exp_avg_sq_dtype", second)):
        if dtype not in _MOMENTS:
            raise RuntimeError(
                f"{name}={described(dtype)}; give torch.float32, torch.float16, torch.bfloat16 or torch.uint8 (FP8)"
            )


def check_capturable(
    master_weights: bool, master: torch.dtype, first: torch.dtype, second: torch.dtype, remainders: bool
) -> None:
    """RuntimeError for states that a captured step cannot keep."""
    if master_weights and master != torch.float32:
        raise RuntimeError(f"capturable=True with master_weight_dtype={master}; give torch.float32")
    if first != second or first not in (torch.float32, torch.bfloat16):
        raise RuntimeError(
            f"capturable=True with exp_avg_dtype={first} and exp_avg_sq_dtype={second}; give torch.float32 for both, "
            "or torch.bfloat16"
        )
    if remainders:
        raise RuntimeError("capturable=True keeps no remainders; say store_param_remainders=False")


NUMBERS = ("lr", "betas", "eps", "weight_decay", "bias_correction")


def check_numbers(group: dict[str, Any]) -> None:
    """Raise TypeError, ValueError or RuntimeError for numbers that no step can be computed with.

    As in the original, the learning rate, epsilon and the weight decay may be negative.
    """
    for name in ("lr", "eps", "weight_decay"):
        one_number(name, group.get(name))
    pair_of(group.get("betas"))
    to_bool("bias_correction", group.get("bias_correction"))
    refuse_absent(group, "FusedAdam", "torch.optim.AdamW")


def pair_of(betas: Any) -> tuple[float, float]:
    """Convert two numbers in [0, 1), in any sequence, array or tensor, to floats; raise ValueError for others."""
    listed = betas.tolist() if hasattr(betas, "tolist") else betas
    is_pair = isinstance(listed, Sequence) and not isinstance(listed, (str, bytes)) and len(listed) == 2
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


def not_below_zero(name: str, value: Any) -> None:
    """Raise TypeError or ValueError unless the value is one number of at least 0; see `one_number`."""
    found = one_number(name, value)
    if found is not None and found < 0.0:
        raise ValueError(f"{name}={found} is below 0; give a number of at least 0")


def check_parameter(parameter: Tensor, grad: Tensor, master_weights: bool, capturable: bool) -> None:
    """RuntimeError or ValueError for a parameter that cannot be stepped with this gradient."""
    if grad.is_sparse:
        raise RuntimeError("FusedAdam takes no sparse gradients; use torch.optim.SparseAdam")
    local, local_grad = local_of(parameter), local_of(grad)
    if isinstance(local, QuantizedTensor):
        delayed = isinstance(getattr(local, "_quantizer", None), Float8Quantizer)
        if not master_weights and not delayed:
            raise RuntimeError(
                f"a {type(local).__name__} cannot be stepped without masters; say FusedAdam(master_weights=True)"
            )
        if capturable:
            raise RuntimeError("capturable=True takes no quantized parameters; say capturable=False")
    elif local.dtype not in _PLAIN:
        raise RuntimeError(f"a parameter is {local.dtype}; give float32, float16 or bfloat16 ones")
    if (parameter is local) != (grad is local_grad):
        raise AssertionError("of a parameter and its gradient one is a DTensor; both have to be, or neither")
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
    for name, held in (("parameter", local), ("gradient", local_grad)):
        if not held.is_contiguous():
            raise ValueError(
                f"a {name} of {list(held.shape)} has strides {held.stride()}; give contiguous tensors"
            )


def check_states(parameter: Tensor, states: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise ValueError if a state belongs to a parameter of another size or device than the present one."""
    local = local_of(parameter)
    for name in names:
        state = states.get(name)
        if not isinstance(state, Tensor):
            continue
        held = local_of(state)
        if held.numel() != local.numel():
            raise ValueError(
                f"{name} of a parameter is {list(held.shape)}, the parameter {list(local.shape)}: its data was "
                "replaced after the state was made; delete the parameter's entry of optimizer.state, which then starts "
                "from zero, or load a state of this shape with load_state_dict()"
            )
        if held.device != local.device:
            raise ValueError(
                f"{name} of a parameter is on {held.device}, the parameter on {local.device}; move the states with "
                "optimizer.load_state_dict(optimizer.state_dict()), which copies them to their parameters' devices"
            )
