"""Operations that are called as modules: hooks of all modules, the reasons that `te.explain` reports, absent biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.modules import module as every_module
from torch.nn.utils import parametrizations

import transformer_engine.pytorch as te
from transformer_engine.pytorch import ops

PLACE: Any = {"device": "cpu"}


def mlp() -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(
        ops.LayerNorm(32, **PLACE), ops.Linear(32, 48, **PLACE), ops.GELU(), ops.Linear(48, 32, **PLACE)
    )


@pytest.mark.parametrize(
    "register",
    [
        every_module.register_module_forward_hook,
        every_module.register_module_forward_pre_hook,
        every_module.register_module_full_backward_hook,
        every_module.register_module_full_backward_pre_hook,
    ],
    ids=["forward", "forward_pre", "backward", "backward_pre"],
)
@pytest.mark.parametrize("warm", [False, True])
def test_hooks_of_all_modules_see_every_operation(register: Callable[..., Any], warm: bool):
    chain, x = mlp(), torch.randn(4, 32, requires_grad=True)
    expected = chain(x) if warm else mlp()(x)
    seen: list[str] = []
    handle = register(lambda module, *_: seen.append(type(module).__name__))
    try:
        y = chain(x)
        y.sum().backward()
    finally:
        handle.remove()
    assert {"Sequential", "LayerNorm", "Linear", "GELU"} <= set(seen) and seen.count("Linear") == 2
    torch.testing.assert_close(y, expected)
    seen.clear()
    chain(x).sum().backward()
    assert not seen and len(chain._module_groups or ()) == 1  # the chain fuses again


def reasons(change: Callable[[ops.Sequential], object]) -> tuple[str, ...]:
    chain = mlp()
    change(chain)
    return te.explain(chain, torch.randn(4, 32)).notes


class Louder(ops.GELU):
    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return 2 * super().forward(input, *extra_inputs, **kwargs)


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (
            lambda chain: chain[2].register_forward_hook(lambda *_: None),
            "GELU (2 of Sequential) is not fused: it has forward hooks",
        ),
        (
            lambda chain: chain[1].basic_ops[1].register_full_backward_hook(lambda *_: None),
            "Linear (1 of Sequential) is not fused: its Bias has backward hooks",
        ),
        (
            lambda chain: setattr(chain[0], "forward", chain[0].forward),
            "LayerNorm (0 of Sequential) is not fused: the forward method of the operation was replaced",
        ),
        (
            lambda chain: chain.__setitem__(2, Louder()),
            "Louder (2 of Sequential) is not fused: the class of the operation overrides forward",
        ),
    ],
    ids=["hook", "hook_of_a_part", "replaced_forward", "overridden_forward"],
)
def test_explain_says_why_an_operation_is_not_fused(change, note):
    assert reasons(change) == (note,)


def test_explain_notes_nothing_about_fused_operations():
    assert reasons(lambda chain: parametrizations.weight_norm(chain[1])) == ()
    handle = every_module.register_module_forward_hook(lambda *_: None)
    try:
        found = reasons(lambda chain: None)
    finally:
        handle.remove()
    assert len(found) == 4 and all("hooks are registered for all modules" in note for note in found)


@pytest.mark.parametrize("warm", [False, True])
def test_a_linear_operation_whose_bias_is_removed_computes_the_product(warm: bool):
    layer = ops.Linear(32, 48, **PLACE)
    torch.nn.init.ones_(layer.bias)
    for chain in (ops.Sequential(layer, ops.ReLU()), layer):
        x = torch.randn(4, 32, requires_grad=True)
        if warm and layer.bias is not None:
            chain(x)
        layer.bias = None
        y = chain(x)
        y.sum().backward()
        expected = x @ layer.weight.t()
        torch.testing.assert_close(y, expected.relu() if chain is not layer else expected)
        assert x.grad is not None and layer.weight.grad is not None
        assert list(layer.state_dict()) == [
            "basic_ops.0.weight",
            "basic_ops.0._extra_state",
            "basic_ops.1._extra_state",
        ]
