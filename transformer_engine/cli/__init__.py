"""The `te` command: train the demonstration (`te train`), sample from it (`te generate`), convert checkpoints
(`te convert`), describe this machine (`te info`), check the installation (`te doctor`), time it (`te bench`).

`te train` works with either framework and `te doctor` without one; the other commands read torch's side, and say so
where torch is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..common import env, extras

if TYPE_CHECKING:
    from typer import Typer

REQUIRED = ("typer", "rich", "matplotlib")
FRAMEWORKS = ("torch", "jax")
# The module of each command, and whether it works without torch.
COMMANDS = {
    "train": (".train", True),
    "generate": (".generate", False),
    "convert": (".convert", False),
    "info": (".info", False),
    "doctor": (".doctor.options", True),
    "bench": (".bench.command", False),
}


def application() -> Typer:
    """The command-line application with its commands."""
    from typer import Typer

    app = Typer(
        help="Train and run Transformers in 8 and 4 bits.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for name, (module, without_torch) in COMMANDS.items():
        if without_torch or find_spec("torch") is not None:
            app.command(name)(getattr(import_module(module, __package__), name))
        else:
            options = {"allow_extra_args": True, "ignore_unknown_options": True}
            app.command(name, context_settings=options)(_refusing(name))
    return app


def _refusing(name: str) -> Callable[[], None]:
    def refuse() -> None:
        sys.exit(f"te {name} needs torch; install with {extras.command('cli')}")

    refuse.__doc__ = "Needs torch, which is not installed."
    return refuse


def main() -> None:
    """Entry point of the `te` console script."""
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if all(find_spec(name) is None for name in FRAMEWORKS):
        missing.insert(0, "torch")
    if missing and sys.argv[1:2] == ["doctor"]:
        from .doctor.command import main as diagnose

        sys.exit(diagnose(sys.argv[2:]))
    if missing:
        # Who has JAX alone is not told to install torch's gigabytes.
        alone = find_spec("torch") is None and find_spec("jax") is not None
        remedy = extras.command("cli-jax" if alone else "cli")
        sys.exit(f"te needs {', '.join(missing)}; install with {remedy}")
    try:
        if sys.argv[1:2] != ["doctor"]:  # which says it among the rest
            env.check_all()
    except ValueError as error:
        sys.exit(f"error: {error}")
    application()()
