"""Print result and gradient digests for random operation chains, to compare two executor versions.

    python tests/ops/chain_digests.py FIRST LAST > digests    # in each version, then: diff
    python tests/ops/chain_digests.py FIRST LAST compiled     # compiled chains against eager mode

A chain's number determines everything: operations, recipe, dtypes, frozen members, dimensions, layouts of
inputs and gradients, quantized parameters, fused accumulation, recomputation, and changes between calls. A
digest covers outputs, gradients, `main_grad`, extra inputs after the call, and delayed-scaling states.
"""

from __future__ import annotations

import hashlib
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
import transformer_engine.pytorch as te
from tests.support.chains import GATED, RECIPES
from transformer_engine.pytorch import ops
from transformer_engine.pytorch.quantization import emulate

ROWS, WIDTH = 32, 64
PLAIN = (ops.GELU, ops.QGELU, ops.ReLU, ops.SReLU, ops.SiLU)
HALVING = tuple(GATED)


class Described:
    """A chain under construction: its operations, the last one's width, and the shapes of extra inputs."""

    def __init__(self, number: int) -> None:
        self.draw = random.Random(number)
        draw = self.draw
        self.recipe = draw.choice(sorted(RECIPES))
        self.dtype = draw.choice((torch.float32, torch.float32, torch.bfloat16))
        self.leading = draw.choice(((), (ROWS,), (ROWS,), (ROWS,), (4, 8), (4, 8), (2, 4, 4)))
        self.rows = ROWS if self.leading else 1
        self.width = WIDTH
        self.ops: list[Any] = []
        self.extra: list[Callable[[], Any]] = []
        self.channels: list[tuple[str, tuple[int, ...]]] = []
        # Separate draws, so that a number describes the same operations as in earlier versions of this file.
        self.wide = random.Random(f"{number} wide")
        self.accumulates = self.wide.random() < 0.12

    def place(self) -> dict[str, Any]:
        dtype = self.dtype if self.draw.random() < 0.85 else torch.bfloat16
        return {"device": "cpu", "dtype": dtype}

    def add(self) -> None:
        draw, width = self.draw, self.width
        kind = draw.choice(
            (
                "linear",
                "linear",
                "linear",
                "basic",
                "basic",
                "bias",
                "bias",
                "activation",
                "activation",
                "gated",
                "norm",
                "norm",
                "l2",
                "scale",
                "identity",
                "reshape",
                "add",
                "add",
                "make",
                "make",
                "quantize",
                "scaled",
                "dropout",
                "grouped",
                "collective",
                "situ",
            )
        )
        out = draw.choice((32, 64, 128))
        fused = {"accumulate_into_main_grad": True} if self.accumulates else {}
        if kind in ("linear", "basic"):
            bias = {"bias": draw.random() < 0.7} if kind == "linear" else {}
            self.ops.append(
                (ops.Linear if bias else ops.BasicLinear)(
                    width, out, **bias, **fused, **self.place()
                )
            )
            self.width = out
        elif kind == "bias":
            self.ops.append(ops.Bias(width, **self.place()))
            torch.nn.init.normal_(self.ops[-1].bias)
        elif kind == "activation":
            self.ops.append(draw.choice(PLAIN)(cache_quantized_input=draw.random() < 0.2))
        elif kind in ("gated", "scaled", "situ"):
            self.gated(kind)
        elif kind == "norm":
            shape = (width,)
            if len(self.leading) > 1 and draw.random() < 0.2:
                shape = (self.leading[-1], width)
            zero_centered = draw.random() < 0.3
            self.ops.append(
                draw.choice((ops.LayerNorm, ops.RMSNorm))(
                    shape, zero_centered_gamma=zero_centered, **self.place()
                )
            )
        elif kind == "l2":
            self.ops.append(ops.L2Normalization())
        elif kind == "scale":
            self.ops.append(ops.ConstantScale(draw.choice((0.5, 1.25))))
        elif kind == "identity":
            self.ops.append(ops.Identity())
        elif kind == "dropout":
            self.ops.append(ops.Dropout(draw.choice((0.0, 0.25))))
        elif kind == "reshape" and self.leading:
            self.leading = draw.choice(((ROWS,), (8, 4), (2, 16)))
            self.ops.append(ops.Reshape((*self.leading, width)))
        elif kind == "add":
            self.add_extra()
        elif kind == "make":
            self.ops.append(ops.MakeExtraOutput(in_place=draw.random() < 0.5))
            if draw.random() < 0.25:
                name = f"channel{len(self.ops)}"
                self.ops[-1].set_extra_output_channel(0, name, output_to_caller=draw.random() < 0.5)
                self.channels.append((name, (*self.leading, width)))
        elif kind == "quantize":
            self.ops.append(ops.Quantize(draw.random() < 0.7, draw.random() < 0.5))
        elif kind == "collective":
            self.ops.append(draw.choice((ops.AllReduce, ops.AllGather, ops.ReduceScatter))())
        elif kind == "grouped" and self.leading:
            self.grouped(out)

    def gated(self, kind: str) -> None:
        draw, width = self.draw, self.width
        shape = self.leading
        if kind == "situ":
            result: Any = ops.SiTUGLU() if draw.random() < 0.5 else ops.ClampedSwiGLU()
        elif kind == "gated":
            result = draw.choice(
                (ops.GEGLU, ops.GLU, ops.QGEGLU, ops.ReGLU, ops.SReGLU, ops.SwiGLU)
            )(cache_quantized_input=draw.random() < 0.15)
            if isinstance(result, ops.SwiGLU) and draw.random() < 0.4:
                result = ops.SwiGLU(glu_interleave_size=8)
        else:
            result = draw.choice(
                (ops.ScaledSReLU, ops.ScaledSwiGLU, ops.ScaledClampedQGeGLU, ops.ScaledSiTUGLU)
            )()
            self.extra.append(
                lambda: torch.rand(shape, dtype=draw.choice((torch.float32, self.dtype)))
            )
        if type(result) in GATED:
            if width < 32:
                if kind == "scaled":
                    self.extra.pop()
                return
            self.width = width // 2
        self.ops.append(result)

    def add_extra(self) -> None:
        draw, shape = self.draw, (*self.leading, self.width)
        self.ops.append(ops.AddExtraInput(in_place=draw.random() < 0.5))
        readable = [name for name, extents in self.channels if extents == shape]
        if readable and draw.random() < 0.7:
            self.ops[-1].set_extra_input_channel(0, draw.choice(readable))
        else:
            self.extra.append(lambda: torch.randn(shape).to(self.dtype))

    def grouped(self, out: int) -> None:
        draw, groups, rows = self.draw, 2, self.rows
        options: dict[str, Any] = {"bias": draw.random() < 0.6, "scale_bias": False}
        if options["bias"]:
            options["scale_bias"] = draw.random() < 0.4
        options["single_grouped_weight"] = draw.random() < 0.2
        self.ops.append(ops.GroupedLinear(groups, self.width, out, **options, **self.place()))
        self.width = out
        first = draw.choice((0, 8, 16, 32)) if rows >= 32 else rows
        self.extra.append(lambda: torch.tensor([first, rows - first]))
        if options["scale_bias"]:
            leading = self.leading
            self.extra.append(lambda: torch.rand(leading))


def digest(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {str(value)[:60]}"
    if (
        hasattr(value, "dequantize")
        and type(value) is not Tensor
        and not isinstance(value, torch.nn.Parameter)
    ):
        value = value.dequantize()
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{str(value.dtype)[6:]}{list(value.shape)}{hashlib.sha1(data).hexdigest()[:10]}"


def vary_layout(grad: Tensor, draw: random.Random) -> Tensor:
    """The gradient with other strides, expanded, or unchanged."""
    way = draw.random()
    if way < 0.25:
        wide = torch.empty(*grad.shape[:-1], 2 * grad.shape[-1], dtype=grad.dtype)[..., ::2]
        return wide.copy_(grad)
    if way < 0.4 and grad.dim() > 1:
        return grad.transpose(0, -1).contiguous().transpose(0, -1)
    if way < 0.55:
        return grad.flatten()[:1].reshape((1,) * grad.dim()).expand(grad.shape)
    return grad


def states(chain: Any) -> list[Tensor]:
    """Delayed-scaling scales and histories of all operations."""
    return [
        getattr(state, name)
        for op in chain.modules()
        if isinstance(op, ops.BasicOperation)
        for mode in ("forward", "backward")
        for state in op.delayed_states(mode)
        for name in ("scale", "amax_history")
    ]


def change(chain: Any, draw: random.Random) -> None:
    """Change an attribute between two calls: the mode, or which parameters are frozen."""
    way = draw.random()
    if way < 0.3:
        chain.train(not chain.training)
    elif way < 0.6:
        for parameter in chain.parameters():
            if draw.random() < 0.3:
                parameter.requires_grad_(not parameter.requires_grad)
    elif way < 0.8:
        with torch.no_grad():
            for parameter in chain.parameters():
                if not hasattr(parameter, "dequantize") or isinstance(
                    parameter, torch.nn.Parameter
                ):
                    parameter.mul_(1.25)


def run(
    number: int, compiled: bool = False, most_calls: int = 3, contiguous_grads: bool = False
) -> list[str]:
    """Digests of results, gradients and states in a chain's calls; if a call raises, its message."""
    torch.manual_seed(number)
    instance = Described(number)
    draw, wide, recipe = instance.draw, instance.wide, RECIPES[instance.recipe]
    quantized = recipe is not None and wide.random() < 0.1
    try:
        with te.quantized_model_init(enabled=quantized, recipe=recipe):
            for _ in range(draw.randint(1, 7)):
                instance.add()
    except (RuntimeError, ValueError) as error:  # stacks and small widths cannot be quantized
        return [str(number), digest(error)]
    if not instance.ops:
        return []
    names = [type(op).__name__ for op in instance.ops]
    chain = ops.Sequential(*instance.ops)
    chain.train(draw.random() < 0.8)
    for parameter in chain.parameters():
        parameter.requires_grad_(draw.random() < 0.8)
        if instance.accumulates and parameter.dim() > 1:
            parameter.main_grad = torch.zeros(parameter.shape)
    x = torch.randn(*(instance.leading if not names.count("Reshape") else (ROWS,)), WIDTH).to(
        instance.dtype
    )
    if wide.random() < 0.3:
        x = vary_layout(x, wide)
    # A reshape has chosen the dimensions of later operations; the first ones take a matrix.
    collected = [f"{number} {instance.recipe} {str(instance.dtype)[6:]} {names}"]
    needs, grads, narrow = draw.random() < 0.8, draw.random() < 0.9, draw.random() < 0.1
    recomputes, extra_only = wide.random() < 0.05, wide.random() < 0.1
    te.fp8.FP8GlobalStateManager.reset()
    called: Any = chain
    if compiled:
        torch._dynamo.reset()
        called = torch.compile(chain, fullgraph=True, backend="aot_eager", dynamic=False)
    calls = 2 if instance.recipe == "delayed" else min(wide.choice((1, 1, 2, 3)), most_calls)
    for call in range(calls):
        if call and wide.random() < 0.5:
            change(chain, wide)
        extra = [make() for make in instance.extra]
        of_extra = draw.random() < 0.6
        leaves = [
            tensor.requires_grad_(of_extra) if tensor.is_floating_point() else tensor
            for tensor in extra
        ]
        leaf = x.clone().requires_grad_(needs)
        results: list[Any] = []
        try:
            with (
                torch.set_grad_enabled(grads),
                torch.autocast("cpu", torch.bfloat16, enabled=narrow),
                te.autocast(enabled=recipe is not None, recipe=recipe),
            ):
                args = [
                    t * 1 if t.is_floating_point() and draw.random() < 0.5 else t for t in leaves
                ]
                given_x = leaf * 1 if draw.random() < 0.5 else leaf
                if recomputes:
                    outputs = te.checkpoint(
                        called, given_x, *args, use_reentrant=wide.random() < 0.5
                    )
                else:
                    outputs = called(given_x, *args)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            results += outputs
            reached = [
                y for y in outputs if y.requires_grad and (y is outputs[0] or draw.random() < 0.7)
            ]
            if extra_only and len(reached) > 1 and reached[0] is outputs[0]:
                del reached[0]
            if reached:
                weights = [vary_layout(torch.randn(y.shape).to(y.dtype), draw) for y in reached]
                if contiguous_grads:
                    weights = [weight.contiguous() for weight in weights]
                torch.autograd.backward(reached, weights)
                results += [
                    leaf.grad,
                    *[t.grad for t in leaves],
                    *[p.grad for p in chain.parameters()],
                ]
                results += [getattr(p, "main_grad", None) for p in chain.parameters()]
            results += [*args, given_x]  # an operation may write into extra inputs
        except Exception as error:  # the message is compared
            results.append(error)
        for parameter in chain.parameters():
            parameter.grad = None
        collected += [digest(result) for result in [*results, *states(chain)]]
    return collected


def compare_compiled(number: int) -> str:
    """Compare a compiled chain with eager mode: "equal", "raises" if eager mode does, or both digests.

    The output gradients are contiguous in eager mode: a compiled graph copies other layouts before it runs
    the backward pass, and torch adds a transposed tensor's elements in another order.
    """
    eager = run(number, most_calls=1, contiguous_grads=True)
    if any("Error: " in part for part in eager):
        return f"{number} raises"
    compiled = run(number, compiled=True, most_calls=1)
    return f"{number} equal" if eager == compiled else "\n".join(map(" ".join, (eager, compiled)))


def main(first: int, last: int, compiled: bool) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with emulate():
        for number in range(first, last):
            print(compare_compiled(number) if compiled else " ".join(run(number)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), "compiled" in sys.argv)
