"""What FusedAdam refuses, each by its value and the remedy; RuntimeError where the original raises it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...common.checks import described, number, switch
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
    """TypeError, ValueError or RuntimeError for what no step can be made with."""
    for name in ("lr", "eps", "weight_decay"):
        not_below_zero(name, group.get(name))
    betas = group.get("betas")
    pair = isinstance(betas, (tuple, list)) and len(betas) == 2 and all(map(_is_share, betas))
    if not pair:
        raise ValueError(f"betas={described(betas)} are not two numbers in 0 .. 1; give such")
    switch("bias_correction", group.get("bias_correction"))
    refuse_absent(group, "FusedAdam", "torch.optim.AdamW")


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0.0 <= value < 1.0


def not_below_zero(name: str, value: Any) -> None:
    """TypeError or ValueError unless the value is one number of at least 0; one on a device is not read."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name}={described(value)} has {value.numel()} numbers; give one")
        if not value.is_cpu:
            return
        value = value.item()
    number(name, value)
    if not value >= 0.0:
        raise ValueError(f"{name}={value} is below 0; give a number of at least 0")


def check_switches(**switches: Any) -> None:
    """TypeError unless all are True or False."""
    for name, value in switches.items():
        switch(name, value)


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
