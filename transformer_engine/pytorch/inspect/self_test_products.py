"""Self-test cases: casts, products, fused producers and grouped products, as data.

A case computes tensors from fixed random inputs. `self_test` runs it with every backend for its operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ...common import recipe as recipes
from ...common.formats import BLOCK_1D, BLOCK_2D, E2M1, E4M3, E5M2, FLOAT8, MXFP8, NVFP4
from ...common.self_test import ROUNDING_BOUNDS, SelfTestSizes
from ..module import GroupedLinear
from ..primitives.activation import DEFAULT_PARAMS, activation_backward, activation_forward
from ..primitives.column_sums import column_sums
from ..primitives.gemm import Epilogue, gemm, gemm_gelu, gemm_gelu_gradient
from ..primitives.norm import layernorm_forward, rmsnorm_forward
from ..primitives.operand import Operand
from ..primitives.quantize import Cast, Quantized, QuantizeSpec, dequantize, quantize, quantize_as
from ..quantization import autocast

Tensors = tuple[Tensor, ...]
Draw = Callable[..., Tensor]  # `draw_values` by device
# Rounding a bfloat16 result twice, and Hopper's 14-bit sums; relative error in the Frobenius norm.
PRODUCT_BOUND = 4e-3
# Rounding the product once moves 1/32 of the codes by one unit, 1/16 to 1/8 of the value: 1.6e-2.
CODES_BOUND = 3e-2
# The composed product is rounded to bfloat16 before GELU too.
GELU_BOUND = 8e-3


@dataclass(frozen=True)
class SelfTestCase:
    """A computation that all backends for an operation repeat.

    Attributes:
        path: Name under which the result is stored; `untested_reason(path)` returns it.
        name: Shape and options.
        operation: Name of the table whose backends are compared.
        compute: Results of the backend in force.
        bound: Largest relative error in the Frobenius norm; None: all bits must be equal.
        expected: Independent results; None: the table reference's results.
        baseline: The same computation in bfloat16 by torch, for the time ratio.
    """

    path: str
    name: str
    operation: str
    compute: Callable[[], Tensors]
    bound: float | None = None
    expected: Callable[[], Tensors] | None = None
    baseline: Callable[[], object] | None = None


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
    # Scales in the order of matrix instructions, which layers write where products read it.
    "mxfp8 swizzled": QuantizeSpec(MXFP8, E4M3, columnwise=True, tiled=True),
    "nvfp4 swizzled": QuantizeSpec(NVFP4, E2M1, columnwise=True, tiled=True),
}
# Path: left and right operand formats.
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
    "mxfp8 products of swizzled scales": (SPECS["mxfp8 swizzled"], SPECS["mxfp8 swizzled"]),
    "nvfp4 products": (SPECS["nvfp4"], SPECS["nvfp4"]),
    "nvfp4 products of swizzled scales": (SPECS["nvfp4 swizzled"], SPECS["nvfp4 swizzled"]),
}


def product_cases(draw: Draw, sizes: SelfTestSizes) -> Iterator[SelfTestCase]:
    """Yield casts, products and fused producers; inputs are allocated when a case is taken."""
    yield from _casts(draw, sizes)
    yield from _products(draw, sizes)
    yield from _fused(draw, sizes)


def draw_values(device: torch.device, *shape: int, seed: int = 0, spread: bool = True) -> Tensor:
    """Normal values in bfloat16; with `spread`, rows with different magnitudes and a zero block."""
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(shape, generator=generator, device=device)
    if spread:
        rows = (shape[0], *(1,) * (len(shape) - 1))
        values *= torch.exp2(torch.randint(-6, 6, rows, generator=generator, device=device))
        values.view(-1)[:32] = 0.0
    return values.bfloat16()


def _tensors(quantized: Quantized) -> Tensors:
    return tuple(tensor for tensor in quantized if tensor is not None)


def uneven_cases(draw: Draw, sizes: SelfTestSizes) -> Iterator[SelfTestCase]:
    """Yield casts of a matrix whose sizes are not multiples of the tiles, for which other kernels are compiled."""
    extent = sizes.large // 4 - 16  # a multiple of 16, the rows of a Hadamard transform
    x = draw(extent, extent)
    for name, spec in SPECS.items():
        call = partial(quantize, x, spec, random=_random(x, spec))
        path = f"{name} casts of uneven sizes"
        yield SelfTestCase(
            path,
            f"{extent} x {extent}",
            "quantize",
            lambda call=call: _tensors(call()),
            baseline=x.clone,
        )


def _random(x: Tensor, spec: QuantizeSpec) -> tuple[Tensor, Tensor] | None:
    """Random numbers of both directions for stochastic rounding, or None."""
    if not spec.stochastic:
        return None
    generator = torch.Generator(x.device).manual_seed(1)
    rows, columns = x.shape
    shapes = (rows, columns), (columns, rows)
    first, second = (torch.rand(shape, device=x.device, generator=generator) for shape in shapes)
    return first, second


def _casts(draw: Draw, sizes: SelfTestSizes) -> Iterator[SelfTestCase]:
    x = draw(sizes.large, sizes.large)
    for name, spec in SPECS.items():
        call = partial(quantize, x, spec, random=_random(x, spec))
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
            lambda call=call, spec=spec: (
                dequantize(_operand(call(), spec)._replace(dtype=torch.float32)),
            ),
            bound=ROUNDING_BOUNDS[spec.element.name],
            expected=lambda: (x.float(),),
        )
    multiplier = Cast(SPECS["fp8"], torch.full((1,), 8.0, device=x.device))
    yield SelfTestCase(
        "fp8 casts",
        "given scale",
        "quantize",
        lambda: _tensors(quantize_as(x, multiplier)),
        baseline=x.clone,
    )


@dataclass(frozen=True)
class _Matrix:
    """An operand, quantized when a case first runs, and its values in float32."""

    shape: tuple[int, int]
    make: Callable[[], Operand]

    @cached_property
    def operand(self) -> Operand:
        return self.make()

    @property
    def decoded(self) -> Tensor:
        return dequantize(self.operand._replace(dtype=torch.float32))


def _operand(quantized: Quantized, spec: QuantizeSpec) -> Operand:
    assert quantized.codes is not None
    return Operand(
        quantized.codes, quantized.scale, spec.operand_format, quantized.amax, torch.bfloat16
    )


def _matrix(x: Tensor, spec: QuantizeSpec | None) -> _Matrix:
    shape = x.shape[0], x.shape[1]
    if spec is None:
        return _Matrix(shape, lambda: Operand(x, dtype=x.dtype))
    return _Matrix(shape, lambda: _operand(quantize(x, spec), spec))


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
    x, w, spec = draw(k, n), draw(n, k, seed=1), SPECS["fp8"]
    stored = _matrix(x, spec)
    transposed = _Matrix((n, k), lambda: stored.operand._replace(codes=stored.operand.codes.t()))
    baseline = partial(torch.mm, x.t(), w.t())
    yield _product(
        "fp8 products in all layouts", transposed, _matrix(w, spec), "", draw(n, seed=2), baseline
    )


def _product(
    path: str, a: _Matrix, b: _Matrix, epilogue: str, bias: Tensor, baseline: Callable[[], object]
) -> SelfTestCase:
    """A product; its expected result is computed in float64."""
    (m, depth), (n, _) = a.shape, b.shape

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

    name = f"{m} x {n} x {depth}{', ' * bool(epilogue)}{epilogue}"
    return SelfTestCase(path, name, "gemm", compute, PRODUCT_BOUND, expected, baseline)


def _fused(draw: Draw, sizes: SelfTestSizes) -> Iterator[SelfTestCase]:
    """Yield producers that return codes; expected are the codes of two steps, by the same backend and the reference."""
    size = sizes.large
    x, dy = draw(size, size), draw(size, size // 2, seed=3)
    weight, bias = draw(size, seed=4), draw(size, seed=5)
    multiplier = torch.full((1,), 8.0, device=x.device)
    producers: dict[str, tuple[str, Callable[[Cast | None], Any]]] = {
        "rmsnorm": ("norm", lambda cast: rmsnorm_forward(x, weight, 1e-5, False, cast)[0]),
        "layernorm": (
            "norm",
            lambda cast: layernorm_forward(x, weight, bias, 1e-5, False, cast)[0],
        ),
        "swiglu": (
            "activation",
            lambda cast: activation_forward("swiglu", x, DEFAULT_PARAMS, cast),
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
            casts["given scale"] = Cast(SPECS[name], multiplier)
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
    yield from _fused_products(draw, sizes, multiplier)


def _fused_products(draw: Draw, sizes: SelfTestSizes, multiplier: Tensor) -> Iterator[SelfTestCase]:
    size = sizes.large
    x, w, z = draw(size, size), draw(size, size, seed=1), draw(size, size, seed=6)
    left, right = (_matrix(matrix, SPECS["fp8"]) for matrix in (x, w))
    codes = Cast(QuantizeSpec(FLOAT8, E4M3), multiplier)
    epilogue, baseline = Epilogue(torch.bfloat16), partial(torch.mm, x, w.t())

    def product() -> Tensors:
        # The product of the library records no maximum.
        return _tensors(gemm(left.operand, right.operand, epilogue, codes)._replace(amax=None))

    def activated() -> Tensors:
        return tuple(t for t in gemm_gelu(left.operand, right.operand, epilogue) if t is not None)

    def gradient() -> Tensors:
        return (gemm_gelu_gradient(left.operand, right.operand, z, epilogue),)

    calls = {
        "codes": (product, CODES_BOUND),
        "gelu": (activated, GELU_BOUND),
        "gelu gradient": (gradient, GELU_BOUND),
    }
    for name, (call, bound) in calls.items():
        yield SelfTestCase(
            "fp8 products with fused epilogues",
            name,
            "gemm_epilogue",
            call,
            bound,
            baseline=baseline,
        )


def grouped_cases(draw: Draw, sizes: SelfTestSizes) -> Iterator[SelfTestCase]:
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


def fp8_attention_recipes() -> tuple[tuple[str, str, recipes.Recipe], ...]:
    """(path, scaling, recipe) for attention in FP8 and MXFP8."""
    return (
        ("fp8 attention", "current", recipes.Float8CurrentScaling(fp8_dpa=True)),
        ("fp8 attention", "delayed", recipes.DelayedScaling(fp8_dpa=True)),
        ("mxfp8 attention", "block", recipes.MXFP8BlockScaling(fp8_dpa=True)),
    )
