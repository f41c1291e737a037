"""Run client examples, each in a process forked from one that has imported Hugging Face's libraries.

python forked_examples.py FILE, where FILE has {name: [folder, [[title, source, device], ...]]} as JSON. Prints
{name: "" or the last standard-error lines from a failed example} as JSON.

Importing these libraries takes four seconds. Examples with one name share a process, because clients replace
torch functions, but not their variables. A traceback names an example by its title.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

SHARED = ("transformers.models.llama.modeling_llama", "accelerate", "peft")


def run(examples: Sequence[Sequence[str | None]]) -> None:
    """Run sources, each with its default device and with the default dtype of torch."""
    for title, source, device in examples:
        assert title is not None and source is not None
        torch.set_default_device(device)
        exec(compile(source, title, "exec"), {"__name__": "__main__", "device": device})
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def run_examples(folder: str, examples: Sequence[Sequence[str | None]]) -> str:
    """Run examples in a forked process; return "" or the end of its standard error if it fails."""
    with tempfile.TemporaryFile("w+") as errors:
        process = os.fork()
        if process == 0:
            status = 1
            try:
                os.dup2(errors.fileno(), 2)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.chdir(folder)
                run(examples)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(process, 0)
        errors.seek(0)
        return "" if status == 0 else f"status {status}: {errors.read()[-3000:]}"


def main(path: str) -> None:
    for name in SHARED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    programs = json.loads(Path(path).read_text())
    print(json.dumps({name: run_examples(*program) for name, program in programs.items()}))


if __name__ == "__main__":
    main(sys.argv[1])
