"""Read the pickle in an untrusted checkpoint as inert records, in time and memory proportional to its length.

No callable that the pickle names runs. Every opcode stream is checked before it is read: Python's unpickler hashes keys
without a limit on depth and allocates its memo by the largest index, so a few bytes could cost hours, gigabytes or the
process. torch.save files, in both formats, are read here too, because torch.load has no such limits.
"""

from __future__ import annotations

import functools
import io
import pickle
import pickletools
import struct
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...common.numbers import with_article

# of a state; a module with 1,000 quantizers and 1,024 history steps has 4 MiB
MAXIMUM_BYTES = 1 << 28
MAXIMUM_OPCODES = 100_000  # a state has about 200
MAXIMUM_DEPTH = 100
_INTEGER_BITS = 80  # the magic number of torch.save has 77
_LEGACY_MAGIC, _LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
STORAGE_CLASSES = frozenset(("torch", name) for name in _STORAGES)
_MARK = -1
_MEMO_WRITES = ("PUT", "BINPUT", "LONG_BINPUT")
_MEMO_READS = ("GET", "BINGET", "LONG_BINGET")
_IN_PLACE = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")


class ExtraStateError(ValueError):
    """A module's extra state is damaged, or refers to an object that may not be loaded."""


class Record:
    """An inert record for a pickled object: its arguments, attributes and entries."""

    target: tuple[str, str] = ("", "")

    def __new__(cls, *arguments: Any) -> Record:
        record = super().__new__(cls)
        record.__dict__.update(arguments=arguments, attributes={}, entries={})
        return record

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__["attributes"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__["entries"][key] = value


class StoredTensor:
    """Elements of a storage in a torch.save file, without shape: `data` is set when the file's end is read."""

    def __init__(self, dtype: torch.dtype, count: int):
        self.dtype, self.count, self.data = dtype, count, b""

    @functools.cached_property
    def tensor(self) -> Tensor:
        if len(self.data) != self.count * self.dtype.itemsize:
            raise ExtraStateError(
                f"a tensor's storage has {len(self.data)} bytes, not {self.count} elements of {self.dtype}"
            )
        if not self.data:
            return torch.empty(0, dtype=self.dtype, device="cpu")
        return torch.frombuffer(bytearray(self.data), dtype=self.dtype)


class Unpickler(pickle.Unpickler):
    """Unpickler that creates inert records; each record class exists for one load only.

    Args:
        file: File positioned where a pickle begins.
        is_allowed: Whether a checkpoint may contain an object with this module and name.

    Attributes:
        foreign: Record classes for other names.
        storages: Storages in a torch.save file, by key.
    """

    def __init__(self, file: io.BytesIO, is_allowed: Callable[[str, str], bool]):
        check_pickle(file)
        super().__init__(file)
        self._is_allowed = is_allowed
        self._classes: dict[tuple[str, str], type[Record]] = {}
        self.foreign: set[type[Record]] = set()
        self.storages: dict[str, StoredTensor] = {}

    def find_class(self, module: str, name: str) -> type[Record]:
        target = (module, name)
        if target not in self._classes:
            self._classes[target] = type("Record", (Record,), {"target": target})
            if target not in STORAGE_CLASSES and not self._is_allowed(module, name):
                self.foreign.add(self._classes[target])
        return self._classes[target]

    def persistent_load(self, pid: Any) -> StoredTensor:
        """Return the storage that torch.save's ("storage", class, key, device, elements, view) describes."""
        fields: list[Any] = list(pid) if isinstance(pid, tuple) else []
        if (
            len(fields) < 5
            or fields[0] != "storage"
            or any(field is not None for field in fields[5:])
        ):
            raise ExtraStateError(
                "extra state refers to an object outside of it that is not a storage"
            )
        kind, key, count = fields[1], fields[2], fields[4]
        target = kind.target if isinstance(kind, type) and issubclass(kind, Record) else None
        if target not in STORAGE_CLASSES or type(key) is not str or type(count) is not int:
            raise ExtraStateError(
                "extra state has a storage without a known dtype, key and number of elements"
            )
        return self.storages.setdefault(key, StoredTensor(_STORAGES[target[1]], count))


def check_pickle(file: io.BytesIO) -> None:
    """Raise ExtraStateError if the pickle at the file's position exceeds a limit; leave the position unchanged.

    The opcodes are followed with the depth of each object in place of the object. Keys and set items must be plain
    values, because nested tuples are hashed in time that is exponential in their depth. The depth of a list that
    grows after it was stored elsewhere is underestimated, so readers of the result limit the depth again.
    """
    start = file.tell()
    stack: list[int] = []
    memo: dict[int, int] = {}
    for count, (opcode, argument, _) in enumerate(pickletools.genops(file)):
        name = opcode.name
        if count >= MAXIMUM_OPCODES:
            raise ExtraStateError(
                f"extra state has more than {MAXIMUM_OPCODES} opcodes; it is not a module's state"
            )
        if isinstance(argument, int) and argument.bit_length() > _INTEGER_BITS:
            raise ExtraStateError(f"extra state has an integer of more than {_INTEGER_BITS} bits")
        if name in _MEMO_WRITES:
            if argument > MAXIMUM_OPCODES:  # pyright: ignore[reportOptionalOperand]
                raise ExtraStateError(f"extra state numbers its objects up to {argument}")
            memo[argument] = stack[-1]  # pyright: ignore[reportArgumentType]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in _MEMO_READS:
            stack.append(memo[argument])  # pyright: ignore[reportArgumentType]
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "POP" and stack[-1] == _MARK:
            stack.pop()
        else:
            _follow(opcode, stack)
    file.seek(start)


def _follow(opcode: pickletools.OpcodeInfo, stack: list[int]) -> None:
    """Replace the operands of an opcode on the depth stack by its results."""
    before, name = opcode.stack_before, opcode.name
    operands: list[int] = []
    if pickletools.markobject in before:
        while (depth := stack.pop()) != _MARK:
            operands.append(depth)
        before = before[: before.index(pickletools.markobject)]
    operands += [stack.pop() for _ in before]
    operands.reverse()
    if _MARK in operands:
        raise ExtraStateError("extra state is not a readable pickle: a mark is used as a value")
    # The container itself is the first operand for opcodes that extend one.
    container, items = (operands[0], operands[1:]) if name in _IN_PLACE else (0, operands)
    if name in ("SETITEM", "SETITEMS", "DICT"):
        keys = items[::2]
    else:
        keys = items if name in ("ADDITEMS", "FROZENSET") else []
    if any(keys):
        raise ExtraStateError(
            "extra state has a container as a key of a dict or as an item of a set"
        )
    depth = max(container, 1 + max(items, default=-1))
    if depth > MAXIMUM_DEPTH:
        raise ExtraStateError(f"extra state nests objects deeper than {MAXIMUM_DEPTH}")
    stack.extend(depth for _ in opcode.stack_after)


def read_archive(data: bytes, is_allowed: Callable[[str, str], bool]) -> tuple[Any, Unpickler]:
    """Read a zip archive that torch.save wrote. Returns the content as records, and its unpickler."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}

        def content(name: str) -> bytes:
            entry = entries.get(name)
            if (
                entry is None
                or entry.compress_type != zipfile.ZIP_STORED
                or entry.file_size > len(data)
            ):
                raise ExtraStateError(f"extra state's archive has no uncompressed entry {name!r}")
            return archive.read(entry)

        if "byteorder" in entries and content("byteorder") != sys.byteorder.encode():
            raise ExtraStateError(
                f"extra state's archive has another byte order than {sys.byteorder}"
            )
        unpickler = Unpickler(io.BytesIO(content("data.pkl")), is_allowed)
        result = unpickler.load()
        remaining = len(data)
        for key, storage in unpickler.storages.items():
            storage.data = content(f"data/{key}")
            remaining -= len(storage.data)
            if remaining < 0:
                raise ExtraStateError(
                    "extra state's archive has several storages in the same bytes"
                )
    return result, unpickler


def read_legacy_file(data: bytes, is_allowed: Callable[[str, str], bool]) -> tuple[Any, Unpickler]:
    """Read torch.save's file with several pickles: magic number, protocol, machine, object, keys; then the storages."""
    file = io.BytesIO(data)
    header = [Unpickler(file, is_allowed).load() for _ in range(3)]
    if header[:2] != [_LEGACY_MAGIC, _LEGACY_PROTOCOL]:
        raise ExtraStateError("a storage is not in the format of torch.save")
    unpickler = Unpickler(file, is_allowed)
    result = unpickler.load()
    keys = Unpickler(file, is_allowed).load()
    if not isinstance(keys, list) or not all(type(key) is str for key in keys):
        raise ExtraStateError(
            f"the keys of a torch.save file are {with_article(type(keys))} of other values"
        )
    for key in keys:
        (count,) = struct.unpack("<q", file.read(8))
        storage = unpickler.storages.get(key)
        if storage is None or count != storage.count:
            raise ExtraStateError(
                f"a torch.save file has a storage {key[:40]!r} of {count} elements, which it lacks"
            )
        storage.data = file.read(max(0, count) * storage.dtype.itemsize)
    return result, unpickler


def is_legacy_file(data: bytes) -> bool:
    """Return whether bytes begin as torch.save's format before archives."""
    return pickle.dumps(_LEGACY_MAGIC, 2)[2:] in data[:32]
