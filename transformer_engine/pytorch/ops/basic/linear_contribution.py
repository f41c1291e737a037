"""The steps of a linear product y = x @ w.T in a chain, and the spec that its steps compute by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....common.passes.linear import LinearFacts, backward_steps, forward_steps
from ....common.passes.step import Step
from ....common.recipe import Recipe
from ...distributed.tensor_parallel import TensorParallel
from ...functions.fusions import has_one_scale, unsupported_gradient_cast
from ...functions.linear_spec import (
    IDENTITY,
    UNQUANTIZED,
    LinearSpec,
    ProductQuantizers,
    gradient_cast,
    input_cast,
)
from ...functions.linear_spec import linear_spec as build_linear_spec
from ...functions.precision import runs_quantized
from ...functions.weight_gradient import WeightGradient
from ...primitives.activation import gradient_fuses
from ...runtime.warn_once import warn_once
from ...tensor.quantizer import Calibrating, Quantizer
from ..chain import OperationCall
from ..pass_builder import BackwardInputs, BackwardPart, Contribution, ForwardPart, PassBuilder, Value


@dataclass(frozen=True)
class ProducerCasts:
    """The matrices of a layer that the kernel which computes them may quantize.

    Attributes:
        input: Of the input.
        grad_output: Of the output gradient.
        one_scale: One scale of the whole gradient is computed from the gradient, so that a kernel cannot make its codes
            in one pass.
        beside_sums: The kernel that makes the gradient may also make its codes with its column sums.
    """

    input: bool = False
    grad_output: bool = False
    one_scale: bool = False
    beside_sums: bool = False

    @staticmethod
    def of(spec: LinearSpec) -> ProducerCasts:
        """Return the casts that the quantizers of a layer allow in other kernels."""
        cast = gradient_cast(spec)
        if cast is None:
            return ProducerCasts(input_cast(spec) is not None)
        beside_sums = gradient_fuses(cast.spec, True)
        return ProducerCasts(input_cast(spec) is not None, True, has_one_scale(cast), beside_sums)

    def allows(self, tensor: str, producer: Step, sums: bool) -> bool:
        """Return whether a producer may make the codes of a tensor; see `Contribution.takes_codes`."""
        if tensor == "input":
            return self.input
        if not self.grad_output:
            return False
        if producer.op != "activation_backward":
            return True
        settings: Any = producer.settings
        separate_sums = sums and not self.beside_sums
        return unsupported_gradient_cast(settings.kind, self.one_scale, separate_sums) is None


Contribution.records["ProducerCasts"] = ProducerCasts


@dataclass(frozen=True)
class LinearContribution(Contribution):
    """The steps of one linear product.

    Attributes:
        facts: Facts of the product; the name of the layer is filled in.
        codes: Which matrices kernels may quantize.
        convert_input: Dtype that the input is converted to; None if it has the right one.
        convert_weight: The same for the weight.
        convert_gradient: Dtype that the gradient of the input is converted to.
        parameter: Name of the weight.
    """

    facts: LinearFacts
    codes: ProducerCasts
    convert_input: torch.dtype | None = None
    convert_weight: torch.dtype | None = None
    convert_gradient: torch.dtype | None = None
    parameter: str = "weight"

    def forward(self, steps: PassBuilder, name: str, x: Value) -> ForwardPart:
        x = steps.converted(x, self.convert_input)
        if self.facts.plain:
            x = steps.values(x)
        leading = steps.leading(x)
        weight = steps.converted(Value(f"{name}.{self.parameter}"), self.convert_weight).name
        part = forward_steps(self.facts._replace(layer=name), x.name, weight, None)
        steps.steps += part.steps
        return ForwardPart(Value(part.output, leading), (part.saved_input, part.saved_weight))

    def backward(self, steps: PassBuilder, name: str, dy: Value, kept: BackwardInputs) -> BackwardPart:
        leading = steps.leading(dy)
        saved_input, saved_weight = kept.saved
        part = backward_steps(self.facts._replace(layer=name), dy.name, saved_input, saved_weight)
        steps.steps += part.steps
        grad_input = None
        if part.grad_input is not None:
            grad_input = steps.converted(Value(part.grad_input, leading), self.convert_gradient)
        return BackwardPart(grad_input, (part.grad_weight,))

    def is_plain(self, layer: str) -> bool:
        return self.facts.plain

    def takes_codes(self, tensor: str, producer: Step, sums: bool) -> bool:
        return self.codes.allows(tensor, producer, sums)


def linear_facts(spec: LinearSpec) -> LinearFacts:
    """Facts of a linear layer that decide its steps; the name of the layer is filled in by its contribution."""
    parallel = spec.parallel
    return LinearFacts(
        "linear",
        False,
        parallel.mode if spec.communicates and parallel.size > 1 else None,
        spec.needs_grad_input,
        spec.needs_grad_weight,
        spec.backward,
        spec.needs_grad_bias,
        spec.plain,
        spec.keep_input,
        parallel.sequence,
        spec.output is not None,
        spec.grad_input is not None,
        spec.gather_input,
        spec.gather_gradient,
        () if spec.inspector is None else spec.inspector.results,
        parallel.overlap.gather and not spec.traced,
        parallel.overlap.scatter and not spec.traced,
    )


def fitting(
    kind: str,
    quantizers: Sequence[Quantizer],
    m: int,
    k: int,
    n: int,
    traced: bool,
    recipe: Recipe | None = None,
) -> bool:
    """Return whether x [m, k] @ w [n, k].T is quantized; warn once if the formats do not support its shapes.

    With a recipe, NVTE_FP8_AUTO applies to the call.
    """
    product = ProductQuantizers(quantizers[0], quantizers[1], IDENTITY, quantizers[2], IDENTITY)

    def warn(reason: str) -> None:
        if not traced:
            warn_once(f"{kind} {reason}", f"{kind} runs in high precision: {reason}")

    return runs_quantized(product, (m, k, n), warn, recipe)


def linear_spec(
    call: OperationCall,
    dtype: torch.dtype,
    quantizers: Sequence[Quantizer] | None,
    parallel: TensorParallel,
    gradient: WeightGradient,
    needs: tuple[bool, bool],
    plain: bool,
) -> LinearSpec:
    """Return the spec of a product.

    Args:
        call: Facts of the call.
        dtype: Dtype that the product is computed in.
        quantizers: Quantizers of input, weight and output gradient; None for an unquantized product.
        parallel: The boundary to the tensor-parallel group.
        gradient: Destination of the weight gradient.
        needs: Whether the gradients of input and weight are needed.
        plain: Matrices are multiplied unquantized.
    """
    product, recipe, state = UNQUANTIZED, None, call.state
    if quantizers is not None and state.enabled:
        recipe = state.recipe
        product = ProductQuantizers(quantizers[0], quantizers[1], IDENTITY, quantizers[2], IDENTITY)
    elif quantizers is not None:
        recorded = Calibrating(quantizers[0]), Calibrating(quantizers[1])
        product = ProductQuantizers(*recorded, IDENTITY, IDENTITY, IDENTITY)
    return build_linear_spec(
        dtype,
        product,
        recipe,
        parallel,
        gradient,
        (*needs, False),
        traced=call.traced,
        plain=plain,
        may_run_again=not (call.traced or call.saves),
    )
