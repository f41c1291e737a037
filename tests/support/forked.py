"""Python programs, each in a process forked from a server that has imported torch or JAX.

Importing torch, its compiler and the package takes five seconds in a new interpreter, JAX with Flax two, and
a forked process none. The torch server is the one that `multiprocessing` uses, so that ranks
(tests/distributed/ranks.py) are forked from it too. Programs for Triton's interpreter have another server,
because Triton reads TRITON_INTERPRET when it is imported, and JAX programs a third one without torch. JAX
reads XLA_FLAGS later, in the forked process.

Tests on an import, and on variables that are read during one, need `tests.support.programs` instead.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import sys
import tempfile
import types
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

CONTEXT = multiprocessing.get_context("forkserver")
# Optimizers and checkpointed functions import torch._dynamo when first used, and test modules import pytest.
MODULES = [
    "pytest",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.multiprocessing.spawn",
    "transformer_engine.pytorch",
]
CONTEXT.set_forkserver_preload([*MODULES, "torch._dynamo"])
_INTERPRETER_SERVER = forkserver.ForkServer()
_INTERPRETER_SERVER.set_forkserver_preload([*MODULES, "triton"])
_JAX_SERVER = forkserver.ForkServer()
_JAX_SERVER.set_forkserver_preload(["flax", "orbax.checkpoint", "transformer_engine.jax.flax"])


class Program:
    """A running program: `python *arguments`, where the arguments begin with -W, -c, -m or a file.

    Args:
        arguments: Python command line.
        folder: Working directory.
        environment: All environment variables; TRITON_INTERPRET chooses a torch server.
        framework: "torch" or "jax". JAX programs run on the CPU. Variables that JAX reads when it is imported
        have
            no effect, and neither does removing torch: the server has imported JAX and the package already.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        framework: str = "torch",
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._out, self._err = (Path(self._folder.name, name) for name in ("out", "err"))
        files = str(self._out), str(self._err)
        self.process = CONTEXT.Process(
            target=_run, args=(list(map(str, arguments)), str(folder), dict(environment), files)
        )
        if framework == "jax":
            self._start_from(_JAX_SERVER, JAX_PLATFORMS="cpu")
        elif environment.get("TRITON_INTERPRET") == "1":
            self._start_from(_INTERPRETER_SERVER, TRITON_INTERPRET="1")
        else:
            self.process.start()

    def _start_from(self, server: forkserver.ForkServer, **variables: str) -> None:
        """Fork the process from a server, whose imports read these environment variables."""
        with (
            mock.patch.dict(os.environ, variables),
            mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process),
        ):
            self.process.start()

    @property
    def printed(self) -> str:
        return self._out.read_text()

    @property
    def errors(self) -> str:
        return self._err.read_text()

    def finish(self, patience: float | None = None) -> int:
        """Wait and return the exit status; a program that runs for longer than `patience` seconds is killed."""
        self.process.join(patience)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode


def output(
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    patience: float | None = None,
    framework: str = "torch",
) -> str:
    """Run a program and return its output; if its exit status is not 0, fail with its last errors."""
    program = Program(arguments, folder, environment, framework)
    status = program.finish(patience)
    assert status == 0, f"exit status {status}: {program.errors[-3000:]}"
    return program.printed


def _run(
    arguments: list[str], folder: str, environment: dict[str, str], files: tuple[str, str]
) -> None:
    """Run a program in this process as Python would in a new one."""
    gc.freeze()  # collections do not visit the server's objects
    for descriptor, path in enumerate(files, 1):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if arguments[0] == "-W":
        warnings.simplefilter(arguments[1])  # pyright: ignore[reportArgumentType]
        arguments = arguments[2:]
    form, *rest = arguments
    paths = [*environment.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    try:
        if form == "-m":
            sys.argv, sys.path[:] = rest, [folder, *paths]
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
            return
        # The module stays in sys.modules to the end of the process. Deleting a process group with a program's
        # variables, as `runpy.run_path` does, can wait forever for one of its threads, which waits for the
        # interpreter.
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        if form == "-c":
            program, *sys.argv[1:] = rest
            sys.argv[0], sys.path[:] = "-c", ["", *paths]
            exec(compile(program, "<string>", "exec"), vars(main))
        else:
            main.__file__ = form
            sys.argv, sys.path[:] = arguments, [str(Path(form).resolve().parent), *paths]
            exec(compile(Path(form).read_bytes(), form, "exec"), vars(main))
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends its processes without these
