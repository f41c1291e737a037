"""torch.autocast changes no bits in a public function's forward or backward pass.

Functions compute in their inputs' dtypes. Only layers read torch.autocast's dtype, as the activation dtype;
tests/module/test_independence.py compares them with inputs cast by hand.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import same
from tests.tensor.quantizer_cases import NAMES, create_quantizer
from transformer_engine.pytorch import router
from transformer_engine.pytorch.attention.rope import (
    apply_fused_qkv_rotary_pos_emb,
    apply_rotary_pos_emb,
)
from transformer_engine.pytorch.functions.activation import activation
from transformer_engine.pytorch.functions.dropout import bias_dropout_add, dropout
from transformer_engine.pytorch.functions.softmax import scaled_softmax
from transformer_engine.pytorch.runtime.autograd import Function

ROWS, WIDTH, EXPERTS = 32, 64, 8
Results = list[torch.Tensor]


def matrix(device, *shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()


def labels(device):
    return torch.randint(0, 96, (ROWS,), generator=torch.Generator().manual_seed(5)).to(device)


def linear_cross_entropy(device, dtype):
    hidden, weight = (
        matrix(device, ROWS, WIDTH, dtype=dtype),
        matrix(device, 96, WIDTH, dtype=dtype, seed=1),
    )
    return (hidden, weight), te.fused_linear_cross_entropy(hidden, weight, labels(device))


def cross_entropy(device, dtype):
    logits = matrix(device, 1, ROWS, 96, dtype=dtype)
    return (logits,), te.parallel_cross_entropy(logits, labels(device)[None])


def rope(device, dtype):
    x = matrix(device, ROWS, 2, 4, 16, dtype=dtype)
    return (x,), apply_rotary_pos_emb(x, te.RotaryPositionEmbedding(16)(ROWS).to(device))


def packed_rope(device, dtype):
    x = matrix(device, ROWS, 2, 4, 48, dtype=dtype)
    angles = te.RotaryPositionEmbedding(16)(ROWS).to(device)
    q, k, v = apply_fused_qkv_rotary_pos_emb(x, angles, angles, [16, 16, 16])
    return (x,), q + 2 * k + 3 * v


def permute(device, dtype):
    x = matrix(device, ROWS, WIDTH, dtype=dtype)
    indices = torch.randint(0, EXPERTS, (ROWS, 2), generator=torch.Generator().manual_seed(3)).to(
        device
    )
    probs = matrix(device, ROWS, 2).detach().softmax(-1).requires_grad_()
    y, row_map = te.moe_permute(x, indices.int(), map_type="index")
    return (x, probs), te.moe_unpermute(y, row_map, probs, map_type="index")


def route_tokens(device, dtype):
    logits = matrix(device, ROWS, EXPERTS, dtype=dtype)
    probs, _ = router.fused_topk_with_score_function(
        logits,
        2,
        use_pre_softmax=False,
        num_groups=None,
        group_topk=None,
        scaling_factor=None,
        score_function="softmax",
        expert_bias=None,
    )
    return (logits,), probs


def balance_loss(device, dtype):
    logits = matrix(device, ROWS, EXPERTS, dtype=dtype)
    _, scores = router.fused_compute_score_for_moe_aux_loss(logits, 2, "softmax")
    tokens = torch.full((EXPERTS,), 8, dtype=torch.int32, device=device)
    return (logits,), router.fused_moe_aux_loss(scores, tokens, ROWS, EXPERTS, 2, 1e-2)


def one_input(function: Callable, *shape: int) -> Callable:
    def call(device, dtype):
        x = matrix(device, *shape, dtype=dtype)
        return (x,), function(x)

    return call


def apply_dropout(x):
    torch.manual_seed(4)
    return dropout(x, 0.3)


def add_with_dropout(x):
    torch.manual_seed(4)
    return bias_dropout_add(x, torch.ones(WIDTH, dtype=x.dtype, device=x.device), x, 0.3)


FUNCTIONS: dict[str, Callable] = {
    "fused_linear_cross_entropy": linear_cross_entropy,
    "parallel_cross_entropy": cross_entropy,
    "apply_rotary_pos_emb": rope,
    "apply_fused_qkv_rotary_pos_emb": packed_rope,
    "moe_permute": permute,
    "fused_topk_with_score_function": route_tokens,
    "fused_moe_aux_loss": balance_loss,
    "gelu": one_input(lambda x: activation("gelu", x), ROWS, WIDTH),
    "swiglu": one_input(lambda x: activation("swiglu", x), ROWS, WIDTH),
    "softmax": one_input(lambda x: scaled_softmax(x, 0.5), 2, 4, 16, 16),
    "dropout": one_input(apply_dropout, ROWS, WIDTH),
    "bias_dropout_add": one_input(add_with_dropout, ROWS, WIDTH),
}


def run(name, device, dtype, autocast) -> Results:
    torch.manual_seed(0)
    with torch.autocast(device.type, autocast or torch.bfloat16, enabled=autocast is not None):
        inputs, y = FUNCTIONS[name](device, dtype)
        if y.is_floating_point():
            y.backward(torch.ones_like(y) * 0.37)
    return [y.detach(), *[x.grad for x in inputs if x.grad is not None]]


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.sampled
def test_functions_compute_the_same_bits_under_autocast(name, dtype, autocast, device):
    eager, under = run(name, device, dtype, None), run(name, device, dtype, autocast)
    assert [part.dtype for part in under] == [part.dtype for part in eager]
    assert same(under, eager)


@pytest.mark.parametrize("name", NAMES)
def test_quantizers_compute_the_same_codes_under_autocast(name, device):
    x = matrix(device, 128, 64).detach()
    torch.manual_seed(0)
    expected = create_quantizer(name, device)(x).dequantize(dtype=torch.float32)
    torch.manual_seed(0)
    with torch.autocast(device.type, torch.bfloat16):
        actual = create_quantizer(name, device)(x).dequantize(dtype=torch.float32)
    assert torch.equal(actual, expected)


def test_a_layer_in_a_users_function_leaves_autocast_on(device):
    """The state is restored behind a call, also if it fails."""
    layer = te.Linear(WIDTH, WIDTH, device=device)
    x = matrix(device, ROWS, WIDTH)
    with torch.autocast(device.type, torch.bfloat16):
        layer(x).sum().backward()
        assert torch.is_autocast_enabled(device.type)
        with pytest.raises(ValueError, match="input features"):
            layer(matrix(device, ROWS, WIDTH + 16))
        assert torch.is_autocast_enabled(device.type)
        assert (x @ x.t()).dtype == torch.bfloat16


def test_users_operations_run_under_their_chains_autocast(device):
    records: list[bool] = []

    class Watching(te.ops.BasicOperation):
        def op_forward(self, ctx, input_, **_):
            records.append(torch.is_autocast_enabled(device.type))
            return input_ * 2

        def op_backward(self, ctx, grad_output):
            return grad_output * 2, ()

    chain = te.ops.Sequential(te.ops.Linear(WIDTH, WIDTH, device=device), Watching())
    with torch.autocast(device.type, torch.bfloat16):
        chain(matrix(device, ROWS, WIDTH))
    assert records == [True]


def test_every_autograd_function_of_the_package_has_the_common_base():
    """Its forward and backward pass run with autocast off; others run user code, or compute nothing."""
    rest = {"_OfTorchs", "_Checkpoint", "GroupCommitFunction", "_AddAuxiliaryLoss", "Function"}

    def below(cls: type) -> set[type]:
        return {cls}.union(*map(below, cls.__subclasses__()))

    results = {
        cls.__name__
        for cls in below(torch.autograd.Function)
        if cls.__module__.startswith("transformer_engine") and not issubclass(cls, Function)
    }
    assert results <= rest
