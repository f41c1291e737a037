"""A checkpoint is one file, replaced atomically and read without running code from it."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.numbers import with_article

from ..failure import writing

CONTENT: dict[str, type] = {
    "config": dict,
    "fingerprint": str,
    "step": int,
    "random": dict,
    "runs": dict,
}


def save(path: Path, state: dict[str, Any]) -> None:
    """Write state to path: the old file stays whole until the new one is complete, and where writing fails."""
    partial = path.with_name(path.name + ".partial")
    remedy = "free some space there and continue with --resume, or choose another folder with --out"
    with writing(path, remedy):
        try:
            with partial.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except (OSError, RuntimeError) as error:
            partial.unlink(missing_ok=True)
            # torch's writer raises another error, with the system's error as its context.
            if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def load(path: Path) -> dict[str, Any]:
    """Load the state, with tensors on the CPU; ValueError for a file that te train did not write."""
    if not path.is_file():
        raise ValueError(
            f"there is no checkpoint at {path}; leave --resume out to start this run, or fix --name"
        )
    remedy = "leave --resume out to start this run again, or fix --name"
    damage = _corruption_reason(path)
    if damage is not None:
        raise ValueError(f"{path} cannot be read as a checkpoint: {damage}; {remedy}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, KeyError, EOFError) as error:
        line = str(error).strip().partition("\n")[0][:120]
        raise ValueError(f"{path} is not a checkpoint of te train ({line}); {remedy}") from None
    reason = _content_error(state)
    if reason is not None:
        raise ValueError(f"{path} is not a checkpoint of te train: {reason}; {remedy}")
    return state


def _corruption_reason(path: Path) -> str | None:
    """Reason why the file is not a complete torch.save archive, or None if its checksums match."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except OSError as error:
        return error.strerror or str(error)
    except zipfile.BadZipFile:
        return "it is truncated, or another kind of file"
    return None if broken is None else f"its part {broken} is damaged"


def _content_error(state: Any) -> str | None:
    """Difference from a state that te train writes, or None."""
    if not isinstance(state, dict):
        return f"it holds {with_article(type(state))}, not a dict"
    for name, kind in CONTENT.items():
        if not isinstance(state.get(name), kind) or isinstance(state.get(name), bool):
            return (
                f"its {name!r} is {with_article(type(state.get(name)))}, not {with_article(kind)}"
            )
    if state["step"] < 0:
        return f"its step is {state['step']}"
    expected = torch.get_rng_state()
    cpu = state["random"].get("cpu")
    if not isinstance(cpu, Tensor) or cpu.dtype != expected.dtype or cpu.shape != expected.shape:
        return "its random state is not one of torch's"
    for name, run in state["runs"].items():
        parts = run if isinstance(run, dict) else {}
        if not isinstance(parts.get("model"), Mapping) or not isinstance(
            parts.get("optimizer"), dict
        ):
            return f"its run {name!r} has no model and optimizer"
    return None


def misfit(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """Reason why saved tensors do not match a model, or None. Extra states may differ in size."""
    if set(saved) != set(expected):
        return (
            f"its tensors are not the model's ({', '.join(sorted(set(saved) ^ set(expected))[:3])})"
        )
    for name, tensor in expected.items():
        if not isinstance(saved[name], Tensor):
            return f"{name} is {with_article(type(saved[name]))}, not a tensor"
        if not name.endswith("_extra_state") and saved[name].shape != tensor.shape:
            return f"{name} is {list(saved[name].shape)}, the model's is {list(tensor.shape)}"
    return None


def random_state() -> dict[str, Any]:
    """States of the default generators, from which stochastic rounding draws."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
