"""Every format against loops over its blocks in NumPy float32, bit for bit on codes and scales.

Longer than 400 lines because the formats share their oracle's casts and inputs.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.support.quantized import raw
from transformer_engine.common.formats import (
    BLOCK_1D,
    BLOCK_2D,
    E2M1,
    E4M3,
    E5M2,
    FLOAT8,
    MXFP8,
    NVFP4,
)
from transformer_engine.pytorch.primitives.operand import Operand
from transformer_engine.pytorch.primitives.quantize import (
    Quantized,
    QuantizeSpec,
    dequantize,
    hadamard_transform,
    quantize,
    unpack_fp4,
)

F = np.float32
FLOAT32_MAX = np.finfo(np.float32).max
FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
INPUT_MAX = {torch.float32: FLOAT32_MAX, torch.bfloat16: F(torch.finfo(torch.bfloat16).max)}
SHAPES = [
    (1, 128),
    (3, 127),
    (2, 129),
    (130, 40),
    (17, 32),
    (31, 33),
    (16, 16),
    (15, 31),
    (1, 1),
    (33, 256),
]
EVEN_SHAPES = [(2, 128), (4, 126), (2, 130), (34, 32), (16, 16), (18, 14), (2, 2), (32, 30)]


def fp8(values: np.ndarray | np.float32, element) -> np.ndarray:
    """Saturated codes for float32 values."""
    with np.errstate(all="ignore"):
        limited = np.clip(np.asarray(values, F), F(-element.maximum), F(element.maximum))
        return limited.astype(FP8[element.name]).view(np.uint8)


def e4m3_value(code: np.ndarray) -> np.float32:
    return F(code.view(ml_dtypes.float8_e4m3fn))


def products(values: np.ndarray, multiplier: np.float32, element) -> np.ndarray:
    """Codes for float32 products."""
    with np.errstate(all="ignore"):
        return fp8(values.astype(F) * F(multiplier), element)


def scale_rule(amax, maximum, value_for_inf, *, power_of_two=False, epsilon=0.0) -> np.float32:
    amax = max(F(amax), F(epsilon)) if not np.isnan(amax) else amax
    if np.isnan(amax) or np.isinf(amax) or amax == 0:
        return F(1)
    with np.errstate(over="ignore"):
        scale = F(maximum) / F(amax)
    if np.isinf(scale):
        scale = value_for_inf
    if power_of_two:
        scale = F(2.0) ** F(np.frexp(scale)[1] - 1)
    return F(scale)


def iterate_blocks(x: np.ndarray, tile: tuple[int, int]):
    for i in range(0, x.shape[0], tile[0]):
        for j in range(0, x.shape[1], tile[1]):
            yield i // tile[0], j // tile[1], (slice(i, i + tile[0]), slice(j, j + tile[1]))


def tile_counts(x: np.ndarray, tile: tuple[int, int]) -> tuple[int, int]:
    return (-(-x.shape[0] // tile[0]), -(-x.shape[1] // tile[1]))


def block_amax(block: np.ndarray) -> np.float32:
    return F(np.max(np.abs(block)))  # NaN propagates


def block_oracle(x, tile, element, value_for_inf, **rule):
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros(tile_counts(x, tile), np.float32)
    for i, j, where in iterate_blocks(x, tile):
        scale = scale_rule(block_amax(x[where]), element.maximum, value_for_inf, **rule)
        scales[i, j] = F(1) / scale
        codes[where] = products(x[where], scale, element)
    return codes, scales


def mxfp8_oracle(x, tile, element):
    codes = np.zeros(x.shape, np.uint8)
    exponents = np.zeros((x.shape[0], -(-x.shape[1] // tile[1])), np.uint8)
    for _, j, where in iterate_blocks(x, tile):
        target = block_amax(x[where]) * (F(1) / F(element.maximum))
        if np.isnan(target):
            exponent, multiplier = 255, F(np.nan)
        else:
            exponent = next((e for e in range(254) if 2.0 ** (e - 127) >= float(target)), 254)
            multiplier = F(2.0 ** (127 - exponent))
        exponents[where[0], j] = exponent
        codes[where] = products(x[where], multiplier, element)
    return codes, exponents


def e2m1_oracle(values: np.ndarray) -> np.ndarray:
    """Codes of the nearest magnitudes, for ties the even code; NaN becomes +6."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    by_parity = [0, 2, 4, 6, 1, 3, 5, 7]  # argmin returns the first of equal distances
    magnitudes = np.minimum(np.abs(values.astype(np.float64)), 6.0)
    distances = np.abs(grid[by_parity] - magnitudes[..., None])
    codes = np.array(by_parity, np.uint8)[distances.argmin(-1)]
    return np.where(np.isnan(values), 7, codes | np.where(np.signbit(values), 8, 0)).astype(
        np.uint8
    )


def nvfp4_oracle(x, tile, amax):
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((x.shape[0], -(-x.shape[1] // tile[1])), np.uint8)
    with np.errstate(all="ignore"):
        encode = np.minimum(F(448 * 6) / F(amax), FLOAT32_MAX)
        if amax == 0 or encode == 0:
            encode = F(1)
        for _, j, where in iterate_blocks(x, tile):
            expected = np.minimum(block_amax(x[where]) * (encode * (F(1) / F(6))), FLOAT32_MAX)
            scale = fp8(expected, E4M3)
            scales[where[0], j] = scale
            multiplier = np.minimum(F(1) / (e4m3_value(scale) * (F(1) / encode)), FLOAT32_MAX)
            codes[where] = e2m1_oracle(x[where].astype(F) * multiplier)
    return codes, scales


def sample(rows: int, depth: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal numbers whose rows span many powers of two, with a row of zeros when there is room."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, depth, generator=generator)
    x = x * torch.exp2(torch.randint(-20, 20, (rows, 1), generator=generator).to(torch.float32))
    if rows > 2:
        x[2] = 0.0
    return x.to(dtype)


EXTREMES = {
    "zeros": [0.0, -0.0],
    "subnormal": [1e-45, -1e-40, 5e-39],
    "least normal": [1.1754944e-38, -3e-38],
    "largest": [3.3e38, 1.0, -1e30],
    "infinite": [float("inf"), 1.0, -2.0, float("-inf")],
    "nan": [float("nan"), 1.0, -2.0],
    "ties": [448.0, 17.0, 19.0, 25.0, 27.0, -17.0, 240.0, 232.0],
}


def extreme(name: str, rows: int, depth: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.tensor(EXTREMES[name], dtype=torch.float32)
    return (
        values.repeat(-(-rows * depth // len(values)))[: rows * depth].view(rows, depth).to(dtype)
    )


def bits(t: torch.Tensor | None) -> np.ndarray:
    assert t is not None
    return raw(t).cpu().numpy()


def assert_same_codes(actual: torch.Tensor | None, expected: np.ndarray, element) -> None:
    """Equal bytes, except that a NaN may have either sign."""
    codes = bits(actual)
    narrow = FP8[element.name]
    a, b = codes.view(narrow).astype(np.float32), expected.view(narrow).astype(np.float32)
    both_nan = np.isnan(a) & np.isnan(b)
    np.testing.assert_array_equal(np.where(both_nan, 0, codes), np.where(both_nan, 0, expected))


def assert_same_scale(actual: torch.Tensor | None, expected: np.ndarray) -> None:
    assert actual is not None and actual.dtype == torch.float32
    np.testing.assert_array_equal(actual.cpu().numpy().view(np.int32), expected.view(np.int32))


def wide(x: torch.Tensor) -> np.ndarray:
    return x.to(torch.float32).numpy()


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
FP8_ELEMENTS = pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)


def inputs(dtype: torch.dtype, shapes) -> list[torch.Tensor]:
    shaped = [sample(rows, depth, dtype) for rows, depth in shapes]
    return shaped + [extreme(name, 2, 130, dtype) for name in EXTREMES]


@DTYPES
@FP8_ELEMENTS
@pytest.mark.parametrize("power_of_two", [False, True])
class TestFloat8:
    def check(self, q: Quantized, x: torch.Tensor, scale: np.float32, element) -> None:
        matrix = wide(x)
        codes = products(matrix, scale, element)
        assert_same_codes(q.codes, codes, element)
        assert_same_codes(q.codes_t, codes.T.copy(), element)
        assert_same_scale(q.scale, np.array([F(1) / scale], F))
        assert_same_scale(q.scale_t, np.array([F(1) / scale], F))

    def test_scale_from_the_absolute_maximum(self, dtype, element, power_of_two, device):
        spec = QuantizeSpec(FLOAT8, element, columnwise=True, power_of_two=power_of_two)
        for x in inputs(dtype, SHAPES[:4]):
            amax = block_amax(wide(x))
            scale = scale_rule(amax, element.maximum, FLOAT32_MAX, power_of_two=power_of_two)
            q = quantize(x.to(device), spec)
            self.check(q, x, scale, element)
            assert q.amax is not None and q.amax.shape == (1,)
            np.testing.assert_array_equal(q.amax.cpu().numpy(), np.array([amax]))

    def test_given_scale_multiplies_and_amax_is_still_measured(
        self, dtype, element, power_of_two, device
    ):
        spec = QuantizeSpec(FLOAT8, element, columnwise=True, power_of_two=power_of_two)
        for x in inputs(dtype, SHAPES[:2]):
            q = quantize(x.to(device), spec, multiplier=torch.tensor([3.7], device=device))
            self.check(q, x, F(3.7), element)
            assert q.amax is not None
            np.testing.assert_array_equal(q.amax.cpu().numpy(), np.array([block_amax(wide(x))]))


def test_an_explicit_amax_determines_the_scale(device):
    x = sample(4, 20, torch.float32)
    q = quantize(
        x.to(device), QuantizeSpec(FLOAT8, E4M3), amax=torch.tensor([1000.0], device=device)
    )
    assert_same_scale(q.scale, np.array([F(1) / (F(448) / F(1000))], F))
    assert q.amax is not None and q.amax.item() == 1000.0


def test_epsilon_is_the_smallest_amax(device):
    x = torch.full((2, 8), 1e-6, device=device)
    q = quantize(x, QuantizeSpec(FLOAT8, E4M3, epsilon=1e-3))
    assert_same_scale(q.scale, np.array([F(1) / (F(448) / F(1e-3))], F))


@DTYPES
@pytest.mark.parametrize("element, power_of_two", [(E4M3, True), (E4M3, False), (E5M2, True)])
class TestBlocks:
    @pytest.mark.parametrize("epsilon", [0.0, 1e-2])
    def test_rows_of_128(self, dtype, element, power_of_two, epsilon, device):
        spec = QuantizeSpec(
            BLOCK_1D, element, columnwise=True, power_of_two=power_of_two, epsilon=epsilon
        )
        rule = {"power_of_two": power_of_two, "epsilon": epsilon}
        for x in inputs(dtype, SHAPES[:7] if epsilon == 0.0 else SHAPES[:2]):
            q = quantize(x.to(device), spec)
            codes, scales = block_oracle(wide(x), (1, 128), element, INPUT_MAX[dtype], **rule)
            assert_same_codes(q.codes, codes, element)
            assert_same_scale(q.scale, scales)
            codes, scales = block_oracle(wide(x).T, (1, 128), element, INPUT_MAX[dtype], **rule)
            assert_same_codes(q.codes_t, codes, element)
            assert_same_scale(q.scale_t, scales)

    def test_squares_of_128(self, dtype, element, power_of_two, device):
        spec = QuantizeSpec(BLOCK_2D, element, columnwise=True, power_of_two=power_of_two)
        for x in inputs(dtype, SHAPES):
            q = quantize(x.to(device), spec)
            codes, scales = block_oracle(
                wide(x), (128, 128), element, INPUT_MAX[dtype], power_of_two=power_of_two
            )
            assert_same_codes(q.codes, codes, element)
            assert_same_scale(q.scale, scales)
            assert_same_codes(q.codes_t, codes.T.copy(), element)
            assert_same_scale(q.scale_t, scales.T.copy())


@DTYPES
@FP8_ELEMENTS
class TestMXFP8:
    @pytest.mark.parametrize("block", [(1, 32), (32, 32)])
    def test_codes_and_exponents_equal_the_oracle(self, block, dtype, element, device):
        spec = QuantizeSpec(MXFP8, element, columnwise=True, two_dimensional=block[0] == 32)
        for x in inputs(dtype, SHAPES):
            q = quantize(x.to(device), spec)
            codes, exponents = mxfp8_oracle(wide(x), block, element)
            assert_same_codes(q.codes, codes, element)
            np.testing.assert_array_equal(bits(q.scale), exponents)
            codes, exponents = mxfp8_oracle(wide(x).T, block, element)
            assert_same_codes(q.codes_t, codes, element)
            np.testing.assert_array_equal(bits(q.scale_t), exponents)


def test_mxfp8_maximum_times_a_power_of_two_needs_no_larger_exponent(device):
    powers = torch.exp2(torch.arange(-100, 100, dtype=torch.float32))
    q = quantize((448.0 * powers)[:, None].to(device), QuantizeSpec(MXFP8, E4M3))
    assert q.scale is not None
    assert q.scale.flatten().tolist() == list(range(27, 227))


@DTYPES
class TestNVFP4:
    def assert_direction(self, codes, scale, expected_codes, expected_scale) -> None:
        np.testing.assert_array_equal(unpack_fp4(codes).cpu().numpy(), expected_codes)
        assert_same_codes(scale, expected_scale, E4M3)

    @pytest.mark.parametrize("two_dimensional", [False, True])
    def test_two_level_scales(self, dtype, two_dimensional, device):
        spec = QuantizeSpec(NVFP4, E2M1, columnwise=True, two_dimensional=two_dimensional)
        tile = (16, 16) if two_dimensional else (1, 16)
        for x in inputs(dtype, EVEN_SHAPES):
            amax = block_amax(wide(x))
            q = quantize(x.to(device), spec)
            self.assert_direction(q.codes, q.scale, *nvfp4_oracle(wide(x), tile, amax))
            self.assert_direction(q.codes_t, q.scale_t, *nvfp4_oracle(wide(x).T, tile, amax))
            for measured in (q.amax, q.amax_t):
                assert measured is not None
                np.testing.assert_array_equal(measured.cpu().numpy(), np.array([amax]))

    def test_given_maxima_are_used(self, dtype, device):
        x = sample(32, 48, dtype)
        amax, amax_t = F(3e7), F(5e7)
        q = quantize(
            x.to(device),
            QuantizeSpec(NVFP4, E2M1, columnwise=True),
            amax=torch.tensor([amax], device=device),
            amax_t=torch.tensor([amax_t], device=device),
        )
        self.assert_direction(q.codes, q.scale, *nvfp4_oracle(wide(x), (1, 16), amax))
        self.assert_direction(q.codes_t, q.scale_t, *nvfp4_oracle(wide(x).T, (1, 16), amax_t))

    @pytest.mark.parametrize("random_sign", [True, False])
    def test_hadamard_acts_on_the_columnwise_direction_alone(self, dtype, random_sign, device):
        x = sample(32, 48, dtype)
        spec = QuantizeSpec(NVFP4, E2M1, columnwise=True, hadamard=True, random_sign=random_sign)
        q = quantize(x.to(device), spec)
        self.assert_direction(
            q.codes, q.scale, *nvfp4_oracle(wide(x), (1, 16), block_amax(wide(x)))
        )
        transposed = wide(hadamard_transform(x.t().contiguous(), random_sign))
        assert q.amax_t is not None and q.amax_t.item() == block_amax(transposed)
        self.assert_direction(
            q.codes_t, q.scale_t, *nvfp4_oracle(transposed, (1, 16), block_amax(transposed))
        )


def test_nvfp4_block_scales_next_to_ties(device):
    """A wrong product order shows only where the block scale is about to round the other way."""
    grid = np.arange(8, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    ties = (grid[1:] + grid[:-1]) / 2
    generator = torch.Generator().manual_seed(5)
    for amax in torch.rand(8, generator=generator).numpy().astype(F) + F(1):
        encode = F(448 * 6) / amax
        nearest = (ties * 6 / float(encode)).astype(F).view(np.int32)
        maxima = (nearest[:, None] + np.arange(-3, 4, dtype=np.int32)).view(F).reshape(-1, 1)
        q = quantize(
            torch.from_numpy(maxima.repeat(2, axis=1)).to(device),
            QuantizeSpec(NVFP4, E2M1),
            amax=torch.tensor([amax], device=device),
        )
        expected = fp8(maxima.flatten() * (encode * (F(1) / F(6))), E4M3)
        np.testing.assert_array_equal(bits(q.scale).flatten(), expected)


class TestDequantize:
    """value = code * scale in float32, with ml_dtypes' tables."""

    def operand(self, fmt, element, x: torch.Tensor, **fields) -> Operand:
        q = quantize(x, QuantizeSpec(fmt, element, **fields))
        assert q.codes is not None
        return Operand(q.codes, q.scale, fmt, q.amax)

    def values(self, operand: Operand, element) -> np.ndarray:
        return bits(operand.codes).view(FP8[element.name]).astype(F)

    @FP8_ELEMENTS
    def test_one_scale(self, element, device):
        operand = self.operand(FLOAT8, element, sample(17, 33, torch.float32).to(device))
        assert operand.scale is not None
        expected = self.values(operand, element) * operand.scale.cpu().numpy()
        np.testing.assert_array_equal(dequantize(operand).cpu().numpy(), expected)

    @FP8_ELEMENTS
    @pytest.mark.parametrize("fmt, rows_a_tile", [(BLOCK_1D, 1), (BLOCK_2D, 128)])
    def test_float32_scale_a_tile(self, element, fmt, rows_a_tile, device):
        operand = self.operand(fmt, element, sample(130, 257, torch.float32).to(device))
        assert operand.scale is not None
        scale = operand.scale.cpu().numpy().repeat(rows_a_tile, 0)[:130].repeat(128, 1)[:, :257]
        np.testing.assert_array_equal(
            dequantize(operand).cpu().numpy(), self.values(operand, element) * scale
        )

    @FP8_ELEMENTS
    def test_exponent_a_block(self, element, device):
        operand = self.operand(MXFP8, element, sample(17, 65, torch.float32).to(device))
        scale = bits(operand.scale).view(ml_dtypes.float8_e8m0fnu).astype(F).repeat(32, 1)[:, :65]
        np.testing.assert_array_equal(
            dequantize(operand).cpu().numpy(), self.values(operand, element) * scale
        )

    def test_two_levels(self, device):
        operand = self.operand(NVFP4, E2M1, sample(18, 34, torch.float32).to(device))
        codes = unpack_fp4(operand.codes).cpu().numpy().view(ml_dtypes.float4_e2m1fn).astype(F)
        scale = bits(operand.scale).view(ml_dtypes.float8_e4m3fn).astype(F).repeat(16, 1)[:, :34]
        for amax in np.geomspace(1e-30, 1e30, 61, dtype=F):
            values = dequantize(operand._replace(amax=torch.tensor([amax], device=device)))
            np.testing.assert_array_equal(values.cpu().numpy(), codes * scale * (amax / F(6 * 448)))


@pytest.mark.parametrize("random_sign", [True, False])
def test_hadamard_transform_is_the_product_with_sylvesters_matrix(random_sign, device):
    h = np.array([[1.0]])
    for _ in range(4):
        h = np.block([[h, h], [h, -h]])
    signs = (
        np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])
        if random_sign
        else np.ones(16)
    )
    generator = torch.Generator().manual_seed(3)
    # Multiples of 1/64 below 4: their sums are exact in float32, so the order of additions cannot matter.
    x = (torch.randint(-255, 256, (5, 3, 48), generator=generator) / 64).to(torch.bfloat16)
    groups = wide(x).reshape(-1, 16).astype(np.float64)
    expected = torch.from_numpy((groups * signs) @ h / 4).to(torch.bfloat16).view(5, 3, 48)
    assert torch.equal(hadamard_transform(x.to(device), random_sign).cpu(), expected)


def test_hadamard_transform_keeps_products(device):
    generator = torch.Generator().manual_seed(4)
    a, b = torch.randn(2, 8, 64, generator=generator, dtype=torch.float32).to(device)
    transposed = hadamard_transform(a) @ hadamard_transform(b).t()
    torch.testing.assert_close(
        transposed.cpu(), (a.cpu().double() @ b.cpu().double().t()).float(), atol=1e-3, rtol=0
    )


def test_hadamard_transform_rejects_a_ragged_axis(device):
    with pytest.raises(ValueError, match="groups of 16, 24 elements"):
        hadamard_transform(torch.zeros(2, 24, device=device))
