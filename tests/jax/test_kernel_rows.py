"""The Triton backends of norms, activations, softmax and rotations: traced and lowered for CUDA without a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jax.compiled import normal, ones, values_and_gradients
from transformer_engine.common import env
from transformer_engine.jax.activation import activation
from transformer_engine.jax.layernorm import layernorm
from transformer_engine.jax.primitives import activation as activations
from transformer_engine.jax.primitives import launching, norm, rope, softmax

UNSUPPORTED = launching.kernels_unsupported_reason()
pytestmark = pytest.mark.skipif(
    UNSUPPORTED is not None, reason=f"no kernel can be lowered for CUDA here: {UNSUPPORTED}"
)


@pytest.fixture(autouse=True)
def _kernels_without_a_gpu(monkeypatch):
    monkeypatch.setenv("TE_JAX_KERNELS", "1")
    yield


def draw_input(*shape, dtype=jnp.bfloat16, seed=0):
    return normal(jax.random.key(seed), shape).astype(dtype)


GAMMA, BETA = (np.linspace(low, low + 1, 64, dtype=np.float32) for low in (0.5, -1.0))
CASES = {
    "layernorm": (lambda x: layernorm(x, jnp.asarray(GAMMA), jnp.asarray(BETA), "layernorm", True), (4, 6, 64), 1 + 2),
    "rmsnorm": (lambda x: layernorm(x, jnp.asarray(GAMMA), None, "rmsnorm"), (4, 6, 64), 1 + 2),
    "gelu": (lambda x: activation(x, ("gelu",)), (4, 1, 64), 2),
    "swiglu": (lambda x: activation(x, ("silu", "linear")), (4, 2, 64), 2),
    "clamped": (lambda x: activation(x, ("clamped_silu", "clamped_linear")), (4, 2, 64), 2),
    "softmax": (lambda x: softmax.masked_softmax(x, jnp.arange(16) > 12, None), (2, 3, 8, 16), 2),
    "rope": (lambda x: rope.rotate(x, ones((6, 8)), interleaved=True, sequence_first=False), (2, 6, 3, 16), 2),
    "rope-packed": (
        lambda x: jnp.stack(rope.rotate_packed(x, ones((6, 8)), 3, interleaved=True, sequence_first=False)),
        (2, 6, 3, 48), 2
    ),
}  # fmt: skip


def gradient(name):
    function, shape, _ = CASES[name]
    x = draw_input(*shape, dtype=jnp.float32 if name == "softmax" else jnp.bfloat16)
    return jax.jit(jax.value_and_grad(lambda x: function(x).astype(jnp.float32).sum())), x


@pytest.mark.parametrize("name", CASES)
def test_both_passes_are_kernels_on_cuda_and_the_reference_here(name, monkeypatch):
    step, x = gradient(name)
    text = step.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("triton_kernel_call_ffi") == CASES[name][2]
    if jax.default_backend() != "cpu":
        return
    result = step(x)
    monkeypatch.delenv("TE_JAX_KERNELS")
    jax.tree.map(np.testing.assert_array_equal, result, gradient(name)[0](x))


@pytest.mark.parametrize(
    "dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16")]
)
def test_gradients_of_a_norms_parameters_are_float32_sums_rounded_to_their_dtypes(dtypes):
    x, dy = draw_input(40, 64), draw_input(40, 64, seed=1)
    narrow = [jnp.asarray(p).astype(dtype) for p, dtype in zip((GAMMA, BETA), dtypes, strict=True)]

    def gradients(x, gamma, beta):
        _, pullback = jax.vjp(lambda *a: layernorm(*a, "layernorm"), x, gamma, beta)
        return pullback(dy)[1:]

    sums = jax.jit(gradients)(x, *(p.astype(jnp.float32) for p in narrow))
    for got, expected, dtype in zip(jax.jit(gradients)(x, *narrow), sums, dtypes, strict=True):
        assert got.dtype == dtype
        np.testing.assert_array_equal(
            got.astype(jnp.float32), expected.astype(dtype).astype(jnp.float32)
        )
    text = jax.jit(gradients).trace(x, *narrow).lower(lowering_platforms=("cuda",)).as_text()
    converted = text.count("(tensor<64xf32>) -> tensor<64xbf16>")
    assert converted == (0 if dtypes[0] == dtypes[1] else 1), "a kernel of XLA's each"


def test_without_a_gpu_kernels_need_an_environment_variable(monkeypatch):
    request = norm.NormRequest("forward", 64, jnp.dtype(jnp.bfloat16), 4, "cuda")
    row = norm.triton.BACKEND
    assert row.rejection_reason(request) is None
    assert "it needs a CUDA device" in (
        row.rejection_reason(request._replace(platform="cpu")) or ""
    )
    monkeypatch.delenv("TE_JAX_KERNELS")
    assert not env.flag("TE_JAX_KERNELS")
    assert "set TE_JAX_KERNELS=1" in (row.rejection_reason(request) or "")
    assert "a sink" in (
        softmax.triton.unsupported_reason(
            softmax.SoftmaxRequest((1, 1, 2, 2), hidden=False, sink=True, platform="cuda")
        )
        or ""
    )
    empty = activations.ActivationRequest("forward", ("gelu",), jnp.dtype(jnp.float32), 0, "cuda")
    assert "without elements" in (activations.triton.unsupported_reason(empty) or "")


def test_a_kernel_lowers_under_vmap_and_runs_as_the_reference_here():
    def norms(x):
        return jax.vmap(lambda x: layernorm(x, jnp.asarray(GAMMA), None, "rmsnorm"))(x)

    x = draw_input(3, 4, 64)
    assert (
        "triton_kernel_call_ffi"
        in jax.jit(norms).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    )
    np.testing.assert_array_equal(
        jax.jit(norms)(x), layernorm(x, jnp.asarray(GAMMA), None, "rmsnorm")
    )


@pytest.mark.parametrize("name", ["rmsnorm", "gelu", "softmax"])
def test_a_second_derivative_of_a_kernel_is_rejected_with_a_working_remedy(name, monkeypatch):
    function, shape, _ = CASES[name]
    x = draw_input(*shape, dtype=jnp.float32)

    def second():
        return jax.jit(
            jax.grad(lambda x: (jax.grad(lambda x: (function(x) ** 2).sum())(x) ** 2).sum())
        )(x)

    with pytest.raises(
        NotImplementedError,
        match=r"a derivative of the kernel \w+(Forward|Backward): .*NVTE_JAX_CUSTOM_CALLS=false",
    ):
        second()
    # JAX raises this before it calls a rule from this package.
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(CASES["gelu"][0], (draw_input(4, 1, 64),), (draw_input(4, 1, 64),))
    monkeypatch.setenv("NVTE_JAX_CUSTOM_CALLS", "false")
    assert np.isfinite(second()).all()


def test_rope_and_its_gradient_match_complex_multiplication():
    x, dy = (
        draw_input(2, 6, 3, 16, dtype=jnp.float32),
        draw_input(2, 6, 3, 16, dtype=jnp.float32, seed=1),
    )
    angles = jnp.arange(6.0)[:, None] * jnp.linspace(0.1, 1, 8)

    def plain(x):
        z = (x[..., 0::2] + 1j * x[..., 1::2]) * jnp.exp(1j * angles)[None, :, None]
        return jnp.stack((z.real, z.imag), -1).reshape(x.shape)

    actual = values_and_gradients(
        lambda x: rope.rotate(x, angles, interleaved=True, sequence_first=False), dy, x
    )
    for got, expected in zip(actual, values_and_gradients(plain, dy, x), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("sequence_first", [True, False])
@pytest.mark.parametrize("heads", [1, 3])
def test_a_packed_rotation_equals_rotations_of_the_parts(heads, sequence_first, interleaved):
    shape = (6, 2, 3, 16 * heads) if sequence_first else (2, 6, 3, 16 * heads)
    packed, dy = draw_input(*shape), draw_input(3, *shape[:2], heads, 16, seed=1)
    angles = jnp.arange(6.0)[:, None] * jnp.linspace(0.1, 1, 8)

    def run_at_once(x):
        return jnp.stack(rope.rotate_packed(x, angles, heads, interleaved, sequence_first))

    def part_by_part(x):
        q, k, v = (x[:, :, i].reshape(*shape[:2], heads, 16) for i in range(3))
        return jnp.stack(
            [*(rope.rotate(x, angles, interleaved, sequence_first) for x in (q, k)), v]
        )

    actual, expected = (
        values_and_gradients(function, dy, packed) for function in (run_at_once, part_by_part)
    )
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
