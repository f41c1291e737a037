"""Algorithms that cuBLASLt's heuristic has for GPUs that are not in this machine, by capability, format and layout.

    python benchmarks/forged_cublaslt.py [--json FILE] [--capabilities 9.0 10.0 ..]

It needs a Linux machine of x86-64 with any NVIDIA GPU, and nvmath-python. Each capability is a process: before cuBLASLt
is created, the entry of the driver's cuDeviceGetAttribute is replaced by a jump to a function that reports the
capability, shared memory and threads of the other GPU and passes all other questions on. Nothing is multiplied. A count
of 0 means that the heuristic has no algorithm, or rejects the problem; the reason is printed. The heuristic may also
query properties that stay those of the real GPU, such as the number of multiprocessors.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from transformer_engine.common.hardware import ROWS, Hardware, hardware_named
from transformer_engine.pytorch.primitives.gemm import cublaslt_library as library
from transformer_engine.pytorch.primitives.gemm.cublaslt_plan import CublasPlan, NoAlgorithm
from transformer_engine.pytorch.primitives.gemm.cublaslt_problem import (
    NO_BIAS,
    SCALAR,
    VEC16_UE4M3,
    VEC32_UE8M0,
    CublasProblem,
)

M, N, K = 4096, 4096, 4096
MOST = 64  # requested algorithms
# dtype of the codes and mode of their scales.
FORMATS = {
    "FP8, one scale": (torch.float8_e4m3fn, SCALAR),
    "MXFP8": (torch.float8_e4m3fn, VEC32_UE8M0),
    "NVFP4": (torch.uint8, VEC16_UE4M3),
}
LAYOUTS = {"TN": (True, False), "NN": (False, False), "NT": (False, True), "TT": (True, True)}
# CUdevice_attribute
MAJOR, MINOR, SHARED_OPTIN, SHARED_SM, THREADS_SM = 75, 76, 97, 81, 39
Getter = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int)


class Hook:
    """A C function whose entry jumps to another one while the hook is set; x86-64."""

    def __init__(self, address: int, function: Any):
        self.address = address
        self.function = function  # kept alive
        target = ctypes.cast(function, ctypes.c_void_p).value
        assert target is not None
        self.jump = b"\x48\xb8" + target.to_bytes(8, "little") + b"\xff\xe0"  # mov rax, target; jmp rax
        self.entry = ctypes.string_at(address, len(self.jump))
        begin = address // mmap.PAGESIZE * mmap.PAGESIZE
        length = address + len(self.jump) - begin
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        if protect(
            ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        ):
            raise OSError(ctypes.get_errno(), "mprotect rejects a writable entry of the driver")

    def set(self, hooked: bool) -> None:
        ctypes.memmove(self.address, self.jump if hooked else self.entry, len(self.jump))


def forge(row: Hardware, driver: ctypes.CDLL) -> Callable[[], int]:
    """Report the properties of a row from now on; return a function that counts the forged answers."""
    major, minor = map(int, row.architecture.split("."))
    forged = {
        MAJOR: major,
        MINOR: minor,
        SHARED_OPTIN: row.shared_memory,
        SHARED_SM: row.shared_memory + 1024,
        THREADS_SM: row.threads,
    }
    hooks: list[Hook] = []
    answered = 0

    def getter(hook: int) -> Any:
        def get(value: Any, attribute: int, device: int) -> int:
            nonlocal answered
            if attribute in forged:
                value[0] = forged[attribute]
                answered += 1
                return 0
            hooks[hook].set(False)
            try:
                return Getter(hooks[hook].address)(value, attribute, device)
            finally:
                hooks[hook].set(True)

        return Getter(get)

    for place, address in enumerate(addresses(driver)):
        hooks.append(Hook(address, getter(place)))
        hooks[-1].set(True)
    return lambda: answered


def addresses(driver: ctypes.CDLL) -> list[int]:
    """Entries of cuDeviceGetAttribute: the exported one, and the one that libraries receive from cuGetProcAddress."""
    exported = ctypes.cast(driver.cuDeviceGetAttribute, ctypes.c_void_p).value
    found, status = ctypes.c_void_p(), ctypes.c_int()
    driver.cuGetProcAddress_v2(
        b"cuDeviceGetAttribute", ctypes.byref(found), 12000, ctypes.c_uint64(0), ctypes.byref(status)
    )
    return [address for address in dict.fromkeys((exported, found.value)) if address]


def problem_of(form: str, layout: str) -> CublasProblem:
    """A product of a format with contiguous matrices in cuBLASLt's layout."""
    dtype, mode = FORMATS[form]
    left, right = LAYOUTS[layout]
    return CublasProblem(
        device=torch.cuda.current_device(),
        m=M,
        n=N,
        k=K,
        left=dtype,
        right=dtype,
        result=torch.bfloat16,
        left_transposed=left,
        right_transposed=right,
        left_leading=K if left else M,
        right_leading=N if right else K,
        result_leading=M,
        left_scale=mode,
        right_scale=mode,
        bias=NO_BIAS,
        accumulate=False,
        fast=False,
        tf32=False,
    )


def counts() -> dict[str, dict[str, int | str]]:
    """{format: {layout: number of algorithms, or the reason for having none}}."""
    found: dict[str, dict[str, int | str]] = {}
    for form in FORMATS:
        of_format = found[form] = {}
        for layout in LAYOUTS:
            try:
                of_format[layout] = len(CublasPlan(problem_of(form, layout)).candidates(MOST))
            except NoAlgorithm as error:
                of_format[layout] = str(error)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    rows = [row.architecture for row in ROWS if row.vendor == "nvidia" and row.has("fp8 products")]
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    parser.add_argument("--capabilities", nargs="+", default=["real", *rows], help="compute capabilities")
    parser.add_argument("--one", help="print the counts of one capability in this process")
    chosen = parser.parse_args()
    if chosen.one is not None:
        torch.empty(1, device="cuda")  # creates the context of the real GPU
        answered = lambda: 0  # noqa: E731
        if chosen.one != "real":
            answered = forge(hardware_named("nvidia", chosen.one), ctypes.CDLL("libcuda.so.1"))
        found = counts()
        version = library.bindings().get_version()
        print(json.dumps({"cuBLASLt": version, "forged answers": answered(), "algorithms": found}))
        return
    results = {}
    for capability in chosen.capabilities:
        command = [sys.executable, __file__, "--one", capability]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines()
        results[capability] = json.loads(lines[-1]) if done.returncode == 0 and lines else done.stderr[-600:]
        print(capability, json.dumps(results[capability]), flush=True)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
