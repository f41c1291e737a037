"""The `te` command: train the demonstration (`te train`), sample from it (`te generate`), convert checkpoints
(`te convert`), describe this machine (`te info`), check the installation (`te doctor`), time it (`te bench`)."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..common import env, extras

if TYPE_CHECKING:
    from typer import Typer

REQUIRED = ("torch", "typer", "rich", "matplotlib")


def application() -> Typer:
    """The command-line application with its commands."""
    from typer import Typer

    from .bench.command import bench
    from .convert import convert
    from .doctor.options import doctor
    from .generate import generate
    from .info import info
    from .train import train

    app = Typer(
        help="Train and run Transformers in 8 and 4 bits.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.command()(train)
    app.command()(generate)
    app.command()(convert)
    app.command()(info)
    app.command()(doctor)
    app.command()(bench)
    return app


def main() -> None:
    """Entry point of the `te` console script."""
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if missing and sys.argv[1:2] == ["doctor"]:
        from .doctor.command import main as diagnose

        sys.exit(diagnose(sys.argv[2:]))
    if missing:
        sys.exit(f"te needs {', '.join(missing)}; install with {extras.command('cli')}")
    try:
        if sys.argv[1:2] != ["doctor"]:  # which says it among the rest
            env.check_all()
    except ValueError as error:
        sys.exit(f"error: {error}")
    application()()
