"""GroupedTensor: group matrices as views on one buffer."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from tests.tensor.quantizer_cases import (
    DETERMINISTIC,
    QUANTIZED,
    create_quantizer,
    same_payload,
    values,
)
from transformer_engine.pytorch.primitives.operand import ROWWISE
from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor, GroupedTensorStorage

GROUPED = [name for name in QUANTIZED if name != "hybrid"]


def test_matrices_of_one_shape_are_a_stack_whose_members_share_its_memory():
    data = torch.arange(24.0)
    grouped = GroupedTensor.make_grouped_tensor_from_rowwise_data(
        num_tensors=2, tensor_shape=(3, 4), rowwise_data=data
    )
    assert isinstance(grouped, GroupedTensor) and isinstance(grouped, torch.Tensor)
    assert (
        grouped.shape == (2, 3, 4) and grouped.all_same_shape() and grouped.logical_shape == (6, 4)
    )
    first, second = grouped.split_into_quantized_tensors()
    assert torch.equal(second, data[12:].view(3, 4))
    first[0, 0] = 7.0
    assert data[0] == 7.0 and (grouped * 1)[0, 0, 0] == 7.0 and type(grouped * 1) is torch.Tensor


def test_matrices_of_different_shapes_are_stored_consecutively():
    shapes = [(2, 4), (0, 4), (3, 4)]
    grouped = GroupedTensor.make_grouped_tensor_with_shapes(3, shapes, dtype=torch.bfloat16)
    assert grouped.shape == grouped.logical_shape == (5, 4)
    assert grouped.offsets == [0, 8, 8, 20] and grouped.get_common_last_dim() == 4
    values = [torch.randn(shape, device=grouped.device) for shape in shapes]
    assert all(
        torch.equal(a, b.bfloat16()) for a, b in zip(grouped.quantize(values), values, strict=True)
    )
    with pytest.raises(RuntimeError, match=r"the first extents \[2, 0, 3\] differ"):
        grouped.get_common_first_dim()


def test_a_set_flag_leaves_the_values():
    grouped = GroupedTensor.make_grouped_tensor_with_shapes(1, [(2, 2)])
    grouped.quantize([torch.ones(2, 2)])
    grouped.quantize([torch.zeros(2, 2)], torch.ones(1, device=grouped.device))
    assert grouped.rowwise_data.sum() == 4


def test_offsets_are_cumulative():
    assert GroupedTensorStorage.make_tensor_offsets([2, 0, 3], 8).tolist() == [0, 16, 16, 40]
    splits = torch.tensor([2, 0, 3], dtype=torch.int32)
    assert GroupedTensor.make_tensor_offsets(splits, 8).dtype == torch.int64


def test_inputs_that_do_not_fit_are_rejected():
    with pytest.raises(ValueError, match="2 tensors of 24 elements do not fill a buffer of 23"):
        GroupedTensor.make_grouped_tensor_from_rowwise_data(
            num_tensors=2, tensor_shape=(3, 4), rowwise_data=torch.zeros(23)
        )
    with pytest.raises(ValueError, match="1 of 2 matrices are quantized"):
        code = te.MXFP8Quantizer(te.DType.kFloat8E4M3)(torch.ones(32, 32))
        GroupedTensor.of_members([code, torch.ones(32, 32)])
    with pytest.raises(
        ValueError, match="num_tensors=3 does not divide the logical extent 4; give first_dims"
    ):
        GroupedTensor.make_grouped_tensor(3, None, None, 4, 8)


@pytest.mark.parametrize("name", GROUPED)
def test_matrices_of_other_shapes_are_quantized_each_by_itself(name, device):
    shapes, quantizer = [(32, 64), (96, 64)], create_quantizer(name, device)
    grouped = GroupedTensor.make_grouped_tensor_with_shapes(
        2, shapes, quantizer, device, torch.bfloat16
    )
    tensors = [values(device, *shape) for shape in shapes]
    contents = grouped.quantize(tensors)
    assert grouped.shape == (128, 64) and grouped.tensor_offsets.tolist() == [0, 2048, 8192]
    assert grouped.first_dims.tolist() == [32, 96] and type(grouped.quantizer) is type(quantizer)
    assert torch.equal(
        grouped.dequantize(), torch.cat([member.dequantize() for member in contents])
    )
    if name in DETERMINISTIC:
        assert all(same_payload(h, quantizer(t)) for h, t in zip(contents, tensors, strict=True))


def test_extents_may_be_device_tensors(device):
    firsts = torch.tensor([16, 0, 48], device=device)
    grouped = GroupedTensor.make_grouped_tensor(3, firsts, None, 64, 32, device=device)
    assert grouped.tensor_shapes == [(16, 32), (0, 32), (48, 32)] and grouped.shape == (64, 32)
    assert GroupedTensor.make_grouped_tensor(4, None, None, 64, 32).shape == (4, 16, 32)


def test_given_extents_count_as_varying_if_they_are_equal(device):
    equal, other = torch.tensor([32, 32], device=device), torch.tensor([16, 48], device=device)
    rows = GroupedTensor.make_grouped_tensor(2, equal, None, 64, 16, device=device)
    assert rows.shape == rows.logical_shape == (64, 16) and rows.first_dims.tolist() == [32, 32]
    assert rows.tensor_offsets.tolist() == [0, 512, 1024] and rows.last_dims is None
    both = GroupedTensor.make_grouped_tensor(2, equal, other, 1, 2048, device=device)
    assert both.shape == (1, 2048) and both.varying_both_dims()
    assert both.tensor_shapes == [(32, 16), (32, 48)]


@pytest.mark.parametrize("name", GROUPED)
def test_copies_and_new_directions_keep_extents_and_maxima(name, device):
    x, first_dims = values(device, 256, 128), torch.tensor([128, 128], device=device)
    cast = create_quantizer(name, device)
    group = tex.group_quantize(x, cast, 2, first_dims)
    attributes = ("first_dims", "tensor_offsets", "amax", "columnwise_amax", "scale")
    transposed = tex.group_quantize(
        x, create_quantizer(name, device, rowwise=True, columnwise=False), 2, first_dims
    )
    groups = [(group, pickle.loads(pickle.dumps(group))), (group, copy.copy(group))]
    if transposed.transposable:
        before = transposed.copy()
        transposed.update_usage(rowwise_usage=True, columnwise_usage=True)
        groups.append((before, transposed))
    for original, copied in groups:
        assert (
            copied.shape == copied.logical_shape == (256, 128) and not copied.all_same_first_dim()
        )
        assert torch.equal(copied.dequantize(), original.dequantize())
        for attribute in attributes:
            expected = getattr(original, attribute)
            assert expected is None or torch.equal(getattr(copied, attribute), expected), attribute


@pytest.mark.parametrize("name", [name for name in GROUPED if name in DETERMINISTIC])
def test_a_group_is_a_quantized_tensor_of_its_members(name, device):
    members = [create_quantizer(name, device)(values(device, 32, 64)) for _ in range(3)]
    grouped = GroupedTensor.of_members(members)
    for copied in (
        grouped.clone(),
        copy.deepcopy(grouped),
        pickle.loads(pickle.dumps(grouped)),
        grouped.detach(),
    ):
        assert type(copied) is GroupedTensor and copied.shape == (3, 32, 64)
        ours = copied.split_into_quantized_tensors()
        assert all(same_payload(a, b) for a, b in zip(ours, members, strict=True))
    assert type(grouped + 1) is torch.Tensor and torch.amax(grouped) == grouped.dequantize().amax()
    grouped.mul_(0.5)
    assert type(grouped) is GroupedTensor
    with pytest.raises(TypeError, match="a group of 3 matrices is not an operand"):
        grouped.contract(ROWWISE)


@pytest.mark.parametrize("name", [name for name in GROUPED if name in DETERMINISTIC])
def test_directions_are_dropped_and_made_again(name, device):
    members = [create_quantizer(name, device)(values(device, 32, 64)) for _ in range(2)]
    grouped = GroupedTensor.of_members(members)
    full = grouped.dequantize()
    grouped.update_usage(columnwise_usage=False)
    assert not grouped.has_columnwise_data() and torch.equal(grouped.dequantize(), full)
    if grouped.transposable:
        grouped.update_usage(columnwise_usage=True)
        assert all(
            same_payload(a, b) for a, b in zip(grouped.quantized_tensors, members, strict=True)
        )
    else:
        with pytest.raises(RuntimeError, match="cannot make column-wise data"):
            grouped.update_usage(columnwise_usage=True)


def test_one_parameter_for_all_groups_needs_its_variable(monkeypatch):
    with pytest.warns(UserWarning, match="single_grouped_weight=True has no effect"):
        layer = te.GroupedLinear(2, 16, 16, single_grouped_weight=True)
    assert [name for name, _ in layer.named_parameters()][:2] == ["weight0", "bias0"]
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    layer = te.GroupedLinear(2, 16, 16, single_grouped_bias=True)
    assert [name for name, _ in layer.named_parameters()] == ["weight0", "weight1", "bias"]


def test_the_variable_of_use_grouped_tensor_warns(monkeypatch):
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM", "1")
    with pytest.warns(FutureWarning, match="give use_grouped_tensor=True"):
        assert te.GroupedLinear(2, 16, 16).use_grouped_tensor


def test_grouped_products_take_rows_from_the_device(device):
    layer = te.GroupedLinear(2, 16, 16, use_grouped_tensor=True, device=device)
    x, splits = torch.randn(8, 16, device=device), torch.tensor([3, 5], device=device)
    plain = te.GroupedLinear(2, 16, 16, device=device)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x, splits), plain(x, [3, 5]))


@pytest.mark.gpu
def test_rows_on_the_host_are_rejected_where_it_must_not_wait():
    layer = te.GroupedLinear(2, 16, 16, use_grouped_tensor=True)
    with pytest.raises(
        ValueError, match="m_splits is a list; with use_grouped_tensor=True give int64 on the GPU"
    ):
        layer(torch.randn(8, 16, device="cuda"), [3, 5])
