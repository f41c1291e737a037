"""x = inspect_array(x, name): returns the array, writes its bytes and statistics to files, and prints a line."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....common import absent
from ....common.checks import described
from ...runtime.checks import check_array

__all__ = ["inspect_array", "load_array_dump"]

absent.install_getter(__name__)


def inspect_array(x: Array, name: str) -> Array:
    """Write x to `my_tensor_gpu{i}_{name}.bin` and `.._meta.json` in the working directory at run time; return x.

    The device waits until the host has the array.

    Args:
        x: The array; a sharded array is written as a whole.
        name: Part of the file names, after the index i of this process's first device.
    """
    check_array("x", x)
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(f"name={described(name)}; give a word that can be part of a file's name")
    jax.debug.callback(functools.partial(_write, name), x)
    return x


def load_array_dump(filename: str, shape: Sequence[int], dtype: Any) -> Array:
    """Read an array that `inspect_array` wrote.

    Args:
        filename: `.bin` file path.
        shape: Array shape.
        dtype: Array dtype.
    """
    stored = np.fromfile(filename, np.dtype(dtype))
    if stored.size != int(np.prod(shape)):
        raise ValueError(
            f"{filename} holds {stored.size} elements of {np.dtype(dtype)}; shape={tuple(shape)}"
        )
    return jnp.asarray(stored.reshape(shape))


def _write(name: str, x: Any) -> None:
    array = np.asarray(x)
    stem = f"my_tensor_gpu{jax.local_devices()[0].id}_{name}"
    array.tofile(f"{stem}.bin")
    wide = array.astype(np.float64)
    facts = {"name": name, "shape": list(array.shape), "dtype": str(array.dtype)}
    for statistic in ("min", "max", "mean", "std"):  # NaN without elements
        facts[statistic] = float(getattr(wide, statistic)()) if wide.size else math.nan
    Path(f"{stem}_meta.json").write_text(json.dumps(facts), encoding="utf-8")
    print(f"{stem}: {facts}")
