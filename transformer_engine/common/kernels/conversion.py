"""How kernels convert between float32 and FP8 codes, by hardware; the device code is in `rounding`.

A kernel that converts has a last compile-time argument, CONVERSION. Launch records contain NATIVE, which a launch
compiler replaces by its target's conversion:

* NATIVE: Triton's conversion. It is one instruction from compute capability 9.0 on.
* INSTRUCTION: the same instruction as inline PTX, for 8.9. Triton below 3.9 rounds twice there.
* INTEGERS: integer arithmetic on codes as bytes, for 8.0 and 8.6, whose Triton has no type float8e4nv.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..hardware import NO_GPU, Hardware

NATIVE, INSTRUCTION = "native", "instruction"
INTEGERS = {"float8_e4m3fn": "integers e4m3", "float8_e5m2": "integers e5m2"}
BYTES = "uint8"


def choose_conversion(row: Hardware, dtypes: Iterable[str | None]) -> str:
    """A GPU's conversion for tensors with these dtypes, in torch's spelling.

    Raises:
        ValueError: The tensors have two FP8 dtypes, between which integer arithmetic cannot distinguish.
    """
    if row.has("triton fp8 casts"):
        return NATIVE
    if row.has("fp8 casts"):
        return INSTRUCTION
    elements = {dtype for dtype in dtypes if dtype in INTEGERS}
    if len(elements) > 1:
        raise ValueError(
            f"a kernel converts {' and '.join(sorted(map(str, elements)))}, and {row.title} has no FP8 types; launch "
            "one kernel per dtype"
        )
    return INTEGERS[elements.pop()] if elements else NATIVE


def resolve(
    arg_names: Sequence[str],
    constants: tuple[Any, ...],
    row: Hardware,
    dtypes: Sequence[str | None],
) -> tuple[tuple[Any, ...], bool]:
    """Compile-time arguments for a kernel on a GPU, and whether FP8 tensors are passed as bytes."""
    converts = arg_names[-1] == "CONVERSION"
    if converts and constants[-1] != NATIVE:
        return constants, constants[-1] in INTEGERS.values()
    if row is NO_GPU:  # Triton's interpreter
        return constants, False
    if converts:
        constants = (*constants[:-1], choose_conversion(row, dtypes))
    return constants, not row.has("fp8 casts")
