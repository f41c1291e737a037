"""Compare each conversion between float32 and FP8 with the reference in Triton's interpreter; print {case: mismatches}.

Argument: how many random float32 values to convert.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from tests.kernels import interpreter
from transformer_engine.common.formats import E4M3, E5M2, Element
from transformer_engine.common.kernels import cast, conversion, fp8_attention
from transformer_engine.common.kernels.launch import codes_dtype, start
from transformer_engine.pytorch.primitives.quantize import encodings, torch_dtype


def contents(element: Element, count: int) -> dict[str, Tensor]:
    """Values to convert: every bfloat16, random float32, and the neighbours of codes and their midpoints."""
    generator = torch.Generator().manual_seed(0)
    halves = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    patterns = torch.randint(-(1 << 31), 1 << 31, (count // 2,), generator=generator).to(
        torch.int32
    )
    powers = torch.randint(-20, 18, (count - count // 2,), generator=generator)
    scaled = torch.randn(powers.shape, generator=generator) * torch.exp2(powers)
    codes = torch.arange(256, dtype=torch.uint8).view(torch_dtype(element)).to(torch.float64)
    codes = codes[codes.isfinite()].sort().values.unique()
    middles = (codes[1:] + codes[:-1]) / 2
    exact = torch.cat(
        (codes, middles, element.maximum * torch.tensor([1.03, 1.04, 1.07, 1.13]))
    ).float()
    bits = exact.view(torch.int32)
    special = torch.tensor([0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x00000001, 0x007FFFFF])
    special = torch.cat((special, special - (1 << 31))).to(torch.int32)
    neighbours = torch.cat((bits - 1, bits, bits + 1, special)).view(torch.float32)
    return {
        "every bfloat16": halves.to(torch.float32),
        "bit patterns": patterns.view(torch.float32),
        "normal": scaled,
        "neighbours": neighbours,
    }


def to_codes(x: Tensor, element: Element, way: str) -> Tensor:
    """Codes for x from a cast kernel with multiplier 1."""
    launch = cast.cast((1, x.numel()), element, True, False)
    launch = replace(launch, constants=(*launch.constants[:-1], way), handles={})
    codes = torch.empty(x.shape, dtype=torch_dtype(element))
    start(launch, (x, torch.ones(1), None, codes, None, torch.empty(1)), 0)
    return codes


def to_values(codes: Tensor, element: Element, way: str) -> Tensor:
    launch = fp8_attention.value_launch(codes.numel(), (0, 1), "float32")
    launch = replace(launch, constants=(*launch.constants[:-1], way), handles={})
    values = torch.empty(codes.shape)
    start(launch, (codes, torch.ones(1), None, None, values), 0)
    return values


def main() -> None:
    interpreter.repair()
    torch.set_num_threads(1)
    count = int(sys.argv[1])
    facts = {}
    for element in (E4M3, E5M2):
        integers = conversion.INTEGERS[codes_dtype(element)]
        every = torch.arange(256, dtype=torch.uint8).view(torch_dtype(element))
        for way in (conversion.NATIVE, integers):
            for name, x in contents(element, count).items():
                expected = encodings.cast(x, element)
                actual = to_codes(x, element, way)
                wrong = (actual.view(torch.uint8) != expected.view(torch.uint8)).sum()
                facts[f"{element.name} {way} {name}"] = [x.numel(), int(wrong)]
            values, exact = to_values(every, element, way), every.to(torch.float32)
            same = (values.view(torch.int32) == exact.view(torch.int32)) | (
                values.isnan() & exact.isnan()
            )
            facts[f"{element.name} {way} decoded"] = [256, int((~same).sum())]
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
