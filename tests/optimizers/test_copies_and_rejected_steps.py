"""FusedAdam and FusedSGD at the edges: rejected steps, parameters without dimensions, copies, numbers of steps."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD

OPTIONS = [
    {},
    {"adam_w_mode": False, "weight_decay": 0.1},
    {"capturable": True},
    {"capturable": True, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    {"exp_avg_dtype": torch.bfloat16},
    {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
    {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
    {"master_weights": True},
    {"master_weights": True, "capturable": True},
    {"master_weights": True, "master_weight_dtype": torch.float16},
    {"master_weights": True, "store_param_remainders": True},
]
WAYS = pytest.mark.parametrize("options", OPTIONS, ids=str)


def through_a_file(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "copy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "file": through_a_file,
}


def members(optimizer):
    return optimizer.param_groups[0]["params"]


def give_gradients(optimizer, seed):
    torch.manual_seed(seed)
    for p in members(optimizer):
        p.grad = torch.randn(p.shape).to(p)


@WAYS
def test_a_rejected_step_of_adam_changes_nothing(options, device):
    good = torch.nn.Parameter(torch.ones(6, 4, device=device))
    bad = torch.nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16, device=device))
    ours = FusedAdam([{"params": [good]}, {"params": [bad]}], lr=0.1, **options)
    strided = torch.ones(6, 4, dtype=torch.bfloat16, device=device).t()
    good.grad, bad.grad = torch.ones_like(good), strided
    with pytest.raises(
        ValueError, match=r"gradient of \[4, 6\] has strides \(1, 4\); give contiguous tensors"
    ):
        ours.step()
    assert torch.equal(good, torch.ones_like(good)) and not ours.state
    assert all("step" not in group for group in ours.param_groups)
    bad.grad = strided.contiguous()
    ours.step()
    good.grad, bad.grad = torch.ones_like(good), strided
    before = copy.deepcopy((good, bad, ours.state_dict()))
    with pytest.raises(ValueError, match="give contiguous tensors"):
        ours.step()
    assert torch.equal(good, before[0]) and torch.equal(bad, before[1])
    assert all(
        torch.equal(value, before[2]["state"][index][name])
        for index, state in ours.state_dict()["state"].items()
        for name, value in state.items()
    )
    assert [int(group["step"]) for group in ours.param_groups] == [1, 1]


def test_a_state_that_cannot_be_stepped_is_rejected_before_any_is(device):
    params = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    ours = FusedAdam([{"params": [p]} for p in params], lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    ours.step()
    ours.state[params[1]]["exp_avg"] = torch.zeros(3, dtype=torch.float64, device=device)
    before = [p.detach().clone() for p in params]
    with pytest.raises(TypeError, match=r"torch\.float64"):
        ours.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert [group["step"] for group in ours.param_groups] == [1, 1]


@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_without_dimensions_steps_as_one_of_one_element(options, dtype, device):
    scale, row = (
        torch.nn.Parameter(torch.ones(shape, dtype=dtype, device=device)) for shape in ((), (1,))
    )
    ours = [FusedAdam([p], lr=0.1, **options) for p in (scale, row)]
    for seed in range(3):
        for optimizer in ours:
            give_gradients(optimizer, seed)
            optimizer.step()
    assert scale.shape == () and scale.item() != 1 and torch.equal(scale.view(1), row)
    repeated = FusedAdam([scale], lr=0.1, **options)
    repeated.load_state_dict(ours[0].state_dict())
    assert all(value.shape == () for value in repeated.state_dict()["state"][0].values())


@pytest.mark.parametrize("way", COPIES)
@WAYS
def test_a_copy_of_adam_continues_as_the_original(options, way, device):
    dtypes = (torch.float32, torch.bfloat16)
    params = [torch.nn.Parameter(torch.ones(4, 3, device=device, dtype=dtype)) for dtype in dtypes]
    ours = FusedAdam(params, lr=0.1, **options)
    fresh = COPIES[way](ours)
    for optimizer in (ours, fresh):
        give_gradients(optimizer, 0)
        optimizer.step()
    later = COPIES[way](ours)
    for optimizer in (ours, fresh, later):
        give_gradients(optimizer, 1)
        optimizer.step()
    for twin in (fresh, later):
        assert all(
            torch.equal(p, q) and p is not q for p, q in zip(params, members(twin), strict=True)
        )
        assert twin.param_groups[0]["step"] == 2
        if ours.master_weights:
            pairs = zip(params, members(twin), strict=True)
            assert all(torch.equal(ours.master_values(p), twin.master_values(q)) for p, q in pairs)


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_gradient_descent_continues_as_the_original(way, device):
    p = torch.nn.Parameter(torch.ones(4, device=device))
    ours = FusedSGD([p], lr=0.1, momentum=0.9, weight_decay=0.1, wd_after_momentum=True)
    give_gradients(ours, 0)
    ours.step()
    ours.most_recent_scale = 2.0
    twin = COPIES[way](ours)
    for optimizer in (ours, twin):
        give_gradients(optimizer, 1)
        optimizer.step()
    assert torch.equal(members(twin)[0], p) and members(twin)[0] is not p


def test_an_optimizer_under_a_scheduler_is_pickled(device):
    ours = FusedAdam([torch.nn.Parameter(torch.ones(4, device=device))], lr=0.1)
    torch.optim.lr_scheduler.StepLR(ours, 1)
    twin = pickle.loads(pickle.dumps(ours))
    give_gradients(twin, 0)
    twin.step()
    assert twin.param_groups[0]["step"] == 1


def test_unequal_numbers_of_steps_of_torchs_are_rejected_with_nothing_changed(device):
    params = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    reference = torch.optim.AdamW(params, lr=0.1)
    for p in (params[0], params[1]):
        p.grad = torch.ones_like(p)
        reference.step()
    joint = FusedAdam(params, lr=0.5)
    with pytest.raises(ValueError, match=r"parameters of one group have made \[1, 2\] steps"):
        joint.load_state_dict(reference.state_dict())
    assert not joint.state and joint.param_groups[0]["lr"] == 0.5
    exact = [torch.nn.Parameter(p.detach().clone()) for p in params]
    alone = torch.optim.AdamW([{"params": [p]} for p in exact], lr=0.1)
    state = reference.state_dict()
    (group,) = state["param_groups"]
    state["param_groups"] = [group | {"params": [index]} for index in range(2)]
    alone.load_state_dict(copy.deepcopy(state))
    ours = FusedAdam([{"params": [p]} for p in params], lr=0.1)
    ours.load_state_dict(state)
    assert [group["step"] for group in ours.param_groups] == [2, 1]
    for optimizer in (ours, alone):
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.ones(3, device=device)
        optimizer.step()
    for p, q in zip(params, exact, strict=True):
        torch.testing.assert_close(p, q)
