"""Whether a norm or an activation makes the codes of the next product, or is computed in a product's epilogue.

The tables choose when a spec is built; `explain` prints their reasons.
"""

from __future__ import annotations

from typing import NamedTuple

from ...common.dispatch import Backend, Table
from ..primitives.activation import ACTIVATIONS, gradient_fuses
from ..primitives.quantize import Cast
from .linear_spec import (
    LinearSpec,
    gathers_values,
    gradient_cast,
    input_cast,
    inspects,
    sums_over_ranks,
)

IN_CODES, IN_PRODUCT, SEPARATE = "fused_cast", "in_product", "separate"

# Reasons why the layer that reads a matrix must quantize it itself.
RETURNED = "a matrix that is returned too"
KEPT = "an input that is kept for the backward pass"
OTHER_BACKWARD = "a backward pass in another precision"
GATHERED = "a matrix that is gathered from other ranks"
TRACED = "tracing by a compiler, which must see writes to the scaling state"
UNUSED = "a gradient that is not passed on"
_FEATURES = frozenset({RETURNED, KEPT, OTHER_BACKWARD, GATHERED, TRACED, UNUSED})


class Fusion(NamedTuple):
    """A matrix that a norm, an activation or the gradient of one makes, and that a product reads.

    Attributes:
        features: Why its maker may not quantize it.
        activation: Name of the activation; None for a norm.
        codes: Format that the product's quantizer requests of a kernel; None if it requests none.
        one_scale: One scale is computed from the whole matrix.
        sums: Its column sums are requested too, and row blocks alone are quantized faster afterwards.
        quantized: The product before the activation is quantized.
        reduced: The product before the activation is this rank's part of a sum.
        inspected: An inspector reads or replaces the product before the activation.
    """

    features: tuple[str, ...]
    activation: str | None = None
    codes: str | None = None
    one_scale: bool = False
    sums: bool = False
    quantized: bool = False
    reduced: bool = False
    inspected: bool = False


def _unsupported_codes(fusion: Fusion) -> str | None:
    return (
        None
        if fusion.codes is not None
        else "the quantizer of the product reads a tensor in memory and cannot run inside another kernel"
    )


def _unsupported_gradient_codes(fusion: Fusion) -> str | None:
    assert fusion.activation is not None
    if (reason := _unsupported_codes(fusion)) is not None:
        return reason
    if fusion.one_scale and ACTIVATIONS[fusion.activation].gated:
        # A kernel finds the maximum and another casts, with dy [M, F] in memory until both are done: for a gated unit
        # that is the peak of the whole layer, and separate steps free dy in between.
        return (
            "the scale of the tensor needs all of dy first, which would be in memory at the peak of the layer"
        )
    return (
        "a separate cast to blocks of rows, together with the column sums, is faster" if fusion.sums else None
    )


def _unsupported_product(fusion: Fusion) -> str | None:
    if fusion.activation != "gelu":
        return f"no matrix product computes {fusion.activation} in its epilogue, only gelu"
    if fusion.reduced:
        return "the product is only this rank's part of a sum"
    if fusion.inspected:
        return "an inspector reads the product"
    if fusion.codes is not None:
        return f"{fusion.codes} codes are made where the activation is"
    # A graph, in which no kernel makes codes, has the bits of eager mode, whose kernel reads the rounded x.
    return "the product is quantized" if fusion.quantized else None


_SEPARATE = Backend[Fusion](SEPARATE, takes=_FEATURES)
_IN_PRODUCT = Backend[Fusion](IN_PRODUCT, takes=_FEATURES, unsupported_reason=_unsupported_product)
NORM_OUTPUT: Table[Fusion] = Table(
    "norm_output", (Backend(IN_CODES, unsupported_reason=_unsupported_codes), _SEPARATE), describe=Fusion
)


# The matrices between the two products of an MLP.
MLP_ACTIVATION: Table[Fusion] = Table(
    "mlp_activation",
    (Backend(IN_CODES, unsupported_reason=_unsupported_codes), _IN_PRODUCT, _SEPARATE),
    describe=Fusion,
)
MLP_GRADIENT: Table[Fusion] = Table(
    "mlp_gradient",
    (Backend(IN_CODES, unsupported_reason=_unsupported_gradient_codes), _IN_PRODUCT, _SEPARATE),
    describe=Fusion,
)


def norm_output(linear: LinearSpec, returned: bool) -> str:
    """Choose how the matrix between a norm and a linear layer is made; with `returned` the caller gets norm(x) too."""
    features = (RETURNED,) * returned + _features_of_input(linear)
    return NORM_OUTPUT.choose(Fusion(features, codes=_format(None if features else input_cast(linear))))


def mlp_activation(activation: str, fc1: LinearSpec, fc2: LinearSpec) -> str:
    """Choose how the matrix between an activation and fc2 is made."""
    features = _features_of_input(fc2)
    return MLP_ACTIVATION.choose(
        Fusion(
            features,
            activation,
            _format(None if features else input_cast(fc2)),
            quantized=not (fc1.input.is_identity and fc1.weight.is_identity),
            reduced=sums_over_ranks(fc1.parallel, "row"),
            inspected=inspects(fc1, "output"),
        )
    )


def mlp_gradient(activation: str, fc1: LinearSpec, fc2: LinearSpec) -> str:
    """Choose how the gradient of fc1's output is made."""
    asked = {
        UNUSED: not fc1.needs_grad_input,
        OTHER_BACKWARD: fc1.backward != "quantized",
        GATHERED: fc1.parallel.gathers_gradient,
        TRACED: fc1.traced,
    }
    features = tuple(feature for feature, wanted in asked.items() if wanted)
    cast = None if features else gradient_cast(fc1)
    return MLP_GRADIENT.choose(
        Fusion(
            features,
            activation,
            _format(cast),
            one_scale=cast is not None and cast.multiplier is None and cast.spec.format.block is None,
            sums=cast is not None and not gradient_fuses(cast.spec, fc1.needs_grad_bias),
            reduced=sums_over_ranks(fc2.parallel, "column"),
            inspected=inspects(fc2, "grad_input"),
        )
    )


def _features_of_input(spec: LinearSpec) -> tuple[str, ...]:
    asked = {
        KEPT: spec.keep_input,
        OTHER_BACKWARD: spec.backward != "quantized",
        GATHERED: gathers_values(spec),
        TRACED: spec.traced,
    }
    return tuple(feature for feature, wanted in asked.items() if wanted)


def _format(cast: Cast | None) -> str | None:
    return None if cast is None else cast.spec.format.name
