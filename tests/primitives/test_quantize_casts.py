"""Casts to narrow elements, bit for bit against ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from transformer_engine.common.formats import E4M3, E5M2, Element
from transformer_engine.pytorch.primitives.quantize import (
    cast,
    decode_e2m1,
    e8m0_from_float,
    e8m0_to_float,
    encode_e2m1,
    pack_fp4,
    torch_dtype,
    unpack_fp4,
)

NUMPY_DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def saturate_and_encode(values: np.ndarray, element: Element) -> np.ndarray:
    """ml_dtypes' codes after saturation, which ml_dtypes itself does not do."""
    limited = np.clip(values.astype(np.float32), -element.maximum, element.maximum)
    with np.errstate(invalid="ignore"):
        return limited.astype(NUMPY_DTYPES[element.name]).view(np.uint8)


def assert_same_fp8(actual: torch.Tensor, values: np.ndarray, element: Element) -> None:
    codes = actual.view(torch.uint8).cpu().numpy()
    expected = saturate_and_encode(values, element)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(codes[number], expected[number])
    assert np.isnan(codes[~number].view(NUMPY_DTYPES[element.name]).astype(np.float32)).all()


def every_bit_pattern(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).to(torch.float32)


def around_ties(element: Element) -> torch.Tensor:
    """Every code's value, every midpoint, and the float32 numbers next to both."""
    grid = np.arange(256, dtype=np.uint8).view(NUMPY_DTYPES[element.name]).astype(np.float32)
    grid = np.unique(grid[np.isfinite(grid)])
    midpoints = ((grid[1:].astype(np.float64) + grid[:-1]) / 2).astype(np.float32)
    points = np.concatenate([grid, midpoints])
    up, down = np.float32(np.inf), np.float32(-np.inf)
    return torch.from_numpy(
        np.concatenate([points, np.nextafter(points, up), np.nextafter(points, down)])
    )


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)
class TestFloat8:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_every_16_bit_value_casts_as_ml_dtypes(self, element, dtype, device):
        values = every_bit_pattern(dtype)
        assert_same_fp8(cast(values.to(device), element), values.numpy(), element)

    def test_float32_values_next_to_ties_cast_as_ml_dtypes(self, element, device):
        values = around_ties(element)
        assert_same_fp8(cast(values.to(device), element), values.numpy(), element)

    def test_random_float32_bits_cast_as_ml_dtypes(self, element, device):
        generator = torch.Generator().manual_seed(0)
        bits = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), generator=generator).to(torch.int32)
        values = bits.view(torch.float32)
        assert_same_fp8(cast(values.to(device), element), values.numpy(), element)

    @pytest.mark.parametrize("length", [1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65])
    def test_vector_loop_and_its_tail_agree(self, element, length, device):
        values = around_ties(element)[:65]
        short = cast(values[:length].to(device), element).view(torch.uint8)
        long = cast(values.to(device), element).view(torch.uint8)
        assert torch.equal(short, long[:length])

    def test_infinity_and_overflow_become_the_maximum(self, element, device):
        top = element.maximum
        values = torch.tensor([torch.inf, -torch.inf, 3e38, -3e38, top * 1.0625], device=device)
        assert cast(values, element).to(torch.float32).tolist() == [top, -top, top, -top, top]

    def test_negative_zero_keeps_its_sign(self, element, device):
        codes = cast(torch.tensor([-0.0, 0.0, -1e-30], device=device), element).view(torch.uint8)
        assert codes.tolist() == [0x80, 0, 0x80]

    def test_dtype_is_the_elements(self, element, device):
        assert cast(torch.zeros(1, device=device), element).dtype == torch_dtype(element)


class TestE2M1:
    def expected(self, values: np.ndarray) -> np.ndarray:
        return np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_every_16_bit_value_encodes_as_ml_dtypes(self, dtype, device):
        values = every_bit_pattern(dtype)
        values = values[~values.isnan()]
        codes = encode_e2m1(values.to(device)).cpu().numpy()
        np.testing.assert_array_equal(codes, self.expected(values.numpy()))

    def test_values_next_to_ties_encode_as_ml_dtypes(self, device):
        points = np.array(
            [0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6], np.float32
        )
        values = np.concatenate(
            [points, np.nextafter(points, np.float32(9)), np.nextafter(points, -points)]
        )
        values = np.concatenate([values, -values])
        codes = encode_e2m1(torch.from_numpy(values).to(device)).cpu().numpy()
        np.testing.assert_array_equal(codes, self.expected(values))

    def test_ties_go_to_the_even_code(self, device):
        ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=device)
        assert encode_e2m1(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]

    def test_nan_becomes_plus_six(self, device):
        assert encode_e2m1(torch.tensor([torch.nan, -torch.nan], device=device)).tolist() == [7, 7]

    def test_every_code_decodes_as_ml_dtypes_and_encodes_back(self, device):
        codes = torch.arange(16, dtype=torch.uint8, device=device)
        values = decode_e2m1(codes)
        expected = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        np.testing.assert_array_equal(values.cpu().numpy().view(np.int32), expected.view(np.int32))
        assert torch.equal(encode_e2m1(values), codes)

    def test_encoding_does_not_depend_on_the_default_dtype(self, device):
        values = torch.linspace(-7, 7, 999, dtype=torch.float32, device=device)
        before = encode_e2m1(values)
        torch.set_default_dtype(torch.float64)
        try:
            after = encode_e2m1(values)
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(before, after)


class TestStochasticE2M1:
    """code = floor to the grid of |x| + u * gap."""

    def test_follows_the_rule(self, device):
        generator = torch.Generator().manual_seed(1)
        values = torch.rand(4096, generator=generator) * 14 - 7
        u = torch.rand(4096, generator=generator)
        grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        magnitude = np.minimum(values.abs().double().numpy(), 6)
        gap = np.where(magnitude < 2, 0.5, np.where(magnitude < 4, 1.0, 2.0))
        expected = np.searchsorted(grid, magnitude + u.double().numpy() * gap, side="right") - 1
        expected = expected | np.where(values.numpy() < 0, 8, 0)
        codes = encode_e2m1(values.to(device), u.to(device)).cpu().numpy()
        np.testing.assert_array_equal(codes, expected)

    def test_a_grid_value_stays_for_every_random_number(self, device):
        codes = torch.arange(16, dtype=torch.uint8, device=device)
        for u in (0.0, 0.5, 1.0 - 2.0**-24):
            assert torch.equal(
                encode_e2m1(decode_e2m1(codes), torch.full((16,), u, device=device)), codes
            )

    def test_zero_rounds_down_and_almost_one_rounds_up(self, device):
        values = torch.tensor([0.1, 0.6, 1.1, 1.6, 2.1, 3.1, 4.1, 5.9], device=device)
        down = encode_e2m1(values, torch.zeros(8, device=device))
        up = encode_e2m1(values, torch.full((8,), 1.0 - 2.0**-24, device=device))
        assert down.tolist() == [0, 1, 2, 3, 4, 5, 6, 6]
        assert up.tolist() == [1, 2, 3, 4, 5, 6, 7, 7]

    def test_mean_is_the_value(self, device):
        u = (torch.arange(4096, device=device) + 0.5) / 4096
        for value in (0.2, 1.3, 2.7, 5.1):
            decoded = decode_e2m1(encode_e2m1(torch.full((4096,), value, device=device), u))
            assert decoded.mean().item() == pytest.approx(value, abs=2 / 4096)


class TestPacking:
    def test_the_even_index_takes_the_low_nibble(self, device):
        codes = torch.tensor([[1, 2, 15, 8]], dtype=torch.uint8, device=device)
        assert pack_fp4(codes).tolist() == [[0x21, 0x8F]]

    def test_unpacking_undoes_packing(self, device):
        packed = torch.arange(256, dtype=torch.uint8, device=device).view(8, 32)
        assert torch.equal(pack_fp4(unpack_fp4(packed)), packed)

    def test_an_odd_number_of_codes_is_rejected(self, device):
        with pytest.raises(ValueError, match=r"K=3 .*multiple of 2"):
            pack_fp4(torch.zeros(1, 3, dtype=torch.uint8, device=device))


class TestE8M0:
    def test_every_code_decodes_as_ml_dtypes(self, device):
        codes = torch.arange(256, dtype=torch.uint8)
        expected = codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        np.testing.assert_array_equal(e8m0_to_float(codes.to(device)).cpu().numpy(), expected)

    def test_every_exponent_rounds_up(self, device):
        """The least power of two among ml_dtypes' 255 that is not below v; the largest when none is."""
        mantissas = [0, 1, 2, 0x200000, 0x3FFFFF, 0x400000, 0x400001, 0x600000, 0x7FFFFE, 0x7FFFFF]
        bits = np.array([(e << 23) | m for e in range(255) for m in mantissas], np.int32)
        values = bits.view(np.float32)
        powers = np.arange(255, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        expected = np.minimum(np.searchsorted(powers, values.astype(np.float64), side="left"), 254)
        codes = e8m0_from_float(torch.from_numpy(values).to(device)).cpu().numpy()
        np.testing.assert_array_equal(codes, expected)

    def test_specials(self, device):
        values = torch.tensor([0.0, torch.inf, torch.nan, 3.4e38, 1e-45], device=device)
        assert e8m0_from_float(values).tolist() == [0, 254, 255, 254, 0]

    def test_every_power_of_two_survives(self, device):
        codes = torch.arange(255, dtype=torch.uint8, device=device)
        assert torch.equal(e8m0_from_float(e8m0_to_float(codes)), codes)
