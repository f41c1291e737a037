"""Attention exported once for every batch and, if no table has one row per token, for every length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import export

import transformer_engine.jax.flax as te
from tests.jax.compiled import draw_variables, normal

HEADS = {
    "head_dim": 8,
    "num_attention_heads": 4,
    "transpose_batch_sequence": False,
    "attention_dropout": 0.0,
}
LAYER = {
    "hidden_size": 32, "mlp_hidden_size": 64, "num_attention_heads": 4, "transpose_batch_sequence": False,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "self_attn_mask_type": "causal",
}  # fmt: skip
QKV = ((4, 8), (2, 8), (2, 8))
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "attention": (
        lambda: te.DotProductAttention(num_gqa_groups=2, attn_mask_type="causal", **HEADS),
        QKV,
    ),
    "heads": (lambda: te.MultiHeadAttention(**HEADS), ((32,), (32,))),
    "layer": (lambda: te.TransformerLayer(enable_relative_embedding=False, **LAYER), ((32,),)),
    "angles": (lambda: te.MultiHeadAttention(enable_rotary_pos_emb=True, **HEADS), ((32,), (32,))),
    "buckets": (lambda: te.TransformerLayer(**LAYER), ((32,),)),
}
OF_ANY_LENGTH = ("attention", "heads", "layer")


def export_and_call(name: str, batch: Any, tokens: Any) -> tuple[Any, Any]:
    """Outputs and gradients for 3 rows with 16 tokens: exported program, and the module itself."""
    make, tails = MODULES[name]
    module = make()
    arrays = [normal(jax.random.key(index), (3, 16, *tail)) for index, tail in enumerate(tails)]
    variables = draw_variables(module, *arrays, deterministic=True)

    def run(*arrays: jax.Array) -> Any:
        def loss(*arrays: jax.Array) -> tuple[jax.Array, Any]:
            result = module.apply(variables, *arrays, deterministic=True)
            return sum((x**2).sum() for x in jax.tree.leaves(result)), result

        return jax.grad(loss, argnums=tuple(range(len(arrays))), has_aux=True)(*arrays)

    shapes = [jax.ShapeDtypeStruct((batch, tokens, *tail), jnp.float32) for tail in tails]
    program = export.export(jax.jit(run))(*shapes)
    return program.call(*arrays), jax.jit(run)(*arrays)


def near(got: jax.Array, expected: jax.Array) -> None:
    """Tolerance for float32 sums, whose order in XLA depends on the shapes."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6 * float(np.abs(expected).max()))


# The next test has a symbolic batch too.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in OF_ANY_LENGTH else [])
        for name in MODULES
    ],
)
def test_a_batch_may_be_symbolic(name):
    (batch,) = export.symbolic_shape("b")
    jax.tree.map(near, *export_and_call(name, batch, 16))


@pytest.mark.parametrize("name", OF_ANY_LENGTH)
def test_a_length_may_be_symbolic(name):
    batch, tokens = export.symbolic_shape("b, s")
    jax.tree.map(near, *export_and_call(name, batch, tokens))


@pytest.mark.parametrize(
    ("name", "message"), [("angles", "length of rows=s"), ("buckets", "q_seqlen=s")]
)
def test_a_symbolic_length_is_rejected_for_a_table_of_tokens(name, message):
    (tokens,) = export.symbolic_shape("s")
    with pytest.raises(ValueError, match=f"{message} is symbolic.*export with a number"):
        export_and_call(name, 3, tokens)
