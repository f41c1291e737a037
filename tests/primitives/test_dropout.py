"""Dropout: kept elements, replay of masks, and the Triton kernels bit for bit against the reference."""

from __future__ import annotations

import pytest
import torch

from tests.primitives.by_kernels import Kernels
from tests.support.kernels import DEVICE, parametrize_sizes, runs_kernels
from tests.support.tolerances import DTYPES
from transformer_engine.common.dispatch import use_backend
from transformer_engine.pytorch.functions.dropout import bias_dropout_add, dropout
from transformer_engine.pytorch.primitives import dropout as dropout_module
from transformer_engine.pytorch.primitives.dropout import (
    DropoutRequest,
    bias_dropout_add_forward,
    draw_seed,
    dropout_backward,
    dropout_forward,
    reference,
    triton,
)

kernels = Kernels(dropout_module, "dropout")

SMALL = [(), (1,), (9,), (3, 33), (2, 3, 64), (4096,), (2, 4100)]
LARGE = [(8192, 1024), (70001,)]
SHAPES = parametrize_sizes("shape", SMALL, LARGE, ids=str)


def _seed(value=1234567890123, device=DEVICE):
    return torch.tensor([value], dtype=torch.int64, device=device)


@pytest.mark.parametrize(
    "rounds, words",
    [
        (7, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        (10, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ],
)
def test_random_words_equal_the_generators_published_values(rounds, words):
    zero = torch.zeros(1, dtype=torch.int64)
    assert [int(word) for word in reference._philox(zero, zero, rounds)] == words


def test_the_kept_fraction_and_the_mean_match_the_probability(device):
    x = torch.ones(200_000, device=device)
    for p in (0.1, 0.5, 0.9):
        y, mask = dropout_forward(x, p)
        assert mask.dtype is torch.uint8 and mask.shape == (25_000,)
        share = (y != 0).float().mean().item()
        assert abs(share - (1.0 - p)) < 0.01
        assert abs(y.mean().item() - 1.0) < 0.05


def test_mask_bits_are_in_element_order(device):
    x = torch.randn(3, 7, device=device)
    y, mask = dropout_forward(x, 0.4)
    bits = (mask[:, None].to(torch.int64) >> torch.arange(8, device=device)) & 1
    assert torch.equal(bits.reshape(-1)[:21].bool(), y.reshape(-1) != 0)
    assert (bits.reshape(-1)[21:] == 0).all()


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_probability_0_keeps_all_elements_and_probability_1_none(p, device):
    x = torch.randn(5, 13, device=device)
    y, mask = dropout_forward(x, p)
    dx = dropout_backward(x, mask, p)
    expected = x if p == 0.0 else torch.zeros_like(x)
    assert torch.equal(y, expected) and torch.equal(dx, expected)


def test_restoring_the_generator_replays_the_mask(device):
    generator = torch.Generator(device).manual_seed(3)
    state = generator.get_state()
    x = torch.randn(1000, device=device)
    first = dropout_forward(x, 0.5, generator=generator)
    other = dropout_forward(x, 0.5, generator=generator)
    generator.set_state(state)
    repeated = dropout_forward(x, 0.5, generator=generator)
    assert torch.equal(first[1], repeated[1]) and torch.equal(first[0], repeated[0])
    assert not torch.equal(first[1], other[1])


def test_gradients_flow_where_elements_were_kept(device):
    x = torch.randn(6, 10, device=device, requires_grad=True)
    y = dropout(x, 0.5)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert torch.equal(x.grad != 0, y != 0)
    assert set(x.grad.unique().tolist()) <= {0.0, 2.0}


def test_bias_dropout_add_equals_its_three_steps(device):
    x, residual = (torch.randn(6, 10, device=device).bfloat16().requires_grad_() for _ in range(2))
    bias = torch.randn(10, device=device).bfloat16().requires_grad_()
    seed = draw_seed(x.device)
    y, mask = bias_dropout_add_forward(x, bias, residual, 0.3, seed=seed)
    dropped, same = dropout_forward(x + bias, 0.3, seed=seed)
    assert torch.equal(mask, same)
    assert torch.equal(y, residual + dropped)
    out = bias_dropout_add(x, bias, residual, 0.3)
    dx, dbias, dresidual = torch.autograd.grad(out, (x, bias, residual), torch.ones_like(out))
    torch.testing.assert_close(dbias, dx.float().sum(0).bfloat16())
    assert torch.equal(dresidual, torch.ones_like(out))


def test_without_a_probability_the_terms_are_added_and_nothing_is_drawn(device):
    x, residual = (torch.randn(6, 10, device=device).bfloat16().requires_grad_() for _ in range(2))
    bias = torch.randn(10, device=device).bfloat16().requires_grad_()
    before = torch.randint(
        2**40, (1,), device=device, generator=torch.Generator(device).manual_seed(1)
    )
    torch.manual_seed(1)
    y = bias_dropout_add(x, bias, residual, 0.0)
    assert torch.equal(torch.randint(2**40, (1,), device=device), before)
    assert torch.equal(y, residual + (x + bias))
    grad = torch.randn_like(y)
    dx, dbias, dresidual = torch.autograd.grad(y, (x, bias, residual), grad)
    assert torch.equal(dx, grad) and torch.equal(dresidual, grad)
    torch.testing.assert_close(dbias, grad.float().sum(0).bfloat16())
    assert torch.equal(bias_dropout_add(x, None, residual, 0.0), residual + x)


def test_out_receives_the_result(device):
    x, out = torch.randn(16, device=device), torch.empty(16, device=device)
    y, mask = dropout_forward(x, 0.5, out=out)
    assert y is out
    assert dropout_backward(x, mask, 0.5, out=out) is out


def test_wrong_arguments_raise_with_the_remedy(device):
    x = torch.randn(4, 4, device=device)
    with pytest.raises(ValueError, match=r"outside 0 \.\. 1"):
        dropout_forward(x, 1.5)
    with pytest.raises(ValueError, match="one bit per element"):
        dropout_backward(x, torch.zeros(16, dtype=torch.uint8, device=device), 0.5)
    with pytest.raises(ValueError, match="make them alike"):
        bias_dropout_add_forward(x, None, x[:2], 0.5)
    with pytest.raises(ValueError, match="one number per feature"):
        bias_dropout_add_forward(x, x[0, :2], x, 0.5)


@runs_kernels
@SHAPES
@DTYPES
@pytest.mark.parametrize("p", [0.1, 0.75])
def test_kernels_give_the_reference_bits(shape, dtype, p):
    x, dy = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
    y, mask = kernels.dropout_forward(x, p, seed=_seed())
    expected, expected_mask = reference.forward(x, bias=None, residual=None, seed=_seed(), p=p)
    assert torch.equal(mask, expected_mask)
    assert torch.equal(y, expected)
    assert torch.equal(kernels.dropout_backward(dy, mask, p), reference.backward(dy, mask, p))


@runs_kernels
@DTYPES
def test_the_fused_kernel_is_bitwise_equal_to_its_steps(dtype):
    x, residual = (torch.randn(5, 1000, device=DEVICE).to(dtype) for _ in range(2))
    bias = torch.randn(1000, device=DEVICE).to(dtype)
    actual = kernels.bias_dropout_add_forward(x, bias, residual, 0.2, seed=_seed())
    expected = reference.forward(x, bias, residual, _seed(), 0.2)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    added = kernels.bias_add(x, bias, residual)
    assert torch.equal(added, reference.bias_add(x, bias, residual))


@runs_kernels
def test_strided_and_empty_inputs_equal_their_copies():
    x = torch.randn(8, 6, device=DEVICE).t()
    actual = kernels.dropout_forward(x, 0.5, seed=_seed())[0]
    assert torch.equal(actual, kernels.dropout_forward(x.contiguous(), 0.5, seed=_seed())[0])
    y, mask = kernels.dropout_forward(x[:0], 0.5, seed=_seed())
    assert y.shape == (0, 8) and mask.shape == (0,)
    assert kernels.dropout_backward(y, mask, 0.5).shape == (0, 8)


@pytest.mark.gpu
def test_compiled_code_launches_the_same_kernels_without_a_graph_break():
    x, seed = torch.randn(64, 96, device="cuda"), _seed(7, "cuda")

    def both(x):
        y, mask = dropout_forward(x, 0.5, seed=seed)
        return y, dropout_backward(y, mask, 0.5)

    with use_backend(dropout="triton"):
        eager, compiled = both(x), torch.compile(both, fullgraph=True)(x)
    assert all(torch.equal(a, b) for a, b in zip(compiled, eager, strict=True))


def test_a_tensor_on_the_cpu_is_rejected_with_the_reason():
    request = DropoutRequest("forward", torch.Size((8,)), torch.float32, torch.device("cpu"))
    assert "on cpu" in (triton.unsupported_reason(request) or "")
    assert "fewer than" in (
        triton.unsupported_reason(request._replace(shape=torch.Size((1 << 35,)))) or ""
    )
