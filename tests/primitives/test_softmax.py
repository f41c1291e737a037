"""The masked softmax: its meaning, on any device, and the Triton kernels against the float32 reference."""

from __future__ import annotations

import pytest
import torch

from tests.primitives.by_kernels import Kernels
from tests.support.kernels import DEVICE, parametrize_sizes, runs_kernels
from tests.support.tolerances import DTYPES, ROUNDED
from transformer_engine.common.dispatch import use_backend
from transformer_engine.pytorch.functions.softmax import scaled_softmax
from transformer_engine.pytorch.module.softmax import FusedScaleMaskSoftmax
from transformer_engine.pytorch.primitives import softmax
from transformer_engine.pytorch.primitives.softmax import (
    SoftmaxRequest,
    reference,
    scaled_softmax_backward,
    scaled_softmax_forward,
    triton,
)

kernels = Kernels(softmax, "softmax")

CAUSAL = pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
SMALL = [(1, 1), (3, 17), (5, 4, 4), (2, 3, 4, 7), (2, 3, 7, 4), (2, 1, 2, 3, 5)]
LARGE = [(2, 4, 512, 512), (1, 2, 33, 4097), (3, 16384), (2, 2, 3, 20001), (70000, 1, 2, 3)]
SHAPES = parametrize_sizes("shape", SMALL, LARGE, ids=str)


def _mask(shape, device):
    """Hides two keys in five, and every key of one query."""
    mask = torch.rand(shape, device=device) < 0.4
    mask[..., 0, :] = True
    return mask


def _torch_softmax(x, scale, mask, causal):
    score = x.float() * scale
    if mask is not None:
        score = score.masked_fill(mask, float("-inf"))
    if causal is not None:
        offset = 0 if causal == "top_left" else x.shape[-1] - x.shape[-2]
        observed = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril(offset)
        score = score.masked_fill(~observed, float("-inf"))
    return torch.softmax(score, -1).nan_to_num(0.0)


@CAUSAL
@pytest.mark.parametrize("masked", [False, True])
def test_probabilities_and_gradients_equal_torch(causal, masked, device):
    x = torch.randn(2, 3, 5, 9, device=device, requires_grad=True)
    mask = _mask((2, 1, 5, 9), device) if masked else None
    dy = torch.randn_like(x)
    y = scaled_softmax(x, 0.7, mask, causal)
    expected = _torch_softmax(x, 0.7, mask, causal)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    (dx,) = torch.autograd.grad(y, x, dy)
    (dx_expected,) = torch.autograd.grad(expected, x, dy)
    torch.testing.assert_close(dx, dx_expected.nan_to_num(0.0), rtol=1e-5, atol=1e-6)


def test_a_query_without_a_key_gets_zeros_and_a_hidden_key_exactly_none(device):
    x = torch.randn(4, 6, device=device)
    mask = torch.zeros(4, 6, dtype=torch.uint8, device=device)
    mask[1] = 3
    mask[2, ::2] = 1
    y = scaled_softmax_forward(x, 2.0, mask=mask)
    assert (y[1] == 0).all() and (y[2, ::2] == 0).all()
    torch.testing.assert_close(y.sum(-1), torch.tensor([1.0, 0.0, 1.0, 1.0], device=device))


def test_more_queries_than_keys_leave_the_first_queries_without_any(device):
    y = scaled_softmax_forward(torch.randn(1, 5, 3, device=device), 1.0, causal="bottom_right")
    assert (y[0, :2] == 0).all() and y[0, 2, 0] == 1.0 and (y[0, 4] > 0).all()


def test_invalid_masks_and_shapes_raise_with_the_remedy(device):
    x = torch.randn(2, 3, 4, device=device)
    with pytest.raises(TypeError, match="bool or uint8"):
        scaled_softmax_forward(x, 1.0, mask=torch.zeros(3, 4, device=device))
    with pytest.raises(ValueError, match="does not broadcast"):
        scaled_softmax_forward(x, 1.0, mask=torch.zeros(2, 4, dtype=torch.bool, device=device))
    with pytest.raises(ValueError, match="top_left or bottom_right"):
        scaled_softmax_forward(x, 1.0, causal="left")
    with pytest.raises(ValueError, match="add the missing axes"):
        scaled_softmax_forward(x[0, 0], 1.0)
    with pytest.raises(ValueError, match="the gradient of that y"):
        scaled_softmax_backward(x[:1], x, 1.0)


@pytest.mark.parametrize("kind", ["causal", "causal_bottom_right", "padding", "arbitrary"])
def test_bool_and_float_masks_give_equal_results(kind, device):
    x = torch.randn(2, 2, 4, 6, device=device)
    mask = torch.rand(2, 1, 4, 6, device=device) < 0.3
    module = FusedScaleMaskSoftmax(
        lambda scores, hidden: scores.masked_fill(hidden > 0, float("-inf"))
    )
    torch.testing.assert_close(module(x, mask, kind, 0.5), module(x, mask.float(), kind, 0.5))
    causal = {"causal": "top_left", "causal_bottom_right": "bottom_right"}.get(kind)
    torch.testing.assert_close(module(x, None, kind), scaled_softmax_forward(x, 1.0, causal=causal))


@runs_kernels
@SHAPES
@DTYPES
@pytest.mark.parametrize(
    "causal,masked", [(None, True), ("top_left", False), ("bottom_right", True)]
)
def test_kernels_equal_the_reference_to_the_last_place(shape, dtype, causal, masked):
    x = (torch.randn(shape, device=DEVICE) * 3.0).to(dtype)
    dy = torch.randn(shape, device=DEVICE).to(dtype)
    mask = _mask((*[1] * (len(shape) - 2), *shape[-2:]), DEVICE) if masked else None
    y = kernels.scaled_softmax_forward(x, 0.3, mask=mask, causal=causal)
    expected = reference.forward(x, 0.3, mask, causal)
    assert y.dtype == dtype and y.shape == x.shape
    tolerance = ROUNDED[dtype]
    torch.testing.assert_close(y.float(), expected.float(), rtol=tolerance, atol=1e-7)
    dx = kernels.scaled_softmax_backward(dy, expected, 0.3, causal=causal)
    expected = reference.backward(dy, expected, 0.3, causal)
    torch.testing.assert_close(dx.float(), expected.float(), rtol=tolerance, atol=1e-6)


@runs_kernels
def test_kernels_read_strided_scores_and_every_mask_broadcast():
    x = torch.randn(4, 2, 3, 8, device=DEVICE).transpose(0, 1)
    for shape in ((8,), (3, 1), (4, 3, 8), (2, 1, 1, 8), (1, 4, 1, 1)):
        mask = torch.rand(shape, device=DEVICE) < 0.5
        actual = kernels.scaled_softmax_forward(x, 1.0, mask=mask)
        torch.testing.assert_close(
            actual, reference.forward(x, 1.0, mask, None), rtol=1e-5, atol=1e-7
        )


@runs_kernels
def test_empty_scores_give_empty_probabilities():
    x = torch.empty(2, 0, 4, device=DEVICE)
    assert kernels.scaled_softmax_forward(x, 1.0).shape == x.shape
    assert kernels.scaled_softmax_backward(x, x, 1.0).shape == x.shape


@pytest.mark.gpu
def test_compiled_code_launches_the_same_kernels_without_a_graph_break():
    x, dy = torch.randn(2, 4, 64, 64, device="cuda"), torch.randn(2, 4, 64, 64, device="cuda")

    def both(x, dy):
        y = scaled_softmax_forward(x, 0.5, causal="top_left")
        return y, scaled_softmax_backward(dy, y, 0.5, causal="top_left")

    with use_backend(softmax="triton"):
        eager, compiled = both(x, dy), torch.compile(both, fullgraph=True)(x, dy)
    assert all(torch.equal(a, b) for a, b in zip(compiled, eager, strict=True))


def test_a_tensor_on_the_cpu_is_rejected_with_the_reason():
    request = SoftmaxRequest(
        "forward", torch.Size((2, 8)), torch.float32, torch.device("cpu"), None
    )
    assert "on cpu" in (triton.unsupported_reason(request) or "")
    assert [v.backend for v in softmax.TABLE.explain(request) if v.chosen] == ["reference"]
