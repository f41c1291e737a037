"""`te doctor --self-test`: wrong backends are found, results are stored for this machine, a CPU runs a sample."""

from __future__ import annotations

import json
import sys
import time

import pytest
import torch

from tests.support.command import te
from tests.support.doubling import doubling_table
from transformer_engine.common.dispatch import Backend, Unsupported
from transformer_engine.common.self_test import (
    COMPILED,
    EMULATING,
    SelfTest,
    SelfTestResult,
    SelfTestSizes,
)
from transformer_engine.pytorch.inspect import self_test as testing
from transformer_engine.pytorch.inspect import self_test_compile as compiling
from transformer_engine.pytorch.inspect.self_test import self_test
from transformer_engine.pytorch.inspect.self_test_products import SelfTestCase
from transformer_engine.pytorch.primitives.gemm import DEQUANTIZING
from transformer_engine.pytorch.runtime import self_tested
from transformer_engine_tools.doctor import self_tests
from transformer_engine_tools.doctor.checks import run_self_test


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TE_CACHE_DIR", str(tmp_path))
    self_tested._read_stored.cache_clear()
    yield tmp_path
    self_tested._read_stored.cache_clear()


@pytest.fixture
def doubling():
    """A table whose backends double a tensor: one correctly, one with a wrong last bit, one not at all."""
    with doubling_table(
        "doubling",
        lambda y: torch.nextafter(y, torch.full_like(y, 1e9)),
        "CUDA error: invalid argument",
        describe=lambda size: size,
    ) as table:
        yield table


def examined(monkeypatch, table, bound=None, seconds=60.0):
    x = torch.arange(1.0, 9.0)
    case = SelfTestCase(
        "doubled numbers",
        "8",
        "doubling",
        lambda: (table.bound((8,))(x),),
        bound,
        baseline=lambda: x + x,
    )
    monkeypatch.setattr(testing, "cases", lambda device, sizes: [case])
    return self_test(seconds=seconds)


def test_backends_with_wrong_bits_or_errors_fail(monkeypatch, doubling):
    test = examined(monkeypatch, doubling)
    results = {result.backend: result for result in test.results}
    assert {name: result.status for name, result in results.items()} == {
        "native": "passed",
        "wrong": "failed",
        "raising": "failed",
        "other": "unsupported",
    }
    assert results["native"].equal == 1.0 and results["native"].ratio is not None
    assert results["wrong"].equal is not None and 0.7 < results["wrong"].equal < 1.0
    assert "CUDA error: invalid argument" in results["raising"].reason
    assert test.paths == {"doubled numbers": False}
    assert "2 failed" in test.report() and "FAILED doubled numbers, 8, wrong" in test.report()


def test_a_backend_without_one_request_of_a_case_is_unsupported(monkeypatch, doubling):
    x = torch.arange(1.0, 9.0)
    odd = Backend(
        "odd",
        unsupported_reason=lambda size: "it needs 8 numbers" if size != 8 else None,
        bind=lambda size: lambda x: x * 2,
    )
    monkeypatch.setattr(doubling, "backends", (odd, *doubling.backends))

    def compute():
        return doubling.bound((8,))(x), doubling.bound((4,))(x[:4])

    case = SelfTestCase("doubled numbers", "8 and 4", "doubling", compute, None)
    monkeypatch.setattr(testing, "cases", lambda device, sizes: [case])
    results = {result.backend: result for result in self_test().results}
    assert (results["odd"].status, results["native"].status) == ("unsupported", "passed")
    assert "it needs 8 numbers" in results["odd"].reason


def test_an_operation_without_a_backend_fails_a_case(monkeypatch, doubling):
    def compute():
        raise Unsupported("no backend of another operation takes this request")

    x = torch.arange(1.0, 9.0)
    case = SelfTestCase(
        "doubled numbers", "8", "doubling", lambda: (doubling.bound((8,))(x),), None, expected=None
    )
    monkeypatch.setattr(testing, "cases", lambda device, sizes: [case])
    monkeypatch.setattr(testing, "_expected_results", lambda *arguments: (x * 2,))
    monkeypatch.setattr(testing, "first_request", lambda case: 8)
    object.__setattr__(case, "compute", compute)
    assert {result.status for result in self_test().results if result.backend != "other"} == {
        "failed"
    }


def test_a_backend_that_tunes_for_minutes_is_left_out_with_its_reason(monkeypatch, doubling):
    monkeypatch.setitem(compiling.LEFT_OUT, "raising", "it tunes for minutes")
    monkeypatch.setitem(compiling.LEFT_OUT, "wrong", "it tunes for minutes")
    test = examined(monkeypatch, doubling)
    results = {result.backend: (result.status, result.reason) for result in test.results}
    assert results["raising"] == ("left out", "it tunes for minutes")
    assert test.failed == () and test.paths == {"doubled numbers": True}
    assert "left out: doubled numbers, raising: it tunes for minutes" in test.report()


def test_the_request_of_a_case_is_known_before_a_backend_runs(doubling):
    calls = []

    def compute():
        result = doubling.bound((8,))(torch.arange(1.0, 9.0))
        calls.append("run")
        return (result,)

    assert compiling.first_request(SelfTestCase("p", "8", "doubling", compute)) == 8 and calls == []


def test_a_process_runs_all_backends_of_its_cases_and_leaves_errors_to_the_self_test(
    monkeypatch, doubling
):
    ran = []

    def case(name):
        def compute():
            result = doubling.bound((8,))(torch.arange(1.0, 9.0))
            ran.append((name, result[0].item()))
            return (result,)

        return SelfTestCase("p", name, "doubling", compute)

    monkeypatch.setattr(compiling, "cases", lambda device, sizes: map(case, "abc"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    compiling.compile_part(1, 2, SelfTestSizes())
    assert [name for name, _ in ran] == ["b", "b"] and ran[0][1] == 2.0 < ran[1][1]


def test_progress_names_each_path_and_counts_its_results(monkeypatch, doubling):
    lines = []
    x = torch.arange(1.0, 9.0)
    case = SelfTestCase("doubled numbers", "8", "doubling", lambda: (doubling.bound((8,))(x),))
    monkeypatch.setattr(testing, "cases", lambda device, sizes: [case])
    self_test(progress=lines.append)
    assert lines[0] == "testing doubled numbers"
    assert lines[1].endswith("doubled numbers: 1 passed, 2 failed, 1 unsupported")


def test_values_may_differ_up_to_the_bound(monkeypatch, doubling):
    test = examined(monkeypatch, doubling, bound=1e-6)
    assert {r.backend for r in test.results if r.status == "passed"} == {"native", "wrong"}


def test_cases_beyond_the_time_limit_are_not_run_and_do_not_pass(monkeypatch, doubling):
    test = examined(monkeypatch, doubling, seconds=-1.0)
    assert [result.status for result in test.results] == ["not run"]
    assert test.paths == {"doubled numbers": False} and "not run for lack of time" in test.report()


def test_a_path_passes_by_a_native_backend_only():
    def paths(*results):
        return SelfTest({}, tuple(SelfTestResult("p", "c", *each) for each in results), 1.0).paths[
            "p"
        ]

    assert paths(("cublaslt", "passed"), ("triton", "unsupported"))
    assert not paths(("widen", "passed"), ("decode", "passed"), ("reference", "passed"))
    assert not paths(("cublaslt", "passed"), ("triton", "failed"))


@pytest.fixture
def forged_gpu(monkeypatch):
    """Facts of an RTX 5090, which tests change."""
    facts = {"gpu": "NVIDIA GeForce RTX 5090", "driver": "580.65.06", "torch": "2.14.1"}
    monkeypatch.setattr(self_tested, "has_cuda", lambda: True)
    monkeypatch.setattr(self_tested, "machine_facts", lambda: facts)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return facts


def test_stored_results_admit_paths_on_the_same_machine_and_versions_only(cache, forged_gpu):
    path = "fp8 products in all layouts"
    assert "run te doctor --self-test" in str(self_tested.untested_reason(path))
    self_tested.save({path: True, "nvfp4 products": False})
    assert self_tested.untested_reason(path) is None
    assert "has failed" in str(self_tested.untested_reason("nvfp4 products"))
    assert "has not run" in str(self_tested.untested_reason("mxfp8 products"))
    for fact, other in (
        ("driver", "590.10"),
        ("torch", "2.15.0"),
        ("gpu", "NVIDIA GeForce RTX 5080"),
    ):
        before, forged_gpu[fact] = forged_gpu[fact], other
        self_tested._read_stored.cache_clear()
        assert "has not run" in str(self_tested.untested_reason(path)), fact
        forged_gpu[fact] = before
    self_tested._read_stored.cache_clear()
    assert self_tested.untested_reason(path) is None


def test_a_machine_without_a_gpu_counts_as_untested(cache, monkeypatch):
    monkeypatch.setattr(self_tested, "has_cuda", lambda: False)
    assert "there is no GPU" in str(self_tested.untested_reason("mxfp8 products"))


def test_facts_contain_the_versions_of_everything_that_computes():
    facts = self_tested.machine_facts()
    assert (
        facts["torch"] == torch.__version__
        and {"gpu", "transformer-engine", "CUDA"} <= facts.keys()
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the sample of a machine without a GPU")
def test_a_machine_without_a_gpu_runs_a_sample_of_every_path():
    test = self_test(SelfTestSizes(128, 16, 32))
    assert test.failed == ()
    passed = {result.path for result in test.results if result.status == "passed"}
    assert {
        "fp8 casts",
        "mxfp8 products",
        "nvfp4 products",
        "mxfp8 products of swizzled scales",
        "nvfp4 swizzled casts",
        "fp8 products in all layouts",
        "attention",
    } <= passed
    assert "fp8 block 128x128 casts of uneven sizes" in test.paths  # kernels of a GPU
    assert "There is no GPU" in test.report()


def test_the_command_exits_with_1_after_a_failure(monkeypatch, capsys):
    result = SelfTestResult(
        "mxfp8 products", "4096", "triton", "failed", reason="relative error 1.0"
    )
    for results, code in (((), 0), ((result,), 1)):
        test = SelfTest({"gpu": "NVIDIA B200"}, results, 3.0)
        monkeypatch.setattr(self_tests, "run_all", lambda progress, test=test: test)
        assert te("doctor", "--self-test").exit_code == run_self_test(False) == code
        assert "gpu: NVIDIA B200" in capsys.readouterr().out
    assert run_self_test(True) == 1
    assert json.loads(capsys.readouterr().out)["paths"] == {"mxfp8 products": False}


def test_emulating_backends_of_products_do_not_count_as_native():
    assert set(DEQUANTIZING) <= set(EMULATING)


@pytest.fixture
def pytorch_test(monkeypatch):
    """A self-test of PyTorch that has passed in three seconds."""
    result = SelfTestResult("fp8 casts", "8 x 8", "triton", "passed", equal=1.0)
    test = SelfTest({"gpu": "NVIDIA H200", "torch": "2.14.1"}, (result,), 3.0)
    monkeypatch.setattr(testing, "self_test", lambda sizes, seconds, progress: test)
    return test


def test_without_jax_the_report_says_so(monkeypatch, pytorch_test):
    monkeypatch.setitem(sys.modules, "jax", None)
    test = self_tests.run_all(lambda line: None)
    assert test.results == pytorch_test.results
    assert test.machine["JAX"] == "not installed" and "JAX: not installed" in test.report()


def test_without_frameworks_the_command_names_both_extras(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run_self_test(False) == 2
    assert "[pytorch]" in (error := capsys.readouterr().err) and "[jax]" in error


def jax_process(tmp_path, monkeypatch, program: str, cores: int = 2) -> None:
    """Run a program in place of the self-test of JAX; it does not import JAX."""
    monkeypatch.setattr(self_tests.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(self_tests.optional, "installed", lambda module: True)
    (tmp_path / "jax_program.py").write_text(program, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(self_tests, "JAX_MODULE", "jax_program")


PRINTING = """
import dataclasses, json, os, sys, time
from transformer_engine.common.self_test import SelfTestResult
print("testing jax fp8 casts", file=sys.stderr)
memory = os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"]
words = [*sys.argv[1:], str(round(float(sys.stdin.readline()) - time.time()))]
results = [SelfTestResult(" ".join(words), memory, "triton", "failed", "wrong bits")]
print(json.dumps({"machine": {"JAX": "0.10.2"}, "results": list(map(dataclasses.asdict, results))}))
"""


def test_results_of_jax_are_rows_of_the_same_table(tmp_path, monkeypatch, pytorch_test):
    jax_process(tmp_path, monkeypatch, PRINTING)
    lines = []
    test = self_tests.run_all(lines.append, SelfTestSizes(8, 4, 2), 10.0)
    assert lines == ["testing jax fp8 casts"]
    # PyTorch has taken 3 of 10 seconds, and JAX allocates no more of the GPU's memory than it needs.
    *words, left = test.results[1].path.split()
    assert (words, test.results[1].case) == (["10.0", "8", "4", "2", "--wait"], "false")
    assert 4 <= int(left) <= 7  # less on a busy machine
    assert test.failed == test.results[1:] and test.machine["JAX"] == "0.10.2"
    assert [line.split("  ")[0] for line in test.report().splitlines() if "triton  " in line] == [
        "fp8 casts",
        test.results[1].path,
    ]


PARTS = """
import dataclasses, json, sys, time
from transformer_engine.common.self_test import SelfTestResult
from transformer_engine.common.self_test import COMPILED
part = sys.argv[-1]
if part == "1/2":
    print(COMPILED, file=sys.stderr, flush=True)
left = round(float(sys.stdin.readline()) - time.time())
print("testing part " + part, file=sys.stderr, flush=True)
if part == "1/2":
    time.sleep(2)
result = SelfTestResult("jax " + part, str(left), "triton", "passed")
print(json.dumps({"machine": {"JAX": "0.10.2"}, "results": [dataclasses.asdict(result)]}))
"""


def test_parts_of_jax_run_one_after_another_until_the_same_time_the_compiled_ones_first(
    tmp_path, monkeypatch, pytorch_test
):
    jax_process(tmp_path, monkeypatch, PARTS, cores=8)
    lines = []
    test = self_tests.run_all(lines.append, None, 83.0)
    assert lines == [COMPILED, "testing part 1/2", "testing part 0/2"]
    found = {result.path: int(result.case) for result in test.results[1:]}
    assert list(found) == ["jax 1/2", "jax 0/2"]
    assert found["jax 1/2"] <= 80 and found["jax 1/2"] - found["jax 0/2"] >= 2


WAITING = """
import json, pathlib, sys, time
pathlib.Path(__file__).with_name("compiled").touch()
sys.stderr.write("x" * 200000 + "\\n")
left = round(float(sys.stdin.readline()) - time.time())
print(json.dumps({"machine": {"JAX": str(left)}, "results": []}))
"""


def test_jax_compiles_during_the_test_of_pytorch_and_runs_after_it(tmp_path, monkeypatch):
    jax_process(tmp_path, monkeypatch, WAITING)
    lines = []

    def self_test(sizes, seconds, progress):
        end = time.monotonic() + 60
        while not (tmp_path / "compiled").exists() and time.monotonic() < end:
            time.sleep(0.01)
        progress("testing fp8 casts")
        return SelfTest({}, (), 4.0)

    monkeypatch.setattr(testing, "self_test", self_test)
    test = self_tests.run_all(lines.append, None, 10.0)
    assert (tmp_path / "compiled").exists()
    assert lines == ["testing fp8 casts", "x" * 200000]
    assert test.machine == {"JAX": "6"} and test.seconds >= 4.0


def test_the_process_of_jax_ends_with_a_failed_test_of_pytorch(tmp_path, monkeypatch):
    jax_process(tmp_path, monkeypatch, "import time; time.sleep(600)")
    started = []
    real = self_tests.subprocess.Popen
    monkeypatch.setattr(
        self_tests.subprocess,
        "Popen",
        lambda *args, **kw: started.append(real(*args, **kw)) or started[-1],
    )

    def self_test(sizes, seconds, progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(testing, "self_test", self_test)
    with pytest.raises(KeyboardInterrupt):
        self_tests.run_all(lambda line: None)
    assert started[0].poll() is not None


@pytest.mark.parametrize(
    ("program", "machine", "reason"),
    [
        ("raise ImportError('jax 0.4 is too old')", "ImportError: jax 0.4 is too old", None),
        (
            "import os; os.write(2, b'no kernel image'); os._exit(3)",
            "failed",
            "exit code 3: no kernel image",
        ),
        ("import time; print('x', flush=True); time.sleep(60)", "failed", "exit code -9"),
    ],
)
def test_a_process_without_results_is_a_failure_unless_jax_cannot_be_imported(
    tmp_path, monkeypatch, program, machine, reason
):
    jax_process(tmp_path, monkeypatch, program)
    monkeypatch.setattr(self_tests, "START_SECONDS", 5.0)
    with self_tests.JaxSelfTest(None, 10.0) as jax_test:
        test = jax_test.run(lambda line: None, 0.0)
    assert test.machine["JAX"] == machine
    assert [reason in result.reason for result in test.failed] == ([] if reason is None else [True])


@pytest.mark.gpu
def test_every_backend_of_this_gpu_passes_within_two_minutes(cache):
    test = self_tests.run_all(lambda line: None)
    assert test.failed == (), test.report()
    assert test.seconds < 120
    assert self_tested.untested_reason("fp8 casts") is None
