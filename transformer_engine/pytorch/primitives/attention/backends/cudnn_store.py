"""kept = read(locate(...)): cuDNN's plans as files, which later processes of the same user read instead of building.

A file contains MAGIC, the SHA-256 of its name and of the rest, the size of the workspace (8 bytes), and the library's
own bytes. Its name is a hash of all inputs of the plan, so that different inputs have different files. The library runs
the kernels in a file; therefore files and folders that other users can write are not read. These functions do not
raise: a problem with a file is logged once, and the plan is built.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import stat
import struct
import tempfile
from pathlib import Path
from typing import NamedTuple

from .....common import env

FOLDER = "cudnn_plans"
MAGIC = b"TECUDNN2"
LIMIT = 512

_SIZE = struct.Struct("<Q")
_DIGEST = len(MAGIC)
_BODY = _DIGEST + hashlib.sha256().digest_size
_WRITABLE_BY_OTHERS = 0o022

# The sources that determine the graph of a request, and the content of a file.
SOURCES = (
    *(
        "backends/cudnn_graph.py",
        "backends/cudnn_plan.py",
        "backends/cudnn_fp8.py",
        "backends/cudnn_score_mod.py",
        "backends/cudnn_store.py",
    ),
    *("call.py", "mask.py", "../../../common/score_program.py"),
)

logger = logging.getLogger("DotProductAttention")


class StoredPlan(NamedTuple):
    """A plan on disk: bytes of its workspace, and the library's serialization."""

    workspace: int
    serialized: bytes


@functools.cache
def warn(sentence: str) -> None:
    """Log a sentence once per process."""
    logger.warning("%s", sentence)


@functools.cache
def source_digest() -> str:
    """Return SHA-256 of the source files that describe graphs; raise OSError if they cannot be read."""
    digest = hashlib.sha256()
    for source in SOURCES:
        digest.update((Path(__file__).parents[1] / source).read_bytes())
    return digest.hexdigest()


def locate(*parts: object) -> Path | None:
    """Return the file of a plan that depends on `parts`, by their text; None if it cannot be stored."""
    try:
        text = "\n".join(map(str, (*parts, source_digest())))
        return env.cache_directory() / FOLDER / hashlib.sha256(text.encode()).hexdigest()
    except (OSError, RuntimeError) as error:  # no source files, or no home directory
        warn(f"cuDNN's plans cannot be kept on disk ({error}); set TE_CUDNN_PLAN_CACHE=0, or TE_CACHE_DIR")
        return None


def read(path: Path) -> StoredPlan | None:
    """Return the content that `write` has stored in a file, or None. A damaged file is deleted."""
    try:
        if not _is_private(path.parent):
            return None
        # Not blocking: the path could be a pipe without a writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            flaw = _untrusted(os.fstat(file.fileno()))
            content = b"" if flaw else file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        discard(path, str(error))
        return None
    flaw = flaw or _torn(content, path.name)
    if flaw:
        discard(path, flaw)
        return None
    with contextlib.suppress(OSError):  # a read-only cache keeps its order
        os.utime(path)
    (workspace,) = _SIZE.unpack_from(content, _BODY)
    return StoredPlan(workspace, content[_BODY + _SIZE.size :])


def _is_private(folder: Path) -> bool:
    """Return whether only the user can write to a folder; log the reason if not. FileNotFoundError if it is absent."""
    try:
        flaw = _untrusted(folder.stat())
    except PermissionError as error:
        flaw = str(error)
    if flaw:
        warn(
            f"cuDNN's plans are not kept in {folder}: {flaw}; make it writable only by you, or set TE_CACHE_DIR"
        )
    return flaw is None


def _untrusted(status: os.stat_result) -> str | None:
    """Return the reason why a file or a folder may contain kernels of another user, or None."""
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return "it is not a regular file"
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & _WRITABLE_BY_OTHERS:
        return f"others may write it (mode {status.st_mode & 0o777:o})"
    return None


def _torn(content: bytes, name: str) -> str | None:
    """Return the reason why bytes are not the complete file of this name, or None."""
    if not content.startswith(MAGIC) or len(content) < _BODY + _SIZE.size:
        return f"its {len(content)} bytes do not begin as a plan's do"
    if _checksum(name, content[_BODY:]) != content[_DIGEST:_BODY]:
        return "its checksum does not fit its name and its content"
    return None


def _checksum(name: str, body: bytes) -> bytes:
    """Return a checksum that includes the name, so that a file cannot replace another one."""
    return hashlib.sha256(name.encode() + b"\n" + body).digest()


def write(path: Path, kept: StoredPlan) -> None:
    """Write a plan to a file that only the user can read, atomically; delete the least recently used beyond LIMIT."""
    body = _SIZE.pack(kept.workspace) + kept.serialized
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(path.parent):
            return
        descriptor, name = tempfile.mkstemp(dir=path.parent)  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(MAGIC + _checksum(path.name, body) + body)
            os.replace(name, path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
        _drop_oldest(path.parent)
    except OSError as error:
        warn(f"cuDNN's plans cannot be kept in {path.parent}: {error}")


def discard(path: Path, reason: str) -> None:
    """Delete a file, and log the reason."""
    warn(f"cuDNN's plan in {path} is not used: {reason}; it is deleted and built again")
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        warn(f"{path} cannot be deleted: {error}")


def _drop_oldest(folder: Path) -> None:
    files = sorted((path for path in folder.iterdir() if path.is_file()), key=_last_use)
    for path in files[: max(len(files) - LIMIT, 0)]:
        path.unlink(missing_ok=True)


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process has deleted it
        return 0.0
