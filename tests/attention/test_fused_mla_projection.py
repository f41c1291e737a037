"""FusedMLAQUpProjFunction: values, MXFP8 codes and gradients against float64 and against separate steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import transformer_engine.pytorch as te
from tests.tensor.quantizer_cases import create_quantizer
from transformer_engine.pytorch.functions.weight_gradient import WeightGradStore
from transformer_engine.pytorch.primitives.operand import COLUMNWISE

S, B, HEADS, WIDTH, PASSED, ROPE, LATENT, EPS = 64, 2, 3, 96, 64, 32, 128, 1e-5
E4M3 = te.DType.kFloat8E4M3


def inputs(device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(device)  # noqa: E731
    angles = draw(S, 1, 1, ROPE)
    return {
        "x": draw(S, B, LATENT).bfloat16(),
        "gamma": (1 + 0.1 * draw(LATENT)).bfloat16(),
        "w_q": (draw(HEADS * WIDTH, LATENT) / LATENT**0.5).bfloat16(),
        "cos": angles.cos(),
        "sin": angles.sin(),
    }


def call(tensors: dict[str, Any], store: Any = None, fused: bool = False, **changes: Any) -> Any:
    options = {
        "nh": HEADS,
        "q_head_dim": WIDTH,
        "qk_head_dim": PASSED,
        "qk_pos_emb_head_dim": ROPE,
        "s": S,
        "b": B,
        "tp_group": None,
        "sequence_parallel": False,
        "eps": EPS,
        "normalization": "RMSNorm",
        "zero_centered_gamma": False,
    } | changes
    return te.FusedMLAQUpProjFunction.apply(*tensors.values(), store, fused, *options.values())


def reference_queries(tensors: dict[str, torch.Tensor], centered: bool = False) -> torch.Tensor:
    """Queries in the tensors' dtype."""
    x, gamma, w = tensors["x"], tensors["gamma"] + centered, tensors["w_q"]
    y = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * gamma
    q = (y @ w.t()).view(S, B, HEADS, WIDTH)
    cos, sin = (tensors[name].bfloat16().to(x.dtype) for name in ("cos", "sin"))
    even, odd = q[..., PASSED::2], q[..., PASSED + 1 :: 2]
    left = even * cos[..., : ROPE // 2] - odd * sin[..., : ROPE // 2]
    right = odd * cos[..., ROPE // 2 :] + even * sin[..., ROPE // 2 :]
    return torch.cat((q[..., :PASSED], left, right), dim=-1)


@pytest.mark.parametrize("centered", [False, True])
def test_queries_and_gradients_equal_float64(centered, device):
    tensors = inputs(device)
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    for contents in (tensors, wide):
        for name in ("x", "gamma", "w_q"):
            contents[name].requires_grad_()
    query = call(tensors, zero_centered_gamma=centered)
    reference = reference_queries(wide, centered)
    assert (
        type(query) is te.MXFP8Tensor
        and query.shape == (S, B, HEADS, WIDTH)
        and query.dtype == torch.bfloat16
    )
    assert query._fp8_dtype == E4M3 and query.requires_grad
    actual = query.dequantize(dtype=torch.float32).double()
    assert (actual - reference).norm() < 0.04 * reference.norm()
    grad = torch.randn(query.shape, device=device).bfloat16()
    query.backward(grad)
    reference.backward(grad.double())
    for name in ("x", "gamma", "w_q"):
        error = (tensors[name].grad.double() - wide[name].grad).norm()
        assert error < 0.01 * wide[name].grad.norm(), name


def test_codes_have_blocks_along_channels_and_along_tokens(device):
    tensors = inputs(device)
    query = call(tensors)
    assert query._rowwise_scale_inv.shape == (S, B, HEADS, WIDTH // 32)
    assert query._columnwise_scale_inv.shape == (S // 32, B, HEADS, WIDTH)
    y = te.RMSNorm(LATENT, eps=EPS, dtype=torch.bfloat16, device=device)
    linear = te.Linear(
        LATENT, HEADS * WIDTH, bias=False, params_dtype=torch.bfloat16, device=device
    )
    with torch.no_grad():
        y.weight.copy_(tensors["gamma"])
        linear.weight.copy_(tensors["w_q"])
        q = linear(y(tensors["x"])).view(S, B, HEADS, WIDTH)
    rotated = reference_queries({**tensors, "x": tensors["x"]}).bfloat16()  # of other roundings
    cos, sin = (tensors[name].bfloat16().float() for name in ("cos", "sin"))
    even, odd = q[..., PASSED::2].float(), q[..., PASSED + 1 :: 2].float()
    half = ROPE // 2
    halves = (
        even * cos[..., :half] - odd * sin[..., :half],
        odd * cos[..., half:] + even * sin[..., half:],
    )
    q = torch.cat((q[..., :PASSED], *(part.bfloat16() for part in halves)), dim=-1)
    assert (q - rotated).abs().max() < 0.2
    quantizer = te.MXFP8Quantizer(E4M3)
    rows = quantizer(q.reshape(-1, WIDTH))
    assert torch.equal(query._rowwise_data.reshape(-1, WIDTH), rows._rowwise_data)
    assert torch.equal(
        query._rowwise_scale_inv.reshape(-1, WIDTH // 32),
        rows._rowwise_scale_inv[: S * B * HEADS, : WIDTH // 32],
    )
    assert torch.equal(query.dequantize(), rows.dequantize().view(q.shape))
    for head in range(HEADS):  # each channel in a head: 32 tokens share a scale
        tokens = quantizer(q[:, 1, head])
        assert torch.equal(query._columnwise_data[:, 1, head], tokens._columnwise_data)
        assert torch.equal(
            query._columnwise_scale_inv[:, 1, head], tokens._columnwise_scale_inv[: S // 32, :WIDTH]
        )
    with pytest.raises(RuntimeError, match="blocks along its first axis"):
        query.contract(COLUMNWISE)


def test_quantized_weights_are_multiplied_in_mxfp8(device):
    tensors = inputs(device)
    weight = create_quantizer("mxfp8", device)(tensors["w_q"]).detach().requires_grad_()
    tensors["x"].requires_grad_()
    query = call({**tensors, "w_q": weight})
    reference = reference_queries(
        {name: tensor.detach().double() for name, tensor in tensors.items()}
    )
    assert (
        query.dequantize(dtype=torch.float32).double() - reference
    ).norm() < 0.08 * reference.norm()
    query.backward(torch.randn(query.shape, device=device).bfloat16())
    assert weight.grad.shape == weight.shape and tensors["x"].grad is not None


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_weight_gradients_are_accumulated_and_delayed(delayed, fused, device):
    plain, tensors = inputs(device), inputs(device)
    grad = torch.randn(S, B, HEADS, WIDTH, device=device).bfloat16()
    plain["w_q"].requires_grad_()
    call(plain).backward(grad)
    weight = torch.nn.Parameter(tensors["w_q"])
    weight.main_grad = torch.ones(weight.shape, device=device)
    store = WeightGradStore(delayed)
    call({**tensors, "w_q": weight}, store, fused).backward(grad)
    if delayed:
        assert weight.grad is None and torch.equal(
            weight.main_grad, torch.ones_like(weight.main_grad)
        )
        store.pop()
    expected = plain["w_q"].grad.float()
    actual = weight.main_grad - 1 if fused else weight.grad.float()
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)
    assert fused or torch.equal(weight.main_grad, torch.ones_like(weight.main_grad))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"normalization": "LayerNorm"}, RuntimeError, 'only "RMSNorm" is supported'),
        ({"s": 32}, ValueError, "for s=32, b=2"),
        ({"qk_head_dim": 32}, ValueError, "the sum of the other two"),
        ({"qk_head_dim": 32, "qk_pos_emb_head_dim": 64}, ValueError, r"cos is \[64, 1, 1, 32\]"),
    ],
)
def test_shapes_that_do_not_fit_are_rejected(changes, error, words, device):
    with pytest.raises(error, match=words):
        call(inputs(device), **changes)


@pytest.mark.parametrize("name", ["run", "backward_linear", "wrap_mxfp8"])
def test_calling_the_fused_kernel_names_the_replacement(name):
    with pytest.raises(
        NotImplementedError, match=f"{name} has no kernel .* FusedMLAQUpProjFunction.apply"
    ):
        getattr(te.FusedMLAQUpProjRopeQuant, name)(torch.ones(2), s=1)


def test_support_is_reported_for_the_fused_kernel_alone():
    assert not te.FusedMLAQUpProjFunction.is_supported()
