"""Random matrices and specs for every NVFP4 variant, and where kernels differ from the reference."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from transformer_engine.common.formats import E2M1, NVFP4_FORMATS
from transformer_engine.common.quantize_spec import BLOCK_ERRORS
from transformer_engine.pytorch.primitives.quantize import (
    FORMATS,
    Quantized,
    QuantizeRequest,
    QuantizeSpec,
)
from transformer_engine.pytorch.primitives.quantize.backends import REFERENCE
from transformer_engine.pytorch.primitives.quantize.format_row import QuantizeInputs

DIRECTIONS = ((True, True), (True, False), (False, True))
# Around 16-element blocks and 64-element tiles; a direction needs an even number of contracted elements.
EXTENTS = (1, 2, 3, 15, 16, 17, 18, 30, 33, 48, 64, 66, 80)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CONTENTS = (
    "normal",
    "rows apart",
    "zeros",
    "zero rows",
    "infinite",
    "nan",
    "ties",
    "tiny",
    "subnormal",
    "huge",
    "outlier",
)
# Values for which mapping a block's maximum to 4 and to 6 are both exact, or make the same error.
TIES = (6.0, -6.0, 0.0, 3.0, 1.5, -3.0, 4.5, 2.25, -0.0, 5.0, 12.0, 1536.0, 384.0)


def specs() -> list[QuantizeSpec]:
    """Every format, error measure and tile in every set of directions; other tests cover plain NVFP4."""
    outputs = []
    for (per_row, largest), error in itertools.product(NVFP4_FORMATS, ("", *BLOCK_ERRORS)):
        if not (per_row or error or largest != 448):
            continue
        for square, (rowwise, columnwise) in itertools.product((False, True), DIRECTIONS):
            if square and per_row:
                continue
            outputs.append(
                QuantizeSpec(
                    NVFP4_FORMATS[per_row, largest],
                    E2M1,
                    rowwise,
                    columnwise,
                    two_dimensional=square,
                    four_over_six=error,
                )
            )
    return outputs


def matrix(content: str, rows: int, depth: int, generator: torch.Generator) -> torch.Tensor:
    """float32 values [rows, depth] with one content."""
    x = torch.randn(rows, depth, generator=generator)
    somewhere = int(torch.randint(rows * depth, (1,), generator=generator))
    if content == "rows apart":
        x = x * torch.exp2(torch.randint(-14, 14, (rows, 1), generator=generator).float())
    elif content == "zeros":
        x = x * 0.0
    elif content == "zero rows":
        x[:: 2 if rows > 1 else 1] = 0.0
    elif content == "infinite":
        x.view(-1)[somewhere] = -torch.inf if somewhere % 2 else torch.inf
    elif content == "nan":
        x.view(-1)[somewhere] = torch.nan
    elif content == "ties":
        x = torch.tensor(TIES)[torch.randint(len(TIES), (rows, depth), generator=generator)]
    elif content == "tiny":
        x = x * 2.0**-120
    elif content == "subnormal":
        x = x * 2.0**-140
    elif content == "huge":
        x = x * 2.0**120
    elif content == "outlier":
        x.view(-1)[somewhere] = 3e4
    return x


def cases(count: int, device: str = "cpu") -> Iterator[tuple[str, QuantizeSpec, torch.Tensor]]:
    """(name, spec, matrix): every spec and content in turn, with random shapes and dtypes."""
    generator = torch.Generator().manual_seed(0)
    every = specs()
    for number in range(count):
        spec = every[number % len(every)]
        content = CONTENTS[number % len(CONTENTS)]
        rows, depth = (
            EXTENTS[int(i)] for i in torch.randint(len(EXTENTS), (2,), generator=generator)
        )
        rows += rows % 2 * spec.columnwise
        depth += depth % 2 * spec.rowwise
        dtype = DTYPES[number // len(every) % len(DTYPES)]
        x = matrix(content, rows, depth, generator).to(dtype)
        name = f"{number}: {spec.format.name} {spec.four_over_six or 'to 6'}, {content}, [{rows}, {depth}] {dtype}"
        yield name, spec, x.to(device)


def differing(spec: QuantizeSpec, x: torch.Tensor) -> list[str]:
    """Fields in `Quantized` in which the kernels' bits and the reference's differ on x's device."""
    request = QuantizeRequest(spec, (x.shape[0], x.shape[1]), x.dtype, x.device)
    plan = FORMATS[spec.format.name].plan
    assert plan is not None
    actual = plan(request)(x, QuantizeInputs())
    expected = REFERENCE.bind(request)(x, QuantizeInputs())
    return [
        name
        for name in Quantized._fields
        if not _same_bits(getattr(actual, name), getattr(expected, name))
    ]


def _same_bits(actual: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    """Equal bits; a NaN may have any sign and payload."""
    if actual is None or expected is None:
        return actual is expected
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not expected.dtype.is_floating_point:
        return torch.equal(actual, expected)
    nan = expected.float().isnan()
    if not torch.equal(actual.float().isnan(), nan):
        return False
    kind = torch.uint8 if expected.element_size() == 1 else torch.int32
    return torch.equal(actual.contiguous().view(kind)[~nan], expected.contiguous().view(kind)[~nan])
