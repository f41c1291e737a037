"""Compile the launches that plain Triton kernels make for AMD's gfx942 and gfx950, without a GPU; print JSON.

{"gfx942": {case: bytes of LDS}}; a failed compilation is an "error: ..." instead of the bytes. Kernels for
FP8 codes are left out: `unsupported_casts` rejects them there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels import written_cases
from tests.kernels.attention_compile_cases import compile_kernel, problem
from tests.kernels.written_pointers import _TYPES, _scalar_type
from transformer_engine.common.hardware import ROWS, Hardware
from transformer_engine.common.kernels import attention, attention_backward, attention_decode
from transformer_engine.common.kernels.launch import Launch, compile_options

# One case per kernel that has no FP8 codes.
CASES = (
    "gelu",
    "gelu backward",
    "swiglu",
    "swiglu backward",
    "column sums",
    "sum of strips",
    "norm 1024 centered=False",
    "norm 5120 centered=True backward 0",
    "softmax 2048",
    "softmax backward 2048",
    "dropout",
    "dropout backward",
    "bias and residual",
    "rotate transposed=False",
    "rotate packed transposed=False",
    "transpose",
    "statistics of logits",
    "losses",
    "rescaled gradient",
    "scaling",
    "sgd momentum=True",
    "send by_mask=False probs=None",
    "kv cache paged=False",
)
WAVE = 64  # lanes in a wavefront


def lds_bytes(launch: Launch, inputs: Sequence[str | None], architecture: str) -> int:
    """LDS bytes for a launch's kernel, compiled to a code object."""
    names = launch.kernel.arg_names
    outputs = [None if output is None else f"*{_TYPES[output.dtype]}" for output in launch.outputs]
    kinds = (
        *inputs,
        *outputs,
        *map(_scalar_type, launch.scalars),
        *["constexpr"] * len(launch.constants),
    )
    signature = dict(zip(names, kinds, strict=True))
    constants = dict(
        zip(names[len(names) - len(launch.constants) :], launch.constants, strict=True)
    )
    constants |= {name: None for name, kind in signature.items() if kind is None}
    signature |= dict.fromkeys(constants, "constexpr")
    assert not launch.dependent, "AMD's GPUs have no dependent launches"
    compiled = triton.compile(
        ASTSource(launch.kernel, signature, constants, {}),
        target=GPUTarget("hip", architecture, WAVE),
        options=compile_options(launch.warps, launch.registers, launch.fuses),
    )
    assert compiled.asm["hsaco"]
    return compiled.metadata.shared


def main() -> None:
    every = {
        name: (launch, inputs)
        for family in (
            written_cases.casts,
            written_cases.activations,
            written_cases.norms,
            written_cases.others,
            written_cases.losses,
            written_cases.steps,
            written_cases.experts,
        )
        for name, launch, inputs in family()
    }
    results: dict[str, dict[str, int | str]] = {}
    for row in ROWS:
        if row.vendor != "amd":
            continue
        of_row = results[row.architecture] = {}
        for name in CASES if "--all" in sys.argv or row.architecture == "gfx942" else CASES[:2]:
            try:
                of_row[name] = lds_bytes(*every[name], row.architecture)
            except Exception as error:  # the failures are this program's result
                of_row[name] = (
                    f"error: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
                )
        if row.architecture == "gfx942":
            of_row |= attention_memory(row)
    print(json.dumps(results))


def attention_memory(row: Hardware) -> dict[str, int | str]:
    """LDS bytes for attention's forward and backward pass and a decoding step, planned for the row's LDS."""
    shared, starts = row.shared_memory, ("starts_q", "starts_kv")
    plain = problem(shared)
    keys = attention_backward.keys(plain, (0, *plain.k), (0, *plain.v), 1)
    step, _ = attention_decode.stretches(problem(shared, queries=1), 132)
    launches = {
        "attention forward": (attention.forward(plain, True), ("bias", "pages", *starts)),
        "attention backward": (keys, ("bias", *starts)),
        "attention decode": (step, ("pages", *starts)),
    }
    target = GPUTarget("hip", row.architecture, WAVE)
    return {
        name: compile_kernel(target, *launch).metadata.shared for name, launch in launches.items()
    }


if __name__ == "__main__":
    main()
