"""What a measurement is told before a backend says yes or no."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ....common.formats import TensorFormat


class StatisticsRequest(NamedTuple):
    """One matrix [M, K], and how its codes lie where there are any.

    format    of the codes; None: the matrix was not quantized
    element   dtype of the codes
    codes     strides of the codes;  scales  of the scales, () for one
    """

    shape: tuple[int, int]
    strides: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    format: TensorFormat | None = None
    element: torch.dtype | None = None
    codes: tuple[int, int] = (0, 0)
    scales: tuple[int, ...] = ()
