"""Division and multiplication of scales in integers give what IEEE arithmetic gives, subnormals included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jax.compiled import array
from transformer_engine.jax.primitives import exact

pytestmark = pytest.mark.usefixtures("as_users_compile")

EDGES = [
    0,
    1,
    2,
    0x400000,
    0x400001,
    0x7FFFFF,
    0x800000,
    0x3F7FFFFF,
    0x3F800000,
    0x7F7FFFFF,
    0x7F800000,
    0x7FC00000,
]


@pytest.fixture
def pairs() -> tuple[np.ndarray, np.ndarray]:
    """Bit patterns drawn evenly over all magnitudes, and every pair of edge values."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, 0x7F800001, (2, 200_000)).astype(np.int32)
    edges = np.asarray(EDGES, np.int32)
    first = np.concatenate([drawn[0], np.repeat(edges, len(edges))])
    second = np.concatenate([drawn[1], np.tile(edges, len(edges))])
    return first.view(np.float32), second.view(np.float32)


def same(got, expected: np.ndarray) -> None:
    got = np.asarray(got)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.int32)[~nan], expected.view(np.int32)[~nan])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("ours", "ieee"), [(exact.divide, np.divide), (exact.multiply, np.multiply)]
)
def test_scale_arithmetic_equals_ieee(ours, ieee, compiled, pairs):
    first, second = pairs
    with np.errstate(all="ignore"):
        expected = ieee(first, second)
    function = jax.jit(ours) if compiled else ours
    same(function(jnp.asarray(first), jnp.asarray(second)), expected)


@pytest.mark.parametrize("units", [-7, -2, 0, 2, 7])
def test_a_quotient_does_not_depend_on_the_rounding_of_float_division(units):
    rng = np.random.default_rng(1)
    n, d = rng.integers(2**23, 2**24, (2, 100_000), np.uint32)
    n[:1000] = d[:1000] + np.arange(1000)  # quotients next to 1, and 1 itself
    d[1000:1100], n[1000:1100] = 2**23 + np.arange(100), 2**24 - 1  # and next to 2
    n = np.where(n < d, n << 1, n)
    estimate = (n.astype(np.float32) / d.astype(np.float32)).view(np.int32) + units
    got = jax.jit(exact._quotient)(n, d, estimate.view(np.float32))
    quotient, rest = np.divmod(n.astype(np.uint64) << 25, d)
    np.testing.assert_array_equal(got, quotient | (rest != 0))


def test_a_product_with_a_subnormal_scale_is_exact():
    scale = np.asarray([2.0**-130, 1.1 * 2.0**-127, 2.0**-101, 3.0], np.float32)
    values = np.asarray([448.0, 57344.0, -30.0, 7.0], np.float32)
    same(jax.jit(exact.scaled)(jnp.asarray(values), jnp.asarray(scale)), values * scale)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_magnitudes_have_the_order_of_their_bit_patterns(dtype):
    x = array([0.0, -0.0, 1.5, -2.0, np.inf, np.nan, 2.0**-14], dtype)
    bits = np.asarray(exact.magnitude_bits(x))
    expected = np.abs(np.asarray(x, np.float32)).view(np.int32)
    np.testing.assert_array_equal(bits[:5], expected[:5])
    assert bits[5] > bits[4] and bits[6] == expected[6]
