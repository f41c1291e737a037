"""The casts that `cast_verification` compares: single conversions in the kernels, and producers that return codes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...common.dispatch import use_backend
from ...common.formats import E4M3, E5M2, FLOAT8, Element
from ..primitives.activation import DEFAULT_PARAMS, activation_backward, activation_forward
from ..primitives.column_sums import column_sums
from ..primitives.norm import layernorm_forward, rmsnorm_forward
from ..primitives.quantize import Cast, Quantized, QuantizeSpec, quantize_as, torch_dtype
from ..runtime import launching
from ..runtime.device import current_hardware
from . import self_test_products

Pairs = Iterator[tuple[Tensor, Tensor]]
Producer = Callable[[Tensor, "Cast | None"], "Quantized | Tensor"]


def has_row_blocks(spec: QuantizeSpec) -> bool:
    """Return whether consecutive elements in a row share a scale, and no others."""
    block = spec.format.block
    return block is not None and block[0] == 1 and not spec.two_dimensional


# Quantizations with block scales that one operation per element defines.
VERIFIED_SPECS = {
    name: spec
    for name, spec in self_test_products.SPECS.items()
    if spec.format.block is not None and not spec.hadamard and not spec.stochastic
}
BLOCK_SPECS = {name: spec for name, spec in VERIFIED_SPECS.items() if has_row_blocks(spec)}


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in row-major order."""
    # A one-element dimension may have any stride, also in a contiguous tensor.
    return tensor.contiguous().view(-1).view(torch.uint8)


def conversions(element: Element, device: torch.device) -> dict[str, str]:
    """Return {name: compile-time argument} for the conversions to FP8 that a device can run; see `kernels.conversion`.

    GPUs newer than 8.9 also run the conversions for 8.9 (an instruction as inline PTX) and 8.0 (integers).
    """
    if device.type != "cuda":
        return {}
    from ...common.kernels import conversion  # with triton
    from ...common.kernels.launch import codes_dtype

    row = current_hardware()
    names = {"integers": conversion.INTEGERS[codes_dtype(element)]}
    if row.has("fp8 casts"):
        names = {"instruction": conversion.INSTRUCTION, **names}
    if row.has("triton fp8 casts"):
        names = {"native": conversion.NATIVE, **names}
    return names


@functools.cache
def _cast_launch(shape: tuple[int, int], element: Element, conversion: str, transposed: bool):
    from ...common.kernels.cast import cast

    launch = cast(shape, element, not transposed, transposed)
    return replace(launch, constants=(*launch.constants[:-1], conversion), handles={})


def encoded(
    x: Tensor, element: Element, name: str, multiplier: float, transposed: bool = False
) -> Tensor:
    """Convert x [M, K] * multiplier to codes [M, K] by one conversion; with `transposed`, to transposed codes [K, M].

    Args:
        x: Values, float32, bfloat16 or float16, contiguous.
        element: E4M3 or E5M2.
        name: A `conversions` key.
        multiplier: Exact in float32.
        transposed: Use the kernel that transposes.
    """
    conversion = conversions(element, x.device)[name]
    launch = _cast_launch((x.shape[0], x.shape[1]), element, conversion, transposed)
    factor = torch.full((1,), multiplier, device=x.device)
    return launching.run(launch, (x, factor, None))[1 if transposed else 0]


def decoded(element: Element, name: str, device: torch.device) -> Tensor:
    """Decode the 256 codes of an element to float32 by one conversion."""
    from ...common.kernels.fp8_attention import value_launch

    launch = value_launch(256, (0, 1), "float32")
    launch = replace(
        launch, constants=(*launch.constants[:-1], conversions(element, device)[name]), handles={}
    )
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(torch_dtype(element))
    return launching.run(launch, (codes, torch.ones(1, device=device), None, None))[0]


ROWS = 32  # in norm results: NVFP4 packs row pairs, MXFP8 scales 32 rows together


def _rmsnorm(x: Tensor, cast: Cast | None) -> Quantized | Tensor:
    # A row of ones has norm one, so that each result row is the weight.
    weight = x.reshape(-1)
    return rmsnorm_forward(
        torch.ones_like(weight).expand(ROWS, -1).contiguous(),
        weight,
        eps=0.0,
        zero_centered=False,
        cast=cast,
    )[0]


def _layernorm(x: Tensor, cast: Cast | None) -> Quantized | Tensor:
    # The normalized values of a constant row are zero, so that each result row is the bias.
    bias = x.reshape(-1)
    ones = torch.ones_like(bias)
    return layernorm_forward(ones.expand(ROWS, -1).contiguous(), ones, bias, 1e-5, False, cast)[0]


def _relu_gradient(x: Tensor, cast: Cast | None) -> Quantized | Tensor:
    gradient = activation_backward("relu", x, torch.ones_like(x), DEFAULT_PARAMS, cast)
    return (
        gradient[0]
        if isinstance(gradient, tuple) and not isinstance(gradient, Quantized)
        else gradient
    )


def _relu(x: Tensor, cast: Cast | None) -> Quantized | Tensor:
    return activation_forward("relu", x, DEFAULT_PARAMS, cast)


def _column_sums(x: Tensor, cast: Cast | None) -> Quantized | Tensor:
    return x if cast is None else column_sums(x, torch.float32, cast)[0]


# Producers whose results are, for some inputs, every number in a 16-bit dtype (for ReLU: every number without sign).
PRODUCERS: dict[str, Producer] = {
    "RMSNorm": _rmsnorm,
    "LayerNorm": _layernorm,
    "ReLU": _relu,
    "gradient of ReLU": _relu_gradient,
    "column sums": _column_sums,
}


def producers(
    halves: Callable[[torch.dtype], Tensor], exponents: Sequence[int]
) -> Iterator[tuple[str, Callable[[], Pairs]]]:
    """Yield (name, comparison) for each producer and format.

    Args:
        halves: Returns every number in a 16-bit dtype, [256, 256].
        exponents: Exponents of the scales that are given to FP8 casts.
    """
    device = halves(torch.bfloat16).device
    factors = [torch.full((1,), 2.0**exponent, device=device) for exponent in exponents]
    for title, producer in PRODUCERS.items():
        for element in (E4M3, E5M2):
            casts = [Cast(QuantizeSpec(FLOAT8, element), factor) for factor in factors]
            name = f"codes of {title} in {element.name}, every result, given scales"
            yield name, partial(_compare_producer, halves, producer, casts)
        for name, spec in BLOCK_SPECS.items():
            yield (
                f"codes of {title} in {name}, every result",
                partial(_compare_producer, halves, producer, [Cast(spec)]),
            )


def _compare_producer(
    halves: Callable[[torch.dtype], Tensor], producer: Producer, casts: Sequence[Cast]
) -> Pairs:
    """Compare a producer that returns codes with the reference's cast."""
    for dtype in (torch.bfloat16, torch.float16):
        x = halves(dtype)
        values = producer(x, None)
        assert isinstance(values, Tensor)
        for cast in casts:
            outputs = producer(x, cast)
            with use_backend(quantize="reference", absolute_maximum="reference"):
                expected = quantize_as(values, cast)
            assert isinstance(outputs, Quantized)
            for actual, reference in zip(outputs, expected, strict=True):
                if actual is not None and reference is not None:
                    yield flat_bytes(actual), flat_bytes(reference)
