"""Packed rows through JAX's call of cuDNN.

A dense attention replaces the library. It leaves noise at tokens outside all sequences.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir

from tests.jax.compiled import normal, ones, zeros
from transformer_engine.jax.primitives.attention import alignment, cudnn_packed

library = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
BATCH, TOKENS, HEADS, GROUPS, DIM, SCALE = 2, 16, 4, 2, 64, 0.2
LENGTHS = np.asarray([[5, 6, 0, 0], [3, 4, 7, 0]], np.int32)
STARTS = np.asarray([[1, 8, 0, 0], [0, 3, 7, 0]], np.int32)
NOISE = 7.5


def sequences():
    """[b, tokens]: the sequence of a token, -1 for none."""
    result = np.full((BATCH, TOKENS), -1)
    for row in range(BATCH):
        for index, (start, length) in enumerate(zip(STARTS[row], LENGTHS[row], strict=True)):
            result[row, int(start) : int(start + length)] = index
    return result


def dense(q, k, v, causal):
    """Return out [b, s, h, d] in float32, 0 at tokens outside all sequences."""
    of = jnp.asarray(sequences())
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, HEADS // GROUPS, axis=2) for x in (k, v))
    sees = (of[:, :, None] == of[:, None]) & (of[:, :, None] >= 0)
    sees = sees & jnp.tril(ones((TOKENS, TOKENS), bool)) if causal else sees
    scores = jnp.where(sees[:, None], jnp.einsum("bshd,bthd->bhst", q, k) * SCALE, -1e9)
    out = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores), v)
    return jnp.where((of >= 0)[:, :, None, None], out, 0)


def noisy(x, dtype):
    return jnp.where(jnp.asarray(sequences() >= 0)[:, :, None, None], x, NOISE).astype(dtype)


def forward(q, k, v, *rest, mask_type, is_training, **options):
    out = noisy(dense(q, k, v, "CAUSAL" in mask_type.name), q.dtype)
    levels = zeros((BATCH * LENGTHS.shape[1], HEADS, TOKENS), jnp.float32)
    return [out, *([levels] if is_training else [])]


def backward(q, k, v, bias, *rest, mask_type, **options):
    lengths, _, starts, _, *_, dout = rest
    assert lengths.shape == LENGTHS.shape and starts.shape == (BATCH, LENGTHS.shape[1] + 1)

    def run(q, k, v):
        return dense(q, k, v, "CAUSAL" in mask_type.name)

    return [noisy(x, q.dtype) for x in jax.vjp(run, q, k, v)[1](dout.astype(jnp.float32))]


@pytest.fixture
def stand_in(monkeypatch):
    pairs = (
        (library._dot_product_attention_fwd_p, forward),
        (library._dot_product_attention_bwd_p, backward),
    )
    for primitive, function in pairs:
        mlir.register_lowering(
            primitive, mlir.lower_fun(function, multiple_results=True), platform="cpu"
        )
    monkeypatch.setattr(library, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(library, "check_compute_capability", lambda least: True)
    monkeypatch.setattr(alignment, "call", lambda kernel, *arrays: kernel.run(*arrays))
    monkeypatch.setattr(
        cudnn_packed,
        "clear_unseen",
        lambda x, observed, groups: jnp.where(observed[:, :, None, None], x, 0),
    )


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("causal", [True, False])
def test_packed_rows_and_their_gradients_are_zero_at_padding(causal):
    assert cudnn_packed.part_failure() is None
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dout = (
        normal(key, (BATCH, TOKENS, heads, DIM), jnp.bfloat16)
        for key, heads in zip(keys, (HEADS, GROUPS, GROUPS, HEADS), strict=True)
    )

    def attend(q, k, v):
        bounds = tuple(map(jnp.asarray, (LENGTHS, LENGTHS, STARTS, STARTS)))
        return cudnn_packed.attend(q, k, v, bounds, SCALE, causal)

    def step(function, dout, *arrays):
        out, pullback = jax.vjp(function, *arrays)
        return out, *pullback(dout.astype(out.dtype))

    got = jax.jit(lambda *arrays: step(attend, *arrays))(dout, q, k, v)
    reference = jax.jit(functools.partial(step, lambda *arrays: dense(*arrays, causal)))(
        dout, q, k, v
    )
    nobody = sequences() < 0
    for name, actual, expected in zip(("out", "dq", "dk", "dv"), got, reference, strict=True):
        actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
        assert np.abs(expected).max() > 0.1, name
        np.testing.assert_allclose(actual, expected, rtol=2**-7, atol=2e-2, err_msg=name)
        assert not actual[nobody].any(), name
    np.testing.assert_array_equal(jax.jit(attend)(q, k, v), got[0])
