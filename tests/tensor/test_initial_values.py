"""Initial values of quantized parameters in files: saved values are loaded, and work as before."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import transformer_engine.pytorch as te
from tests.tensor.quantizer_cases import NAMES, create_quantizer, same_payload, values
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch.tensor.initial_values import keep_initial_values


def through_a_file(thing, weights_only):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


WAYS = {
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "file": lambda thing: through_a_file(thing, False),
    "weights only": lambda thing: through_a_file(thing, True),
    "twice": lambda thing: through_a_file(through_a_file(thing, True), True),
}


@pytest.mark.sampled(pairs=True)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cleared", [False, True], ids=["kept", "cleared"])
@pytest.mark.parametrize("detached", [False, True], ids=["parameter", "detached"])
@pytest.mark.parametrize("name", NAMES)
def test_a_saved_parameter_returns_its_initial_values(name, detached, cleared, way, device):
    x = values(device, 32, 64)
    parameter = torch.nn.Parameter(create_quantizer(name, device)(x))
    keep_initial_values(parameter, x)
    parameter.partition_dim = 1
    saved = parameter.detach() if detached else parameter
    if cleared:
        saved.clear_high_precision_init_val()
    read = WAYS[way]({"weight": saved})["weight"]
    assert same_payload(read, saved) and read.partition_dim == 1
    if cleared:
        assert read.get_high_precision_init_val() is None
    else:
        assert torch.equal(read.get_high_precision_init_val(), x.cpu())
        read.clear_high_precision_init_val()
        assert read.get_high_precision_init_val() is None
        assert saved.get_high_precision_init_val() is not None


@pytest.mark.parametrize("way", ["pickle", "file"])
def test_a_module_with_initial_values_comes_back_from_its_pickle(way, device):
    with te.quantized_model_init(
        recipe=Float8CurrentScaling(), preserve_high_precision_init_val=True
    ):
        layer = te.Linear(32, 32, device=device)
    layer.bias.data.zero_()
    read = WAYS[way](copy.deepcopy(layer))
    initial = layer.weight.get_high_precision_init_val()
    assert torch.equal(read.weight.get_high_precision_init_val(), initial)
    assert read.weight.get_high_precision_init_val.__self__ is read.weight
    state = WAYS["weights only"](layer.state_dict())
    assert torch.equal(state["weight"].get_high_precision_init_val(), initial)
