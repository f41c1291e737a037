"""Users' registered fusions, forward-only and backward-only ones combined, against float64 PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support.tolerances import relative_error
from transformer_engine.common.recipe import Float8CurrentScaling, Recipe
from transformer_engine.pytorch import autocast, ops
from transformer_engine.pytorch.ops.fuser import OperationFuser

PLACE: Any = {"device": "cpu"}
calls: list[str] = []


class ForwardWithoutState(ops.FusedOperation):
    """y = x @ weight.T + bias in plain PyTorch; saves nothing for a backward pass."""

    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **options: Any) -> Any:
        calls.append("forward")
        linear, bias = self.basic_ops
        return functional.linear(input_, linear.weight, bias.bias), [(), ()]  # pyright: ignore


class BackwardOfMembers(ops.FusedOperation):
    """Gradients from the basic operations' backward passes, whose saved state they read."""

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **options: Any) -> Any:
        calls.append("backward")
        gradients: list[Any] = []
        for op, ctx in zip(reversed(self.basic_ops), reversed(basic_op_ctxs), strict=True):
            grad_output, parameters, _ = op.fuser_backward(  # pyright: ignore
                [ctx], grad_output, basic_op_grad_extra_outputs=[()]
            )
            gradients[:0] = parameters
        return grad_output, gradients, [(), ()]


def pairs(kind: Any) -> Any:
    """A fusion function that replaces a product and a bias."""

    def fuse(argument: list[Any], *, recipe: Recipe | None) -> list[Any]:
        fused: list[Any] = []
        for op in argument:
            if fused and type(op) is ops.Bias and type(fused[-1]) is ops.BasicLinear:
                op = kind([fused.pop(), op])
            fused.append(op)
        return fused

    return fuse


@pytest.fixture(autouse=True)
def registrations() -> Iterator[None]:
    calls.clear()
    lists = (OperationFuser.forward_fusion_functions, OperationFuser.backward_fusion_functions)
    before = [list(functions) for functions in lists]
    yield
    for functions, earlier in zip(lists, before, strict=True):
        functions[:] = earlier


def errors(chain: ops.Sequential, recipe: Recipe | None) -> list[float]:
    """Relative errors in the output and all gradients against float64."""
    x = torch.randn(32, 64, requires_grad=True)
    with autocast(enabled=recipe is not None, recipe=recipe):
        y = chain(x)
    weight = torch.randn(y.shape)
    y.backward(weight)
    exact, *parameters = [t.detach().double().requires_grad_() for t in (x, *chain.parameters())]
    wide = functional.linear(exact, *parameters)
    wide.backward(weight.double())
    pairs_of_values = [(y, wide), (x.grad, exact.grad)]
    pairs_of_values += [
        (p.grad, q.grad) for p, q in zip(chain.parameters(), parameters, strict=True)
    ]
    return [relative_error(ours.double(), reference) for ours, reference in pairs_of_values]  # pyright: ignore


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()], ids=["none", "current"])
@pytest.mark.parametrize("registered", ["forward", "backward", "both"])
def test_single_pass_fusions_compute_the_chains_gradients(registered, recipe, emulated):
    torch.manual_seed(0)
    if registered != "backward":
        ops.register_forward_fusion(pairs(ForwardWithoutState), prepend=True)
    if registered != "forward":
        ops.register_backward_fusion(pairs(BackwardOfMembers), prepend=True)
    chain = ops.Sequential(ops.Linear(64, 32, **PLACE))
    assert max(errors(chain, recipe)) <= (1e-5 if recipe is None else 0.06)
    assert calls == {"both": ["forward", "backward"]}.get(registered, [registered])
    (reason,) = chain._module_groups[0]._prepared.values()  # pyright: ignore
    assert re.fullmatch(
        r"a user wrote the methods of \w+, which a fusion function inserted", reason
    )


class ForwardOfFirst(ops.FusedOperation):
    """A fusion whose forward pass saves state for one of its operations only."""

    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **options: Any) -> Any:
        basic_op_ctxs[1].save_for_backward(input_)
        return functional.linear(input_, self.basic_ops[0].weight), [(), ()]  # pyright: ignore


def test_backward_passes_without_saved_state_name_the_remedy():
    ops.register_forward_fusion(pairs(ForwardOfFirst), prepend=True)
    ops.register_backward_fusion(pairs(BackwardOfMembers), prepend=True)
    y = ops.Sequential(ops.Linear(64, 32, **PLACE))(torch.randn(4, 64, requires_grad=True))
    with pytest.raises(
        RuntimeError, match=r"call fuser_forward of the basic operations with their contexts"
    ):
        y.sum().backward()


class Tripled:
    """An operation whose methods triple the output and all gradients."""

    def op_forward(self, *args: Any, **options: Any) -> Any:
        return super().op_forward(*args, **options) * 3  # pyright: ignore

    def op_backward(self, *args: Any, **options: Any) -> Any:
        grad_input, parameters = super().op_backward(*args, **options)  # pyright: ignore
        return grad_input * 3, [grad * 3 for grad in parameters]


def tripled(kind: type) -> Any:
    return type(f"Tripled{kind.__name__}", (Tripled, kind), {})


# Operations that this package fuses in a forward or a backward pass, with the index of the one that a user derives.
FUSED_CHAINS: dict[str, tuple[int, list[tuple[Any, tuple[Any, ...], bool]]]] = {
    "product of linear and bias": (0, [(ops.BasicLinear, (64, 64), True), (ops.Bias, (64,), True)]),
    "bias of linear and bias": (1, [(ops.BasicLinear, (64, 64), True), (ops.Bias, (64,), True)]),
    "scale of linear and scale": (
        1,
        [(ops.BasicLinear, (64, 64), True), (ops.ConstantScale, (2.0,), False)],
    ),
    "norm of extra output and norm": (
        1,
        [(ops.MakeExtraOutput, (), False), (ops.RMSNorm, (64,), True)],
    ),
    "bias of bias and activation": (
        1,
        [(ops.BasicLinear, (64, 64), True), (ops.Bias, (64,), True), (ops.GELU, (), False)],
    ),
}


@pytest.mark.parametrize("name", FUSED_CHAINS)
def test_fusions_do_not_skip_methods_of_derived_operations(name, emulated):
    index, members = FUSED_CHAINS[name]
    recipe = Float8CurrentScaling() if "activation" in name else None
    gradients: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    for factor in (1, 3):
        torch.manual_seed(0)
        chain = ops.Sequential(
            *[
                (tripled(kind) if factor == 3 and i == index else kind)(
                    *args, **({**PLACE, "dtype": torch.bfloat16} if allocates else {})
                )
                for i, (kind, args, allocates) in enumerate(members)
            ]
        )
        x = torch.randn(32, 64, dtype=torch.bfloat16).requires_grad_()
        with autocast(enabled=recipe is not None, recipe=recipe):
            y, *_ = results if isinstance(results := chain(x), tuple) else (results,)
        y.sum().backward()
        outputs.append(y)
        gradients.append(x.grad)  # pyright: ignore
    # the output gradient is the same, and the product of the factors arrives at x
    if index == len(members) - 1:
        assert relative_error(outputs[1].double(), 3 * outputs[0].double()) < 1e-2
        assert relative_error(gradients[1].double(), 3 * gradients[0].double()) < 1e-2
    else:
        assert relative_error(outputs[1].double(), outputs[0].double()) > 0.1
        assert relative_error(gradients[1].double(), gradients[0].double()) > 0.1
