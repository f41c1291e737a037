"""factory(role) -> the quantizer of a recipe for the role, also as a fallback in custom factories.

`CustomRecipe(qfactory=mxfp8_factory)` computes bit for bit what `MXFP8BlockScaling()` does, and so for the others. A
role without a tensor type, or None, means an input. Every call returns a new quantizer.
"""

from __future__ import annotations

from functools import cache

from ...common import absent
from ...common.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from ..quantization.family import find_family
from ..quantization.roles import (
    BACKWARD_TENSORS,
    FORWARD_TENSORS,
    DelayedScalingRequest,
    QuantizerRole,
)
from ..runtime.device import canonical_device
from ..tensor.identity_tensor import IdentityQuantizer
from ..tensor.quantizer import Quantizer

__all__ = [
    "current_scaling_factory",
    "delayed_scaling_factory",
    "float8_block_scaling_factory",
    "high_precision_factory",
    "mxfp8_factory",
    "nvfp4_factory",
]

absent.install_getter(__name__)


def high_precision_factory(role: QuantizerRole | None) -> Quantizer:
    """Return a quantizer that leaves values unchanged.

    Args:
        role: Layer and tensor that the quantizer serves; None is an input.
    """
    return IdentityQuantizer()


def delayed_scaling_factory(role: QuantizerRole | None) -> DelayedScalingRequest:
    """Return a request for delayed scaling, whose scales and histories the module holds.

    Args:
        role: Layer and tensor that the quantizer serves; None is an input.
    """
    return DelayedScalingRequest()


def current_scaling_factory(role: QuantizerRole | None) -> Quantizer:
    """Return a quantizer to FP8 with the tensor's own maximum: E5M2 for gradients, otherwise E4M3.

    Args:
        role: Layer and tensor that the quantizer serves; None is an input.
    """
    return _recipe_quantizer(Float8CurrentScaling, role)


def float8_block_scaling_factory(role: QuantizerRole | None) -> Quantizer:
    """Return a quantizer to FP8 with one scale per 128 x 128 values in a weight, per 1 x 128 in other tensors.

    Args:
        role: Layer and tensor that the quantizer serves; None is an input.
    """
    return _recipe_quantizer(Float8BlockScaling, role)


def mxfp8_factory(role: QuantizerRole | None) -> Quantizer:
    """Return a quantizer to MXFP8, with one power of two per 32 values.

    Args:
        role: Layer and tensor that the quantizer serves; None is an input.
    """
    return _recipe_quantizer(MXFP8BlockScaling, role)


def nvfp4_factory(role: QuantizerRole | None) -> Quantizer:
    """Return a quantizer to NVFP4, with one scale per 16 x 16 values in a weight, per 16 in other tensors.

    Column-wise input and gradient codes are Hadamard transformed, and gradients are rounded stochastically.

    Args:
        role: Layer and tensor that the quantizer serves; None is an input.
    """
    return _recipe_quantizer(NVFP4BlockScaling, role)


@cache
def _recipe(kind: type[Recipe]) -> Recipe:
    return kind()


def _recipe_quantizer(kind: type[Recipe], role: QuantizerRole | None) -> Quantizer:
    recipe = _recipe(kind)
    make = find_family(recipe).quantizer
    assert make is not None
    tensor = getattr(role, "tensor_type", "")
    if role is not None and not tensor:  # the role of a slot, which equals a string
        tensor = next(
            (t for t in (*FORWARD_TENSORS, *BACKWARD_TENSORS) if role == f"linear_{t}"), ""
        )
    tensor = tensor or "input"
    return make(
        recipe, "backward" if tensor in _GRADIENTS else "forward", tensor, canonical_device()
    )


# In attention, too: the gradients of output, probabilities, and query, key and value.
_GRADIENTS = (*BACKWARD_TENSORS, "do", "dp", "dqkv")
