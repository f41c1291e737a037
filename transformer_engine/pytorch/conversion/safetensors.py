"""Folders with .safetensors files: read by the library `safetensors`, written one tensor at a time.

The library's writer needs all tensors of a file in memory, 5 GB by default. `write` needs one
tensor. A file has an eight-byte length, a JSON table {name: dtype, shape, offsets}, and the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common import optional
from ...common.numbers import with_article

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 8
SHARD_BYTES = 5_000_000_000  # per file, by default


class Described(NamedTuple):
    """Dtype and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFile(NamedTuple):
    """The table of a file; `read` loads one tensor. The library validates the table: tensors fill the file exactly."""

    path: Path
    tensors: dict[str, Described]
    file: Any  # safetensors.safe_open

    @staticmethod
    def open(path: Path) -> SafetensorsFile:
        """Read the table of a file.

        Raises:
            ImportError: The library safetensors is missing or damaged.
            ValueError: The file is damaged, or has another format or an unsupported dtype.
        """
        problem = optional.failure("safetensors", "safe_open", "SafetensorError")
        if problem is not None:
            raise ImportError(
                f"weights in {path} cannot be read: {problem}; pip install 'safetensors>=0.4.3,<1'"
            )
        from safetensors import SafetensorError, safe_open

        tensors: dict[str, Described] = {}
        try:
            file = safe_open(path, framework="pt", device="cpu")
            for name in file.keys():  # noqa: SIM118 - not a mapping
                entry = file.get_slice(name)
                dtype = _DTYPES.get(entry.get_dtype())
                if dtype is None:
                    raise ValueError(
                        f"{name!r} has dtype {entry.get_dtype()}; supported are {', '.join(_DTYPES)}"
                    )
                tensors[name] = Described(dtype, tuple(entry.get_shape()))
        except (SafetensorError, ValueError) as error:
            raise ValueError(
                f"{path} cannot be read as safetensors: {error}; download it again"
            ) from None
        return SafetensorsFile(path, tensors, file)

    def read(self, name: str) -> Tensor:
        """Read one tensor."""
        return self.file.get_tensor(name)


def write(path: Path, plan: Mapping[str, Described], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write the tensors of a plan to a file, in plan order, one at a time."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, described in plan.items():
        begin, end = end, end + described.bytes
        table[name] = {
            "dtype": _NAMES[described.dtype],
            "shape": list(described.shape),
            "data_offsets": [begin, end],
        }
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    expected = iter(plan.items())
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for name, tensor in tensors:
            planned, described = next(expected, ("no tensor", Described(tensor.dtype, ())))
            if name != planned or Described(tensor.dtype, tuple(tensor.shape)) != described:
                raise ValueError(
                    f"{name}, {tensor.dtype} {list(tensor.shape)}, is written where {planned}, "
                    f"{described.dtype} {list(described.shape)}, is planned"
                )
            values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            values.numpy().tofile(file)
    for name, _ in expected:
        raise ValueError(f"{name} is planned in {path.name}, but no tensor is left to write")


class Shards(NamedTuple):
    """The tensors of a folder, and the file that holds each."""

    folder: Path
    files: dict[str, SafetensorsFile]

    def described(self, name: str) -> Described:
        return self.files[name].tensors[name]

    def read(self, name: str) -> Tensor:
        return self.files[name].read(name)

    @staticmethod
    def open(folder: Path) -> Shards:
        """Open a folder's model.safetensors, or the files that its index names; ValueError if there is neither."""
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if single.is_file():
            file = SafetensorsFile.open(single)
            return Shards(folder, dict.fromkeys(file.tensors, file))
        if not index.is_file():
            other = sorted(path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt*")))
            if other:
                raise ValueError(
                    f"{folder} holds {other[0]}, a pickle, which can run code when it is read; save it again with "
                    "save_pretrained(folder, safe_serialization=True)"
                )
            raise ValueError(
                f"{folder} holds no model.safetensors and no index of such files; give the folder of a checkpoint"
            )
        content = read_json(index)
        places = content.get("weight_map")
        if not isinstance(places, dict) or not all(
            isinstance(file_name, str) for file_name in places.values()
        ):
            raise ValueError(f"{index} has no weight_map of names; download it again")
        for file_name in places.values():
            if Path(file_name).name != file_name or not (index.parent / file_name).is_file():
                raise ValueError(
                    f"{index} names {file_name!r}, which is not a file in the same folder; download it"
                )
        files = {name: SafetensorsFile.open(folder / name) for name in sorted(set(places.values()))}
        owners = {name: file for file in files.values() for name in file.tensors}
        for name, file_name in places.items():
            if name not in files[file_name].tensors:
                raise ValueError(
                    f"{index} places {name!r} in {file_name}, which has no such tensor; download both"
                )
        unlisted = sorted(set(owners) - set(places))
        if unlisted:
            raise ValueError(
                f"{index} does not name {unlisted[0]!r}, which its files hold; download it again"
            )
        if sum(len(file.tensors) for file in files.values()) != len(owners):
            raise ValueError(f"a tensor is in two files of {index}; download them again")
        return Shards(folder, owners)


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; ValueError for other content."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}; download it again") from None
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds {with_article(type(content))}, not an object; download it again"
        )
    return content


def write_shards(
    folder: Path, plan: Mapping[str, Described], read: Iterator[tuple[str, Tensor]], most: int
) -> None:
    """Write model.safetensors, or several files with at most `most` bytes (and at least one tensor) with an index."""
    shards: list[dict[str, Described]] = [{}]
    for name, described in plan.items():
        used = sum(other.bytes for other in shards[-1].values())
        if shards[-1] and used + described.bytes > most:
            shards.append({})
        shards[-1][name] = described
    if len(shards) == 1:
        write(folder / "model.safetensors", shards[0], read)
        return
    places = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write(folder / file, shard, (next(read) for _ in range(len(shard))))
        places |= dict.fromkeys(shard, file)
    index = {
        "metadata": {"total_size": sum(described.bytes for described in plan.values())},
        "weight_map": places,
    }
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=1) + "\n", encoding="utf-8"
    )


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Create a folder under a temporary name and rename it after the block; ValueError if the folder exists."""
    if folder.exists():
        raise ValueError(f"{folder} exists; give the name of a new folder")
    partial = folder.with_name(folder.name + ".partial")
    if partial.exists():
        raise ValueError(f"{partial} is left over from an interrupted conversion; remove it")
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    finally:
        if partial.exists():
            for path in partial.iterdir():
                path.unlink()
            partial.rmdir()
