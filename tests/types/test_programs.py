"""mypy and pyright accept correct programs, and report the wrong line of each wrong program."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.types import checkers, programs
from tests.types.checkers import Report
from tests.types.right_programs import right_programs
from tests.types.wrong_programs import wrong_line, wrong_programs

CHECKERS = ("mypy strict", "pyright strict", "pyright basic")
JAX = importlib.util.find_spec("flax") is not None


def without_jax(texts: dict[str, str]) -> dict[str, str]:
    """The programs that the installed libraries suffice for: Python 3.10 has no JAX."""
    return {name: text for name, text in texts.items() if JAX or "jax" not in text}


WRONG = without_jax(wrong_programs())
RIGHT = right_programs()
NAMES = "names"

# What other libraries declare, or do not: JAX's, Flax's and torch's functions have unknown types in places,
# `Tensor.grad` may be None, and Flax's `apply` may return a pair.
UNKNOWN_TYPES = ("reportUnknown", "reportMissingTypeStubs", "reportMissingModuleSource")
OF_LIBRARIES = (
    'Item "None" of "Tensor | None" has no attribute "shape"',
    '"shape" is not a known attribute of "None"',
    "dict[str, Mapping[str, Any]]",
    "FrozenDict[str, Mapping[str, Any]]",
    "FrozenVariableDict",
    'Class cannot subclass "LightningModule"',
    "Base class type is unknown",
)
# Functions on the pages have no annotations, and the programs of the quickstart import the same modules.
OF_PAGES = (
    "no-untyped-def",
    "reportMissingParameterType",
    "reportDuplicateImport",
    "reportMissingImports",
)
# The list of names imports each name, private names of clients too, and uses none. Two folders of `debug` have no
# `__init__.py`, and pyright misses `py.typed` there.
OF_NAMES = (
    "reportUnusedImport",
    "reportPrivateUsage",
    "reportDuplicateImport",
    "reportMissingTypeStubs",
)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Report]]:
    """{checker: reports} of all programs; each checker runs once."""
    folder = tmp_path_factory.mktemp("types")
    python = checkers.create_environment(folder / "environment")
    texts = (
        programs.page_programs()
        | programs.examples()
        | {NAMES: programs.names(), "results": programs.RESULTS}
        | RIGHT
        | WRONG
    )
    checkers.write(without_jax(texts), folder / "programs")
    results = {
        f"pyright {mode}": checkers.pyright(folder / "programs", python, mode)
        for mode in ("basic", "strict")
    }
    if importlib.util.find_spec("mypy") is not None:
        results["mypy strict"] = checkers.mypy(folder / "programs", python)
    return results


@pytest.fixture
def of_checker(checker: str, reports: dict[str, list[Report]]) -> list[Report]:
    if checker not in reports:
        pytest.skip("mypy is not installed; the extra `test` has it")
    return reports[checker]


def is_of_a_library(report: Report) -> bool:
    if report.rule == "reportMissingImports":  # examples import clients, which may be absent
        absent = re.match(r'Import "(\w+)', report.message)
        return absent is not None and importlib.util.find_spec(absent[1]) is None
    return report.rule.startswith(UNKNOWN_TYPES) or any(
        text in report.message for text in OF_LIBRARIES
    )


@pytest.mark.parametrize("checker", CHECKERS)
def test_documented_and_other_right_programs_are_accepted(of_checker: list[Report]):
    ours = [
        report
        for report in of_checker
        if report.program not in WRONG
        and report.program != NAMES
        and not is_of_a_library(report)
        and not (report.rule in OF_PAGES and not report.program.startswith(("example_", "right_")))
    ]
    assert not ours, "\n".join(map(str, ours))


@pytest.mark.parametrize("checker", CHECKERS)
def test_every_public_name_is_exported_and_has_a_type(of_checker: list[Report]):
    if not JAX:
        pytest.skip(
            "flax is not installed, and the names of transformer_engine.jax have no types without it"
        )
    ours = [
        report for report in of_checker if report.program == NAMES and report.rule not in OF_NAMES
    ]
    assert not ours, "\n".join(map(str, ours))


@pytest.mark.parametrize("checker", CHECKERS)
def test_each_wrong_program_is_reported_at_its_line(of_checker: list[Report]):
    lines: dict[str, set[int]] = {name: set() for name in WRONG}
    for report in of_checker:
        if report.program in WRONG and not report.rule.startswith(UNKNOWN_TYPES):
            lines[report.program].add(report.line)
    assert lines == {name: {wrong_line(text)} for name, text in WRONG.items()}


def test_programs_cover_the_readme_the_quickstart_and_all_examples():
    assert len(wrong_programs()) >= 80 and len(RIGHT) >= 15
    assert {name.partition("_")[0] for name in programs.page_programs()} == {"readme", "quickstart"}
    assert len(programs.page_programs()) == 3
    folder = Path(__file__).resolve().parents[2] / "examples"
    assert len(programs.examples()) == len(list(folder.glob("*.py"))) >= 10


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_runs(name: str):
    if "jax" in name and importlib.util.find_spec("flax") is None:
        pytest.skip("flax is not installed; pip install '.[jax]'")
    exec(compile(RIGHT[name], name, "exec"), {"__name__": name})
