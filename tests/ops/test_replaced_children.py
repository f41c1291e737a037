"""A Sequential runs the modules that it holds, however they were put there, before and after its first forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch import ops

PLACE: Any = {"device": "cpu"}
INDEX = 1  # of the child that is replaced


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


def results(run: Callable[[Tensor], Tensor], chain: ops.Sequential, recipe: Any) -> list[Tensor | None]:
    """Output and gradients."""
    chain.zero_grad()
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = run(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *[p.grad for p in chain.parameters()]]


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("way", WAYS)
def test_a_changed_sequential_runs_the_modules_that_it_holds(way: str, kind: str, emulated):
    torch.manual_seed(0)
    for warm in (False, True):
        for recipe in (None, Float8CurrentScaling()):
            chain = ops.Sequential(ops.Linear(16, 16, **PLACE), ops.GELU(), ops.Linear(16, 16, **PLACE))
            before = results(chain, chain, recipe)[0] if warm else None
            new = MADE[kind]()
            WAYS[way](chain, new)
            assert sum(module is new for module in chain) == 1

            def one_by_one(x: Tensor, chain: ops.Sequential = chain) -> Tensor:
                for module in chain:
                    x = module(x)
                return x

            found, expected = results(chain, chain, recipe), results(one_by_one, chain, recipe)
            assert all(gradient is not None for gradient in found)
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs)
            assert before is None or not torch.equal(found[0], before)  # pyright: ignore[reportArgumentType]
