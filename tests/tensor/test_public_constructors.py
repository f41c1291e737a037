"""Tensors and storages constructed from their parts, with the keywords on the original's API page."""

import copy
import pickle

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe

E4M3, E2M1 = te.DType.kFloat8E4M3, te.DType.kFloat4E2M1


def values(device, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(device)


def parts(device, shape=(32, 64)):
    x = values(device, *shape)
    rows = te.MXFP8Quantizer(E4M3, columnwise=False)(x)
    return x, rows, te.NVFP4Quantizer(E2M1, rowwise=False)(x)


SETTINGS = {"shape": (32, 64), "dtype": torch.bfloat16, "requires_grad": True, "device": None}


def test_a_hybrid_tensor_of_two_parts_reads_each_in_its_direction(device):
    _, rows, columns = parts(device)
    tensor = te.HybridQuantizedTensor(
        **SETTINGS, rowwise_storage=rows, columnwise_storage=columns, quantizer=None
    )
    assert (tensor.shape, tensor.dtype, tensor.requires_grad) == ((32, 64), torch.bfloat16, True)
    assert tensor.get_usages() == {"rowwise": True, "columnwise": True}
    assert torch.equal(tensor.dequantize(), rows.dequantize(dtype=torch.bfloat16))
    assert torch.equal(tensor.columnwise_storage.dequantize(), columns.dequantize())
    for twin in (copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert torch.equal(twin.dequantize(), tensor.dequantize()) and twin.dtype == tensor.dtype


def test_a_hybrid_storage_presents_the_dtype_of_its_first_part_or_fake_dtype(device):
    _, rows, columns = parts(device)
    both = {"rowwise_storage": rows.as_storage(), "columnwise_storage": columns.as_storage()}
    assert te.HybridQuantizedTensorStorage(**both, quantizer=None).dtype == torch.float32
    tensor = te.HybridQuantizedTensorStorage(**both, quantizer=None, fake_dtype=torch.bfloat16)
    assert tensor.dequantize().dtype == torch.bfloat16
    tensors, empty = tensor.prepare_for_saving()
    assert empty.restore_from_saved(tensors) == [] and torch.equal(
        tensor.dequantize(), rows.dequantize(dtype=torch.bfloat16)
    )


def test_one_part_alone_is_enough(device):
    _, _, columns = parts(device)
    tensor = te.HybridQuantizedTensorStorage(
        rowwise_storage=None, columnwise_storage=columns, quantizer=None
    )
    assert tensor.get_usages() == {"rowwise": False, "columnwise": True}
    assert torch.equal(tensor.dequantize(), columns.dequantize())


def hybrid(**kwargs):
    return te.HybridQuantizedTensorStorage(quantizer=None, **kwargs)


def test_parts_of_no_tensor_are_rejected(device):
    x, rows, columns = parts(device)
    _, _, longer = parts(device, (64, 64))
    full = hybrid(rowwise_storage=rows, columnwise_storage=columns)
    with pytest.raises(ValueError, match="holds no data; give rowwise_storage"):
        hybrid()
    with pytest.raises(
        TypeError, match=r"rowwise_storage is a Tensor; .*IdentityTensorStorage\(hp_data"
    ):
        hybrid(rowwise_storage=x)
    with pytest.raises(
        ValueError, match=r"rowwise_storage has no rowwise data; .*set_usage\(rowwise=True\)"
    ):
        hybrid(rowwise_storage=columns)
    with pytest.raises(
        ValueError, match=r"columnwise_storage is \(64, 64\) on .*, rowwise_storage \(32, 64\)"
    ):
        hybrid(rowwise_storage=rows, columnwise_storage=longer)
    with pytest.raises(TypeError, match="a part of one format holds 6 at most"):
        hybrid(rowwise_storage=full)
    with pytest.raises(TypeError, match="rowwise_storage is a Nameless of a custom quantizer"):
        hybrid(rowwise_storage=type("Nameless", (te.QuantizedTensorStorage,), {})())
    with pytest.raises(TypeError, match="has no 'rowwise'; give rowwise_storage"):
        hybrid(rowwise=rows)
    with pytest.raises(ValueError, match="are one setting; give one of them"):
        hybrid(rowwise_storage=rows, fake_dtype=torch.bfloat16, dtype=torch.float32)
    with pytest.raises(TypeError, match=r"fake_dtype=torch\.int8 is not a floating-point dtype"):
        hybrid(rowwise_storage=rows, fake_dtype=torch.int8)


def test_an_identity_tensor_holds_hp_data(device):
    x = values(device, 32, 64)
    tensor = te.IdentityTensor(**SETTINGS, hp_data=x, quantizer=None)
    assert (tensor.shape, tensor.dtype, tensor.requires_grad) == ((32, 64), torch.bfloat16, True)
    assert torch.equal(tensor.dequantize(), x.bfloat16())
    assert torch.equal(pickle.loads(pickle.dumps(tensor)).dequantize(), x.bfloat16())
    storage = te.IdentityTensorStorage(hp_data=x, fake_dtype=torch.float16, quantizer=None)
    assert (
        storage.dtype == torch.float16
        and te.IdentityTensorStorage(hp_data=x).dtype == torch.float32
    )
    rows, columns = storage.get_data_tensors()
    assert rows is x and columns is x and storage.get_data_tensors(columnwise_data=False) is x
    with pytest.raises(TypeError, match=r"hp_data is torch\.int64; give floating-point values"):
        te.IdentityTensorStorage(hp_data=torch.zeros(2, dtype=torch.int64))


def test_an_identity_quantizer_converts_to_its_dtype(device):
    x = values(device, 32, 64).requires_grad_()
    quantizer = te.IdentityQuantizer(dtype=torch.bfloat16)
    result = quantizer(x)
    result.float().sum().backward()
    assert (
        x.grad is not None
        and result.dtype == torch.bfloat16
        and torch.equal(x.grad, torch.ones_like(x))
    )
    assert torch.equal(result.dequantize(), x.detach().bfloat16())
    empty = quantizer.make_empty((32, 64), device=device)
    quantizer.update_quantized(x.detach(), empty)
    assert empty.dtype == torch.bfloat16 and torch.equal(empty.dequantize(), x.detach().bfloat16())
    assert quantizer != te.IdentityQuantizer() and quantizer == te.IdentityQuantizer(
        dtype=torch.bfloat16
    )
    with pytest.raises(TypeError, match=r"dtype=torch\.int8 is not a floating-point dtype"):
        te.IdentityQuantizer(dtype=torch.int8)


def test_a_layer_multiplies_the_values_of_identity_quantizers(device):
    x = values(device, 32, 64).requires_grad_()
    layer = te.Linear(64, 32, bias=False, device=device)
    with te.autocast(
        recipe=CustomRecipe(qfactory=lambda role: te.IdentityQuantizer(dtype=torch.bfloat16))
    ):
        y = layer(x)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    x16, w16 = x.detach().bfloat16().float(), layer.weight.detach().bfloat16().float()
    ones = torch.ones(32, 32, device=device)
    assert y.dtype == x.grad.dtype == torch.float32
    # The operands are exact in float32, so only the products' own rounding to 16 bits is left.
    torch.testing.assert_close(y, x16 @ w16.T, rtol=2**-8, atol=2**-8)
    torch.testing.assert_close(x.grad, ones @ w16, rtol=2**-8, atol=2**-8)
    torch.testing.assert_close(layer.weight.grad, ones @ x16, rtol=2**-8, atol=2**-8)


def float8(x, **changed):
    result = te.Float8CurrentScalingQuantizer(E4M3, columnwise=False)(x)
    payload = {"data": result._data, "fp8_scale_inv": result._scale_inv, "fp8_dtype": E4M3}
    settings = {"shape": tuple(x.shape), "dtype": torch.bfloat16}
    return te.Float8Tensor(**(settings | payload | changed))


def test_a_shape_or_dtype_that_differs_from_the_payload_is_rejected(device):
    x = values(device, 32, 64)
    assert float8(x).shape == float8(x, shape=None).shape == (32, 64)
    assert float8(x, fp8_dtype=torch.float8_e4m3fn)._fp8_dtype is E4M3
    with pytest.raises(
        ValueError, match=r"shape=\(3, 4\) is of 12 values, the payload of \(32, 64\)"
    ):
        float8(x, shape=(3, 4))
    with pytest.raises(TypeError, match="dtype='bf16' is not a floating-point dtype"):
        float8(x, dtype="bf16")
    with pytest.raises(
        ValueError, match="'e4m3' is not a quantized element; choose from kFloat8E4M3"
    ):
        float8(x, fp8_dtype="e4m3")


def test_settings_of_four_over_six_accept_the_default_values():
    argument = te.NVFP4Quantizer(fp4_dtype=E2M1, nvfp4_e4m3_max=448, nvfp4_4over6_err_mode="MAE")
    assert argument == te.NVFP4Quantizer(E2M1)
    for changed in ({"nvfp4_e4m3_max": 256}, {"nvfp4_4over6_err_mode": "MSE"}):
        assert te.NVFP4Quantizer(E2M1, **changed) != argument
    for name, wrong in (("nvfp4_e4m3_max", 384), ("nvfp4_4over6_err_mode", "MAX")):
        with pytest.raises(ValueError, match=f"{name}={wrong!r}; choose"):
            te.NVFP4Quantizer(E2M1, **{name: wrong})


# Every class's parts, in the page's order.
BLOCKS = "rowwise_data rowwise_scale_inv columnwise_data columnwise_scale_inv"
PARTS = {
    "Float8Tensor": "data fp8_scale_inv fp8_dtype data_transpose quantizer",
    "MXFP8Tensor": f"{BLOCKS} fp8_dtype quantizer",
    "Float8BlockwiseQTensor": f"{BLOCKS} fp8_dtype quantizer is_2D_scaled",
    "NVFP4Tensor": f"{BLOCKS} amax_rowwise amax_columnwise fp4_dtype quantizer",
}
QUANTIZERS = {
    "Float8Tensor": lambda device: te.Float8CurrentScalingQuantizer(E4M3, device),
    "MXFP8Tensor": lambda device: te.MXFP8Quantizer(E4M3),
    "Float8BlockwiseQTensor": lambda device: te.Float8BlockQuantizer(
        E4M3, rowwise=True, columnwise=True
    ),
    "NVFP4Tensor": lambda device: te.NVFP4Quantizer(E2M1),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_make_the_tensor_and_the_storage_that_they_are_of(device, name):
    full = QUANTIZERS[name](device)(values(device, 128, 128))
    recognized = full.get_metadata()
    options = {keyword: recognized[keyword] for keyword in PARTS[name].split()}
    result = getattr(te, name)(shape=full.shape, dtype=full.dtype, requires_grad=False, **options)
    assert (
        torch.equal(result.dequantize(), full.dequantize())
        and result.get_usages() == full.get_usages()
    )
    storage = getattr(te, f"{name}Storage")(*options.values())
    assert torch.equal(storage.dequantize(), full.dequantize())


@pytest.mark.parametrize("name", PARTS)
def test_parts_by_place_are_rejected_by_their_keywords(device, name):
    codes = torch.zeros(128, 128, dtype=torch.uint8, device=device)
    first = PARTS[name].split()[0]
    for args in (
        (codes, codes),
        (codes, codes, None, None, E4M3, None),
        ((128, 128), torch.float32, codes),
    ):
        with pytest.raises(TypeError, match=f"{name} takes shape and dtype by place .*{first}="):
            getattr(te, name)(*args)


def test_parts_of_two_formats_by_place_are_rejected_by_their_keywords(device):
    _, rows, columns = parts(device)
    with pytest.raises(
        TypeError, match=r"by keyword: rowwise_storage=\.\., columnwise_storage=\.\., quantizer="
    ):
        te.HybridQuantizedTensor((32, 64), torch.float32, rows, columns, None)


def test_the_abstract_tensor_says_that_it_has_no_payload():
    with pytest.raises(TypeError, match="QuantizedTensor names no STORAGE"):
        te.QuantizedTensor((2, 2), torch.float32, requires_grad=False, device=None)


def test_objects_and_saved_tensors_in_the_wrong_order_are_rejected(device):
    storage = te.MXFP8Quantizer(E4M3)(values(device, 32, 64)).as_storage()
    tensors, objects = te.prepare_for_saving(storage, torch.ones(2, device=device))
    with pytest.raises(
        TypeError, match="tensors holds a Tensor; give the objects that prepare_for_saving"
    ):
        te.restore_from_saved(tensors, objects)  # pyright: ignore[reportArgumentType]
    restored, ones = te.restore_from_saved(objects, tensors)
    assert restored is storage and ones is tensors[-1]
