"""Fusion modes: how the matrix between two layer steps is computed, and why.

| mode | the matrix between the producer and the product that reads it |
| --- | --- |
| `fused_cast` | the producer's kernel quantizes it: no high-precision copy is written |
| `in_product` | the product before it computes it in its epilogue |
| `separate` | the producer writes values; the product's quantizer reads them |

| matrix | producer | modes, in order of preference |
| --- | --- | --- |
| `norm_output` | the norm | `fused_cast`, `separate` |
| `mlp_activation` | the activation | `fused_cast`, `in_product`, `separate` |
| `mlp_gradient` | the gradient of the activation | `fused_cast`, `in_product`, `separate` |

The weight gradient of fc2 reads the activation's output by columns:

| mode of `mlp_columns` | the columns of the activation's output |
| --- | --- |
| `recomputed` | the kernel of the activation's gradient, which reads fc1's output, computes them too |
| `saved` | the forward pass saves them |

With `cache_quantized_activation_input` the MLP saves fc1's output, which the activation's gradient reads:

| mode of `mlp_input` | fc1's output |
| --- | --- |
| `quantized` | E4M3 codes in blocks of 1 x 128 |
| `values` | its values |

The modes are chosen when a spec is built. `te.explain` prints the reasons, and `te.use_backend` forces a mode. `te.ops`
reads the same rule for gradients, `unsupported_gradient_cast`.
"""

from __future__ import annotations

from typing import NamedTuple

from ...common.dispatch import Backend, Table
from ...common.formats import BLOCK_1D
from ..primitives.activation import ACTIVATIONS, gradient_fuses
from ..primitives.quantize import Cast
from .linear_operands import gradient_cast, input_cast
from .linear_spec import RECOMPUTED, SAVED, LinearSpec, gathers_values, inspects, sums_over_ranks

FUSED_CAST, IN_PRODUCT, SEPARATE = "fused_cast", "in_product", "separate"
ENCODED, VALUES = "quantized", "values"

# Reasons why the layer that reads a matrix must quantize it itself.
RETURNED = "a matrix that is returned too"
SAVED_INPUT = "an input that is kept for the backward pass"
OTHER_BACKWARD = "a backward pass in another precision"
GATHERED = "a matrix that is gathered from other ranks"
TRACED = "tracing by a compiler, which must see writes to the scaling state"
UNUSED = "a gradient that is not passed on"
_FEATURES = frozenset({RETURNED, SAVED_INPUT, OTHER_BACKWARD, GATHERED, TRACED, UNUSED})


class Columns(NamedTuple):
    """Columns of the activation output [M, F], which fc2's weight gradient reads.

    Attributes:
        activation: Mode for the activation output.
        gradient: Mode for fc1's output gradient.
        one_scale: The codes have one scale.
        is_copy: The columns are a copy of the codes, not a view of the row-wise codes.
        needs_gradients: The gradients for fc2's weight and fc1's output are computed.
        sums_bias_gradient: The gradient's kernel also sums columns for fc1's bias gradient.
        communicates: fc2 exchanges values or codes with other ranks.
        repeats_forward: The backward pass repeats the forward pass.
    """

    activation: str
    gradient: str
    one_scale: bool
    is_copy: bool
    needs_gradients: bool
    sums_bias_gradient: bool
    communicates: bool
    repeats_forward: bool


class CachedInput(NamedTuple):
    """The saved fc1 output [M, N], the activation input.

    Attributes:
        requested: `cache_quantized_activation_input`.
        columns: `mlp_columns` mode.
        width: Activation output columns.
    """

    requested: bool
    columns: str
    width: int


class Fusion(NamedTuple):
    """A matrix that a norm, an activation or its gradient computes, and that a product reads.

    Attributes:
        features: The reasons above (`RETURNED` to `UNUSED`) that apply to the call.
        codes: Format name of the codes that the product reads; None if its quantizer cannot run in the
            producer's kernel.
        activation: Activation name; None for a norm.
        gradient: The matrix is the activation's input gradient.
        one_scale: One scale is computed from the whole matrix.
        separate_sums: Column sums of the matrix are needed, and a separate cast with sums is faster.
        quantized: The product before the activation is quantized.
        reduced: The product before the activation is this rank's part of a sum.
        inspected: An inspector reads or replaces the product before the activation.
    """

    features: tuple[str, ...]
    codes: str | None
    activation: str | None = None
    gradient: bool = False
    one_scale: bool = False
    separate_sums: bool = False
    quantized: bool = False
    reduced: bool = False
    inspected: bool = False


def unsupported_gradient_cast(activation: str, one_scale: bool, separate_sums: bool) -> str | None:
    """Reason why an activation gradient's kernel does not quantize it; see `Fusion`."""
    if one_scale and ACTIVATIONS[activation].gated:
        # A kernel finds the maximum and another casts, with dy [M, F] in memory until both are done: for a
        # gated unit that is the peak in the whole layer, and separate steps free dy in between.
        return "the scale of the tensor needs all of dy first, which would be in memory at the peak of the layer"
    if separate_sums:
        return "a separate cast to blocks of rows, together with the column sums, is faster"
    return None


def has_one_scale(cast: Cast) -> bool:
    """Whether a cast computes one scale from the whole matrix, which it reads twice."""
    return cast.multiplier is None and cast.spec.format.block is None


def _unsupported_cast(fusion: Fusion) -> str | None:
    if fusion.codes is None:
        return "the quantizer of the product reads a tensor in memory and cannot run inside another kernel"
    if not fusion.gradient:
        return None
    assert fusion.activation is not None
    return unsupported_gradient_cast(fusion.activation, fusion.one_scale, fusion.separate_sums)


def _unsupported_epilogue(fusion: Fusion) -> str | None:
    if fusion.activation != "gelu":
        return f"no matrix product computes {fusion.activation} in its epilogue, only gelu"
    if fusion.reduced:
        return "the product is only this rank's part of a sum"
    if fusion.inspected:
        return "an inspector reads the product"
    if fusion.codes is not None:
        return f"the kernel of the activation quantizes its output to {fusion.codes} codes"
    # In a traced graph no kernel quantizes its result, so `codes` is None. Results must still equal eager
    # mode, where the activation's kernel reads the rounded product.
    return "the product is quantized" if fusion.quantized else None


def _unsupported_columns(columns: Columns) -> str | None:
    """Reason why the activation gradient's kernel does not compute its output columns."""
    if not columns.needs_gradients:
        return "the gradients of fc2's weight and of fc1's output are not both computed"
    if columns.repeats_forward:
        return "the backward pass repeats the forward pass, so that nothing is saved"
    if columns.activation != FUSED_CAST:
        return "the activation does not quantize its output"
    if not columns.one_scale:
        return "only codes with one scale are computed beside the gradient"
    if not columns.is_copy:
        return "products read the codes by rows in both directions"
    if columns.gradient == IN_PRODUCT:
        return "a product computes the activation's gradient"
    if columns.sums_bias_gradient:
        return "the kernel of the gradient sums the columns for fc1's bias"
    if columns.communicates:
        return "fc2 exchanges values with other ranks between its products"
    return None


def _unsupported_encoding(saved: CachedInput) -> str | None:
    """Reason why fc1's output is saved as values."""
    if not saved.requested:
        return "cache_quantized_activation_input is False"
    if saved.columns != RECOMPUTED:
        return "only the kernel of mlp_columns=recomputed reads codes"
    if saved.width % BLOCK_1D.block[1]:  # pyright: ignore[reportOptionalSubscript]
        return f"the activation's output has {saved.width} columns, which is no multiple of 128"
    return None


_MODES = {
    FUSED_CAST: Backend(FUSED_CAST, unsupported_reason=_unsupported_cast),
    IN_PRODUCT: Backend(IN_PRODUCT, takes=_FEATURES, unsupported_reason=_unsupported_epilogue),
    SEPARATE: Backend[Fusion](SEPARATE, takes=_FEATURES),
}


def _table(matrix: str, *modes: str) -> Table[Fusion]:
    return Table(matrix, tuple([_MODES[mode] for mode in modes]), describe=Fusion)


NORM_OUTPUT = _table("norm_output", FUSED_CAST, SEPARATE)
MLP_ACTIVATION = _table("mlp_activation", FUSED_CAST, IN_PRODUCT, SEPARATE)
MLP_GRADIENT = _table("mlp_gradient", FUSED_CAST, IN_PRODUCT, SEPARATE)


MLP_COLUMNS: Table[Columns] = Table(
    "mlp_columns",
    (Backend(RECOMPUTED, unsupported_reason=_unsupported_columns), Backend[Columns](SAVED)),
    describe=Columns,
)


MLP_INPUT: Table[CachedInput] = Table(
    "mlp_input",
    (Backend(ENCODED, unsupported_reason=_unsupported_encoding), Backend[CachedInput](VALUES)),
    describe=CachedInput,
)


def choose_norm_mode(linear: LinearSpec, returned: bool) -> str:
    """Choose which kernel quantizes norm(x); with `returned` the caller receives norm(x) too."""
    return NORM_OUTPUT.choose(_input_fusion(linear, returned))


def choose_activation_mode(activation: str, fc1: LinearSpec, fc2: LinearSpec) -> str:
    """Choose which kernel computes the activation output, and which one quantizes it for fc2."""
    return MLP_ACTIVATION.choose(
        _input_fusion(fc2)._replace(
            activation=activation,
            quantized=not (fc1.input_quantizer.is_identity and fc1.weight_quantizer.is_identity),
            reduced=sums_over_ranks(fc1.parallel, "row"),
            inspected=inspects(fc1, "output"),
        )
    )


def choose_gradient_mode(activation: str, fc1: LinearSpec, fc2: LinearSpec) -> str:
    """Choose which kernel computes fc1's output gradient, and which one quantizes it for fc1."""
    features = _features(
        {
            UNUSED: not fc1.needs_grad_input,
            OTHER_BACKWARD: fc1.backward_operands != "quantized",
            GATHERED: fc1.parallel.gathers_gradient,
            TRACED: fc1.traced,
        }
    )
    cast = None if features else gradient_cast(fc1)
    return MLP_GRADIENT.choose(
        Fusion(
            features,
            None if cast is None else cast.spec.format.name,
            activation,
            gradient=True,
            one_scale=cast is not None and has_one_scale(cast),
            separate_sums=cast is not None and not gradient_fuses(cast.spec, fc1.needs_grad_bias),
            reduced=sums_over_ranks(fc2.parallel, "column"),
            inspected=inspects(fc2, "grad_input"),
        )
    )


def choose_columns_mode(
    activation: str, gradient: str, fc1: LinearSpec, fc2: LinearSpec, repeats_forward: bool
) -> str:
    """Choose where the activation output's columns are computed, for the modes of both its passes."""
    cast = input_cast(fc2) if activation == FUSED_CAST else None
    return MLP_COLUMNS.choose(
        Columns(
            activation,
            gradient,
            one_scale=cast is not None and cast.spec.format.block is None,
            is_copy=cast is not None and cast.spec.columnwise,
            needs_gradients=fc2.needs_grad_weight and fc2.needs_grad_input and fc1.needs_grad_input,
            sums_bias_gradient=gradient == FUSED_CAST and fc1.needs_grad_bias,
            communicates=fc2.communicates,
            repeats_forward=repeats_forward,
        )
    )


def _input_fusion(spec: LinearSpec, returned: bool = False) -> Fusion:
    """Describe the input of a linear layer as the result of the step before."""
    features = _features(
        {
            RETURNED: returned,
            SAVED_INPUT: spec.keep_input,
            OTHER_BACKWARD: spec.backward_operands != "quantized",
            GATHERED: gathers_values(spec),
            TRACED: spec.traced,
        }
    )
    cast = None if features else input_cast(spec)
    return Fusion(features, None if cast is None else cast.spec.format.name)


def _features(found: dict[str, bool]) -> tuple[str, ...]:
    return tuple([feature for feature, applies in found.items() if applies])
