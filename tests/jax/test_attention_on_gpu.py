"""Attention by kernels from JAX: values and every gradient are the reference's, on a GPU or in the interpreter."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jax.compiled import array
from transformer_engine.common.dispatch import use_backend
from transformer_engine.jax.attention import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    QKVLayout,
    SequenceDescriptor,
    fused_attn,
)
from transformer_engine.jax.primitives.attention import AttentionRequest, attention_parts
from transformer_engine.jax.primitives.attention.cudnn_packed import clear_unseen

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("as_users_compile")]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BATCH, QUERIES, KEYS, HEADS, GROUPS, SIZE = 2, 96, 112, 4, 2, 32

LENGTHS = ([70, 96], [100, 61])
# Three sequences and padding in a row of 96 tokens; two in the other.
IDS = np.stack(
    [np.repeat([1, 2, 3, 0], [20, 40, 26, 10]), np.repeat([1, 2, 0], [50, 30, 16])]
).astype(np.int32)
PLACES = np.stack(
    [np.concatenate([np.arange(n) for n in rows]) for rows in ([20, 40, 26, 10], [50, 30, 16])]
).astype(np.int32)


def pack_by_lengths():
    return SequenceDescriptor.from_seqlens(tuple(jnp.asarray(n, jnp.int32) for n in LENGTHS))


def pack_by_segment_ids():
    return SequenceDescriptor.from_segment_ids_and_pos(jnp.asarray(IDS), jnp.asarray(PLACES))


def pack_by_offsets():
    lengths = array([[20, 40, 26], [50, 30, -1]], jnp.int32)
    offsets = array([[0, 20, 60, 86], [0, 50, -1, -1]], jnp.int32)
    return SequenceDescriptor.from_seqlens_and_offsets(lengths, offsets)


def uneven():
    """Two query sequences and three key sequences per row: no query attends to the last keys."""
    lengths = (
        array([[20, 66], [50, 30]], jnp.int32),
        array([[20, 40, 26], [50, 30, 9]], jnp.int32),
    )
    starts = [[0, 20, 86], [0, 50, -1]], [[0, 20, 60, 86], [0, 50, 80, -1]]
    starts = tuple(jnp.asarray(one, jnp.int32) for one in starts)
    return SequenceDescriptor.from_seqlens_and_offsets(lengths, starts)


M = AttnMaskType
PACKED = {"layout": QKVLayout.THD_THD_THD, "keys": QUERIES, "segments": 3}
CASES: dict[str, dict] = {
    "whole": {"mask": M.NO_MASK},
    "causal": {"mask": M.CAUSAL_MASK},
    "bottom-right": {"mask": M.CAUSAL_BOTTOM_RIGHT_MASK},
    "window": {"mask": M.CAUSAL_MASK, "window": (20, 0)},
    "both-sides": {"mask": M.NO_MASK, "window": (20, 9)},
    "widest-window": {"mask": M.CAUSAL_MASK, "window": (2**31 - 1, 0)},
    "widest-both-sides": {"mask": M.NO_MASK, "window": (2**31 - 1, 2**63 - 1)},
    "off-by-one": {"mask": M.CAUSAL_MASK, "softmax": AttnSoftmaxType.OFF_BY_ONE_SOFTMAX},
    "sink": {"mask": M.CAUSAL_MASK, "softmax": AttnSoftmaxType.LEARNABLE_SOFTMAX},
    "bias": {"mask": M.CAUSAL_MASK, "bias": (1, HEADS, QUERIES, KEYS)},
    "bias-a-batch": {"mask": M.NO_MASK, "bias": (BATCH, 1, QUERIES, KEYS)},
    "bias-before-scale": {
        "mask": M.NO_MASK,
        "bias": (1, HEADS, 1, KEYS),
        "bias_type": AttnBiasType.PRE_SCALE_BIAS,
    },
    "other-values": {"mask": M.CAUSAL_MASK, "value_size": 16},
    "lengths": {"mask": M.PADDING_MASK, "descriptor": pack_by_lengths},
    "lengths-causal-sink": {
        "mask": M.PADDING_CAUSAL_MASK,
        "descriptor": pack_by_lengths,
        "softmax": AttnSoftmaxType.LEARNABLE_SOFTMAX,
    },
    "lengths-bottom-right": {
        "mask": M.PADDING_CAUSAL_BOTTOM_RIGHT_MASK,
        "descriptor": pack_by_lengths,
    },
    "numbers-in-whole-rows": {
        "mask": M.PADDING_CAUSAL_MASK,
        "descriptor": pack_by_segment_ids,
        "keys": QUERIES,
    },
    "packed": {"mask": M.PADDING_MASK, "descriptor": pack_by_segment_ids, **PACKED},
    "packed-causal": {"mask": M.PADDING_CAUSAL_MASK, "descriptor": pack_by_segment_ids, **PACKED},
    "packed-offsets": {"mask": M.PADDING_CAUSAL_MASK, "descriptor": pack_by_offsets, **PACKED},
    "packed-uneven": {"mask": M.PADDING_MASK, "descriptor": uneven, **PACKED},
    "packed-bottom-right": {
        "mask": M.PADDING_CAUSAL_BOTTOM_RIGHT_MASK,
        "descriptor": pack_by_offsets,
        **PACKED,
    },
    "packed-window-sink": {
        "mask": M.PADDING_CAUSAL_MASK,
        "descriptor": pack_by_segment_ids,
        "window": (10, 0),
        "softmax": AttnSoftmaxType.LEARNABLE_SOFTMAX,
        **PACKED,
    },
}
FEW = ("causal", "lengths-causal-sink", "packed-window-sink", "bias")
# Cases that cuDNN supports, too.
LIBRARY = (
    "whole",
    "causal",
    "window",
    "widest-window",
    "lengths",
    "packed",
    "packed-causal",
    "packed-offsets",
    "bias",
)


class Attention:
    """One case's arrays, and its function on the arrays that have gradients."""

    def __init__(self, name: str, dtype, dropout: float = 0.0):
        case = CASES[name]
        keys, size_v = case.get("keys", KEYS), case.get("value_size", SIZE)
        draw = np.random.default_rng(7).standard_normal
        shapes = {
            "query": (BATCH, QUERIES, HEADS, SIZE),
            "key": (BATCH, keys, GROUPS, SIZE),
            "value": (BATCH, keys, GROUPS, size_v),
        }
        self.arrays = {name: jnp.asarray(draw(shape), dtype) for name, shape in shapes.items()}
        if "bias" in case:
            self.arrays["bias"] = jnp.asarray(draw(case["bias"]), dtype)
        if case.get("softmax") is AttnSoftmaxType.LEARNABLE_SOFTMAX:
            self.arrays["sink"] = jnp.asarray(draw((1, HEADS, 1, 1)), jnp.float32)
        self.cotangent = jnp.asarray(draw((BATCH, QUERIES, HEADS, size_v)), dtype)
        self.case, self.dropout = case, dropout

    def out(self, arrays, key=None, **options):
        case = self.case
        default = AttnBiasType.POST_SCALE_BIAS if "bias" in case else AttnBiasType.NO_BIAS
        return fused_attn(
            (arrays["query"], arrays["key"], arrays["value"]),
            arrays.get("bias"),
            case["descriptor"]() if "descriptor" in case else None,
            key,
            case.get("bias_type", default),
            case["mask"],
            case.get("layout", QKVLayout.BSHD_BSHD_BSHD),
            case.get("softmax", AttnSoftmaxType.VANILLA_SOFTMAX),
            0.2,
            self.dropout,
            True,
            max_segments_per_seq=case.get("segments", 1),
            window_size=case.get("window"),
            softmax_offset=arrays.get("sink"),
            **options,
        )

    def both(self, backend: str, arrays=None, key=None):
        """Return the output and {name: gradient}."""
        arrays = self.arrays if arrays is None else arrays

        def run(arrays, cotangent, key):
            out, pullback = jax.vjp(lambda arrays: self.out(arrays, key), arrays)
            return out, pullback(cotangent)[0]

        # By default XLA rounds float32 operands of products to TF32 on a GPU.
        with use_backend(jax_attention=backend), jax.default_matmul_precision("float32"):
            return jax.jit(run)(arrays, self.cotangent, key)


def near(got, expected, tolerance: float, name: str) -> None:
    """Assert equality relative to the largest element; NaN is never equal."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert np.isfinite(got).all(), f"{name} is not finite"
    error = np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-6)
    assert error <= tolerance, f"{name}: {error:.2e} > {tolerance:.2e}"


def check(name: str, dtype, backend: str, tolerance: float) -> None:
    attention = Attention(name, dtype)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), attention.arrays)
    out, gradients = attention.both(backend)
    attention.cotangent = attention.cotangent.astype(jnp.float32)
    expected, exact = attention.both("reference", wide)
    near(out, expected, tolerance, "out")
    for part, gradient in gradients.items():
        near(gradient, exact[part], tolerance, f"d{part}")
    if attention.case.get("segments"):
        assert not np.asarray(out, np.float32)[IDS == 0].any(), "rows of no sequence must be zero"


@pytest.mark.parametrize("name", CASES)
def test_triton_kernels_match_the_reference_in_float32(name):
    check(name, jnp.float32, "triton", 2e-4)


@pytest.mark.parametrize("name", CASES if not INTERPRETED else FEW)
def test_triton_kernels_match_the_reference_in_bfloat16(name):
    check(name, jnp.bfloat16, "triton", 0.02)


@pytest.mark.parametrize("name", LIBRARY)
@pytest.mark.skipif(INTERPRETED, reason="cuDNN runs on a GPU alone")
def test_cudnn_matches_the_reference(name):
    check(name, jnp.bfloat16, "cudnn", 0.02)


@pytest.mark.parametrize("name", CASES if not INTERPRETED else FEW)
def test_triton_kernels_return_the_reference_max_logits(name):
    attention = Attention(name, jnp.float32)
    results = []
    for backend in ("triton", "reference"):
        with use_backend(jax_attention=backend), jax.default_matmul_precision("float32"):
            run = jax.jit(lambda arrays: attention.out(arrays, return_max_logit=True))
            results.append(run(attention.arrays))
    near(results[0][0], results[1][0], 2e-4, "out")
    assert results[0][1].shape == (HEADS,)
    near(results[0][1], results[1][1], 1e-4, "logits")


def whole(query, key, value):
    return fused_attn(
        (query, key, value),
        bias=None,
        sequence_descriptor=None,
        seed=None,
        attn_bias_type=AttnBiasType.NO_BIAS,
        attn_mask_type=M.NO_MASK,
        qkv_layout=QKVLayout.BSHD_BSHD_BSHD,
        softmax_type=AttnSoftmaxType.VANILLA_SOFTMAX,
        scaling_factor=0.2,
        dropout_probability=0.0,
        is_training=True,
    )


@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [
        ("reference", jnp.float32, 1e-5),
        ("triton", jnp.float32, 2e-4),
        ("triton", jnp.bfloat16, 0.02),
    ]
    + ([] if INTERPRETED else [("cudnn", jnp.bfloat16, 0.02)]),
)
def test_attentions_to_parts_of_the_keys_add_up_to_all(backend, dtype, tolerance):
    """Partial outputs are merged with their log-sum-exp; gradients use the merged output and log-sum-exp."""
    arrays = Attention("whole", dtype).arrays
    query, keys, values = arrays["query"], arrays["key"], arrays["value"]
    dout = Attention("whole", dtype).cotangent
    request = AttentionRequest(
        jnp.dtype(dtype),
        QKVLayout.BSHD_BSHD_BSHD,
        AttnBiasType.NO_BIAS,
        M.NO_MASK,
        AttnSoftmaxType.VANILLA_SOFTMAX,
        0.0,
        HEADS,
        GROUPS,
        QUERIES,
        KEYS,
        SIZE,
        SIZE,
        window=None,
        training=True,
        platform="cpu",
    )
    cuts = (slice(0, 48), slice(48, KEYS))
    with use_backend(jax_attention=backend), jax.default_matmul_precision("float32"):
        parts = attention_parts(request, 0.2)
        outputs = [parts.forward(query, keys[:, cut], values[:, cut]) for cut in cuts]
        level = jnp.logaddexp(outputs[0][1], outputs[1][1])
        shares = [jnp.moveaxis(jnp.exp(one - level), 1, 2)[..., None] for _, one in outputs]
        out = sum(
            x.astype(jnp.float32) * share for (x, _), share in zip(outputs, shares, strict=True)
        )
        out = jnp.asarray(out, dtype)
        grads = [
            parts.backward(query, keys[:, cut], values[:, cut], out, level, dout) for cut in cuts
        ]
        causal = attention_parts(request._replace(mask=M.CAUSAL_MASK, keys=QUERIES), 0.2)
        alone, _ = causal.forward(query, keys[:, :QUERIES], values[:, :QUERIES])
    wide = [x.astype(jnp.float32) for x in (query, keys, values)]
    with use_backend(jax_attention="reference"), jax.default_matmul_precision("float32"):
        expected, pullback = jax.vjp(whole, *wide)
        exact = pullback(dout.astype(jnp.float32))
        half = Attention("causal", jnp.float32)
        half.arrays = dict(
            zip(
                ("query", "key", "value"),
                (wide[0], *(x[:, :QUERIES] for x in wide[1:])),
                strict=True,
            )
        )
        want_alone = half.out(half.arrays)
    near(out, expected, tolerance, "out")
    near(alone, want_alone, tolerance, "a causal part")
    near(
        grads[0][0].astype(jnp.float32) + grads[1][0].astype(jnp.float32), exact[0], tolerance, "dq"
    )
    for index, name in ((1, "dk"), (2, "dv")):
        near(jnp.concatenate([one[index] for one in grads], axis=1), exact[index], tolerance, name)


@pytest.mark.parametrize("name", ["causal", "packed-causal"])
def test_dropout_drops_its_share_and_gradients_follow_it(name):
    rate, key = 0.25, jax.random.key(11)
    attention = Attention(name, jnp.float32, rate)
    # Values that are one-hot show the probabilities: the mask is where they are zero.
    keys = attention.arrays["key"].shape[1]
    probe = Attention(name, jnp.float32, rate)
    probe.arrays["value"] = jnp.broadcast_to(
        jnp.eye(keys)[None, :, None], (BATCH, keys, GROUPS, keys)
    )
    with use_backend(jax_attention="triton"):
        dropped = jax.jit(probe.out)(probe.arrays, key)
        repeated = jax.jit(probe.out)(probe.arrays, key)
        other = jax.jit(probe.out)(probe.arrays, jax.random.key(12))
    np.testing.assert_array_equal(dropped, repeated)
    assert (np.asarray(dropped) != np.asarray(other)).any(), "another key draws other numbers"
    probe.dropout = 0.0
    with use_backend(jax_attention="reference"), jax.default_matmul_precision("float32"):
        full = jax.jit(probe.out)(probe.arrays)
    observed = np.asarray(full) > 1e-5
    saved = observed & (np.asarray(dropped) != 0)
    share = saved.sum() / observed.sum()
    assert abs(share - (1 - rate)) < 0.03, share
    np.testing.assert_allclose(
        np.asarray(dropped)[saved], np.asarray(full)[saved] / (1 - rate), rtol=2e-4, atol=1e-6
    )
    # The same mask in plain operations.
    factor = array(np.where(saved, 1 / (1 - rate), 0.0), jnp.float32)

    def plain(arrays):
        members = HEADS // GROUPS
        weights = jnp.asarray(probability(arrays) * factor)
        return jnp.einsum("bqhk,bkhd->bqhd", weights, jnp.repeat(arrays["value"], members, axis=2))

    def probability(arrays):
        probe_arrays = {**arrays, "value": probe.arrays["value"]}
        return probe.out(probe_arrays)

    with use_backend(jax_attention="reference"), jax.default_matmul_precision("float32"):
        expected, pullback = jax.vjp(plain, attention.arrays)
        exact = pullback(attention.cotangent)[0]
    out, gradients = attention.both("triton", key=key)
    near(out, expected, 2e-4, "out")
    for part, gradient in gradients.items():
        near(gradient, exact[part], 5e-4, f"d{part}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_padding_tokens_are_zeroed_and_others_unchanged(dtype):
    x = array(np.random.default_rng(1).standard_normal((2, 21, 6, 50)), dtype)
    observed = array(np.random.default_rng(2).random((2, 21)) < 0.7)
    observed = observed.at[1].set(True)
    got = jax.jit(lambda x, records: clear_unseen(x + 0, records, 3))(
        x.at[0, 0].set(jnp.nan), observed.at[0, 0].set(False)
    )
    expected = jnp.where(observed.at[0, 0].set(False)[:, :, None, None], x, 0)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))
