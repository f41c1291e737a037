"""Fp8Unpadding: removes the rows that Fp8Padding appended to each group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...common.numbers import to_ints
from ..compat.argument_orders import exact_call_of
from ..functions.permutation import unpad_rows
from ..runtime.autograd import check_transforms
from .row_groups import RowGroups, as_rows


class Fp8Unpadding(RowGroups):
    """Remove the rows that `Fp8Padding` appended to each group.

    Args:
        num_gemms: Group count.
        align_size: Row multiple to round up to. By default the recipe's at the first call.
    """

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:
        """Return the groups without their padding; x itself if no group is padded.

        Args:
            inp: Padded groups [sum of padded m_splits, K].
            m_splits: Rows per group without padding.
        """
        check_transforms("Fp8Unpadding", inp)
        rows = to_ints("m_splits", m_splits)
        padded = self.padded_rows(inp, rows)
        if padded == list(rows):
            return inp
        return unpad_rows(as_rows(inp, padded, "the padded m_splits"), rows, padded)

    if TYPE_CHECKING:

        @exact_call_of(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
