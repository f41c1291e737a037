"""The `te` command in this process: its output and its exit code."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest.mock import patch

import transformer_engine_tools as tools

# Options of `te train` for a model that trains in a second.
TINY = [
    "--steps",
    "4",
    "--batch",
    "2",
    "--seq",
    "32",
    "--layers",
    "1",
    "--hidden",
    "32",
    "--heads",
    "1",
]


class Result(NamedTuple):
    """Exit code, and standard output and errors together."""

    exit_code: int
    output: str


def te(*arguments: object, columns: int = 200) -> Result:
    """Run `te` with arguments, on a terminal with the given number of columns."""
    printed = io.StringIO()
    code: object = 0
    with (
        patch.dict(os.environ, COLUMNS=str(columns)),
        redirect_stdout(printed),
        redirect_stderr(printed),
    ):
        try:
            tools.main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code or 0
            if isinstance(code, str):  # a message, which the interpreter prints
                print(code, file=printed)
                code = 1
    assert isinstance(code, int)
    return Result(code, printed.getvalue())
