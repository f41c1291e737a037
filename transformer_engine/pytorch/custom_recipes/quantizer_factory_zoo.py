"""factory(role) -> the quantizer of a role, for recipes that combine formats.

Each is an argument for `recipe.CustomRecipe(qfactory=..)`, and an example factory. A role without a
tensor type means an input, as in `quantizer_factories`.
"""

from __future__ import annotations

from typing import Any

from ...common import absent
from ..constants import DType
from ..quantization.roles import (
    BACKWARD_TENSORS,
    FORWARD_TENSORS,
    DelayedScalingRequest,
    QuantizerRole,
)
from ..runtime.device import canonical_device
from ..tensor.float8_tensor import Float8CurrentScalingQuantizer
from ..tensor.hybrid_tensor import HybridQuantizer
from ..tensor.identity_tensor import IdentityQuantizer
from ..tensor.nvfp4_tensor import NVFP4Quantizer
from ..tensor.quantizer import Quantizer
from .quantizer_factories import mxfp8_factory, nvfp4_factory

__all__ = [
    "high_precision_fwd_mxfp8_bwd_factory",
    "mxfp8_fwd_high_precision_bwd_factory",
    "mxfp8_fwd_nvfp4_bwd_factory",
    "nvfp4_1d_weight_factory",
    "nvfp4_linear_fp8_dpa_factory",
    "nvfp4_row_scaled_fwd_high_precision_bwd_factory",
    "nvfp4_row_scaled_fwd_mxfp8_bwd_factory",
]

absent.install_getter(__name__)

_DEQUANTIZED = "rowwise_dequantized"


def _tensor_type(role: QuantizerRole | None) -> str:
    """Return the tensor of a role, "input" if it names none."""
    tensor_type = getattr(role, "tensor_type", "")
    if role is not None and not tensor_type:  # the role of a slot, which equals a string
        tensor_type = next(
            (t for t in (*FORWARD_TENSORS, *BACKWARD_TENSORS) if role == f"linear_{t}"), ""
        )
    return tensor_type or "input"


def high_precision_fwd_mxfp8_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Compute the forward pass in high precision and the backward pass in MXFP8."""
    if _tensor_type(role) in BACKWARD_TENSORS:
        return mxfp8_factory(role)
    return HybridQuantizer(IdentityQuantizer(), mxfp8_factory(role))


def mxfp8_fwd_nvfp4_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Compute the forward pass in MXFP8 and the backward pass in NVFP4.

    The backward pass reads inputs from their high-precision values, with a Hadamard transform, and weights
    from the values of their MXFP8 codes, so that it differentiates the weights of the forward pass.
    """
    tensor = _tensor_type(role)
    if tensor in BACKWARD_TENSORS:
        return nvfp4_factory(role)
    if tensor == "weight":
        return HybridQuantizer(
            mxfp8_factory(role), NVFP4Quantizer(), columnwise_source=_DEQUANTIZED
        )
    transformed = NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
    return HybridQuantizer(mxfp8_factory(role), transformed)


def nvfp4_1d_weight_factory(role: QuantizerRole | None) -> Quantizer:
    """Compute in NVFP4 with a scale per 16 weight elements too, instead of per 16 x 16."""
    return NVFP4Quantizer() if _tensor_type(role) == "weight" else nvfp4_factory(role)


def mxfp8_fwd_high_precision_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Compute the forward pass in MXFP8 and the backward pass with dequantized operands in high precision.

    The result equals `MXFP8BlockScaling(backward_override="dequantized")`.
    """
    if _tensor_type(role) in BACKWARD_TENSORS:
        return IdentityQuantizer()
    return HybridQuantizer(mxfp8_factory(role), IdentityQuantizer(), columnwise_source=_DEQUANTIZED)


def _row_scaled(role: QuantizerRole | None) -> Quantizer:
    """Return NVFP4 with a second-level scale for each input row; weights have one for the tensor."""
    return NVFP4Quantizer(row_scaled_nvfp4=_tensor_type(role) != "weight")


def nvfp4_row_scaled_fwd_mxfp8_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Compute the forward pass of grouped linear layers in row-scaled NVFP4, and everything else in MXFP8."""
    if (
        getattr(role, "module_type", "") != "grouped_linear"
        or _tensor_type(role) in BACKWARD_TENSORS
    ):
        return mxfp8_factory(role)
    return HybridQuantizer(_row_scaled(role), mxfp8_factory(role))


def nvfp4_row_scaled_fwd_high_precision_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Compute the forward pass in row-scaled NVFP4 and the backward pass with dequantized operands."""
    if _tensor_type(role) in BACKWARD_TENSORS:
        return IdentityQuantizer()
    return HybridQuantizer(_row_scaled(role), IdentityQuantizer(), columnwise_source=_DEQUANTIZED)


def nvfp4_linear_fp8_dpa_factory(role: QuantizerRole | None) -> Any:
    """Compute linear layers in NVFP4 and attention in FP8.

    In attention, the probabilities and their gradient have delayed scaling with the most recent maximum, and the other
    tensors current scaling: E5M2 for gradients and E4M3 for the rest.
    """
    name = getattr(role, "name", "")
    module, tensor = getattr(role, "module_type", ""), _tensor_type(role)
    boundary = (
        next((end for end in ("dpa_output", "dpa_grad_input") if end in name), "")
        if not module
        else ""
    )
    if module != "dpa" and not boundary:
        return nvfp4_factory(role)
    if tensor in ("s", "dp"):
        return DelayedScalingRequest(amax_history_len=1, amax_compute_algo="most_recent")
    gradient = tensor in ("do", "dqkv") or boundary == "dpa_grad_input"
    element = DType.kFloat8E5M2 if gradient else DType.kFloat8E4M3
    return Float8CurrentScalingQuantizer(element, canonical_device())
