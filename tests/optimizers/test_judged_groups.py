"""Parameter groups and saved states are checked as a whole: an error has changed nothing."""

from __future__ import annotations

import copy
import re

import pytest
import torch

from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD

MAKERS = {
    "adam": lambda groups: FusedAdam(groups, lr=0.1),
    "capturable": lambda groups: FusedAdam(groups, lr=0.1, capturable=True),
    "sgd": lambda groups: FusedSGD(groups, lr=0.1, momentum=0.9),
}
OURS = pytest.mark.parametrize("kind", MAKERS)


def create_stepped_optimizer(kind, steps=1):
    """An optimizer with two one-parameter groups, and a gradient for the next step."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))]} for _ in range(2)]
    optimizer = MAKERS[kind](groups)
    for _ in range(steps):
        give_gradients(optimizer)
        optimizer.step()
    give_gradients(optimizer)
    return optimizer


def give_gradients(optimizer):
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.full((3,), 0.5)


def everything(optimizer):
    """Values, states and numbers, on their own."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    values = [group["params"][0].detach() for group in optimizer.param_groups]
    return copy.deepcopy((values, optimizer.state_dict()["state"], groups))


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one.nan_to_num(-1.0), other.nan_to_num(-1.0))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


BAD = {
    "lr None": ("lr", None, TypeError, "lr=None must be a number"),
    "lr NaN": ("lr", float("nan"), ValueError, "lr=nan is not finite"),
    "lr of two": (
        "lr",
        torch.tensor([0.1, 0.2]),
        (TypeError, ValueError),
        "lr=a Tensor of shape [2]",
    ),
    "decay None": ("weight_decay", None, TypeError, "weight_decay=None must be a number"),
    "maximize": ("maximize", True, RuntimeError, "maximize=True in a parameter group"),
    "differentiable": ("differentiable", True, RuntimeError, "differentiable=True in"),
}
OF_ADAM = {
    "eps None": ("eps", None, TypeError, "eps=None must be a number"),
    "eps NaN": ("eps", float("nan"), ValueError, "eps=nan is not finite"),
    "one beta": ("betas", (0.9,), ValueError, "betas=(0.9,) are not two numbers"),
    "beta of 1": ("betas", [0.9, 1.0], ValueError, "betas=[0.9, 1.0] are not two numbers"),
    "beta None": ("betas", (0.9, None), ValueError, "betas=(0.9, None) are not two numbers"),
    "amsgrad": ("amsgrad", True, RuntimeError, "use torch.optim.AdamW"),
}
OF_SGD = {
    "lr below 0": ("lr", -0.1, ValueError, "lr=-0.1 is below 0"),
    "decay below 0": ("weight_decay", -1.0, ValueError, "weight_decay=-1.0 is below 0"),
    "momentum": ("momentum", -0.5, ValueError, "momentum=-0.5 is below 0"),
    "dampening": ("dampening", None, TypeError, "dampening=None must be a number"),
    "nesterov": ("dampening", 0.5, ValueError, "nesterov=True with momentum=0.9 and dampening=0.5"),
}
CASES = [
    *((kind, bad) for kind in MAKERS for bad in BAD),
    *((kind, bad) for kind in ("adam", "capturable") for bad in OF_ADAM),
    *(("sgd", bad) for bad in OF_SGD),
]


@pytest.mark.parametrize(("kind", "bad"), CASES)
def test_a_number_of_a_later_group_is_rejected_before_the_first_group_steps(kind, bad):
    optimizer = create_stepped_optimizer(kind)
    name, value, error, words = (BAD | OF_ADAM | OF_SGD)[bad]
    group = optimizer.param_groups[1]
    group["nesterov"] = bad == "nesterov"
    group[name] = value
    before = everything(optimizer)
    with pytest.raises(error, match=re.escape(words)):
        optimizer.step()
    assert same(before, everything(optimizer))


def test_a_number_written_into_the_same_object_is_checked_again():
    optimizer = create_stepped_optimizer("adam")
    optimizer.param_groups[1]["betas"] = betas = [0.9, 0.999]
    optimizer.step()
    betas[1] = 2.0
    with pytest.raises(ValueError, match=re.escape("betas=[0.9, 2.0]")):
        optimizer.step()
    optimizer = create_stepped_optimizer("adam")
    optimizer.param_groups[1]["lr"] = lr = torch.tensor(0.1)
    optimizer.step()
    lr.fill_(float("nan"))
    with pytest.raises(ValueError, match="lr=nan is not finite"):
        optimizer.step()


@OURS
@pytest.mark.parametrize("setting", ["maximize", "differentiable"])
def test_a_setting_that_no_kernel_computes_is_rejected_where_a_group_is_given(kind, setting):
    other = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match=f"{setting}=True in a parameter group"):
        MAKERS[kind]([{"params": [other], setting: True}])
    optimizer = create_stepped_optimizer(kind)
    with pytest.raises(RuntimeError, match=f"{setting}=True in a parameter group"):
        optimizer.add_param_group({"params": [other], setting: True})
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": [other], setting: False, "foreach": True, "fused": None})
    optimizer.step()


TORCHS = {
    "adam": lambda params, **options: torch.optim.AdamW(params, lr=0.1, **options),
    "sgd": lambda params, **options: torch.optim.SGD(params, lr=0.1, **options),
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [("adam", {"maximize": True}), ("adam", {"amsgrad": True}), ("sgd", {"maximize": True})],
)
def test_a_state_of_torchs_that_steps_otherwise_is_rejected_with_nothing_changed(kind, options):
    optimizer = create_stepped_optimizer(kind)
    reference = TORCHS[kind](
        [{"params": [torch.nn.Parameter(torch.ones(3))]} for _ in range(2)], **options
    )
    give_gradients(reference)
    reference.step()
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match=f"{next(iter(options))}=True in a parameter group"):
        optimizer.load_state_dict(reference.state_dict())
    assert same(before, everything(optimizer))


def test_a_state_of_torchs_without_momentum_is_loaded():
    reference = TORCHS["sgd"]([{"params": [torch.nn.Parameter(torch.ones(3))]} for _ in range(2)])
    give_gradients(reference)
    reference.step()
    optimizer = create_stepped_optimizer("sgd")
    optimizer.load_state_dict(reference.state_dict())
    before = optimizer.param_groups[0]["params"][0].detach().clone()
    optimizer.step()
    assert torch.equal(optimizer.param_groups[0]["params"][0], before - 0.1 * 0.5)


SPOILED = {
    "shape": (
        lambda s: s[1].update(exp_avg=torch.ones(7)),
        ValueError,
        "exp_avg of parameter 1 is [7]",
    ),
    "missing": (
        lambda s: s[1].pop("exp_avg_sq"),
        ValueError,
        "the state of parameter 1 has no exp_avg_sq",
    ),
    "dtype": (
        lambda s: s[1].update(exp_avg=torch.ones(3, dtype=torch.int32)),
        TypeError,
        "exp_avg of parameter 1 is torch.int32",
    ),
    "no tensor": (lambda s: s[1].update(exp_avg=1.0), TypeError, "exp_avg of parameter 1 is 1.0"),
}


@pytest.mark.parametrize("kind", ["adam", "capturable"])
@pytest.mark.parametrize("spoiled", SPOILED)
def test_a_state_of_adam_is_checked_completely_before_it_is_loaded(kind, spoiled):
    optimizer = create_stepped_optimizer(kind)
    spoil, error, words = SPOILED[spoiled]
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 77.0
    saved["state"][0]["exp_avg"].fill_(5.0)
    spoil(saved["state"])
    before = everything(optimizer)
    with pytest.raises(error, match=re.escape(words)):
        optimizer.load_state_dict(saved)
    assert same(before, everything(optimizer))


def test_masters_are_saved_for_all_parameters_or_for_none():
    params = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = FusedAdam(params, lr=0.1, master_weights=True)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][1]["master_param"]
    with pytest.raises(ValueError, match="the state of parameter 1 has no master_param"):
        optimizer.load_state_dict(saved)
    del saved["state"][0]["master_param"]
    optimizer.load_state_dict(saved)
    optimizer.step()


def test_a_momentum_of_another_shape_is_rejected_with_nothing_changed():
    optimizer = create_stepped_optimizer("sgd")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 77.0
    saved["state"][1]["momentum_buffer"] = torch.ones(7)
    before = everything(optimizer)
    with pytest.raises(
        ValueError, match=re.escape("momentum_buffer of parameter 1 is [7], the parameter [3]")
    ):
        optimizer.load_state_dict(saved)
    assert same(before, everything(optimizer))


@pytest.mark.parametrize("kind", ["adam", "capturable"])
def test_a_cleared_state_starts_over(kind):
    cleared, fresh = (
        create_stepped_optimizer(kind, steps=5),
        create_stepped_optimizer(kind, steps=0),
    )
    for old, new in zip(cleared.param_groups, fresh.param_groups, strict=True):
        old["params"][0].detach().copy_(new["params"][0].detach())
    cleared.state.clear()
    for optimizer in (cleared, fresh):
        optimizer.step()
    assert same(everything(cleared), everything(fresh))


def test_a_state_that_has_lost_its_parts_is_rejected():
    optimizer = create_stepped_optimizer("adam")
    optimizer.state[optimizer.param_groups[1]["params"][0]].clear()
    before = optimizer.param_groups[0]["params"][0].detach().clone()
    with pytest.raises(RuntimeError, match="the state of a parameter has no exp_avg any more"):
        optimizer.step()
    assert torch.equal(before, optimizer.param_groups[0]["params"][0])
    del optimizer.state[optimizer.param_groups[1]["params"][0]]
    optimizer.step()
