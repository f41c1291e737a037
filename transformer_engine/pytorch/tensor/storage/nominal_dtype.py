"""The dtype that a storage presents, under either of its names."""

from __future__ import annotations

import torch

from ...runtime.checks import values_dtype


def nominal_dtype(fake_dtype: torch.dtype | None, dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype that a storage presents, which the original's pages call fake_dtype; None where neither is given."""
    if fake_dtype is None:
        return dtype
    values_dtype("fake_dtype", fake_dtype)
    if dtype is not None and dtype is not fake_dtype:
        raise ValueError(f"fake_dtype={fake_dtype} and dtype={dtype} are one setting; give one of them")
    return fake_dtype
