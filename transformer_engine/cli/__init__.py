"""The `te` command, which imports the module of a command, and its framework, only when that command runs.

`te train` works with either framework, `te doctor` and `te plan` without one. The other commands need PyTorch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from .._version import __version__
from ..common import env, optional

if TYPE_CHECKING:
    import typer
    from typer.core import TyperCommand

REQUIRED = ("typer", "rich", "matplotlib")
FRAMEWORKS = ("torch", "jax")


class Command(NamedTuple):
    """A command: its module, the first sentence of its help, and whether it works without torch."""

    module: str
    summary: str
    without_torch: bool = False


COMMANDS = {
    "train": Command(
        ".train",
        "Train a byte-level GPT under a recipe and in high precision, side by side, and compare the losses.",
        without_torch=True,
    ),
    "generate": Command(
        ".generate",
        "Generate text with a model that te train has trained, and report the tokens (bytes) per second.",
    ),
    "convert": Command(
        ".convert",
        "Convert a Hugging Face checkpoint to TransformerLayer stacks, or back.",
    ),
    "verify": Command(
        ".verify",
        "Compare a parallel, quantized model of a Python file with the same model on one device in float32.",
    ),
    "plan": Command(
        ".plan",
        "Predict time and memory of a training step on many devices, or find the fastest mesh that fits.",
        without_torch=True,
    ),
    "info": Command(
        ".info",
        "Describe this machine: device, libraries, recipes and the backend that each operation uses.",
    ),
    "doctor": Command(
        ".doctor.options",
        "Check this installation: versions, GPU, libraries and clients; exit code 1 if there is a problem.",
        without_torch=True,
    ),
    "bench": Command(
        ".bench.command",
        "Time the engine, plain PyTorch and other libraries on this machine; or compare two files of figures.",
    ),
}


def application() -> typer.Typer:
    """Return the command-line application with its commands."""
    import typer
    from typer.core import TyperGroup

    class LazyGroup(TyperGroup):
        """Imports a command's module when the command is invoked; the list of commands needs summaries only."""

        def resolve_command(self, ctx, args):  # pyright: ignore[reportMissingParameterType]
            if args and args[0] in COMMANDS:
                self.commands[args[0]] = _load(args[0])
            return super().resolve_command(ctx, args)

    app = typer.Typer(
        help="Train and run Transformers in FP8 and FP4.",
        cls=LazyGroup,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},  # commands inherit the names
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def options(
        version: bool = typer.Option(False, "--version", is_eager=True, help="Print the version and exit."),
    ) -> None:
        if version:
            print(__version__)
            raise typer.Exit

    for name, command in COMMANDS.items():
        app.command(name, help=command.summary)(_placeholder)
    return app


def _placeholder() -> None:
    """Do nothing, in place of a command whose module is not imported yet; the list of commands shows its summary."""


def _load(name: str) -> TyperCommand:
    """Return the command with its options, from its module."""
    import typer

    command = COMMANDS[name]
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    if command.without_torch or find_spec("torch") is not None:
        single.command(name)(getattr(import_module(command.module, __package__), name))
    else:
        options = {"allow_extra_args": True, "ignore_unknown_options": True}

        def raise_missing() -> None:
            """Needs torch, which is not installed."""
            sys.exit(f"te {name} needs torch; install with {optional.install_command('cli')}")

        single.command(name, context_settings=options)(raise_missing)
    return typer.main.get_command(single)  # pyright: ignore[reportReturnType]


def main() -> None:
    """Run the `te` console script."""
    if sys.argv[1:] == ["--version"]:
        print(__version__)  # also where the libraries of the command are not installed
        return
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if all(find_spec(name) is None for name in FRAMEWORKS):
        missing.insert(0, "torch")
    if missing and sys.argv[1:2] == ["doctor"]:
        from .doctor.checks import main as diagnose

        sys.exit(diagnose(sys.argv[2:]))
    if missing:
        # An installation with JAX alone needs no torch.
        alone = find_spec("torch") is None and find_spec("jax") is not None
        remedy = optional.install_command("cli-jax" if alone else "cli")
        sys.exit(f"te needs {', '.join(missing)}; install with {remedy}")
    try:
        if sys.argv[1:2] != ["doctor"]:  # which reports it with the other findings
            env.check_all()
    except ValueError as error:
        sys.exit(f"error: {error}")
    application()()
