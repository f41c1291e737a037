"""A checkpoint is a folder: about.json and every run's arrays by orbax, replaced as a whole, read without running code.

The folder is written next to the old one and replaces it by two renames. Between them the old one is NAME.old, where
`load` finds it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from transformer_engine.common.numbers import with_article

from ..failure import Failure, writing
from ..failure import reason as reason_of

T = TypeVar("T")
ABOUT: dict[str, type] = {"config": dict, "fingerprint": str, "step": int}


def save(path: Path, state: dict[str, Any]) -> None:
    """Write state to the folder path: the old one stays whole until this one is complete, also where writing fails."""
    partial, old = _sibling(path, "partial"), _sibling(path, "old")
    remedy = "free some space there and continue with --resume, or choose another folder with --out"
    with writing(path, remedy):
        _restore_old(path)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save((partial / "runs").absolute(), state["runs"])
                checkpointer.wait_until_finished()
            with (partial / "about.json").open("w", encoding="utf-8") as file:
                json.dump({name: state[name] for name in ABOUT}, file)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        if path.is_dir():
            os.replace(path, old)
        elif path.exists():
            path.unlink()
        os.replace(partial, path)
        shutil.rmtree(old, ignore_errors=True)


def load(path: Path) -> dict[str, Any]:
    """Load the state with NumPy arrays; ValueError for a folder that te train did not write."""
    remedy = "leave --resume out to start this run again, or fix --name"
    _restore_old(path)
    if path.is_file():
        raise ValueError(
            f"{path} is a checkpoint of --framework torch; continue with that, or fix --name"
        )
    if not path.is_dir():
        raise ValueError(
            f"there is no checkpoint at {path}; leave --resume out to start this run, or fix --name"
        )
    try:
        about = json.loads((path / "about.json").read_text(encoding="utf-8"))
        with ocp.PyTreeCheckpointer() as checkpointer:
            folder = (path / "runs").absolute()
            shapes = checkpointer.metadata(folder).item_metadata.tree
            args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
            runs = checkpointer.restore(folder, ocp.args.PyTreeRestore(restore_args=args))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        line = str(error).strip().partition("\n")[0][:120]
        raise ValueError(f"{path} cannot be read as a checkpoint ({line}); {remedy}") from None
    for name, kind in ABOUT.items():
        value = about.get(name) if isinstance(about, dict) else None
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(
                f"{path} is not a checkpoint of te train: its {name!r} is {with_article(type(value))}; {remedy}"
            )
    return {**about, "runs": runs}


def _restore_old(path: Path) -> None:
    """Restore the old folder if a program ended between the two renames."""
    old = _sibling(path, "old")
    if old.is_dir() and not path.exists():
        try:
            os.replace(old, path)
        except OSError as error:
            raise Failure(
                f"cannot rename {old} to {path}: {reason_of(error)}; make the folder writable"
            ) from None


def _sibling(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}.{suffix}")


def flatten(tree: Any) -> dict[str, Any]:
    """Flatten a tree to {path: leaf}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def rebuilt(leaves: Mapping[str, Any], like: T) -> T:
    """Rebuild a tree with another one's structure and dtypes and the leaves from `flatten`."""

    def leaf(path: Any, template: Any) -> Any:
        return jax.numpy.asarray(
            leaves[jax.tree_util.keystr(path, simple=True, separator=".")], template.dtype
        )

    return jax.tree_util.tree_map_with_path(leaf, like)


def misfit(saved: Any, template: Mapping[str, Any]) -> str | None:
    """Reason why saved leaves do not match a run, or None."""
    if not isinstance(saved, Mapping):
        return "it has no such run"
    if set(saved) != set(template):
        return (
            f"its arrays are not the model's ({', '.join(sorted(set(saved) ^ set(template))[:3])})"
        )
    for name, leaf in template.items():
        shape = getattr(saved[name], "shape", None)
        if shape != leaf.shape:
            return f"{name} is {shape}, the model's is {leaf.shape}"
    return None
