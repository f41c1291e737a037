"""FusedAdam with block-scaled FP8 moments, and with stochastic rounding of moments and parameters."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch.optimizers import FusedAdam

BLOCKS = {
    "exp_avg_dtype": torch.uint8,
    "exp_avg_sq_dtype": torch.uint8,
    "block_scaled_states": True,
}
STOCHASTIC = {**BLOCKS, "stochastic_rounding": True}
SHAPES = ((7, 50), (33,), (0,), (64, 256))


def parameters(device, dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))
        for shape in shapes
    ]


def give_gradients(params, seed):
    """The same random gradients for every list of parameters."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)


def train(params, steps, **options):
    optimizer = FusedAdam(params, lr=1e-2, weight_decay=0.1, **options)
    for step in range(steps):
        give_gradients(params, step)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("options", [BLOCKS, STOCHASTIC], ids=["nearest", "stochastic"])
@pytest.mark.parametrize(
    ("dtype", "masters"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)],
)
def test_updates_are_close_to_those_of_float32_moments(options, dtype, masters, device):
    before = [p.detach().float() for p in parameters(device, dtype)]
    ours, exact = (parameters(device, dtype) for _ in range(2))
    train(ours, 20, master_weights=masters, **options)
    train(exact, 20, master_weights=True)
    for p, q, start in zip(ours, exact, before, strict=True):
        difference, change = (p.float() - q.float()).norm(), (q.float() - start).norm()
        assert difference <= 0.12 * change


def test_moments_take_129_bytes_per_128_values(device):
    (p,) = parameters(device, shapes=((64, 256),))
    optimizer = train([p], 1, **BLOCKS)
    for name in ("exp_avg", "exp_avg_sq"):
        codes, exponents = optimizer.state[p][name], optimizer._scales[p][name]
        assert codes.shape == p.shape and codes.dtype == exponents.dtype == torch.uint8
        assert exponents.numel() == p.numel() // 128
    moment = optimizer.get_unscaled_state(p, "exp_avg")
    torch.testing.assert_close(moment, 0.1 * p.grad, rtol=2.0**-4, atol=1e-4)


@pytest.mark.parametrize("options", [BLOCKS, STOCHASTIC], ids=["nearest", "stochastic"])
def test_a_loaded_state_continues_with_equal_bits(options, device):
    params, twins = (parameters(device, torch.bfloat16) for _ in range(2))
    first = train(params, 3, **options)
    second = FusedAdam(twins, lr=1e-2, weight_decay=0.1, **options)
    with torch.no_grad():
        for p, q in zip(params, twins, strict=True):
            q.copy_(p)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    copied_params, copied = copy.deepcopy((params, first))
    unpickled_params, unpickled = pickle.loads(pickle.dumps((params, first)))
    for step in range(3, 6):
        for some, optimizer in (
            (params, first),
            (twins, second),
            (copied_params, copied),
            (unpickled_params, unpickled),
        ):
            give_gradients(some, step)
            optimizer.step()
    for some in (twins, copied_params, unpickled_params):
        assert all(map(torch.equal, params, some))


def test_small_updates_of_bfloat16_parameters_are_not_lost(device):
    """An update of 1e-4 is below half of the distance 2^-8 between bfloat16 numbers below 1."""
    ends = {}
    for stochastic in (False, True):
        p = torch.nn.Parameter(torch.ones(4096, device=device, dtype=torch.bfloat16))
        optimizer = FusedAdam([p], lr=1e-4, stochastic_rounding=stochastic)
        for _ in range(100):
            p.grad = torch.ones_like(p)
            optimizer.step()
        ends[stochastic] = p.detach().float().mean().item()
    assert ends[False] == 1.0
    assert ends[True] == pytest.approx(1.0 - 100 * 1e-4, abs=5e-4)  # five deviations


def test_second_moments_follow_small_changes_with_stochastic_rounding_only(device):
    """A gradient that vanishes lets a moment decay by 0.1 % per step, and codes are 6 % apart."""
    ends = {}
    for stochastic in (False, True):
        p = torch.nn.Parameter(torch.ones(4096, device=device))
        optimizer = FusedAdam([p], lr=0.0, stochastic_rounding=stochastic, **BLOCKS)
        for step in range(500):
            p.grad = torch.full_like(p, 1.0 if step == 0 else 0.0)
            optimizer.step()
        ends[stochastic] = optimizer.get_unscaled_state(p, "exp_avg_sq").mean().item() / 1e-3
    assert ends[False] > 0.9
    # 0.999^499 = 0.607; the largest value of each block decides its exponent, without an error.
    assert ends[True] == pytest.approx(0.607, rel=0.03)


def test_float32_parameters_are_not_rounded(device):
    (p,), (q,) = (parameters(device, shapes=((64, 256),)) for _ in range(2))
    train([p], 3, stochastic_rounding=True)
    train([q], 3)
    assert torch.equal(p, q)


def test_a_captured_step_has_the_bits_of_other_steps(device):
    params, twins = (parameters(device, torch.bfloat16) for _ in range(2))
    train(params, 4, capturable=True, **STOCHASTIC)
    train(twins, 4, **STOCHASTIC)
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-6)
        assert (p == q).float().mean().nan_to_num(1.0) > 0.99


def test_quantized_parameters_have_block_scaled_moments(device):
    with te.quantized_model_init(recipe=recipe.Float8CurrentScaling()):
        layer = te.Linear(64, 64, bias=False, device=device)
    weight = layer.weight
    before = weight.dequantize()
    optimizer = FusedAdam([weight], lr=0.1, master_weights=True, **STOCHASTIC)
    weight.grad = torch.randn(weight.shape, device=device)
    optimizer.step()
    torch.testing.assert_close(
        weight.dequantize(), before - 0.1 * weight.grad.sign(), rtol=0.1, atol=0.02
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_scaled_states": True}, "exp_avg_dtype=torch.float32 with block_scaled_states"),
        (
            {"block_scaled_states": True, "exp_avg_dtype": torch.uint8},
            "exp_avg_sq_dtype=torch.float32 with block_scaled_states",
        ),
        (
            {"capturable": True, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
            "torch.uint8 with block_scaled_states=True",
        ),
    ],
)
def test_moments_without_blocks_are_rejected(options, message):
    with pytest.raises(RuntimeError, match=message):
        FusedAdam(parameters("cpu"), **options)


def test_exponents_of_another_size_are_rejected(device):
    (p,) = parameters(device, shapes=((64, 256),))
    optimizer = train([p], 1, **BLOCKS)
    optimizer._scales[p]["exp_avg"] = torch.zeros(3, dtype=torch.uint8, device=device)
    before = p.detach().clone()
    with pytest.raises(ValueError, match=r"list 4 is torch.uint8 \[3\]; .*uint8 \[128\]"):
        optimizer.step()
    assert torch.equal(p, before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2e19])
def test_a_gradient_without_finite_square_makes_the_moments_of_its_block_nan(value, device):
    """2e19 is finite, but its square is not a float32 number."""
    (p,) = parameters(device, shapes=((256,),))
    optimizer = train([p], 0, **BLOCKS)
    p.grad = torch.ones_like(p)
    p.grad[3] = value
    optimizer.step()
    moment = optimizer.get_unscaled_state(p, "exp_avg_sq")
    assert moment[:128].isnan().all() and moment[128:].isfinite().all()


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1.7e19])
def test_moments_have_the_range_of_float32_gradients(scale, device):
    (p,) = parameters(device, shapes=((256,),))
    optimizer = train([p], 0, **BLOCKS)
    p.grad = torch.linspace(0.25, 1.0, 256, device=device) * scale
    optimizer.step()
    torch.testing.assert_close(
        optimizer.get_unscaled_state(p, "exp_avg"), 0.1 * p.grad, rtol=2.0**-4, atol=0.0
    )
    if scale >= 1e-15:  # the squares of smaller gradients are below the least exponent
        torch.testing.assert_close(
            optimizer.get_unscaled_state(p, "exp_avg_sq") / scale,
            0.001 * p.grad / scale * p.grad,
            rtol=2.0**-3,
            atol=0.0,
        )
