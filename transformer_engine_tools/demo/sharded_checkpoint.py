"""Checkpoints for several ranks: one directory per step, written by torch.distributed.checkpoint.

A directory such as checkpoints/step_00000004 contains:

* *.distcp and .metadata: parameters and moments, the shards of each rank.
* rank_0.pt, ..: each rank's scaling states, random state and optimizer step count.
* run.pt: configuration, step, text fingerprint, rank layout.

The directory has the suffix ".partial" until every rank has written its files, and is then renamed. A process that is
killed therefore leaves the last complete checkpoint, which `latest` finds.
"""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from ..failure import writing

FOLDER, PREFIX, PARTIAL = "checkpoints", "step_", ".partial"
REMEDY = "free some space there and continue with --resume, or choose another folder with --out"
# The types in torch.distributed.checkpoint's metadata, which torch unpickles without a check.
ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},  # Python 3.13
    "torch": {"Size", "bfloat16", "float16", "float32", "int16", "int64", "uint8"},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that resolves only the types in a checkpoint's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong to a checkpoint")
        return super().find_class(module, name)


def latest(folder: Path) -> Path | None:
    """Directory of the last complete checkpoint below a run's folder, or None."""
    checkpoints = [path for path in (folder / FOLDER).glob(f"{PREFIX}*") if path.suffix != PARTIAL]
    return max(checkpoints, default=None, key=lambda path: path.name)


def save(
    folder: Path,
    step: int,
    tensors: dict[str, Tensor],
    local_state: dict[str, Any],
    run: dict[str, Any],
) -> None:
    """Write the checkpoint of a step and remove earlier ones; every rank calls this.

    Args:
        folder: Folder of the run.
        step: Step number.
        tensors: This rank's DTensors and tensors; ranks with the same name hold shards or copies of one tensor.
        local_state: State for this rank alone, with types that torch.load reads with weights_only=True.
        run: State of the run, equal on all ranks.
    """
    target = folder / FOLDER / f"{PREFIX}{step:08d}"
    partial = target.with_name(target.name + PARTIAL)
    first = dist.get_rank() == 0
    with writing(target, REMEDY):
        if first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        dcp.save(tensors, checkpoint_id=partial)
        _write(partial / f"rank_{dist.get_rank()}.pt", local_state)
        if first:
            _write(partial / "run.pt", run)
        dist.barrier()
        if first:
            shutil.rmtree(target, ignore_errors=True)
            os.replace(partial, target)
            for path in target.parent.glob(f"{PREFIX}*"):
                if path != target:
                    shutil.rmtree(path)
        dist.barrier()


def _write(path: Path, state: dict[str, Any]) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def read_run(directory: Path) -> dict[str, Any]:
    """Read the state of the run in a checkpoint's directory."""
    return _read(directory / "run.pt")


def read_own(directory: Path) -> dict[str, Any]:
    """Read the state of this rank in a checkpoint's directory."""
    return _read(directory / f"rank_{dist.get_rank()}.pt")


def read_tensors(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Fill this rank's tensors from a checkpoint's directory; every rank calls this.

    Raises:
        ValueError: The metadata contains types that do not belong to a checkpoint.
    """
    try:
        with (directory / ".metadata").open("rb") as file:
            _MetadataUnpickler(file).load()
    except (OSError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(_unreadable(directory, error)) from None
    dcp.load(tensors, checkpoint_id=directory)


def _read(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(_unreadable(path, error)) from None


def _unreadable(path: Path, error: Exception) -> str:
    line = str(error).strip().partition("\n")[0][:120]
    return f"{path} is not a checkpoint of te train ({line}); leave --resume out to start this run again"
