"""The operations of passes: their settings, inputs and results.

An operation contributes steps with these names to a pass. An executor has one function per name; a pass of an unknown
operation is rejected by the executor. Optional inputs and results are None where they are absent. "Direction" means the
rowwise operand [M, K] or the columnwise operand [K, M] of a matrix [M, K]; a product contracts the last axis of both.

| op | inputs | results | settings |
| --- | --- | --- | --- |
| `cast` | x | rowwise, columnwise | `CastSettings` |
| `quantize` | x | quantized tensor | `CastSettings` |
| `dequantize` | operand or quantized tensor | values | None |
| `dense` | x | values with a contiguous axis, dequantized if quantized | None |
| `convert` | x | x in the dtype of a layer | `Layer` |
| `product` | a, b, bias, activation input, out | y, activation input | `Product` |
| `weight_gradient` | dy, x | dw, or a placeholder | `Product` |
| `add_bias` | y, bias | y + bias | None |
| `inspect` | y | y, or a replacement of the same shape | `Inspection` |
| `add` | a, b | a + b | None |
| `accumulate` | total, x | total, written in place | None |
| `scale` | x, factor | x * factor | None |
| `norm` | x, gamma, beta | y (or its codes), mean, rstdev | `NormSettings` |
| `norm_backward` | dy, x, mean, rstdev, gamma, addend | dx, dgamma, dbeta | `NormSettings` |
| `activation` | x | y (or its codes) | `Activation` |
| `activation_backward` | dy, x | dx (or its codes), column sums | `Activation` |
| `column_sum` | x | sums (after the codes of x with a cast) | `ColumnSum` |
| `transpose` | operand [M, K] | operand [K, M] with the same codes and one scale | None |
| `dropout` | x | y, mask | `DropoutSettings` |
| `dropout_backward` | dy, mask | dx | `DropoutSettings` |
| `all_gather.begin`, `all_reduce.begin`, `reduce_scatter.begin` | x | pending | `Collective` |
| `all_gather.wait`, `all_reduce.wait`, `reduce_scatter.wait` | pending | y | `Collective` |
| `gathered_product` | pending of an `all_gather`, b, bias | y, gathered matrix | `OverlappedProduct` |
| `scattered_product` | a, b | pending of a `reduce_scatter` | `OverlappedProduct` |

An `all_gather` takes values, a quantized tensor, or an operand, whose codes and scales it sends.

`grouped_cast`, `grouped_convert`, `grouped_dequantize`, `grouped_product`, `grouped_inspect`,
`grouped_weight_gradient` and `grouped_column_sum` are the operations of these names over groups of rows, with the same
settings (`groups.py`). `grouped_trained` returns the codes of groups whose weights are trained, and None for the
others; its settings are a `Layer`.

Operations that only sequences of operations (`te.ops`) contribute; `Named` names an object of their environment:

| op | inputs | results | settings |
| --- | --- | --- | --- |
| `leading` | x | dimensions of x before the last | None |
| `shape` | x | dimensions of x | None |
| `rows` | x | x as a matrix [M, N] | None, or N |
| `unflatten` | y, leading | y [M, N] with these dimensions in place of M | None |
| `reshape` | x, shape | x in another shape | None |
| `to_shape` | x | x in a fixed shape | shape |
| `to_dtype` | x | x in another dtype | dtype |
| `alias` | x | a tensor that shares the memory of x and has no history | None |
| `sum_values` | a, b | a + b of quantized tensors in float32, rounded to the dtype of a | None |
| `values` | x | x, dequantized if quantized | None |
| `quantize_values` | x | quantized tensor | `Named` quantizer |
| `constant_scale` | x | x * constant | float |
| `row_scale` | y, scales | y * scales[:, None] | None |
| `row_scale_backward` | dy, y, scales | dy * scales[:, None], sums of dy * y over rows' elements | None |
| `block_order` | x | last dimension in another order of its blocks | blocks |
| `l2_norm` | x | y, rstdev | float (epsilon) |
| `l2_norm_backward` | dy, x, rstdev | dx | None |
| `situ_glu` | x | y | constants |
| `situ_glu_backward` | dy, x | dx | constants |
| `copy` | x | a contiguous copy of x | None |
| `copy_into` | x | a copy of x in a buffer of the caller | `Named` buffer |
| `members` | matrices or vectors.. | list of one per group | None |
| `apart` | list of one per group | matrices or vectors.. | None |
| `grouped_scaled_bias` | y, biases, scales | y_g + scales_g[:, None] * bias_g of each group g | `Layer` |
| `grouped_scaled_bias_backward` | dy, biases, scales | dbiases, dscales [M, 1] | `Layer` |

Where `settings.cast` is not None, the operation quantizes its result: two results, the rowwise and the columnwise
codes, take the place of the first result (of `column_sum`: they precede the sums).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer of the environment, by name."""

    layer: str

    def __str__(self) -> str:
        return self.layer


@dataclass(frozen=True, slots=True)
class CastSettings:
    """Quantization of a matrix by one of a layer's quantizers.

    Attributes:
        layer: Name of the linear layer in the environment.
        tensor: Its quantizer: "input", "weight", "output", "grad_output" or "grad_input".
        rowwise: Make the rowwise operand.
        columnwise: Make the columnwise operand.
    """

    layer: str
    tensor: str
    rowwise: bool
    columnwise: bool

    def __str__(self) -> str:
        directions = [name for name in ("rowwise", "columnwise") if getattr(self, name)]
        return f"{self.layer}.{self.tensor}, {' and '.join(directions) or 'no direction'}"


@dataclass(frozen=True, slots=True)
class Product:
    """y = a @ b.T of a linear layer, which says the dtype of the result and the accuracy of its sums.

    Attributes:
        layer: Name of the linear layer in the environment.
        kind: "forward", "grad_input" or "grad_weight".
        turned: Which of a and b is an unquantized matrix that is read as its transpose.
        activation: None, "gelu" (y is the activation of the product, the second result the product itself), or
            "gelu_gradient" (the product is multiplied by the derivative at the fourth input).
        cast: Quantizes the result, or None.
        keeps: With "gelu", the product itself is a second result; otherwise it is not stored.
    """

    layer: str
    kind: str
    turned: tuple[bool, bool] = (False, False)
    activation: str | None = None
    cast: CastSettings | None = None
    keeps: bool = True

    def __str__(self) -> str:
        parts = [f"{self.layer}.{self.kind}"]
        parts += [f"{name} transposed" for name, turned in zip("ab", self.turned, strict=True) if turned]
        parts += [self.activation] if self.activation else []
        return ", ".join(parts + ([f"codes of {self.cast}"] if self.cast else []))


@dataclass(frozen=True, slots=True)
class Inspection:
    """Inspection of a result of a linear layer, "output" or "grad_input", by the inspector of the layer."""

    layer: str
    tensor: str

    def __str__(self) -> str:
        return f"{self.layer}.{self.tensor}"


@dataclass(frozen=True, slots=True)
class NormSettings:
    """A normalization of rows, by its name in the environment; `cast` quantizes its output."""

    norm: str
    cast: CastSettings | None = None

    def __str__(self) -> str:
        return self.norm + (f", codes of {self.cast}" if self.cast else "")


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation, by its name in the environment.

    Attributes:
        activation: Name in the environment.
        kind: The function, for example "gelu"; decides which products compute it in their epilogue.
        cast: Quantizes y, or dx in a backward pass.
        sums: The linear layer that gets the column sums of dx as the gradient of its bias, or None.
    """

    activation: str
    kind: str
    cast: CastSettings | None = None
    sums: str | None = None

    def __str__(self) -> str:
        return self.kind + (f", codes of {self.cast}" if self.cast else "")


@dataclass(frozen=True, slots=True)
class ColumnSum:
    """Column sums of a matrix in the dtype of a layer's bias; `cast` quantizes the matrix in the same step."""

    layer: str
    cast: CastSettings | None = None

    def __str__(self) -> str:
        return f"{self.layer}.grad_bias" + (f", codes of {self.cast}" if self.cast else "")


@dataclass(frozen=True, slots=True)
class DropoutSettings:
    """Dropout, by its name in the environment."""

    dropout: str


@dataclass(frozen=True, slots=True)
class Named:
    """An object of the environment, by the name of its operation and its slot there."""

    operation: str
    slot: str

    def __str__(self) -> str:
        return f"{self.operation}.{self.slot}"


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective over the tensor-parallel group of a layer, or over another group of the environment.

    Attributes:
        group: Name of the layer, or of the group, in the environment.
        axis: Axis that an `all_gather` joins: 0, or 1 for the column direction [K, M] of rows that ranks share.
        dense: The result is made dense, as by the `dense` operation.
        overlaps: It can overlap with the product of its rows, see `OverlappedProduct`.
    """

    group: str
    axis: int = 0
    dense: bool = False
    overlaps: bool = False

    def __str__(self) -> str:
        return f"{self.group}, columns" if self.axis else self.group


@dataclass(frozen=True, slots=True)
class OverlappedProduct:
    """A product and the collective of its input or of its result, which can run by parts at the same time."""

    product: Product
    collective: Collective

    def __str__(self) -> str:
        return f"{self.product}; {self.collective}"


# (number of inputs, number of results without a cast) by operation.
OPERATIONS: dict[str, tuple[int, int]] = {
    "cast": (1, 2),
    "quantize": (1, 1),
    "dequantize": (1, 1),
    "dense": (1, 1),
    "convert": (1, 1),
    "product": (5, 2),
    "weight_gradient": (2, 1),
    "add_bias": (2, 1),
    "inspect": (1, 1),
    "add": (2, 1),
    "accumulate": (2, 1),
    "scale": (2, 1),
    "norm": (3, 3),
    "norm_backward": (6, 3),
    "activation": (1, 1),
    "activation_backward": (2, 2),
    "column_sum": (1, 1),
    "transpose": (1, 1),
    "dropout": (1, 2),
    "dropout_backward": (2, 1),
    **{
        f"{name}.{half}": (1, 1)
        for name in ("all_gather", "all_reduce", "reduce_scatter")
        for half in ("begin", "wait")
    },
    "gathered_product": (3, 2),
    "scattered_product": (2, 1),
}
Settings = (
    Layer
    | CastSettings
    | Product
    | Inspection
    | NormSettings
    | Activation
    | ColumnSum
    | DropoutSettings
    | Collective
    | OverlappedProduct
    | Hashable
)
