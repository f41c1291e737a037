"""Types of arguments: NumPy and torch scalars, ints for bools, any sequence for shapes.

Quantizers and quantized tensors compute the same as with plain Python values. Related conversions follow: data of
another format, extra state of another dtype, and the forms of a view's shape.
"""

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


def make_current(**arguments):
    return te.Float8CurrentScalingQuantizer(E4M3, "cpu", **arguments)


def make_block(**arguments):
    return te.Float8BlockQuantizer(E4M3, **arguments)


def make_mxfp8(**arguments):
    return te.MXFP8Quantizer(E4M3, **arguments)


# (function that makes a quantizer, arguments of unusual types, the same arguments as plain Python values)
FORMS = [
    (make_current, {"rowwise": 1, "columnwise": 0}, {"rowwise": True, "columnwise": False}),
    (make_current, {"force_pow_2_scales": torch.tensor(True)}, {"force_pow_2_scales": True}),
    (make_current, {"force_pow_2_scales": "yes"}, {"force_pow_2_scales": True}),
    (make_current, {"with_amax_reduction": np.bool_(False)}, {"with_amax_reduction": False}),
    (make_current, {"amax_epsilon": torch.tensor(0.5)}, {"amax_epsilon": 0.5}),
    (make_current, {"amax_epsilon": np.float32(0.5)}, {"amax_epsilon": 0.5}),
    (make_current, {"amax_epsilon": 1}, {"amax_epsilon": 1.0}),
    (make_block, {"block_scaling_dim": 1.0}, {"block_scaling_dim": 1}),
    (make_block, {"block_scaling_dim": True}, {"block_scaling_dim": 1}),
    (make_block, {"block_scaling_dim": np.int64(2)}, {"block_scaling_dim": 2}),
    (make_block, {"block_scaling_dim": torch.tensor(1)}, {"block_scaling_dim": 1}),
    (
        make_block,
        {"force_pow_2_scales": 0, "amax_epsilon": 0},
        {"force_pow_2_scales": False, "amax_epsilon": 0.0},
    ),
    (make_mxfp8, {"with_2d_quantization": np.int64(1)}, {"with_2d_quantization": True}),
    (
        make_mxfp8,
        {"rowwise": torch.tensor(True), "columnwise": ""},
        {"rowwise": True, "columnwise": False},
    ),
]


def list_tensors(quantized):
    return [value for value in quantized.get_metadata().values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize(("make", "options", "plain"), FORMS)
def test_argument_types_do_not_change_the_quantizer(make, options, plain):
    actual, expected = make(**options), make(**plain)
    assert actual == expected and hash(actual) == hash(expected)
    assert {name: type(value) for name, value in vars(actual).items()} == {
        name: type(value) for name, value in vars(expected).items()
    }
    x = torch.randn(64, 64) * 0.01
    assert all(map(torch.equal, list_tensors(actual(x)), list_tensors(expected(x))))


def test_set_usage_accepts_any_type_of_flag():
    quantizer = make_current()
    quantizer.set_usage(rowwise=torch.tensor(True), columnwise=0)
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": False}
    with pytest.raises(TypeError, match=r"columnwise=.* is neither True nor False"):
        quantizer.set_usage(rowwise=False, columnwise=len)
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": False}


@pytest.mark.parametrize("make", [make_current, make_block])
def test_negative_amax_epsilon_warns_once_and_has_no_effect(make):
    forget_issued()
    value = -1.0
    with pytest.warns(UserWarning, match=f"amax_epsilon={value} has no effect"):
        quantizer = make(amax_epsilon=value)
    # The second construction is silent: a warning is issued once per message.
    # The second construction is silent: the warning is issued once per value.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make(amax_epsilon=value) == quantizer == make()


@pytest.mark.parametrize(
    "shape",
    [(np.int64(32), 64.0), [torch.tensor(32), 64], np.array([32, 64]), torch.Size([32, 64])],
)
@pytest.mark.parametrize("make", [make_current, make_block, make_mxfp8])
def test_make_empty_accepts_any_sequence_of_integral_numbers_as_shape(make, shape):
    result = make().make_empty(shape, device="cpu", requires_grad=1)
    assert result.shape == (32, 64) and result.requires_grad
    x = torch.randn(32, 64)
    make().update_quantized(x, result)
    assert torch.equal(result.dequantize(), make()(x).dequantize())


@pytest.mark.parametrize("shape", [32, "32", {32, 64}, (32.5, 64), (None, 64)])
def test_make_empty_rejects_invalid_shapes(shape):
    with pytest.raises(
        TypeError, match=r"shape=.* is not a sequence|a size of shape=.* must be a whole number"
    ):
        make_current().make_empty(shape, device="cpu")


@pytest.mark.parametrize("count", [2.0, np.int64(2), torch.tensor(2)])
def test_num_tensors_accepts_integral_scalars(count):
    data = torch.arange(24.0)
    from_data = GroupedTensor.make_grouped_tensor_from_rowwise_data(
        num_tensors=count, tensor_shape=np.array([3, 4]), rowwise_data=data
    )
    assert from_data.shape == (2, 3, 4)
    from_shapes = GroupedTensor.make_grouped_tensor_with_shapes(
        count, [(3, 4.0), (np.int64(3), 4)], device="cpu"
    )
    assert from_shapes.shape == (2, 3, 4)


def test_data_of_another_format_is_dequantized_and_quantized():
    x = torch.randn(32, 64)
    for make, other in (
        (make_current, make_mxfp8),
        (make_block, make_current),
        (make_mxfp8, make_block),
    ):
        actual, expected = make()(torch.zeros(32, 64)), make()(torch.zeros(32, 64))
        actual.data = other()(x)
        expected.data = other()(x).dequantize()
        assert type(actual) is type(expected)
        assert torch.equal(actual.dequantize(), expected.dequantize())
        assert actual.dequantize().abs().sum() > 0


def test_extra_state_may_be_signed_bytes():
    layer = te.Linear(16, 16)
    with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
        layer(torch.randn(16, 16, device=layer.weight.device))
    state = layer.get_extra_state()
    twin = te.Linear(16, 16)
    twin.set_extra_state(state.view(torch.int8))  # as NumPy-based checkpoint readers return bytes
    assert torch.equal(twin.fp8_meta["scaling_fwd"].scale, layer.fp8_meta["scaling_fwd"].scale)
    assert torch.equal(
        twin.fp8_meta["scaling_fwd"].amax_history, layer.fp8_meta["scaling_fwd"].amax_history
    )


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="a machine with a GPU has a device of this number"
)
def test_a_device_index_may_be_a_numpy_integer():
    with pytest.raises(ValueError, match=r"cuda:0.*no CUDA device"):
        canonical_device(np.int64(0))


@pytest.mark.parametrize("make", [make_current, make_mxfp8])
def test_view_accepts_its_shape_as_one_argument_a_keyword_or_several(make):
    quantizer = make()
    quantizer.internal = True
    storage = quantizer(torch.randn(4, 32, 64))
    forms = (storage.view(2, 64, 64), storage.view((2, 64, -1)), storage.view(shape=[2, 64, 64]))
    for view in forms:
        assert tuple(view.shape) == (2, 64, 64)
        assert torch.equal(view.dequantize(), storage.dequantize().view(2, 64, 64))
