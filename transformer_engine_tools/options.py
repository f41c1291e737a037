"""Arguments that several commands share.

Command modules import no framework at module level: `te COMMAND --help` reads their arguments only.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from transformer_engine.common.checks import nearest

if TYPE_CHECKING:
    import torch

DEVICES = ("auto", "cpu", "cuda")


METAVARS = {"int": "INT", "float": "NUMBER", "Path": "PATH"}


class TypedHelp(argparse.HelpFormatter):
    """Help that names an option's value type, where argparse repeats the option's name."""

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return METAVARS.get(getattr(action.type, "__name__", "str"), "TEXT")


class Parser(argparse.ArgumentParser):
    """A parser that accepts no abbreviated options and reports an error in one line.

    Args:
        prog: The command, as a user types it.
        description: First paragraph in the help.
        examples: Arguments of calls that the help ends with.
        words: The arguments that will be parsed, for errors.
        **settings: Further settings of argparse.
    """

    def __init__(
        self,
        prog: str,
        description: str,
        examples: Sequence[str] = (),
        words: Sequence[str] = (),
        **settings: Any,
    ):
        shared: dict[str, Any] = {"allow_abbrev": False, "formatter_class": TypedHelp}
        super().__init__(prog=prog, description=description, **shared, **settings)
        self._examples = examples
        self._words = words

    def format_help(self) -> str:
        """Format the help with one line of usage: the positional arguments, and "[options]" for all options."""
        names = [
            f"[{action.dest}]" if action.nargs == "?" else str(action.metavar or action.dest)
            for action in self._get_positional_actions()
        ]
        self.usage = " ".join(["%(prog)s", "[options]", *names])
        examples = "".join(f"  {self.prog} {arguments}\n" for arguments in self._examples)
        return super().format_help() + (f"\nexamples:\n{examples}" if examples else "")

    def error(self, message: str) -> NoReturn:
        """Print the message, a similar option or choice, and the command that prints the help; exit with code 2."""
        # argparse reports a missing argument before an unknown one, which can be the missing one with a misspelling.
        names = [
            word.partition("=")[0] for word in self._words if word.startswith("--") and word != "--"
        ]
        unknown = [name for name in names if name not in self._option_string_actions]
        if unknown and "are required: " in message:
            message = f"unrecognized arguments: {' '.join(unknown)}"
        similar = _similar(message, self._option_string_actions)
        remedy = f"did you mean {similar}? " if similar else ""
        message = message.removeprefix("argument ")
        self.exit(2, f"error: {message}; {remedy}{self.prog} --help lists all options\n")


def _similar(message: str, options: Collection[str]) -> str | None:
    """The option, or the choice, that is most similar to the wrong one in a message of argparse."""
    if option := re.match(r"unrecognized arguments: (--[^\s=]+)", message):
        return nearest(option[1], options)
    if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
        return nearest(choice[1], [name.strip("' ") for name in choice[2].split(",")])
    return None


def minimum_converter(minimum: int) -> Callable[[str], int]:
    """Build a converter to an integer >= `minimum`, for an argument's `type`."""

    def convert(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is below {minimum}")
        return value

    convert.__name__ = "int"  # for argparse's message on other text
    return convert


def add_flag(parser: argparse._ActionsContainer, option: str, text: str) -> None:
    """Add a switch that is off by default."""
    parser.add_argument(option, action="store_true", help=text)


def add_switch(parser: argparse._ActionsContainer, option: str, text: str) -> None:
    """Add a switch pair, --OPTION and --no-OPTION; without either, the value is None."""
    parser.add_argument(option, action=argparse.BooleanOptionalAction, default=None, help=text)


def add_choice(
    parser: argparse._ActionsContainer,
    option: str,
    names: Sequence[str],
    text: str,
    default: str | None = None,
) -> None:
    """Add an option whose value is one of `names`."""
    parser.add_argument(option, choices=names, default=default, metavar="|".join(names), help=text)


def add_device(parser: argparse._ActionsContainer) -> None:
    """Add --device."""
    add_choice(
        parser, "--device", DEVICES, "auto: CUDA, or the CPU without a GPU (default: auto)", "auto"
    )


def torch_device(name: str) -> torch.device:
    """Resolve "auto", "cpu" or "cuda" to a torch device."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
