"""Host microseconds and Python calls of warm passes through the modules, with a GPU that does nothing.

    python benchmarks/host_calls.py [--json FILE] [--only TEXT] [--profile]

us       the shortest of many calls, each timed alone, which excludes other processes' effect
python   Python function calls in one call
ours     calls to this package's functions, which do not depend on torch's version
c        C function calls from Python
A case is `module/recipe/pass`: f is a forward without gradients, fb forward and backward, each in its own `autocast`.
`pretended_gpu` states which parts are real. To compare two trees, run this file with each on PYTHONPATH in turns.
"""

from __future__ import annotations

import cProfile
import functools
import gc
import os
import pstats
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from pretended_gpu import pretend
from record import parser, write
from shortest import shortest
from torch import Tensor

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

ROWS, WIDTH = 128, 512  # every format supports these sizes without padding
RECIPES: dict[str, Callable[[], recipes.Recipe | None]] = {
    "none": lambda: None,
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
}


class Case(NamedTuple):
    name: str
    make: Callable[[], Callable[[], object]]


class Hole(torch.autograd.Function):
    """An attention without cost: the context [s, b, h * d] and the gradients of q, k and v, uninitialised."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.shapes = q.shape, k.shape, v.shape
        return q.new_empty((*q.shape[:-2], q.shape[-2] * v.shape[-1]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple([grad.new_empty(shape) for shape in ctx.shapes])


class Parameters(torch.autograd.Function):
    """A layer without cost, with a weight [WIDTH, WIDTH] per group, whose gradients are views of one stack."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.count = len(weights)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        stack = grad.new_empty((ctx.count, WIDTH, WIDTH))
        return torch.empty_like(grad), *stack.unbind(0)


class AutogradAlone(torch.nn.Module):
    """The part of a grouped layer's time that is autograd's: one node, and one gradient per parameter."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(
            [torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(groups)]
        )
        # iterating over the list calls a Python function per parameter
        self.each = tuple(self.weights)

    def forward(self, x: Tensor) -> Tensor:
        return Parameters.apply(x, *self.each)  # pyright: ignore[reportReturnType]


def _attention(self: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    return Hole.apply(q, k, v)  # pyright: ignore[reportReturnType]


def _linear() -> torch.nn.Module:
    return te.Linear(WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16)


def _linear_bias() -> torch.nn.Module:
    return te.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16)


def _layernorm_linear() -> torch.nn.Module:
    return te.LayerNormLinear(
        WIDTH, WIDTH, bias=False, normalization="RMSNorm", params_dtype=torch.bfloat16
    )


def _mlp() -> torch.nn.Module:
    return te.LayerNormMLP(
        WIDTH,
        WIDTH,
        bias=False,
        activation="swiglu",
        normalization="RMSNorm",
        params_dtype=torch.bfloat16,
    )


def _layer(fused: bool = True, groups: int | None = None) -> torch.nn.Module:
    return te.TransformerLayer(
        WIDTH,
        WIDTH,
        4,
        bias=False,
        activation="swiglu",
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        fuse_qkv_params=fused,
        num_gqa_groups=groups,
        params_dtype=torch.bfloat16,
    )


def _grouped(groups: int) -> torch.nn.Module:
    return te.GroupedLinear(groups, WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16)


def _norm() -> torch.nn.Module:
    return te.LayerNorm(WIDTH, dtype=torch.bfloat16)


def passes(
    build: Callable[[], torch.nn.Module],
    recipe: recipes.Recipe | None,
    backward: bool,
    **kwargs: Any,
) -> Callable[[], object]:
    """Create a module call: forward, and backward on request."""
    module = build()
    x = torch.zeros(ROWS, 1, WIDTH, dtype=torch.bfloat16, requires_grad=backward)
    grad = torch.zeros(ROWS, 1, WIDTH, dtype=torch.bfloat16)
    parameters = list(module.parameters())

    def forward() -> object:
        with torch.no_grad(), te.autocast(enabled=recipe is not None, recipe=recipe):
            return module(x, **kwargs)

    def both() -> object:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(x, **kwargs)
        y.backward(grad)
        return y

    return both if backward else forward


def cases() -> Iterator[Case]:
    def case(
        name: str, build: Callable[[], torch.nn.Module], kind: str, both: bool, **kwargs: Any
    ) -> Case:
        return Case(name, lambda: passes(build, RECIPES[kind](), both, **kwargs))

    modules = {
        "linear": _linear,
        "linear_bias": _linear_bias,
        "layernorm_linear": _layernorm_linear,
        "layernorm_mlp": _mlp,
        "layer": _layer,
    }
    for kind in RECIPES:
        for name, build in modules.items():
            yield case(f"{name}/{kind}/f", build, kind, False)
            yield case(f"{name}/{kind}/fb", build, kind, True)
        for groups in (4, 8, 64):
            name, build = f"grouped_linear_{groups}", functools.partial(_grouped, groups)
            yield case(f"{name}/{kind}/fb", build, kind, True, m_splits=[ROWS // groups] * groups)
    for kind in ("delayed", "current", "block"):
        yield case(f"linear/{kind}/fb_first", _linear, kind, True, is_first_microbatch=True)
        yield case(f"linear/{kind}/fb_later", _linear, kind, True, is_first_microbatch=False)
    for groups in (4, 8, 64):
        yield case(
            f"autograd_{groups}/none/fb", functools.partial(AutogradAlone, groups), "none", True
        )
    yield case("layernorm/none/f", _norm, "none", False)
    yield case("layernorm/none/fb", _norm, "none", True)
    yield Case("autocast/delayed/empty", lambda: _empty_block(recipes.DelayedScaling()))


def _empty_block(recipe: recipes.Recipe) -> Callable[[], object]:
    """Entering and leaving a block whose one layer has a state: the update of the forward's scales."""
    forward = passes(_linear, recipe, False)
    forward()

    def block(_owner: object = forward) -> None:
        with te.autocast(recipe=recipe):
            pass

    return block


class Calls(NamedTuple):
    python: int
    ours: int
    c: int


def calls(work: Callable[[], object]) -> Calls:
    """Count the functions that one call enters."""
    python = ours = c = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal python, ours, c
        if event == "call":
            python += 1
            ours += frame.f_globals.get("__name__", "").startswith("transformer_engine")
        elif event == "c_call":
            c += 1

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return Calls(python, ours, c)


def main() -> None:
    options = parser(
        __doc__, only="run the cases whose name contains one of these, with commas between them"
    )
    options.add_argument(
        "--calls", type=int, default=1000, help="how many calls the shortest is taken of"
    )
    options.add_argument("--profile", action="store_true", help="print where each case's time goes")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    os.environ["NVTE_USE_CUTLASS_GROUPED_GEMM"] = "1"  # as on a GPU, where it is the default
    te.DotProductAttention.forward = _attention  # pyright: ignore[reportAttributeAccessIssue]
    pretend()
    rows = []
    for case in cases():
        if not any(text in case.name for text in chosen.only.split(",")):
            continue
        work = case.make()
        rows.append({"case": case.name, **_measure_warm_case(work, chosen.calls)})
        print(
            "{case:32} {us:8} us {python:6} python {ours:6} ours {c:6} c".format(**rows[-1]),
            flush=True,
        )
        if chosen.profile:
            _profile(work)
    write(chosen.json, cases=rows)


def _measure_warm_case(work: Callable[[], object], times: int) -> dict[str, Any]:
    """Measure a warm case with garbage collection disabled."""
    for _ in range(20):
        work()
    gc.collect()
    gc.disable()
    # The minimum of several calls: some calls refill a pool that others take from.
    us, counted = shortest(work, times), min(calls(work) for _ in range(5))
    gc.enable()
    return {"us": round(us, 1), **counted._asdict()}


def _profile(work: Callable[[], object]) -> None:
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(200):
        work()
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
