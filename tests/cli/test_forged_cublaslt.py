"""benchmarks/forged_cublaslt.py on a stand-in driver: forged properties, other functions, and reasons of failures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.support.programs import ROOT, search_path

SCRIPT = ROOT / "benchmarks" / "forged_cublaslt.py"
DRIVER = """
#include <stdint.h>
#include <string.h>
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 7; return 0; }
int cuDeviceComputeCapability(int *major, int *minor, int device) { *major = 9; *minor = 0; return 0; }
int cuLinkCreate_v2(void) { return 42; }
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, void *found) {
    *function = strcmp(name, "cuDeviceGetAttribute") ? (void *)cuLinkCreate_v2 : (void *)cuDeviceGetAttribute;
    return 0;
}
int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, 0);
}
"""
PREPARE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import forged_cublaslt
forged_cublaslt.prepare(Path(sys.argv[2]), None)
"""
PROGRAM = """
import ctypes, json, os, sys
sys.path.insert(0, sys.argv[1])
import forged_cublaslt as forged
driver = ctypes.CDLL("libcuda.so.1")
value, found = ctypes.c_int(), ctypes.c_void_p()

def properties():
    values = []
    driver.cuGetProcAddress_v2(b"cuDeviceGetAttribute", ctypes.byref(found), 12000, ctypes.c_uint64(0), None)
    getter = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int)(found.value)
    for get in (driver.cuDeviceGetAttribute, getter):
        for attribute in (forged.MAJOR, forged.SHARED_OPTIN, 16):
            get(ctypes.byref(value), attribute, 0)
            values.append(value.value)
    return values

before = properties()
os.environ[forged.VARIABLE] = forged.row_attributes("12.0")
answers = ctypes.c_int.in_dll(driver, "forged_answers")
print(json.dumps([before, properties(), driver.cuLinkCreate_v2(), answers.value]))
"""


@pytest.mark.skipif(
    shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler on Linux"
)
def test_the_shim_forges_properties_and_passes_every_other_function_on(tmp_path):
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), "driver.c"]
    subprocess.run(command, cwd=tmp_path, check=True)
    environment = {**os.environ, "PYTHONPATH": search_path(), "LD_LIBRARY_PATH": str(tmp_path)}
    arguments = [sys.executable, "-c", PREPARE, str(SCRIPT.parent), str(tmp_path)]
    subprocess.run(arguments, env=environment, check=True)
    environment["LD_LIBRARY_PATH"] = str(tmp_path / "libs")
    arguments = [sys.executable, "-c", PROGRAM, str(SCRIPT.parent)]
    output = subprocess.run(
        arguments, env=environment, check=True, capture_output=True, text=True
    ).stdout
    before, after, other, answers = json.loads(output)
    assert before == [9, 7, 7] * 2
    assert after == [12, 101376, 7] * 2 and other == 42 and answers == 4


def test_a_machine_without_a_driver_is_a_stated_failure(tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": search_path(),
        "LD_LIBRARY_PATH": "",
        "CUDA_VISIBLE_DEVICES": "",
    }
    arguments = [
        sys.executable,
        "-W",
        "ignore",
        str(SCRIPT),
        str(tmp_path),
        "--capabilities",
        "real",
    ]
    done = subprocess.run(arguments, env=environment, check=False, capture_output=True, text=True)
    written = json.loads((tmp_path / "forged_cublaslt.json").read_text())
    assert done.returncode == 1 and "failed: " in done.stdout
    assert "exit status 1" in written["real"]["failed"]
