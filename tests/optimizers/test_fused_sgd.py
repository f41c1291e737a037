"""FusedSGD: same steps as torch.optim.SGD, and the attributes that the original's callers set."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.support.tolerances import UNIT
from transformer_engine.pytorch.optimizers import FusedSGD

WAYS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
]


def step_both(ours, theirs, params, exact, factor=1.0):
    for p, q in zip(params, exact, strict=True):
        q.grad = torch.randn_like(q)
        p.grad = (factor * q.grad).to(p.dtype)
    ours.step()
    theirs.step()


def create_parameters(device, dtype=torch.float32):
    params = [torch.nn.Parameter(torch.randn(n, device=device).to(dtype)) for n in (5, 64, 0)]
    return params, [torch.nn.Parameter(p.detach().float().clone()) for p in params]


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_sgd_steps_equal_torch(how, device):
    params, exact = create_parameters(device)
    ours, reference = FusedSGD(params, 0.1, **how), torch.optim.SGD(exact, 0.1, **how)
    for _ in range(20):
        step_both(ours, reference, params, exact)
    for p, q in zip(params, exact, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
        assert "momentum_buffer" in ours.state[p]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_of_16_bits_step_too(dtype, device):
    params, exact = create_parameters(device, dtype)
    ours, reference = FusedSGD(params, 0.1), torch.optim.SGD(exact, 0.1)
    step_both(ours, reference, params, exact)
    for p, q in zip(params, exact, strict=True):
        torch.testing.assert_close(
            p.detach().float(), q.detach(), rtol=UNIT[dtype], atol=2 * UNIT[dtype]
        )


def test_the_most_recent_scale_is_undone_once(device):
    params, exact = create_parameters(device)
    ours, reference = FusedSGD(params, 0.1), torch.optim.SGD(exact, 0.1)
    ours.most_recent_scale = 4.0
    step_both(ours, reference, params, exact, factor=4.0)
    assert ours.most_recent_scale == 1.0
    step_both(ours, reference, params, exact)
    for p, q in zip(params, exact, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_weight_decay_may_come_after_the_momentum(device):
    p = torch.nn.Parameter(torch.ones(3, device=device))
    ours = FusedSGD([p], 0.1, momentum=0.5, weight_decay=0.1, wd_after_momentum=True)
    for _ in range(2):
        p.grad = torch.ones_like(p)
        ours.step()
    first = 1 - 0.1 * (1 + 0.1)
    torch.testing.assert_close(p.detach(), torch.full_like(p, first - 0.1 * (1.5 + 0.1 * first)))


def test_a_loaded_optimizer_resumes(device):
    params, exact = create_parameters(device)
    ours, reference = FusedSGD(params, 0.1, momentum=0.9), torch.optim.SGD(exact, 0.1, momentum=0.9)
    for _ in range(3):
        step_both(ours, reference, params, exact)
    repeated = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = FusedSGD(repeated, 0.5)
    resumed.load_state_dict(copy.deepcopy(reference.state_dict()))  # torch shares the tensors
    step_both(resumed, reference, repeated, exact)
    for p, q in zip(repeated, exact, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "bad", [{"lr": -1.0}, {"momentum": -1.0}, {"weight_decay": -1.0}, {"nesterov": True}], ids=str
)
def test_bad_numbers_are_rejected(bad, device):
    with pytest.raises(ValueError, match=r"; give"):
        FusedSGD(create_parameters(device)[0], **({"lr": 0.1} | bad))


def test_parameters_that_cannot_be_stepped_are_rejected(device):
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64, device=device))
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"torch\.float64"):
        FusedSGD([p], 0.1).step()


def test_a_rejected_step_changes_nothing(device):
    good = torch.nn.Parameter(torch.ones(6, 4, device=device))
    bad = torch.nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16, device=device))
    exact = torch.nn.Parameter(torch.ones(6, 4, device=device))
    how = {"momentum": 0.9, "dampening": 0.5}
    ours, reference = FusedSGD([good, bad], 1.0, **how), torch.optim.SGD([exact], 1.0, **how)
    good.grad, bad.grad = (
        torch.ones_like(good),
        torch.ones(6, 4, dtype=torch.bfloat16, device=device).t(),
    )
    ours.most_recent_scale = 2.0
    for _ in range(2):
        with pytest.raises(ValueError, match="give contiguous tensors"):
            ours.step()
        assert torch.equal(good, torch.ones_like(good)) and not ours.state
        assert ours.most_recent_scale == 2.0
    ours.most_recent_scale = 1.0
    ours.param_groups[0]["lr"] = float("nan")
    bad.grad = torch.ones_like(bad)
    with pytest.raises(ValueError, match="lr=nan is not finite"):
        ours.step()
    assert not ours.state
    ours.param_groups[0]["lr"] = 1.0
    exact.grad = torch.ones_like(exact)
    ours.step()
    reference.step()
    assert torch.equal(good, exact) and torch.equal(bad.float(), exact.view(4, 6))


def test_a_parameter_without_dimensions_is_stepped(device):
    scale, exact = (torch.nn.Parameter(torch.tensor(1.0, device=device)) for _ in range(2))
    ours, reference = (
        FusedSGD([scale], 0.1, momentum=0.9),
        torch.optim.SGD([exact], 0.1, momentum=0.9),
    )
    for _ in range(3):
        step_both(ours, reference, [scale], [exact])
    torch.testing.assert_close(scale, exact)
