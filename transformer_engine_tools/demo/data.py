"""Real text as bytes: a deterministic split, and batches that depend on (seed, step) only."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..failure import reason

VALIDATION_SHARE = 0.05
LIMIT = 256 * 2**20
# Not prose of the standard library itself: other people's packages, test tables and generated code.
SKIPPED = {
    "__pycache__",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "encodings",
}

Batch = tuple[np.ndarray, np.ndarray]  # inputs and targets


@dataclass(frozen=True)
class Corpus:
    """train [T] and validation [V]: a text's bytes (uint8), and a fingerprint of both.

    Batches are NumPy's, and drawn by its Mersenne twister, so that every framework is given the same ones.

    Attributes:
        train: Training bytes [T].
        validation: Validation bytes [V].
        fingerprint: Hash of both parts.
        source: Name of the text.
    """

    train: np.ndarray
    validation: np.ndarray
    fingerprint: str
    source: str

    def batch(self, seed: int, step: int, batch: int, sequence: int) -> Batch:
        """Draw inputs, targets [batch, sequence] int64: the same windows for every run and after every resume."""
        # The raw 32-bit numbers from torch.Generator().manual_seed(..), which earlier runs drew from.
        generator = np.random.RandomState((seed * 1_000_003 + step) % 2**32)
        last = self.train.size - sequence - 1
        starts = generator.randint(0, 2**32, batch, dtype=np.uint32).astype(np.int64) % (last + 1)
        return _windows(self.train, starts, sequence)

    def validation_batches(self, count: int, batch: int, sequence: int) -> list[Batch]:
        """Cut count batches at evenly spaced places in the validation text."""
        last = self.validation.size - sequence - 1
        starts = _place_evenly(last, count * batch).reshape(count, batch)
        return [_windows(self.validation, row, sequence) for row in starts]


def _place_evenly(last: int, count: int) -> np.ndarray:
    """Compute count places from 0 to last, rounded in float32 exactly as by torch.linspace(0, last, count)."""
    step = np.float64(np.float32(last) / np.float32(count - 1))
    index = np.arange(count)
    rising = (step * index).astype(np.float32)
    falling = (np.float64(np.float32(last)) - step * (count - 1 - index)).astype(np.float32)
    return np.where(index < count // 2, rising, falling).astype(np.int64)


def _windows(text: np.ndarray, starts: np.ndarray, sequence: int) -> Batch:
    windows = text[starts[:, None] + np.arange(sequence + 1)].astype(np.int64)
    return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])


def load_corpus(path: str | None, sequence: int) -> Corpus:
    """Load the text in a file or a folder; None reads the source files of Python's standard library."""
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        pieces = _read_files([file for file in _files(root) if file.suffix == ".py"], root)
        source = f"Python standard library in {root}"
    else:
        root = Path(path).expanduser()
        try:
            exists = root.exists()
        except OSError as error:
            raise ValueError(
                f"--data {path}: {reason(error)}; give a file or folder that exists"
            ) from None
        if not exists:
            raise ValueError(
                f"--data {path}: there is no such file or folder; give one that exists"
            )
        pieces = _read_files([root] if root.is_file() else _files(root), root)
        source = str(root)
    required = int((sequence + 2) / VALIDATION_SHARE) + 1
    text = b"".join(pieces)
    if len(text) < required:
        raise ValueError(
            f"{source} holds {len(text)} bytes of UTF-8 text; a sequence of {sequence} needs at least "
            f"{required}: give more text with --data, or a shorter --seq"
        )
    content = np.frombuffer(text, np.uint8)
    split = len(text) - max(int(len(text) * VALIDATION_SHARE), sequence + 2)
    fingerprint = hashlib.sha256(text).hexdigest()[:16]
    return Corpus(content[:split], content[split:], fingerprint, source)


def _files(root: Path) -> list[Path]:
    """List regular files below root in an order that mixes its folders and is the same on every machine."""
    paths = []
    for file in root.rglob("*"):
        parts = file.relative_to(root).parts
        if any(part in SKIPPED or part.startswith(".") for part in parts) or not file.is_file():
            continue
        paths.append((hashlib.sha256("/".join(parts).encode()).digest(), file))
    return [file for _, file in sorted(paths)]


def _read_files(files: list[Path], root: Path) -> list[bytes]:
    """Read the files with UTF-8 text; ValueError if there are none or they exceed the limit."""
    pieces: list[bytes] = []
    total = 0
    for file in files:
        try:
            data = file.read_bytes()
        except OSError as error:
            raise ValueError(
                f"{file} cannot be read: {reason(error)}; make it readable, or give another text with --data"
            ) from None
        try:
            data.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if b"\0" in data:
            continue
        total += len(data)
        if total > LIMIT:
            raise ValueError(
                f"{root} holds more than {LIMIT >> 20} MiB of text; give a smaller file or folder"
            )
        pieces.append(data)
    if not pieces:
        raise ValueError(
            f"{root} holds no UTF-8 text; give a text file or a folder of text files with --data"
        )
    return pieces
