"""PTX of a Launch for given dtypes and a capability, without a GPU and without a tensor library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..bounded import Bounded
from .launch import Launch

_KINDS = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "uint8": "u8",
    "int32": "i32",
    "int64": "i64",
    "bool": "i1",
}
_ALIGNMENT = 16  # what Triton specialises pointers and numbers on


class Scalar(NamedTuple):
    """A number that the kernel takes at run time, and Triton's name of its type."""

    value: int | float
    kind: str


class Compiled(NamedTuple):
    """A kernel's PTX, and what whoever starts it has to give.

    pointers   which of the inputs and then the outputs are given, in the order of the kernel's arguments
    scalars    the numbers behind them; those that became constants are left out
    """

    name: str
    ptx: str
    capability: int
    warps: int
    shared_memory: int
    pointers: tuple[int, ...]
    scalars: tuple[Scalar, ...]


_compiled: Bounded[Any, Compiled] = Bounded(4096)


def compiled(launch: Launch, dtypes: Sequence[str | None], capability: int) -> Compiled:
    """The launch's kernel for pointers of these dtypes (the inputs, then the outputs; None: not given).

    Every pointer must be a multiple of 16 bytes, as arrays of XLA are; capability is 90 for Hopper.
    """
    key = (launch.kernel, tuple(dtypes), launch.scalars, launch.constants, launch.warps, capability)
    found = _compiled.get(key)
    return _compiled.keep(key, _compile(launch, dtypes, capability)) if found is None else found


def _compile(launch: Launch, dtypes: Sequence[str | None], capability: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    assert not launch.dependent, (
        "a launch that starts early needs an attribute that only a stream's launcher sets"
    )
    names = launch.kernel.arg_names
    pointers, rest = names[: len(dtypes)], names[len(dtypes) :]
    numbers, others = rest[: len(launch.scalars)], rest[len(launch.scalars) :]
    constants = dict(zip(others, launch.constants, strict=True))
    constants |= {name: None for name, dtype in zip(pointers, dtypes, strict=True) if dtype is None}
    # As Triton's own launcher does: a whole number that is 1 becomes a constant.
    constants |= {n: v for n, v in zip(numbers, launch.scalars, strict=True) if type(v) is int and v == 1}
    kinds = {
        name: f"*{_KINDS[dtype]}" for name, dtype in zip(pointers, dtypes, strict=True) if dtype is not None
    }
    kinds |= {name: _number_kind(value) for name, value in zip(numbers, launch.scalars, strict=True)}
    signature = {name: "constexpr" if name in constants else kinds[name] for name in names}
    values = dict(zip(numbers, launch.scalars, strict=True))
    aligned = {
        (place,): [["tt.divisibility", _ALIGNMENT]]
        for place, name in enumerate(names)
        if name not in constants and _is_aligned(values.get(name, 0))
    }
    made = triton.compile(
        ASTSource(launch.kernel, signature, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": launch.warps, "num_stages": 1},
    )
    assert not getattr(made.metadata, "global_scratch_size", 0), "our kernels use no scratch memory"
    return Compiled(
        made.metadata.name,
        made.asm["ptx"],
        capability,
        launch.warps,
        made.metadata.shared,
        tuple(place for place, dtype in enumerate(dtypes) if dtype is not None),
        tuple(Scalar(value, kinds[name]) for name, value in values.items() if name not in constants),
    )


def _number_kind(value: int | float) -> str:
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def _is_aligned(value: int | float) -> bool:
    """Is a pointer (0 here), or a whole number, a multiple of 16?"""
    return isinstance(value, int) and value % _ALIGNMENT == 0
