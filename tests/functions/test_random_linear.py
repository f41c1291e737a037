"""Random linear-layer settings: passes compared with dequantized operand products, and with each other."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.functions import test_linear
from tests.functions.test_linear import K, N, quantizers, values
from transformer_engine.common.recipe import Float8CurrentScaling, Format
from transformer_engine.pytorch.functions.linear import linear
from transformer_engine.pytorch.functions.linear_spec import IDENTITY, LinearSpec

RECIPES = {
    "none": None,
    **test_linear.RECIPES,
    "current_e4m3": Float8CurrentScaling(fp8_format=Format.E4M3),
}


class Case(NamedTuple):
    """Layer settings, the input's dimensions before K, and the output gradient's layout."""

    recipe: str
    backward: str
    keep_input: bool
    plain: bool
    bias: bool
    needs: tuple[bool, bool, bool]
    leading: tuple[int, ...]
    expanded: bool
    seed: int


cases = st.builds(
    Case,
    recipe=st.sampled_from(list(RECIPES)),
    backward=st.sampled_from(["quantized", "high_precision", "dequantized"]),
    keep_input=st.booleans(),
    plain=st.booleans(),
    bias=st.booleans(),
    needs=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    leading=st.sampled_from([(64,), (32, 2), (2, 4, 8)]),
    expanded=st.booleans(),
    seed=st.integers(0, 1 << 20),
)


def make_spec(case: Case) -> LinearSpec:
    recipe = RECIPES[case.recipe]
    of_recipe = (IDENTITY, IDENTITY, IDENTITY) if recipe is None else quantizers(recipe, "cpu")
    needs_grad_input, needs_grad_weight, needs_grad_bias = case.needs
    return test_linear.make_spec(
        torch.bfloat16,
        *of_recipe,
        backward_operands=case.backward,
        keep_input=case.keep_input,
        needs_grad_input=needs_grad_input,
        needs_grad_weight=needs_grad_weight,
        needs_grad_bias=needs_grad_bias and case.bias,
        is_unquantized=case.plain and recipe is None,
    )


def tensors(case: Case) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(case.seed)
    x = torch.randn(*case.leading, K, dtype=torch.bfloat16, requires_grad=case.needs[0])
    w = torch.randn(N, K, dtype=torch.bfloat16).mul_(0.05).requires_grad_(case.needs[1])
    b = torch.randn(N, dtype=torch.bfloat16, requires_grad=case.needs[2])
    dy = torch.randn(*case.leading, N, dtype=torch.bfloat16)
    return x, w, b, dy[..., :1].expand(dy.shape) if case.expanded else dy


def results(case: Case, spec: LinearSpec | None = None) -> list[torch.Tensor | None]:
    """y, dx, dw and db."""
    x, w, b, dy = tensors(case)
    y = linear(x, w, b if case.bias else None, make_spec(case) if spec is None else spec)
    if y.requires_grad:
        y.backward(dy)
    return [y.detach(), x.grad, w.grad, b.grad]


@settings(max_examples=120, deadline=None)
@given(cases)
def test_passes_multiply_operands_quantized_by_their_settings(case: Case):
    assume(not (case.recipe.startswith("delayed") and case.keep_input))
    spec = make_spec(case)
    x, w, b, dy = [tensor.detach() for tensor in tensors(case)]
    x, dy = x.reshape(-1, K), dy.reshape(-1, N)
    expected: list[torch.Tensor | None] = [
        values(spec.input_quantizer, x, False) @ values(spec.weight_quantizer, w, False).t()
    ]
    if case.bias:
        expected[0] = expected[0] + b.double()  # pyright: ignore[reportOptionalOperand]
    if case.backward == "quantized":
        dx = (
            values(spec.grad_output_quantizer, dy, False)
            @ values(spec.weight_quantizer, w, True).t()
        )
        dw = (
            values(spec.grad_output_quantizer, dy, True) @ values(spec.input_quantizer, x, True).t()
        )
    else:
        saved_x, saved_w = x.double(), w.double()
        if case.backward == "dequantized":
            saved_x = saved_x if case.keep_input else values(spec.input_quantizer, x, False)
            saved_w = values(spec.weight_quantizer, w, False)
        dx, dw = dy.double() @ saved_w, dy.double().t() @ saved_x
    expected += [dx, dw, dy.double().sum(0)]
    for got, reference, is_needed in zip(results(case), expected, (True, *case.needs), strict=True):
        if got is None:
            assert not is_needed or reference is expected[3], case
            continue
        assert reference is not None
        # Half a unit in the last place of bfloat16, and a little for the float32 summation order.
        atol = 4e-3 * float(reference.abs().max())
        torch.testing.assert_close(
            got.double().view(reference.shape), reference, rtol=2**-7, atol=atol
        )


@settings(max_examples=60, deadline=None)
@given(cases)
def test_a_gradient_does_not_depend_on_which_other_gradients_are_computed(case: Case):
    assume(not (case.recipe.startswith("delayed") and case.keep_input))
    some, every = results(case), results(case._replace(needs=(True, True, True)))
    for got, expected in zip(some, every, strict=True):
        assert got is None or (expected is not None and torch.equal(got, expected))


@settings(max_examples=60, deadline=None)
@given(cases)
def test_leading_dimensions_and_saved_values_change_no_bit(case: Case):
    assume(case.recipe != "delayed")
    flat = case._replace(
        leading=(64,), keep_input=case.backward == "dequantized" and case.keep_input
    )
    for got, expected in zip(results(case), results(flat), strict=True):
        assert (got is None) == (expected is None)
        assert got is None or expected is None or torch.equal(got.view(expected.shape), expected)


def test_layers_without_quantizers_equal_identity_quantizers_bitwise():
    case = Case(
        "none",
        "quantized",
        keep_input=False,
        plain=True,
        bias=True,
        needs=(True, True, True),
        leading=(32, 2),
        expanded=False,
        seed=7,
    )
    plain, identity = (
        results(case),
        results(case, dataclasses.replace(make_spec(case), is_unquantized=False)),
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, identity, strict=True))  # pyright: ignore[reportArgumentType]
