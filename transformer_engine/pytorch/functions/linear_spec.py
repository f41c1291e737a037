"""LinearSpec: what a linear layer's forward and backward are told, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..distributed.tensor_parallel import TensorParallel
from ..primitives.gemm import RepeatedProduct
from ..primitives.operand import Operand
from ..primitives.quantize import Cast
from ..tensor.identity_tensor import IdentityQuantizer
from ..tensor.quantized_tensor import QuantizedTensorStorage
from ..tensor.quantizer import Matrix, Quantizer
from .scale_update import ScaleUpdate
from .weight_gradient import WeightGradient

IDENTITY = IdentityQuantizer()


@dataclass(frozen=True)
class Accumulation:
    """Which products promote partial sums to float32 ("split accumulator"): forward, input and weight gradient."""

    forward: bool = False
    grad_input: bool = True
    grad_weight: bool = True


class LinearProducts(NamedTuple):
    """y = x @ w.T, dx = dy @ w and dw = dy.T @ x of one layer; matrices that are not quantized come as they lie.

    grad_weight   None where dw goes somewhere else than to autograd
    """

    forward: RepeatedProduct
    grad_input: RepeatedProduct
    grad_weight: RepeatedProduct | None

    @staticmethod
    def of(
        device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype | None, exact: Accumulation
    ) -> LinearProducts:
        return LinearProducts(
            RepeatedProduct(device, dtype, exact.forward),
            RepeatedProduct(device, dtype, exact.grad_input, (False, True)),
            None
            if weight_dtype is None
            else RepeatedProduct(device, weight_dtype, exact.grad_weight, (True, True)),
        )


@dataclass(frozen=True)
class LinearSpec:
    """Everything a linear layer's forward and backward need beside the tensors, resolved once per forward.

    output, grad_input   quantizers of the results, None to leave them in `dtype`
    cached_weight        the weight as quantized for an earlier microbatch, else None
    backward             "quantized", or the recipe's override: "high_precision" or "dequantized"
    keep_input           save the unquantized input and quantize it again in the backward
    scale_update         what delayed scaling updates when this backward has run
    traced               a compiler is tracing
    communicates         does `parallel` send anything? False spares it the questions
    plain                input, weight and gradients are multiplied as they are: no operands to make and to choose from
    products             None where a compiler traces, and where ranks communicate
    repeats              the passes of a layer that is this product alone, repeated (`repetition.Repeats`); None: not
    Defaults are plain constants: torch 2.11 cannot trace a default that is an object.
    """

    dtype: torch.dtype
    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer
    accumulation: Accumulation
    parallel: TensorParallel
    weight_gradient: WeightGradient
    output: Quantizer | None = None
    grad_input: Quantizer | None = None
    cached_weight: QuantizedTensorStorage | None = None
    backward: str = "quantized"
    keep_input: bool = False
    needs_grad_input: bool = True
    needs_grad_weight: bool = True
    needs_grad_bias: bool = False
    scale_update: ScaleUpdate | None = None
    traced: bool = False
    communicates: bool = True
    plain: bool = False
    products: LinearProducts | None = None
    repeats: Any = None


Spec = TypeVar("Spec")


def changed(spec: Spec, **fields: Any) -> Spec:
    """dataclasses.replace of a frozen spec, without asking for each of its fields: 1 us where that takes 10."""
    if torch.compiler.is_compiling():
        return replace(spec, **fields)  # pyright: ignore[reportArgumentType]
    made = object.__new__(type(spec))
    # What repeats are the passes of the spec that it was.
    made.__dict__.update({**spec.__dict__, "repeats": None, **fields})
    return made


class LinearSaved(NamedTuple):
    """The operands of the two backward products: x for dw, w for dx (None where its product is not needed).

    Of a plain spec the matrices x [M, K] and w [N, K] themselves.
    """

    input: Operand | Matrix | Tensor | None
    weight: Operand | Matrix | Tensor | None


def input_cast(spec: LinearSpec) -> Cast | None:
    """How the kernel that makes a layer's input may quantize it on the way; None where the layer has to."""
    if spec.plain or spec.keep_input or spec.backward != "quantized" or spec.parallel.gathers_input:
        return None
    if spec.traced:
        return None  # writes to the scaling state have to be seen by the compiler
    return spec.input.cast(True, spec.needs_grad_weight)


def gradient_cast(spec: LinearSpec) -> Cast | None:
    """The same for the kernel that makes the gradient of a layer's output."""
    if (
        spec.plain
        or not spec.needs_grad_input
        or spec.backward != "quantized"
        or spec.parallel.gathers_gradient
    ):
        return None
    if spec.traced:
        return None
    return spec.grad_output.cast(True, spec.needs_grad_weight)


def cached_parts(*specs: LinearSpec) -> list[Tensor]:
    """The tensors of weights that were quantized for an earlier microbatch."""
    parts: list[Tensor] = []
    for spec in specs:
        if spec.cached_weight is not None:
            parts += [part for part in spec.cached_weight.flatten()[0] if part is not None]
    return parts


def backward_quantizers(spec: LinearSpec) -> tuple[Quantizer, ...]:
    """Which quantizers a backward asks: the input's where that is quantized again."""
    return (spec.grad_output, spec.input) if spec.keep_input else (spec.grad_output,)


def sums_over_ranks(parallel: TensorParallel, mode: str) -> bool:
    """Is a product only this rank's part of a sum: the forward's of "row", the input gradient's of "column"?"""
    return parallel.mode == mode and parallel.size > 1
