"""Quantizers: codes and scales equal the primitives' results, in the original's public layouts."""

from __future__ import annotations

import math

import pytest
import torch

from tests.tensor.quantizer_cases import (
    DETERMINISTIC,
    E4M3,
    E5M2,
    NAMES,
    QUANTIZED,
    State,
    create_quantizer,
    payload,
    same_payload,
    values,
)
from transformer_engine.common import recipe as recipes
from transformer_engine.common.formats import E4M3 as ELEMENT_E4M3
from transformer_engine.common.formats import FLOAT8
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.primitives.quantize import QuantizeSpec, dequantize, quantize
from transformer_engine.pytorch.tensor import (
    COLUMNWISE,
    ROWWISE,
    Calibrating,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    IdentityQuantizer,
    IdentityTensorStorage,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    QuantizedTensorStorage,
)


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_keeps_shape_and_dtype_and_approximates_its_values(name, device):
    x = values(device, 2, 32, 64)
    q = create_quantizer(name, device)(x)
    assert isinstance(q, QuantizedTensor)
    assert (q.shape, q.dtype, q.device.type) == (x.shape, x.dtype, x.device.type)
    error = (q.dequantize() - x).float().norm() / x.float().norm()
    assert error < (0.2 if name.startswith("nvfp4") else 0.06)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("axis", [ROWWISE, COLUMNWISE])
def test_dequantize_is_the_primitive_on_the_operand(name, axis, device):
    x = values(device, 3, 32, 64)
    storage = create_quantizer(name, device).encode(x, axis == ROWWISE, axis == COLUMNWISE)
    operand = storage.contract(axis)
    assert operand.dtype == x.dtype
    assert (operand.rows, operand.depth) == ((96, 64) if axis == ROWWISE else (64, 96))
    matrix = dequantize(operand)
    if axis == COLUMNWISE and name != "nvfp4_rht":
        torch.testing.assert_close(
            storage.dequantize(), matrix.t().reshape(x.shape), rtol=0, atol=0
        )
    if axis == ROWWISE:
        torch.testing.assert_close(storage.dequantize(), matrix.view(x.shape), rtol=0, atol=0)


def test_the_hadamard_transform_is_undone_by_dequantize(device):
    x = values(device, 64, 32)
    q = NVFP4Quantizer(with_rht=True, with_post_rht_amax=True).encode(x, False, True)
    error = (q.dequantize() - x).float().norm() / x.float().norm()
    assert error < 0.2
    unsigned = NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, with_random_sign_mask=False)
    error = (unsigned.encode(x, False, True).dequantize() - x).float().norm() / x.float().norm()
    assert error < 0.2


@pytest.mark.parametrize("name", NAMES)
def test_only_the_requested_directions_are_quantized(name, device):
    x = values(device, 32, 64)
    if name == "identity":
        return
    for rowwise, columnwise in ((True, False), (False, True), (True, True)):
        q = create_quantizer(name, device, rowwise, columnwise)(x)
        assert q.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
        assert q.shape == x.shape
    only_rows = create_quantizer(name, device, rowwise=True, columnwise=False)(x)
    with pytest.raises(RuntimeError, match=r"has no column-wise data.*columnwise"):
        only_rows.contract(COLUMNWISE)
    only_columns = create_quantizer(name, device, rowwise=False, columnwise=True)(x)
    with pytest.raises(RuntimeError, match=r"has no row-wise data.*rowwise"):
        only_columns.contract(ROWWISE)


def shapes(tensor):
    return {name: tuple(part.shape) for name, part in payload(tensor).items()}


def test_float8_keeps_codes_and_their_transpose(device):
    q = create_quantizer("current", device)(values(device, 3, 16, 48))
    assert shapes(q) == {"_data": (3, 16, 48), "_transpose": (48, 3, 16), "_scale_inv": (1,)}
    assert q._data.dtype == q._transpose.dtype == torch.uint8
    assert torch.equal(q._transpose.view(48, 48), q._data.view(48, 48).t())


def test_mxfp8_scales_are_padded_with_zeros(device):
    q = create_quantizer("mxfp8", device)(values(device, 2, 32, 96))
    assert shapes(q) == {
        "_rowwise_data": (2, 32, 96),
        "_rowwise_scale_inv": (128, 4),
        "_columnwise_data": (2, 32, 96),
        "_columnwise_scale_inv": (4, 128),
    }
    assert not q._rowwise_scale_inv[64:].any() and not q._rowwise_scale_inv[:, 3:].any()
    assert not q._columnwise_scale_inv[2:].any() and not q._columnwise_scale_inv[:, 96:].any()
    assert q.contract(COLUMNWISE).codes.is_contiguous()


def test_blocks_of_one_dimension_store_scales_by_column_of_blocks(device):
    q = create_quantizer("block_1d", device)(values(device, 3, 54, 160))
    assert shapes(q) == {
        "_rowwise_data": (3, 54, 160),
        "_rowwise_scale_inv": (2, 164),
        "_columnwise_data": (160, 3, 54),
        "_columnwise_scale_inv": (2, 160),
    }
    assert not q._rowwise_scale_inv[:, 162:].any()


def test_blocks_of_two_dimensions_pad_their_scales_to_four(device):
    q = create_quantizer("block_2d", device)(values(device, 300, 160))
    assert shapes(q) == {
        "_rowwise_data": (300, 160),
        "_rowwise_scale_inv": (3, 4),
        "_columnwise_data": (160, 300),
        "_columnwise_scale_inv": (2, 4),
    }
    assert torch.equal(q._columnwise_data, q._rowwise_data.t())
    assert torch.equal(q._columnwise_scale_inv[:, :3], q._rowwise_scale_inv[:, :2].t())


def test_nvfp4_packs_two_codes_a_byte(device):
    q = create_quantizer("nvfp4", device)(values(device, 4, 16, 48))
    assert shapes(q) == {
        "_rowwise_data": (4, 16, 24),
        "_rowwise_scale_inv": (128, 4),
        "_columnwise_data": (48, 4, 8),
        "_columnwise_scale_inv": (128, 4),
        "_amax_rowwise": (1,),
        "_amax_columnwise": (1,),
    }
    odd = create_quantizer("nvfp4", device)(values(device, 16, 3, 48))
    assert odd._columnwise_data.shape == (48, 24)
    assert odd.dequantize().shape == (16, 3, 48)


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_are_quantized_to_no_rows(name, device):
    x = values(device, 4, 32)[:0]
    q = create_quantizer(name, device)(x)
    assert q.shape == (0, 32)
    assert q.dequantize().shape == (0, 32)
    assert q.contract(COLUMNWISE).codes.shape[0] == 32


def test_delayed_scaling_multiplies_by_its_scale_and_accumulates_the_maximum(device):
    amax = torch.zeros(1, device=device)
    quantizer = Float8Quantizer(torch.full((1,), 4.0, device=device), amax, torch.float8_e4m3fn)
    x = values(device, 16, 32)
    q = quantizer(x)
    assert q._scale_inv.item() == 0.25
    assert amax.item() == x.abs().max().item()
    expected = quantize(
        x, QuantizeSpec(FLOAT8, ELEMENT_E4M3), multiplier=torch.full((1,), 4.0, device=device)
    ).codes
    assert torch.equal(q._data.view(torch.float8_e4m3fn).float(), expected.float())
    quantizer(x / 2)
    assert amax.item() == x.abs().max().item()


def test_a_slot_of_a_state_is_written_through_the_state(device):
    state = State(device)
    quantizer = Float8Quantizer.from_state(state, 1, E5M2)
    quantizer(torch.full((16, 16), 3.0, device=device))
    assert state.amax_history[0].tolist() == [0.0, 3.0, 0.0]
    state.scale.fill_(8.0)
    assert quantizer.scale.tolist() == [8.0]
    assert quantizer(torch.ones(16, 16, device=device))._scale_inv.item() == 0.125
    assert quantizer.amax.tolist() == [3.0]


def test_calibration_records_and_leaves_the_tensor_alone(device):
    quantizer = create_quantizer("delayed", device)
    x = values(device, 16, 32)
    calibrating = Calibrating(quantizer)
    storage = calibrating.encode(x, True, True)
    assert isinstance(storage, IdentityTensorStorage)
    assert storage.contract(ROWWISE).codes is not None and storage.contract(ROWWISE).format is None
    assert quantizer.amax.item() == x.abs().max().item()
    assert torch.equal(calibrating(x), x)
    assert calibrating.make_empty((4, 4), device=device).shape == (4, 4)
    assert calibrating == Calibrating(quantizer)
    create_quantizer("mxfp8", device).calibrate(x)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_update_quantized_writes_into_the_same_buffers(name, device):
    quantizer = create_quantizer(name, device)
    destination = quantizer.make_empty((32, 64), dtype=torch.bfloat16, device=device)
    assert destination.shape == (32, 64) and destination.dtype == torch.bfloat16
    before = {field: part.data_ptr() for field, part in payload(destination).items()}
    x = values(device, 32, 64)
    assert quantizer.update_quantized(x, destination) is destination
    assert same_payload(destination, quantizer(x))
    assert {field: part.data_ptr() for field, part in payload(destination).items()} == before
    assert quantizer(x * 2, out=destination) is destination
    assert same_payload(destination, quantizer(x * 2))


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_a_set_flag_leaves_the_destination_and_the_statistics(name, device):
    quantizer = create_quantizer(name, device)
    x = values(device, 32, 64)
    q = quantizer(x.clone())  # identity shares its input's memory
    quantizer.update_quantized(x * 3, q, noop_flag=torch.ones(1, device=device))
    assert same_payload(q, quantizer(x))
    if name == "delayed":
        assert quantizer.amax.item() == x.abs().max().item()
    quantizer.update_quantized(x * 3, q, noop_flag=torch.zeros(1, device=device))
    assert same_payload(q, quantizer(x * 3))


@pytest.mark.parametrize("name", NAMES)
def test_internal_quantizers_return_storages(name, device):
    quantizer = create_quantizer(name, device)
    quantizer.internal = True
    x = values(device, 32, 64)
    for q in (quantizer(x), quantizer.make_empty(x.shape, device=device)):
        assert isinstance(q, QuantizedTensorStorage) and not isinstance(q, torch.Tensor)
        assert q.shape == q.size() == x.shape and q.size(1) == 64
        assert q.device.type == device.type and q.is_cuda == (device.type == "cuda")
        assert type(q).__name__ in repr(q)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_passes_through_quantize_and_dequantize(name, device):
    x = values(device, 32, 64).requires_grad_()
    q = create_quantizer(name, device)(x)
    assert q.requires_grad
    q.dequantize(dtype=torch.float32).mul(3).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 3.0))


@pytest.mark.parametrize("name", NAMES)
def test_the_nominal_dtype_can_be_chosen(name, device):
    q = create_quantizer(name, device).quantize(values(device, 32, 64), dtype=torch.float32)
    assert q.dtype == q.dequantize().dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_copies_change_usages_alone(name, device):
    quantizer = create_quantizer(name, device)
    twin = quantizer.copy()
    twin.set_usage(columnwise=False)
    assert quantizer.columnwise_usage and not twin.columnwise_usage
    assert twin.rowwise_usage
    twin.set_usage(rowwise=False, columnwise=True)
    assert not twin.rowwise_usage


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("delayed", "state")])
def test_stateless_quantizers_are_values(name, device):
    first, second = create_quantizer(name, device), create_quantizer(name, device)
    assert first == second and hash(first) == hash(second)
    second.set_usage(columnwise=False)
    assert first != second
    assert first != object()
    assert type(first).__name__ in repr(first)


def test_quantizers_with_state_are_themselves_only(device):
    first = create_quantizer("delayed", device)
    assert first == first
    assert first != first.copy()
    assert len({first, first.copy()}) == 2


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("delayed", recipes.DelayedScaling),
        ("current", recipes.Float8CurrentScaling),
        ("mxfp8", recipes.MXFP8BlockScaling),
        ("block_2d", recipes.Float8BlockScaling),
        ("nvfp4", recipes.NVFP4BlockScaling),
        ("identity", None),
    ],
)
def test_a_quantizer_knows_its_recipe(name, recipe, device):
    assert create_quantizer(name, device)._get_compatible_recipe() is recipe


def test_only_codes_of_one_scale_are_gathered_by_rows_alone(device):
    assert create_quantizer("current", device).supports_only_rowwise_all_gather()
    assert not create_quantizer("mxfp8", device).supports_only_rowwise_all_gather()


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("mxfp8", (32, 40), "last dimension 40 is not a multiple of 32; pad it to 64"),
        ("mxfp8", (2, 24, 64), "leading dimensions 48 is not a multiple of 32; pad it to 64"),
        ("nvfp4", (16, 24), "last dimension 24 is not a multiple of 16; pad it to 32"),
        ("nvfp4", (8, 32), "leading dimensions 8 is not a multiple of 16; pad it to 16"),
        ("mxfp8", (128,), "1 dimensions, blocks need at least 2"),
        ("nvfp4", (), "0 dimensions, blocks need at least 2"),
    ],
)
def test_shapes_that_cut_blocks_are_rejected_with_a_remedy(name, shape, message, device):
    quantizer = create_quantizer(name, device)
    x = torch.zeros(shape, device=device)
    assert not quantizer.is_quantizable(x)
    with pytest.raises(ValueError, match=message):
        quantizer(x)
    with pytest.raises(ValueError, match=message):
        quantizer.make_empty(shape, device=device)


@pytest.mark.parametrize("name", ["block_1d", "block_2d"])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (128,), (300,), (0,)])
@pytest.mark.parametrize("usage", [(True, True), (True, False), (False, True)])
def test_blocks_take_vectors_and_numbers_as_one_row(name, shape, usage, device):
    quantizer = create_quantizer(name, device, *usage)
    x = values(device, 300)[: math.prod(shape)].clone().reshape(shape)
    row = quantizer(x.reshape(1, -1))
    q = quantizer(x)
    assert quantizer.is_quantizable(x) and q.shape == x.shape and q.get_usages() == row.get_usages()
    assert torch.equal(q.dequantize(), row.dequantize().view(shape))
    for actual, reference in zip(payload(q).values(), payload(row).values(), strict=True):
        assert torch.equal(actual.flatten(), reference.flatten())
    for contents in (quantizer.make_empty(shape, dtype=x.dtype, device=device), q.clone()):
        quantizer.update_quantized(2 * x, contents)
        assert torch.equal(contents.dequantize(), quantizer(2 * x).dequantize())
    assert torch.equal(q.detach().view(-1).dequantize(), q.dequantize().view(-1))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_2d", "block_1d", "block_2d", "nvfp4", "nvfp4_2d"])
@pytest.mark.parametrize("shape", [(32, 64), (160, 288), (2, 48, 96)])
def test_shapes_of_codes_and_scales_are_known_before_quantizing(name, shape, device):
    quantizer = create_quantizer(name, device)
    q = quantizer(values(device, *shape))
    assert quantizer.get_usages() == q.get_usages() == {"rowwise": True, "columnwise": True}
    assert quantizer.get_scale_shape(shape, columnwise=False) == q._rowwise_scale_inv.shape
    assert quantizer.get_scale_shape(shape, True) == q._columnwise_scale_inv.shape
    if not name.startswith("mxfp8"):
        columns = quantizer.get_columnwise_shape(shape)
        if name.startswith("nvfp4"):
            assert quantizer.convert_shape_for_fp4(shape) == q._rowwise_data.shape
            columns = quantizer.convert_shape_for_fp4(columns)
        assert columns == q._columnwise_data.shape
    with pytest.raises(TypeError, match="call quantize_"):
        q.copy_from_storage(src=torch.zeros(shape, device=device))


def test_row_wise_codes_do_not_require_whole_blocks_of_rows(device):
    x = values(device, 5, 64)
    quantizer = create_quantizer("mxfp8", device, rowwise=True, columnwise=False)
    assert quantizer.is_quantizable(x)
    assert quantizer(x).dequantize().shape == (5, 64)


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_wrong_destination_is_rejected_before_anything_changes(name, device):
    quantizer = create_quantizer(name, device)
    q = quantizer(values(device, 32, 64))
    before = {field: part.clone() for field, part in payload(q).items()}
    with pytest.raises(ValueError, match=r"\(64, 64\).*\(32, 64\)"):
        quantizer.update_quantized(values(device, 64, 64), q)
    with pytest.raises(TypeError, match=r"torch\.int64"):
        quantizer.update_quantized(torch.zeros(32, 64, dtype=torch.int64, device=device), q)
    other = MXFP8Quantizer(E5M2) if name != "mxfp8" else Float8BlockQuantizer(E4M3)
    with pytest.raises(ValueError, match="same format, shape and usages"):
        other.update_quantized(values(device, 32, 64), q)
    with pytest.raises(TypeError, match="make_empty"):
        quantizer.update_quantized(values(device, 32, 64), torch.zeros(32, 64, device=device))
    assert all(torch.equal(part, before[field]) for field, part in payload(q).items())


def test_meaningless_arguments_are_rejected():
    with pytest.raises(ValueError, match="kFloat8E4M3 or kFloat8E5M2"):
        MXFP8Quantizer(DType.kFloat4E2M1)
    with pytest.raises(ValueError, match="not a quantized element"):
        NVFP4Quantizer(DType.kBFloat16)
    with pytest.raises(ValueError, match="not a quantized element"):
        Float8CurrentScalingQuantizer(torch.float16)
    with pytest.raises(ValueError, match="block_scaling_dim=3"):
        Float8BlockQuantizer(E4M3, block_scaling_dim=3)
    with pytest.raises(ValueError, match="with_post_rht_amax=True"):
        NVFP4Quantizer(with_rht=True)
    with pytest.raises(ValueError, match="choose one"):
        NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, with_2d_quantization=True)
    with pytest.raises(ValueError, match="excludes with_2d_quantization=True"):
        NVFP4Quantizer(row_scaled_nvfp4=True, with_2d_quantization=True)


def test_old_arguments_of_current_scaling_are_ignored_with_a_warning():
    with pytest.warns(DeprecationWarning, match="ignores use_existing_amax"):
        Float8CurrentScalingQuantizer(E4M3, "cpu", use_existing_amax=True)


def test_current_scaling_can_floor_to_powers_of_two_and_to_an_epsilon(device):
    x = torch.full((16, 16), 3.0, device=device)
    floored = Float8CurrentScalingQuantizer(E4M3, device, force_pow_2_scales=True)(x)
    assert floored._scale_inv.item() == 1 / 128
    small = Float8CurrentScalingQuantizer(E4M3, device, amax_epsilon=448.0)(x)
    assert small._scale_inv.item() == 1.0


@pytest.fixture
def doubling_group(monkeypatch):
    """A group in which another rank always has twice the maximum."""
    group_of_two = object()

    def all_reduce(tensor, op=None, group=None):
        assert group is group_of_two and op == torch.distributed.ReduceOp.MAX
        tensor.mul_(2)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return {"with_amax_reduction": True, "amax_reduction_group": group_of_two}


def test_the_maximum_is_reduced_over_the_group(doubling_group, device):
    x = values(device, 32, 32)
    alone = Float8CurrentScalingQuantizer(E4M3, device)(x)
    joint = Float8CurrentScalingQuantizer(E4M3, device, **doubling_group)(x)
    assert joint._scale_inv.item() == 2 * alone._scale_inv.item()
    transformed = {"with_rht": True, "with_post_rht_amax": True}
    alone = NVFP4Quantizer(**transformed)(x)
    joint = NVFP4Quantizer(**transformed, **doubling_group)(x)
    assert joint._amax_rowwise.item() == 2 * alone._amax_rowwise.item()
    assert joint._amax_columnwise.item() == 2 * alone._amax_columnwise.item()
    assert alone._amax_columnwise.item() != alone._amax_rowwise.item()


def test_stochastic_rounding_follows_torchs_generator(device):
    x = values(device, 32, 64)
    quantizer = create_quantizer("nvfp4_rht", device)
    torch.manual_seed(1)
    first = quantizer(x)
    torch.manual_seed(1)
    repeated = quantizer(x)
    other = quantizer(x)
    assert same_payload(first, repeated)
    assert not torch.equal(first._rowwise_data, other._rowwise_data)
    assert not torch.equal(first._columnwise_data, other._columnwise_data)


def test_external_codes_become_tensors(device):
    quantizer = create_quantizer("delayed", device)
    x = values(device, 32, 64)
    result = quantizer(x)
    q = quantizer.create_tensor_from_data(
        result._data, fake_dtype=torch.bfloat16, requires_grad=True
    )
    assert isinstance(q, Float8Tensor) and q.requires_grad
    assert same_payload(q, result)
    assert not isinstance(
        quantizer.create_tensor_from_data(result._data, internal=True), torch.Tensor
    )
    with pytest.raises(TypeError, match="view them as uint8"):
        quantizer.create_tensor_from_data(result._data.int())
    blocks = create_quantizer("mxfp8", device, rowwise=True, columnwise=False)
    result = blocks(x)
    q = blocks.create_tensor_from_data(
        result._rowwise_data, result._rowwise_scale_inv, torch.bfloat16
    )
    assert same_payload(q, result)
    wide = MXFP8Quantizer(DType.kFloat8E5M2, columnwise=False)(x)
    q = blocks.create_tensor_from_data(
        wide._rowwise_data, wide._rowwise_scale_inv, torch.bfloat16, fp8_dtype=DType.kFloat8E5M2
    )
    assert torch.equal(q.dequantize(), wide.dequantize())


@pytest.mark.parametrize("name", NAMES)
def test_a_quantized_input_is_quantized_by_its_values(name, device):
    source = create_quantizer("current", device)(values(device, 32, 64))
    torch.manual_seed(0)
    twice = create_quantizer(name, device)(source)
    torch.manual_seed(0)
    assert same_payload(twice, create_quantizer(name, device)(source.dequantize()))


@pytest.mark.gpu
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_empty_tensors_can_be_pinned(name):
    q = create_quantizer(name, torch.device("cpu")).make_empty(
        (32, 64), device="cpu", pin_memory=True
    )
    assert all(part.is_pinned() for part in payload(q).values())


def test_identity_serves_both_directions(device):
    x = values(device, 2, 16, 8)
    storage = IdentityQuantizer().encode(x, True, False)
    assert storage.contract(ROWWISE).codes.shape == (32, 8)
    assert storage.contract(COLUMNWISE).codes.shape == (8, 32)
    storage.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert torch.equal(storage.dequantize(), x)
    assert torch.equal(storage.drop(rowwise=True).dequantize(), x)


def test_an_assigned_scale_is_used_from_the_next_quantization(device):
    """As with the original's plain attribute: other values of a state no longer reach the quantizer."""
    x = values(device, 64, 32)
    for name in ("delayed", "state"):
        quantizer = create_quantizer(name, device)
        quantizer.scale = torch.full((1,), 8.0, device=device)
        expected = Float8Quantizer(
            torch.full((1,), 8.0, device=device), torch.zeros(1, device=device), quantizer.dtype
        )
        assert torch.equal(quantizer(x)._data, expected(x)._data)
        assert float(quantizer.scale) == 8.0 and torch.equal(quantizer.amax, expected.amax)


def test_an_assigned_maximum_receives_the_next_one(device):
    x = values(device, 64, 32)
    for name in ("delayed", "state", "current"):
        quantizer, recorded = create_quantizer(name, device), torch.zeros(1, device=device)
        quantizer.amax = recorded
        quantizer(x)
        assert float(recorded) == float(x.abs().max())


def test_current_scaling_records_into_an_assigned_scale(device):
    quantizer, scale = create_quantizer("current", device), torch.ones(1, device=device)
    quantizer.scale = scale
    x = values(device, 64, 32)
    quantizer(x)
    assert float(scale) == pytest.approx(448.0 / float(x.abs().max()))


def test_a_scale_of_another_dtype_is_rejected_and_changes_nothing(device):
    quantizer = create_quantizer("delayed", device)
    with pytest.raises(ValueError, match="float32 tensor of one element"):
        quantizer.scale = torch.ones(2, device=device)
    assert float(quantizer.scale) == 4.0
