"""This engine in JAX: Flax modules and quantizers under `te.autocast`, a compiled program a case."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import torch
from flax import linen as nn
from jax import Array

from transformer_engine import jax as te
from transformer_engine.jax import attention, quantize
from transformer_engine.jax import flax as te_flax
from transformer_engine.jax.dense import grouped_dense
from transformer_engine.jax.primitives.launching import perform
from transformer_engine.jax.quantize.recipes import FAMILIES
from transformer_engine.jax.runtime.platform import processors

from ..cases import QUANTIZATIONS, Case
from ..jax_workload import JaxWorkload
from ..kernel_cases import GpuLimits, kernel_call
from .provider import Builders

BF16 = jnp.bfloat16
BUILDERS = Builders()
_FAMILIES = {family.name: family for family in FAMILIES.values()}


def random(*shape: int, seed: int = 0) -> Array:
    """Draw a normally distributed bfloat16 array."""
    return jax.random.normal(jax.random.key(seed), shape, BF16)


def _precision(recipe: str) -> AbstractContextManager[Any]:
    family = _FAMILIES.get(recipe)
    return te.autocast(
        enabled=family is not None, recipe=None if family is None else family.recipe()
    )


def module_workload(
    module: nn.Module, inputs: Array, recipe: str = "bf16", **options: Any
) -> JaxWorkload:
    """y, the first result of module(inputs), under a recipe; the options are static."""
    context = functools.partial(_precision, recipe)
    rngs = {name: jax.random.key(2) for name in ("params", "sr_rng")}
    with context():
        variables: Any = nn.meta.unbox(
            jax.jit(lambda rngs: module.init(rngs, inputs, **options))(rngs)
        )
    params = variables.pop("params", {})

    def function(params: Any, state: Any, inputs: Array) -> Any:
        y = module.apply(
            {"params": params, **state}, inputs, rngs={"sr_rng": rngs["sr_rng"]}, **options
        )
        return y[0] if isinstance(y, tuple) else y

    return JaxWorkload(function, (inputs,), params, variables, context)


@BUILDERS.of("quantize")
def _quantize(case: Case, device: torch.device) -> JaxWorkload:
    a = case.arguments
    name, sample = QUANTIZATIONS[case.recipe]
    family = _FAMILIES[name]
    modes = (family.modes(family.recipe(), source) for source in quantize.TensorSource)
    quantizer = quantize.QuantizerFactory.create(
        scaling_mode=next(mode for mode in modes if mode.format == sample.format),
        q_dtype=jnp.float4_e2m1fn if sample.format.packing == 2 else jnp.float8_e4m3fn,
        q_layout=quantize.QuantizeLayout.ROWWISE_COLWISE
        if a["both"]
        else quantize.QuantizeLayout.ROWWISE,
    )

    return JaxWorkload(
        lambda params, state, x: state.quantize(x),
        (random(a["rows"], a["depth"]),),
        state=quantizer,
    )


@BUILDERS.of("norm")
def _norm(case: Case, device: torch.device) -> JaxWorkload:
    a = case.arguments
    module = te_flax.LayerNorm(layernorm_type=a["kind"].lower(), dtype=BF16)
    return module_workload(module, random(a["rows"], a["width"]))


@BUILDERS.of("linear", "dense")
def _linear(case: Case, device: torch.device) -> JaxWorkload:
    a = case.arguments
    module = te_flax.DenseGeneral(a["width"], use_bias=a["bias"], dtype=BF16)
    return module_workload(module, random(a["rows"], a["depth"]), case.recipe)


@BUILDERS.of("layernorm_linear")
def _layernorm_linear(case: Case, device: torch.device) -> JaxWorkload:
    a = case.arguments
    module = te_flax.LayerNormDenseGeneral(a["width"], layernorm_type="rmsnorm", dtype=BF16)
    return module_workload(module, random(a["rows"], a["depth"]), case.recipe)


@BUILDERS.of("layernorm_mlp")
def _layernorm_mlp(case: Case, device: torch.device) -> JaxWorkload:
    a = case.arguments
    gated = a["activation"] == "swiglu"
    module = te_flax.LayerNormMLP(
        intermediate_dim=a["inner"],
        layernorm_type="rmsnorm" if gated else "layernorm",
        activations=("silu", "linear") if gated else ("gelu",),
        use_bias=not gated,
        dtype=BF16,
    )
    return module_workload(module, random(a["rows"], a["hidden"]), case.recipe, deterministic=True)


@BUILDERS.of("grouped_linear")
def _grouped_linear(case: Case, device: torch.device) -> JaxWorkload:
    a = case.arguments
    groups = a["groups"]
    sizes = jnp.full(groups, a["rows"] // groups, jnp.int32)
    kernel = random(groups, a["depth"], a["width"], seed=1) * 0.02
    context = functools.partial(_precision, case.recipe)
    with context():
        quantizers: Any = quantize.QuantizerFactory.create_set(n_groups=groups)

    return JaxWorkload(
        lambda params, state, x: grouped_dense(x, params, sizes, quantizer_set=state),
        (random(a["rows"], a["depth"]),),
        kernel,
        quantizers,
        context,
    )


@BUILDERS.of("attention")
def _attention(case: Case, device: torch.device) -> JaxWorkload | None:
    """Build attention in 16 bits; a recipe does not change it, so only the case without a recipe is run."""
    a = case.arguments
    if case.recipe != "bf16":
        return None
    batch, sequence, packed = a["batch"], a["sequence"], a["packed"]
    module = te_flax.DotProductAttention(
        head_dim=a["size"],
        num_attention_heads=a["heads"],
        num_gqa_groups=a["groups"],
        attn_mask_type="padding_causal" if packed else "causal",
        qkv_layout="thd_thd_thd" if packed else "bshd_bshd_bshd",
        window_size=None if a["window"] is None else (a["window"], 0),
        max_segments_per_seq=batch if packed else 1,
    )
    descriptor = None
    if packed:
        segments = jnp.repeat(jnp.arange(1, batch + 1, dtype=jnp.int32), sequence)[None]
        places = jnp.tile(jnp.arange(sequence, dtype=jnp.int32), batch)[None]
        descriptor = attention.SequenceDescriptor.from_segment_ids_and_pos(segments, places)
    rows = (1, batch * sequence) if packed else (batch, sequence)

    heads = (a["heads"], a["groups"], a["groups"])
    return JaxWorkload(
        lambda params, state, q, k, v: module.apply({}, q, k, v, descriptor, deterministic=True),
        tuple(random(*rows, n, a["size"], seed=i) for i, n in enumerate(heads)),
    )


@BUILDERS.of("layer", "layer_small")
def _layer(case: Case, device: torch.device) -> JaxWorkload:
    a = case.arguments
    module = te_flax.TransformerLayer(
        hidden_size=a["hidden"],
        mlp_hidden_size=a["inner"],
        num_attention_heads=a["heads"],
        num_gqa_groups=a["groups"],
        layernorm_type="rmsnorm",
        mlp_activations=("silu", "linear"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="causal",
        enable_relative_embedding=False,
        enable_rotary_pos_emb=a["rotary"],
        dtype=BF16,
    )
    return module_workload(
        module, random(1, a["sequence"], a["hidden"]), case.recipe, deterministic=True
    )


@BUILDERS.of("kernel")
def _kernel(case: Case, device: torch.device) -> JaxWorkload | None:
    """Build the launch itself, as XLA's runtime starts it on a GPU."""
    a = case.arguments
    if device.type != "cuda":
        return None
    processor_count = processors()
    limits = GpuLimits(processor_count.count, processor_count.shared_memory)
    started = kernel_call(a["kernel"], a["rows"], a["width"], limits)
    operands = tuple(
        jnp.abs(jax.random.normal(jax.random.key(index), operand[0], jnp.dtype(operand[1])))
        for index, operand in enumerate(started.given)
        if operand is not None
    )

    def function(params: Any, state: Any, *arrays: Array) -> list[Array]:
        remaining = iter(arrays)
        inputs = [None if operand is None else next(remaining) for operand in started.given]
        return [result for result in perform(started.program, inputs) if result is not None]

    return JaxWorkload(function, operands)
