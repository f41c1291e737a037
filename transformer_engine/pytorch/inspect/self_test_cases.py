"""The cases of the self-test: casts, products, fused producers, grouped products and attention, as data.

A case computes tensors from fixed random inputs. `self_test` runs it with every backend of its operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...common import recipe as recipes
from ...common.formats import BLOCK_1D, BLOCK_2D, E2M1, E4M3, E5M2, FLOAT8, MXFP8, NVFP4
from ..attention import DotProductAttention, GatedDeltaNet2Attention, GatedDeltaNetAttention
from ..module import GroupedLinear
from ..primitives.activation import DEFAULT_PARAMS, activation_backward, activation_forward
from ..primitives.column_sums import column_sums
from ..primitives.gemm import Epilogue, gemm, gemm_gelu, gemm_gelu_gradient
from ..primitives.norm import layernorm_forward, rmsnorm_forward
from ..primitives.operand import Operand
from ..primitives.quantize import Cast, Quantized, QuantizeSpec, dequantize, quantize, quantize_as
from ..quantization import autocast

Tensors = tuple[Tensor, ...]
# Rounding of a bfloat16 result, twice, and Hopper's 14-bit sums; relative error in the Frobenius norm.
PRODUCT_BOUND = 4e-3
# P is rounded to bfloat16 before the second product, dP and dS in the backward pass too.
ATTENTION_BOUND, FP8_ATTENTION_BOUND = 2e-2, 0.15
# Products of a chunk round their operands to bfloat16.
LINEAR_ATTENTION_BOUND = 4e-2
# A single rounding of the product moves 1/32 of the codes by one unit, 1/16 to 1/8 of the value: 1.6e-2.
CODES_BOUND = 3e-2
# The composed product is rounded to bfloat16 before GELU too.
GELU_BOUND = 8e-3
# Half a unit of the last place of E4M3, E5M2 and E2M1, relative to a value, in the mean of all values.
ROUNDING_BOUNDS = {"e4m3": 0.05, "e5m2": 0.1, "e2m1": 0.2}


@dataclass(frozen=True)
class SelfTestCase:
    """A computation that all backends of an operation repeat.

    Attributes:
        path: Name under which the result is stored; `untested_reason(path)` returns it.
        name: Shape and options.
        operation: Name of the table whose backends are compared.
        compute: Results of the backend in force.
        bound: Largest relative error in the Frobenius norm; None: all bits must be equal.
        expected: Independent results; None: those of the table's reference.
        baseline: The same computation in bfloat16 by torch, for the ratio of times.
    """

    path: str
    name: str
    operation: str
    compute: Callable[[], Tensors]
    bound: float | None = None
    expected: Callable[[], Tensors] | None = None
    baseline: Callable[[], object] | None = None


@dataclass(frozen=True)
class SelfTestSizes:
    """Extents of the cases: `large` of a matrix, `small` of few rows, `tokens` of attention."""

    large: int = 4096
    small: int = 16
    tokens: int = 1024


SAMPLE = SelfTestSizes(large=256, small=16, tokens=64)
SPECS = {
    "fp8": QuantizeSpec(FLOAT8, E4M3, columnwise=True),
    "fp8 e5m2": QuantizeSpec(FLOAT8, E5M2, columnwise=True),
    "fp8 block 1x128": QuantizeSpec(BLOCK_1D, E4M3, columnwise=True),
    "fp8 block 128x128": QuantizeSpec(BLOCK_2D, E4M3, columnwise=True),
    "fp8 block 1x128 powers": QuantizeSpec(BLOCK_1D, E4M3, columnwise=True, power_of_two=True),
    "fp8 block 128x128 powers": QuantizeSpec(BLOCK_2D, E4M3, columnwise=True, power_of_two=True),
    "mxfp8": QuantizeSpec(MXFP8, E4M3, columnwise=True),
    "mxfp8 e5m2": QuantizeSpec(MXFP8, E5M2, columnwise=True),
    "nvfp4": QuantizeSpec(NVFP4, E2M1, columnwise=True),
    "nvfp4 16x16": QuantizeSpec(NVFP4, E2M1, columnwise=True, two_dimensional=True),
    "nvfp4 hadamard": QuantizeSpec(NVFP4, E2M1, columnwise=True, hadamard=True),
    "nvfp4 stochastic": QuantizeSpec(NVFP4, E2M1, columnwise=True, stochastic=True),
}
# Path: formats of the left and the right operand.
PRODUCTS = {
    "bf16 products": (None, None),
    "fp8 products": (SPECS["fp8"], SPECS["fp8"]),
    "fp8 products of gradients": (SPECS["fp8 e5m2"], SPECS["fp8"]),
    "fp8 block products": (SPECS["fp8 block 1x128"], SPECS["fp8 block 128x128"]),
    "fp8 block products of gradients": (SPECS["fp8 block 1x128"], SPECS["fp8 block 1x128"]),
    "fp8 block products of power-of-two scales": (
        SPECS["fp8 block 1x128 powers"],
        SPECS["fp8 block 128x128 powers"],
    ),
    "mxfp8 products": (SPECS["mxfp8"], SPECS["mxfp8"]),
    "mxfp8 products of gradients": (SPECS["mxfp8 e5m2"], SPECS["mxfp8"]),
    "nvfp4 products": (SPECS["nvfp4"], SPECS["nvfp4"]),
}


def cases(device: torch.device, sizes: SelfTestSizes) -> Iterator[SelfTestCase]:
    """Yield the cases, those that decide about recipes first; inputs are allocated when a case is taken."""
    draw = partial(_draw, device)
    yield from _casts(draw, sizes)
    yield from _products(draw, sizes)
    yield from _fused(draw, sizes)
    yield from _attention(draw, sizes)
    yield from _linear_attention(draw, sizes)
    yield from _grouped(draw, sizes)


def _draw(device: torch.device, *shape: int, seed: int = 0, spread: bool = True) -> Tensor:
    """Normal values in bfloat16; with `spread`, rows of different magnitudes and a block of zeros."""
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(shape, generator=generator, device=device)
    if spread:
        rows = (shape[0], *(1,) * (len(shape) - 1))
        values *= torch.exp2(torch.randint(-6, 6, rows, generator=generator, device=device))
        values.view(-1)[:32] = 0.0
    return values.bfloat16()


Draw = Callable[..., Tensor]


def _tensors(quantized: Quantized) -> Tensors:
    return tuple(tensor for tensor in quantized if tensor is not None)


def _casts(draw: Draw, sizes: SelfTestSizes) -> Iterator[SelfTestCase]:
    x = draw(sizes.large, sizes.large)
    for name, spec in SPECS.items():
        random = None
        if spec.stochastic:
            generator = torch.Generator(x.device).manual_seed(1)
            random = tuple(
                torch.rand(shape, device=x.device, generator=generator) for shape in (x.shape, x.shape[::-1])
            )
        call = partial(quantize, x, spec, random=random)  # pyright: ignore[reportArgumentType]
        shape = f"{sizes.large} x {sizes.large}"
        yield SelfTestCase(
            f"{name} casts", shape, "quantize", lambda call=call: _tensors(call()), baseline=x.clone
        )
        if spec.stochastic or spec.hadamard:
            continue
        yield SelfTestCase(
            f"{name} casts",
            f"{shape}, decoded",
            "quantize",
            lambda call=call, spec=spec: (_operand(call(), spec).decoded,),
            bound=ROUNDING_BOUNDS[spec.element.name],
            expected=lambda: (x.float(),),
        )
    given = Cast(SPECS["fp8"], torch.full((1,), 8.0, device=x.device))
    yield SelfTestCase(
        "fp8 casts", "given scale", "quantize", lambda: _tensors(quantize_as(x, given)), baseline=x.clone
    )


@dataclass(frozen=True)
class _Matrix:
    """An operand and its values in float32."""

    operand: Operand

    @property
    def decoded(self) -> Tensor:
        return dequantize(self.operand._replace(dtype=torch.float32))


def _operand(quantized: Quantized, spec: QuantizeSpec) -> _Matrix:
    codes = quantized.codes
    assert codes is not None
    return _Matrix(Operand(codes, quantized.scale, spec.operand_format, quantized.amax, torch.bfloat16))


def _matrix(x: Tensor, spec: QuantizeSpec | None) -> _Matrix:
    if spec is None:
        return _Matrix(Operand(x, dtype=x.dtype))
    return _operand(quantize(x, spec), spec)


def _products(draw: Draw, sizes: SelfTestSizes) -> Iterator[SelfTestCase]:
    n = k = sizes.large
    for path, specs in PRODUCTS.items():
        for rows in (sizes.large, sizes.small):
            x, w = draw(rows, k), draw(n, k, seed=1)
            a, b = _matrix(x, specs[0]), _matrix(w, specs[1])
            bias = draw(n, seed=2)
            baseline = partial(torch.mm, x, w.t())
            for epilogue in ("", "bias", "accumulate") if rows == sizes.large else ("",):
                yield _product(path, a, b, epilogue, bias, baseline)
    # FP8 codes whose contracted axis is not contiguous, from which a transposed copy would be made elsewhere.
    x, w = draw(k, n), draw(n, k, seed=1)
    q, spec = quantize(x, SPECS["fp8"]), SPECS["fp8"]
    assert q.codes is not None
    transposed = _Matrix(Operand(q.codes.t(), q.scale, spec.format, q.amax, torch.bfloat16))
    baseline = partial(torch.mm, x.t(), w.t())
    yield _product("fp8 products in all layouts", transposed, _matrix(w, spec), "", draw(n, seed=2), baseline)


def _product(
    path: str, a: _Matrix, b: _Matrix, epilogue: str, bias: Tensor, baseline: Callable[[], object]
) -> SelfTestCase:
    """A product; its expected result is computed in float64."""
    m, n = a.operand.rows, b.operand.rows

    def compute() -> Tensors:
        if epilogue == "accumulate":
            out = torch.ones((m, n), device=bias.device)
            return (gemm(a.operand, b.operand, Epilogue(torch.float32, out=out, accumulate=True)),)
        added = bias if epilogue == "bias" else None
        return (gemm(a.operand, b.operand, Epilogue(torch.bfloat16, added)),)

    def expected() -> Tensors:
        exact = a.decoded.double() @ b.decoded.double().t()
        if epilogue:
            exact += bias.double() if epilogue == "bias" else 1.0
        return (exact,)

    name = f"{m} x {n} x {b.operand.depth}{', ' * bool(epilogue)}{epilogue}"
    return SelfTestCase(path, name, "gemm", compute, PRODUCT_BOUND, expected, baseline)


def _fused(draw: Draw, sizes: SelfTestSizes) -> Iterator[SelfTestCase]:
    """Yield producers that return codes; expected are the codes of two steps, by the same backend and the reference."""
    size = sizes.large
    x, dy = draw(size, size), draw(size, size // 2, seed=3)
    weight, bias = draw(size, seed=4), draw(size, seed=5)
    given = torch.full((1,), 8.0, device=x.device)
    producers: dict[str, tuple[str, Callable[[Cast | None], Any]]] = {
        "rmsnorm": ("norm", lambda cast: rmsnorm_forward(x, weight, 1e-5, False, cast)[0]),
        "layernorm": ("norm", lambda cast: layernorm_forward(x, weight, bias, 1e-5, False, cast)[0]),
        "swiglu": (
            "activation",
            lambda cast: activation_forward("swiglu", x, DEFAULT_PARAMS, cast),  # pyright: ignore
        ),
        "swiglu gradient": (
            "activation",
            lambda cast: (
                activation_backward("swiglu", dy, x)
                if cast is None
                else activation_backward("swiglu", dy, x, DEFAULT_PARAMS, cast)[0]
            ),
        ),
        "column sums": (
            "column_sums",
            lambda cast: x if cast is None else column_sums(x, torch.float32, cast)[0],
        ),
    }
    for name in ("fp8", "fp8 block 1x128", "mxfp8", "nvfp4"):
        casts = {"": Cast(SPECS[name])}
        if name == "fp8":
            casts["given scale"] = Cast(SPECS[name], given)
        for suffix, cast in casts.items():
            for producer, (operation, call) in producers.items():
                yield SelfTestCase(
                    f"{name} codes of fused producers",
                    f"{producer}{', ' * bool(suffix)}{suffix}",
                    operation,
                    lambda call=call, cast=cast: _tensors(call(cast)),
                    expected=lambda call=call, cast=cast: _tensors(quantize_as(call(None), cast)),
                    baseline=partial(call, None) if producer != "column sums" else x.clone,
                )
    yield from _fused_products(draw, sizes, given)


def _fused_products(draw: Draw, sizes: SelfTestSizes, given: Tensor) -> Iterator[SelfTestCase]:
    size = sizes.large
    x, w, z = draw(size, size), draw(size, size, seed=1), draw(size, size, seed=6)
    a, b = (_matrix(matrix, SPECS["fp8"]).operand for matrix in (x, w))
    codes = Cast(QuantizeSpec(FLOAT8, E4M3), given)
    epilogue, baseline = Epilogue(torch.bfloat16), partial(torch.mm, x, w.t())
    calls: dict[str, tuple[Callable[[], Tensors], float]] = {
        # The product of the library records no maximum.
        "codes": (lambda: _tensors(gemm(a, b, epilogue, codes)._replace(amax=None)), CODES_BOUND),
        "gelu": (lambda: tuple(t for t in gemm_gelu(a, b, epilogue) if t is not None), GELU_BOUND),
        "gelu gradient": (lambda: (gemm_gelu_gradient(a, b, z, epilogue),), GELU_BOUND),
    }
    for name, (call, bound) in calls.items():
        yield SelfTestCase(
            "fp8 products with fused epilogues", name, "gemm_epilogue", call, bound, baseline=baseline
        )


def _grouped(draw: Draw, sizes: SelfTestSizes) -> Iterator[SelfTestCase]:
    size = sizes.large // 4
    splits = [size // 2, 0, size, size // 2]
    x = draw(sum(splits), size)
    by_name = {
        "bf16": None,
        "fp8": recipes.Float8CurrentScaling(),
        "fp8 block": recipes.Float8BlockScaling(),
        "mxfp8": recipes.MXFP8BlockScaling(),
        "nvfp4": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
    }
    options = {"bias": False, "params_dtype": torch.bfloat16, "device": x.device}
    for name, recipe in by_name.items():
        layer = GroupedLinear(len(splits), size, size, **options)
        with torch.no_grad():
            for index, parameter in enumerate(layer.parameters()):
                parameter.copy_(draw(size, size, seed=index))

        def compute(layer: GroupedLinear = layer, recipe: Any = recipe) -> Tensors:
            tokens = x.clone().requires_grad_()
            with autocast(enabled=recipe is not None, recipe=recipe):
                y = layer(tokens, splits)
            gradients = torch.autograd.grad(y, [tokens, *layer.parameters()], x)
            return (y.detach(), *gradients)

        def baseline(layer: GroupedLinear = layer) -> None:
            weights = list(layer.parameters())
            for part, weight in zip(x.split(splits), weights, strict=True):
                _ = part @ weight.t(), part @ weight, part.t() @ part

        yield SelfTestCase(
            f"grouped {name} products",
            f"{len(splits)} groups, {size} x {size}",
            "grouped_gemm",
            compute,
            PRODUCT_BOUND * 2,
            baseline=baseline,
        )


def _attention(draw: Draw, sizes: SelfTestSizes) -> Iterator[SelfTestCase]:
    for heads, groups, depth in ((16, 16, 128), (16, 4, 64)):
        q = draw(2, sizes.tokens, heads, depth, spread=False)
        k, v = (draw(2, sizes.tokens, groups, depth, seed=seed, spread=False) for seed in (1, 2))
        name = f"2 x {sizes.tokens}, {heads} and {groups} heads of {depth}, causal"
        shared = {"bound": ATTENTION_BOUND, "baseline": partial(_torch_attention, q, k, v)}
        yield SelfTestCase("attention", name, "attention", partial(_attend, q, k, v, None, True), **shared)
        if groups == heads:
            forward = partial(_attend, q, k, v, None, False)
            yield SelfTestCase("attention", f"{name}, forward", "attention", forward, ATTENTION_BOUND)
            for path, scaling, recipe in (
                ("fp8 attention", "current", recipes.Float8CurrentScaling(fp8_dpa=True)),
                ("fp8 attention", "delayed", recipes.DelayedScaling(fp8_dpa=True)),
                ("mxfp8 attention", "block", recipes.MXFP8BlockScaling(fp8_dpa=True)),
            ):
                yield SelfTestCase(
                    path,
                    f"{name}, {scaling} scaling",
                    "fp8_attention",
                    partial(_attend, q, k, v, recipe, True),
                    FP8_ATTENTION_BOUND,
                    baseline=shared["baseline"],
                )


def _attend(q: Tensor, k: Tensor, v: Tensor, recipe: Any, backward: bool) -> Tensors:
    layer = DotProductAttention(q.shape[2], q.shape[3], num_gqa_groups=k.shape[2], qkv_format="bshd")
    query, key, value = (x.clone().requires_grad_(backward) for x in (q, k, v))
    with autocast(enabled=recipe is not None, recipe=recipe), torch.set_grad_enabled(backward):
        out = layer(query, key, value, attn_mask_type="causal")
    if not backward:
        return (out,)
    return (out.detach(), *torch.autograd.grad(out, (query, key, value), q.reshape(out.shape)))


def _torch_attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    inputs = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    repeated = inputs[0].shape[1] // inputs[1].shape[1]
    key, value = (x.repeat_interleave(repeated, 1) for x in inputs[1:])
    out = F.scaled_dot_product_attention(inputs[0], key, value, is_causal=True)
    torch.autograd.grad(out, inputs, out.detach())


def _linear_attention(draw: Draw, sizes: SelfTestSizes) -> Iterator[SelfTestCase]:
    for size in (64, 128):
        q, k, v = (draw(2, sizes.tokens, 4, size, seed=seed, spread=False) for seed in range(3))
        logits = [draw(2, sizes.tokens, 4, size, seed=seed, spread=False) for seed in range(3, 6)]
        decay, erase, write = (
            F.logsigmoid(logits[0].float()),
            torch.sigmoid(logits[1]),
            torch.sigmoid(logits[2]),
        )
        of_heads = (decay[..., 0], erase[..., 0].float())
        modules: dict[str, tuple[torch.nn.Module, Tensors]] = {
            "Gated DeltaNet": (GatedDeltaNetAttention(4, size, "bshd"), of_heads),
            "Gated DeltaNet 2": (GatedDeltaNet2Attention(4, size, "bshd"), (decay, erase, write)),
        }
        for title, (module, gates) in modules.items():
            compute = partial(_delta_rule, module, (q, k, v, *gates))
            name = f"{title}, 2 x {sizes.tokens}, 4 heads of {size}"
            yield SelfTestCase("linear attention", name, "linear_attention", compute, LINEAR_ATTENTION_BOUND)


def _delta_rule(module: torch.nn.Module, tensors: Tensors) -> Tensors:
    inputs = [x.clone().requires_grad_() for x in tensors]
    out = module(*inputs, use_qk_l2norm_in_kernel=True)
    return (out.detach(), *torch.autograd.grad(out, inputs, tensors[0].reshape(out.shape)))
