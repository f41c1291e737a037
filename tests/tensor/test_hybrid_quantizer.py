"""HybridQuantizer: the source of column-wise codes, in tensors and in a layer with three different products."""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe

E4M3, E2M1 = te.DType.kFloat8E4M3, te.DType.kFloat4E2M1


def hybrid(source, rows=None, columns=None, **usage):
    return te.HybridQuantizer(
        rowwise_quantizer=rows or te.MXFP8Quantizer(E4M3),
        columnwise_quantizer=columns or te.NVFP4Quantizer(E2M1),
        columnwise_source=source,
        **usage,
    )


def values(device, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(device, torch.bfloat16)


def column_values(result):
    return result.columnwise_storage.dequantize()


@pytest.mark.parametrize("rowwise", [True, False])
def test_columns_are_of_the_values_that_rows_hold(device, rowwise):
    x = values(device, 64, 64)
    rows = te.MXFP8Quantizer(E4M3, rowwise=True, columnwise=False)(x).dequantize()
    of_x, of_rows = (
        te.NVFP4Quantizer(E2M1, rowwise=False, columnwise=True)(v).dequantize() for v in (x, rows)
    )
    assert not torch.equal(of_x, of_rows)
    assert torch.equal(column_values(hybrid("original", rowwise=rowwise)(x)), of_x)
    result = hybrid("rowwise_dequantized", rowwise=rowwise)(x)
    assert torch.equal(column_values(result), of_rows)
    assert result.get_usages() == {"rowwise": rowwise, "columnwise": True}


def test_high_precision_columns_are_the_rows_values(device):
    x = values(device, 64, 64)
    result = hybrid("rowwise_dequantized", columns=te.IdentityQuantizer())(x)
    assert torch.equal(column_values(result), result.dequantize())
    assert torch.equal(column_values(hybrid("original", columns=te.IdentityQuantizer())(x)), x)


def test_quantizers_with_different_sources_are_unequal():
    rows, columns = te.MXFP8Quantizer(E4M3), te.NVFP4Quantizer(E2M1)
    of_x, of_rows = (
        hybrid(source, rows, columns) for source in ("original", "rowwise_dequantized")
    )
    assert of_x != of_rows and of_x == hybrid("original", rows, columns)
    assert of_rows.copy().columnwise_source == "rowwise_dequantized"


def test_columns_of_rows_need_a_shape_that_rows_take(device):
    narrow = torch.zeros(32, 48, device=device)
    columns = te.IdentityQuantizer()
    assert hybrid("original", columns=columns, rowwise=False).is_quantizable(narrow)
    assert not hybrid("rowwise_dequantized", columns=columns, rowwise=False).is_quantizable(narrow)


def test_wrong_arguments_are_rejected():
    with pytest.raises(ValueError, match="columnwise_source='columns'"):
        hybrid("columns")
    with pytest.raises(TypeError, match="rowwise_quantizer=5 is not a Quantizer"):
        te.HybridQuantizer(rowwise_quantizer=5, columnwise_quantizer=te.IdentityQuantizer())
    with pytest.raises(TypeError, match="columnwise_quantizer=None is not a Quantizer"):
        te.HybridQuantizer(te.IdentityQuantizer(), None)


def test_each_product_of_a_layer_reads_its_format(device):
    """y = mx(x) @ mx(w).T, dx = fp4(dy) @ fp4(mx(w)), dw = dy.T @ x in high precision."""

    def factory(role):
        identity = te.IdentityQuantizer()
        if role.tensor_type == "input":
            return hybrid("original", columns=identity)
        if role.tensor_type == "weight":
            return hybrid("rowwise_dequantized")
        return hybrid("original", te.NVFP4Quantizer(E2M1), identity)

    layer = te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16, device=device)
    x, dy = values(device, 64, 64).requires_grad_(), values(device, 64, 64).roll(1, 0)
    with te.autocast(recipe=CustomRecipe(qfactory=factory)):
        y = layer(x)
    y.backward(dy)

    def rows(quantizer, v):
        return quantizer(v).dequantize().float()

    mx, fp4 = te.MXFP8Quantizer(E4M3, columnwise=False), te.NVFP4Quantizer(E2M1, columnwise=False)
    weight = rows(mx, layer.weight.detach())
    transposed = te.NVFP4Quantizer(E2M1, rowwise=False)(weight.bfloat16()).dequantize().float()
    for got, expected in (
        (y, rows(mx, x.detach()) @ weight.t()),
        (x.grad, rows(fp4, dy) @ transposed),
        (layer.weight.grad, dy.float().t() @ x.detach().float()),
    ):
        torch.testing.assert_close(got.float(), expected, rtol=2e-2, atol=2e-2)
