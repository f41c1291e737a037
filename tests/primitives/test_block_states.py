"""Block-scaled optimizer states: codes, exponents, stochastic rounding and its random words."""

from __future__ import annotations

import pytest
import torch

from transformer_engine.pytorch.primitives.multi_tensor.block_states import (
    FIRST,
    SECOND,
    decode,
    encode,
    random_words,
    round_stochastically,
)

CPU = torch.device("cpu")
FORMATS = pytest.mark.parametrize("of", [FIRST, SECOND], ids=["first", "second"])


def sample(count, of, seed=0, scale=1.0):
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale
    return x if of.signed else x.square()


@FORMATS
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e9])
def test_values_of_normal_magnitude_have_three_mantissa_bits(of, scale):
    if not of.signed:
        scale = scale**0.5
    x = sample(1000, of, scale=scale)
    y = decode(*encode(x, of), of)
    relative = ((y - x).abs() / x.abs())[x.abs() > x.abs().max() * 2.0**-12]
    assert 0.05 < relative.max() <= 2.0**-4
    # The largest codes of both formats are those of E4M3 and, without its sign, of float16.
    if of.signed:
        scales = y.abs().max() / x.abs().max()
        assert abs(scales - 1) <= 2.0**-4


def test_first_moments_have_the_codes_of_e4m3():
    x = sample(128, FIRST)
    codes, exponents = encode(x, FIRST)
    scaled = x * 2.0 ** (127 + 7 - exponents.to(torch.float32).item())
    assert torch.equal(codes, scaled.to(torch.float8_e4m3fn).view(torch.uint8))


def test_second_moments_have_the_upper_bits_of_float16():
    x = sample(128, SECOND)
    codes, exponents = encode(x, SECOND)
    decoded = (codes.to(torch.int16) << 7).view(torch.float16).float()
    scaled = x * 2.0 ** (127 + 14 - exponents.to(torch.float32).item())
    assert torch.equal(decode(codes, exponents, SECOND), decoded * (x / scaled)[0].item())
    assert ((decoded - scaled).abs() <= scaled * 2.0**-4).all()


@FORMATS
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_decoded_values_are_encoded_without_an_error(of, stochastic):
    count = 128 * 2000
    exponents = torch.randint(-24, 1, (count,), generator=torch.Generator().manual_seed(1))
    x = sample(count, of) * torch.exp2(exponents.float())
    words = random_words(0, count, 3, CPU) if stochastic else None
    y = decode(*encode(x, of, words), of)
    assert torch.equal(decode(*encode(y, of), of), y)


@FORMATS
def test_a_magnitude_that_rounds_up_to_a_power_of_two_has_its_exponent(of):
    for largest, shift in ((1.875, 0), (1.93, 0), (1.9375, 1), (1.99, 1), (2.0, 1)):
        x = torch.full((128,), largest * 2.0**-20)
        codes, exponents = encode(x, of)
        assert exponents.tolist() == [127 - 20 + shift]
        assert torch.equal(encode(decode(codes, exponents, of), of)[0], codes)


@FORMATS
def test_zeros_stay_zero_and_positive_second_moments_stay_positive(of):
    x = torch.zeros(256)
    assert not decode(*encode(x, of), of).any()
    x[130], x[140] = 1.0, 1e-30
    for words in (None, random_words(0, 256, 1, CPU)):
        y = decode(*encode(x, of, words), of)
        assert (y[140] > 0) == (not of.signed) and not y[:130].any()


@FORMATS
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_nonfinite_value_makes_its_block_nan(of, value):
    x = sample(300, of)
    x[200] = value
    y = decode(*encode(x, of), of)
    assert y[128:256].isnan().all() and y[:128].isfinite().all() and y[256:].isfinite().all()


@FORMATS
def test_stochastic_rounding_has_the_exact_mean(of):
    x = sample(128, of) * torch.logspace(0, -6, 128)
    rounds = 4000
    total = torch.zeros(128, dtype=torch.float64)
    for seed in range(rounds):
        total += decode(*encode(x, of, random_words(0, 128, seed, CPU)), of)
    top = 2.0 ** (x.abs().max().log2().floor().item() - of.top)  # the scale
    unit = torch.maximum(x.abs() * 2.0**-3, torch.tensor(top * 2.0 ** -(9 if of.signed else 17)))
    # Five standard deviations of the mean; one rounding has at most half a unit.
    counts = x != 0 if of.signed else x.abs() > top * 2.0**-17
    assert ((total / rounds - x).abs() < 5 * 0.5 * unit / rounds**0.5)[counts].all()


def test_parameters_are_rounded_stochastically_with_the_exact_mean():
    x = torch.tensor([1.0, 1.001, -1.0037, 3e-39, 0.0, -2.5])
    words = random_words(0, 6 * 20000, 7, CPU).view(20000, 6)
    rounded = round_stochastically(x.expand(20000, 6), words)
    assert torch.equal(rounded[:, [0, 4, 5]].float(), x[[0, 4, 5]].expand(20000, 3))
    mean = rounded.double().mean(0)
    assert ((mean - x).abs() <= 5 * 0.5 * 2.0**-7 * x.abs() / 20000**0.5).all()
    special = torch.tensor([torch.inf, -torch.inf, torch.nan])
    kept = round_stochastically(special, torch.full((3,), 0xFFFF))
    assert kept[0] == torch.inf and kept[1] == -torch.inf and kept[2].isnan()


def test_random_words_are_uniform_and_differ_between_steps():
    first, second = (random_words(0, 1 << 16, step, CPU) for step in (1, 2))
    for words in (first, second):
        assert words.unique().numel() > 0.999 * words.numel()
        for bit in range(32):
            assert abs(((words >> bit) & 1).double().mean() - 0.5) < 5 * 0.5 / 256
    for multiplier in (1, FIRST.multiplier, SECOND.multiplier):
        a, b = (((x * multiplier) & 0xFFFFFFFF).double() / 2**32 - 0.5 for x in (first, second))
        assert abs((a * b).mean()) < 5 / 12 / 256
    assert torch.equal(random_words(100, 50, 1, CPU), first[100:150])
