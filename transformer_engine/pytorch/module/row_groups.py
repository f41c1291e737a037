"""Row groups: what GroupedLinear, Fp8Padding and Fp8Unpadding accept as rows per group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...common.checks import described, suggests_keywords
from ..quantization import FP8GlobalStateManager, get_align_size_for_quantization
from ..runtime.checks import floating, tensor
from .arguments import group_count, size_or_none


def check_dense(name: str, value: Any) -> None:
    """Raise TypeError unless the value is a dense tensor."""
    if not isinstance(value, Tensor):
        tensor(name, value)
    if value.layout is not torch.strided:
        raise TypeError(
            f"{name} is {described(value)} with the layout {value.layout}; give a dense tensor, for example "
            "x.to_dense()"
        )


class RowGroups(nn.Module):
    """Base class for Fp8Padding and Fp8Unpadding: num_gemms row groups, each padded to a multiple of align_size.

    Args:
        num_gemms: Group count.
        align_size: The multiple. None: the multiple of the recipe at the first call, which later calls keep.
    """

    @suggests_keywords
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms = group_count("num_gemms", num_gemms)
        self.align_size = size_or_none("align_size", align_size)

    def padded_rows(self, inp: Tensor, rows: Sequence[int]) -> list[int]:
        """Return the padded rows per group.

        Raises:
            TypeError: The input is not a dense floating-point tensor.
            ValueError: There is not one nonnegative number per group.
        """
        check_dense("inp", inp)
        floating("inp", inp)
        if inp.dim() < 1:
            raise ValueError("inp is []; give rows [.., K]")
        if len(rows) != self.num_gemms or min(rows, default=0) < 0:
            raise ValueError(
                f"m_splits={list(rows)} must be {self.num_gemms} numbers >= 0, one per group"
            )
        if self.align_size is None:
            self.align_size = alignment()
        return [-(-count // self.align_size) * self.align_size for count in rows]

    def extra_repr(self) -> str:
        return f"num_gemms={self.num_gemms}, align_size={self.align_size}"


def alignment() -> int:
    """Return the row multiple per group that the active recipe, or otherwise the default recipe, requires."""
    return get_align_size_for_quantization(FP8GlobalStateManager.get_fp8_recipe())


def as_rows(inp: Tensor, rows: Sequence[int], name: str) -> Tensor:
    """Return inp [.., K] as a matrix; raise ValueError unless the group rows add up to its rows."""
    x = inp.reshape(-1, inp.shape[-1])
    if sum(rows) != x.shape[0]:
        raise ValueError(
            f"{name}={list(rows)} add up to {sum(rows)}, inp has {x.shape[0]} rows; give the rows of each group"
        )
    return x
