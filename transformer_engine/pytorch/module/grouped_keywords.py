"""GroupedLinear's keywords for one parameter, or one tensor, of all groups: what they mean and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...common import env
from ...common.numbers import to_bool

_SINGLE = "NVTE_GROUPED_LINEAR_SINGLE_PARAM"
_FUSED = "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM"


def honoured(**asked: bool) -> dict[str, bool]:
    """single_grouped_weight and single_grouped_bias; without their variable False and a warning, as in the original."""
    names = [name for name, wanted in asked.items() if wanted]
    if not names or env.get(_SINGLE):
        return asked
    warnings.warn(
        f"{names[0]}=True has no effect without {_SINGLE}=1; the layer has one parameter a group",
        UserWarning,
        stacklevel=3,
    )
    return dict.fromkeys(asked, False)


def uses_grouped_tensor(value: Any) -> bool:
    """use_grouped_tensor: True or False; None follows the variable of its former name, which warns."""
    if value is None:
        if env.get(_FUSED):
            warnings.warn(
                f"{_FUSED} is deprecated; give use_grouped_tensor=True", FutureWarning, stacklevel=3
            )
        return bool(env.get(_FUSED))
    return to_bool("use_grouped_tensor", value)


def check_device_splits(m_splits: Sequence[int] | Tensor, device: torch.device) -> None:
    """ValueError where the rows of groups are not on the GPU, of a layer that promises not to wait for it."""
    if device.type != "cuda":
        return
    if not isinstance(m_splits, Tensor) or not m_splits.is_cuda or m_splits.dtype != torch.int64:
        found = (
            f"{m_splits.dtype} on {m_splits.device}"
            if isinstance(m_splits, Tensor)
            else f"a {type(m_splits).__name__}"
        )
        raise ValueError(
            f"m_splits is {found}; with use_grouped_tensor=True give int64 on the GPU, or leave the keyword False"
        )
