"""Plain JAX in bfloat16, as XLA compiles it: Flax's own modules, jnp, and cuDNN's attention on a GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from flax import linen as nn
from jax import Array

from ..cases import Case
from ..jax_workload import JaxWorkload
from .jax_engine import BF16, module_workload, random
from .provider import Builders

BUILDERS = Builders()
E4M3_MAXIMUM = 448.0


def _dense(width: int, bias: bool = False) -> nn.Dense:
    return nn.Dense(width, use_bias=bias, dtype=BF16, param_dtype=BF16)


def _norm_function(kind: type[nn.Module]) -> Any:
    return kind(dtype=BF16, param_dtype=BF16)


def _attend(q: Array, k: Array, v: Array, window: int | None, cudnn: bool) -> Array:
    implementation = "cudnn" if cudnn else "xla"
    sides = None if window is None else (window, 0)
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=True, local_window_size=sides, implementation=implementation
    )


class XlaGatedMLP(nn.Module):
    """y = wo(silu(a) * b), (a, b) = wi(norm(x))"""

    inner: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        a, b = jnp.split(_dense(2 * self.inner)(_norm_function(nn.RMSNorm)(x)), 2, axis=-1)
        return _dense(x.shape[-1])(nn.silu(a) * b)


class XlaLayer(nn.Module):
    """A causal pre-norm layer on x [b, s, hidden] with grouped heads, and rotary positions if requested."""

    sizes: Any
    cudnn: bool

    @nn.compact
    def __call__(self, x: Array) -> Array:
        a = self.sizes
        extent = a["hidden"] // a["heads"]
        widths = (a["heads"], a["groups"], a["groups"])
        qkv = _dense(sum(widths) * extent)(_norm_function(nn.RMSNorm)(x))
        qkv = qkv.reshape(*x.shape[:2], sum(widths), extent)
        q, k, v = jnp.split(qkv, (a["heads"], a["heads"] + a["groups"]), axis=2)
        if a["rotary"]:
            q, k = _rotate(q), _rotate(k)
        x = x + _dense(a["hidden"])(_attend(q, k, v, None, self.cudnn).reshape(x.shape))
        return x + XlaGatedMLP(a["inner"])(x)


def _rotate(x: Array) -> Array:
    """Rotate x [b, s, h, d] by the angles of its positions."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** -(jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None] * frequency
    cos, sin = (f(angles).astype(x.dtype)[None, :, None] for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


@BUILDERS.of("quantize")
def _quantize(case: Case, device: torch.device) -> JaxWorkload:
    """Build codes = saturate(x scale), for both directions with their transpose."""
    a = case.arguments

    def function(params: Any, state: Any, x: Array) -> tuple[Array, ...]:
        scaled = jnp.clip(x.astype(jnp.float32) * params, -E4M3_MAXIMUM, E4M3_MAXIMUM)
        codes = scaled.astype(jnp.float8_e4m3fn)
        return (codes, codes.T) if a["both"] else (codes,)

    return JaxWorkload(function, (random(a["rows"], a["depth"]),), jnp.ones(1))


@BUILDERS.of("norm")
def _norm(case: Case, device: torch.device) -> JaxWorkload:
    a = case.arguments
    module = _norm_function({"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}[a["kind"]])
    return module_workload(module, random(a["rows"], a["width"]))


@BUILDERS.of("linear", "dense")
def _linear(case: Case, device: torch.device) -> JaxWorkload:
    a = case.arguments
    return module_workload(_dense(a["width"], a["bias"]), random(a["rows"], a["depth"]))


@BUILDERS.of("layernorm_linear")
def _layernorm_linear(case: Case, device: torch.device) -> JaxWorkload:
    a = case.arguments
    return module_workload(
        nn.Sequential([_norm_function(nn.RMSNorm), _dense(a["width"])]),
        random(a["rows"], a["depth"]),
    )


@BUILDERS.of("layernorm_mlp")
def _layernorm_mlp(case: Case, device: torch.device) -> JaxWorkload:
    a = case.arguments
    module: nn.Module = XlaGatedMLP(a["inner"])
    if a["activation"] != "swiglu":
        module = nn.Sequential(
            [
                _norm_function(nn.LayerNorm),
                _dense(a["inner"], True),
                nn.gelu,
                _dense(a["hidden"], True),
            ]
        )
    return module_workload(module, random(a["rows"], a["hidden"]))


@BUILDERS.of("grouped_linear")
def _grouped_linear(case: Case, device: torch.device) -> JaxWorkload:
    a = case.arguments
    sizes = jnp.full(a["groups"], a["rows"] // a["groups"], jnp.int32)
    kernel = random(a["groups"], a["depth"], a["width"], seed=1) * 0.02

    return JaxWorkload(
        lambda params, state, x: jax.lax.ragged_dot(x, params, sizes),
        (random(a["rows"], a["depth"]),),
        kernel,
    )


@BUILDERS.of("attention")
def _attention(case: Case, device: torch.device) -> JaxWorkload | None:
    """Build attention by jax.nn, which does not support packed sequences."""
    a = case.arguments
    if a["packed"]:
        return None
    cudnn = device.type == "cuda"

    heads = (a["heads"], a["groups"], a["groups"])
    tokens = (a["batch"], a["sequence"])
    return JaxWorkload(
        lambda params, state, q, k, v: _attend(q, k, v, a["window"], cudnn),
        tuple(random(*tokens, n, a["size"], seed=i) for i, n in enumerate(heads)),
    )


@BUILDERS.of("layer", "layer_small")
def _layer(case: Case, device: torch.device) -> JaxWorkload:
    a = case.arguments
    module = XlaLayer(nn.FrozenDict(a), device.type == "cuda")
    return module_workload(module, random(1, a["sequence"], a["hidden"]))
