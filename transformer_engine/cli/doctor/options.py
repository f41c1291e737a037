"""`te doctor` as a command of the application."""

from __future__ import annotations

from typing import Annotated

import typer

from .checks import run, run_self_test


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs")] = False,
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test",
            help="Compare every backend of this machine with the reference: bits, errors and times, in two minutes",
        ),
    ] = False,
) -> None:
    """Check this installation: versions, GPU, libraries and clients; exit code 1 if there is a problem."""
    raise typer.Exit(run_self_test(as_json) if self_test else run(as_json))
