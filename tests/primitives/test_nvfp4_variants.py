"""4over6 and per-row scales: worked values, an oracle in NumPy, and products with per-row factors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.support.nvfp4_random import cases
from transformer_engine.common.dispatch import use_backend
from transformer_engine.common.formats import (
    E2M1,
    E4M3,
    FLOAT8,
    MXFP8,
    NVFP4,
    NVFP4_256,
    NVFP4_ROWS,
    NVFP4_ROWS_256,
)
from transformer_engine.pytorch.primitives.gemm import Epilogue, Operand, gemm
from transformer_engine.pytorch.primitives.quantize import (
    QuantizeSpec,
    decode_e2m1,
    dequantize,
    quantize,
    unpack_fp4,
)

F = np.float32
LARGEST = np.finfo(np.float32).max
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def block(*values: float) -> torch.Tensor:
    """A row with 16 values: the given values, padded with zeros."""
    return torch.tensor([[*values, *[0.0] * (16 - len(values))]])


def four_over_six(x: torch.Tensor, form=NVFP4_256, error: str = "MAE", **options):
    return quantize(x, QuantizeSpec(form, E2M1, four_over_six=error, **options))


def decode_values(codes: torch.Tensor) -> torch.Tensor:
    return decode_e2m1(unpack_fp4(codes))


# A matrix whose maximum is 6 x 256 has the second-level scale 1: block scales and codes can be read off.
OUTLIER = block(1536.0)


class TestWorkedValues:
    @pytest.mark.parametrize(
        ("values", "scale", "codes"),
        [
            ((6.0, 4.5, -3.0), 1.5, [4.0, 3.0, -2.0, 0.0]),
            ((6.0, 2.0, -1.0), 1.0, [6.0, 2.0, -1.0, 0.0]),
        ],
        ids=["a quarter of the maximum", "a sixth of the maximum"],
    )
    def test_a_block_takes_the_scale_that_codes_it_exactly(self, values, scale, codes):
        q = four_over_six(torch.cat((OUTLIER, block(*values))))
        assert q.scale.float().flatten().tolist() == [256.0, scale]
        assert decode_values(q.codes)[1, :4].tolist() == codes

    def test_equal_errors_keep_6(self):
        q = four_over_six(torch.cat((OUTLIER, block(6.0), block(6.0, -3.0))))
        assert q.scale.float().flatten().tolist() == [256.0, 1.0, 1.0]

    def test_squared_errors_may_choose_otherwise(self):
        # By 6: 5 -> 4, error 1. By 4: 5 -> 4.5 and three times 1 -> 0.75, errors 0.5 and 0.25.
        x = torch.cat((OUTLIER, block(6.0, 5.0, 1.0, 1.0, 1.0)))
        assert four_over_six(x, error="MAE").scale.float()[1].item() == 1.0
        assert four_over_six(x, error="MSE").scale.float()[1].item() == 1.5

    def test_the_largest_block_keeps_6_where_scales_reach_448(self):
        x = torch.cat((block(2688.0, 2016.0), block(6.0, 4.5)))
        q = four_over_six(x, NVFP4)
        assert q.scale.float().flatten().tolist() == [448.0, 1.5]
        assert decode_values(q.codes)[0, :2].tolist() == [6.0, 4.0]
        # With scales up to 256 there is room: 384 maps 2304 to 6, and 1536 to 4.
        assert four_over_six(block(1536.0, 1152.0)).scale.float().tolist() == [[384.0]]

    def test_a_square_tile_chooses_once_for_its_256_values(self):
        # Row 1 alone would choose 4; the other rows outvote it.
        tile = torch.zeros(16, 16)
        tile[0, 0], tile[1, :2], tile[2:, 1] = 6.0, torch.tensor([6.0, 4.5]), 1.0
        x = torch.cat((torch.cat((tile, torch.zeros(16, 16)), 1), torch.zeros(16, 32)))
        x[31, 31] = 1536.0
        q = four_over_six(x, columnwise=True, two_dimensional=True)
        assert q.scale.float()[:16, 0].tolist() == [1.0] * 16
        assert torch.equal(decode_values(q.codes), decode_values(q.codes_t).t())
        assert torch.equal(q.scale_t.float()[:16, 0], q.scale.float()[:16, 0])

    def test_rows_are_scaled_by_their_own_maxima(self):
        x = torch.cat((block(6.0, 3.0), block(6e-6, 3e-6), block(), block(-1536.0)))
        q = quantize(x, QuantizeSpec(NVFP4_ROWS, E2M1, columnwise=False))
        assert torch.equal(q.amax, torch.tensor([6.0, 6e-6, 0.0, 1536.0]))
        assert q.scale.float().flatten().tolist() == [448.0, 448.0, 0.0, 448.0]
        assert torch.allclose(
            dequantize(Operand(q.codes, q.scale, NVFP4_ROWS, q.amax)), x, rtol=1e-6
        )

    def test_the_columnwise_direction_of_rows_has_one_maximum(self):
        x = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
        q = quantize(x, QuantizeSpec(NVFP4_ROWS, E2M1, columnwise=True))
        plain = quantize(x, QuantizeSpec(NVFP4, E2M1, columnwise=True))
        assert q.amax.shape == (32,) and q.amax_t.shape == (1,)
        for name in ("codes_t", "scale_t", "amax_t"):
            assert torch.equal(getattr(q, name), getattr(plain, name)), name

    def test_gathered_rows_with_one_scale_each_equal_the_rows_of_the_whole(self):
        x = torch.randn(8, 32) * torch.exp2(torch.arange(8.0))[:, None]
        spec = QuantizeSpec(NVFP4_ROWS, E2M1)
        full, parts = quantize(x, spec), [quantize(part, spec) for part in x.split(3)]
        for name in ("codes", "scale", "amax"):
            joined = torch.cat([getattr(part, name).view(torch.uint8) for part in parts])
            assert torch.equal(joined, getattr(full, name).view(torch.uint8)), name


def nearest(values: np.ndarray) -> np.ndarray:
    """E2M1 codes for float32 values: ties to the even code, NaN as +6."""
    even_first = [0, 2, 4, 6, 1, 3, 5, 7]  # argmin returns the first of equal distances
    distances = np.abs(
        GRID[even_first] - np.minimum(np.abs(values.astype(np.float64)), 6.0)[..., None]
    )
    codes = np.array(even_first, np.uint8)[distances.argmin(-1)]
    return np.where(np.isnan(values), 7, codes | np.where(np.signbit(values), 8, 0)).astype(
        np.uint8
    )


def e4m3(value: np.float32) -> np.float32:
    limited = value if np.isnan(value) else min(value, F(448))
    return F(np.array(limited, F).astype(ml_dtypes.float8_e4m3fn).astype(F))


class Oracle:
    """One direction of a matrix in float32, tile by tile, written from the format's description."""

    def __init__(self, x: np.ndarray, bound: int, error: str, per_row: bool, tile_rows: int):
        self.x, self.bound, self.error = x, bound, error
        self.codes = np.zeros(x.shape, np.uint8)
        self.scales = np.zeros((x.shape[0], -(-x.shape[1] // 16)), F)
        rows, depth = x.shape
        with np.errstate(all="ignore"):
            tensor = np.max(np.abs(x), initial=F(0))
            self.amax = np.max(np.abs(x), axis=1, initial=F(0)) if per_row else np.full(1, tensor)
            for r in range(0, rows, tile_rows):
                amax = self.amax[r] if per_row else tensor
                for c in range(0, depth, 16):
                    self.encode(r, min(r + tile_rows, rows), c, min(c + 16, depth), F(amax))

    def encode(self, r: int, r_end: int, c: int, c_end: int, amax: np.float32) -> None:
        tile = self.x[r:r_end, c:c_end]
        encode = min(F(self.bound * 6) / amax, LARGEST) if not np.isnan(amax) else amax
        encode = F(1) if amax == 0 or encode == 0 else F(encode)
        largest = F(np.max(np.abs(tile)))
        if not self.error:
            expected = F(largest * F(encode * F(1 / 6)))
            codes, scale = self.candidate(tile, expected, encode)
        else:
            base = F(F(largest / F(6)) * encode)
            six, four = (
                self.candidate(tile, reference, encode) for reference in (base, F(base * F(1.5)))
            )
            takes_four = self.measure(tile, *four, amax, encode) < self.measure(
                tile, *six, amax, encode
            )
            codes, scale = four if takes_four else six
        self.codes[r:r_end, c:c_end] = codes
        self.scales[r:r_end, c // 16] = scale

    @staticmethod
    def candidate(tile: np.ndarray, expected: np.float32, encode: np.float32):
        scale = e4m3(expected)
        multiplier = F(F(1) / F(scale * F(F(1) / encode)))
        multiplier = multiplier if np.isnan(multiplier) else min(multiplier, LARGEST)
        return nearest(tile * multiplier), scale

    def measure(self, tile, codes, scale, amax, encode) -> np.float32:
        products = (GRID[codes & 7] * np.where(codes & 8, -1.0, 1.0)).astype(F) * scale
        if self.error.startswith("fast"):
            differences = products - tile * encode
        else:
            differences = products * amax / F(6 * self.bound) - tile
        terms = differences * differences if self.error.endswith("MSE") else np.abs(differences)
        assert terms.dtype == F
        rows = list(np.add.accumulate(terms, axis=1)[:, -1])  # in order, unlike np.sum
        if len(rows) == 1:
            return rows[0]
        # Rows past the end of the matrix have the same error as zeros, NaN where the maximum is infinite.
        absent = (
            F(F(F(F(0) * scale) * amax) / F(6 * self.bound))
            if not self.error.startswith("fast")
            else F(0) * scale
        )
        rows += [F(abs(absent))] * (16 - len(rows))
        while len(rows) > 1:
            half = len(rows) // 2
            rows = [F(a + b) for a, b in zip(rows[:half], rows[half:], strict=True)]
        return rows[0]


@pytest.mark.parametrize("part", range(4))
def test_codes_scales_and_maxima_equal_the_oracle(part):
    for number, (name, spec, x) in enumerate(cases(336)):
        if number % 4 != part or x.numel() > 1200:
            continue
        q = quantize(x, spec)
        values = x.float().numpy()
        bound, tile_rows = int(spec.format.levels[1].maximum), 16 if spec.two_dimensional else 1
        if spec.rowwise:
            oracle = Oracle(values, bound, spec.four_over_six, spec.format.row_scaled, tile_rows)
            assert_direction(name, oracle, q.codes, q.scale, q.amax)
        if spec.columnwise:
            oracle = Oracle(
                values if spec.two_dimensional else values.T,
                bound,
                spec.four_over_six,
                False,
                tile_rows,
            )
            if spec.two_dimensional:
                oracle.codes = oracle.codes.T
                assert np.array_equal(unpack_fp4(q.codes_t).numpy(), oracle.codes), name
            else:
                assert_direction(name, oracle, q.codes_t, q.scale_t, q.amax_t)


def assert_direction(name, oracle: Oracle, codes, scale, amax) -> None:
    assert np.array_equal(amax.numpy(), oracle.amax, equal_nan=True), name
    assert np.array_equal(scale.float().numpy(), oracle.scales, equal_nan=True), name
    assert np.array_equal(unpack_fp4(codes).numpy(), oracle.codes), name


@pytest.mark.parametrize("error", ["MAE", "MSE"])
@pytest.mark.parametrize(
    "form", [NVFP4, NVFP4_256, NVFP4_ROWS, NVFP4_ROWS_256], ids=lambda form: form.name
)
def test_no_block_has_a_larger_error_than_with_its_maximum_at_6(form, error):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    errors = []
    for choice in ("", error):
        q = quantize(x, QuantizeSpec(form, E2M1, four_over_six=choice))
        difference = (
            (dequantize(Operand(q.codes, q.scale, form, q.amax)) - x).double().view(64, 16, 16)
        )
        errors.append(difference.abs().sum(-1) if error == "MAE" else difference.square().sum(-1))
    assert (errors[1] <= errors[0] * (1 + 1e-4)).all()
    assert errors[1].sum() < 0.97 * errors[0].sum()


def operand(form, element, rows: int, depth: int, seed: int, **options) -> Operand:
    x = torch.randn(rows, depth, generator=torch.Generator().manual_seed(seed))
    x = x * torch.exp2(torch.arange(rows) % 9 - 4.0)[:, None]
    if form is None:
        return Operand(x, dtype=torch.float32)
    q = quantize(x, QuantizeSpec(form, element, **options))
    return Operand(q.codes, q.scale, form, q.amax if form.levels else None, torch.float32)


PARTNERS = {
    "rows": (NVFP4_ROWS, E2M1),
    "rows up to 256": (NVFP4_ROWS_256, E2M1),
    "plain": (NVFP4, E2M1),
    "up to 256": (NVFP4_256, E2M1),
    "mxfp8": (MXFP8, E4M3),
    "one scale": (FLOAT8, E4M3),
    "unquantized": (None, None),
}


@pytest.mark.parametrize("partner", PARTNERS)
@pytest.mark.parametrize("transposed", [False, True])
def test_products_with_per_row_scales_equal_dequantized_operand_products(partner, transposed):
    a, b = operand(NVFP4_ROWS, E2M1, 24, 64, 0), operand(*PARTNERS[partner], 40, 64, 1)
    a, b = (b, a) if transposed else (a, b)
    bias, into = torch.randn(b.rows), torch.randn(a.rows, b.rows)
    expected = dequantized(a) @ dequantized(b).T
    actual = gemm(a, b, Epilogue(torch.float32))
    assert (actual - expected).abs().max() <= 1e-6 * expected.abs().max()
    actual = gemm(a, b, Epilogue(torch.float32, bias=bias, out=into.clone(), accumulate=True))
    assert (actual - (expected + bias + into)).abs().max() <= 1e-6 * expected.abs().max()


def dequantized(x: Operand) -> torch.Tensor:
    return dequantize(x._replace(dtype=torch.float32)).double() if x.format else x.codes.double()


def test_one_factor_per_row_is_applied_to_the_sum_at_unit_maxima():
    a, b = operand(NVFP4_ROWS, E2M1, 24, 64, 0), operand(NVFP4_256, E2M1, 40, 64, 1)
    unit = [o._replace(amax=torch.full_like(o.amax, o.format.unit_amax)) for o in (a, b)]
    sums = torch.mm(
        *(
            dequantize(o).t() if transposed else dequantize(o)
            for o, transposed in zip(unit, (0, 1), strict=True)
        )
    )
    expected = sums * (1.0 / (6 * 448 * 6 * 256)) * (a.amax[:, None] * b.amax)
    with use_backend(gemm="reference"):
        assert torch.equal(gemm(a, b, Epilogue(torch.float32)), expected)


def test_a_product_row_does_not_depend_on_other_rows():
    a, b = operand(NVFP4_ROWS, E2M1, 24, 64, 0), operand(NVFP4, E2M1, 40, 64, 1)
    full = gemm(a, b, Epilogue(torch.float32))
    for row in (0, 11):
        alone = Operand(
            a.codes[row : row + 1], a.scale[row : row + 1], a.format, a.amax[row : row + 1], a.dtype
        )
        assert torch.allclose(
            gemm(alone, b, Epilogue(torch.float32)), full[row], rtol=1e-6, atol=1e-30
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": NVFP4_ROWS, "two_dimensional": True}, "not of nvfp4_rows"),
        ({"form": NVFP4_ROWS, "hadamard": True}, "not to nvfp4_rows"),
        ({"form": NVFP4_ROWS, "stochastic": True}, "not to nvfp4_rows"),
        ({"form": NVFP4, "hadamard": True, "four_over_six": "MAE"}, "hadamard=False"),
        ({"form": NVFP4, "stochastic": True, "four_over_six": "MAE"}, "stochastic=False"),
        ({"form": NVFP4, "four_over_six": "MAX"}, "choose one of MAE, MSE"),
        (
            {"form": MXFP8, "element": E4M3, "four_over_six": "MAE"},
            "belongs to nvfp4, not to mxfp8",
        ),
    ],
)
def test_options_that_exclude_each_other_are_named(options, message):
    form, element = options.pop("form"), options.pop("element", E2M1)
    with pytest.raises(ValueError, match=message):
        QuantizeSpec(form, element, **options)
