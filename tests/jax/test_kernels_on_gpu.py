"""Kernels run from JAX: codes have the reference's bits, values are close to it, on a GPU or in the interpreter."""

from __future__ import annotations

import contextlib
import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, PartitionSpec

from tests.jax.bits import assert_same_bytes, matrix, to_torch
from tests.jax.compiled import normal, ones
from tests.jax.test_quantize_bits import (
    CHOSEN,
    SPECS,
    fits,
    random_numbers,
    theirs_forced,
    torch_spec,
)
from tests.support.tolerances import ROUNDED
from transformer_engine.common.dispatch import use_backend
from transformer_engine.common.formats import E4M3, FLOAT8
from transformer_engine.common.quantize_spec import QuantizeSpec
from transformer_engine.jax.activation import activation
from transformer_engine.jax.layernorm import layernorm
from transformer_engine.jax.primitives import launching, quantize, rope, softmax
from transformer_engine.jax.primitives.operand import Operand
from transformer_engine.jax.runtime.platform import has_gpu
from transformer_engine.jax.runtime.residual import bypass
from transformer_engine.pytorch.primitives import quantize as theirs
from transformer_engine.pytorch.primitives.operand import Operand as TorchOperand

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("as_users_compile")]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ALL = ("jax_norm", "jax_activation", "jax_softmax", "jax_rope", "jax_quantize")


def test_first_xla_compiles_a_triton_kernel_on_this_machine():
    """If this fails every other test of this file does: read this one's message."""
    assert has_gpu() or INTERPRETED, (
        f"jax sees no GPU, only {jax.devices()}; install jax-cuda13-plugin and jax-cuda13-pjrt of jax {jax.__version__}"
    )
    assert launching.kernels_unsupported_reason() is None, launching.kernels_unsupported_reason()


def test_second_a_kernel_runs_and_its_output_is_zero_initialized():
    from transformer_engine.common.kernels import cast

    x = jnp.linspace(-3, 2, 8 * 64).reshape(8, 64)
    for _ in range(3):
        (amax,) = jax.jit(lambda x: launching.run(cast.absolute_maximum(x.size), [x]))(x)
        assert amax.shape == (1,) and float(amax[0]) == 3.0


def test_third_an_array_that_a_kernel_writes_in_place_is_its_last_result():
    from transformer_engine.common.kernels import cast

    launch = cast.cast((64, 128), E4M3, True, True, records=True)
    x = jnp.linspace(-1, 1, 64 * 128).reshape(64, 128).astype(jnp.bfloat16)
    scale, record = jnp.full(1, 2.0), jnp.full(1, 0.25)
    codes, codes_t, inverse, saved = jax.jit(lambda *a: launching.run(launch, a))(x, scale, record)
    expected = (x.astype(jnp.float32) * 2).astype(jnp.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(codes, np.float32), np.asarray(expected, np.float32))
    np.testing.assert_array_equal(
        np.asarray(codes_t, np.float32), np.asarray(expected.T, np.float32)
    )
    assert (float(inverse[0]), float(saved[0]), float(record[0])) == (0.5, 1.0, 0.25)


def test_a_kernel_runs_in_a_loop_under_vmap_and_inside_shard_map():
    from transformer_engine.common.kernels import cast

    def maximum(x):
        return launching.run(cast.absolute_maximum(512), [x])[0]

    x = jnp.arange(3 * 8 * 64, dtype=jnp.float32).reshape(3, 8, 64)
    expected = np.asarray(x).max(axis=(1, 2))[:, None]
    np.testing.assert_array_equal(jax.jit(lambda x: jax.lax.map(maximum, x))(x), expected)
    if INTERPRETED:
        return  # the following calls are traced, which the interpreter does not support
    np.testing.assert_array_equal(jax.jit(jax.vmap(maximum))(x), expected)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("x")
    mapped = jax.shard_map(maximum, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    np.testing.assert_array_equal(jax.jit(mapped)(x[0]), expected[0])


# Quantization: same bytes as PyTorch's reference.


def compare(name: str, spec: QuantizeSpec, x: np.ndarray, scale: float | None = None) -> None:
    random = random_numbers(spec, x.shape)
    argument = None if scale is None else jnp.full(1, scale, jnp.float32)
    drawn = None if random is None else tuple(map(jnp.asarray, random))
    with use_backend(jax_quantize="triton"):
        call = jax.jit(
            lambda x, scale, random: quantize.quantize(x, spec, multiplier=scale, random=random)
        )
        result = call(jnp.asarray(x), argument, drawn)
    with theirs_forced():
        expected = theirs.quantize(
            to_torch(x),
            torch_spec(spec),
            multiplier=None if scale is None else torch.full((1,), scale),
            random=None if random is None else tuple(map(torch.from_numpy, random)),  # pyright: ignore
        )
    for field in expected._fields:
        assert_same_bytes(getattr(result, field), getattr(expected, field), f"{name} {field}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", SPECS)
def test_codes_and_scales_have_the_bytes_of_the_torch_reference(name, dtype):
    # Several tiles and a partial tile in each direction: tiles have 64 elements, or one block.
    shape = (80, 98) if INTERPRETED and "block" not in name else (144, 130)
    for seed, kind in enumerate(("normal", "special", "small", "zero")):
        if kind == "small" and "hadamard" in name:
            continue  # differences of small elements are subnormal
        compare(f"{name} {kind}", SPECS[name], matrix(kind, shape, dtype, seed))
    if dtype == "bfloat16":
        full = (128, 128) if INTERPRETED and "block" not in name else (256, 128)
        compare(name, SPECS[name], matrix("spread", full, dtype))


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("name", SPECS)
def test_one_direction_alone_equals_the_torch_reference(name, direction):
    only = {"rowwise": direction == "rowwise", "columnwise": direction == "columnwise"}
    spec = dataclasses.replace(SPECS[name], **only)
    if fits(spec, (48, 62)):
        compare(name, spec, matrix("spread", (48, 62), "bfloat16"))


@pytest.mark.parametrize("scale", [0.37, 2.0**40])
def test_a_given_scale_is_used_and_the_maximum_recorded(scale):
    compare(
        "given",
        QuantizeSpec(FLOAT8, E4M3, columnwise=True),
        matrix("spread", (33, 40), "float32"),
        scale,
    )


@pytest.mark.parametrize("name", CHOSEN)
def test_dequantized_values_match_the_torch_reference(name):
    spec, x = SPECS[name], matrix("spread", (144, 130), "bfloat16")
    result = jax.jit(lambda x: quantize.quantize(x, spec))(jnp.asarray(x))
    operand = Operand(result.codes, result.scale, result.amax, spec.format, jnp.dtype(x.dtype))
    got = jax.jit(quantize.dequantize)(operand)
    expected, dtype = theirs.quantize(to_torch(x), torch_spec(spec)), to_torch(x).dtype
    reference = theirs.dequantize(
        TorchOperand(expected.codes, expected.scale, spec.format, expected.amax, dtype)  # pyright: ignore
    )
    np.testing.assert_array_equal(np.asarray(got, np.float32), reference.float().numpy())


# Values: equal to the reference, up to rounding in their dtype.


def draw_input(*shape, dtype=jnp.bfloat16, seed=0):
    return normal(jax.random.key(seed), shape).astype(dtype)


def add_residual(x, gamma, beta, kind):
    """Add the residual around a norm to its output: the norm's backward kernel adds the residual's gradient."""
    with bypass(x, True) as residual:
        y = layernorm(x, gamma, beta, kind)
    assert residual.value is not x
    return y + residual.value


def packed_rotation(x, heads, interleaved, sequence_first):
    """Stacked q, k and v, with angles that differ between positions and pairs."""
    angles = jnp.arange(6.0)[:, None] * jnp.linspace(0.1, 1, 8)
    return jnp.stack(rope.rotate_packed(x, angles, heads, interleaved, sequence_first))


GAMMA, BETA = (np.linspace(low, low + 1, 64, dtype=np.float32) for low in (0.5, -1.0))
NARROW = GAMMA.astype(jnp.bfloat16)


def draw_mask(*shape):
    """Mask with this shape and different True positions in each row."""
    places = np.arange(np.prod(shape)).reshape(shape)
    return jnp.asarray(places * 7 % 5 == 0)


CASES = {
    "layernorm": (
        lambda x, g, b: layernorm(x, g, b, "layernorm", True),
        [draw_input, (4, 6, 64)],
        [GAMMA, BETA],
    ),
    "rmsnorm": (lambda x, g: layernorm(x, g, None, "rmsnorm"), [draw_input, (40, 64)], [GAMMA]),
    "layernorm-residual": (
        lambda x, g, b: add_residual(x, g, b, "layernorm"),
        [draw_input, (4, 6, 64)],
        [GAMMA, BETA],
    ),
    "rmsnorm-residual": (
        lambda x, g: add_residual(x, g, None, "rmsnorm"),
        [draw_input, (40, 64)],
        [GAMMA],
    ),
    "narrow": (
        lambda x, g, b: layernorm(x, g, b, "layernorm"),
        [draw_input, (40, 64)],
        [NARROW, NARROW],
    ),
    "mixed": (
        lambda x, g, b: layernorm(x, g, b, "layernorm"),
        [draw_input, (40, 64)],
        [NARROW, BETA],
    ),
    "gelu": (lambda x: activation(x, ("gelu",)), [draw_input, (4, 1, 64)], []),
    "swiglu": (lambda x: activation(x, ("silu", "linear")), [draw_input, (4, 2, 64)], []),
    "srelu": (lambda x: activation(x, ("squared_relu", "linear")), [draw_input, (4, 2, 64)], []),
    "clamped": (
        lambda x: activation(x, ("clamped_silu", "clamped_linear")),
        [draw_input, (4, 2, 64)],
        [],
    ),
    "softmax": (
        lambda x: softmax.masked_softmax(x, jnp.arange(16) > 12, None),
        [draw_input, (2, 3, 8, 16)],
        [],
    ),
    "softmax-rows": (
        lambda x: softmax.masked_softmax(x, draw_mask(2, 1, 8, 16), None),
        [draw_input, (2, 3, 8, 16)],
        [],
    ),
    "softmax-heads": (
        lambda x: softmax.masked_softmax(x, draw_mask(1, 3, 1, 16), None),
        [draw_input, (2, 3, 8, 16)],
        [],
    ),
    "rope": (
        lambda x: rope.rotate(x, ones((6, 8)), interleaved=True, sequence_first=False),
        [draw_input, (2, 6, 3, 16)],
        [],
    ),
    "rope-halves": (
        lambda x: rope.rotate(x, ones((6, 8)), interleaved=False, sequence_first=True),
        [draw_input, (6, 2, 3, 16)],
        [],
    ),
    "rope-packed": (
        lambda x: packed_rotation(x, 3, interleaved=True, sequence_first=False),
        [draw_input, (2, 6, 3, 48)],
        [],
    ),
    "rope-packed-halves": (
        lambda x: packed_rotation(x, 5, interleaved=False, sequence_first=True),
        [draw_input, (6, 2, 3, 80)],
        [],
    ),
    "rope-packed-one-head": (
        lambda x: packed_rotation(x, 1, interleaved=True, sequence_first=False),
        [draw_input, (2, 6, 3, 16)],
        [],
    ),
}


@contextlib.contextmanager
def reference():
    with use_backend(**dict.fromkeys(ALL, "reference")):
        yield


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_match_the_reference(name, dtype):
    function, (make, shape), rest = CASES[name]
    if name.startswith("softmax") and dtype == "bfloat16":
        pytest.skip("scores are float32")
    if dtype == "float32" and rest and rest[0].dtype != np.float32:
        pytest.skip("cases with bfloat16 values cover bfloat16 gradients")
    x, rest = make(*shape, dtype=jnp.dtype(dtype)), [jnp.asarray(r) for r in rest]

    def both(x, *rest):
        y, pullback = jax.vjp(function, x, *rest)
        return y, pullback(jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype))

    actual = jax.jit(both)(x, *rest)
    with reference():
        expected_value = jax.jit(lambda *a: both(*a))(x, *rest)
    near = 2 * ROUNDED[getattr(torch, dtype)]
    for got, expected in zip(jax.tree.leaves(actual), jax.tree.leaves(expected_value), strict=True):
        exact = np.asarray(expected, np.float64)
        scale = np.abs(exact).max()
        np.testing.assert_allclose(
            np.asarray(got, np.float64), exact, rtol=near, atol=near * scale, err_msg=name
        )
