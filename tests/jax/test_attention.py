"""Attention against loops over queries in float64, softmax, masks and sequences, and rejected calls."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import array, normal, ones
from transformer_engine.jax.attention import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    QKVFormat,
    QKVLayout,
    ReorderStrategy,
    SequenceDescriptor,
    canonicalize_attn_mask_type,
    fused,
    fused_attn,
    inverse_reorder_causal_load_balancing,
    is_fused_attn_kernel_available,
    make_swa_mask,
    reorder_causal_load_balancing,
    run_length_fill,
)
from transformer_engine.jax.context_parallel.plan import ContextParallel
from transformer_engine.jax.flax.module import Softmax
from transformer_engine.jax.softmax import SoftmaxFusionType, softmax

MASKS = (
    "no_mask",
    "causal",
    "causal_bottom_right",
    "padding",
    "padding_causal",
    "padding_causal_bottom_right",
)


def draw_normal(queries=7, keys=9, heads=4, groups=2, dim=8, value_dim=8, batch=2):
    k = jax.random.split(jax.random.key(0), 3)
    return (
        normal(k[0], (batch, queries, heads, dim)),
        normal(k[1], (batch, keys, groups, dim)),
        normal(k[2], (batch, keys, groups, value_dim)),
    )


def literal(query, key, value, observed, scale, bias=None, before=False, sink=None):
    """Attention of one query at a time in float64; seen(b, i, j) is whether query i attends to key j."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    batch, queries, heads, _ = query.shape
    out = np.zeros((batch, queries, heads, value.shape[-1]))
    for b in range(batch):
        for h in range(heads):
            g = h * key.shape[2] // heads
            for i in range(queries):
                js = [j for j in range(key.shape[1]) if observed(b, i, j)]
                if not js:
                    continue
                added = np.zeros(len(js))
                if bias is not None:
                    added = np.asarray(
                        np.broadcast_to(bias, (batch, heads, queries, key.shape[1]))
                    )[b, h, i, js]
                raw = key[b, js, g] @ query[b, i, h]
                scores = (raw + added) * scale if before else raw * scale + added
                weights = np.exp(scores)
                total = weights.sum() + (
                    0 if sink is None else np.exp(np.asarray(sink, np.float64)[h])
                )
                out[b, i, h] = weights @ value[b, js, g] / total
    return out


def rule(mask, lengths_q, lengths_k, window=(-1, -1), queries=7, keys=9):
    """Visibility function seen(b, i, j) for a mask name, written independently from the package."""

    def record_call(b, i, j):
        n_q, n_k = (lengths_q[b], lengths_k[b]) if "padding" in mask else (queries, keys)
        if i >= n_q or j >= n_k:
            return False
        center = i + (n_k - n_q if "bottom_right" in mask else 0)
        if "causal" in mask and j > center:
            return False
        left, right = window
        return (left < 0 or j >= center - left) and (right < 0 or j <= center + right)

    return record_call


@pytest.mark.parametrize(
    "window",
    [None, (2, 0), (3, 1), (sys.maxsize, 0), (2**31 - 1, 0), (-1, 2**31 - 1), (2**40, 2**40)],
)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_and_windows(mask, window):
    qkv = draw_normal()
    lengths = array([5, 7]), array([9, 6])
    descriptor = SequenceDescriptor.from_seqlens(lengths)
    out = fused_attn(
        qkv,
        None,
        descriptor,
        None,
        AttnBiasType.NO_BIAS,
        canonicalize_attn_mask_type(mask),
        QKVLayout.BSHD_BSHD_BSHD,
        AttnSoftmaxType.VANILLA_SOFTMAX,
        0.3,
        dropout_probability=0.0,
        is_training=True,
        window_size=window,
    )
    expected = literal(*qkv, rule(mask, [5, 7], [9, 6], window or (-1, -1)), 0.3)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    if "padding" in mask:
        assert not np.asarray(out[0, 5:]).any()


@pytest.mark.parametrize("mask", ["no_mask", "causal", "padding_causal"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.sampled
def test_16_bit_error_is_at_most_twice_the_error_in_jax_attention(mask, dtype):
    qkv = tuple(x.astype(dtype) for x in draw_normal(32, 32, dim=32, value_dim=32))
    lengths = array([20, 32])
    out = fused_attn(
        qkv,
        None,
        SequenceDescriptor.from_seqlens(lengths),
        None,
        AttnBiasType.NO_BIAS,
        canonicalize_attn_mask_type(mask),
        QKVLayout.BSHD_BSHD_BSHD,
        AttnSoftmaxType.VANILLA_SOFTMAX,
        0.3,
        dropout_probability=0.0,
        is_training=True,
    )
    argument = (lengths, lengths) if "padding" in mask else (None, None)
    plain = jax.nn.dot_product_attention(
        *qkv,
        scale=0.3,
        is_causal="causal" in mask,
        query_seq_lengths=argument[0],
        key_value_seq_lengths=argument[1],
    )
    inside = (
        np.arange(32)[None]
        < (np.asarray(lengths) if "padding" in mask else np.full(2, 32))[:, None]
    )
    expected = literal(*qkv, rule(mask, [20, 32], [20, 32], queries=32, keys=32), 0.3)[inside]
    ours, reference = (np.abs(np.asarray(y, np.float64)[inside] - expected) for y in (out, plain))
    assert out.dtype == dtype and np.sqrt((ours**2).mean()) <= 2 * np.sqrt((reference**2).mean())


@pytest.mark.parametrize("kind", ["vanilla", "off_by_one", "learnable"])
@pytest.mark.parametrize("bias_type", ["no_bias", "pre_scale_bias", "post_scale_bias"])
@pytest.mark.sampled
def test_biases_and_sinks_and_their_gradients(bias_type, kind):
    qkv = draw_normal(value_dim=6)
    bias = None if bias_type == "no_bias" else normal(jax.random.key(3), (1, 4, 7, 9))
    offset = array([0.5, -1.0, 0.0, 2.0]) if kind == "learnable" else None
    sink = {"vanilla": None, "off_by_one": np.zeros(4), "learnable": offset}[kind]

    def ours(qkv, bias, offset):
        return fused_attn(
            qkv,
            bias,
            sequence_descriptor=None,
            seed=None,
            attn_bias_type=AttnBiasType[bias_type.upper()],
            attn_mask_type=AttnMaskType.CAUSAL_MASK,
            qkv_layout=QKVLayout.BSHD_BSHD_BSHD,
            softmax_type=AttnSoftmaxType.from_str(kind),
            scaling_factor=0.3,
            dropout_probability=0.0,
            is_training=True,
            softmax_offset=None if offset is None else offset.reshape(1, 4, 1, 1),
        )

    def expect(qkv, bias, offset):
        return literal(
            *qkv,
            rule("causal", lengths_q=None, lengths_k=None),
            0.3,
            bias,
            bias_type == "pre_scale_bias",
            sink if offset is None else offset,
        )

    np.testing.assert_allclose(
        ours(qkv, bias, offset), expect(qkv, bias, offset), rtol=1e-4, atol=1e-5
    )
    dy = np.asarray(normal(jax.random.key(5), (2, 7, 4, 6)))
    grads = jax.grad(lambda *a: (ours(*a) * dy).sum(), argnums=(0, 1, 2))(qkv, bias, offset)
    arguments = (qkv, bias, offset)
    direction = jax.tree.map(
        lambda leaf: np.asarray(normal(jax.random.key(leaf.size), leaf.shape)), arguments
    )
    step = 1e-4
    ends = [
        (
            expect(
                *jax.tree.map(
                    lambda a, d, s=sign: np.asarray(a, np.float64) + s * step * d,
                    arguments,
                    direction,
                )
            )
            * dy
        ).sum()
        for sign in (1, -1)
    ]
    along = sum(
        jax.tree.leaves(
            jax.tree.map(
                lambda g, d: float((np.asarray(g, np.float64) * d).sum()), grads, direction
            )
        )
    )
    np.testing.assert_allclose(along, (ends[0] - ends[1]) / (2 * step), rtol=1e-3, atol=1e-3)


def test_packed_sequences_match_separate_sequences_in_every_layout():
    query, key, value = draw_normal(8, 8)
    ids = array([[1, 1, 1, 2, 2, 0, 3, 3], [1, 1, 0, 0, 2, 2, 2, 2]])
    places = array([[0, 1, 2, 0, 1, 0, 0, 1], [0, 1, 0, 0, 0, 1, 2, 3]])
    by_ids = SequenceDescriptor.from_segment_ids_and_pos(ids, places)
    lengths = array([[3, 2, 2], [2, 4, -1]])
    offsets = array([[0, 3, 6, -1], [0, 4, -1, -1]])
    by_offsets = SequenceDescriptor.from_seqlens_and_offsets(lengths, offsets)

    def attend(descriptor, layout=QKVLayout.THD_THD_THD, qkv=(query, key, value)):
        return fused_attn(
            qkv,
            None,
            descriptor,
            None,
            AttnBiasType.NO_BIAS,
            AttnMaskType.PADDING_CAUSAL_MASK,
            layout,
            AttnSoftmaxType.VANILLA_SOFTMAX,
            0.3,
            dropout_probability=0.0,
            is_training=True,
            max_segments_per_seq=3,
        )

    def record_call(b, i, j):
        return int(ids[b, i]) == int(ids[b, j]) != 0 and j <= i

    expected = literal(query, key, value, record_call, 0.3)
    np.testing.assert_allclose(attend(by_ids), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(attend(by_offsets), attend(by_ids))
    packed = jnp.stack((key, value), axis=2)
    np.testing.assert_array_equal(
        attend(by_ids, QKVLayout.THD_T2HD, (query, packed)), attend(by_ids)
    )
    np.testing.assert_allclose(jax.jit(attend)(by_ids), attend(by_ids), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(
        run_length_fill(ids), [[3, 3, 3, 2, 2, 0, 2, 2], [2, 2, 0, 0, 4, 4, 4, 4]]
    )
    for descriptor in (by_ids, by_offsets):
        said = descriptor.get_seqlens_and_offsets(
            AttnMaskType.PADDING_CAUSAL_MASK, QKVLayout.THD_THD_THD, None, 3
        )
        for actual, reference in zip(said, (lengths, lengths, offsets, offsets), strict=True):
            np.testing.assert_array_equal(actual, reference)
    more = (
        jnp.pad(lengths, ((0, 0), (0, 1))),
        jnp.pad(offsets, ((0, 0), (0, 1)), constant_values=-1),
    )
    uneven = SequenceDescriptor.from_seqlens_and_offsets((lengths, more[0]), (offsets, more[1]))
    np.testing.assert_array_equal(attend(uneven), attend(by_offsets))
    bounds = uneven.bounds(2, 8, 8, 3)
    assert [x.shape for x in bounds] == [(2, 4)] * 4, (
        "kernels count sequences of queries and keys by one number"
    )
    np.testing.assert_array_equal(bounds[0], [[3, 2, 2, 0], [2, 4, 0, 0]])
    said = by_ids.get_seqlens_and_offsets(
        AttnMaskType.PADDING_MASK, QKVLayout.BSHD_BSHD_BSHD, None, 1
    )
    np.testing.assert_array_equal(said[0], [7, 6])


@pytest.mark.parametrize("right", [-1, 0, 1])
def test_window_masks_count_from_the_end_of_sequences_with_ids(right):
    ids_q, ids_k = array([[1, 1, 2]]), array([[1, 1, 1, 2, 2]])
    pos_q, pos_k = array([[0, 1, 0]]), array([[0, 1, 2, 0, 1]])
    mask = make_swa_mask(pos_q, pos_k, (1, right), bool, ids_q, ids_k)[0, 0]
    for i in range(3):
        for j in range(5):
            if ids_q[0, i] == ids_k[0, j]:
                distance = int(pos_k[0, j] - pos_q[0, i]) - 1
                assert bool(mask[i, j]) is (distance >= -1 and (right < 0 or distance <= right))


@pytest.mark.parametrize("kind", list(SoftmaxFusionType))
def test_softmax_hides_keys_exactly(kind):
    logits = normal(jax.random.key(0), (2, 3, 4, 6), jnp.bfloat16)
    masked = kind is SoftmaxFusionType.SCALED_MASKED
    hidden = np.asarray(jax.random.bernoulli(jax.random.key(1), 0.3, (2, 1, 4, 6)))
    if kind is SoftmaxFusionType.SCALED_UPPER_TRIANG_MASKED:
        hidden = np.arange(6)[None, :] > np.arange(4)[:, None]
    elif not masked:
        hidden = np.zeros((4, 6), bool)
    got = softmax(logits, jnp.asarray(hidden) if masked else None, 0.7, kind)
    wide = np.where(hidden, -np.inf, np.asarray(logits, np.float64) * 0.7)
    expected = np.exp(wide) / np.exp(wide).sum(-1, keepdims=True)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=1e-2, atol=1e-3)
    assert not np.asarray(got, np.float32)[np.broadcast_to(hidden, got.shape)].any()
    module = Softmax(scale_factor=0.7, softmax_fusion_type=kind)
    np.testing.assert_array_equal(
        module.apply({}, logits, jnp.asarray(hidden) if masked else None), got
    )


@pytest.mark.parametrize("masked", [False, True])
def test_a_bias_of_the_softmax_module_is_scaled_with_the_scores(masked):
    """softmax(scale * (x + bias)) in float64."""
    x, bias = (np.asarray(normal(jax.random.key(n), (2, 3, 4, 6))) for n in (0, 1))
    hidden = np.asarray(jax.random.bernoulli(jax.random.key(2), 0.3, (2, 1, 4, 6))) & masked
    kind = SoftmaxFusionType.SCALED_MASKED if masked else SoftmaxFusionType.SCALED
    module = Softmax(scale_factor=0.25, softmax_fusion_type=kind)
    got = module.apply({}, x, hidden if masked else None, bias[:1, :, :1])
    wide = np.where(hidden, -np.inf, 0.25 * (x.astype(np.float64) + bias[:1, :, :1]))
    expected = np.exp(wide) / np.exp(wide).sum(-1, keepdims=True)
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("layout", ["bshd_bshd_bshd", "bshd_bs2hd", "bs3hd"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_module_takes_every_layout(layout, transposed):
    query, key, value = draw_normal(8, 8, heads=4, groups=4)
    arrays = {
        "bshd_bshd_bshd": (query, key, value),
        "bshd_bs2hd": (query, jnp.stack((key, value), axis=2)),
        "bs3hd": (jnp.stack((query, key, value), axis=2),),
    }[layout]
    expected = literal(
        query,
        key,
        value,
        rule("causal", lengths_q=None, lengths_k=None, queries=8, keys=8),
        8**-0.5,
    )
    if transposed:
        arrays = tuple(jnp.swapaxes(array, 0, 1) for array in arrays)
        expected = expected.swapaxes(0, 1)
    module = te_flax.DotProductAttention(
        8, 4, qkv_layout=layout, transpose_batch_sequence=transposed
    )
    np.testing.assert_allclose(module.apply({}, *arrays), expected, rtol=1e-4, atol=1e-5)


def test_a_learnable_sink_is_a_parameter_at_its_path():
    query, key, value = draw_normal()
    module = te_flax.DotProductAttention(8, 4, num_gqa_groups=2, softmax_type="learnable")
    params = nn.meta.unbox(module.init(jax.random.key(0), query, key, value))["params"]
    fused = "_Unfused" if jax.default_backend() == "cpu" else "_Fused"
    assert jax.tree.map(jnp.shape, params) == {
        f"{fused}DotProductAttention_0": {"softmax_offset": (1, 4, 1, 1)}
    }
    off_by_one = te_flax.DotProductAttention(8, 4, num_gqa_groups=2, softmax_type="off_by_one")
    np.testing.assert_array_equal(
        module.apply({"params": params}, query, key, value), off_by_one.apply({}, query, key, value)
    )


def test_dropout_draws_from_the_flax_stream_of_its_path(cpu_alone):
    query, key, value = draw_normal(8, 8, groups=4)
    module = te_flax.DotProductAttention(8, 4, attention_dropout=0.4, attn_mask_type="no_mask")

    class Keys(nn.Module):
        @nn.compact
        def __call__(self):
            return self.make_rng("dropout")

    rngs = {"dropout": jax.random.key(3)}
    keep = jax.random.bernoulli(Keys().apply({}, rngs=rngs), 0.6, (2, 4, 8, 8))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key) * 8**-0.5) * keep / 0.6
    expected = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
    np.testing.assert_allclose(
        module.apply({}, query, key, value, rngs=rngs), expected, rtol=1e-4, atol=1e-5
    )
    plain = te_flax.DotProductAttention(8, 4, attn_mask_type="no_mask").apply({}, query, key, value)
    np.testing.assert_array_equal(module.apply({}, query, key, value, deterministic=True), plain)


BOTH_SIDES = {
    "whole": {},
    "causal": {"mask": "causal"},
    "bottom-right": {"mask": "causal_bottom_right"},
    "window": {"mask": "causal_bottom_right", "window": (2, 0)},
    "window-both-sides": {"window": (3, 1)},
    "off-by-one": {"mask": "causal", "softmax": "off-by-one"},
    "sinks": {"softmax": "learnable"},
    "bias": {"mask": "causal", "bias_type": "post_scale_bias"},
    "lengths": {"mask": "padding"},
    "lengths-causal": {"mask": "padding_causal"},
}


@pytest.mark.parametrize("case", BOTH_SIDES.values(), ids=BOTH_SIDES)
def test_jax_and_torch_attention_agree_in_output_and_gradients(case):
    import torch

    import transformer_engine.pytorch as te_torch

    mask, kind = case.get("mask", "no_mask"), case.get("softmax", "vanilla")
    window, bias_type = case.get("window"), case.get("bias_type", "no_bias")
    # Without a causal mask torch counts a window from the last query and key, JAX from the first.
    query, key, value = draw_normal(8, 8) if window == (3, 1) else draw_normal()
    queries, keys = query.shape[1], key.shape[1]
    lengths = np.asarray([5, 7], np.int32), np.asarray([9, 6], np.int32)
    bias = normal(jax.random.key(3), (1, 4, queries, keys)) if bias_type != "no_bias" else None
    offset = array([0.5, -1.0, 0.0, 2.0]).reshape(1, 4, 1, 1) if kind == "learnable" else None
    dy = normal(jax.random.key(4), query.shape)

    def ours(arrays):
        q, k, v, bias, offset = arrays
        out = fused_attn(
            (q, k, v),
            bias,
            SequenceDescriptor.from_seqlens(lengths) if "padding" in mask else None,
            None,
            AttnBiasType[bias_type.upper()],
            canonicalize_attn_mask_type(mask),
            QKVLayout.BSHD_BSHD_BSHD,
            AttnSoftmaxType.from_str(kind),
            8**-0.5,
            dropout_probability=0.0,
            is_training=True,
            window_size=window,
            softmax_offset=offset,
        )
        return out, (out * dy).sum()

    arrays = (query, key, value, bias, offset)
    actual, out = jax.grad(lambda arrays: ours(arrays)[::-1], has_aux=True)(arrays)

    def tensor(x):
        return None if x is None else torch.from_numpy(np.array(x)).requires_grad_()

    q, k, v, bias_t, offset_t = (tensor(x) for x in arrays)
    layer = te_torch.DotProductAttention(
        4, 8, num_gqa_groups=2, attention_dropout=0.0, softmax_type=kind
    )
    if offset_t is not None:
        layer.softmax_offset = torch.nn.Parameter(
            offset_t.detach().reshape(layer.softmax_offset.shape)
        )
        offset_t = layer.softmax_offset
    hidden = [
        torch.arange(n)[None] >= torch.from_numpy(each)[:, None]
        for n, each in zip((queries, keys), lengths, strict=True)
    ]
    reference = layer(
        q,
        k,
        v,
        qkv_format="bshd",
        attn_mask_type=mask,
        window_size=window,
        core_attention_bias_type=bias_type,
        core_attention_bias=bias_t,
        attention_mask=tuple(each[:, None, None] for each in hidden) if "padding" in mask else None,
    )
    reference.backward(torch.from_numpy(np.array(dy)).reshape(reference.shape))
    np.testing.assert_allclose(out, reference.detach().reshape(out.shape), rtol=1e-4, atol=1e-5)
    for got, expected in zip(actual, (q, k, v, bias_t, offset_t), strict=True):
        if expected is not None:
            np.testing.assert_allclose(got, expected.grad.reshape(got.shape), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", list(ReorderStrategy))
def test_reordering_tokens_is_inverted(strategy):
    x = jnp.arange(2 * 16).reshape(2, 16)
    dealt = reorder_causal_load_balancing(x, strategy, 4, 1)
    first = [0, 1, 14, 15] if strategy is ReorderStrategy.DualChunkSwap else [0, 4, 8, 12]
    assert dealt[0, :4].tolist() == first
    np.testing.assert_array_equal(inverse_reorder_causal_load_balancing(dealt, strategy, 4, 1), x)


def test_fused_attention_is_unavailable_on_a_cpu(cpu_alone):
    assert not is_fused_attn_kernel_available(
        True, jnp.bfloat16, jnp.bfloat16, QKVLayout.BSHD_BSHD_BSHD, AttnBiasType.NO_BIAS, AttnMaskType.CAUSAL_MASK,
        AttnSoftmaxType.VANILLA_SOFTMAX, 0.0, 8, 8, 128, 128, 64, 64,
    )  # fmt: skip


def test_fused_attention_availability_accepts_batch_and_segments(cpu_alone):
    queries = {
        "is_training": True,
        "q_dtype": jnp.bfloat16,
        "kv_dtype": jnp.bfloat16,
        "qkv_layout": QKVLayout.THD_THD_THD,
        "attn_bias_type": AttnBiasType.NO_BIAS,
        "attn_mask_type": AttnMaskType.PADDING_CAUSAL_MASK,
        "softmax_type": AttnSoftmaxType.VANILLA_SOFTMAX,
        "dropout_probability": 0.0,
        "q_num_heads": 8,
        "kv_num_heads": 2,
        "q_max_seqlen": 128,
        "kv_max_seqlen": 128,
        "head_dim_qk": 64,
        "head_dim_v": 64,
        "window_size": (16, 0),
        "batch_size": 2,
        "max_segments_per_seq": 4,
    }
    assert is_fused_attn_kernel_available(**queries) is False
    for name in ("batch_size", "max_segments_per_seq"):
        with pytest.raises(ValueError, match=f"{name}=-1 is below 0"):
            is_fused_attn_kernel_available(**(queries | {name: -1}))


@pytest.mark.parametrize(
    "name",
    ["padding_causal", "causal_padding", "bottom_right_causal", "padding_bottom_right_causal"],
)
def test_masks_have_names_in_any_order(name):
    mask = canonicalize_attn_mask_type(name)
    assert mask.is_causal()
    assert mask.is_padding() is ("padding" in name)
    assert mask.is_bottom_right() is ("bottom_right" in name)


def call(**changed):
    options = {
        "qkv": draw_normal(),
        "bias": None,
        "sequence_descriptor": None,
        "seed": None,
        "attn_bias_type": AttnBiasType.NO_BIAS,
        "attn_mask_type": AttnMaskType.NO_MASK,
        "qkv_layout": QKVLayout.BSHD_BSHD_BSHD,
        "softmax_type": AttnSoftmaxType.VANILLA_SOFTMAX,
        "scaling_factor": 1.0,
        "dropout_probability": 0.0,
        "is_training": True,
    }
    return fused_attn(**(options | changed))


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_a_mask_may_be_any_array_type_on_several_devices(kind, monkeypatch):
    hidden = kind(jax.random.bernoulli(jax.random.key(0), 0.5, (2, 1, 7, 9)))
    masked = {"sequence_descriptor": hidden, "attn_mask_type": AttnMaskType.PADDING_MASK}
    expected = call(**masked)
    assert not np.allclose(expected, call())
    monkeypatch.setattr(
        fused,
        "make_plan",
        lambda *_: ContextParallel("cp", 1, ring=False, balanced=False, stripe=1),
    )
    np.testing.assert_allclose(call(**masked), expected, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(
        fused, "make_plan", lambda *_: ContextParallel("cp", 1, ring=True, balanced=False, stripe=1)
    )
    with pytest.raises(NotImplementedError, match="RING with a mask; give a SequenceDescriptor"):
        call(**masked)


def module(**fields):
    query, key, value = draw_normal()
    return te_flax.DotProductAttention(
        **({"head_dim": 8, "num_attention_heads": 4, "num_gqa_groups": 2} | fields)
    ).apply({}, query, key, value)


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (lambda: call(bias=ones((1, 4, 7, 9))), "NO_BIAS and bias="),
        (lambda: call(attn_bias_type=AttnBiasType.POST_SCALE_BIAS), "bias=None"),
        (
            lambda: call(attn_bias_type=AttnBiasType.POST_SCALE_BIAS, bias=ones((3, 4, 7, 9))),
            "it must be",
        ),
        (lambda: call(qkv_layout=QKVLayout.THD_THD_THD), "without a SequenceDescriptor"),
        (lambda: call(qkv_layout=QKVLayout.BS3HD), "has 1"),
        (lambda: call(qkv=draw_normal(groups=3)), "do not divide"),
        (lambda: call(qkv=(*draw_normal()[:2], ones((2, 5, 2, 8)))), "must agree"),
        (lambda: call(dropout_probability=1.0), "outside"),
        (lambda: call(dropout_probability=0.5), "without a seed"),
        (lambda: call(window_size=(1, -2)), "from -1 on"),
        (lambda: call(window_size=3), "give \\(left, right\\)"),
        (lambda: call(max_segments_per_seq=0), "below 1"),
        (lambda: call(softmax_type=AttnSoftmaxType.LEARNABLE_SOFTMAX), "takes one"),
        (
            lambda: SequenceDescriptor.from_segment_ids_and_pos(ones((2, 4), jnp.int32)),
            "segment_pos=None",
        ),
        (
            lambda: SequenceDescriptor.from_segment_ids_and_pos(
                ones((2, 4), jnp.int32), ones((2, 5), jnp.int32)
            ),
            "both must agree",
        ),
        (lambda: SequenceDescriptor.from_seqlens((ones(2, jnp.int32),) * 3), "two for queries"),
        (lambda: SequenceDescriptor.from_seqlens(ones(2)), "arrays of integers"),
        (
            lambda: call(
                attn_mask_type=AttnMaskType.PADDING_MASK,
                sequence_descriptor=SequenceDescriptor.from_seqlens(array([3, -1])),
            ),
            "seqlens hold -1, which is below 0; give 0",
        ),
        (
            lambda: reorder_causal_load_balancing(
                ones((2, 18)), ReorderStrategy.DualChunkSwap, 4, 1
            ),
            "pad it",
        ),
        (
            lambda: reorder_causal_load_balancing(
                ones((2, 18)), ReorderStrategy.DualChunkSwap, 3, 1
            ),
            "is odd",
        ),
        (
            lambda: canonicalize_attn_mask_type("diagonal"),
            "choose one of no_mask, padding, causal, padding_causal, causal_bottom_right, padding_causal_bottom_right "
            r"\(padding, causal and bottom_right may be in any order\)",
        ),
        (lambda: module(attn_mask_type="diagonal"), "choose one of"),
        (lambda: module(qkv_layout="hdbs"), "choose one of"),
        (lambda: module(attn_bias_type="alibi"), "choose one of"),
        (lambda: module(softmax_type="hard"), "choose 'vanilla'"),
        (lambda: module(num_attention_heads=8), "the module was made for"),
        (lambda: module(attention_dropout=-0.1), "outside"),
    ],
)
def test_a_bad_call_is_rejected_with_value_limit_and_remedy(bad, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        bad()


@pytest.mark.parametrize("layout", QKVLayout)
def test_a_layout_states_which_arrays_are_packed(layout):
    arrays = 1 if "3" in layout.value else 2 if "2" in layout.value else 3
    assert (layout.is_qkvpacked(), layout.is_kvpacked(), layout.is_separate()) == tuple(
        arrays == count for count in (1, 2, 3)
    )
    rest = layout.to_qkvpacked(), layout.to_kvpacked(), layout.to_separate()
    assert layout in rest and {other.is_thd() for other in rest} == {layout.is_thd()}
    assert [other.is_qkvpacked() for other in rest] == [True, False, False]
    assert [other.is_separate() for other in rest] == [False, False, True]
    assert layout.get_qkv_format() is (
        QKVFormat.THD if layout.value.startswith("t") else QKVFormat.BSHD
    )
