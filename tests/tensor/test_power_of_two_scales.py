"""Float8BlockwiseQTensor records whether its scales are powers of two: a product by their exponents is exact then."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.formats import BLOCK_1D, BLOCK_1D_POWERS, BLOCK_2D, BLOCK_2D_POWERS
from transformer_engine.common.recipe import Float8BlockScaling
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.primitives.operand import COLUMNWISE, ROWWISE
from transformer_engine.pytorch.primitives.quantize.encodings import is_power_of_two
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer


def quantizer(powers: bool, dimensions: int = 2) -> Float8BlockQuantizer:
    return Float8BlockQuantizer(
        DType.kFloat8E4M3, force_pow_2_scales=powers, block_scaling_dim=dimensions
    )


def forms(tensor) -> tuple[str, str]:
    return tensor.contract(ROWWISE).format.name, tensor.contract(COLUMNWISE).format.name


@pytest.mark.parametrize(
    ("dimensions", "powers", "form"),
    [
        (1, False, BLOCK_1D),
        (1, True, BLOCK_1D_POWERS),
        (2, False, BLOCK_2D),
        (2, True, BLOCK_2D_POWERS),
    ],
)
def test_operands_of_a_quantizer_and_of_its_tensors_record_the_scales(dimensions, powers, form):
    x = torch.randn(160, 200)
    q = quantizer(powers, dimensions)
    tensor = q(x)
    assert forms(tensor) == (form.name, form.name)
    for operand in q.operands(x, True, True):
        assert operand.format is form and is_power_of_two(operand.scale) == powers
    for same in (
        tensor.detach(),
        copy.deepcopy(tensor),
        tensor.view(160, 200),
        q.make_empty((160, 200)),
    ):
        assert forms(same) == (form.name, form.name)
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    assert forms(torch.load(file, weights_only=False)) == (form.name, form.name)


def test_scales_of_unknown_origin_are_not_taken_for_powers_of_two():
    payload = quantizer(True)(torch.randn(128, 128)).get_metadata()
    del payload["power_of_two"]
    assert forms(te.Float8BlockwiseQTensorStorage(**payload)) == ("block2d", "block2d")


def test_copies_replace_the_record_with_the_scales():
    powers, general = (quantizer(each)(torch.randn(128, 256)) for each in (True, False))
    target = quantizer(True)(torch.randn(128, 256))
    target.copy_from_storage(general)
    assert forms(target) == ("block2d", "block2d")
    target.copy_from_storage(powers, noop_flag=torch.zeros(1))
    # Only the device knows whether the scales were copied.
    assert forms(target) == ("block2d", "block2d")
    target.copy_from_storage(powers)
    assert forms(target) == ("block2d_powers", "block2d_powers")
    target.copy_from_storage(powers, noop_flag=torch.zeros(1))
    assert forms(target) == ("block2d_powers", "block2d_powers")
    target.copy_from_storage(general, noop_flag=torch.ones(1))
    assert forms(target) == ("block2d", "block2d")


def test_rows_with_other_scales_end_the_record():
    with torch.no_grad():
        weight = quantizer(True, 1)(torch.randn(256, 128))
        weight[128:] = torch.randn(128, 128)
        assert forms(weight) == ("block1d_powers", "block1d_powers")
        weight._quantizer.force_pow_2_scales = False
        weight[128:] = torch.randn(128, 128)
        assert forms(weight) == ("block1d", "block1d")


def test_loaded_bytes_are_examined():
    def layer(powers: bool) -> te.Linear:
        recipe = Float8BlockScaling()
        with te.quantized_model_init(recipe=recipe):
            module = te.Linear(128, 128, bias=False)
        module.weight._quantizer.force_pow_2_scales = powers
        with torch.no_grad():
            module.weight.quantize_(torch.randn(128, 128))
        return module

    target = layer(True)
    assert forms(target.weight) == ("block2d_powers", "block2d_powers")
    te.load_plain_state_dict(target, te.plain_state_dict(layer(False)))
    assert forms(target.weight) == ("block2d", "block2d")
    te.load_plain_state_dict(target, te.plain_state_dict(layer(True)))
    assert forms(target.weight) == ("block2d_powers", "block2d_powers")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, True),
        (2.0**-127, True),
        (2.0**127, True),
        (0.0, True),
        (2.0**-128, False),
        (3.0, False),
        (-2.0, False),
        (float("inf"), False),
        (float("nan"), False),
    ],
)
def test_powers_of_two_are_those_that_an_exponent_of_one_byte_holds(value, expected):
    assert is_power_of_two(torch.tensor([1.0, value])) == expected
