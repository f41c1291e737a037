"""Arguments that must not be misinterpreted silently: members of enumerations, lengths, segments, masks, maps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import draw_unboxed_variables
from tests.jax.test_bad_calls import attend, ones
from transformer_engine.jax import attention, permutation, router
from transformer_engine.jax.debug import experimental
from transformer_engine.jax.dense import grouped_dense
from transformer_engine.jax.flax.module import Softmax
from transformer_engine.jax.flax.transformer import rotary_pos_emb
from transformer_engine.jax.primitives.gemm import codes_product
from transformer_engine.jax.softmax import softmax

SCORES = np.linspace(-1.0, 1.0, 16, dtype=np.float32).reshape(1, 1, 4, 4)
PADDING, PACKED = attention.AttnMaskType.PADDING_MASK, attention.QKVLayout.THD_THD_THD
MAP = np.tile(np.arange(3) < 2, (5, 1))


def rows(key: int, *shape: int):
    return np.random.default_rng(key).standard_normal(shape, np.float32)


def reorder_tokens(**arguments):
    strategy = attention.ReorderStrategy.DualChunkSwap
    options = {"tensor": ones(2, 8), "strategy": strategy, "cp_size": 2, "seq_dim": 1}
    return attention.reorder_causal_load_balancing(**(options | arguments))


def descriptor(lengths, offsets=None):
    lengths = np.asarray(lengths, np.int32)
    if offsets is None:
        return attention.SequenceDescriptor.from_seqlens(lengths)
    return attention.SequenceDescriptor.from_seqlens_and_offsets(
        lengths, np.asarray(offsets, np.int32)
    )


def segments(ids, places=None):
    places = jnp.zeros_like(ids) if places is None else places
    return attention.SequenceDescriptor.from_segment_ids_and_pos(ids, places)


def grouped(sizes):
    return grouped_dense(ones(4, 8), ones(2, 8, 3), np.asarray(sizes, np.int32))


LAYER = {"hidden_size": 16, "mlp_hidden_size": 16, "num_attention_heads": 2}
KEYS = {name: jax.random.key(index) for index, name in enumerate(("params", "dropout"))}


NO_MEMBERS = {
    "softmax_type": lambda: attend(softmax_type="off_by_one"),
    "softmax_type by its number": lambda: attend(softmax_type=1),
    "attn_mask_type": lambda: attend(attn_mask_type="causal"),
    "attn_bias_type": lambda: attend(attn_bias_type="no_bias"),
    "qkv_layout": lambda: attend(qkv_layout="bshd_bshd_bshd"),
    "softmax_type of Softmax": lambda: Softmax(softmax_type="off_by_one").apply({}, SCORES),  # pyright: ignore
    "softmax_fusion_type": lambda: softmax(
        SCORES, softmax_fusion_type="scaled_upper_triang_masked"
    ),  # pyright: ignore
    "softmax_fusion_type of Softmax": lambda: Softmax(softmax_fusion_type="scaled").apply(
        {}, SCORES
    ),  # pyright: ignore
    "strategy": lambda: reorder_tokens(strategy=0),
}


@pytest.mark.parametrize("name", NO_MEMBERS)
def test_a_value_outside_of_its_enumeration_is_rejected(name):
    with pytest.raises(TypeError, match=rf"^{name.split()[0]}=.* is not an? \w+; give one of "):
        NO_MEMBERS[name]()


INCONSISTENT = {
    "a length behind its row": (
        "a sequence ends after token 5 of a row of 4",
        lambda: attend(attn_mask_type=PADDING, sequence_descriptor=descriptor([5, 2])),
    ),
    "an offset behind its row": (
        "a sequence ends after token 5 of a row of 4",
        lambda: attend(
            attn_mask_type=PADDING, qkv_layout=PACKED,
            sequence_descriptor=descriptor([[1], [3]], [[0, 1], [2, 4]]),
        ),
    ),
    "more numbers than segments": (
        "max_segments_per_seq=1, but the given segment numbers go up to 2",
        lambda: attend(
            attn_mask_type=PADDING, qkv_layout=PACKED,
            sequence_descriptor=attention.SequenceDescriptor.from_segment_ids_and_pos(
                np.asarray([[1, 1, 2, 2]] * 2), np.asarray([[0, 1, 0, 1]] * 2)
            ),
        ),
    ),
    "a mask of other keys": (
        r"the mask has shape \(2, 1, 4, 3\); it must be \(2, 2, 4, 4\), or 1",
        lambda: attend(attn_mask_type=PADDING, sequence_descriptor=np.zeros((2, 1, 4, 3), bool)),
    ),
    "a mask of other heads": (
        r"the mask has shape \(2, 3, 4, 4\); it must be \(2, 2, 4, 4\), or 1",
        lambda: te_flax.DotProductAttention(head_dim=8, num_attention_heads=2, attn_mask_type="padding").apply(
            {}, *(ones(2, 4, 2, 8),) * 3, np.zeros((2, 3, 4, 4), bool), deterministic=True
        ),
    ),
    "scores in another shape": (
        "score_mod returned .* for scores of shape",
        lambda: attend(score_mod=lambda scores, tensors: scores.sum(axis=-1, keepdims=True)),
    ),
    "scores as booleans": ("score_mod returned .* for scores of shape", lambda: attend(score_mod=lambda s, t: s > 0)),
    "an axis that is none": ("seq_dim=2 of a tensor of shape", lambda: reorder_tokens(seq_dim=2)),
    "no ranks": ("cp_size=0 is below 1", lambda: reorder_tokens(cp_size=0)),
    "a strategy that is none": (
        "context_parallel_strategy='zz'; choose one of",
        lambda: te_flax.DotProductAttention(
            head_dim=8, num_attention_heads=2, context_parallel_strategy="zz"
        ).apply({}, *(ones(2, 4, 2, 8),) * 3, deterministic=True),
    ),
    "weights of other experts": (
        r"merging_probs has shape \(5, 2\); this row_id_map needs \(5, 3\)",
        lambda: permutation.token_combine(
            ones(10, 4), permutation.token_dispatch(ones(5, 4), MAP, 10)[2], ones(5, 2)
        ),
    ),
    "a map of no tokens": (
        r"routing_map has shape \(0, 3\); give at least one token",
        lambda: permutation.token_dispatch(ones(0, 4), MAP[:0], 1),
    ),
    "a loss of no tokens": (
        r"probs has shape \(0, 3\); give at least one token",
        lambda: router.fused_moe_aux_loss(ones(0, 3), ones(3), 1, 0.1),
    ),
    "a group of fewer rows than none": ("group_sizes holds -1, which is below 0; give 0", lambda: grouped([-1, 5])),
    "groups of more rows than there are": (
        "group_sizes add up to 7 of 4 rows; give sizes of at most 4 rows",
        lambda: grouped([3, 4]),
    ),
    "chunks of more rows than there are": (
        "split_sizes add up to 6 of 5 rows; give",
        lambda: permutation.sort_chunks_by_index(ones(5, 4), np.asarray([2, 4]), np.asarray([1, 0])),
    ),
    "a chunk that is taken twice": (
        r"sorted_indices=\[1, 1\]; give the numbers from 0 to 1, each once",
        lambda: permutation.sort_chunks_by_index(ones(5, 4), np.asarray([2, 3]), np.asarray([1, 1])),
    ),
    "a shard that is none": (
        "shard_id=2 of 2 shards; give a whole number from 0 to 1",
        lambda: permutation.compute_ragged_all_to_all_params(np.ones((2, 4), np.int32), 2, 2),
    ),
    "weights of other choices": (
        r"routing_weights has shape \(5, 3\); perm_state has 10 choices, give a weight each",
        lambda: permutation.pure_jax_token_combine(
            *permutation.pure_jax_token_dispatch(ones(5, 4), np.tile([0, 1], (5, 1)), 3, 2)[:2], ones(5, 3), 2
        ),
    ),
    "segments below none": (
        "segment_ids hold -1; number sequences from 1, and give 0 for padding",
        lambda: attend(
            attn_mask_type=PADDING, qkv_layout=PACKED, max_segments_per_seq=2,
            sequence_descriptor=segments(np.asarray([[1, 1, -1, -1]] * 2)),
        ),
    ),
    "dropout along an axis that is not there": (
        r"hidden_dropout_dims=\(5,\): there is no axis 5 of 3; give axes between -3 and 2",
        lambda: te_flax.TransformerLayer(**LAYER, hidden_dropout_dims=(5,)).init(KEYS, ones(1, 4, 16)),
    ),
    "dropout within an MLP likewise": (
        r"intermediate_hidden_dropout_dims=\(3,\): there is no axis 3 of 3",
        lambda: te_flax.LayerNormMLP(4, intermediate_hidden_dropout_dims=(3,)).init(KEYS, ones(1, 4, 16)),
    ),
    "no activation of a layer": (
        r"mlp_activations=\(\); give a sequence of at least one",
        lambda: te_flax.TransformerLayer(**LAYER, mlp_activations=()).init(KEYS, ones(1, 4, 16)),
    ),
    "arrays of a score_mod that there is not": (
        "score_mod_tensors=3.0 without score_mod; give both, or neither",
        lambda: attend(score_mod_tensors=3.0),
    ),
    "arrays of a backward that there is not": (
        "score_mod_bprop_tensors=3.0 without score_mod_bprop; give both, or neither",
        lambda: attend(score_mod=lambda scores, tensors: scores, score_mod_bprop_tensors=3.0),
    ),
    "arrays of a module's score_mod that there is not": (
        "score_mod_tensors=3.0 without score_mod; give both, or neither",
        lambda: te_flax.DotProductAttention(head_dim=8, num_attention_heads=2).apply(
            {}, *(ones(2, 4, 2, 8),) * 3, deterministic=True, score_mod_tensors=3.0
        ),
    ),
    "one timescale": (
        r"windows=\(10,\); pass the timescales",
        lambda: rotary_pos_emb(ones(1, 2, 1, 4), (10,), False),  # pyright: ignore[reportArgumentType]
    ),
    "distances without a logarithm": (
        "max_distance=8 and 16 buckets per direction, 8 of which hold one distance each",
        lambda: te_flax.RelativePositionBiases(32, 8, 2).init(jax.random.key(0), 4, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INCONSISTENT)
def test_inconsistent_arguments_are_rejected(name):
    sentence, call = INCONSISTENT[name]
    with pytest.raises(ValueError, match=sentence):
        call()


def test_a_traced_length_is_clamped_to_its_row():
    """Without the clamp a kernel would read past its row into the next one."""

    def bounds(lengths, offsets):
        result = (
            descriptor([4, 4]) if offsets is None else descriptor([[1, 1]] * 2, [[0, 1, 2]] * 2)
        )
        leaves = [lengths] * 2 if offsets is None else [lengths] * 2 + [offsets] * 2
        empty = [leaf for leaf in jax.tree.leaves(result) if not leaf.size]
        result = jax.tree.unflatten(jax.tree.structure(result), [*leaves, *empty])
        return result.bounds(2, 4, 4, 2)[:2]

    for actual in jax.jit(lambda lengths: bounds(lengths, None))(jnp.asarray([9, -1], jnp.int32)):
        assert actual.tolist() == [[4], [0]]
    lengths, offsets = (
        jnp.asarray([[1, 9], [2, -1]], jnp.int32),
        jnp.asarray([[0, 2, 3], [3, -1, -1]], jnp.int32),
    )
    for actual in jax.jit(bounds)(lengths, offsets):
        assert actual.tolist() == [[1, 2], [1, 0]]


@pytest.mark.parametrize("call", ["fused", "layer"])
def test_traced_sequences_above_the_maximum_are_padding(call):
    """Kernels handle sequences 1 to n. Plain operations could attend to others, and backends would differ silently."""
    query, key, value = rows(5, 3, 2, 6, 2, 8)
    ids, places = np.asarray([[1, 1, 2, 2, 3, 3]] * 2), np.asarray([[0, 1] * 3] * 2)
    layer = te_flax.DotProductAttention(
        head_dim=8,
        num_attention_heads=2,
        attn_mask_type="padding",
        qkv_layout="thd_thd_thd",
        max_segments_per_seq=2,
        scale_factor=1.0,
    )

    def run(ids):
        descriptor = segments(ids, places)
        if call == "layer":
            return layer.apply({}, query, key, value, descriptor, deterministic=True)
        return attend(
            qkv=(query, key, value),
            attn_mask_type=PADDING,
            qkv_layout=PACKED,
            max_segments_per_seq=2,
            sequence_descriptor=descriptor,
        )

    actual, expected = jax.jit(run)(ids), run(np.where(ids > 2, 0, ids))
    assert not np.asarray(actual)[:, 4:].any()
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("environment", ["0", "1"])
@pytest.mark.parametrize("window", [None, (2, 0)])
def test_causal_attention_with_a_window_reads_its_mask_argument(environment, window, monkeypatch):
    monkeypatch.setenv("NVTE_FUSED_ATTN", environment)
    query, key, value = rows(0, 3, 2, 5, 2, 8)
    mask = np.zeros((2, 1, 5, 5), bool)
    mask[0, :, :, 1] = True
    position = np.arange(5)
    hidden = np.broadcast_to(position[None, :] > position[:, None], (2, 1, 5, 5))
    if window is not None:
        hidden = hidden | (position[None, :] < position[:, None] - window[0]) | mask
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(8.0)
    weights = np.where(hidden, 0.0, np.exp(scores))
    weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
    module = te_flax.DotProductAttention(
        head_dim=8, num_attention_heads=2, attn_mask_type="causal", window_size=window
    )
    out = module.apply({}, query, key, value, mask, deterministic=True)
    np.testing.assert_allclose(
        out, np.einsum("bhqk,bkhd->bqhd", weights, value), rtol=2e-5, atol=2e-6
    )
    fused = attend(
        qkv=(query, key, value),
        attn_mask_type=attention.AttnMaskType.CAUSAL_MASK,
        window_size=window,
        sequence_descriptor=jnp.asarray(mask),
        scaling_factor=8.0**-0.5,
    )
    np.testing.assert_allclose(fused, out, rtol=2e-5, atol=2e-6)


def test_a_step_past_the_cache_is_nan_for_a_traced_index():
    model = te_flax.MultiHeadAttention(head_dim=4, num_attention_heads=2)
    x = rows(1, 1, 3, 8)
    variables = draw_unboxed_variables(model, x, x, deterministic=True, decode=True)

    @jax.jit
    def step(cache, token):
        arguments = {"params": variables["params"], "cache": cache}
        (y, _), changed = model.apply(
            arguments, token, token, deterministic=True, decode=True, mutable=["cache"]
        )
        return y, changed["cache"]

    cache, finite = variables["cache"], []
    for index in range(5):
        y, cache = step(cache, x[:, :1] * (index + 1))
        finite.append(bool(jnp.isfinite(y).all()))
    assert finite == [True, True, True, False, False]
    options = {"params": variables["params"], "cache": variables["cache"]}
    half = x[:, :1].astype(jnp.bfloat16)
    with pytest.raises(TypeError, match=r"key of bfloat16 and a cache of float32"):
        model.apply(options, half, half, deterministic=True, decode=True, mutable=["cache"])


def test_an_empty_array_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    jax.block_until_ready(
        jax.jit(lambda x: experimental.inspect_array(x, "empty") * 2)(jnp.zeros((0, 3)))
    )
    jax.effects_barrier()
    assert "'shape': [0, 3]" in capsys.readouterr().out
    assert next(tmp_path.glob("*_empty.bin")).read_bytes() == b""


def test_the_layout_of_one_group_is_computed_in_the_program():
    """custom_partitioning, which runs kernels on several devices, does not support constant arrays."""
    for rows_of_one in (1, 128, 300):
        traced = jax.make_jaxpr(lambda rows=rows_of_one: codes_product.one_group(rows))()
        assert not traced.consts
        tiles = -(-rows_of_one // 128)
        groups = [0] * tiles + [1] * (rows_of_one // 128 + 1 - tiles)
        assert codes_product.one_group(rows_of_one).tolist() == [0, rows_of_one, 0, tiles, *groups]
