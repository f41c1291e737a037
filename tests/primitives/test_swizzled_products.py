"""MXFP8 and NVFP4 products: swizzled scales, cuBLASLt and torch calls, and the hardware's rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from tests.primitives.cublaslt_on_cpu import install
from transformer_engine.common import formats, optional
from transformer_engine.common.dispatch import PlanFailure
from transformer_engine.common.hardware import Hardware, hardware_named, nvidia
from transformer_engine.common.kernels import launch
from transformer_engine.pytorch.primitives.gemm import TABLE, Epilogue, cublaslt, torch_mm, triton
from transformer_engine.pytorch.primitives.gemm.cublaslt_problem import POINTERS, make_descriptor
from transformer_engine.pytorch.primitives.gemm.request import GemmRequest
from transformer_engine.pytorch.primitives.gemm.swizzle import second_level, swizzle_operand_scale
from transformer_engine.pytorch.primitives.operand import Operand
from transformer_engine.pytorch.primitives.quantize import QuantizeSpec, dequantize, quantize
from transformer_engine.pytorch.primitives.scale_order import compact, swizzled

MXFP8 = QuantizeSpec(formats.MXFP8, formats.E4M3)
GRADIENT = QuantizeSpec(formats.MXFP8, formats.E5M2)
NVFP4 = QuantizeSpec(formats.NVFP4, formats.E2M1)
BLOCK_1D = QuantizeSpec(formats.BLOCK_1D, formats.E4M3)
BLOCK_2D = QuantizeSpec(formats.BLOCK_2D, formats.E4M3)
POWERS_1D, POWERS_2D = (
    dataclasses.replace(spec, power_of_two=True) for spec in (BLOCK_1D, BLOCK_2D)
)
B200 = nvidia(10, 0)


def quantized(spec: QuantizeSpec, rows: int, depth: int) -> Operand:
    values = torch.randn(rows, depth) * torch.exp2(torch.randint(-6, 6, (rows, 1)).float())
    q = quantize(values.bfloat16(), spec)
    assert q.codes is not None
    return Operand(q.codes, q.scale, spec.operand_format, q.amax, torch.bfloat16)


def dequantize_operand(x: Operand) -> torch.Tensor:
    return dequantize(x._replace(dtype=torch.float32))


def assert_product(
    result: torch.Tensor, a: Operand, b: Operand, added: torch.Tensor | float = 0.0
) -> None:
    """Compare with the float64 product, up to the roundings from float32 sums in another order."""
    left, right = dequantize_operand(a).double(), dequantize_operand(b).double()
    error = (result.double() - left @ right.t() - added).abs()
    assert (error <= 2e-6 * (left.abs() @ right.abs().t() + 1.0)).all()


def gpu_request(a: Operand, b: Operand, epilogue: Epilogue, hardware: Hardware) -> GemmRequest:
    """The request as it would be for the same tensors on a GPU."""
    return dataclasses.replace(
        GemmRequest.of(a, b, epilogue), device="cuda", hardware=hardware, index=0
    )


@pytest.mark.parametrize("rows, columns", [(128, 4), (256, 12), (1, 1), (129, 5), (300, 18)])
def test_swizzled_scales_are_at_the_formulas_positions(rows, columns):
    scale = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    tiles = -(-columns // 4)
    result = swizzled(scale)
    flat = torch.zeros(result.numel(), dtype=torch.uint8)
    for r in range(rows):
        for c in range(columns):
            flat[(r // 128 * tiles + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = (
                scale[r, c]
            )
    assert torch.equal(result.flatten(), flat)
    assert result.shape == (-(-rows // 128) * 128, 4 * tiles)
    assert torch.equal(compact(result)[:rows, :columns], scale)


def test_swizzled_scales_are_equal_for_a_transposed_view_and_its_copy():
    scale = torch.randint(0, 256, (12, 256), dtype=torch.uint8).t()
    assert torch.equal(swizzled(scale), swizzled(scale.contiguous()))
    with pytest.raises(ValueError, match=r"\(100, 4\), which is not a multiple of \(128, 4\)"):
        compact(torch.zeros(100, 4, dtype=torch.uint8))


@pytest.fixture
def library(monkeypatch):
    return install(monkeypatch)


PAIRS = {
    "mxfp8": lambda: (quantized(MXFP8, 48, 96), quantized(MXFP8, 160, 96)),
    "e5m2 x e4m3": lambda: (quantized(GRADIENT, 7, 160), quantized(MXFP8, 32, 160)),
    "nvfp4": lambda: (quantized(NVFP4, 144, 96), quantized(NVFP4, 48, 96)),
    "powers": lambda: (quantized(POWERS_1D, 40, 288), quantized(POWERS_2D, 160, 288)),
    "rows of powers": lambda: (quantized(POWERS_1D, 130, 96), quantized(POWERS_1D, 32, 96)),
}


@pytest.mark.parametrize("architecture", ["10.0", "10.3", "11.0", "12.0", "12.1"])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_cublaslt_computes_products_with_swizzled_scales(library, pair, biased, architecture):
    a, b = PAIRS[pair]()
    bias = torch.randn(b.rows).bfloat16() if biased else None
    epilogue = Epilogue(torch.float32, bias)
    request = gpu_request(a, b, epilogue, hardware_named("nvidia", architecture))
    assert cublaslt.unsupported_reason(request) is None
    call = cublaslt.bind(request)
    assert not isinstance(call, PlanFailure)
    assert_product(call(a, b, epilogue), a, b, 0.0 if bias is None else bias.double())


@pytest.mark.parametrize("pair", ["mxfp8", "nvfp4"])
def test_cublaslt_adds_to_the_result_in_place_whatever_the_addresses(library, pair):
    a, b = PAIRS[pair]()
    for offset in (0, 4, 3):  # floats from an address of 256 bytes
        memory = torch.ones(a.rows * b.rows + 4)
        out = memory[offset : offset + a.rows * b.rows].view(a.rows, b.rows)
        epilogue = Epilogue(torch.float32, out=out, accumulate=True)
        call = cublaslt.bind(gpu_request(a, b, epilogue, nvidia(10, 0)))
        assert not isinstance(call, PlanFailure)
        assert call(a, b, epilogue) is out
        assert_product(out, a, b, 1.0)


def test_descriptors_have_the_librarys_scale_and_pointer_modes(library):
    numbers = tuple(int(library.MatmulDescAttribute[name]) for name in POINTERS)
    for pair, mode, pointers in (("mxfp8", 2, None), ("nvfp4", 1, 1)):
        a, b = PAIRS[pair]()
        problem = cublaslt.make_problem(gpu_request(a, b, Epilogue(torch.bfloat16), nvidia(10, 0)))
        descriptor = library.alive[make_descriptor(library, problem, numbers).handle]
        assert (descriptor["A_SCALE_MODE"], descriptor["B_SCALE_MODE"]) == (mode, mode)
        assert descriptor.get("POINTER_MODE") == pointers
        assert (descriptor["TRANSA"], descriptor["TRANSB"]) == (1, 0)  # both operands end in K
        assert (problem.left_leading, problem.right_leading, problem.k) == (96, 96, 96)


def test_cublaslt_gives_reasons_for_products_that_it_lacks(library, monkeypatch):
    def reason(a, b, hardware=B200, **changes):
        request = gpu_request(a, b, Epilogue(torch.bfloat16), hardware)
        return str(cublaslt.unsupported_reason(dataclasses.replace(request, **changes)))

    a, b = PAIRS["mxfp8"]()
    assert "compute capability 9.0 has no mxfp8 products" in reason(a, b, nvidia(9, 0))
    assert "K=100 is not a multiple of 32" in reason(a, b, k=100)
    gradient = quantized(GRADIENT, 32, 96)
    assert "two E5M2 operands" in reason(gradient, gradient)
    rows = Operand(*PAIRS["nvfp4"]()[0])._replace(format=formats.NVFP4_ROWS)
    assert "a second-level scale per row" in reason(rows, rows)
    monkeypatch.setattr(library, "get_version", lambda: 120_700)
    assert "cuBLASLt 12.7 < 12.9; pip install --upgrade nvidia-cublas" in reason(a, b)


@pytest.mark.parametrize("pair", PAIRS)
def test_scaled_mm_receives_swizzled_scales_and_their_recipes(monkeypatch, pair):
    a, b = PAIRS[pair]()
    records = {}

    def scaled_mm(mat_a, mat_b, **arguments):
        records.update(arguments, a=mat_a, b=mat_b)
        return (dequantize_operand(a) @ dequantize_operand(b).t()).to(arguments["output_dtype"])

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    bias = torch.randn(b.rows)
    out = torch_mm._run_swizzled_scales(a, b, Epilogue(torch.bfloat16, bias))
    exact = dequantize_operand(a) @ dequantize_operand(b).t() + bias
    torch.testing.assert_close(out.float(), exact, rtol=2e-2, atol=1.0)
    for side, operand in (("a", a), ("b", b)):
        scales, level = records[f"scale_{side}"], second_level(operand)
        assert operand.scale is not None
        assert torch.equal(scales[0].view(torch.uint8), swizzle_operand_scale(operand))
        if pair == "nvfp4":
            assert (
                records[side].dtype == torch.float4_e2m1fn_x2
                and scales[0].dtype == torch.float8_e4m3fn
            )
            assert level is not None and torch.equal(scales[1], level)
            assert records[f"scale_recipe_{side}"] == [
                F.ScalingType.BlockWise1x16,
                F.ScalingType.TensorWise,
            ]
            assert records[f"swizzle_{side}"] == [
                F.SwizzleType.SWIZZLE_32_4_4,
                F.SwizzleType.NO_SWIZZLE,
            ]
        else:
            assert scales[0].dtype == torch.float8_e8m0fnu
            assert records[f"scale_recipe_{side}"] == [F.ScalingType.BlockWise1x32]
            assert records[f"swizzle_{side}"] == [F.SwizzleType.SWIZZLE_32_4_4]


@pytest.fixture
def with_triton(monkeypatch):
    monkeypatch.setattr(launch, "unavailable_reason", lambda hardware: None)
    monkeypatch.setattr(optional, "release", lambda name: (3, 8))


@pytest.mark.parametrize(
    ("spec_a", "spec_b", "having"),
    [
        (BLOCK_1D, BLOCK_2D, ("8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")),
        (BLOCK_2D, BLOCK_2D, ("8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")),
        (POWERS_1D, POWERS_2D, ("8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")),
        (MXFP8, MXFP8, ("10.0", "10.3", "11.0", "12.0", "12.1")),
        (NVFP4, NVFP4, ("10.0", "10.3", "11.0", "12.0", "12.1")),
    ],
    ids=["blocks", "square blocks", "powers", "mxfp8", "nvfp4"],
)
def test_kernels_multiply_where_the_tensor_cores_read_the_format(
    with_triton, spec_a, spec_b, having
):
    a, b = quantized(spec_a, 48, 256), quantized(spec_b, 32, 256)
    for architecture in ("8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1"):
        request = gpu_request(
            a, b, Epilogue(torch.bfloat16), hardware_named("nvidia", architecture)
        )
        assert (triton.unsupported_reason(request) is None) == (architecture in having), (
            architecture
        )


def test_kernels_need_a_triton_whose_scaled_dot_is_native(with_triton, monkeypatch):
    a, b = PAIRS["mxfp8"]()
    monkeypatch.setattr(optional, "release", lambda name: (3, 7))
    request = gpu_request(a, b, Epilogue(torch.bfloat16), nvidia(12, 1))
    assert triton.unsupported_reason(request) == (
        "tl.dot_scaled multiplies in bfloat16 on compute capability 12.1 before Triton 3.8; pip install "
        "--upgrade 'triton>=3.8', or install nvmath-python"
    )
    assert triton.unsupported_reason(dataclasses.replace(request, hardware=nvidia(12, 0))) is None


def test_block_scale_exponents_are_repeated_for_rows_and_32_elements():
    scale = torch.exp2(torch.randint(-20, 20, (3, 2)).float())
    scale[0, 0], scale[2, 1] = 2.0**-127, 2.0**127
    codes = torch.zeros(300, 160).to(torch.float8_e4m3fn)
    square = Operand(codes, scale, formats.BLOCK_2D_POWERS)
    exponents = (
        (scale.log2() + 127).to(torch.uint8).repeat_interleave(128, 0)[:300].repeat_interleave(4, 1)
    )
    assert torch.equal(swizzle_operand_scale(square), swizzled(exponents[:, :5]))
    rows = Operand(codes[:3], scale, formats.BLOCK_1D_POWERS)
    assert torch.equal(swizzle_operand_scale(rows), swizzled(exponents[[0, 128, 256], :5]))


@pytest.mark.parametrize("architecture", ["8.9", "9.0", "10.0", "12.0", "12.1"])
def test_blocks_are_multiplied_by_exponents_where_all_scales_are_powers_of_two(
    with_triton, architecture
):
    hardware = hardware_named("nvidia", architecture)
    powers, general = quantized(POWERS_1D, 48, 256), quantized(BLOCK_1D, 48, 256)
    for a, b in ((powers, powers), (powers, general), (general, powers)):
        request = gpu_request(a, b, Epilogue(torch.bfloat16), hardware)
        exact = a is b and hardware.has("mxfp8 products")
        assert request.power_of_two == (a is b)
        assert triton.unsupported_reason(request) is None
        assert triton.runner(request) is (triton.run_exponents if exact else triton.run_blocks)
        actual = cublaslt._uses_exponents(request)
        assert actual == exact
        expected = (
            "blocks whose scales are powers of two" if a is not b else "has no mxfp8 products"
        )
        reason = torch_mm._unsupported_swizzled_scales(request)
        assert reason is None if exact else expected in str(reason)


def test_blocks_are_promoted_where_triton_lacks_the_instruction(with_triton, monkeypatch):
    monkeypatch.setattr(optional, "release", lambda name: (3, 7))
    a = quantized(POWERS_1D, 48, 256)
    for hardware, run in (
        (nvidia(12, 0), triton.run_exponents),
        (nvidia(12, 1), triton.run_blocks),
    ):
        request = gpu_request(a, a, Epilogue(torch.bfloat16), hardware)
        assert triton.unsupported_reason(request) is None
        assert triton.runner(request) is run


@pytest.mark.parametrize("architecture", ["8.0", "8.6"])
def test_blocks_are_decoded_to_bfloat16_without_fp8_products(with_triton, architecture):
    hardware = hardware_named("nvidia", architecture)
    general, powers = quantized(BLOCK_1D, 48, 256), quantized(POWERS_1D, 48, 256)
    for a, chosen in ((general, "decode"), (powers, "widen")):
        for b in (a, quantized(BLOCK_2D if a is general else POWERS_2D, 128, 256)):
            assert TABLE.chosen(gpu_request(a, b, Epilogue(torch.bfloat16), hardware)) == chosen
    mixed = gpu_request(general, powers, Epilogue(torch.float32), hardware)
    assert TABLE.chosen(mixed) == "decode"
    tensors = quantized(QuantizeSpec(formats.FLOAT8, formats.E4M3), 48, 256)
    for a in (tensors, quantized(MXFP8, 48, 256), quantized(NVFP4, 48, 256)):
        assert TABLE.chosen(gpu_request(a, a, Epilogue(torch.bfloat16), hardware)) == "widen"
