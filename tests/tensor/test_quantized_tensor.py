"""Quantized tensors under torch operations: codes move where they can, values are computed where they cannot."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.tensor.quantizer_cases import (
    DETERMINISTIC,
    INDEPENDENT,
    NAMES,
    QUANTIZED,
    TRANSPOSABLE,
    create_quantizer,
    payload,
    same_payload,
    values,
)
from transformer_engine.pytorch.tensor import (
    COLUMNWISE,
    ROWWISE,
    Float8Tensor,
    IdentityTensor,
    MXFP8Tensor,
    QuantizedTensor,
    get_storage,
)
from transformer_engine.pytorch.tensor.cut_views import CutView


def quantized(name, device, *shape):
    return create_quantizer(name, device)(values(device, *shape))


def plain_values(q):
    return q.dequantize().clone()  # identity's are the payload itself


@pytest.mark.parametrize("name", NAMES)
def test_arithmetic_uses_the_dequantized_values(name, device):
    q = quantized(name, device, 32, 64)
    x = q.dequantize()
    for result, expected in (
        (q + 1, x + 1),
        (q @ x.t(), x @ x.t()),
        (torch.nn.functional.linear(x, q), torch.nn.functional.linear(x, x)),
        (q.t(), x.t()),
        (q.transpose(0, 1), x.transpose(0, 1)),
        (q.sum(), x.sum()),
        (torch.cat([q, q]), torch.cat([x, x])),
        (q[3], x[3]),
        (q[:, 5:9], x[:, 5:9]),
        (q.view(-1), x.view(-1)),
        (q.reshape(64, 32), x.reshape(64, 32)),
    ):
        assert torch.equal(torch.as_tensor(result.dequantize()), expected)
    assert torch.equal(q, x) and torch.equal(x, q)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_an_operation_in_place_quantizes_its_result(name, device):
    q = quantized(name, device, 32, 64)
    x = plain_values(q)
    expected = create_quantizer(name, device)(x * 3)
    assert q.mul_(3) is q
    assert same_payload(q, expected)
    target = torch.zeros(32, 64, dtype=q.dtype, device=device)
    assert target.add_(q) is target and torch.equal(target, q.dequantize())
    torch.add(x, 1, out=q)
    assert same_payload(q, create_quantizer(name, device)(x + 1))
    torch._foreach_mul_([q], 2.0)
    assert torch.equal(
        q.dequantize(),
        create_quantizer(name, device)(create_quantizer(name, device)(x + 1) * 2).dequantize(),
    )


@pytest.mark.parametrize("name", NAMES)
def test_detach_and_view_share_codes_and_clone_copies_them(name, device):
    q = quantized(name, device, 2, 32, 64)
    pointers = {field: part.data_ptr() for field, part in payload(q).items()}
    for alias in (q.detach(), q.data, q.view(64, 64), q.expand_as(q), q.contiguous()):
        assert type(alias) is type(q)
        assert {field: part.data_ptr() for field, part in payload(alias).items()} == pointers
    twin = q.clone()
    assert same_payload(twin, q) and twin._quantizer is q._quantizer
    assert not set(pointers.values()) & {part.data_ptr() for part in payload(twin).values()}


@pytest.mark.parametrize("name", NAMES)
def test_a_view_keeps_both_directions_when_it_keeps_the_last_dimension(name, device):
    q = quantized(name, device, 2, 32, 64)
    flat = q.view(64, 64)
    assert flat.get_usages() == q.get_usages()
    for axis in (ROWWISE, COLUMNWISE):
        assert torch.equal(flat.contract(axis).codes.float(), q.contract(axis).codes.float())
    assert torch.equal(q.view(-1, 4, 64).dequantize(), q.dequantize().view(16, 4, 64))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("made_inside", [False, True])
def test_views_may_be_taken_in_inference_mode(name, made_inside, device):
    with torch.inference_mode(made_inside):
        q = quantized(name, device, 64, 64)
    with torch.inference_mode():
        views = (
            q.detach(),
            q.view(-1),
            q.view(2, 32, 64),
            q[:32],
            q[3:5],
            q.t(),
            *torch.split(q, 32),
        )
        results = [
            view.dequantize() if isinstance(view, QuantizedTensor) else view for view in views
        ]
        x = q.dequantize()
        expected = (x, x.view(-1), x.view(2, 32, 64), x[:32], x[3:5], x.t(), x[:32], x[32:])
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    # A part without separate codes is a copy with a version counter, which inference tensors do not have.
    for view in views:
        assert view.is_inference() == (made_inside and not isinstance(view, CutView))


def test_one_scale_survives_any_view(device):
    q = quantized("current", device, 32, 64)
    flat = q.view(-1)
    assert isinstance(flat, Float8Tensor)
    assert flat.get_usages() == {"rowwise": True, "columnwise": False}
    assert torch.equal(flat.dequantize(), q.dequantize().view(-1))
    q.update_usage(rowwise_usage=False)
    assert not isinstance(q.view(-1), QuantizedTensor)


@pytest.mark.parametrize("name", NAMES)
def test_conversions_by_method_dequantize_and_to_keeps_the_codes(name, device):
    q = quantized(name, device, 32, 64)
    for plain, dtype in (
        (q.float(), torch.float32),
        (q.half(), torch.float16),
        (q.bfloat16(), torch.bfloat16),
    ):
        assert type(plain) is torch.Tensor and plain.dtype == dtype
        assert torch.equal(plain.to(device), q.dequantize(dtype=dtype))
    half = q.to(torch.float16)
    assert (
        type(half) is type(q)
        and half.dtype == torch.float16
        and half.dequantize().dtype == torch.float16
    )
    if name != "identity":
        assert same_payload(half, q)
    assert type(q.to(torch.int32)) is torch.Tensor


@pytest.mark.parametrize("name", NAMES)
def test_moved_tensors_stay_quantized_and_dequantize_where_they_are(name, device):
    q = quantized(name, device, 32, 64)
    q.partition_dim = 1
    remote = [q.cpu(), q.to("cpu", copy=True), q.to(device="cpu", dtype=torch.float16).to(q.dtype)]
    if device.type == "cuda":
        remote += [q.cpu().cuda(), q.cpu().to(device)]
    for moved in remote:
        assert type(moved) is type(q) and moved.dtype == q.dtype and moved.partition_dim == 1
        assert moved.device == next(iter(payload(moved).values())).device
        assert torch.equal(moved.dequantize().to(device), q.dequantize())
    assert q.cpu().device == torch.device("cpu")
    parameter = torch.nn.Parameter(q)
    parameter.cpu().dequantize().sum().backward()
    assert torch.equal(parameter.grad, torch.ones_like(parameter.grad))


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_copy_quantizes_dequantizes_or_moves_bytes(name, device):
    quantizer = create_quantizer(name, device)
    x = values(device, 32, 64)
    q = quantizer(x)
    target = quantizer.make_empty((32, 64), dtype=x.dtype, device=device)
    assert target.copy_(q) is target and same_payload(target, q)
    target.copy_(x * 2)
    assert same_payload(target, quantizer(x * 2))
    plain = torch.empty_like(x)
    assert torch.equal(plain.copy_(q), q.dequantize())
    other = create_quantizer("mxfp8_2d", device)(x)
    target.copy_(other)
    assert same_payload(target, quantizer(other.dequantize()))
    target.copy_(x[:1])
    assert same_payload(target, quantizer(x[:1].expand(32, 64)))


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_quantize_in_place_writes_the_directions_there_are(name, device):
    quantizer = create_quantizer(name, device)
    x = values(device, 32, 64)
    q = create_quantizer(name, device, rowwise=True, columnwise=False)(x)
    expected = create_quantizer(name, device, rowwise=True, columnwise=False)(x * 2)
    assert q.quantize_(x * 2) is q
    assert same_payload(q, expected)
    q.quantize_(quantizer(x))
    storage = create_quantizer(name, device).encode(x, True, True)
    assert storage.quantize_(x * 2) is storage


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_setting_data_adopts_a_payload_or_quantizes(name, device):
    quantizer = create_quantizer(name, device)
    x = values(device, 32, 64)
    q = quantizer(x)
    other = quantizer(x * 2)
    q.data = other
    assert payload(q)[next(iter(payload(q)))] is payload(other)[next(iter(payload(q)))]
    q.data = x
    assert same_payload(q, quantizer(x))
    other_format = quantized("current" if name.startswith("mxfp8") else "mxfp8", device, 32, 64)
    q.data = other_format
    assert same_payload(q, quantizer(other_format.dequantize()))
    q.data = quantizer(values(device, 64, 32, dtype=torch.float32))
    assert q.shape == (64, 32) and q.dtype == torch.float32 and q.dequantize().shape == (64, 32)


@pytest.mark.parametrize("name", DETERMINISTIC)
@pytest.mark.parametrize("shape", [(64, 32), (2, 32, 64), (32, 128)])
@pytest.mark.parametrize("quantizes", [False, True])
def test_data_of_another_shape_changes_the_parameter_and_its_gradient(
    name, shape, quantizes, device
):
    quantizer = create_quantizer(name, device)
    parameter = torch.nn.Parameter(quantizer(values(device, 32, 64)))
    parameter.partition_dim = 0
    parameter.dequantize().sum().backward()
    parameter.grad = None
    x = values(device, *shape)
    parameter.data = x if quantizes else quantizer(x)
    assert (
        same_payload(parameter, quantizer(x)) and parameter.shape == shape == parameter.data.shape
    )
    assert parameter.requires_grad and parameter.partition_dim == 0
    parameter.dequantize().square().sum().backward()
    torch.testing.assert_close(parameter.grad, 2 * parameter.dequantize().detach())


@pytest.mark.parametrize("name", TRANSPOSABLE)
def test_a_direction_that_follows_from_the_other_is_made(name, device):
    x = values(device, 2, 32, 64)
    both = create_quantizer(name, device)(x)
    rows = create_quantizer(name, device, rowwise=True, columnwise=False)(x)
    rows.update_usage(columnwise_usage=True)
    assert same_payload(rows, both)
    columns = create_quantizer(name, device, rowwise=False, columnwise=True)(x)
    columns.update_usage(rowwise_usage=True, columnwise_usage=False)
    assert same_payload(columns, create_quantizer(name, device, rowwise=True, columnwise=False)(x))


@pytest.mark.parametrize("name", INDEPENDENT)
def test_a_direction_with_its_own_scales_cannot_be_made(name, device):
    rows = create_quantizer(name, device, rowwise=True, columnwise=False)(values(device, 32, 64))
    with pytest.raises(RuntimeError, match=r"set_usage\(columnwise=True\)"):
        rows.update_usage(columnwise_usage=True)
    columns = create_quantizer(name, device, rowwise=False, columnwise=True)(values(device, 32, 64))
    with pytest.raises(RuntimeError, match=r"set_usage\(rowwise=True\)"):
        columns.update_usage(rowwise_usage=True)


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_last_direction_cannot_be_dropped(name, device):
    q = quantized(name, device, 32, 64)
    before = payload(q)
    with pytest.raises(RuntimeError, match="keep at least one"):
        q.update_usage(rowwise_usage=False, columnwise_usage=False)
    assert payload(q).keys() == before.keys()
    q.update_usage(rowwise_usage=False)
    assert q.get_usages() == {"rowwise": False, "columnwise": True}
    assert torch.equal(q + 0, q.dequantize())


@pytest.mark.parametrize("name", QUANTIZED)
def test_drop_leaves_the_original_alone(name, device):
    q = quantized(name, device, 32, 64)
    dropped = get_storage(q).drop(rowwise=True)
    assert dropped.get_usages() == {"rowwise": False, "columnwise": True}
    assert q.get_usages() == {"rowwise": True, "columnwise": True}


def test_the_transpose_of_float8_can_be_declared_invalid(device):
    q = quantized("current", device, 32, 64)
    assert not q._transpose_invalid
    q._transpose_invalid = True
    assert q._transpose_invalid and q._transpose is None
    q._create_transpose()
    q._transpose_invalid = False
    assert torch.equal(q._transpose, q._data.t())


@pytest.mark.parametrize("name", NAMES)
def test_new_tensors_like_a_quantized_one_are_plain(name, device):
    q = quantized(name, device, 32, 64)
    for new in (
        torch.zeros_like(q, memory_format=torch.preserve_format),
        torch.empty_like(q),
        torch.ones_like(q),
        torch.full_like(q, 2),
        torch.rand_like(q),
        q.new_empty(32, 64),
        q.new_ones(32, 64),
        q.new_full((32, 64), 1.0),
    ):
        assert type(new) is torch.Tensor
        assert (new.shape, new.dtype, new.device) == (q.shape, q.dtype, q.device)
        assert new.is_contiguous()
    assert torch.zeros_like(q, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_new_zeros_is_quantized_where_the_shape_allows(name, device):
    q = quantized(name, device, 32, 64)
    zeros = q.new_zeros(64, 32)
    assert type(zeros) is type(q) and zeros.get_usages() == q.get_usages()
    assert torch.equal(zeros.dequantize(), torch.zeros(64, 32, dtype=q.dtype, device=device))
    assert type(q.new_zeros(4, dtype=torch.int32)) is torch.Tensor
    if name.startswith(("mxfp8", "nvfp4")):
        assert type(q.new_zeros(5)) is torch.Tensor


@pytest.mark.parametrize("name", NAMES)
def test_the_tensor_wrapper_has_an_empty_storage(name, device):
    q = quantized(name, device, 32, 64)
    assert q.untyped_storage().nbytes() == 0
    assert q.stride() == (64, 1) and q.is_contiguous()
    with pytest.raises(ValueError, match="dequantize it first"):
        q.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", NAMES)
def test_make_like_shares_parts_that_are_not_given(name, device):
    q = quantized(name, device, 32, 64)
    twin = type(q).make_like(q, dtype=torch.float32, requires_grad=True)
    assert twin.dtype == torch.float32 and twin.requires_grad and same_payload(twin, q)
    assert (
        type(q)(
            q.shape, q.dtype, **{k: v for k, v in q.get_metadata().items() if k != "dtype"}
        ).shape
        == q.shape
    )


def test_make_like_takes_other_codes(device):
    q = quantized("current", device, 32, 64)
    twin = Float8Tensor.make_like(q, data=q._data.clone())
    assert twin._data is not q._data and twin._transpose is q._transpose


def test_constructors_take_the_documented_keywords(device):
    q = quantized("current", device, 32, 64)
    built = Float8Tensor(
        shape=(32, 64),
        dtype=torch.float32,
        data=q._data,
        fp8_scale_inv=q._scale_inv,
        fp8_dtype=q._fp8_dtype,
        requires_grad=True,
        data_transpose=None,
        quantizer=None,
    )
    assert built.requires_grad and torch.equal(
        built.dequantize(), q.dequantize(dtype=torch.float32)
    )
    m = quantized("mxfp8", device, 32, 64)
    built = MXFP8Tensor(
        rowwise_data=m._rowwise_data,
        rowwise_scale_inv=m._rowwise_scale_inv,
        columnwise_data=None,
        columnwise_scale_inv=None,
        fp8_dtype=m._fp8_dtype,
        quantizer=None,
    )
    assert built.shape == (32, 64) and built.dtype == torch.float32


@pytest.mark.parametrize("name", [name for name in DETERMINISTIC if name != "hybrid"])
def test_a_tensor_without_quantizer_is_written_in_its_own_format(name, device):
    q = quantized(name, device, 32, 64)
    q._quantizer = None
    saved = {field: part.shape for field, part in payload(q).items()}
    q.mul_(2)
    assert {field: part.shape for field, part in payload(q).items()} == saved
    bare = get_storage(q)
    if name != "identity":
        with pytest.raises(RuntimeError, match="has no quantizer"):
            bare.quantize_(values(device, 32, 64))


@pytest.mark.parametrize("name", NAMES)
def test_deep_copies_are_independent(name, device):
    q = quantized(name, device, 32, 64)
    q.partition_dim = 1
    q.tags = ["a"]
    pair = copy.deepcopy([q, q])
    twin = pair[0]
    assert pair[1] is twin and same_payload(twin, q)
    assert twin.partition_dim == 1 and twin.tags == ["a"] and twin.tags is not q.tags
    assert not {part.data_ptr() for part in payload(q).values()} & {
        part.data_ptr() for part in payload(twin).values()
    }


def test_repr_names_the_class_and_the_directions(device):
    q = quantized("mxfp8", device, 32, 64)
    assert repr(q).startswith("MXFP8Tensor(usages=[rowwise, columnwise], dtype=torch.bfloat16")


def test_an_identity_tensor_equals_its_values(device):
    x = values(device, 4, 8)
    q = create_quantizer("identity", device)(x)
    assert isinstance(q, IdentityTensor) and torch.equal(q.dequantize(), x)
    q._quantizer = None
    assert torch.equal(q.mul_(1), x)


def test_data_tensors_are_listed_by_direction(device):
    q = quantized("mxfp8", device, 32, 64)
    rowwise, columnwise = q.get_data_tensors()
    assert rowwise is q._rowwise_data and columnwise is q._columnwise_data
    assert q.get_data_tensors(columnwise_data=False) is rowwise


def test_clear_frees_the_payload(device):
    q = quantized("mxfp8", device, 32, 64)
    q.clear()
    assert all(part.numel() == 0 for part in payload(q).values())
