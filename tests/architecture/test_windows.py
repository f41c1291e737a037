"""The package imports, trains a layer and runs `te` without the modules and functions that Windows lacks.

Python's own modules choose their implementation by `os.name`, which therefore stays "posix" here: `store.py`, which
reads it, has another test. torch is imported first, because it loads DLLs under `sys.platform == "win32"`.
"""

from __future__ import annotations

import json
import os

import pytest

from tests.architecture.source import modules
from tests.support import programs
from transformer_engine.common import store

# Modules of the standard library without a version for Windows, and Triton, which PyTorch's wheels for Windows lack.
POSIX = (
    *(
        "crypt",
        "curses",
        "fcntl",
        "grp",
        "nis",
        "ossaudiodev",
        "pty",
        "pwd",
        "readline",
        "resource",
        "spwd",
    ),
    *("syslog", "termios", "tty"),
)
LIBRARIES = ("triton", "nvmath", "cudnn", "flash_attn", "fla")
FUNCTIONS = (
    *(
        "chown",
        "fchmod",
        "fork",
        "forkpty",
        "getgid",
        "getegid",
        "getgroups",
        "getloadavg",
        "getpgid",
        "getuid",
    ),
    *("killpg", "mkfifo", "mknod", "nice", "posix_spawn", "pread", "pwrite", "register_at_fork"),
    *("sched_getaffinity", "sched_yield", "setsid", "statvfs", "sync", "uname", "wait3", "wait4"),
    *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK"),
)
SIGNALS = (
    *(
        "SIGALRM",
        "SIGCHLD",
        "SIGCONT",
        "SIGHUP",
        "SIGKILL",
        "SIGPIPE",
        "SIGSTOP",
        "SIGUSR1",
        "SIGUSR2",
        "alarm",
    ),
    *("pthread_kill", "setitimer", "sigwait"),
)
HIDING = f"""
import os, signal, sys
for name in {POSIX + LIBRARIES}:
    sys.modules[name] = None
for module, names in ((os, {FUNCTIONS}), (signal, {SIGNALS})):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "win32"
"""
PYTORCH = """
import torch, torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp
HIDING
import contextlib, importlib, io, json
import transformer_engine.pytorch as te
from transformer_engine.common import recipe
names = json.loads(sys.argv[1])
without = {}
for name in names:
    try:
        importlib.import_module(name)
    except ImportError as error:
        without[name] = f"{error.name}: {error}"
layer = te.TransformerLayer(32, 64, 4, device="cpu", params_dtype=torch.float32)
optimizer = te.optimizers.FusedAdam(layer.parameters())
with te.autocast(enabled=True, recipe=recipe.DelayedScaling()):
    loss = layer(torch.randn(8, 2, 32)).square().mean()
loss.backward()
optimizer.step()
from transformer_engine.cli import main
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    for command in ("info", "doctor"):
        try:
            main([command])
        except SystemExit as error:
            assert error.code in (None, 0), (command, error.code, printed.getvalue())
print(json.dumps([loss.isfinite().item(), without, printed.getvalue()]))
"""
JAX = """
import jax, flax.linen, jax.numpy as jnp, numpy
HIDING
import transformer_engine.jax.flax as te
layer = te.DenseGeneral(features=16)
x = jnp.ones((4, 16))
print(bool(jnp.isfinite(layer.apply(layer.init(jax.random.key(0), x), x)).all()))
"""
JAX_NAMES = ("transformer_engine_jax",)


def run(program: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": programs.search_path(), "JAX_PLATFORMS": "cpu"}
    text = program.replace("HIDING", HIDING)
    return programs.output(
        ["-W", "ignore", "-c", text, *arguments], programs.ROOT, environment, patience=600
    )


def test_pytorch_imports_trains_and_reports_without_what_windows_lacks():
    names = [
        name
        for name in sorted(modules())
        if not name.startswith(("transformer_engine.jax", *JAX_NAMES))
    ]
    finite, without, printed = json.loads(run(PYTORCH, json.dumps(names)).splitlines()[-1])
    assert finite and "no problem found" in printed
    # Kernels import Triton, adapters the library that they adapt; nothing imports a module that Windows lacks.
    assert {
        name: reason
        for name, reason in without.items()
        if reason.partition(":")[0] in (*POSIX, "None")
    } == {}
    needing = {name for name, reason in without.items() if reason.startswith("triton")}
    assert needing, "no kernel was imported"
    assert {name for name in needing if ".kernels." not in name and ".triton" not in name} == set()


def test_jax_imports_and_computes_without_what_windows_lacks():
    pytest.importorskip("jax")
    assert run(JAX).strip().endswith("True")


def test_the_store_needs_no_owners_and_flags_of_posix(monkeypatch, tmp_path):
    monkeypatch.setattr(store.os, "name", "nt", raising=True)
    monkeypatch.delattr(store.os, "geteuid")
    monkeypatch.delattr(store.os, "O_NONBLOCK")
    assert store._untrusted_reason(tmp_path.stat()) is None
