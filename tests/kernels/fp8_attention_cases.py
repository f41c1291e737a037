"""Run the kernels around FP8 attention in Triton's interpreter against torch; print {case: equal} as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from tests.kernels import interpreter
from transformer_engine.common.kernels import fp8_attention
from transformer_engine.common.kernels.launch import start
from transformer_engine.common.kernels.packed_sequences import zero_padding_launch

E4M3 = torch.float8_e4m3fn
SLOTS = 9


def codes(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() * scale).clamp(-448.0, 448.0).to(E4M3)


def three_casts() -> dict[str, bool]:
    """Sizes that fill no block, one tensor beyond the largest code, and a history with a larger and a smaller amax."""
    torch.manual_seed(0)
    inputs = [torch.randn(size).to(torch.bfloat16) for size in (5000, 300, 2048)]
    inputs[1][7] = 1000.0
    scale = torch.linspace(0.5, 2.5, SLOTS)
    history = torch.zeros(3, SLOTS)
    results = [torch.empty(x.shape, dtype=E4M3) for x in inputs]
    descales = torch.zeros(8)
    sizes = (5000, 300, 2048)
    record = fp8_attention.codes_of_three(sizes, (2, 3), "float8_e4m3fn")
    start(record, (*inputs, scale, history, *results, descales), 0)
    expected = torch.zeros(3, SLOTS)
    expected[0, 2] = 1000.0
    facts = {
        f"codes of {name}": interpreter.same_bits(code, codes(x, scale[2]))
        for name, code, x in zip("qkv", results, inputs, strict=True)
    }
    facts["amax"] = torch.equal(history, expected)
    inverses = torch.stack((1 / scale[2], 1 / scale[3]))
    facts["inverse scales stand at multiples of 16 bytes"] = torch.equal(descales[[0, 4]], inverses)
    history[0, 2] = 2000.0
    start(record, (*inputs, scale, history, *results, descales), 0)
    facts["a larger amax stays"] = float(history[0, 2]) == 2000.0
    return facts


def values() -> dict[str, bool]:
    torch.manual_seed(1)
    inputs = torch.randn(3000).to(E4M3)
    descale, amaxes, history = torch.tensor([0.37]), torch.tensor([3.0, 0.5]), torch.zeros(2, SLOTS)
    history[0, 8] = 0.75
    actual = torch.empty(3000, dtype=torch.bfloat16)
    record = fp8_attention.value_launch(3000, (8, 3), "bfloat16")
    start(record, (inputs, descale, amaxes, history, actual), 0)
    expected = torch.zeros(2, SLOTS)
    expected[0, 3], expected[0, 8] = 3.0, 0.75
    repeated = torch.empty(3000, dtype=torch.bfloat16)
    start(record, (inputs, descale, None, None, repeated), 0)
    return {
        "values": torch.equal(actual, (inputs.float() * descale).to(torch.bfloat16)),
        "values without a history": torch.equal(repeated, actual),
        "amaxes of the output and the softmax": torch.equal(history, expected),
    }


def tails() -> dict[str, bool]:
    facts = {}
    for used in (0, 1, 127, 128, 129, 299, 300):
        x = torch.ones(300, 2, 24, dtype=torch.bfloat16)
        starts = torch.tensor([0, min(used, 50), used], dtype=torch.int32)
        start(zero_padding_launch(300, 48, 2), (x, starts), 0)
        facts[f"zeros behind {used} tokens"] = bool((x[:used] == 1).all() and (x[used:] == 0).all())
    return facts


if __name__ == "__main__":
    interpreter.repair()
    print(json.dumps({**three_casts(), **values(), **tails()}))
