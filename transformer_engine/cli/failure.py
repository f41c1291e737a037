"""What a command says instead of a traceback: a sentence, and an exit code that is not 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

BAD_OPTION, FAILED = 2, 1  # exit codes


class Failure(Exception):
    """Something outside of the program stands in the way; the message names it and what to do."""


@contextmanager
def reporting(console: Console) -> Iterator[None]:
    """Print the sentence of a ValueError (what the user gave) or a Failure, and leave with its exit code."""
    try:
        yield
    except (ValueError, Failure) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(FAILED if isinstance(error, Failure) else BAD_OPTION) from None


@contextmanager
def reporting_failures(console: Console) -> Iterator[None]:
    """The same for a Failure alone, where a ValueError would be a fault of the program."""
    try:
        yield
    except Failure:
        with reporting(console):
            raise


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Failure, with the path and the remedy, where the system refuses to write."""
    try:
        yield
    except OSError as error:
        raise Failure(f"cannot write {path}: {reason(error)}; {remedy}") from None


@contextmanager
def fitting(remedy: str) -> Iterator[None]:
    """Failure, with the remedy, where the GPU's memory does not suffice."""
    try:
        yield
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        raise Failure(f"the GPU's memory does not suffice; {remedy}") from None


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Is it torch.OutOfMemoryError, or JAX's error with XLA's word for it? Neither framework need be installed."""
    return type(error).__name__ == "OutOfMemoryError" or "RESOURCE_EXHAUSTED" in str(error)


def reason(error: OSError) -> str:
    """The system's words for an error, without number and path."""
    return error.strerror or str(error)
