"""The largest logits of attention against loops in float64, in functions, modules and over devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import array, normal
from tests.jax.test_attention import draw_normal, rule
from tests.jax.test_sharding import run_on_host_devices
from transformer_engine.jax import cpp_extensions as tex
from transformer_engine.jax.attention import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    QKVLayout,
    SequenceDescriptor,
    fused_attn,
    fused_attn_thd,
    is_fused_attn_kernel_available,
)

SCALE = 0.3
LENGTHS = ([5, 7], [9, 4])


def largest(query, key, observed, bias=None, before=False) -> np.ndarray:
    """Largest visible logit of each head in float64; seen(b, i, j) is whether query i attends to key j."""
    query, key = (np.asarray(x, np.float64) for x in (query, key))
    batch, queries, heads, _ = query.shape
    groups = heads // key.shape[2]
    raw = np.einsum("bihd,bjhd->bhij", query, np.repeat(key, groups, axis=2))
    added = 0.0 if bias is None else np.asarray(bias, np.float64)
    logits = (raw + added) * SCALE if before else raw * SCALE + added
    visible = np.array(
        [
            [[observed(b, i, j) for j in range(key.shape[1])] for i in range(queries)]
            for b in range(batch)
        ]
    )
    return np.where(visible[:, None], logits, -np.inf).max(axis=(0, 2, 3))


def call_attention(
    qkv, mask: AttnMaskType, descriptor=None, bias=None, kind=AttnBiasType.NO_BIAS, **options
):
    return fused_attn(
        qkv,
        bias,
        descriptor,
        None,
        kind,
        mask,
        QKVLayout.BSHD_BSHD_BSHD,
        AttnSoftmaxType.VANILLA_SOFTMAX,
        SCALE,
        dropout_probability=0.0,
        is_training=True,
        **options,
    )


@pytest.mark.parametrize("window", [(-1, -1), (2, 0)])
@pytest.mark.parametrize(
    "name", ["no_mask", "causal", "causal_bottom_right", "padding", "padding_causal"]
)
def test_the_largest_visible_logit_of_each_head_is_returned(name, window):
    qkv = draw_normal()
    descriptor = None
    if "padding" in name:
        descriptor = SequenceDescriptor.from_seqlens(tuple(array(x, jnp.int32) for x in LENGTHS))
    mask = AttnMaskType[f"{name.upper()}_MASK" if name != "no_mask" else "NO_MASK"]
    argument = None if window == (-1, -1) else window

    def both(qkv):
        return call_attention(qkv, mask, descriptor, window_size=argument, return_max_logit=True)

    out, result = jax.jit(both)(qkv)
    np.testing.assert_array_equal(
        out, jax.jit(lambda qkv: call_attention(qkv, mask, descriptor, window_size=argument))(qkv)
    )
    np.testing.assert_allclose(result, largest(*qkv[:2], rule(name, *LENGTHS, window)), rtol=1e-5)
    assert result.shape == (4,) and result.dtype == qkv[0].dtype


@pytest.mark.parametrize("kind", [AttnBiasType.PRE_SCALE_BIAS, AttnBiasType.POST_SCALE_BIAS])
def test_a_bias_belongs_to_the_logits_and_the_gradient_ignores_them(kind):
    qkv, bias = draw_normal(), 3 * normal(jax.random.key(5), (1, 4, 7, 9))

    def loss(qkv, bias, with_logits):
        result = call_attention(
            qkv, AttnMaskType.NO_MASK, None, bias, kind, return_max_logit=with_logits
        )
        if not with_logits:
            return (result**2).sum()
        return (result[0] ** 2).sum() + (result[1] ** 2).sum()

    _, actual = call_attention(qkv, AttnMaskType.NO_MASK, None, bias, kind, return_max_logit=True)
    before = kind is AttnBiasType.PRE_SCALE_BIAS
    np.testing.assert_allclose(
        actual, largest(*qkv[:2], rule("no_mask", *LENGTHS), bias, before), rtol=1e-5
    )
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    for got, expected in zip(
        *(jax.tree.leaves(gradient(qkv, bias, flag)) for flag in (True, False)), strict=True
    ):
        np.testing.assert_array_equal(got, expected)


def test_max_logits_of_packed_rows_exclude_other_sequences():
    qkv = draw_normal(keys=7)
    ids = array([[1, 1, 1, 2, 2, 2, 0], [1, 2, 2, 2, 2, 3, 3]], jnp.int32)
    starts = array([[0, 3, 6, -1], [0, 1, 5, 7]], jnp.int32)
    lengths = array([[3, 3, -1], [1, 4, 2]], jnp.int32)
    kinds = AttnBiasType.NO_BIAS, AttnMaskType.PADDING_CAUSAL_MASK, QKVLayout.THD_THD_THD
    _, result = fused_attn_thd(
        qkv,
        None,
        lengths,
        lengths,
        starts,
        starts,
        None,
        *kinds,
        AttnSoftmaxType.VANILLA_SOFTMAX,
        SCALE,
        0.0,
        True,
        max_segments_per_seq=3,
        return_max_logit=True,
    )
    numbers = np.asarray(ids)

    def record_call(b, i, j):
        return numbers[b, i] == numbers[b, j] > 0 and j <= i

    np.testing.assert_allclose(result, largest(*qkv[:2], record_call), rtol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_module_returns_its_output_and_the_logits(transposed):
    query, key, value = draw_normal(keys=7, groups=4)
    if transposed:
        query, key, value = (jnp.swapaxes(x, 0, 1) for x in (query, key, value))
    fields = {"head_dim": 8, "num_attention_heads": 4, "scale_factor": SCALE}
    fields["transpose_batch_sequence"] = transposed
    plain, both = (
        te_flax.DotProductAttention(**fields, return_max_logit=flag) for flag in (False, True)
    )
    out, result = both.apply({}, query, key, value)
    np.testing.assert_array_equal(out, plain.apply({}, query, key, value))
    if transposed:
        query, key = (jnp.swapaxes(x, 0, 1) for x in (query, key))
    np.testing.assert_allclose(result, largest(query, key, rule("causal", *LENGTHS)), rtol=1e-5)


def test_fused_attention_forward_returns_four_values_with_max_logits():
    qkv = draw_normal()
    settings = {
        "attn_bias_type": AttnBiasType.NO_BIAS,
        "attn_mask_type": AttnMaskType.CAUSAL_MASK,
        "qkv_layout": QKVLayout.BSHD_BSHD_BSHD,
        "softmax_type": AttnSoftmaxType.VANILLA_SOFTMAX,
        "scaling_factor": SCALE,
        "dropout_probability": 0.0,
        "is_training": True,
    }
    *_, nothing = tex.fused_attn_fwd(qkv, None, None, None, **settings)
    out, saved, _, result = tex.fused_attn_fwd(
        qkv, None, None, None, **settings, return_max_logit=True
    )
    assert nothing is None
    np.testing.assert_allclose(result, largest(*qkv[:2], rule("causal", *LENGTHS)), rtol=1e-5)
    gradients, *_ = tex.fused_attn_bwd(qkv, None, saved, None, out, jnp.ones_like(out), **settings)
    assert all(np.isfinite(one).all() for one in gradients)


def test_a_score_mod_excludes_the_logits():
    with pytest.raises(ValueError, match="return_max_logit=True with a score_mod"):
        call_attention(
            draw_normal(), AttnMaskType.NO_MASK, score_mod=lambda s, _: s, return_max_logit=True
        )


def test_availability_takes_a_batch_size_first_or_none(cpu_alone):
    kinds = (
        QKVLayout.BSHD_BSHD_BSHD,
        AttnBiasType.NO_BIAS,
        AttnMaskType.CAUSAL_MASK,
        AttnSoftmaxType.VANILLA_SOFTMAX,
    )
    sizes = 0.0, 8, 8, 128, 128, 64, 64
    for first in ((2,), (), (None,)):
        requested = (True, *first, jnp.bfloat16, jnp.bfloat16, *kinds, *sizes)
        assert is_fused_attn_kernel_available(*requested) is False
        assert (
            is_fused_attn_kernel_available(*requested, None, True, max_segments_per_seq=2) is False
        )
    with pytest.raises(ValueError, match="batch_size=-1 is below 0"):
        is_fused_attn_kernel_available(True, -1, jnp.bfloat16, jnp.bfloat16, *kinds, *sizes)


def test_context_parallel_max_logits_equal_one_device(tmp_path):
    program = tmp_path / "logits.py"
    program.write_text(OVER_DEVICES)
    printed, _ = run_on_host_devices(program)
    assert printed.split() == ["equal"] * 4


OVER_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.jax.compiled import normal, start_on_host_devices
from transformer_engine.jax.attention import *
from transformer_engine.jax.attention import reorder_causal_load_balancing, ReorderStrategy

start_on_host_devices()
mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("cp", "tp"))
qkv = [normal(jax.random.key(i), (2, 32, 4, 8)) for i in range(3)]
kinds = (
    AttnBiasType.NO_BIAS, AttnMaskType.CAUSAL_MASK, QKVLayout.BSHD_BSHD_BSHD, AttnSoftmaxType.VANILLA_SOFTMAX, 0.3, 0.0,
    True,
)
call = lambda qkv, **options: fused_attn(tuple(qkv), None, None, None, *kinds, return_max_logit=True, **options)
_, want = jax.jit(call)(qkv)
placed = NamedSharding(mesh, PartitionSpec(None, "cp", "tp"))
for balanced in (False, True):
    given = [
        reorder_causal_load_balancing(x, ReorderStrategy.DualChunkSwap, 4, 1) if balanced else x for x in qkv
    ]
    given = [jax.device_put(x, placed) for x in given]
    for strategy in (CPStrategy.ALL_GATHER, CPStrategy.RING):
        with jax.set_mesh(mesh):
            _, got = jax.jit(lambda qkv: call(
                qkv, context_parallel_axis="cp", context_parallel_causal_load_balanced=balanced,
                context_parallel_strategy=strategy,
            ))(given)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        print("equal")
"""
