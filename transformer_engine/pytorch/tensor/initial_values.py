"""First values of a quantized parameter, in high precision: how an optimizer gets at them, and how a pickle holds them.

The accessors are methods bound to the parameter, as NVIDIA's are. A pickle holds the values instead, None once
they are cleared, and binds the accessors to the tensor that it makes: a bound method's pickle names an attribute.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor

VALUES = "_high_precision_init_val"


def keep_initial_values(param: Any, values: Tensor | None) -> None:
    """Attach accessors for the values, which are kept on the CPU for an optimizer's master weights; None: cleared."""
    if values is not None:
        setattr(param, VALUES, values.detach().cpu().clone())
    param.get_high_precision_init_val = MethodType(find_initial_values, param)
    param.clear_high_precision_init_val = MethodType(forget_initial_values, param)


def forget_initial_values(param: Tensor) -> None:
    """Remove the initial values, as `clear_high_precision_init_val` does."""
    vars(param).pop(VALUES, None)


def pickle_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return a tensor's attributes without accessors, with the initial values instead (None if cleared)."""
    if "get_high_precision_init_val" not in attributes:
        return attributes
    plain = {name: value for name, value in attributes.items() if name not in _ACCESSORS}
    return {VALUES: None} | plain


def restore(tensor: Any, attributes: dict[str, Any]) -> None:
    """Set the attributes that `pickle_attributes` gave, and the accessors that belong to them."""
    for name, value in attributes.items():
        if name == VALUES:
            keep_initial_values(tensor, value)
        else:
            setattr(tensor, name, value)


def find_initial_values(param: Tensor) -> Tensor | None:
    """Return the high-precision initial values of a parameter; None if it has none, or none any more."""
    return getattr(param, VALUES, None)


_ACCESSORS = ("get_high_precision_init_val", "clear_high_precision_init_val")
