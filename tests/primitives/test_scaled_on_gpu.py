"""Block-scaled product kernels on a GPU: random shapes, epilogues and layouts against float64.

Hopper computes tl.dot_scaled in bfloat16, in which MXFP8 values are exact; the tensor cores compute the sums.
"""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from transformer_engine.common import formats, optional
from transformer_engine.pytorch.primitives.gemm import Epilogue, triton
from transformer_engine.pytorch.primitives.gemm.swizzle import swizzle_operand_scale
from transformer_engine.pytorch.primitives.operand import Operand
from transformer_engine.pytorch.primitives.quantize import QuantizeSpec, dequantize, quantize
from transformer_engine.pytorch.primitives.scale_order import compact, swizzled

pytestmark = pytest.mark.gpu

SPECS = {
    "mxfp8": (QuantizeSpec(formats.MXFP8, formats.E4M3), QuantizeSpec(formats.MXFP8, formats.E4M3)),
    "mxfp8 gradient": (
        QuantizeSpec(formats.MXFP8, formats.E5M2),
        QuantizeSpec(formats.MXFP8, formats.E4M3),
    ),
    "nvfp4": (QuantizeSpec(formats.NVFP4, formats.E2M1), QuantizeSpec(formats.NVFP4, formats.E2M1)),
    "nvfp4 rows": (
        QuantizeSpec(formats.NVFP4_ROWS, formats.E2M1),
        QuantizeSpec(formats.NVFP4, formats.E2M1),
    ),
    "mxfp8 tma": (
        QuantizeSpec(formats.MXFP8, formats.E4M3),
        QuantizeSpec(formats.MXFP8, formats.E4M3),
    ),
    "nvfp4 copied": (
        QuantizeSpec(formats.NVFP4, formats.E2M1),
        QuantizeSpec(formats.NVFP4, formats.E2M1),
    ),
    "blocks": (
        QuantizeSpec(formats.BLOCK_1D, formats.E4M3),
        QuantizeSpec(formats.BLOCK_2D, formats.E4M3),
    ),
    "rows of blocks": (
        QuantizeSpec(formats.BLOCK_1D, formats.E5M2),
        QuantizeSpec(formats.BLOCK_1D, formats.E4M3),
    ),
    "square blocks": (QuantizeSpec(formats.BLOCK_2D, formats.E4M3),) * 2,
    "decoded": (
        QuantizeSpec(formats.BLOCK_1D, formats.E5M2),
        QuantizeSpec(formats.BLOCK_2D, formats.E4M3),
    ),
    "exponents": (
        QuantizeSpec(formats.BLOCK_1D, formats.E5M2, power_of_two=True),
        QuantizeSpec(formats.BLOCK_2D, formats.E4M3, power_of_two=True),
    ),
}


def operand(spec: QuantizeSpec, rows: int, depth: int) -> Operand:
    values = torch.randn(rows, depth, device="cuda")
    values *= torch.exp2(torch.randint(-6, 6, (rows, 1), device="cuda").float())
    q = quantize(values.bfloat16(), spec)
    assert q.codes is not None
    return Operand(q.codes, q.scale, spec.operand_format, q.amax, torch.bfloat16)


def check(
    name: str, m: int, n: int, k: int, dtype: torch.dtype, biased: bool, accumulates: bool
) -> None:
    """Compare one product with float64, up to the precision of Hopper's FP8 sums and the result's dtype."""
    a, b = (
        operand(spec, *extents) for spec, extents in zip(SPECS[name], ((m, k), (n, k)), strict=True)
    )
    run = triton.run_blocks if "blocks" in name else partial(triton.run_scaled, tma="tma" in name)
    run = {"exponents": triton.run_exponents, "decoded": triton.run_decoded}.get(name, run)
    bias = torch.randn(n, device="cuda").bfloat16() if biased else None
    full = torch.full((m, n + 16), 3.0, device="cuda", dtype=dtype)
    out, before = (full[:, :n], 3.0) if accumulates else (None, 0.0)
    result = run(a, b, Epilogue(dtype, bias, out, accumulates))
    left, right = (dequantize(x._replace(dtype=torch.float32)).double() for x in (a, b))
    exact = left @ right.t() + before + (0.0 if bias is None else bias.double())
    rounding = torch.finfo(dtype).eps * exact.abs()
    bound = 2.0**-11 * (left.abs() @ right.abs().t()) + rounding + 1e-3
    wrong = ((result.double() - exact).abs() > bound).sum()
    assert not wrong, (name, m, n, k, dtype, biased, accumulates, int(wrong))
    assert (full[:, n:] == 3.0).all()


@pytest.mark.parametrize("name", SPECS)
def test_random_products_agree_with_float64(name):
    if name.startswith("nvfp4") and optional.release("triton") < (3, 8):
        pytest.skip("tl.dot_scaled of NVFP4 does not compile for Hopper before Triton 3.8")
    random.seed(0)
    for _ in range(40):
        m, n = (random.choice((1, 7, 16, 33, 64, 128, 200, 1000)) for _ in "mn")
        k = 32 * random.randint(1, 40)
        dtype = random.choice((torch.float32, torch.bfloat16))
        accumulates = random.random() < 0.3
        check(name, m, n, k, dtype, not accumulates and random.random() < 0.5, accumulates)


@pytest.mark.parametrize("ending", ["plain", "gelu", "gelu_gradient"])
@pytest.mark.parametrize("m, n, k", [(300, 272, 416), (16, 400, 96), (1000, 77, 160)])
def test_tma_products_are_bitwise_equal_to_pointer_products(m, n, k, ending):
    a, b = (
        operand(spec, *extents)
        for spec, extents in zip(SPECS["mxfp8"], ((m, k), (n, k)), strict=True)
    )
    bias, x = torch.randn(n, device="cuda").bfloat16(), torch.randn(m, n, device="cuda").bfloat16()
    results = []
    for tma in (False, True):
        saved = torch.zeros(m, n, device="cuda", dtype=torch.bfloat16)
        activation = {
            "plain": triton.NO_ACTIVATION,
            "gelu": triton.Activation("gelu", None, saved),
            "gelu_gradient": triton.Activation("gelu_gradient", x),
        }[ending]
        result = triton.run_scaled(a, b, Epilogue(torch.bfloat16, bias), activation, tma=tma)
        results.append((result, saved))
    for by_pointers, by_tma in zip(*results, strict=True):
        assert torch.equal(by_pointers, by_tma)


@pytest.mark.parametrize("rows, columns", [(128, 4), (300, 18), (1, 1), (4096, 130)])
def test_scales_are_swizzled_as_on_a_cpu(rows, columns):
    scale = torch.randint(0, 256, (columns, rows), dtype=torch.uint8).t()
    result = swizzled(scale.cuda())
    assert torch.equal(result.cpu(), swizzled(scale))
    assert torch.equal(compact(result)[:rows, :columns].cpu(), scale)


@pytest.mark.parametrize("rows, depth", [(128, 128), (300, 160), (1, 32)])
def test_exponents_are_swizzled_as_on_a_cpu(rows, depth):
    for spec in SPECS["exponents"]:
        x = operand(spec, rows, depth)
        assert x.scale is not None
        on_cpu = x._replace(codes=x.codes.cpu(), scale=x.scale.cpu())
        assert torch.equal(swizzle_operand_scale(x).cpu(), swizzle_operand_scale(on_cpu))
