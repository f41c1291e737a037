"""FusedAdam takes the same steps as torch's optimizers, for all state and master dtypes."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.tolerances import UNIT
from transformer_engine.pytorch.optimizers import FusedAdam, fused_adam, multi_tensor_applier
from transformer_engine.pytorch.primitives.multi_tensor import join_halves

SHAPES = ((7, 5), (33,), (0,), (16, 16))
# Error relative to the parameter change, by state dtype.
KEPT = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.uint8: 3e-1}


def parameters(device, dtype=torch.float32, shapes=SHAPES):
    return [torch.nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes]


def as_float32(params):
    return [torch.nn.Parameter(p.detach().float().clone()) for p in params]


def give_gradients(*several, scale=1.0):
    """Set the same random gradients in parallel parameter lists."""
    for joint in zip(*several, strict=True):
        grad = scale * torch.randn(joint[0].shape, device=joint[0].device)
        grad = grad.to(joint[0].dtype)
        for p in joint:
            p.grad = grad.to(p.dtype)


def both(device, dtype=torch.float32, steps=50, lr=1e-2, decay=0.1, **options):
    """(ours, its parameters, torch's, its float32 parameters) after steps with equal gradients."""
    params = parameters(device, dtype)
    exact = as_float32(params)
    ours = FusedAdam(params, lr=lr, weight_decay=decay, **options)
    kind = torch.optim.AdamW if ours.adam_w_mode else torch.optim.Adam
    reference = kind(exact, lr=lr, weight_decay=decay)
    for _ in range(steps):
        give_gradients(params, exact)
        ours.step()
        reference.step()
    return ours, params, reference, exact


def assert_parameters_close(params, exact, tolerance):
    for p, q in zip(params, exact, strict=True):
        torch.testing.assert_close(
            p.detach().float(), q.detach().float(), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_adam_steps_equal_torch(adam_w_mode, device):
    _, params, _, exact = both(device, adam_w_mode=adam_w_mode)
    assert_parameters_close(params, exact, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_a_thousand_adam_steps_equal_torch(adam_w_mode, device):
    _, params, _, exact = both(device, adam_w_mode=adam_w_mode, steps=1000)
    assert_parameters_close(params, exact, 1e-4)


def test_without_bias_correction_the_first_step_is_small(device):
    (p,) = parameters(device, shapes=((4,),))
    before = p.detach().clone()
    p.grad = torch.ones_like(p)
    FusedAdam([p], lr=0.1, bias_correction=False).step()
    torch.testing.assert_close(
        before - p, torch.full_like(p, 0.1 * 0.1 / 0.001**0.5), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("remainders", [False, True])
def test_parameters_of_16_bits_are_their_masters_rounded(dtype, remainders, device):
    ours, params, _, exact = both(
        device, dtype, master_weights=True, store_param_remainders=remainders
    )
    masters = [ours.master_values(p) for p in params]
    assert_parameters_close(masters, exact, 1e-5)
    for p, master in zip(params, masters, strict=True):
        torch.testing.assert_close(p.detach().float(), master, rtol=UNIT[dtype], atol=0.0)
        saved = ours.state[p]["master_param"].dtype
        assert saved == (torch.int16 if remainders and dtype is torch.bfloat16 else torch.float32)


def test_remainders_hold_the_masters_to_the_bit(device):
    plain, params, *_ = both(device, torch.bfloat16, master_weights=True, steps=0)
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    halved = FusedAdam(
        twins, lr=1e-2, weight_decay=0.1, master_weights=True, store_param_remainders=True
    )
    for _ in range(20):
        give_gradients(params, twins)
        plain.step()
        halved.step()
    for p, q in zip(params, twins, strict=True):
        rebuilt = join_halves(q.detach(), halved.state[q]["master_param"])
        assert torch.equal(rebuilt, plain.state[p]["master_param"])


@pytest.mark.parametrize("first", KEPT)
@pytest.mark.parametrize("second", [torch.float32, torch.float16, torch.bfloat16])
def test_states_of_fewer_bits_step_like_float32(first, second, device):
    ours, params, _, exact = both(
        device, steps=10, lr=1e-3, decay=0.0, exp_avg_dtype=first, exp_avg_sq_dtype=second
    )
    tolerance = max(KEPT[first], KEPT[second])
    # ten steps with learning rate 1e-3
    assert_parameters_close(params, exact, tolerance * 1e-2 + 1e-5)
    state = ours.state[params[0]]
    if first is torch.uint8:
        assert isinstance(state["exp_avg"], te.Float8Tensor)
        assert state["exp_avg"]._data.dtype == torch.uint8
    else:
        assert state["exp_avg"].dtype == first
    assert ours.get_unscaled_state(params[0], "exp_avg").dtype == torch.float32


def test_a_scaled_state_reaches_half_of_the_range(device):
    (p,) = parameters(device, shapes=((3,),))
    ours = FusedAdam([p], exp_avg_dtype=torch.float16, exp_avg_sq_dtype=torch.uint8)
    ours.initialize_state(p)
    ours.set_scaled_state(p, "exp_avg", torch.tensor([0.0, 1.0, -3.0], device=device))
    assert ours._scales[p]["exp_avg"].item() == pytest.approx(3 / 32752, rel=1e-6)
    assert ours.state[p]["exp_avg"].abs().max().item() == 32752
    ours.set_scaled_state(p, "exp_avg_sq", torch.zeros(3, device=device))
    assert torch.equal(ours.get_unscaled_state(p, "exp_avg_sq"), torch.zeros(3, device=device))
    assert ours.get_unscaled_state(p, "exp_avg", skip_unscale=True).dtype == torch.float16


def test_a_master_of_float16_and_moments_of_bfloat16_are_taken(device):
    _, params, _, exact = both(
        device,
        torch.bfloat16,
        steps=5,
        lr=1e-3,
        master_weights=True,
        master_weight_dtype=torch.float16,
        exp_avg_dtype=torch.bfloat16,
        exp_avg_sq_dtype=torch.bfloat16,
    )
    assert_parameters_close(params, exact, 2e-2)


def test_no_dtype_of_masters_is_float32(device):
    """NeMo Automodel gives None."""
    assert (
        FusedAdam(
            parameters(device), master_weights=True, master_weight_dtype=None
        ).master_weight_dtype
        == torch.float32
    )


def test_a_float32_parameter_is_its_own_master(device):
    (p,) = parameters(device, shapes=((4,),))
    ours = FusedAdam([p], master_weights=True)
    give_gradients([p])
    ours.step()
    assert ours.state[p]["master_param"].data_ptr() == p.data_ptr()


def test_parameters_of_several_dtypes_step_in_one_group(device):
    params = [
        *parameters(device),
        *parameters(device, torch.bfloat16),
        *parameters(device, torch.float16),
    ]
    exact = as_float32(params)
    ours, reference = (
        FusedAdam(params, lr=1e-3),
        torch.optim.AdamW(exact, lr=1e-3, weight_decay=0.0),
    )
    give_gradients(params, exact)
    params[0].grad = exact[0].grad = None
    ours.step()
    reference.step()
    for p, q in zip(params, exact, strict=True):
        torch.testing.assert_close(p.detach().float(), q.detach(), rtol=UNIT[p.dtype], atol=1e-6)
    assert set(ours.state[params[0]]) == {
        "exp_avg",
        "exp_avg_sq",
    }  # listed, though without a gradient


def test_gradients_may_have_another_dtype_and_come_decoupled(device):
    params = parameters(device, torch.bfloat16)
    exact = as_float32(params)
    ours = FusedAdam(params, lr=1e-2, master_weights=True, use_decoupled_grad=True)
    reference = torch.optim.AdamW(exact, lr=1e-2, weight_decay=0.0)
    give_gradients(exact)
    for p, q in zip(params[1:], exact[1:], strict=True):
        p.decoupled_grad = q.grad
    exact[0].grad = None
    ours.step()
    reference.step()
    assert_parameters_close([ours.master_values(p) for p in params], exact, 1e-6)
    ours.zero_grad()
    assert params[1].decoupled_grad is None


@pytest.mark.parametrize("options", [{}, {"master_weights": True}], ids=["plain", "masters"])
def test_a_capturable_step_reads_its_numbers_on_the_device(options, device):
    dtype = torch.bfloat16 if options else torch.float32
    ours, params, _, exact = both(device, dtype, steps=5, capturable=True, **options)
    group = ours.param_groups[0]
    assert group["step"].dtype == torch.int32 and group["step"].item() == 5
    assert isinstance(group["lr"], torch.Tensor)
    masters = [ours.master_values(p) for p in params] if options else params
    assert_parameters_close(masters, exact, 1e-5)
    before = [p.detach().clone() for p in params]
    ours._dummy_overflow_buf.fill_(1)
    give_gradients(params)
    ours.step()
    assert group["step"].item() == 5
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


def test_a_gradient_scaler_is_undone_and_an_overflow_skips_the_step(device):
    params = parameters(device)
    exact = as_float32(params)
    ours = FusedAdam(params, lr=1e-2, capturable=True)
    reference = torch.optim.AdamW(exact, lr=1e-2, weight_decay=0.0)
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0, enabled=True)
    give_gradients(params, exact)
    for p in params:
        p.grad *= 8.0
    scaler.scale(torch.zeros((), device=device))  # makes its scale
    with pytest.warns(FutureWarning):
        scaler.step(ours)
    reference.step()
    assert_parameters_close(params, exact, 1e-5)
    scaler.update()
    params[1].grad.fill_(float("inf"))
    with pytest.warns(FutureWarning):
        scaler.step(ours)
    assert_parameters_close(params, exact, 1e-5)
    assert ours.param_groups[0]["step"].item() == 1


STORED = [
    {},
    {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16},
    {"exp_avg_dtype": torch.bfloat16},
    {"master_weights": True},
    {"master_weights": True, "store_param_remainders": True},
    {"master_weights": True, "master_weight_dtype": torch.float16},
    {"capturable": True},
]


@pytest.mark.parametrize("options", STORED, ids=str)
def test_a_loaded_optimizer_resumes(options, device, tmp_path):
    dtype = torch.bfloat16 if options.get("master_weights") else torch.float32
    ours, params, _, _ = both(device, dtype, steps=3, **options)
    torch.save(ours.state_dict(), tmp_path / "optimizer.pt")
    saved = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert all(
        v.dtype in (torch.float32, torch.int16) for s in saved["state"].values() for v in s.values()
    )
    repeated = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = FusedAdam(repeated, lr=0.5, **options)
    resumed.load_state_dict(saved)
    for _ in range(3):
        give_gradients(params, repeated)
        ours.step()
        resumed.step()
    assert_parameters_close(params, repeated, 1e-5 if "exp_avg_dtype" not in options else 1e-3)
    assert float(resumed.param_groups[0]["lr"]) == pytest.approx(1e-2)


def test_masters_and_remainders_are_taken_for_each_other(device):
    ours, params, _, _ = both(device, torch.bfloat16, steps=3, master_weights=True)
    halved = [torch.nn.Parameter(p.detach().clone()) for p in params]
    with_remainders = FusedAdam(halved, lr=1e-2, master_weights=True, store_param_remainders=True)
    with_remainders.load_state_dict(ours.state_dict())
    repeated = [torch.nn.Parameter(p.detach().clone()) for p in halved]
    full = FusedAdam(repeated, lr=1e-2, master_weights=True)
    full.load_state_dict(with_remainders.state_dict())
    for p, q, r in zip(params, halved, repeated, strict=True):
        assert torch.equal(with_remainders.master_values(q), ours.state[p]["master_param"])
        assert torch.equal(full.state[r]["master_param"], ours.state[p]["master_param"])


def test_the_states_of_torchs_adamw_are_taken_over(device):
    _, _, reference, exact = both(device, steps=4, decay=0.0)
    repeated = as_float32(exact)
    ours = FusedAdam(repeated, lr=1e-2)
    ours.load_state_dict(reference.state_dict())
    assert ours.param_groups[0]["step"] == 4
    give_gradients(repeated, exact)
    ours.step()
    reference.step()
    assert_parameters_close(repeated, exact, 1e-6)


def test_states_that_a_caller_replaces_are_the_ones_that_are_stepped(device):
    (p,) = parameters(device, shapes=((4,),))
    ours = FusedAdam([p], lr=1e-2)
    give_gradients([p])
    ours.step()
    other = torch.zeros_like(p)
    ours.state[p]["exp_avg"] = other
    ours.step()
    assert other.abs().sum() > 0
    ours.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    ours.step()
    torch.testing.assert_close(ours.state[p]["exp_avg"], 0.1 * p.grad)


def test_a_replaced_applier_is_the_one_that_is_called(device, monkeypatch):
    records = []

    def applier(op, flag, lists, *args):
        records.append([len(tensors) for tensors in lists])
        return multi_tensor_applier(op, flag, lists, *args)

    monkeypatch.setattr(fused_adam, "multi_tensor_applier", applier)
    params = parameters(device)
    give_gradients(params)
    FusedAdam(params).step()
    assert records == [[4, 4, 4, 4]]


def test_a_closure_and_a_deep_copy_work(device):
    (p,) = parameters(device, shapes=((4,),))
    ours = FusedAdam([p], lr=1e-2)

    def closure():
        ours.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    first = ours.step(closure)
    copied = copy.deepcopy(ours)
    assert ours.step(closure) < first
    assert copied.param_groups[0]["step"] == 1


def test_autograd_notices_that_parameters_have_changed(device):
    (p,) = parameters(device, shapes=((4,),))
    loss = p.square().sum()
    give_gradients([p])
    FusedAdam([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


REJECTED = [
    ({"amsgrad": True}, "FusedAdam has no AMSGrad"),
    ({"master_weights": True, "master_weight_dtype": torch.bfloat16}, "master_weight_dtype"),
    ({"exp_avg_dtype": torch.float64}, "exp_avg_dtype"),
    ({"exp_avg_sq_dtype": torch.int8}, "exp_avg_sq_dtype"),
    (
        {"capturable": True, "master_weights": True, "master_weight_dtype": torch.float16},
        "capturable=True",
    ),
    ({"capturable": True, "exp_avg_dtype": torch.float16}, "give torch.float32 for both"),
    (
        {"capturable": True, "master_weights": True, "store_param_remainders": True},
        "keeps no remainders",
    ),
]


@pytest.mark.parametrize(("options", "words"), REJECTED, ids=lambda value: str(value)[:40])
def test_combinations_that_do_not_exist_are_rejected(options, words, device):
    with pytest.raises(RuntimeError, match=words):
        FusedAdam(parameters(device), **options)


def test_bad_numbers_and_gradients_are_rejected_with_nothing_changed(device):
    for name in ("lr", "eps", "weight_decay"):
        with pytest.raises(ValueError, match=f"{name}=inf is not finite"):
            FusedAdam(parameters(device), **{name: float("inf")})
    with pytest.raises(ValueError, match=r"betas=.* are not two numbers"):
        FusedAdam(parameters(device), betas=(0.9, 1.0))
    params = [
        *parameters(device),
        torch.nn.Parameter(torch.ones(3, device=device, dtype=torch.float64)),
    ]
    give_gradients(params)
    ours = FusedAdam(params)
    before = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match=r"a parameter is torch.float64"):
        ours.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert "step" not in ours.param_groups[0]
    (p,) = parameters(device, shapes=((4, 3),))
    p.grad = torch.ones(4, 3, device=device).to_sparse()
    with pytest.raises(RuntimeError, match="no sparse gradients"):
        FusedAdam([p]).step()


def test_the_old_keyword_of_zero_grad_is_deprecated(device):
    with pytest.warns(DeprecationWarning, match="set_to_none"):
        ours = FusedAdam(parameters(device), set_grad_none=True)
    with pytest.raises(ValueError, match="give one"):
        ours.zero_grad(set_to_none=False)


@pytest.mark.gpu
def test_a_captured_step_is_replayed(device):
    params = parameters(device, shapes=((64, 64), (100,)))
    exact = as_float32(params)
    give_gradients(params, exact)
    ours, reference = (
        FusedAdam(params, capturable=True),
        torch.optim.AdamW(exact, lr=1e-3, weight_decay=0.0),
    )
    ours.step()
    reference.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    for _ in range(3):
        graph.replay()
        reference.step()
    assert_parameters_close(params, exact, 1e-5)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_tensor_of_more_than_two_to_the_31_elements_is_stepped(device):
    p = torch.nn.Parameter(torch.zeros((1 << 31) + 64, device=device, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    FusedAdam([p], lr=1.0, exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16).step()
    assert (p[-64:] < -0.9).all() and (p[:64] < -0.9).all()


def test_adam_accepts_the_keywords_that_callers_inspect():
    actual = inspect.signature(FusedAdam).parameters
    expected = {"master_weight_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "use_decoupled_grad"}
    assert expected <= set(actual)
    assert te.optimizers.FusedAdam is FusedAdam
