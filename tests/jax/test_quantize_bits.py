"""Codes, scales and maxima have the bytes of the PyTorch reference, in every format and direction."""

from __future__ import annotations

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.jax.bits import assert_same_bytes, matrix, to_torch
from tests.jax.compiled import compile_quickly
from tests.jax.stored_bits import (
    BOTH,
    FILE,
    SPECS,
    fits,
    program,
    random_numbers,
    torch_digests,
    torch_quantize,
)
from tests.support import forked
from tests.support.programs import ROOT, search_path
from transformer_engine.common.formats import E2M1, E4M3, E5M2, FLOAT8, MXFP8, NVFP4
from transformer_engine.common.quantize_spec import QuantizeSpec
from transformer_engine.jax.primitives import quantize as ours
from transformer_engine.jax.primitives.operand import Operand
from transformer_engine.pytorch.primitives import quantize as theirs
from transformer_engine.pytorch.primitives.operand import Operand as TorchOperand

pytestmark = pytest.mark.usefixtures("as_users_compile")

KINDS = ("normal", "spread", "special", "infinite", "large", "small", "zero")
SHAPES = ((144, 130), (16, 2), (1, 4))
DTYPES = ("float32", "bfloat16", "float16")
# One spec per scale layout; slow tests cover all specs.
CHOSEN = ("float8-e4m3", "nvfp4-hadamard")

# Option combinations from other specs.
RARE = (
    "mxfp8-e5m2",
    "block2d-power-of-two",
    "nvfp4-hadamard-unsigned",
    "nvfp4-2d-stochastic",
    "float8-e5m2",
)


def variants(names, choices, always):
    """Every (spec, choice); choices outside of `always` are slow, except for the specs in CHOSEN."""
    return [
        pytest.param(
            name,
            choice,
            marks=[]
            if (choice in always and name not in RARE) or name in CHOSEN
            else pytest.mark.slow,
        )
        for name in names
        for choice in choices
    ]


def torch_spec(spec: QuantizeSpec) -> theirs.QuantizeSpec:
    return theirs.QuantizeSpec(**{name: getattr(spec, name) for name in spec.__dataclass_fields__})


def compare(
    spec: QuantizeSpec, x: np.ndarray, scale: float | None = None, compiled: bool = False
) -> None:
    random = random_numbers(spec, x.shape)
    result = (program(spec) if compiled else program(spec).__wrapped__)(
        jnp.asarray(x),
        None if scale is None else jnp.full(1, scale, jnp.float32),
        None if random is None else tuple(map(jnp.asarray, random)),
    )
    expected = torch_quantize(spec, x, scale)
    for name in expected._fields:
        assert_same_bytes(getattr(result, name), getattr(expected, name), name)


def theirs_forced():
    from transformer_engine.common.dispatch import use_backend

    return use_backend(quantize="reference")


def test_stored_digests_match_the_torch_reference():
    assert json.loads(FILE.read_text()) == torch_digests()


@pytest.mark.parametrize(
    ("options", "least"),
    [(["--few"], 16), pytest.param([], 64, marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def test_without_torch_the_bits_match_the_stored_digests(options, least):
    code = "import sys; sys.modules['torch'] = None; from tests.jax import stored_bits; stored_bits.main()"
    environment = os.environ | {"PYTHONPATH": search_path()}
    facts = json.loads(
        forked.output(["-c", code, *options], ROOT, environment, framework="jax").splitlines()[-1]
    )
    assert facts["different"] == [] and facts["cases"] >= least


@pytest.mark.parametrize(("name", "dtype"), variants(SPECS, DTYPES, ("bfloat16",)))
@pytest.mark.sampled(3)
def test_both_directions_equal_the_torch_reference(name, dtype):
    spec = SPECS[name]
    for compiled, shape in enumerate(SHAPES if dtype == "float32" else SHAPES[:1]):
        for seed, kind in enumerate(KINDS):
            # Differences between small elements are subnormal, which the transform flushes to zero.
            if fits(spec, shape) and not (spec.hadamard and kind == "small"):
                compare(spec, matrix(kind, shape, dtype, seed), compiled=bool(compiled))


@pytest.mark.parametrize(("name", "direction"), variants(SPECS, ("rowwise", "columnwise"), ()))
@pytest.mark.sampled
def test_one_direction_alone_equals_the_torch_reference(name, direction):
    spec = SPECS[name]
    options = {field: getattr(spec, field) for field in spec.__dataclass_fields__}
    alone = QuantizeSpec(
        **(options | {"rowwise": direction == "rowwise", "columnwise": direction == "columnwise"})
    )
    compare(alone, matrix("spread", (48, 62), "bfloat16"))


@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**40, 3.0e38])
@pytest.mark.parametrize("element", [E4M3, E5M2])
def test_a_given_scale_equals_the_torch_reference(element, scale):
    for seed, kind in enumerate(KINDS):
        compare(
            QuantizeSpec(FLOAT8, element, **BOTH), matrix(kind, (33, 40), "float32", seed), scale
        )


@pytest.mark.parametrize(
    ("name", "dtype"),
    variants([name for name in SPECS if "stochastic" not in name], DTYPES, ("bfloat16",)),
)
@pytest.mark.sampled(3)
def test_dequantized_values_equal_the_torch_reference(name, dtype):
    spec = SPECS[name]
    for seed, kind in enumerate(("normal", "spread", "special")):
        x = matrix(kind, SHAPES[0], dtype, seed)
        result = ours.quantize(jnp.asarray(x), spec)
        got = ours.dequantize(
            Operand(result.codes, result.scale, result.amax, spec.format, jnp.dtype(x.dtype))
        )
        tensor = to_torch(x)
        expected = theirs.quantize(tensor, torch_spec(spec))
        reference = theirs.dequantize(
            TorchOperand(expected.codes, expected.scale, spec.format, expected.amax, tensor.dtype)  # pyright: ignore
        )
        np.testing.assert_array_equal(np.asarray(got, np.float32), reference.float().numpy())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in CHOSEN else pytest.mark.slow) for n in SPECS]
)
@settings(
    max_examples=2,
    deadline=None,
    derandomize=True,  # a failure on a machine is one on every machine
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    rows=st.sampled_from([16, 32, 144, 160]),
    depth=st.sampled_from([2, 30, 128, 130]),
    dtype=st.sampled_from(DTYPES),
    exponent=st.integers(-60, 60),
    seed=st.integers(0, 2**16),
)
def test_any_matrix_equals_the_torch_reference(name, rows, depth, dtype, exponent, seed):
    spec = SPECS[name]
    x = matrix("normal", (rows, depth), "float32", seed)
    if dtype != "float16":
        x = np.ldexp(x, exponent)
    compare(spec, x.astype(matrix("zero", (1, 1), dtype).dtype))


def test_elements_that_are_subnormal_count_as_zero_on_a_cpu():
    """The only exception: their maximum is exact, but they are multiplied as zero."""
    x = np.full((2, 4), 2.0**-130, np.float32)
    tensor = ours.quantize(jnp.asarray(x), QuantizeSpec(FLOAT8, E4M3))
    assert np.asarray(tensor.amax)[0] == np.float32(2.0**-130)
    assert not np.asarray(tensor.codes, np.float32).any() or jax.default_backend() != "cpu"


@pytest.mark.parametrize(
    ("x", "options", "error", "sentence"),
    [
        ((2, 3, 4), {}, ValueError, "reshape it"),
        ((4, 4), {"scale": jnp.ones}, None, ""),
        ((4, 4), {"format": MXFP8, "scale": jnp.ones}, ValueError, "give none"),
        ((4, 3), {"format": NVFP4}, ValueError, "pad K to a multiple of 2"),
        ((4, 4), {"format": NVFP4, "stochastic": True}, ValueError, "it is None"),
    ],
)
def test_a_bad_request_names_supported_values(x, options, error, sentence):
    form = options.get("format", FLOAT8)
    spec = QuantizeSpec(
        form, E2M1 if form == NVFP4 else E4M3, stochastic=options.get("stochastic", False)
    )
    scale = options["scale"](1) if "scale" in options else None
    if error is None:
        assert ours.quantize(jnp.ones(x), spec, multiplier=scale).codes is not None
        return
    with pytest.raises(error, match=sentence):
        ours.quantize(jnp.ones(x), spec, multiplier=scale)


def test_codes_are_not_quantized_again():
    with pytest.raises(TypeError, match="cast it"):
        ours.quantize(jnp.ones((4, 4), jnp.float8_e4m3fn), QuantizeSpec(FLOAT8, E4M3))


# The last test in this file, because it clears the program caches.
@pytest.mark.parametrize(
    "name",
    [
        "float8-e4m3",
        *(pytest.param(n, marks=pytest.mark.slow) for n in CHOSEN if n != "float8-e4m3"),
    ],
)
def test_operation_by_operation_gives_the_same_bits(name):
    compile_quickly(True)  # nothing to fuse in programs with one operation
    try:
        with jax.disable_jit():
            compare(SPECS[name], matrix("special", (32, 48), "float32"))
    finally:
        compile_quickly(False)
