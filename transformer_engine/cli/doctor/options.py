"""`te doctor` as a command of the application."""

from __future__ import annotations

from typing import Annotated

import typer

from .checks import run


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs")] = False) -> None:
    """Check this installation: versions, GPU, libraries and clients; exit code 1 if there is a problem."""
    raise typer.Exit(run(as_json))
