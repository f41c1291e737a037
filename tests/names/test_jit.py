"""Fused functions of pytorch.jit equal plain PyTorch, and the decorators select the compiled functions."""

from __future__ import annotations

import importlib

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch import jit

DTYPES = [torch.float32, torch.bfloat16]


def test_torch_version_is_the_release_under_both_module_names():
    module = importlib.import_module("transformer_engine.pytorch.torch_version")
    assert module.torch_version() == jit.torch_version() == te.torch_version()
    assert ".".join(map(str, jit.torch_version())) == torch.__version__.split("+")[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_bias_gelu_equals_autograd_in_float64(dtype, with_bias):
    x = torch.randn(5, 7).to(dtype)
    bias = torch.randn(7).to(dtype) if with_bias else None
    dy = torch.randn(5, 7).to(dtype)
    wide = x.double().requires_grad_()
    wide_bias = None if bias is None else bias.double().requires_grad_()
    y = torch.nn.functional.gelu(
        wide if wide_bias is None else wide + wide_bias, approximate="tanh"
    )
    y.backward(dy.double())
    tolerance = (
        {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    )
    torch.testing.assert_close(jit.bias_gelu_fused(x, bias).double(), y, **tolerance)
    torch.testing.assert_close(jit.dgelu_fused_(dy, x, bias).double(), wide.grad, **tolerance)
    grad_bias, grad_x = jit.bgrad_dgelu_fused(dy, x, bias)
    assert torch.equal(grad_x, jit.dgelu_fused_(dy, x, bias))
    if wide_bias is None:
        assert grad_bias is None
    else:
        loose = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else tolerance
        torch.testing.assert_close(grad_bias.double(), wide_bias.grad, **loose)


def test_an_empty_bias_means_none():
    x = torch.randn(3, 4)
    assert torch.equal(jit.bias_gelu_fused(x, torch.empty(0)), jit.bias_gelu_fused(x, None))
    assert jit.bgrad_dgelu_fused(x, x, torch.empty(0))[0] is None


def test_l2_normalization_and_its_gradient_equal_autograd():
    x = torch.randn(4, 9, dtype=torch.float64).float().requires_grad_()
    dy = torch.randn(4, 9)
    y = jit.l2normalization_fused(x, 1e-6)
    y.backward(dy)
    torch.testing.assert_close(y.norm(dim=-1), torch.ones(4))
    repeated, factor = jit.l2normalization_fwd_fused(x.detach(), 1e-6)
    assert torch.equal(repeated, y) and factor.shape == (4, 1)
    torch.testing.assert_close(
        jit.l2normalization_backward_fused(dy, x.detach(), factor, 1e-6), x.grad
    )


def test_bias_dropout_add():
    x, bias, residual = torch.randn(6, 8), torch.randn(8), torch.randn(6, 8)
    expected = residual + (x + bias)
    assert torch.equal(jit.bias_dropout_add_fused_inference(x, bias, residual, 0.5), expected)
    assert torch.equal(jit.get_bias_dropout_add(False)(x, None, residual, 0.5), residual + x)
    torch.manual_seed(3)
    result = jit.bias_dropout_add_fused_train(x, bias, residual, 0.5) - residual
    saved = result != 0
    torch.testing.assert_close(result[saved], (2 * (x + bias))[saved])
    assert 0 < saved.sum() < saved.numel()


def test_warm_ups_leave_the_random_state(monkeypatch):
    before = torch.get_rng_state()
    jit.warmup_jit_bias_dropout_add_all_dtypes(hidden_size=8, seq_length=2, micro_batch_size=2)
    jit.warmup_jit_bias_gelu_all_dtypes(8, 2, 2)
    jit.warmup_jit_l2normalization_all_dtypes(8, 2, 2)
    jit.set_jit_fusion_options()
    assert torch.equal(torch.get_rng_state(), before)


def test_jit_fuser_compiles_in_the_first_call_only(monkeypatch):
    compiled = []

    def record(function):
        compiled.append(function)
        return lambda x: function(x) + 1

    monkeypatch.setattr(torch, "compile", record)
    fused = jit.jit_fuser(lambda x: 2 * x)
    assert compiled == []
    assert (fused(3), fused(4)) == (7, 9) and len(compiled) == 1


def test_jit_fuser_leaves_functions_uncompiled_by_the_variable(monkeypatch):
    monkeypatch.setenv("NVTE_TORCH_COMPILE", "0")

    def function(x):
        return x

    assert jit.jit_fuser(function) is function and jit.dropout_fuser(function) is function


def test_no_torch_dynamo_splits_the_graph_where_the_condition_holds():
    inside = []

    @jit.no_torch_dynamo()
    def exclude(x):
        inside.append(torch.compiler.is_compiling())
        return x + 1

    @jit.no_torch_dynamo(when=lambda call: "it is large" if call["args"][0].numel() > 4 else None)
    def sometimes(x):
        return x * 2

    compiled = torch.compile(lambda x: sometimes(exclude(x)), backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 4.0))
    assert inside == [False]
    assert torch.equal(
        torch.compile(sometimes, backend="eager", fullgraph=True)(torch.ones(3)),
        torch.full((3,), 2.0),
    )
    with pytest.warns(UserWarning, match="it is large"):
        assert torch.equal(
            torch.compile(sometimes, backend="eager")(torch.ones(8)), torch.full((8,), 2.0)
        )
