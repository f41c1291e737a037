"""A checkpoint is one file, replaced atomically and read without running code from it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def save(path: Path, state: dict[str, Any]) -> None:
    """Write state to path: the old file stays whole until the new one is complete."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def load(path: Path) -> dict[str, Any]:
    """The state in path, tensors on the CPU; ValueError when there is no checkpoint."""
    if not path.is_file():
        raise ValueError(
            f"there is no checkpoint at {path}; leave --resume out to start this run, or fix --name"
        )
    return torch.load(path, map_location="cpu", weights_only=True)


def random_state() -> dict[str, Any]:
    """The default generators' states, which stochastic rounding draws from."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
