"""Every launch names exactly the arguments that its kernel writes, so any framework can launch it."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
KERNELS = Path(__file__).parents[2] / "transformer_engine" / "common" / "kernels"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.fixture(scope="module", params=["cover", pytest.param("--all", marks=pytest.mark.slow)])
def facts(request) -> dict[str, dict]:
    command = [sys.executable, "-W", "ignore", str(HERE / "written_cases.py"), request.param]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def find_launched_kernels() -> set[str]:
    """ "module.kernel" for every kernel that the package launches."""
    results = set()
    for path in KERNELS.glob("*.py"):
        functions = [
            node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
        ]
        kernels = {
            f.name for f in functions if any("jit" in ast.unparse(d) for d in f.decorator_list)
        }
        for function in functions:
            if function.name not in kernels:
                names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
                names -= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
                results |= {f"{path.stem}.{name}" for name in names & kernels}
    return results


def test_every_launched_kernel_is_checked(facts):
    assert find_launched_kernels() == {case["kernel"] for case in facts.values()}


def test_a_launch_declares_exactly_the_arguments_that_its_kernel_writes(facts):
    different = {name: case for name, case in facts.items() if case["declared"] != case["written"]}
    assert different == {}


def test_a_launch_declares_the_address_tables_that_its_kernel_reads(facts):
    assert {n: case for n, case in facts.items() if case["declared tables"] != case["tables"]} == {}
    assert {
        n: case for n, case in facts.items() if case["declared through"] != case["through"]
    } == {}
    assert sum(bool(case["tables"]) for case in facts.values()) >= 7


def test_missing_and_extra_declarations_are_found():
    from tests.kernels.written_cases import FLOAT, HALF, SHAPE, launch_writes
    from transformer_engine.common.formats import E4M3
    from transformer_engine.common.kernels import cast

    record = cast.cast(SHAPE, E4M3, True, False, records=True)
    less = launch_writes(dataclasses.replace(record, in_place=()), (HALF, FLOAT, FLOAT))
    assert set(less["written"]) - set(less["declared"]) == {"amax"}
    more = launch_writes(dataclasses.replace(record, in_place=(1, 2)), (HALF, FLOAT, FLOAT))
    assert set(more["declared"]) - set(more["written"]) == {"multiplier"}


@pytest.mark.parametrize("fault", ["too few", "another dtype", "an output that is not asked for"])
def test_launch_arguments_that_differ_from_the_record_are_rejected(fault):
    from transformer_engine.common.formats import E4M3
    from transformer_engine.common.kernels import cast
    from transformer_engine.common.kernels.launch import start

    x, one = torch.ones(16, 16), torch.ones(1)
    codes = torch.empty(16, 16, dtype=torch.float8_e4m3fn)
    tensors = [x, one, one.clone(), codes, None, one.clone()]
    if fault == "too few":
        tensors.pop()
    elif fault == "another dtype":
        tensors[3] = codes.view(torch.uint8)
    else:
        tensors[4] = codes.clone()
    with pytest.raises(AssertionError, match=r"cast_kernel"):
        start(cast.cast((16, 16), E4M3, True, False, records=True), tensors, 0)


class TestProgram:
    def steps(self):
        from transformer_engine.common.kernels import column_sums
        from transformer_engine.common.kernels.launch import Machine
        from transformer_engine.common.kernels.program import Program, ProgramStep

        strips, total = (
            column_sums.column_sums((128, 64), 64, Machine(3, 1 << 16, 2)),
            column_sums.sum_columns((2, 64), "float32"),
        )
        return Program, ProgramStep, strips, total

    def test_a_step_reads_only_inputs_and_earlier_results(self):
        Program, ProgramStep, strips, total = self.steps()
        late = (
            ProgramStep(total, ("partials",), ("sums", None)),
            ProgramStep(strips, ("x",), (None, "partials")),
        )
        with pytest.raises(ValueError, match=r"sum_partials reads 'partials'"):
            Program(("x",), late, ("sums",))

    def test_a_step_names_exactly_the_outputs_of_its_launch(self):
        Program, ProgramStep, strips, _ = self.steps()
        with pytest.raises(
            ValueError, match=r"column_sums_kernel makes None, and it is called 'amax'"
        ):
            Program(("x",), (ProgramStep(strips, ("x",), ("amax", "partials")),), ("partials",))

    def test_a_result_is_made_by_a_step(self):
        Program, ProgramStep, strips, _ = self.steps()
        with pytest.raises(ValueError, match=r"no step makes the result 'sums'"):
            Program(("x",), (ProgramStep(strips, ("x",), (None, "partials")),), ("sums",))

    def test_buffers_are_counted_in_the_order_in_which_they_come_to_be(self):
        Program, ProgramStep, strips, total = self.steps()
        ordered = (
            ProgramStep(strips, ("x",), (None, "partials")),
            ProgramStep(total, ("partials",), ("sums", None)),
        )
        program = Program(("x",), ordered, ("sums", None))
        # 0 is None, 1 is x; then two outputs per step.
        assert program.places == (((strips, (1,)), (total, (3,))), (4, 0))
