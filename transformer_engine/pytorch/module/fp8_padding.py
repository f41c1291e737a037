"""Fp8Padding: rows of zeros behind each group of rows, so that a recipe can quantize every group."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ...common.checks import whole, whole_numbers, whole_or_none
from ..functions.row_padding import pad_rows, up_to
from ..quantization import FP8GlobalStateManager, get_align_size_for_quantization
from ..runtime.checks import floating


class Fp8Padding(nn.Module):
    """y [sum of padded m_splits, K]: group i of x [sum of m_splits, K], and rows of zeros up to a multiple.

    num_gemms    number of groups
    align_size   the multiple; None: that of the recipe in force at the first call, which is kept from then on
    """

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        whole("num_gemms", num_gemms)
        whole_or_none("align_size", align_size)
        self.num_gemms = num_gemms
        self.align_size = align_size

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """(y, padded m_splits); x and m_splits themselves where every group is a multiple already."""
        check_splits(inp, m_splits, self.num_gemms)
        self.align_size = alignment(self.align_size)
        padded = [up_to(rows, self.align_size) for rows in m_splits]
        if padded == list(m_splits):
            return inp, m_splits
        x = inp.reshape(-1, inp.shape[-1])
        check_rows(x, m_splits, "m_splits")
        return pad_rows(x, m_splits, padded), padded

    def extra_repr(self) -> str:
        return f"num_gemms={self.num_gemms}, align_size={self.align_size}"


def alignment(align_size: int | None) -> int:
    """The multiple that groups are padded to: the one that is known, else that of the recipe in force."""
    if align_size is not None:
        return align_size
    return get_align_size_for_quantization(FP8GlobalStateManager.get_fp8_recipe())


def check_splits(inp: Tensor, m_splits: Sequence[int], num_gemms: int) -> None:
    """TypeError or ValueError unless there are rows of values, and one number >= 0 a group."""
    floating("inp", inp)
    if inp.dim() < 1:
        raise ValueError("inp is []; give rows [.., K]")
    whole_numbers("m_splits", m_splits)
    if len(m_splits) != num_gemms or min(m_splits, default=0) < 0:
        raise ValueError(f"m_splits={list(m_splits)} must be {num_gemms} numbers >= 0, one a group")


def check_rows(x: Tensor, rows: Sequence[int], name: str) -> None:
    """ValueError unless numbers add up to the rows."""
    if sum(rows) != x.shape[0]:
        raise ValueError(
            f"{name}={list(rows)} add up to {sum(rows)}, inp has {x.shape[0]} rows; give the rows of each group"
        )
