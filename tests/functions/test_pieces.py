"""Weight pieces join into one tensor, without a copy if they are adjacent, and with the same gradients."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.functions.pieces import whole

WIDTH = 256
SPLIT = ("query", "key", "value")


def layer(kind: type = te.Linear, split: bool = True, **kwargs) -> torch.nn.Module:
    torch.manual_seed(0)
    pieces = {"parameters_split": SPLIT} if split else {}
    return kind(WIDTH, 3 * WIDTH, params_dtype=torch.float32, device="cpu", **pieces, **kwargs)


def module_pieces(module: torch.nn.Module, what: str) -> list[torch.nn.Parameter]:
    return [getattr(module, f"{name}_{what}") for name in SPLIT]


def test_a_layers_pieces_are_adjacent_and_joined_without_a_copy():
    module = layer()
    weight, bias = whole(module_pieces(module, "weight"), module_pieces(module, "bias"))
    assert weight.shape == (3 * WIDTH, WIDTH) and bias.shape == (3 * WIDTH,)
    assert weight.data_ptr() == module.query_weight.data_ptr()
    assert bias.data_ptr() == module.query_bias.data_ptr()
    assert torch.equal(weight, torch.cat(module_pieces(module, "weight")))


def test_separate_pieces_are_copied():
    module = copy.deepcopy(layer())
    weight, _ = whole(module_pieces(module, "weight"), ())
    assert weight.data_ptr() != module.query_weight.data_ptr()
    assert torch.equal(weight, torch.cat(module_pieces(module, "weight")))


@pytest.mark.parametrize("kind", (te.Linear, te.LayerNormLinear))
@pytest.mark.parametrize("neighbours", (True, False))
def test_gradients_equal_the_full_parameters_gradients(kind, neighbours):
    split, one = layer(kind), layer(kind, split=False)
    if not neighbours:
        split = copy.deepcopy(split)
    with torch.no_grad():
        one.weight.copy_(torch.cat(module_pieces(split, "weight")))
    x = torch.randn(4, WIDTH)
    results = []
    for module in (split, one):
        y = module(x)
        y.square().sum().backward()
        results.append(y)
    assert torch.equal(*results)
    for what in ("weight", "bias"):
        grads = [piece.grad for piece in module_pieces(split, what)]
        assert torch.equal(torch.cat(grads), getattr(one, what).grad)


def test_a_frozen_weight_gets_no_gradient_while_its_bias_does():
    module = layer()
    for piece in module_pieces(module, "weight"):
        piece.requires_grad_(False)
    weight, bias = whole(module_pieces(module, "weight"), module_pieces(module, "bias"))
    assert not weight.requires_grad and bias.requires_grad
    module(torch.randn(4, WIDTH)).sum().backward()
    assert all(piece.grad is None for piece in module_pieces(module, "weight"))
    assert all(piece.grad is not None for piece in module_pieces(module, "bias"))


@pytest.mark.parametrize("name", ("query_weight", "value_weight"))
def test_changing_a_piece_before_the_backward_reads_it_raises(name):
    module = layer()
    y = module(torch.randn(4, WIDTH, requires_grad=True))
    with torch.no_grad():
        getattr(module, name).mul_(2.0)
    with pytest.raises(RuntimeError, match="has been modified inplace"):
        y.sum().backward()


def test_changing_a_piece_with_a_separate_version_counter_raises():
    module = pickle.loads(pickle.dumps(layer()))
    y = module(torch.randn(4, WIDTH, requires_grad=True))
    with torch.no_grad():
        module.value_weight.mul_(2.0)
    with pytest.raises(
        RuntimeError,
        match=r"a piece \[256, 256\] of a weight was changed in place|inplace operation",
    ):
        y.sum().backward()


def test_pieces_that_no_gradient_reads_may_change_before_the_backward():
    module = layer()
    x = torch.randn(4, WIDTH)
    first, second = module(x), module(x)
    first.sum().backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.sub_(parameter.grad)
    second.sum().backward()
    expected = 2 * x.sum(0).expand(WIDTH, WIDTH)
    for piece in module_pieces(module, "weight"):
        torch.testing.assert_close(piece.grad, expected[: piece.shape[0]])


def test_piece_gradients_can_be_differentiated():
    pieces = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradgradcheck(lambda *parts: whole(parts, ())[0].square(), pieces)


def test_pieces_that_would_be_unaligned_get_separate_memory():
    module = te.Linear(6, 9, parameters_split=SPLIT, params_dtype=torch.float32, device="cpu")
    storages = {piece.untyped_storage().data_ptr() for piece in module_pieces(module, "weight")}
    assert len(storages) == 3


def test_a_memory_plan_counts_no_copy_of_adjacent_pieces():
    saved = [te.memory_plan(module, None, 64).saved for module in (layer(), copy.deepcopy(layer()))]
    assert saved[0] < saved[1]
