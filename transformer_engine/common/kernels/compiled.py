"""PTX for a Launch with given dtypes and capability, without a GPU and without a tensor library."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, NamedTuple

from ..hardware import nvidia
from ..memory import Memory
from . import conversion
from .launch import Launch, compile_options

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
_ALIGNMENT = 16  # alignment by which Triton specializes pointers and numbers


class Scalar(NamedTuple):
    """A number that the kernel receives at run time, and its type name in Triton."""

    value: int | float
    kind: str


class Compiled(NamedTuple):
    """A kernel's PTX, and its launch arguments.

    Attributes:
        warps: Warps per program, including warps with a specialized role.
        scratch: Bytes of memory per program, passed as a pointer behind the scalars.
        pointers: Indices of the inputs, then outputs, that are passed, in the order of the kernel's arguments.
        scalars: The numbers after the pointers, without compile-time constants.
    """

    name: str
    ptx: str
    capability: int
    warps: int
    shared_memory: int
    scratch: int
    pointers: tuple[int, ...]
    scalars: tuple[Scalar, ...]


class KernelKey(NamedTuple):
    """Cache key for a compiled kernel.

    Attributes:
        dtypes: Input dtypes, then output dtypes; None: absent.
        kinds: Types of scalars and constants: 1 and 1.0 are equal, but different arguments.
    """

    kernel: Any
    dtypes: tuple[str | None, ...]
    scalars: tuple[int | float, ...]
    kinds: tuple[type, ...]
    constants: tuple[Any, ...]
    warps: int
    registers: int | None
    fuses: bool
    capability: int


def compiled(launch: Launch, dtypes: Sequence[str | None], capability: int) -> Compiled:
    """Compile the launch's kernel for pointers with these dtypes (the inputs, then the outputs; None: absent).

    Every pointer must be a multiple of 16 bytes, as in XLA's arrays. capability is 90 for Hopper.
    """
    assert not (launch.dependent or launch.cooperative), (
        "a launch that starts early or cooperates needs an attribute that only a stream's launcher sets"
    )
    row = nvidia(*divmod(capability, 10))
    constants, as_bytes = conversion.resolve(launch.kernel.arg_names, launch.constants, row, dtypes)
    if as_bytes:
        dtypes = [conversion.BYTES if dtype in conversion.INTEGERS else dtype for dtype in dtypes]
    kinds = tuple(map(type, (*launch.scalars, *constants)))
    return _COMPILED[
        KernelKey(
            launch.kernel,
            tuple(dtypes),
            launch.scalars,
            kinds,
            constants,
            launch.warps,
            launch.registers,
            launch.fuses,
            capability,
        )
    ]


def begin_hash() -> Future[None]:
    """Begin to hash Triton's installation in a thread, once per process.

    Every entry of Triton's disk cache depends on this hash of 0.46 GB, for which the first compilation of a process
    would wait 0.3 to 0.9 s. Hashing and reading files release the interpreter's lock.
    """
    global _hash
    with _lock:
        if _hash is None:
            _hash = Future()
            threading.Thread(target=_compute_hash, args=(_hash,), daemon=True).start()
        return _hash


def _compute_hash(result: Future[None]) -> None:
    try:
        from triton.runtime import cache

        # A private function, which caches its result. Without it, the compilation computes the hash.
        compute = getattr(cache, "triton_key", None)
        if compute is not None:
            compute()
        result.set_result(None)
    except BaseException as error:
        _forget_hash()  # the next compilation tries again
        result.set_exception(error)


def _forget_hash() -> None:
    global _hash
    _hash = None


if hasattr(os, "register_at_fork"):  # a forked process has no thread that would finish the hash
    os.register_at_fork(after_in_child=_forget_hash)


def _compile(key: KernelKey) -> Compiled:
    """Compile a kernel with Triton, and return its PTX with the launch arguments."""
    begin_hash().result()  # threads that compile at the same time would hash once each
    import triton
    from triton.backends.compiler import GPUTarget

    names = key.kernel.arg_names
    pointers, rest = names[: len(key.dtypes)], names[len(key.dtypes) :]
    numbers, constant_names = rest[: len(key.scalars)], rest[len(key.scalars) :]
    constants = dict(zip(constant_names, key.constants, strict=True))
    constants |= {
        name: None for name, dtype in zip(pointers, key.dtypes, strict=True) if dtype is None
    }
    # As in Triton's own launcher: an integer equal to 1 becomes a constant.
    constants |= {
        n: v for n, v in zip(numbers, key.scalars, strict=True) if type(v) is int and v == 1
    }
    kinds = {
        name: f"*{_KINDS[dtype]}"
        for name, dtype in zip(pointers, key.dtypes, strict=True)
        if dtype is not None
    }
    values = dict(zip(numbers, key.scalars, strict=True))
    for name, value in values.items():
        integer = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
        kinds[name] = "fp32" if isinstance(value, float) else integer
    signature = {name: "constexpr" if name in constants else kinds[name] for name in names}
    multiples = {
        name for name, value in values.items() if isinstance(value, int) and value % _ALIGNMENT == 0
    }
    aligned = {
        (index,): [["tt.divisibility", _ALIGNMENT]]
        for index, name in enumerate(names)
        if name not in constants and (name not in values or name in multiples)
    }
    binary = triton.compile(
        _source(key.kernel)(key.kernel, signature, constants, aligned),
        target=GPUTarget("cuda", key.capability, 32),
        options=compile_options(key.warps, key.registers, key.fuses)
        | {"ptx_version": _ptx_version(key.capability)},
    )
    return Compiled(
        binary.metadata.name,
        binary.asm["ptx"],
        key.capability,
        binary.metadata.num_warps,
        binary.metadata.shared,
        getattr(binary.metadata, "global_scratch_size", 0) or 0,
        tuple(index for index, dtype in enumerate(key.dtypes) if dtype is not None),
        tuple(
            Scalar(value, kinds[name]) for name, value in values.items() if name not in constants
        ),
    )


def _ptx_version(capability: int) -> int:
    """PTX version of a kernel as an integer, such as 88 for 8.8: Triton's own, or a lower one that XLA can assemble.

    XLA assembles PTX with its own CUDA libraries, which may be older than Triton's assembler: Triton 3.9 writes PTX 9.4
    from CUDA 13.4 on, where JAX accepts CUDA 12.
    """
    from triton.backends.nvidia.compiler import get_ptx_version_from_options

    major, minor = nvidia(*divmod(capability, 10)).portable_ptx
    return min(
        get_ptx_version_from_options(SimpleNamespace(ptx_version=None), capability),
        10 * major + minor,
    )


def _source(kernel: Any) -> Any:
    """Triton's source object for a kernel in Triton or Gluon."""
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def _compile_once(wanted: KernelKey) -> Compiled:
    """Compile a kernel, or wait for the thread that is compiling it."""
    with _lock:
        running = _running.get(wanted)
        result = _running[wanted] = Future() if running is None else running
    if running is not None:
        return result.result()
    try:
        result.set_result(_compile(wanted))
    except BaseException as error:
        result.set_exception(error)
    finally:
        with _lock:
            del _running[wanted]
    return result.result()


_lock = threading.Lock()
_hash: Future[None] | None = None
_running: dict[KernelKey, Future[Compiled]] = {}
_COMPILED: Memory[KernelKey, Compiled] = Memory(_compile_once, 4096)
