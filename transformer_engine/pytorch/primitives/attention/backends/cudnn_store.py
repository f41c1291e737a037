"""kept = read(locate(...)): cuDNN's plans as files, which later processes of the same user read instead of building.

A file is MAGIC, the SHA-256 of its name and of what follows, the size of the workspace (8 bytes), and the library's
own bytes. Its name is a hash of everything that the plan depends on: where any of it differs, another file is looked
for. The library runs the kernels that it finds in a file, so that a folder or a file that somebody else may write is
not read. Nothing here raises: what hinders a file is logged once, and the plan is built.
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

# What decides how a request becomes a graph, and what a file says about it.
SOURCES = (
    *(
        "backends/cudnn_graph.py",
        "backends/cudnn_plan.py",
        "backends/cudnn_fp8.py",
        "backends/cudnn_store.py",
    ),
    *("call.py", "mask.py"),
)

logger = logging.getLogger("DotProductAttention")


class Kept(NamedTuple):
    """A plan on disk: bytes of workspace that it needs, and what the library wrote."""

    workspace: int
    serialized: bytes


@functools.cache
def warn(sentence: str) -> None:
    """Log a sentence, the first time that it is said."""
    logger.warning("%s", sentence)


@functools.cache
def source_digest() -> str:
    """SHA-256 of the source files that describe graphs; OSError where they cannot be read."""
    digest = hashlib.sha256()
    for source in SOURCES:
        digest.update((Path(__file__).parents[1] / source).read_bytes())
    return digest.hexdigest()


def locate(*parts: object) -> Path | None:
    """The file of a plan that depends on `parts`, by their text; None where there can be no file."""
    try:
        text = "\n".join(map(str, (*parts, source_digest())))
        return env.cache_directory() / FOLDER / hashlib.sha256(text.encode()).hexdigest()
    except (OSError, RuntimeError) as error:  # no source files; no home directory
        warn(f"cuDNN's plans cannot be kept on disk ({error}); set TE_CUDNN_PLAN_CACHE=0, or TE_CACHE_DIR")
        return None


def read(path: Path) -> Kept | None:
    """What `write` left in a file; None where there is none. A file that is not sound is deleted."""
    try:
        if not _is_private(path.parent):
            return None
        # Not blocking: what lies there may be a pipe that nobody writes.
        with open(path, "rb", opener=_opened) as file:
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
    with contextlib.suppress(OSError):  # a cache that can only be read keeps its order
        os.utime(path)
    (workspace,) = _SIZE.unpack_from(content, _BODY)
    return Kept(workspace, content[_BODY + _SIZE.size :])


def _opened(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK)


def _is_private(folder: Path) -> bool:
    """May nobody else put files into a folder? Otherwise that is logged; FileNotFoundError where there is no folder."""
    try:
        flaw = _untrusted(folder.stat())
    except PermissionError as error:
        flaw = str(error)
    if flaw:
        warn(f"cuDNN's plans are not kept in {folder}: {flaw}; make it yours alone, or set TE_CACHE_DIR")
    return flaw is None


def _untrusted(status: os.stat_result) -> str | None:
    """Why a file or a folder may hold kernels of another user; None when it may not."""
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return "it is no plain file"
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & _WRITABLE_BY_OTHERS:
        return f"others may write it (mode {status.st_mode & 0o777:o})"
    return None


def _torn(content: bytes, name: str) -> str | None:
    """Why bytes are not those of the whole file of a name; None when they are."""
    if not content.startswith(MAGIC) or len(content) < _BODY + _SIZE.size:
        return f"its {len(content)} bytes do not begin as a plan's do"
    if _checksum(name, content[_BODY:]) != content[_DIGEST:_BODY]:
        return "its checksum does not fit its name and its content"
    return None


def _checksum(name: str, body: bytes) -> bytes:
    """With the name: nobody can put one plan in another's place."""
    return hashlib.sha256(name.encode() + b"\n" + body).digest()


def write(path: Path, kept: Kept) -> None:
    """Put a plan into a file that only the user can read, all at once; the longest unused beyond LIMIT go."""
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
    """Delete a file for a reason, which is logged."""
    warn(f"cuDNN's plan in {path} is not used: {reason}; it is deleted and built anew")
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
    except FileNotFoundError:  # another process has dropped it
        return 0.0
