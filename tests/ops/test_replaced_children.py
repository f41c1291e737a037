"""A Sequential runs its present modules, however replaced, before and after its first forward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch import ops

PLACE: Any = {"device": "cpu"}
INDEX = 1  # on the replaced child


def _delete_and_append(chain: ops.Sequential, new: nn.Module) -> None:
    del chain[INDEX]
    chain.append(new)


def _replace_slice(chain: ops.Sequential, new: nn.Module) -> None:
    del chain[INDEX:]
    chain.extend([new])


def _pop_and_insert(chain: ops.Sequential, new: nn.Module) -> None:
    chain.pop(INDEX)
    chain.insert(INDEX, new)


def _delete_attribute(chain: ops.Sequential, new: nn.Module) -> None:
    delattr(chain, str(INDEX))
    chain += [new]


WAYS: dict[str, Callable[[ops.Sequential, nn.Module], Any]] = {
    "setattr": lambda chain, new: setattr(chain, str(INDEX), new),
    "set_submodule": lambda chain, new: chain.set_submodule(str(INDEX), new),
    "item": lambda chain, new: chain.__setitem__(INDEX, new),
    "negative item": lambda chain, new: chain.__setitem__(INDEX - 3, new),
    "_modules": lambda chain, new: chain._modules.__setitem__(str(INDEX), new),
    "add_module": lambda chain, new: chain.add_module(str(INDEX), new),
    "register_module": lambda chain, new: chain.register_module(str(INDEX), new),
    "another name": lambda chain, new: chain.register_module("last", new),
    "append": lambda chain, new: chain.append(new),
    "insert": lambda chain, new: chain.insert(0, new),
    "delete, append": _delete_and_append,
    "slice, extend": _replace_slice,
    "pop, insert": _pop_and_insert,
    "delattr, +=": _delete_attribute,
}


class Adapter(nn.Module):
    """A low-rank adapter in front of an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.base = ops.GELU()
        self.down, self.up = [nn.Parameter(torch.randn(shape) / 4) for shape in ((16, 2), (2, 16))]

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down @ self.up


class Negated(ops.ReLU):
    """An operation with another `forward`."""

    def forward(self, input: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return -super().forward(input, *extra_inputs, **kwargs)


MADE: dict[str, Callable[[], nn.Module]] = {
    "operation": lambda: ops.ConstantScale(5.0),
    "operation with parameters": lambda: ops.Linear(16, 16, **PLACE),
    "module of torch": lambda: nn.Linear(16, 16),
    "adapter": Adapter,
    "Sequential": lambda: ops.Sequential(ops.Linear(16, 16, **PLACE), ops.SiLU()),
    "subclass": Negated,
}


def results(
    run: Callable[[Tensor], Tensor], chain: ops.Sequential, recipe: Any
) -> list[Tensor | None]:
    """Output and gradients."""
    chain.zero_grad()
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = run(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *[p.grad for p in chain.parameters()]]


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("way", WAYS)
def test_a_changed_sequential_runs_its_present_modules(way: str, kind: str, emulated):
    torch.manual_seed(0)
    for warm in (False, True):
        for recipe in (None, Float8CurrentScaling()):
            chain = ops.Sequential(
                ops.Linear(16, 16, **PLACE), ops.GELU(), ops.Linear(16, 16, **PLACE)
            )
            before = results(chain, chain, recipe)[0] if warm else None
            new = MADE[kind]()
            WAYS[way](chain, new)
            assert sum(module is new for module in chain) == 1

            def one_by_one(x: Tensor, chain: ops.Sequential = chain) -> Tensor:
                for module in chain:
                    x = module(x)
                return x

            actual, expected = results(chain, chain, recipe), results(one_by_one, chain, recipe)
            assert all(gradient is not None for gradient in actual)
            for ours, reference in zip(actual, expected, strict=True):
                torch.testing.assert_close(ours, reference)
            assert before is None or not torch.equal(actual[0], before)  # pyright: ignore[reportArgumentType]


class Wrapper(nn.Module):
    """Wraps an operation, as FSDP does."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.calls = base, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.base(x)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_a_linear_calls_the_modules_that_replace_its_operations(alone: bool, warm: bool):
    torch.manual_seed(0)
    linear, x = ops.Linear(16, 16, **PLACE), torch.randn(4, 16)
    module = linear if alone else ops.Sequential(ops.Identity(), linear, ops.GELU())
    expected = module(x) if warm else copy.deepcopy(module)(x)
    wrappers = [Wrapper(op) for op in linear.basic_ops]
    for index, wrapper in enumerate(wrappers):
        linear.set_submodule(f"basic_ops.{index}", wrapper)
    y = module(x)
    y.sum().backward()
    torch.testing.assert_close(y, expected)
    assert [wrapper.calls for wrapper in wrappers] == [1, 1]
    assert linear.weight.grad is not None and linear.bias.grad is not None


@pytest.mark.parametrize("warm", [False, True])
def test_a_linear_adds_the_bias_of_the_operation_that_replaces_its_bias(warm: bool):
    chain = ops.Sequential(ops.Linear(16, 16, **PLACE), ops.GELU())
    x = torch.randn(4, 16)
    if warm:
        chain(x)
    chain.set_submodule("0.basic_ops.1", ops.Bias(16, **PLACE))
    nn.init.ones_(chain.get_parameter("0.basic_ops.1.bias"))
    product = nn.functional.linear(x, chain[0].weight) + 1
    torch.testing.assert_close(chain(x), nn.functional.gelu(product, approximate="tanh"))
    state = chain.state_dict()
    assert state["0.basic_ops.1.bias"].eq(1).all()
    chain.load_state_dict({key: value.clone() for key, value in state.items()})


def test_explain_names_the_module_that_replaces_an_operation():
    chain = ops.Sequential(ops.Linear(16, 16, **PLACE), ops.GELU())
    chain[0].basic_ops[0] = Wrapper(chain[0].basic_ops[0])
    (note,) = te.explain(chain, torch.randn(4, 16)).notes
    assert note == "Linear (0 of Sequential) is not fused: a Wrapper replaces one of its operations"


class Called(ops.ReLU):
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return -super().__call__(*args, **kwargs)


def test_an_operation_with_another_call_method_is_called_as_a_module():
    chain, x = ops.Sequential(ops.Linear(16, 16, **PLACE), Called(), ops.SiLU()), torch.randn(4, 16)
    expected = nn.functional.silu(-nn.functional.linear(x, chain[0].weight, chain[0].bias).relu())
    torch.testing.assert_close(chain(x), expected)
    (note,) = te.explain(chain, x).notes
    assert note.endswith(
        "is not fused: Called.__call__ is not torch's own: a class or a tracer has replaced it"
    )


def test_a_symbolic_trace_calls_each_operation():
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, ops.Linear | ops.GELU)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chain = ops.Sequential(ops.Linear(16, 16, **PLACE), ops.GELU())

        def forward(self, x: Tensor) -> Tensor:
            return self.chain(x) + 1

    model, x = Model(), torch.randn(4, 16)
    graph = Tracer().trace(model)
    assert [node.target for node in graph.nodes if node.op == "call_module"] == [
        "chain.0",
        "chain.1",
    ]
    torch.testing.assert_close(torch.fx.GraphModule(model, graph)(x), model(x))


@pytest.mark.parametrize(
    "make", [lambda: ops.BasicLinear(16, 16, **PLACE), lambda: ops.Linear(16, 16, **PLACE)]
)
def test_a_parametrized_operation_can_be_copied(make: Callable[[], nn.Module]):
    chain, x = ops.Sequential(make(), ops.GELU()), torch.randn(4, 16)
    nn.utils.parametrizations.weight_norm(chain[0])
    copied = copy.deepcopy(chain)
    torch.testing.assert_close(copied(x), chain(x))
    nn.init.zeros_(chain[0].parametrizations.weight.original0)
    assert copied(x).abs().sum() > 0


def test_an_absent_child_keeps_its_index():
    chain = ops.Sequential({"first": ops.Identity(), "second": ops.ConstantScale(2.0)})
    chain.first = None
    assert len(chain) == 2 and chain[0] is None and list(chain) == [chain.second]
    chain.insert(1, ops.ConstantScale(3.0))
    assert list(chain._modules) == ["0", "1", "2"] and chain[0] is None and chain[1].scale == 3.0
    assert torch.equal(chain(torch.ones(4)), torch.full((4,), 6.0))
