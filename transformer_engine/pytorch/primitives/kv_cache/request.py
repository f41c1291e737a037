"""What appending to a key-value cache is told, as a backend sees it before it says yes or no."""

from __future__ import annotations

from typing import NamedTuple

import torch


class CacheRequest(NamedTuple):
    """new, cache: dtypes of the new tokens and of the cache."""

    new: torch.dtype
    cache: torch.dtype
    device: torch.device
