"""A bad argument raises an error that names it and the remedy, and changes no bit of state."""

from __future__ import annotations

import functools
import linecache
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

import transformer_engine
from tests.fuzz.attention_calls import attention_calls
from tests.fuzz.bad_values import Made, format_value, names_it
from tests.fuzz.constructor_calls import constructor_calls
from tests.fuzz.expert_calls import expert_calls
from tests.fuzz.fingerprint import differences, fingerprint
from tests.fuzz.forward_calls import forward_calls
from tests.fuzz.function_calls import function_calls
from tests.fuzz.training_calls import training_calls

SOURCES = Path(transformer_engine.__file__).resolve().parents[1]
TABLES = (
    constructor_calls,
    forward_calls,
    attention_calls,
    function_calls,
    training_calls,
    expert_calls,
)
NAMED = (ValueError, TypeError, NotImplementedError, RuntimeError)
REMEDY = re.compile(
    r"\b(give|choose|pass|use|set|leave|move|convert|call|make|must|pad|needs?|run|unset|ask|drop|raise|takes?|"
    r"reshape|remove|is for|view|quantize|match|fix|add|keep|cut|split|may|write|install|enter|put|flatten)\b",
    re.IGNORECASE,
)


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Trial:
    """Makes bad calls to one callable in sequence and compares the state before and after each."""

    def __init__(self, result: Made):
        self.made = result
        self.before = self._state()

    def _state(self) -> dict[str, Any]:
        return fingerprint(self.made.arguments, *self.made.watched)

    def outcome(self, argument: str, value: object) -> str | None:
        """Fault in a bad call's error, or None."""
        try:
            self.made.function(**{**self.made.arguments, argument: value})
        except Exception as error:
            fault = _fault(error, value)
        else:
            fault = "was accepted"
        after = self._state()
        changed = differences(self.before, after)
        self.before = after
        return f"{fault or 'rejected'}, and changed {', '.join(changed[:3])}" if changed else fault


@functools.cache
def _is_ours(file: str) -> bool:
    return Path(file).resolve().is_relative_to(SOURCES)


def _fault(error: Exception, value: object) -> str | None:
    raised = f"{type(error).__name__}: {error}"
    # Python itself raises subclasses of the named errors: UnicodeError is a ValueError, KeyError is not.
    if not isinstance(error, NAMED) or isinstance(error, (RecursionError, UnicodeError)):
        return f"raised {raised}"
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    file = trace.tb_frame.f_code.co_filename
    line = linecache.getline(file, trace.tb_lineno).strip()
    if not _is_ours(file) or not line.startswith("raise"):
        return f"was left to Python or torch at {Path(file).name}:{trace.tb_lineno}: {raised}"
    if not names_it(str(error), value):
        return f"does not name the value: {raised}"
    if not REMEDY.search(str(error)):
        return f"names no remedy: {raised}"
    return None


CALLS = {call.name: call for table in TABLES for call in table()}


@pytest.mark.parametrize("name", CALLS)
def test_every_bad_call_is_rejected_and_changes_nothing(name: str):
    call = CALLS[name]
    faults = []
    with call.context():
        result = call.make()
        for when in ("before", "after") if call.stateful else ("after",):
            if when == "after":
                result.function(**result.arguments)
            trial = Trial(result)
            for argument, value in call.cases():
                fault = trial.outcome(argument, value)
                if fault is not None:
                    faults.append(
                        f"{name}({argument}={format_value(value)}) {when} the first good call {fault}"
                    )
    assert not faults, "\n".join([f"{len(faults)} faults", *faults])


def test_there_are_a_thousand_distinct_bad_calls():
    distinct = {
        (call.name, argument, format_value(value))
        for call in CALLS.values()
        for argument, value in call.cases()
    }
    assert len(distinct) >= 1000, len(distinct)
