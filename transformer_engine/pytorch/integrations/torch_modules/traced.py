"""A converted linear layer under torch.compile, as operations of torch that the compiler fuses with their neighbors.

In eager mode a layer launches the engine's kernels, which are opaque operators to a compiler. Under current scaling
the traced layer instead consists of maxima, casts and `torch._scaled_mm`: the compiler computes a maximum in the
kernel of the norm or activation in front of it, and quantizes an input once for all layers that read it. The codes
equal those of eager mode bit for bit if the compiler rounds the values that it quantizes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common.formats import E4M3, E5M2, FLOAT8, Element
from ....common.recipe import Float8CurrentScaling, Format, Recipe
from ...functions.linear_spec import Accumulation, recipe_accumulation
from ...primitives.gemm import Epilogue, reference, torch_mm
from ...primitives.operand import Operand
from ...primitives.quantize.encodings import scale_from_amax, transposed
from ...primitives.quantize.spec import CODE_DTYPES
from ...runtime.autograd import Function
from ...runtime.checks import PLAIN_TENSORS
from ...runtime.device import autocast_dtype, current_hardware
from ...runtime.double_backward import once_differentiable
from ...runtime.tracing import export_mode, reshape_result


class Scaling(NamedTuple):
    """Current scaling of one matrix: the element, and the options of its multiplier."""

    element: Element
    power_of_two: bool
    epsilon: float


class TracedRecipe(NamedTuple):
    """Current scaling as constants of a compiled graph: x, weight, dy, and the accumulation of the products."""

    input: Scaling
    weight: Scaling
    grad_output: Scaling
    accumulation: Accumulation


def traced_recipe(recipe: Recipe | None) -> TracedRecipe | None:
    """Constants of a current-scaling recipe; None for a recipe whose layers remain the engine's under torch.compile."""
    if type(recipe) is not Float8CurrentScaling or recipe.backward_override is not None:
        return None
    last = E5M2 if recipe.fp8_format == Format.HYBRID else E4M3
    slots = (
        (E4M3, recipe.fp8_quant_fwd_inp),
        (E4M3, recipe.fp8_quant_fwd_weight),
        (last, recipe.fp8_quant_bwd_grad),
    )
    x, weight, dy = (
        Scaling(element, params.power_2_scale, params.amax_epsilon) for element, params in slots
    )
    return TracedRecipe(x, weight, dy, recipe_accumulation(recipe))


def is_traced_as_torch(x: Tensor, weight: Tensor) -> bool:
    """Whether a compiler is tracing a call that `traced_linear` supports."""
    if not torch.compiler.is_compiling() or export_mode.onnx:
        return False
    if type(x) is not Tensor or type(weight) not in PLAIN_TENSORS or not x.numel():
        return False
    if x.dtype != weight.dtype and autocast_dtype(x.device.type) is None:
        return False  # the engine's layer raises the error
    return not x.is_cuda or current_hardware().has("fp8 products")


def traced_linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: TracedRecipe) -> Tensor:
    """Compute y [.., N] = x [.., K] @ weight [N, K].T + bias [N] in operations that a compiler fuses.

    Args:
        x: Input, whose rows are a multiple of 16.
        weight: Weight, whose sizes are multiples of 16.
        bias: Bias, or None.
        recipe: Scalings and accumulation.
    """
    dtype = autocast_dtype(x.device.type) or x.dtype
    bias = None if bias is None else bias.to(dtype)
    # Products disable torch.autocast themselves: a context here would not contain the traced backward pass.
    y = _TracedLinear.apply(x.reshape(-1, x.shape[-1]), weight, bias, recipe, dtype)
    return y.reshape(*x.shape[:-1], weight.shape[0])


class _TracedLinear(Function):
    """The three products of `functions/linear.py`. The compiler chooses the tensors to save between the passes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recipe: TracedRecipe,
        dtype: torch.dtype,
    ) -> Tensor:
        x_codes, x_scale = _quantize(x, recipe.input)
        w_codes, w_scale = _quantize(weight, recipe.weight)
        ctx.save_for_backward(x_codes, x_scale, w_codes, w_scale)
        ctx.recipe, ctx.dtypes = recipe, (x.dtype, weight.dtype, bias is not None)
        epilogue = Epilogue(dtype, bias, exact=recipe.accumulation.forward)
        y = _multiply(x_codes, x_scale, w_codes, w_scale, epilogue)
        return reshape_result(y, y.shape)  # distinct as well, and callers may write in place

    @staticmethod
    @once_differentiable("Linear")
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_codes, x_scale, w_codes, w_scale = ctx.saved_tensors
        (x_dtype, w_dtype, has_bias), exact = ctx.dtypes, ctx.recipe.accumulation
        codes, scale = _quantize(dy, ctx.recipe.grad_output)
        # Compilers drop the gradients that nothing reads.
        epilogue = Epilogue(dy.dtype, exact=exact.grad_input)
        dx = _multiply(codes, scale, transposed(w_codes), w_scale, epilogue).to(x_dtype)
        epilogue = Epilogue(w_dtype, exact=exact.grad_weight)
        dw = _multiply(transposed(codes), scale, transposed(x_codes), x_scale, epilogue)
        db = _distinct(dy.sum(0, dtype=torch.float32).to(dy.dtype)) if has_bias else None
        return _distinct(dx), _distinct(dw), db, None, None


def _distinct(x: Tensor) -> Tensor:
    """A view of a result. torch 2.11 loses the gradient of a result that is also its own cast to an equal dtype."""
    return x.view(x.shape)


def _quantize(x: Tensor, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """Codes [M, K] and scale float32 [1] for a matrix."""
    amax = x.abs().amax().to(torch.float32).reshape(1)
    limit = scaling.element.maximum
    multiplier = scale_from_amax(
        amax, limit, power_of_two=scaling.power_of_two, epsilon=scaling.epsilon
    )
    # Without the sign of NaN, which `encodings.cast` clears: compilers would not compute its operation again in the
    # backward pass, and would save the codes of weights instead.
    codes = (x.to(torch.float32) * multiplier).clamp(-limit, limit)
    return codes.to(CODE_DTYPES[scaling.element.name]), multiplier.reciprocal()


def _multiply(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, epilogue: Epilogue) -> Tensor:
    """Compute a [M, K] @ b [N, K].T from codes."""
    run = torch_mm.run_tensor_scales if a.is_cuda else reference.run
    return run(Operand(a, a_scale, FLOAT8), Operand(b, b_scale, FLOAT8), epilogue)
