"""Operations called as modules: global module hooks, the reasons that `te.explain` reports, absent biases."""

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
        ops.LayerNorm(32, **PLACE),
        ops.Linear(32, 48, **PLACE),
        ops.GELU(),
        ops.Linear(48, 32, **PLACE),
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
def test_global_module_hooks_see_every_operation(register: Callable[..., Any], warm: bool):
    chain, x = mlp(), torch.randn(4, 32, requires_grad=True)
    expected = chain(x) if warm else mlp()(x)
    records: list[str] = []
    handle = register(lambda module, *_: records.append(type(module).__name__))
    try:
        y = chain(x)
        y.sum().backward()
    finally:
        handle.remove()
    assert {"Sequential", "LayerNorm", "Linear", "GELU"} <= set(records) and records.count(
        "Linear"
    ) == 2
    torch.testing.assert_close(y, expected)
    records.clear()
    chain(x).sum().backward()
    assert not records and len(chain._module_groups or ()) == 1  # the chain fuses again


def reasons(change: Callable[[ops.Sequential], object]) -> tuple[str, ...]:
    chain = mlp()
    change(chain)
    return te.explain(chain, torch.randn(4, 32)).notes


class Louder(ops.GELU):
    def forward(
        self, input: torch.Tensor, *extra_inputs: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
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
def test_explain_reports_why_an_operation_is_not_fused(change, note):
    assert reasons(change) == (note,)


def test_explain_reports_no_reason_for_fused_operations():
    assert reasons(lambda chain: parametrizations.weight_norm(chain[1])) == ()
    handle = every_module.register_module_forward_hook(lambda *_: None)
    try:
        result = reasons(lambda chain: None)
    finally:
        handle.remove()
    assert len(result) == 4 and all(
        "hooks are registered for all modules" in note for note in result
    )


class Written(ops.BasicOperation):
    """y = factor x, a user's operation."""

    def op_forward(
        self, ctx: Any, input_: Any, *, factor: float = 1.0, **quantizers: Any
    ) -> torch.Tensor:
        return factor * input_

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return grad_output, ()


def connected() -> ops.Sequential:
    copy, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    copy.set_extra_output_channel(0, "residual", output_to_caller=False)
    add.set_extra_input_channel(0, "residual")
    return ops.Sequential(copy, ops.ReLU(), add)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: ops.Sequential(ops.ReLU(), Written()), "a user wrote the methods of Written"),
        (connected, "a channel connects two of its operations, or an extra output is not returned"),
        (mlp, None),
    ],
    ids=["user", "channel", "none"],
)
def test_explain_reports_why_a_chain_runs_in_segments(build: Callable[[], Any], reason: str | None):
    chain, x = build(), torch.randn(4, 32)
    chain(x)
    notes = te.explain(chain, x).notes
    if reason is None:
        assert notes == () and any(chain._module_groups[0]._prepared)
        return
    (note,) = notes
    names = ", ".join([type(op).__name__ for op in chain])
    assert note.startswith(f"the chain {names} runs in segments: {reason}")
    assert not chain._module_groups[0]._prepared


def test_explain_reports_keyword_arguments():
    chain, x = ops.Sequential(ops.ReLU()), torch.randn(4, 32)
    assert te.explain(lambda: chain(x, op_kwargs={0: {}, chain[0]: {}})).notes == ()  # no arguments
    splits = [2, 2]
    grouped = ops.Sequential(ops.GroupedLinear(2, 32, 32, **PLACE))
    buffer = torch.empty(4, 32)
    (note,) = te.explain(lambda: grouped(x, splits, op_kwargs={0: {"output": buffer}})).notes
    assert note == "the chain GroupedLinear runs in segments: the call has keyword arguments"


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


def make_hook_registrar(index: int) -> Callable[[ops.Sequential], Any]:
    return lambda chain: chain[index].register_forward_hook(lambda *_: None)


DIVIDED: dict[str, Callable[[ops.Sequential], Any]] = {
    **{f"hook of {index}": make_hook_registrar(index) for index in range(6)},
    "hook of a part": lambda chain: chain[3].basic_ops[1].register_forward_hook(lambda *_: None),
    "backward hook": lambda chain: chain[2].register_full_backward_hook(lambda *_: None),
    "three hooks": lambda chain: [make_hook_registrar(index)(chain) for index in (1, 3, 5)],
    "another module": lambda chain: chain.insert(3, torch.nn.Identity()),
}


def residuals(output_in_place: bool, add_in_place: bool) -> ops.Sequential:
    """Two readers for a hidden channel, and an extra input and an extra output for the caller."""
    torch.manual_seed(0)
    return ops.Sequential(
        ops.Bias(16, **PLACE),
        ops.MakeExtraOutput(in_place=output_in_place).set_extra_output_channel(
            0, "r", output_to_caller=False
        ),
        ops.RMSNorm(16, **PLACE),
        ops.Linear(16, 16, **PLACE),
        ops.AddExtraInput(in_place=add_in_place).set_extra_input_channel(0, "r"),
        ops.GELU(),
        ops.MakeExtraOutput(),
        ops.AddExtraInput().set_extra_input_channel(0, "r"),
        ops.AddExtraInput(),
    )


def gradients(chain: ops.Sequential) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    x, other, dy, dy_extra = torch.randn(4, 8, 16, generator=generator)
    leaves = [x.clone().requires_grad_(), other.clone().requires_grad_()]
    saved = dy.clone(), dy_extra.clone()
    y, extra = chain(leaves[0], leaves[1] * 1)
    torch.autograd.backward([y, extra], [dy, dy_extra])
    assert (
        torch.equal(leaves[0].detach(), x)
        and torch.equal(dy, saved[0])
        and torch.equal(dy_extra, saved[1])
    )
    return [
        y.detach(),
        extra.detach(),
        *[leaf.grad for leaf in leaves],
        *[p.grad for p in chain.parameters()],
    ]


@pytest.mark.parametrize(
    "in_place", [(False, False), (True, False), (False, True), (True, True)], ids=str
)
@pytest.mark.parametrize("how", DIVIDED)
def test_channels_connect_operations_that_are_called_as_modules(
    how: str, in_place: tuple[bool, bool]
):
    expected = gradients(residuals(output_in_place=False, add_in_place=False))
    chain = residuals(*in_place)
    DIVIDED[how](chain)
    for _ in range(2):
        chain.zero_grad()
        for ours, reference in zip(gradients(chain), expected, strict=True):
            torch.testing.assert_close(ours, reference)
    assert len(chain._module_groups or ()) > 1


def test_channels_connect_all_operations_while_hooks_are_registered_for_all_modules():
    chain, expected = (
        residuals(output_in_place=False, add_in_place=False),
        gradients(residuals(output_in_place=False, add_in_place=False)),
    )
    handle = every_module.register_module_forward_hook(lambda *_: None)
    try:
        actual = gradients(chain)
    finally:
        handle.remove()
    chain.zero_grad()
    for results in (actual, gradients(chain)):
        for ours, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(ours, reference)
    hidden = chain[1]
    # the operation alone returns no hidden output
    assert isinstance(hidden(torch.randn(2, 16)), torch.Tensor)


def test_a_fused_operation_with_a_hook_reads_its_extra_inputs():
    outputs = [
        ops.BasicLinear(16, 16, **PLACE),
        ops.Bias(16, **PLACE),
        ops.AddExtraInput(in_place=True),
    ]
    chain = ops.Sequential(
        ops.ReLU(), ops.ForwardLinearBiasAdd(linear=outputs[0], bias=outputs[1], add=outputs[2])
    )
    x, other = torch.randn(2, 8, 16)
    expected = chain(x, other.clone())
    for module in (chain[1], outputs[1]):
        handle = module.register_forward_hook(lambda *_: None)
        torch.testing.assert_close(chain(x, other.clone()), expected)
        with pytest.raises(
            ValueError, match=r"extra inputs: 0 given, 1 read by AddExtraInput \(operation 3\)"
        ):
            chain(x)
        handle.remove()


def test_a_channel_without_a_producer_names_the_channel_in_a_divided_chain():
    chain = ops.Sequential(ops.GELU(), ops.AddExtraInput().set_extra_input_channel(0, "r"))
    chain[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="channel 'r' has no producer"):
        chain(torch.randn(2, 16))


class Pair(ops.FusedOperation):
    """Two operations as one."""


@pytest.mark.parametrize("fused", [False, True])
def test_an_operation_that_fuses_again_returns_no_channel_tensors_by_itself(fused: bool):
    copy = ops.MakeExtraOutput()
    copy.set_extra_output_channel(0, "residual", output_to_caller=False)
    add = ops.AddExtraInput()
    add.set_extra_input_channel(0, "residual")
    chain = ops.Sequential(Pair([copy, ops.ReLU()]) if fused else copy, add)
    x = torch.randn(4, 32)
    handle = copy.register_forward_hook(lambda *_: None)
    expected = x.relu() + x if fused else 2 * x
    assert torch.equal(chain(x), expected) and len(chain._module_groups or ()) == 2
    handle.remove()
    assert torch.equal(chain(x), expected) and len(chain._module_groups or ()) == 1
    assert isinstance(copy(x), torch.Tensor) and isinstance(chain[0](x), torch.Tensor)
