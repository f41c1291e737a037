"""te.ops operations in plain PyTorch, and random operation chains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import strategies
from torch import Tensor
from torch.nn import functional

from tests.support import layers
from transformer_engine.common.recipe import (
    CustomRecipe,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
)
from transformer_engine.pytorch import Float8CurrentScalingQuantizer, IdentityQuantizer, ops


def _make_mixed_quantizer(role: Any) -> Any:
    """Inputs in E4M3 and gradients in E5M2 with one scale; weights in high precision."""
    tensor = getattr(role, "tensor_type", "")
    if tensor == "weight":
        return IdentityQuantizer()
    kind = torch.float8_e5m2 if tensor.startswith("grad") else torch.float8_e4m3fn
    return Float8CurrentScalingQuantizer(kind, "cuda" if torch.cuda.is_available() else "cpu")


RECIPES: dict[str, Recipe | None] = layers.RECIPES | {
    "custom": CustomRecipe(qfactory=_make_mixed_quantizer),
    "high_precision": Float8CurrentScaling(backward_override="high_precision"),
    "dequantized": MXFP8BlockScaling(backward_override="dequantized"),
}


def _interleaved(x: Tensor, size: int | None) -> tuple[Tensor, Tensor]:
    if size is None:
        first, second = x.chunk(2, -1)
        return first, second
    blocks = x.unflatten(-1, (-1, 2, size))
    return blocks[..., 0, :].flatten(-2), blocks[..., 1, :].flatten(-2)


def _clamped(op: Any, a: Tensor, b: Tensor) -> Tensor:
    op = getattr(op, "_clamped", op)
    gate = a.clamp(max=op.limit)
    return (
        gate
        * torch.sigmoid(op.alpha * gate)
        * (b.clamp(min=-op.limit, max=op.limit) + op.glu_linear_offset)
    )


def _situ(op: Any, a: Tensor, b: Tensor) -> Tensor:
    gate = op.beta1 * torch.tanh(a / op.beta1) * torch.sigmoid(a)
    return gate * op.beta2 * torch.tanh(b / op.beta2)


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[type, Callable[[Tensor], Tensor]] = {
    ops.GELU: _gelu,
    ops.QGELU: _qgelu,
    ops.ReLU: torch.relu,
    ops.SReLU: lambda x: torch.relu(x).square(),
    ops.SiLU: functional.silu,
    ops.ScaledSReLU: lambda x: torch.relu(x).square(),
}
GATED: dict[type, Callable[[Any, Tensor, Tensor], Tensor]] = {
    ops.GEGLU: lambda op, a, b: _gelu(a) * b,
    ops.GLU: lambda op, a, b: torch.sigmoid(a) * b,
    ops.QGEGLU: lambda op, a, b: _qgelu(a) * b,
    ops.ReGLU: lambda op, a, b: torch.relu(a) * b,
    ops.SReGLU: lambda op, a, b: torch.relu(a).square() * b,
    ops.SwiGLU: lambda op, a, b: functional.silu(a) * b,
    ops.ScaledSwiGLU: lambda op, a, b: functional.silu(a) * b,
    ops.ClampedSwiGLU: _clamped,
    ops.ScaledClampedQGeGLU: _clamped,
    ops.SiTUGLU: _situ,
    ops.ScaledSiTUGLU: _situ,
}
SCALED = (ops.ScaledSReLU, ops.ScaledSwiGLU, ops.ScaledClampedQGeGLU, ops.ScaledSiTUGLU)


def _grouped(op: Any, x: Tensor, extra: Iterator[Tensor]) -> Tensor:
    rows = next(extra).tolist()
    scales = next(extra) if op.num_extra_inputs == 2 else None
    outputs = []
    for i, part in enumerate(x.split(rows)):
        weight = op.weight[i] if op.single_grouped_weight else getattr(op, f"weight{i}")
        y = part @ weight.to(x.dtype).t()
        if op.has_bias:
            bias = (op.bias[i] if op.single_grouped_bias else getattr(op, f"bias{i}")).to(x.dtype)
            y = y + (bias if scales is None else scales.split(rows)[i].unsqueeze(-1) * bias)
        outputs.append(y)
    return torch.cat(outputs)


def _norm(op: Any, x: Tensor) -> Tensor:
    gamma = op.weight.to(x.dtype) + (1 if op.zero_centered_gamma else 0)
    if op.kind == "LayerNorm":
        return functional.layer_norm(x, op.normalized_shape, gamma, op.bias.to(x.dtype), op.eps)
    return functional.rms_norm(x, op.normalized_shape, gamma, op.eps)


def plain(op: Any, x: Tensor, extra: Iterator[Tensor], result: list[Tensor]) -> Tensor:
    """Compute an operation with torch operations; extra outputs are appended to `made`."""
    kind = type(op)
    if kind is ops.Linear or op.is_fused_op:
        for basic in op.basic_ops:
            x = plain(basic, x, extra, result)
        return x
    if isinstance(op, (ops.LayerNorm, ops.RMSNorm)):
        return _norm(op, x)
    if kind in ACTIVATIONS or kind in GATED:
        y = (
            ACTIVATIONS[kind](x)
            if kind in ACTIVATIONS
            else GATED[kind](op, *_interleaved(x, op.glu_interleave_size))
        )
        return y * next(extra).unsqueeze(-1) if kind in SCALED else y
    if kind is ops.MakeExtraOutput:
        result.append(x)
        return x
    simple: dict[type, Callable[[], Tensor]] = {
        ops.BasicLinear: lambda: x @ op.weight.to(x.dtype).t(),
        ops.Bias: lambda: x + op.bias.to(x.dtype),
        ops.GroupedLinear: lambda: _grouped(op, x, extra),
        ops.L2Normalization: lambda: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + op.eps),
        ops.ConstantScale: lambda: x * op.scale,
        ops.Reshape: lambda: x.reshape(op._shape),
        ops.AddExtraInput: lambda: x + next(extra),
    }
    # Identity, Quantize, Dropout in evaluation, one rank
    return simple[kind]() if kind in simple else x


def run_plain(chain: Any, x: Tensor, *extra: Tensor) -> Any:
    """Compute a Sequential's results with torch operations."""
    argument, outputs = iter(extra), []
    for op in chain:
        x = plain(op, x, argument, outputs)
    return (x, *outputs) if outputs else x


WIDTH = 64  # for a random chain's input; every hidden size is a multiple
_KINDS = (
    "linear",
    "linear",
    "basic_linear",
    "bias",
    "activation",
    "gated",
    "norm",
    "l2",
    "scale",
    "identity",
    "reshape",
    "add",
    "make",
    "quantize",
    "scaled",
)


# Descriptions for a chain's operations: (kind, argument).
chains = strategies.lists(
    strategies.tuples(strategies.sampled_from(_KINDS), strategies.integers(0, 7)),
    min_size=1,
    max_size=7,
)


def build(
    described: list[Any], device: torch.device, dtype: torch.dtype
) -> tuple[Any, list[str], int]:
    """Sequential built from a description, the kinds of its extra inputs, and its output width."""
    width, outputs, extra = WIDTH, [], []
    position = {"device": device, "dtype": dtype}
    plain_kinds = [kind for kind in ACTIVATIONS if kind not in SCALED]
    gated_kinds = [kind for kind in GATED if kind not in SCALED]
    for kind, argument in described:
        out = (64, 128)[argument % 2]
        if kind == "linear":
            outputs.append(ops.Linear(width, out, bias=argument < 6, **position))
            width = out
        elif kind == "basic_linear":
            outputs.append(ops.BasicLinear(width, out, **position))
            width = out
        elif kind == "bias":
            outputs.append(ops.Bias(width, **position))
        elif kind == "activation":
            outputs.append(plain_kinds[argument % len(plain_kinds)]())
        elif kind in ("gated", "scaled"):
            if width % 128:
                continue
            kinds: Any = gated_kinds if kind == "gated" else SCALED[1:]
            outputs.append(kinds[argument % len(kinds)]())
            extra += ["scales"] if kind == "scaled" else []
            width //= 2
        elif kind == "norm":
            norm = (ops.LayerNorm, ops.RMSNorm)[argument % 2]
            outputs.append(norm(width, zero_centered_gamma=argument > 3, **position))
        elif kind == "add":
            outputs.append(ops.AddExtraInput(in_place=argument % 2 == 0))
            extra.append(f"residual {width}")
        elif kind == "make":
            outputs.append(ops.MakeExtraOutput(in_place=argument % 2 == 0))
        elif kind == "quantize":
            outputs.append(ops.Quantize(forward=argument % 2 == 0, backward=argument > 3))
        elif kind == "reshape":
            outputs.append(ops.Reshape((4, -1, width) if argument % 2 else (-1, width)))
        else:
            simple = {"l2": ops.L2Normalization, "identity": ops.Identity}
            outputs.append(
                simple[kind]() if kind in simple else ops.ConstantScale(0.5 + argument / 4)
            )
    chain = ops.Sequential(*outputs)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in chain.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_((noise * 0.1).to(parameter))
    return chain, extra, width
