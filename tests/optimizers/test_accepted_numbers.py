"""Numbers and flags of the optimizers in every form that the original accepts, against torch's optimizers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import pytest
import torch

import transformer_engine_torch as tex
from transformer_engine.pytorch.optimizers import (
    FusedAdam,
    FusedSGD,
    MultiTensorApply,
    multi_tensor_applier,
)


class ListConfig(Sequence):
    """A sequence that is neither a list nor a tuple, as configuration libraries return."""

    def __init__(self, items):
        self._items = items

    def __len__(self):
        return len(self._items)

    def __getitem__(self, position):
        return self._items[position]


def pair():
    ours = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
    return ours, torch.nn.Parameter(ours.detach().clone())


def run(ours, theirs, p, q, steps=3):
    """Make steps with both optimizers and compare the parameters after each."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        p.grad = torch.randn(3, 4, generator=generator)
        q.grad = p.grad.clone()
        ours.step()
        theirs.step()
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


FORMS = {"float32": numpy.float32, "array": numpy.array, "tensor": torch.tensor}
BETAS = {
    "list config": lambda a, b: ListConfig([a, b]),
    "array": lambda a, b: numpy.array([a, b]),
    "tensor": lambda a, b: torch.tensor([a, b], dtype=torch.float64),
    "scalars": lambda a, b: (numpy.float64(a), torch.tensor(b, dtype=torch.float64)),
    "float32": lambda a, b: [numpy.float32(a), numpy.float32(b)],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("betas", BETAS)
@pytest.mark.parametrize("capturable", [False, 1])
def test_adam_takes_every_form_of_numbers(form, betas, capturable):
    number = FORMS[form]
    p, q = pair()
    ours = FusedAdam(
        [p],
        lr=number(0.125),
        betas=BETAS[betas](0.5, 0.75),
        eps=number(0.0625),
        weight_decay=number(0.25),
        capturable=capturable,
        bias_correction=numpy.bool_(True),
        adam_w_mode=2,
        master_weights=torch.tensor(False),
    )
    assert (
        ours.capturable is bool(capturable)
        and ours.adam_w_mode == 1
        and ours.master_weights is False
    )
    run(ours, torch.optim.AdamW([q], 0.125, (0.5, 0.75), 0.0625, 0.25), p, q)


@pytest.mark.parametrize("form", FORMS)
def test_adam_takes_every_form_of_numbers_in_a_group(form):
    number = FORMS[form]
    p, q = pair()
    ours, reference = FusedAdam([p]), torch.optim.AdamW([q], weight_decay=0.0)
    run(ours, reference, p, q)
    values = {"lr": 0.125, "eps": 0.0625, "weight_decay": 0.25}
    ours.param_groups[0].update({name: number(value) for name, value in values.items()})
    ours.param_groups[0]["betas"] = ListConfig([0.5, 0.75])
    reference.param_groups[0].update(values, betas=(0.5, 0.75))
    run(ours, reference, p, q)


def test_numbers_that_change_inside_an_array_are_checked_again():
    p, _ = pair()
    ours = FusedAdam([p], betas=(betas := numpy.array([0.5, 0.75])))
    p.grad = torch.ones_like(p)
    ours.step()
    betas[0] = 1.5
    before = p.detach().clone()
    with pytest.raises(ValueError, match=r"betas=.* are not two numbers in \[0, 1\)"):
        ours.step()
    assert torch.equal(p, before)


def test_adam_maximizes_with_a_negative_learning_rate():
    p, q = pair()
    run(
        FusedAdam([p], lr=-0.01, eps=1e-3),
        torch.optim.AdamW([q], 0.01, eps=1e-3, weight_decay=0.0, maximize=True),
        p,
        q,
    )


def test_adam_takes_a_negative_weight_decay():
    p, q = pair()
    ours, reference = (
        FusedAdam([p], lr=0.125, weight_decay=-0.5),
        torch.optim.AdamW([q], 0.125, weight_decay=0.0),
    )
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    ours.step()
    with torch.no_grad():
        q.mul_(1 + 0.125 * 0.5)
    reference.step()
    torch.testing.assert_close(p, q)


def test_a_saved_number_of_steps_may_be_a_float():
    p, q = pair()
    ours, reference = FusedAdam([p], lr=0.125), torch.optim.AdamW([q], 0.125, weight_decay=0.0)
    run(ours, reference, p, q)
    saved = ours.state_dict()
    saved["param_groups"][0]["step"] = 3.0
    repeated = FusedAdam([p], lr=0.125)
    repeated.load_state_dict(saved)
    assert repeated.param_groups[0]["step"] == 3
    run(repeated, reference, p, q)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("flag", [1, "yes", torch.tensor(True)])
def test_sgd_takes_every_form_of_numbers(form, flag):
    number = FORMS[form]
    p, q = pair()
    ours = FusedSGD(
        [p], number(0.125), number(0.5), number(0.0), number(0.25), flag, wd_after_momentum=0
    )
    run(ours, torch.optim.SGD([q], 0.125, 0.5, 0.0, 0.25, True), p, q)
    ours.most_recent_scale = number(4.0)
    p.grad = 4.0 * torch.ones_like(p)
    q.grad = torch.ones_like(q)
    ours.step()
    before = q.detach().clone()
    buffer = ours.state[p]["momentum_buffer"]
    torch.testing.assert_close(
        p, before - 0.125 * (torch.ones_like(p) + 0.25 * before + 0.5 * buffer)
    )


@pytest.mark.parametrize(
    "scale", [numpy.float32(0.5), torch.tensor(0.5), float("inf"), float("nan"), True]
)
def test_lists_are_scaled_by_every_number(scale):
    x, out = torch.linspace(0.5, 2, 5), torch.empty(5)
    flag = torch.zeros(1, dtype=torch.int32)
    multi_tensor_applier(tex.multi_tensor_scale, flag, [[x], [out]], scale)
    torch.testing.assert_close(out, x * float(scale), equal_nan=True, rtol=0, atol=0)
    assert flag.item() == 0  # only inputs that are not finite set it


@pytest.mark.parametrize("form", FORMS)
def test_steps_of_lists_take_every_form_of_numbers(form):
    number = FORMS[form]
    p, q = pair()
    p, gradient = p.detach(), torch.ones(3, 4)
    flag = torch.zeros(1, dtype=torch.int32)
    lists = [[gradient], [p], [torch.zeros(3, 4)], [torch.zeros(3, 4)]]
    apply = MultiTensorApply(number(2048.0))
    numbers = (0.125, 0.5, 0.75, 0.0625)
    apply(
        tex.multi_tensor_adam, flag, lists, *map(number, numbers), number(1.0), 1, 1, number(0.25)
    )
    q.grad = gradient
    torch.optim.AdamW([q], 0.125, (0.5, 0.75), 0.0625, 0.25).step()
    torch.testing.assert_close(p, q.detach())
