"""cuDNN's attention over eight host devices by JAX's own rules, with plain operations for cuDNN: {case: difference}."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as library
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from tests.jax.compiled import array, normal, ones, start_on_host_devices, zeros
from tests.jax.host_compositions import create_mesh
from tests.jax.host_devices import difference
from transformer_engine.jax.attention import AttnBiasType, AttnMaskType
from transformer_engine.jax.primitives import kernels
from transformer_engine.jax.primitives.attention import AttentionOperands, cudnn

BATCH, TOKENS, HEADS, GROUPS, DIM = 4, 8, 8, 4, 16


def attend(q, k, v, bias, lengths_q, lengths_kv, scale, causal):
    """Attention output [b, s, h, d] in float32 for the arguments that cuDNN receives."""
    batch, queries, heads, _ = q.shape
    assert lengths_q.size in (0, batch) and lengths_kv.size in (0, batch), (
        "lengths lie as queries do"
    )
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, heads // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bshd,bthd->bhst", q, k) * scale
    if bias.size:
        scores = scores + bias.astype(jnp.float32)
    observed = ones((1, 1, queries, k.shape[1]), bool)
    observed = jnp.tril(observed) if causal else observed
    if lengths_kv.size:
        observed = observed & (jnp.arange(k.shape[1]) < lengths_kv[:, None, None, None])
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(jnp.where(observed, scores, -1e9)), v)


def forward(q, k, v, bias, lengths_q, lengths_kv, *rest, scale, mask_type, is_training, **options):
    out = attend(q, k, v, bias, lengths_q, lengths_kv, scale, "CAUSAL" in mask_type.name)
    levels = zeros((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    return [out.astype(q.dtype), *([levels] if is_training else [])]


def backward(
    q, k, v, bias, lengths_q, lengths_kv, *rest, scale, variadic_args, mask_type, **options
):
    assert rest[-1].shape == q.shape, "the gradient lies as queries do"

    def run(q, k, v, bias):
        return attend(q, k, v, bias, lengths_q, lengths_kv, scale, "CAUSAL" in mask_type.name)

    result = jax.vjp(run, q, k, v, bias)[1](rest[-1].astype(jnp.float32))
    return [*result[:3], *([result[3]] if variadic_args[1] else [])]


def replace_cudnn() -> None:
    """Replace only cuDNN's own call; the reported version and GPU belong to an H200."""
    pairs = (
        (library._dot_product_attention_fwd_p, forward),
        (library._dot_product_attention_bwd_p, backward),
    )
    for primitive, function in pairs:
        mlir.register_lowering(
            primitive, mlir.lower_fun(function, multiple_results=True), platform="cpu"
        )
    mlir.register_lowering(kernels._kernel, kernels._lower_kernel, platform="cpu")
    library.check_cudnn_version = lambda: 91900
    library.check_compute_capability = lambda least: True


def step(mask, q, k, v, bias, lengths):
    """The loss, and gradients for queries, keys, values and a bias."""

    def loss(q, k, v, bias):
        kind = AttnBiasType.NO_BIAS if bias is None else AttnBiasType.POST_SCALE_BIAS
        call = AttentionOperands(
            q,
            k,
            v,
            bias,
            kind,
            mask,
            None,
            lambda: None,
            lengths,
            0.3,
            sink=None,
            dropped=None,
            modified=None,
            bounds=lambda: (lengths, lengths, lengths, lengths),
            draw=None,
        )
        out = cudnn.run(call, packed=False).astype(jnp.float32)
        return (out**2 * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum()

    return jax.value_and_grad(loss, argnums=(0, 1, 2) if bias is None else (0, 1, 2, 3))(
        q, k, v, bias
    )


def case(specs, mask=AttnMaskType.CAUSAL_MASK, bias=None, lengths=None) -> tuple[float, int]:
    """Largest relative difference from one device, and number of gathers, for arrays sharded by specs."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(BATCH, TOKENS, heads, DIM) for heads in (HEADS, GROUPS, GROUPS)]
    q, k, v = (normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True))
    argument = None if lengths is None else (jnp.asarray(lengths, jnp.int32),) * 2
    run = jax.jit(step, static_argnums=0)
    expected = run(mask, q, k, v, bias, argument)
    mesh = create_mesh(dp=2, tp=4)
    with jax.set_mesh(mesh):
        q, k, v = (
            jax.device_put(x, NamedSharding(mesh, PartitionSpec(*s)))
            for x, s in zip((q, k, v), specs, strict=True)
        )
        got = run(mask, q, k, v, bias, argument)
        text = run.lower(mask, q, k, v, bias, argument).compile().as_text()
    return difference(got, expected), text.count("all-gather(") + text.count("all-gather-start(")


def main() -> None:
    start_on_host_devices()
    replace_cudnn()
    heads, tokens = ("dp", None, "tp"), ("dp", "tp")
    padding, lengths = AttnMaskType.PADDING_CAUSAL_MASK, [8, 3, 5, 1]
    bias = array(np.random.default_rng(0).standard_normal((1, HEADS, TOKENS, TOKENS)), jnp.bfloat16)
    results = {
        "heads": case([heads] * 3),
        "tokens": case([tokens] * 3),
        "queries by heads, keys by tokens": case([heads, tokens, tokens]),
        "queries by tokens, values by nothing": case([tokens, heads, ()]),
        "lengths": case([heads] * 3, padding, None, lengths),
        "lengths and tokens": case([tokens, heads, tokens], padding, None, lengths),
        "a bias of all rows": case([heads] * 3, bias=bias),
        "a bias of one query": case([heads] * 3, bias=bias[:, :, :1]),
        "a bias of every row": case([tokens] * 3, bias=jnp.tile(bias, (BATCH, 1, 1, 1))),
    }
    mapped = jax.vmap(
        lambda q, k, v: step(AttnMaskType.CAUSAL_MASK, q, k, v, bias=None, lengths=None)[1]
    )
    q = normal(jax.random.key(1), (3, BATCH, TOKENS, HEADS, DIM), jnp.bfloat16)
    k = q[:, :, :, :GROUPS]
    one = [
        step(AttnMaskType.CAUSAL_MASK, a, b, b, bias=None, lengths=None)[1]
        for a, b in zip(q, k, strict=True)
    ]
    expected = jax.tree.map(lambda *parts: jnp.stack(parts), *one)
    program = jax.jit(mapped)
    results["under vmap"] = (
        difference(program(q, k, k), expected),
        program.lower(q, k, k).as_text().count("while"),
    )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
