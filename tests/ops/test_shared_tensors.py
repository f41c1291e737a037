"""Strided gradients, memory that operations share with others, and quantized gradients in te.ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import transformer_engine.pytorch as te
from tests.support.tolerances import relative_error
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch import ops
from transformer_engine.pytorch.ops.fuser import OperationFuser

BIAS_CHAINS = {
    "Bias": lambda: ops.Bias(16),
    "Linear": lambda: ops.Linear(16, 16),
    "LayerNorm, Linear": lambda: ops.Sequential(ops.LayerNorm(16), ops.Linear(16, 16)),
    "Linear, GELU, Linear": lambda: ops.Sequential(
        ops.Linear(16, 16), ops.GELU(), ops.Linear(16, 16)
    ),
    "BasicLinear": lambda: ops.BasicLinear(16, 16),
}
GRADIENTS = {
    "expanded": lambda shape: torch.ones(()).expand(shape),
    "rows expanded": lambda shape: torch.randn(1, shape[-1]).expand(shape),
    "transposed": lambda shape: torch.randn(shape[1], shape[0], *shape[2:]).transpose(0, 1),
    "sliced": lambda shape: torch.randn(*shape[:-1], 2 * shape[-1])[..., : shape[-1]],
    "every second column": lambda shape: torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2],
    "column-major": lambda shape: torch.randn(shape[-1], *shape[:-1]).movedim(0, -1),
}


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("name", BIAS_CHAINS)
def test_strided_output_gradients_equal_contiguous_ones(name, kind):
    module = BIAS_CHAINS[name]()
    for shape in ((6, 3, 16), (2, 3, 2, 16), (5, 16)):
        x = torch.randn(shape)
        dy = GRADIENTS[kind](shape)
        results = []
        for gradient in (dy, dy.contiguous()):
            leaf = x.clone().requires_grad_()
            module.zero_grad()
            module(leaf).backward(gradient)
            assert leaf.grad is not None and leaf.grad.shape == x.shape
            results.append([leaf.grad, *[p.grad.clone() for p in module.parameters()]])
        for ours, expected in zip(*results, strict=True):
            torch.testing.assert_close(ours, expected)


PLACE: Any = {"device": "cpu"}
BODIES: dict[str, Callable[[], Any]] = {
    "RMSNorm": lambda: ops.RMSNorm(16, **PLACE),
    "LayerNorm": lambda: ops.LayerNorm(16, **PLACE),
    "L2Normalization": lambda: ops.L2Normalization(),
    "BasicLinear": lambda: ops.BasicLinear(16, 16, **PLACE),
    "Linear": lambda: ops.Linear(16, 16, **PLACE),
    "GELU": lambda: ops.GELU(),
    "ConstantScale": lambda: ops.ConstantScale(0.5),
    "Identity": lambda: ops.Identity(),
    "Reshape": lambda: ops.Reshape((-1, 16)),
}


def residual_chain(
    first: str, output_in_place: bool, add_in_place: bool, preceded: bool = True
) -> ops.Sequential:
    """A residual connection by a channel, which begins in front of an operation, behind a bias or at the input."""
    torch.manual_seed(0)
    output = ops.MakeExtraOutput(in_place=output_in_place)
    output.set_extra_output_channel(0, "r", output_to_caller=False)
    add = ops.AddExtraInput(in_place=add_in_place).set_extra_input_channel(0, "r")
    before = [ops.Bias(16, **PLACE)] if preceded else []
    return ops.Sequential(*before, output, BODIES[first](), ops.Linear(16, 16, **PLACE), add)


@pytest.mark.parametrize("preceded", [True, False], ids=["behind a bias", "at the input"])
@pytest.mark.parametrize("recipe", [None, recipes.Float8CurrentScaling()], ids=["float32", "FP8"])
@pytest.mark.parametrize("first", BODIES)
def test_in_place_channels_have_the_same_gradients_as_separate_memory(
    first, recipe, preceded, emulated
):
    values, dy = torch.randn(16, 16), torch.randn(16, 16)
    before, dy_before = values.clone(), dy.clone()
    results = []
    for in_place in ((False, False), (True, False), (False, True), (True, True)):
        chain, leaf = residual_chain(first, *in_place, preceded), values.detach().requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = chain(leaf)
        y.backward(dy)
        assert torch.equal(values, before) and torch.equal(dy, dy_before)
        results.append([y.detach(), leaf.grad, *[p.grad for p in chain.parameters()]])
        leaf.grad = None
    # A sum in another order may move a value to the next code.
    bound = 1e-5 if recipe is None else 2**-4
    for rest in results[1:]:
        for separate, in_place in zip(results[0], rest, strict=True):
            assert relative_error(in_place, separate) <= bound


def test_an_in_place_channel_leaves_the_callers_input_unchanged():
    chain = residual_chain("RMSNorm", output_in_place=True, add_in_place=True, preceded=False)
    x = torch.randn(8, 16, requires_grad=True)
    before = x.detach().clone()
    chain(x)
    assert torch.equal(x.detach(), before)


SHARED_INPUTS = ["x x x", "x r r", "x x r", "x r x", "x view r", "leaf leaf r", "x leaf leaf"]


@pytest.mark.parametrize("names", SHARED_INPUTS)
def test_in_place_additions_into_shared_inputs_keep_the_gradients(names):
    results = []
    for in_place in (False, True):
        torch.manual_seed(1)
        chain = ops.Sequential(
            ops.RMSNorm(16),
            ops.BasicLinear(16, 16),
            ops.AddExtraInput(in_place=in_place),
            ops.GELU(),
            ops.BasicLinear(16, 16),
            ops.AddExtraInput(in_place=in_place),
        )
        leaves = [torch.randn(8, 16, requires_grad=True) for _ in range(2)]
        x, r = [leaf * 1 for leaf in leaves]
        tensors = {"x": x, "r": r, "view": x.view(8, 16), "leaf": leaves[0]}
        y = chain(*[tensors[name] for name in names.split()])
        y.sum().backward()
        results.append([y, *[leaf.grad for leaf in leaves], *[p.grad for p in chain.parameters()]])
    for separate, in_place in zip(*results, strict=True):
        if separate is not None:
            torch.testing.assert_close(in_place, separate)


def test_unshared_extra_input_receives_the_sum_in_place():
    x, extra = torch.randn(8, 16), torch.randn(8, 16)
    before = extra.clone()
    y = ops.AddExtraInput(in_place=True)(x, extra)
    assert y.data_ptr() == extra.data_ptr()
    torch.testing.assert_close(extra, before + x)


@pytest.mark.parametrize("channel", [False, True])
def test_in_place_extra_outputs_leave_the_callers_gradient_unchanged(channel):
    x, other = [torch.randn(8, 16, requires_grad=True) for _ in range(2)]
    dy = torch.randn(8, 16)
    before = dy.clone()
    output = ops.MakeExtraOutput(in_place=True)
    if channel:
        output.set_extra_output_channel(0, "r", output_to_caller=False)
        add = ops.AddExtraInput().set_extra_input_channel(0, "r")
        y = ops.Sequential(output, ops.Linear(16, 16), add)(x)
    else:
        y, extra = ops.Sequential(output, ops.Linear(16, 16))(x)
        y = y + extra
    (y + other).backward(dy)
    assert torch.equal(dy, before) and other.grad is not None and torch.equal(other.grad, before)


def test_the_gradient_of_a_residual_rmsnorm_is_rounded_once():
    norm = ops.RMSNorm(64, dtype=torch.bfloat16)
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    dy, residual = torch.randn(2, 32, 64).bfloat16()
    chain = ops.Sequential(ops.MakeExtraOutput(), norm)
    torch.autograd.backward(chain(x), [dy, residual])
    exact = x.detach().double().requires_grad_()
    y = functional.rms_norm(exact, (64,), eps=1e-5)
    y.backward(dy.double())
    assert exact.grad is not None and x.grad is not None
    expected = (exact.grad + residual.double()).bfloat16()
    assert (x.grad != expected).float().mean() < 0.01


PASSING = {
    "Identity": lambda: ops.Identity(),
    "Reshape": lambda: ops.Reshape((-1, 32)),
    "Quantize": lambda: ops.Quantize(),
    "AddExtraInput": lambda: ops.AddExtraInput(),
    "two": lambda: ops.Sequential(ops.Identity(), ops.Reshape((2, 16, 32))),
}


def quantized(shape: Any, kind: str) -> Any:
    device = "cpu"
    quantizer = (
        te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn, device)
        if kind == "current"
        else te.MXFP8Quantizer(torch.float8_e4m3fn)
    )
    return quantizer.quantize(torch.randn(shape, dtype=torch.bfloat16, device=device))


@pytest.mark.parametrize("kind", ["current", "mxfp8"])
@pytest.mark.parametrize("name", PASSING)
def test_quantized_gradients_pass_with_their_codes(name, kind, emulated):
    op = PASSING[name]()
    leaves = [torch.randn(32, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    y = op(*leaves[: 2 if name == "AddExtraInput" else 1])
    dy = quantized(y.shape, kind)
    y.backward(dy)
    for leaf in leaves[: 2 if name == "AddExtraInput" else 1]:
        grad: Any = leaf.grad
        assert isinstance(grad, te.QuantizedTensor) and grad.shape == leaf.shape
        expected = dy.dequantize(dtype=torch.float32).view(leaf.shape)
        assert torch.equal(grad.dequantize(dtype=torch.float32), expected)


def test_the_sum_of_quantized_gradients_is_rounded_once(emulated):
    x = torch.randn(32, 32, dtype=torch.bfloat16, requires_grad=True)
    grads = [quantized((32, 32), "current") for _ in range(2)]
    torch.autograd.backward(ops.MakeExtraOutput()(x), grads)
    wide = [grad.dequantize(dtype=torch.float32) for grad in grads]
    assert x.grad is not None and torch.equal(x.grad, (wide[0] + wide[1]).bfloat16())


class Passed(ops.BasicOperation):
    """A user's identity."""

    def op_forward(self, ctx, input_, **kwargs):
        return input_

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


def experts() -> Any:
    splits = torch.tensor([16, 16])
    chain = ops.Sequential(ops.Quantize(), ops.GroupedLinear(2, 32, 32, **PLACE))
    chain.register_forward_pre_hook(lambda _, args: (*args, splits))
    return chain


BEFORE_TRAINED: dict[str, Callable[[], Any]] = {
    "Linear": lambda: ops.Sequential(ops.Quantize(), ops.Linear(32, 32, **PLACE)),
    "BasicLinear": lambda: ops.Sequential(ops.Quantize(), ops.BasicLinear(32, 32, **PLACE)),
    "GroupedLinear": experts,
    "Identity": lambda: ops.Sequential(ops.Quantize(), ops.Identity(), ops.Linear(32, 32, **PLACE)),
    "Reshape": lambda: ops.Sequential(
        ops.Quantize(), ops.Reshape((32, 32)), ops.Linear(32, 32, **PLACE)
    ),
    "twice": lambda: ops.Sequential(ops.Quantize(), ops.Quantize(), ops.Linear(32, 32, **PLACE)),
    "user's operation": lambda: ops.Sequential(
        ops.Quantize(), Passed(), ops.Linear(32, 32, **PLACE)
    ),
    "module": lambda: torch.nn.Sequential(ops.Quantize(), te.Linear(32, 32, **PLACE)),
    "frozen": lambda: ops.Sequential(
        ops.Quantize(),
        ops.Linear(32, 32, **PLACE).requires_grad_(False),
        ops.Linear(32, 32, **PLACE),
    ),
}
SCALINGS: dict[str, Callable[[], Any]] = {
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": lambda: recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("case", BEFORE_TRAINED)
def test_quantized_data_has_the_directions_that_trained_layers_read(case, scaling, emulated):
    x, grads = torch.randn(32, 32), []
    for leaf in (x, x.clone().requires_grad_()):
        te.fp8.FP8GlobalStateManager.reset()
        torch.manual_seed(0)
        chain = BEFORE_TRAINED[case]()
        with te.autocast(recipe=SCALINGS[scaling]()):
            y = chain(leaf)
        y.backward(torch.ones_like(y))
        grads.append([p.grad.clone() for p in chain.parameters() if p.grad is not None])
    assert grads[0]
    for ours, expected in zip(*grads, strict=True):
        assert torch.equal(ours, expected)


class LinearSiLU(ops.FusedOperation):
    """A user's fused forward pass, which saves tensors in a custom layout."""

    def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
        weight = self.basic_ops[0].weight
        y = functional.linear(input_, weight)
        basic_op_ctxs[0].save_for_backward(input_, weight)
        basic_op_ctxs[1].save_for_backward(y)
        return functional.silu(y), [(), ()]


def _fuse_pairs(argument, *, recipe):
    fused = []
    for op in argument:
        if (
            fused
            and isinstance(fused[-1], ops.BasicLinear)
            and isinstance(op, (ops.SiLU, ops.Dropout))
        ):
            op = LinearSiLU([fused.pop(), op])
        fused.append(op)
    return fused


@pytest.fixture
def _fused_by_a_user():
    ops.register_forward_fusion(_fuse_pairs, prepend=True)
    yield
    OperationFuser.forward_fusion_functions.remove(_fuse_pairs)


@pytest.mark.parametrize("trained_input", [True, False])
def test_a_users_forward_fusion_has_its_operations_gradients(trained_input, _fused_by_a_user):
    chain = ops.Sequential(
        ops.RMSNorm(16), ops.Linear(16, 16, bias=False), ops.SiLU(), ops.Linear(16, 16)
    )
    x = torch.randn(8, 16, requires_grad=trained_input)
    chain(x).square().sum().backward()
    assert any(type(op) is LinearSiLU for op, _ in chain._module_groups[0]._forward_ops)
    exact = x.detach().double().requires_grad_()
    gamma, w1, w2, b2 = [p.detach().double().requires_grad_() for p in chain.parameters()]
    h = functional.silu(functional.rms_norm(exact, (16,), gamma, eps=1e-5) @ w1.T)
    functional.linear(h, w2, b2).square().sum().backward()
    for parameter, wide in zip(chain.parameters(), (gamma, w1, w2, b2), strict=True):
        assert relative_error(parameter.grad, wide.grad) < 1e-5
    if trained_input:
        assert relative_error(x.grad, exact.grad) < 1e-5


def test_a_users_forward_fusion_with_dropout_names_the_missing_state(_fused_by_a_user):
    chain = ops.Sequential(ops.Linear(16, 16, bias=False), ops.Dropout(0.5))
    with pytest.raises(
        RuntimeError, match=r"LinearSiLU saved no state .* Dropout cannot run again"
    ):
        chain(torch.randn(4, 16, requires_grad=True))


class Doubled(ops.BasicOperation):
    """y = 2x by user-defined methods."""

    def op_forward(self, ctx, input_, **kwargs):
        return input_ * 2

    def op_backward(self, ctx, grad_output):
        return grad_output * 2, ()


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("user", [False, True], ids=["prepared", "segments"])
@pytest.mark.parametrize("form", ["input", "result", "view of the result"])
def test_an_in_place_write_to_an_output_that_shares_memory_raises_an_error(
    form: str, user: bool, position: int
):
    if form == "input":
        members: list[Any] = [ops.MakeExtraOutput()]
    elif form == "result":
        members = [ops.Linear(16, 16), ops.MakeExtraOutput()]
    else:
        members = [ops.Linear(16, 16), ops.MakeExtraOutput(), ops.Reshape((-1, 8))]
    chain = ops.Sequential(Doubled(), *members) if user else ops.Sequential(*members)
    x = torch.randn(4, 16, requires_grad=True)
    outputs = chain(x)
    before = x.detach().clone()
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        outputs[position].mul_(2)
    assert torch.equal(x.detach(), before)


def test_an_in_place_write_to_the_output_of_an_identity_leaves_its_input():
    x = torch.randn(4, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        ops.Sequential(ops.Identity())(x).add_(1)


def test_an_output_that_shares_no_memory_may_be_written_in_place():
    chain = ops.Sequential(ops.MakeExtraOutput(), ops.Linear(16, 16))
    x = torch.randn(4, 16, requires_grad=True)
    y, residual = chain(x)
    (y.mul_(3).sum() + residual.sum()).backward()
    weight = chain[1].weight.detach()
    torch.testing.assert_close(x.grad, (1 + 3 * weight.sum(0)).expand(4, 16))


@pytest.mark.parametrize("user", [False, True], ids=["prepared", "segments"])
def test_a_residual_of_a_constant_input_requires_no_gradient(user: bool):
    members = [ops.MakeExtraOutput(), ops.Linear(16, 16), ops.MakeExtraOutput()]
    chain = ops.Sequential(Doubled(), *members) if user else ops.Sequential(*members)
    outputs = chain(torch.randn(4, 16))
    assert [output.requires_grad for output in outputs] == [True, False, True]
    (outputs[0].sum() + outputs[2].sum()).backward()
    torch.testing.assert_close(chain[-2].bias.grad, torch.full((16,), 8.0))  # 4 rows, 2 outputs
