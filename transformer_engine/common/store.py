"""Measurements and plans as files in the user's cache folder, one file per key: `STORE.read(STORE.path_of(*key))`.

A file contains a magic number, the SHA-256 over its name and content, and the content. Its name is a hash over all the
content's inputs, so that different inputs have different files, and processes that write at the same time lose nothing.
A file may decide which kernels run; therefore files and folders that other users can write are not read. These
functions do not raise OSError: a problem with a file is logged once, and its content is computed again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from . import env

_DIGEST_SIZE = hashlib.sha256().digest_size
_WRITABLE_BY_OTHERS = 0o022


@functools.cache
def warn(logger: str, sentence: str) -> None:
    """Log a sentence once per process."""
    logging.getLogger(logger).warning("%s", sentence)


@dataclass(frozen=True)
class Store:
    """Files with one type of content.

    Args:
        folder: Folder within the user's cache folder.
        magic: First bytes in every file; another format version has another one.
        contents: Name for the contents in messages, in the plural.
        logger: Logger name.
        remedy: Setting with which nothing is stored, for messages.
        limit: Number of files that are kept; the least recently used ones are deleted.
    """

    folder: str
    magic: bytes
    contents: str
    logger: str
    remedy: str
    limit: int = 512

    def path_of(self, *key: object) -> Path | None:
        """Path of the file for a key, by the key's text; None without a cache folder."""
        try:
            name = hashlib.sha256("\n".join(map(str, key)).encode()).hexdigest()
            return env.cache_directory() / self.folder / name
        except RuntimeError as error:  # no home directory
            self.warn(f"{self.contents} cannot be kept on disk ({error}); {self.remedy}")
            return None

    def read(self, path: Path) -> bytes | None:
        """Load the content that `write` has stored in a file, or None. A damaged file is deleted."""
        try:
            if not self._is_private(path.parent):
                return None
            # Not blocking: the path could be a pipe without a writer.
            with open(path, "rb", opener=_open_without_blocking) as file:
                flaw = _untrusted_reason(os.fstat(file.fileno()))
                data = b"" if flaw else file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.discard(path, str(error))
            return None
        begin = len(self.magic) + _DIGEST_SIZE
        if flaw is None and (not data.startswith(self.magic) or len(data) < begin):
            flaw = f"its {len(data)} bytes do not begin as those of {self.contents} do"
        elif flaw is None and data[len(self.magic) : begin] != _checksum(path.name, data[begin:]):
            flaw = "its checksum does not fit its name and its content"
        if flaw is not None:
            self.discard(path, flaw)
            return None
        with contextlib.suppress(OSError):  # a read-only cache keeps its order
            os.utime(path)
        return data[begin:]

    def write(self, path: Path, content: bytes) -> None:
        """Write a file that only the user can read, atomically; delete the least recently used beyond the limit."""
        import tempfile  # a command that writes no cache starts without it

        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_private(path.parent):
                return
            descriptor, name = tempfile.mkstemp(dir=path.parent)  # mode 0600
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(self.magic + _checksum(path.name, content) + content)
                os.replace(name, path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
            files = sorted((file for file in path.parent.iterdir() if file.is_file()), key=last_use)
            for file in files[: max(len(files) - self.limit, 0)]:
                file.unlink(missing_ok=True)
        except OSError as error:
            self.warn(f"{self.contents} cannot be kept in {path.parent}: {error}; set TE_CACHE_DIR")

    def discard(self, path: Path, reason: str) -> None:
        """Delete a file, and log the reason."""
        self.warn(
            f"{path}, one of {self.contents}, is not used: {reason}; it is deleted and computed again"
        )
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self.warn(f"{path} cannot be deleted: {error}")

    def warn(self, sentence: str) -> None:
        """Log a sentence once per process."""
        warn(self.logger, sentence)

    def _is_private(self, folder: Path) -> bool:
        """Whether only the user can write to a folder; log the reason if not. FileNotFoundError if absent."""
        try:
            flaw = _untrusted_reason(folder.stat())
        except PermissionError as error:
            flaw = str(error)
        if flaw:
            self.warn(
                f"{self.contents} are not kept in {folder}: {flaw}; make it writable only by you, or set TE_CACHE_DIR"
            )
        return flaw is None


def _open_without_blocking(name: str, flags: int) -> int:
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))  # absent on Windows


def _untrusted_reason(status: os.stat_result) -> str | None:
    """Reason why another user may have written a file or a folder, or None."""
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return "it is not a regular file"
    if os.name != "posix":  # without owners and modes
        return None
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & _WRITABLE_BY_OTHERS:
        return f"others may write it (mode {status.st_mode & 0o777:o})"
    return None


def _checksum(name: str, content: bytes) -> bytes:
    """Compute a checksum that includes the name, so that a file cannot replace another one."""
    return hashlib.sha256(name.encode() + b"\n" + content).digest()


def last_use(path: Path) -> float:
    """Time of a file's last use; 0 if another process has deleted the file."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
