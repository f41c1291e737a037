"""The `te` command, which imports the module of a command, and its framework, only when that command runs.

`te train` works with either framework, `te doctor` and `te plan` without one. The other commands need PyTorch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from transformer_engine._version import __version__
from transformer_engine.common import env, optional

from .invocation import program
from .options import Parser


class Command(NamedTuple):
    """A command: its module, the first sentence and the examples in its help, and whether it works without torch.

    Attributes:
        module: Module that implements the command.
        summary: First sentence of its help.
        examples: Examples in its help.
        without_torch: Whether the command works without torch.
    """

    module: str
    summary: str
    examples: tuple[str, ...]  # arguments
    without_torch: bool = False


SHELLS = ("bash", "zsh", "tcsh", "fish")
COMMANDS = {
    "train": Command(
        ".train",
        "Train a byte-level GPT under a recipe and in high precision, side by side, and compare the losses.",
        (
            "--recipe current --steps 200",
            "--data my_text/ --name mine",
            "--name mine --steps 400 --resume",
        ),
        without_torch=True,
    ),
    "generate": Command(
        ".generate",
        "Generate text with a model that te train has trained, and report the tokens (bytes) per second.",
        ('"def main(" --count 100', '--name mine "The " --temperature 0.8'),
    ),
    "convert": Command(
        ".convert",
        "Convert a Hugging Face checkpoint to TransformerLayer stacks, or back.",
        ("Llama-3.2-1B llama-te --dtype bfloat16", "llama-te llama-hf"),
    ),
    "verify": Command(
        ".verify",
        "Compare a parallel, quantized model in a Python file with the same model on one device in float32.",
        ("my_model.py --recipe current", "--casts"),
    ),
    "plan": Command(
        ".plan",
        "Predict time and memory of a training step on many devices, or find the fastest mesh that fits.",
        (
            "--model llama-8b --devices 64 --fsdp 16 --tp 2 --cp 2 --recipe current",
            "--model llama-70b --devices 64 --search",
        ),
        without_torch=True,
    ),
    "info": Command(
        ".info",
        "Describe this machine: device, libraries, recipes and the backend that each operation uses.",
        ("--why", "--json"),
    ),
    "doctor": Command(
        ".doctor.options",
        "Check this installation: versions, GPU, libraries and clients; exit code 1 if there is a problem.",
        ("--self-test", "--json"),
        without_torch=True,
    ),
    "bench": Command(
        ".bench.options",
        "Time the engine, plain PyTorch and other libraries on this machine; or compare two figure files.",
        (
            "--family linear --recipe none --recipe current",
            "--quick --json figures.json",
            "--compare before.json after.json",
        ),
    ),
}

OVERVIEW = ("doctor --self-test", "train --recipe current", "plan --help")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the `te` command.

    Args:
        arguments: Command arguments; by default the process's.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    # OpenMP reads it when torch is loaded. Its threads spin while they wait by default, and occupy the cores that other
    # programs or threads need.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    name = argv[0] if argv else ""
    if name not in COMMANDS:
        options = _overview().parse_args(argv or ["--help"])
        if options.completion is not None:
            print(_completion(options.completion))
        return
    command = COMMANDS[name]
    parser = Parser(f"{program()} {name}", command.summary, command.examples, argv[1:])
    module = import_module(command.module, __package__)
    module.add_arguments(parser)
    options = parser.parse_args(argv[1:])  # --help works without torch
    if find_spec("torch") is None and not command.without_torch:
        sys.exit(f"te {name} needs torch; install with {optional.install_command('cli')}")
    try:
        if name != "doctor":  # which reports it with the other findings
            env.check_all()
    except ValueError as error:
        sys.exit(f"error: {error}")
    module.run(options)


def _overview(complete: bool = False) -> Parser:
    """Build the parser for `te --help`, which lists the commands; with `complete`, each has its options."""
    parser = Parser(
        "te" if complete else program(), "Train and run Transformers in FP8 and FP4.", OVERVIEW
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument(
        "--completion", choices=SHELLS, help="print a script that completes commands and options"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", prog="te")
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, help=command.summary, description=command.summary)
        if complete:
            import_module(command.module, __package__).add_arguments(added)
    return parser


def _completion(shell: str) -> str:
    """The script with which a shell completes `te`, its commands and their options."""
    try:
        import shtab
    except ImportError:
        sys.exit(f"te --completion needs shtab; install with {optional.install_command('cli')}")
    return shtab.complete(_overview(complete=True), shell)
