"""Run every quantization kernel in Triton's interpreter, compare with the reference, print {case: equal} as JSON.

By default the cases cover all pairs among specification, content and shape; `--all` runs their product.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.kernels import interpreter
from transformer_engine.common.formats import (
    BLOCK_1D,
    BLOCK_2D,
    E2M1,
    E4M3,
    E5M2,
    FLOAT8,
    MXFP8,
    NVFP4,
)
from transformer_engine.common.kernels import cast
from transformer_engine.pytorch.primitives.quantize import (
    FORMATS,
    Quantized,
    QuantizeRequest,
    QuantizeSpec,
)
from transformer_engine.pytorch.primitives.quantize.backends import REFERENCE
from transformer_engine.pytorch.primitives.quantize.format_row import QuantizeInputs
from transformer_engine.pytorch.runtime import launching

SPECS = {
    "float8": QuantizeSpec(FLOAT8, E4M3),
    "float8-both": QuantizeSpec(FLOAT8, E5M2, columnwise=True),
    "float8-power-of-two": QuantizeSpec(
        FLOAT8, E4M3, columnwise=True, power_of_two=True, epsilon=0.25
    ),
    "float8-columnwise": QuantizeSpec(FLOAT8, E4M3, rowwise=False, columnwise=True),
    "block1d": QuantizeSpec(BLOCK_1D, E4M3, power_of_two=True),
    "block1d-both": QuantizeSpec(BLOCK_1D, E5M2, columnwise=True, power_of_two=True),
    "block1d-float32-scales": QuantizeSpec(BLOCK_1D, E4M3, columnwise=True, epsilon=0.25),
    "block2d-both": QuantizeSpec(BLOCK_2D, E4M3, columnwise=True, power_of_two=True),
    "block2d-float32-scales": QuantizeSpec(BLOCK_2D, E5M2, columnwise=True),
    "mxfp8-both": QuantizeSpec(MXFP8, E4M3, columnwise=True),
    "mxfp8-square": QuantizeSpec(MXFP8, E5M2, columnwise=True, two_dimensional=True),
    "nvfp4-both": QuantizeSpec(NVFP4, E2M1, columnwise=True),
    "nvfp4-square": QuantizeSpec(NVFP4, E2M1, columnwise=True, two_dimensional=True),
    "nvfp4-hadamard": QuantizeSpec(NVFP4, E2M1, columnwise=True, hadamard=True, stochastic=True),
    "nvfp4-square-stochastic": QuantizeSpec(
        NVFP4, E2M1, columnwise=True, two_dimensional=True, stochastic=True
    ),
}
SPECS |= {
    "mxfp8-tiled": QuantizeSpec(MXFP8, E4M3, columnwise=True, tiled=True),
    "mxfp8-tiled-rows": QuantizeSpec(MXFP8, E4M3, tiled=True),
    "mxfp8-tiled-square": QuantizeSpec(
        MXFP8, E5M2, columnwise=True, two_dimensional=True, tiled=True
    ),
    "nvfp4-tiled": QuantizeSpec(NVFP4, E2M1, columnwise=True, tiled=True),
    "nvfp4-tiled-hadamard": QuantizeSpec(NVFP4, E2M1, columnwise=True, hadamard=True, tiled=True),
    "nvfp4-tiled-square": QuantizeSpec(
        NVFP4, E2M1, columnwise=True, two_dimensional=True, tiled=True
    ),
}
CONTENTS = ("normal", "special", "tiny", "zero")
# (rows, columns, whether a scale is given)
SHAPES = ((128, 128, False), (144, 66, True), (80, 130, True), (129, 33, False))


def matrix(rows: int, depth: int, content: str, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(rows, depth, generator=torch.Generator().manual_seed(rows * depth)) * 3.0
    if content == "special":
        values[0, 0], values[-1, -1], values[rows // 2, 0] = torch.nan, torch.inf, -torch.inf
        values[1:2] = 0.0
    elif content == "tiny":
        values *= 2.0**-124
    elif content == "zero":
        values.zero_()
    return values.to(dtype)


def is_equal(spec: QuantizeSpec, x: torch.Tensor, scale: torch.Tensor | None) -> bool:
    random = (torch.rand(x.shape), torch.rand(x.shape[::-1])) if spec.stochastic else None
    request = QuantizeRequest(spec, (x.shape[0], x.shape[1]), x.dtype, x.device, scale is not None)
    expected = REFERENCE.bind(request)(x, QuantizeInputs(scale, random=random))
    plan = FORMATS[spec.format.name].plan
    assert plan is not None
    actual = plan(request)(x, QuantizeInputs(scale, random=random))
    return all(
        interpreter.same_bits(getattr(actual, name), getattr(expected, name))
        for name in Quantized._fields
    )


def compare_zero_multiplier() -> dict[tuple[float, str], bool]:
    """If a given multiplier is 0, both kernels use it unchanged, or as 1 if the caller requests it."""
    x, equal = matrix(80, 130, "normal", torch.bfloat16), {}
    zero, one = torch.zeros(1), torch.ones(1)
    for spec in (SPECS["float8"], SPECS["float8-both"]):
        shape, directions = (80, 130), (spec.element, spec.rowwise, spec.columnwise)
        request = QuantizeRequest(spec, shape, x.dtype, x.device, True)
        for zero_is_one, read in ((False, zero), (True, one)):
            program = cast.one_scale(shape, *directions, cast.MEASURED, zero_is_one=zero_is_one)
            actual = Quantized(*launching.Performed(program, x.device)(x, zero))
            expected = REFERENCE.bind(request)(x, QuantizeInputs(read))
            equal[float(read), "both" if spec.columnwise else "rows"] = all(
                interpreter.same_bits(getattr(actual, name), getattr(expected, name))
                for name in Quantized._fields
            )
    return equal


def main() -> None:
    interpreter.repair()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    launching.processors = lambda device: launching.Processors(3, 1 << 16)
    results = {}
    dtypes = itertools.cycle((torch.bfloat16, torch.float32, torch.float16))
    for number, ((name, spec), content) in enumerate(itertools.product(SPECS.items(), CONTENTS)):
        equal = True
        # Each specification's shapes are shifted by one against the previous specification.
        chosen = (
            SHAPES
            if "--all" in sys.argv
            else SHAPES[(number + number // len(CONTENTS)) % len(SHAPES) :][:1]
        )
        for rows, depth, scaled in chosen:
            if spec.format == NVFP4 and depth % 2:
                rows, depth = 16, 34
            argument = torch.tensor([1.7]) if scaled and spec.format == FLOAT8 else None
            equal = equal and is_equal(spec, matrix(rows, depth, content, next(dtypes)), argument)
        results[f"{name}/{content}"] = equal
    results |= {
        f"float8/given {number} {how}": equal
        for (number, how), equal in compare_zero_multiplier().items()
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
