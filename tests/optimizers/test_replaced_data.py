"""Optimizers whose parameters, states or gradients get other data between steps, without a notice to the optimizer."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch

from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD

BF16 = torch.bfloat16
KINDS = {
    "adam": lambda params: FusedAdam(params, lr=0.1),
    "adam with masters": lambda params: FusedAdam(params, lr=0.1, master_weights=True),
    "adam with remainders": lambda params: FusedAdam(
        params, lr=0.1, master_weights=True, store_param_remainders=True
    ),
    "adam with scaled states": lambda params: FusedAdam(
        params, lr=0.1, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.float16
    ),
    "capturable adam": lambda params: FusedAdam(params, lr=0.1, capturable=True),
    "sgd": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_adam = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sgd"])


def train_parameters(kind, device, dtype=torch.float32, steps=2):
    """(optimizer, two parameters [6, 4], one per group) after some steps."""
    params = [torch.nn.Parameter(torch.randn(6, 4, device=device).to(dtype)) for _ in range(2)]
    optimizer = KINDS[kind]([{"params": [p]} for p in params])
    for _ in range(steps):
        give_gradients(params)
        optimizer.step()
    return optimizer, params


def give_gradients(params):
    for p in params:
        p.grad = torch.randn(p.shape, device=p.device).to(p.dtype)


def values(optimizer, params):
    """Copy all parameters, states and step counts."""
    states = [copy.deepcopy(dict(optimizer.state[p])) for p in params]
    counts = [copy.deepcopy(group.get("step")) for group in optimizer.param_groups]
    return [p.detach().clone() for p in params], states, counts


def assert_same(actual, expected):
    for ours, reference in zip(actual[0], expected[0], strict=True):
        assert torch.equal(ours, reference)
    for ours, reference in zip(actual[1], expected[1], strict=True):
        for name, value in ours.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(reference[name])), name
    assert actual[2] == expected[2]


@contextmanager
def raising_with_nothing_changed(optimizer, params, words):
    before = values(optimizer, params)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
        yield
    assert_same(values(optimizer, params), before)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("shape", [(3, 4), (6, 8), (0, 4)])
def test_data_of_another_size_raises_before_any_parameter_is_stepped(kind, dtype, shape, device):
    optimizer, params = train_parameters(kind, device, dtype)
    params[1].data = torch.randn(shape, device=device).to(dtype)
    give_gradients(params)
    if shape == (0, 4) and kind == "sgd":
        pytest.skip("FusedSGD passes over empty parameters")
    words = r"exp_avg of a parameter is \[6, 4\], the parameter \[" if kind != "sgd" else "elements"
    with raising_with_nothing_changed(optimizer, params, words):
        optimizer.step()
    if kind != "sgd":  # the remedy
        del optimizer.state[params[1]]
        optimizer.step()
        assert optimizer.state[params[1]]["exp_avg"].shape == torch.Size(shape)


@every_kind
def test_data_with_other_strides_raises_before_any_parameter_is_stepped(kind, device):
    optimizer, params = train_parameters(kind, device)
    params[1].data = params[1].data.t()  # same memory, same element count
    give_gradients(params)
    with raising_with_nothing_changed(optimizer, params, "strides .*give contiguous tensors"):
        optimizer.step()


@every_kind
def test_a_gradient_with_other_strides_raises_before_any_parameter_is_stepped(kind, device):
    optimizer, params = train_parameters(kind, device)
    give_gradients(params)
    params[1].grad = torch.randn(4, 6, device=device).t()
    with raising_with_nothing_changed(optimizer, params, "strides .*give contiguous tensors"):
        optimizer.step()


@every_adam
def test_a_gradient_of_the_earlier_size_raises(kind, device):
    optimizer, params = train_parameters(kind, device)
    give_gradients(params)
    params[1].data = torch.randn(3, 4, device=device)
    with raising_with_nothing_changed(
        optimizer, params, r"a parameter is \[3, 4\], its gradient \[6, 4\]"
    ):
        optimizer.step()


@pytest.mark.parametrize("kind", ["adam", "capturable adam", "sgd"])
def test_a_state_of_another_size_raises_before_any_parameter_is_stepped(kind, device):
    optimizer, params = train_parameters(kind, device)
    name = "momentum_buffer" if kind == "sgd" else "exp_avg_sq"
    optimizer.state[params[1]][name].data = torch.zeros(3, 4, device=device)
    give_gradients(params)
    with raising_with_nothing_changed(optimizer, params, "12 elements, that of list 0 24"):
        optimizer.step()


@every_kind
def test_reallocated_parameter_data_is_stepped_and_saved(kind, device):
    torch.manual_seed(1)
    expected, same = train_parameters(kind, device)
    torch.manual_seed(1)
    optimizer, params = train_parameters(kind, device)
    old = [p.data for p in params]
    for p in params:
        p.data = p.data.clone()
    remaining = [values.clone() for values in old]
    torch.manual_seed(2)
    give_gradients(params)
    torch.manual_seed(2)
    give_gradients(same)
    optimizer.step()
    expected.step()
    assert_same(values(optimizer, params), values(expected, same))
    assert all(torch.equal(*pair) for pair in zip(old, remaining, strict=True))
    saved = optimizer.state_dict()
    for index, p in enumerate(params):
        if kind == "adam with masters":
            assert torch.equal(saved["state"][index]["master_param"], p)
    before = [p.detach().clone() for p in params]
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert all(torch.equal(*pair) for pair in zip(params, before, strict=True))


@pytest.mark.parametrize("kind", ["adam", "capturable adam", "adam with scaled states"])
@pytest.mark.parametrize(("first", "then"), [(torch.float32, BF16), (BF16, torch.float32)])
def test_data_of_another_dtype_is_stepped_with_the_moments_of_before(kind, first, then, device):
    """A new optimizer of the new dtype, with the saved state, makes the same steps."""
    optimizer, params = train_parameters(kind, device, first)
    for p in params:
        p.data = p.data.to(then)
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    fresh = KINDS[kind]([{"params": [p]} for p in twins])
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(3):
        give_gradients(params)
        for p, twin in zip(params, twins, strict=True):
            twin.grad = p.grad.clone()
        optimizer.step()
        fresh.step()
    assert_same(values(optimizer, params), values(fresh, twins))


@pytest.mark.parametrize("kind", ["adam with masters", "adam with remainders"])
@pytest.mark.parametrize(("first", "then"), [(torch.float32, BF16), (BF16, torch.float32)])
def test_masters_follow_data_of_another_dtype(kind, first, then, device):
    """Compared with torch's AdamW in float64, which steps from the parameter's values after the conversion."""
    optimizer, params = train_parameters(kind, device, first)
    for p in params:
        p.data = p.data.to(then)
    moments = [
        {name: optimizer.get_unscaled_state(p, name).double() for name in ("exp_avg", "exp_avg_sq")}
        for p in params
    ]
    exact = [torch.nn.Parameter(p.detach().double()) for p in params]
    reference = torch.optim.AdamW(exact, lr=0.1, weight_decay=0.0)
    for q, moment in zip(exact, moments, strict=True):
        reference.state[q] = {"step": torch.tensor(2.0), **moment}
    for _ in range(5):
        give_gradients(params)
        for p, q in zip(params, exact, strict=True):
            q.grad = p.grad.double()
        optimizer.step()
        reference.step()
    for p, q in zip(params, exact, strict=True):
        torch.testing.assert_close(p.detach().double(), q.detach(), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(
            optimizer.master_values(p).double(), q.detach(), rtol=1e-2, atol=1e-2
        )
    saved, before = copy.deepcopy(optimizer.state_dict()), values(optimizer, params)
    optimizer.load_state_dict(saved)
    assert_same(values(optimizer, params), before)


def test_the_local_tensor_of_a_distributed_parameter_may_be_replaced(device):
    from torch import distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh(device.type, (1,))
        local = torch.randn(6, 4, device=device)
        p = torch.nn.Parameter(DTensor.from_local(local.clone(), mesh, [Replicate()]))
        twin = torch.nn.Parameter(local.clone())
        ours, reference = (
            FusedAdam([p], lr=0.1),
            torch.optim.AdamW([twin], lr=0.1, weight_decay=0.0),
        )
        for step in range(4):
            grad = torch.randn(6, 4, device=device)
            p.grad, twin.grad = DTensor.from_local(grad, mesh, [Replicate()]), grad
            if step == 2:
                old = p._local_tensor
                p._local_tensor = old.detach().clone()
            ours.step()
            reference.step()
        torch.testing.assert_close(p._local_tensor, twin.detach(), rtol=1e-5, atol=1e-6)
        assert not torch.equal(old, p._local_tensor)
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@every_adam
def test_data_on_another_device_raises_and_its_remedy_works(kind):
    optimizer, params = train_parameters(kind, "cpu")
    for p in params:
        p.data = p.data.cuda()
    give_gradients(params)
    with raising_with_nothing_changed(
        optimizer, params, "exp_avg of a parameter is on cpu, the parameter on cuda"
    ):
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
