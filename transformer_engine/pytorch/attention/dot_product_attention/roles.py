"""Roles of an attention's quantizers, as a custom recipe's factory is asked with."""

from __future__ import annotations

from ...quantization import QuantizerRole


def attention_roles(name: str, fwd: bool, num_quantizers: int) -> list[QuantizerRole | None]:
    """One tensor for all slots of a product, of which the attention uses one, see `fp8_call`.

    What leaves the attention belongs to no layer: those roles have no module_type, and a name that says so.
    """
    qkv, softmax, grad_output, grad_softmax = (
        QuantizerRole("dpa", tensor, name) for tensor in ("qkv", "s", "do", "dp")
    )
    if fwd:
        tensors = (qkv, QuantizerRole(name=f"{name}.dpa_output"), softmax)
    else:
        tensors = (QuantizerRole(name=f"{name}.dpa_grad_input"), grad_output, grad_softmax)
    return [role for role in tensors for _ in range(num_quantizers // len(tensors))]
