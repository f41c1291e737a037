"""Every public module and operation: how to construct and call it, or the reason why it cannot be called.

`PUBLIC` lists the classes by their names in the package, so that a new class needs a row in `MODULES` or
`WITHOUT_CALLS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import transformer_engine.pytorch as te
from tests.support.layers import FFN, HIDDEN, KINDS
from transformer_engine.pytorch import ops

TOKENS, BATCH, HEADS = 16, 2, 2
ROWS = TOKENS * BATCH
CPU: Any = {"device": "cpu"}


def public_classes() -> dict[str, type[nn.Module]]:
    """{name: class} for the package's public `nn.Module` classes; "ops." precedes the names in `te.ops`."""
    results: dict[str, type[nn.Module]] = {}
    for prefix, namespace in (("", te), ("ops.", ops)):
        for name in dir(namespace):
            value = getattr(namespace, name)
            if not name.startswith("_") and inspect.isclass(value) and issubclass(value, nn.Module):
                results[prefix + name] = value
    return results


PUBLIC = public_classes()


def _heads(x: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [tokens, batch, heads, channels]."""
    queries = x.view(TOKENS, BATCH, heads, HIDDEN // heads)
    return queries, queries * 0.5, queries * 0.25


def _attention(module: nn.Module, x: Tensor) -> Any:
    return module(*_heads(x, HEADS), attn_mask_type="causal")


def _linear_attention(module: nn.Module, x: Tensor) -> Any:
    """Delta rule with per-head decay exp(g) and update rate beta, which read the queries."""
    queries, keys, values = _heads(x, 1)  # heads with 64 channels
    wide = queries.float()
    return module(queries, keys, values, -wide.square().mean(-1), wide.mean(-1).sigmoid())


def _linear_attention_of_products(module: nn.Module, x: Tensor) -> Any:
    """The same with one update per token."""
    queries, keys, values = _heads(x, 1)
    rate = queries.mean(-1).sigmoid().unsqueeze(2)
    decay = -queries.float().square().mean(-1)
    return module(queries, keys.unsqueeze(2), values.unsqueeze(2), decay, rate)


def _linear_attention_of_channels(module: nn.Module, x: Tensor) -> Any:
    """The same with a per-channel decay and rates."""
    queries, keys, values = _heads(x, 1)
    return module(queries, keys, values, -queries.square(), queries.sigmoid(), values.sigmoid())


def _with_splits(module: nn.Module, x: Tensor) -> Any:
    return module(x.reshape(ROWS, HIDDEN), [ROWS // 2, ROWS // 2])


def _with_split_sizes(module: nn.Module, x: Tensor) -> Any:
    return module(x.reshape(ROWS, HIDDEN), torch.tensor([ROWS // 2, ROWS // 2]))


def _with_residual(module: nn.Module, x: Tensor) -> Any:
    return module(x, x * 0.5)


def _with_scales(module: nn.Module, x: Tensor) -> Any:
    return module(x, x.mean(-1))


def _plain(module: nn.Module, x: Tensor) -> Any:
    return module(x)


Construct = Callable[[], nn.Module]
Call = Callable[[nn.Module, Tensor], Any]


def _fused(name: str, *parts: str) -> Construct:
    """Constructor for a fused `te.ops` operation, whose keyword arguments are basic operations."""
    basic: dict[str, Construct] = {
        "linear": lambda: ops.BasicLinear(HIDDEN, HIDDEN, **CPU),
        "bias": lambda: ops.Bias(HIDDEN, **CPU),
        "scale": lambda: ops.ConstantScale(0.5),
        "activation": ops.GELU,
        "rmsnorm": lambda: ops.RMSNorm(HIDDEN, **CPU),
    }
    basic["add"] = (
        ops.MakeExtraOutput
        if name == "BackwardAddRMSNorm"
        else partial(ops.AddExtraInput, in_place=True)
    )
    basic["backward_add"] = partial(ops.MakeExtraOutput, in_place=True)
    return lambda: getattr(ops, name)(**{part: basic[part]() for part in parts})


_CALLS: dict[str, Call] = {
    "DotProductAttention": _attention,
    "GroupedLinear": _with_splits,
    "Fp8Padding": _with_splits,
    "Fp8Unpadding": _with_splits,
    "GatedDeltaNetAttention": _linear_attention,
    "GatedDeltaProductAttention": _linear_attention_of_products,
    "GatedDeltaNet2Attention": _linear_attention_of_channels,
    "ops.GroupedLinear": _with_split_sizes,
    "ops.AddExtraInput": _with_residual,
    "ops.ForwardLinearBiasAdd": _with_residual,
    "ops.ForwardLinearScaleAdd": _with_residual,
    **{
        f"ops.{name}": _with_scales
        for name in (
            "ScaledSReLU",
            "ScaledSwiGLU",
            "ScaledSiTUGLU",
            "ScaledClampedQGeGLU",
            "ScaledTanhSReLU",
        )
    },
}
# Operations whose constructors have defaults for all arguments.
_DEFAULTS = [
    "GELU",
    "GEGLU",
    "GLU",
    "QGELU",
    "QGEGLU",
    "ReLU",
    "ReGLU",
    "SReLU",
    "SReGLU",
    "SiLU",
    "SwiGLU",
    "ClampedSwiGLU",
    "SiTUGLU",
    "ScaledSReLU",
    "ScaledSwiGLU",
    "ScaledSiTUGLU",
    "ScaledClampedQGeGLU",
    "L2Normalization",
    "Identity",
    "MakeExtraOutput",
    "AddExtraInput",
    "Quantize",
    "AllReduce",
    "AllGather",
    "ReduceScatter",
]

# {name: constructor} for the modules that can be called.
MODULES: dict[str, Construct] = {
    **{
        kind.__name__: partial(kind, **options, **({} if kind is te.DotProductAttention else CPU))
        for kind, options in KINDS.items()
    },
    **{
        name: partial(getattr(te, name), 1, HIDDEN)
        for name in (
            "GatedDeltaNetAttention",
            "GatedDeltaNet2Attention",
            "GatedDeltaProductAttention",
        )
    },
    "Fp8Padding": lambda: te.Fp8Padding(2, ROWS),  # pads both groups of ROWS / 2
    "Fp8Unpadding": lambda: te.Fp8Unpadding(2, 16),
    **{f"ops.{name}": getattr(ops, name) for name in _DEFAULTS},
    "ops.Linear": lambda: ops.Linear(HIDDEN, FFN, **CPU),
    "ops.BasicLinear": lambda: ops.BasicLinear(HIDDEN, FFN, **CPU),
    "ops.GroupedLinear": lambda: ops.GroupedLinear(2, HIDDEN, FFN, **CPU),
    "ops.Bias": lambda: ops.Bias(HIDDEN, **CPU),
    "ops.LayerNorm": lambda: ops.LayerNorm(HIDDEN, **CPU),
    "ops.RMSNorm": lambda: ops.RMSNorm(HIDDEN, **CPU),
    "ops.ConstantScale": lambda: ops.ConstantScale(0.5),
    "ops.Dropout": lambda: ops.Dropout(0.25),
    "ops.Reshape": lambda: ops.Reshape((ROWS, HIDDEN)),
    "ops.ScaledTanhSReLU": lambda: ops.ScaledTanhSReLU(tanh_clamp_scale=4.0),
    "ops.ForwardLinearBiasActivation": _fused("ForwardLinearBiasActivation", "linear", "bias"),
    "ops.ForwardLinearBiasAdd": _fused("ForwardLinearBiasAdd", "linear", "bias", "add"),
    "ops.ForwardLinearScaleAdd": _fused("ForwardLinearScaleAdd", "linear", "scale", "add"),
    "ops.BackwardActivationBias": _fused("BackwardActivationBias", "bias", "activation"),
    "ops.BackwardAddRMSNorm": _fused("BackwardAddRMSNorm", "add", "rmsnorm"),
    "ops.BackwardLinearAdd": _fused("BackwardLinearAdd", "backward_add", "linear"),
    "ops.BackwardLinearScale": _fused("BackwardLinearScale", "scale", "linear"),
    "ops.UserbuffersForwardLinear": _fused("UserbuffersForwardLinear", "linear", "bias"),
    "ops.UserbuffersBackwardLinear": _fused("UserbuffersBackwardLinear", "linear", "bias"),
    "ops.Sequential": lambda: ops.Sequential(
        ops.LayerNorm(HIDDEN, **CPU),
        ops.Linear(HIDDEN, FFN, **CPU),
        ops.GELU(),
        ops.Linear(FFN, HIDDEN, **CPU),
    ),
}

# {name: reason} for the classes that no test calls.
WITHOUT_CALLS = {
    "FusedMLAQUpProjRopeQuant": "its constructor raises: the fused kernel exists for other GPUs only",
    "RotaryPositionEmbedding": "its input is a number of positions, and its result has no gradient",
    "ops.BasicOperation": "abstract base class",
    "ops.FusedOperation": "abstract base class",
    "ops.FusibleOperation": "abstract base class",
}


def call(name: str, module: nn.Module, x: Tensor) -> Tensor:
    """A module's main output for x [TOKENS, BATCH, HIDDEN], with everything else that the call needs."""
    output = _CALLS.get(name, _plain)(module, x)
    return output[0] if isinstance(output, tuple) else output
