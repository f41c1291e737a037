"""Command error messages instead of tracebacks, with exit codes other than 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape

BAD_OPTION, FAILED = 2, 1  # exit codes


class Failure(Exception):
    """An error outside the program; the message names it and the remedy."""


@contextmanager
def reporting(console: Console, wording: Callable[[str], str] = str) -> Iterator[None]:
    """Print the message from a ValueError (invalid options) or a Failure, and exit with its code.

    Args:
        console: The command's terminal.
        wording: Converts a function's message to the command's terms.
    """
    try:
        yield
    except (ValueError, Failure) as error:
        console.print(f"[red]error:[/red] {escape(wording(str(error)))}", soft_wrap=True)
        raise SystemExit(FAILED if isinstance(error, Failure) else BAD_OPTION) from None


@contextmanager
def reporting_failures(console: Console) -> Iterator[None]:
    """Report a Failure as `reporting` does; for commands in which a ValueError would be a program bug."""
    try:
        yield
    except Failure:
        with reporting(console):
            raise


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Raise Failure with the path and the remedy if a write fails."""
    try:
        yield
    except OSError as error:
        raise Failure(f"cannot write {path}: {reason(error)}; {remedy}") from None


@contextmanager
def fitting(remedy: str) -> Iterator[None]:
    """Raise Failure with the remedy if the GPU is out of memory."""
    try:
        yield
    except RuntimeError as error:
        # torch.OutOfMemoryError, or JAX's error with the status of XLA; either framework may be missing.
        if type(error).__name__ != "OutOfMemoryError" and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise Failure(f"the GPU's memory does not suffice; {remedy}") from None


def reason(error: OSError) -> str:
    """The system's message for an error, without number and path."""
    return error.strerror or str(error)
