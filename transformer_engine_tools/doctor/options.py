"""`te doctor` as an application command."""

from __future__ import annotations

import argparse

from ..options import add_flag


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    add_flag(parser, "--json", "print JSON for programs")
    add_flag(
        parser,
        "--self-test",
        "compare every backend of this machine with the reference: bits, errors and times, in two minutes",
    )


def run(args: argparse.Namespace) -> None:
    """Check this installation: versions, GPU, libraries and clients; exit code 1 if there is a problem."""
    from . import checks

    raise SystemExit(checks.run_self_test(args.json) if args.self_test else checks.run(args.json))
