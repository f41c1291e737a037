"""`te info`: the device, the libraries, the recipes that run here, and the backend of every operation."""

from __future__ import annotations

import argparse

from .options import add_flag


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    add_flag(
        parser, "--why", "also print why each other backend is not used, and the unused operations"
    )
    add_flag(parser, "--json", "print everything as JSON for programs")


def run(args: argparse.Namespace) -> None:
    """Describe this machine: device, libraries, recipes and the backend that each operation uses."""
    from rich.console import Console

    from .machine import print_json, print_report

    if args.json:
        print_json()
    else:
        print_report(Console(highlight=False), args.why)
