"""Quantizers and quantized tensors accept numbers and flags in every form, with the results of the plain call."""

# The arguments have other types than the signatures declare.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportCallIssue=false

import warnings

import numpy as np
import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.common.warning import forget_issued
from transformer_engine.pytorch.runtime.device import canonical_device
from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor

E4M3 = te.DType.kFloat8E4M3


def current(**arguments):
    return te.Float8CurrentScalingQuantizer(E4M3, "cpu", **arguments)


def block(**arguments):
    return te.Float8BlockQuantizer(E4M3, **arguments)


def mxfp8(**arguments):
    return te.MXFP8Quantizer(E4M3, **arguments)


# quantizer, arguments as callers give them, the same arguments written plainly
FORMS = [
    (current, {"rowwise": 1, "columnwise": 0}, {"rowwise": True, "columnwise": False}),
    (current, {"force_pow_2_scales": torch.tensor(True)}, {"force_pow_2_scales": True}),
    (current, {"force_pow_2_scales": "yes"}, {"force_pow_2_scales": True}),
    (current, {"with_amax_reduction": np.bool_(False)}, {"with_amax_reduction": False}),
    (current, {"amax_epsilon": torch.tensor(0.5)}, {"amax_epsilon": 0.5}),
    (current, {"amax_epsilon": np.float32(0.5)}, {"amax_epsilon": 0.5}),
    (current, {"amax_epsilon": 1}, {"amax_epsilon": 1.0}),
    (block, {"block_scaling_dim": 1.0}, {"block_scaling_dim": 1}),
    (block, {"block_scaling_dim": True}, {"block_scaling_dim": 1}),
    (block, {"block_scaling_dim": np.int64(2)}, {"block_scaling_dim": 2}),
    (block, {"block_scaling_dim": torch.tensor(1)}, {"block_scaling_dim": 1}),
    (block, {"force_pow_2_scales": 0, "amax_epsilon": 0}, {"force_pow_2_scales": False}),
    (mxfp8, {"with_2d_quantization": np.int64(1)}, {"with_2d_quantization": True}),
    (
        mxfp8,
        {"rowwise": torch.tensor(True), "columnwise": ""},
        {"rowwise": True, "columnwise": False},
    ),
]


def parts(quantized):
    return [value for value in quantized.get_metadata().values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize(("make", "options", "plain"), FORMS)
def test_a_quantizer_computes_the_same_by_every_form_of_its_arguments(make, options, plain):
    found, expected = make(**options), make(**plain)
    assert found == expected and hash(found) == hash(expected)
    assert {name: type(value) for name, value in vars(found).items()} == {
        name: type(value) for name, value in vars(expected).items()
    }
    x = torch.randn(64, 64) * 0.01
    assert all(map(torch.equal, parts(found(x)), parts(expected(x))))


def test_usages_are_set_by_every_form_of_a_flag():
    quantizer = current()
    quantizer.set_usage(rowwise=torch.tensor(True), columnwise=0)
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": False}
    with pytest.raises(TypeError, match=r"columnwise=.* is neither True nor False"):
        quantizer.set_usage(rowwise=False, columnwise=len)
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": False}


@pytest.mark.parametrize("make", [current, block])
def test_a_negative_floor_has_no_effect_and_warns(make):
    forget_issued()
    value = -1.0 if make is current else -2.0
    with pytest.warns(UserWarning, match=f"amax_epsilon={value} has no effect"):
        quantizer = make(amax_epsilon=value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make(amax_epsilon=value) == quantizer == make()


@pytest.mark.parametrize(
    "shape",
    [(np.int64(32), 64.0), [torch.tensor(32), 64], np.array([32, 64]), torch.Size([32, 64])],
)
@pytest.mark.parametrize("make", [current, block, mxfp8])
def test_an_empty_tensor_has_the_shape_of_every_form_of_sizes(make, shape):
    result = make().make_empty(shape, device="cpu", requires_grad=1)
    assert result.shape == (32, 64) and result.requires_grad
    x = torch.randn(32, 64)
    make().update_quantized(x, result)
    assert torch.equal(result.dequantize(), make()(x).dequantize())


@pytest.mark.parametrize("shape", [32, "32", {32, 64}, (32.5, 64), (None, 64)])
def test_other_shapes_are_errors(shape):
    with pytest.raises(
        TypeError, match=r"shape=.* is not a sequence|a size of shape=.* must be a whole number"
    ):
        current().make_empty(shape, device="cpu")


@pytest.mark.parametrize("count", [2.0, np.int64(2), torch.tensor(2)])
def test_grouped_tensors_are_counted_by_every_form_of_a_number(count):
    data = torch.arange(24.0)
    found = GroupedTensor.make_grouped_tensor_from_rowwise_data(
        num_tensors=count, tensor_shape=np.array([3, 4]), rowwise_data=data
    )
    assert found.shape == (2, 3, 4)
    result = GroupedTensor.make_grouped_tensor_with_shapes(
        count, [(3, 4.0), (np.int64(3), 4)], device="cpu"
    )
    assert result.shape == (2, 3, 4)


def test_data_of_another_format_is_dequantized_and_quantized():
    x = torch.randn(32, 64)
    for make, other in ((current, mxfp8), (block, current), (mxfp8, block)):
        found, expected = make()(torch.zeros(32, 64)), make()(torch.zeros(32, 64))
        found.data = other()(x)
        expected.data = other()(x).dequantize()
        assert type(found) is type(expected)
        assert torch.equal(found.dequantize(), expected.dequantize())
        assert found.dequantize().abs().sum() > 0


def test_an_extra_state_of_signed_bytes_is_read():
    layer = te.Linear(16, 16)
    with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
        layer(torch.randn(16, 16, device=layer.weight.device))
    state = layer.get_extra_state()
    twin = te.Linear(16, 16)
    twin.set_extra_state(state.view(torch.int8))
    assert torch.equal(twin.fp8_meta["scaling_fwd"].scale, layer.fp8_meta["scaling_fwd"].scale)
    assert torch.equal(
        twin.fp8_meta["scaling_fwd"].amax_history, layer.fp8_meta["scaling_fwd"].amax_history
    )


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="a machine with a GPU has a device of this number"
)
def test_a_device_may_be_numbered_by_a_numpy_integer():
    with pytest.raises(ValueError, match=r"cuda:0.*no CUDA device"):
        canonical_device(np.int64(0))


@pytest.mark.parametrize("quantizer", [current, mxfp8])
def test_the_shape_of_a_view_is_one_argument_a_keyword_or_several(quantizer):
    result = quantizer()
    result.internal = True
    storage = result(torch.randn(4, 32, 64))
    forms = (storage.view(2, 64, 64), storage.view((2, 64, -1)), storage.view(shape=[2, 64, 64]))
    for view in forms:
        assert tuple(view.shape) == (2, 64, 64)
        assert torch.equal(view.dequantize(), storage.dequantize().view(2, 64, 64))
