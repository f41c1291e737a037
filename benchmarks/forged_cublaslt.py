"""Algorithms in cuBLASLt's heuristic for GPUs that are not in this machine, by capability, format and layout.

    python benchmarks/forged_cublaslt.py FOLDER [--capabilities 9.0 10.0 ..] [--shim FILE]

It needs Linux, any NVIDIA GPU, nvmath-python, and a C compiler or --shim. Nothing is multiplied. Each capability is a
process with another libcuda.so.1, a shim. The shim reports the capability, shared memory and threads of the other GPU,
from a moment after the context exists. It links the real driver under another name, in which cuBLASLt finds all other
functions. One line is printed per capability, format and layout: the number of algorithms, or why there are none. The
heuristic may also query properties that the shim does not change, such as the number of multiprocessors.

FOLDER receives forged_cublaslt.json. The exit status is 1 if a process fails, or its driver was not asked for a forged
property; the reason is printed and written.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformer_engine.common.hardware import ROWS, hardware_named

M, N, K = 4096, 4096, 4096
MOST = 64  # requested algorithms
PATIENCE = 120  # time limit per capability, in seconds
LAYOUTS = {"TN": (True, False), "NN": (False, False), "NT": (False, True), "TT": (True, True)}
# CUdevice_attribute
MAJOR, MINOR, SHARED_OPTIN, SHARED_SM, THREADS_SM = 75, 76, 97, 81, 39
SONAME, REAL = (
    b"libcuda.so.1",
    b"libcudb.so.1",
)  # equal length, because the name is replaced in the copied driver
VARIABLE = "FORGED_ATTRIBUTES"  # "75=10,76=0,.."; unset: the real GPU's attributes

SHIM = r"""
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <dlfcn.h>

int forged_answers = 0;

static void *real(const char *name) {
    static void *driver;
    if (!driver) driver = dlopen("libcudb.so.1", RTLD_NOW);
    return driver ? dlsym(driver, name) : 0;
}

static int forged(int attribute, int *value) {
    const char *entry = getenv("FORGED_ATTRIBUTES");
    while (entry && *entry) {
        char *end;
        if (strtol(entry, &end, 10) == attribute && *end == '=') {
            *value = (int)strtol(end + 1, 0, 10);
            forged_answers++;
            return 1;
        }
        entry = strchr(entry, ',');
        if (entry) entry++;
    }
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    int (*get)(int *, int, int) = real("cuDeviceGetAttribute");
    if (forged(attribute, value)) return 0;
    return get(value, attribute, device);
}

int cuDeviceComputeCapability(int *major, int *minor, int device) {
    int (*get)(int *, int *, int) = real("cuDeviceComputeCapability");
    int status = get(major, minor, device);
    forged(75, major);
    forged(76, minor);
    return status;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, void *found);
int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags);

static void *ours(const char *name, int version) {
    if (!strcmp(name, "cuDeviceGetAttribute")) return cuDeviceGetAttribute;
    if (!strcmp(name, "cuDeviceComputeCapability")) return cuDeviceComputeCapability;
    if (strcmp(name, "cuGetProcAddress")) return 0;
    return version >= 12000 ? (void *)cuGetProcAddress_v2 : (void *)cuGetProcAddress;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, void *found) {
    int (*get)(const char *, void **, int, uint64_t, void *) = real("cuGetProcAddress_v2");
    int status = get(name, function, version, flags, found);
    if (!status && function && *function && ours(name, version)) *function = ours(name, version);
    return status;
}

int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    int (*get)(const char *, void **, int, uint64_t) = real("cuGetProcAddress");
    int status = get(name, function, version, flags);
    if (!status && function && *function && ours(name, version)) *function = ours(name, version);
    return status;
}
"""


def build_shim(folder: Path) -> Path:
    """Compile the shim, which needs a library of the real driver's new name at run time only.

    Raises:
        RuntimeError: There is no C compiler, or it fails.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError(
            "there is no C compiler for the shim; install gcc, or pass --shim FILE built elsewhere"
        )
    source, stub, shim = (
        folder / "shim.c",
        folder / "stub" / REAL.decode(),
        folder / "built" / SONAME.decode(),
    )
    source.write_text(SHIM)
    for file in (stub, shim):
        file.parent.mkdir(exist_ok=True)
    empty = folder / "empty.c"
    empty.write_text("int forged_stub;\n")
    for command in (
        [compiler, "-shared", "-fPIC", f"-Wl,-soname,{REAL.decode()}", "-o", str(stub), str(empty)],
        [
            *(
                compiler,
                "-shared",
                "-fPIC",
                "-O1",
                f"-Wl,-soname,{SONAME.decode()}",
                "-o",
                str(shim),
                str(source),
            ),
            *("-Wl,--no-as-needed", str(stub), "-ldl"),
        ],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-600:]}")
    return shim


def driver_file() -> Path:
    """File of the real driver that this process loads.

    Raises:
        RuntimeError: The driver cannot be loaded.
    """
    try:
        ctypes.CDLL(SONAME.decode())
    except OSError as error:
        raise RuntimeError(
            f"{SONAME.decode()} cannot be loaded ({error}); run on a machine with a GPU"
        ) from None
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = (line.split(maxsplit=5)[5] for line in lines if "libcuda.so" in line)
    return Path(next(names))


def rename_driver(data: bytes) -> bytes:
    """Return the driver's file with DT_SONAME replaced by REAL.

    Raises:
        RuntimeError: The file is no 64-bit ELF file, or has another soname.
    """
    if data[:5] != b"\x7fELF\x02":
        raise RuntimeError("the driver is no 64-bit ELF file")
    (headers,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    segments = [
        struct.unpack_from("<IIQQQQQQ", data, headers + size * index) for index in range(count)
    ]
    dynamic = next(segment for segment in segments if segment[0] == 2)
    entries = struct.iter_unpack("<qQ", data[dynamic[2] : dynamic[2] + dynamic[5] // 16 * 16])
    values = dict(reversed([*entries]))
    strings, name = values[5], values[14]  # DT_STRTAB, DT_SONAME
    load = next(s for s in segments if s[0] == 1 and s[3] <= strings < s[3] + s[5])
    position = strings - load[3] + load[2] + name
    if data[position : position + len(SONAME) + 1] != SONAME + b"\0":
        raise RuntimeError(
            f"the driver's soname is {data[position : position + 40]!r}, not {SONAME!r}"
        )
    return data[:position] + REAL + data[position + len(REAL) :]


def prepare(folder: Path, shim: Path | None) -> None:
    """Write the shim and the renamed driver into a folder for LD_LIBRARY_PATH."""
    chosen = build_shim(folder) if shim is None else shim
    (folder / "libs").mkdir()
    shutil.copyfile(chosen, folder / "libs" / SONAME.decode())
    (folder / "libs" / REAL.decode()).write_bytes(rename_driver(driver_file().read_bytes()))


def row_attributes(architecture: str) -> str:
    """Value for VARIABLE from a row in the hardware table."""
    row = hardware_named("nvidia", architecture)
    major, minor = map(int, architecture.split("."))
    forged = {
        MAJOR: major,
        MINOR: minor,
        SHARED_OPTIN: row.shared_memory,
        SHARED_SM: row.shared_memory + 1024,
        THREADS_SM: row.threads,
    }
    return ",".join(f"{attribute}={value}" for attribute, value in forged.items())


def cases() -> Iterator[tuple[str, str, Any]]:
    """Yield (format, layout, problem) for products with contiguous matrices, in cuBLASLt's layouts."""
    import torch

    from transformer_engine.pytorch.primitives.gemm import cublaslt_problem as problems

    formats = {
        "FP8, one scale": (torch.float8_e4m3fn, problems.SCALAR),
        "MXFP8": (torch.float8_e4m3fn, problems.VEC32_UE8M0),
        "NVFP4": (torch.uint8, problems.VEC16_UE4M3),
    }
    for name, (dtype, mode) in formats.items():
        for layout, (left, right) in LAYOUTS.items():
            yield (
                name,
                layout,
                problems.CublasProblem(
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
                    bias=problems.NO_BIAS,
                    accumulate=False,
                    fast=False,
                    tf32=False,
                ),
            )


def count_algorithms(capability: str) -> None:
    """Print JSON lines for one capability: each case, then the library's version and the number of forged answers."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(PATIENCE - 10, exit=True)
    import torch

    from transformer_engine.pytorch.primitives.gemm import cublaslt_library as library
    from transformer_engine.pytorch.primitives.gemm.cublaslt_plan import CublasPlan, NoAlgorithm

    torch.empty(1, device="cuda")  # creates the real GPU's context
    answers = None
    if capability != "real":
        answers = ctypes.c_int.in_dll(ctypes.CDLL(SONAME.decode()), "forged_answers")
        os.environ[VARIABLE] = row_attributes(capability)
    if (reason := library.unavailable_reason()) is not None:
        raise RuntimeError(reason)
    for name, layout, problem in cases():
        try:
            found: int | str = len(CublasPlan(problem).candidates(MOST))
        except NoAlgorithm as error:
            found = str(error)
        print(json.dumps([name, layout, found]), flush=True)
    forged = None if answers is None else answers.value
    print(
        json.dumps({"cuBLASLt": library.bindings().get_version(), "forged answers": forged}),
        flush=True,
    )


def ending(done: subprocess.CompletedProcess[str]) -> str:
    """Return why a process failed."""
    code = done.returncode
    cause = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    return f"{cause}: {' '.join(done.stderr[-1500:].split()) or 'no message'}"


def capability_results(capability: str, libraries: Path | None) -> dict[str, Any]:
    """Run one capability in a process, and print its lines; "failed" is the reason of a failure."""
    environment = dict(os.environ)
    environment.pop(VARIABLE, None)
    if libraries is not None:
        before = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = f"{libraries}:{before}" if before else str(libraries)
    command = [sys.executable, __file__, "--one", capability]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PATIENCE, env=environment
        )
    except subprocess.TimeoutExpired as error:
        output, text = (
            x.decode() if isinstance(x, bytes) else x or "" for x in (error.stdout, error.stderr)
        )
        done = subprocess.CompletedProcess(
            command, -signal.SIGKILL, output, f"{PATIENCE} s passed; {text}"
        )
    results: dict[str, Any] = {"algorithms": {}}
    for line in filter(None, done.stdout.splitlines()):
        found = json.loads(line) if line[0] in "[{" else {}
        if isinstance(found, dict):
            results |= found
        else:
            name, layout, count = found
            results["algorithms"].setdefault(name, {})[layout] = count
            print(f"{capability:5} {name:15} {layout}: {count}", flush=True)
    if done.returncode:
        results["failed"] = ending(done)
    elif capability != "real" and not results.get("forged answers"):
        results["failed"] = (
            "the driver was not asked for a forged property; the counts are those of the real GPU"
        )
    if "failed" in results:
        print(f"{capability:5} failed: {results['failed']}", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    rows = [row.architecture for row in ROWS if row.vendor == "nvidia" and row.has("fp8 products")]
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("."), help="receives forged_cublaslt.json"
    )
    parser.add_argument(
        "--capabilities", nargs="+", default=["real", *rows], help="compute capabilities"
    )
    parser.add_argument(
        "--shim", type=Path, help="libcuda.so.1 that a run with --keep-shim has written"
    )
    parser.add_argument(
        "--keep-shim", type=Path, help="compile the shim into this file, and do nothing else"
    )
    parser.add_argument("--one", help="print the counts of one capability in this process")
    chosen = parser.parse_args()
    if chosen.one is not None:
        count_algorithms(chosen.one)
        return 0
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        if chosen.keep_shim is not None:
            shutil.copyfile(build_shim(Path(name)), chosen.keep_shim)
            return 0
        try:
            prepare(Path(name), chosen.shim)
        except (RuntimeError, OSError) as error:
            print(f"failed: {error}", flush=True)
            results["failed"] = str(error)
            chosen.capabilities = [
                capability for capability in chosen.capabilities if capability == "real"
            ]
        for capability in chosen.capabilities:
            libraries = None if capability == "real" else Path(name) / "libs"
            results[capability] = capability_results(capability, libraries)
            write(chosen.folder, results)
    write(chosen.folder, results)
    return int("failed" in results or any("failed" in found for found in results.values()))


def write(folder: Path, results: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "forged_cublaslt.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
