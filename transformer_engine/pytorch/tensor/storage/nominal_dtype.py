"""The nominal dtype of a storage, which constructors take as `dtype` or as `fake_dtype`."""

from __future__ import annotations

import torch

from ...runtime.checks import values_dtype


def nominal_dtype(fake_dtype: torch.dtype | None, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype that a storage presents; None if neither name is given.

    Args:
        fake_dtype: The dtype under the original's keyword.
        dtype: The dtype under this package's keyword.

    Raises:
        ValueError: Both are given and differ.
    """
    if fake_dtype is None:
        return dtype
    values_dtype("fake_dtype", fake_dtype)
    if dtype is not None and dtype is not fake_dtype:
        raise ValueError(f"fake_dtype={fake_dtype} and dtype={dtype} are one setting; give one of them")
    return fake_dtype
