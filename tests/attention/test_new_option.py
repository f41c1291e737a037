"""A new attention option changes only the call record and the backends that support it."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.dispatch import Backend
from transformer_engine.pytorch.attention.dot_product_attention import describe
from transformer_engine.pytorch.attention.dot_product_attention.utils import AttentionParams
from transformer_engine.pytorch.primitives.attention import reference
from transformer_engine.pytorch.primitives.attention.call import AttentionCall
from transformer_engine.pytorch.primitives.attention.choose import TABLE, NoBackend
from transformer_engine.pytorch.primitives.attention.passes import Passes

HEADS, SIZE, HIDDEN = 2, 8, 16
TEMPERATURES = (0.5, 2.0)
FEATURE = "a temperature per head"
PACKAGE = Path(te.__file__).parent


@dataclass(frozen=True, kw_only=True)
class TemperedCall(AttentionCall):
    """The call record with one more field, and one more feature if the field is set."""

    temperatures: tuple[float, ...] = TEMPERATURES

    @functools.cached_property
    def features(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        return (*AttentionCall.features.func(self), FEATURE)


def temper_inputs(call, inputs):
    """Inputs whose scores are multiplied by per-head temperatures."""
    factors = torch.tensor(call.temperatures, dtype=inputs.q.dtype, device=inputs.q.device)[:, None]
    return inputs._replace(q=inputs.q * factors), factors


def forward(call, inputs):
    return reference.forward(call, temper_inputs(call, inputs)[0])


def backward(call, inputs, attended, grad_output):
    inputs, factors = temper_inputs(call, inputs)
    gradients = reference.backward(call, inputs, attended, grad_output)
    return gradients._replace(q=gradients.q * factors)


@pytest.fixture
def option(monkeypatch):
    """Add the option to the record."""
    monkeypatch.setattr(describe, "AttentionCall", TemperedCall)


@pytest.fixture
def supported(option, monkeypatch):
    """Add the option to the record and to one backend."""
    row = Backend(
        "tempered",
        takes=reference.TAKES | {FEATURE},
        bind=lambda call: Passes("tempered", forward, backward),
    )
    monkeypatch.setattr(TABLE, "backends", (*TABLE.backends, row))
    order = TABLE.order
    assert order is not None
    monkeypatch.setattr(TABLE, "order", lambda call: (*order(call), "tempered"))


def sample(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_every_backend_without_the_option_is_unsupported_by_its_name(option, device):
    q = sample(5, 1, HEADS, SIZE).to(device)
    with pytest.raises(NoBackend, match=f"it does not support {FEATURE}") as error:
        te.DotProductAttention(HEADS, SIZE)(q, q, q)
    for backend in TABLE.backends:
        assert f"{backend.name}: it does not support {FEATURE}" in str(error.value)


def test_the_core_attention_computes_a_supported_option_and_its_gradients(supported, device):
    leaves = [sample(5, 1, HEADS, SIZE, seed=seed).to(device).requires_grad_() for seed in range(3)]
    attention = te.DotProductAttention(HEADS, SIZE)
    out = attention(*leaves)
    factors = torch.tensor(TEMPERATURES, device=device)[:, None]
    q, k, v = (
        (x * f)[:, 0].transpose(0, 1) for x, f in zip(leaves, (factors, 1.0, 1.0), strict=True)
    )
    hidden = torch.ones(5, 5, dtype=torch.bool, device=device).triu(1)
    scores = (q @ k.transpose(-1, -2) * SIZE**-0.5).masked_fill(hidden, -torch.inf)
    expected = (scores.softmax(-1) @ v).transpose(0, 1).reshape(5, 1, -1)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    actual = torch.autograd.grad(out.square().sum(), leaves)
    reference = torch.autograd.grad(expected.square().sum(), leaves)
    torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["MultiheadAttention", "TransformerLayer"])
def test_layers_pass_their_planned_record_to_the_backend(kind, supported, device, monkeypatch):
    options = {"attention_dropout": 0.0, "device": device}
    if kind == "TransformerLayer":
        layer = te.TransformerLayer(HIDDEN, 32, HEADS, hidden_dropout=0.0, **options)
        attention = layer.self_attention
    else:
        layer = attention = te.MultiheadAttention(HIDDEN, HEADS, **options)
    records = []
    compute = reference.forward
    monkeypatch.setattr(
        reference, "forward", lambda call, inputs: records.append(call) or compute(call, inputs)
    )
    for _ in range(2):
        layer(sample(5, 1, HIDDEN).to(device)).sum().backward()
    (plan,) = attention._plans.values()
    assert plan is not None and plan.call.temperatures == TEMPERATURES
    assert len(records) == 2 and all(call is plan.call for call in records)
    assert not attention.core_attention._plans, "the core attention has planned the call again"


def test_calls_with_equal_options_are_equal_keys():
    argument = AttentionParams().request()
    fields = {name: getattr(argument, name) for name in AttentionCall.__dataclass_fields__}
    one, same = TemperedCall(**fields), TemperedCall(**fields)
    assert one == same and hash(one) == hash(same)
    assert replace(one, temperatures=(1.0, 1.0)) != one


def files_naming(option: str) -> set[str]:
    """Attention files whose code names an option: an attribute, a keyword, a parameter or a field."""
    results = set()
    for folder in ("attention", "functions/attention", "primitives/attention"):
        for path in (PACKAGE / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                named = [getattr(node, "attr", None), getattr(node, "arg", None)]
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    named.append(node.target.id)
                if option in named:
                    results.add(path.relative_to(PACKAGE).as_posix())
    return results


def test_only_records_and_the_backend_name_an_argument_of_forward():
    """Every call has the argument num_splits; nothing between the record and the backend names it."""
    module = "attention/dot_product_attention"
    assert files_naming("num_splits") == {
        f"{module}/dot_product_attention.py",  # the public signature
        f"{module}/settings.py",  # a call's arguments
        f"{module}/arguments.py",  # its conversion
        f"{module}/describe.py",  # arguments -> AttentionCall
        f"{module}/utils.py",  # the original's AttentionParams
        "primitives/attention/call.py",  # AttentionCall
        "primitives/attention/backends/triton_decode.py",  # the backend that supports it
    }
