"""GroupedTensor: matrices of groups as views of one buffer."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor, GroupedTensorStorage


def test_matrices_of_one_shape_are_a_stack_whose_members_share_its_memory():
    data = torch.arange(24.0)
    grouped = GroupedTensor.make_grouped_tensor_from_rowwise_data(
        num_tensors=2, tensor_shape=(3, 4), rowwise_data=data
    )
    assert isinstance(grouped, GroupedTensor) and isinstance(grouped, torch.Tensor)
    assert grouped.shape == (2, 3, 4) and grouped.all_same_shape() and grouped.logical_shape == (6, 4)
    first, second = grouped.split_into_quantized_tensors()
    assert torch.equal(second, data[12:].view(3, 4))
    first[0, 0] = 7.0
    assert data[0] == 7.0 and (grouped * 1)[0, 0, 0] == 7.0 and type(grouped * 1) is torch.Tensor


def test_matrices_of_other_shapes_lie_one_behind_the_other():
    shapes = [(2, 4), (0, 4), (3, 4)]
    grouped = GroupedTensor.make_grouped_tensor_with_shapes(3, shapes, dtype=torch.bfloat16)
    assert grouped.shape == grouped.logical_shape == (5, 4)
    assert grouped.offsets == [0, 8, 8] and grouped.get_common_last_dim() == 4
    values = [torch.randn(shape) for shape in shapes]
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(grouped.quantize(values), values, strict=True))
    with pytest.raises(RuntimeError, match=r"the first extents \[2, 0, 3\] differ"):
        grouped.get_common_first_dim()


def test_a_set_flag_leaves_the_values():
    grouped = GroupedTensor.make_grouped_tensor_with_shapes(1, [(2, 2)])
    grouped.quantize([torch.ones(2, 2)])
    grouped.quantize([torch.zeros(2, 2)], torch.ones(1))
    assert grouped.rowwise_data.sum() == 4


def test_offsets_are_cumulative():
    assert GroupedTensorStorage.make_tensor_offsets([2, 0, 3], 8) == [0, 16, 16, 40]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="2 tensors of 24 elements do not fill a buffer of 23"):
        GroupedTensor.make_grouped_tensor_from_rowwise_data(
            num_tensors=2, tensor_shape=(3, 4), rowwise_data=torch.zeros(23)
        )
    with pytest.raises(NotImplementedError, match="groups are not quantized by a MXFP8Quantizer"):
        GroupedTensor.make_grouped_tensor_with_shapes(1, [(32, 32)], te.MXFP8Quantizer(te.DType.kFloat8E4M3))


def test_one_parameter_for_all_groups_warns_or_is_refused(monkeypatch):
    with pytest.warns(UserWarning, match="single_grouped_weight=True has no effect"):
        layer = te.GroupedLinear(2, 16, 16, single_grouped_weight=True)
    assert [name for name, _ in layer.named_parameters()][:2] == ["weight0", "bias0"]
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    with pytest.raises(NotImplementedError, match="one parameter of all groups, which is not implemented"):
        te.GroupedLinear(2, 16, 16, single_grouped_bias=True)


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
def test_rows_on_the_host_are_refused_where_it_must_not_wait():
    layer = te.GroupedLinear(2, 16, 16, use_grouped_tensor=True)
    with pytest.raises(
        ValueError, match="m_splits is a list; with use_grouped_tensor=True give int64 on the GPU"
    ):
        layer(torch.randn(8, 16, device="cuda"), [3, 5])
