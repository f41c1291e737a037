"""visible[b, h, i, j] = may query i look at key j: from mask names, windows, lengths and mask tensors.

Every mask is the intersection of at most three parts: a band -left <= j - i - shift <= right (causal: right =
0), the padding of each sequence, and an arbitrary tensor. Mask tensors that come from outside say True for
"masked out".
"""

from __future__ import annotations

import operator
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .request import AttentionInputs, AttentionRequest

NAMES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
UNLIMITED = (-1, -1)


@dataclass(frozen=True)
class Mask:
    """window (left, right), -1 = unlimited; bottom_right: the diagonal ends in the last query and key."""

    name: str
    window: tuple[int, int]
    bottom_right: bool

    @property
    def padding(self) -> bool:
        """Do sequences have lengths of their own?"""
        return self.name.startswith("padding")

    @property
    def arbitrary(self) -> bool:
        """Does a mask tensor say what is hidden?"""
        return self.name == "arbitrary"

    @property
    def banded(self) -> bool:
        """Does the distance between query and key matter?"""
        return self.window != UNLIMITED


def canonical_name(attn_mask_type: str) -> str:
    """The one spelling of a mask type: "causal,padding" and "padding,causal" are "padding_causal"."""
    name = attn_mask_type.replace(" ", "") if isinstance(attn_mask_type, str) else ""
    if "," in name:
        name = "_".join(sorted(name.split(","), key=lambda part: part != "padding"))
    if name not in NAMES:
        raise ValueError(
            f"attn_mask_type={attn_mask_type!r} does not exist; choose one of {', '.join(NAMES)}"
        )
    return name


def resolve(
    attn_mask_type: str, window_size: tuple[int, int] | None, bottom_right_diagonal: bool | None
) -> Mask:
    """The mask that a name, a window and an alignment mean together.

    A causal name fixes the alignment ("causal" top left, "causal_bottom_right" bottom right);
    bottom_right_diagonal speaks for the windows of the other masks, which are aligned bottom right unless it
    says otherwise.
    """
    name = canonical_name(attn_mask_type)
    if "causal" in name:
        bottom_right = name.endswith("bottom_right")
    else:
        bottom_right = bottom_right_diagonal is not False
    return Mask(name, check_set_window_size(name, window_size), bottom_right)


def over_cached_keys(name: str) -> str:
    """The mask type of a step with cached keys: sequences have their own lengths, and diagonals end in their last."""
    if name == "arbitrary":
        raise ValueError(
            "attn_mask_type='arbitrary' with inference_params; keys are masked by the cache's lengths, "
            "use a padding or a causal mask"
        )
    return "padding_causal_bottom_right" if "causal" in name else "padding"


def check_set_window_size(attn_mask_type: str, window_size: tuple[int, int] | None = None) -> tuple[int, int]:
    """(left, right) with -1 = unlimited: right is 0 for causal masks, and (-1, 0) belongs to them alone."""
    causal = "causal" in canonical_name(attn_mask_type)
    if window_size is None:
        return (-1, 0) if causal else UNLIMITED
    left, right = window_pair(window_size)
    if causal:
        if left < -1 or right < -1:
            raise ValueError(f"window_size=({left}, {right}) has a size below -1; -1 means unlimited")
        if right != 0:
            _warn(f"window_size=({left}, {right}) becomes ({left}, 0): {attn_mask_type!r} is causal")
        return (left, 0)
    if (left, right) == UNLIMITED or (left >= 0 and right >= 0):
        return (left, right)
    if (left, right) == (-1, 0):
        _warn(f"window_size=(-1, 0) becomes (-1, -1): attn_mask_type={attn_mask_type!r} is not causal")
        return UNLIMITED
    raise ValueError(
        f"window_size=({left}, {right}) is not allowed with attn_mask_type={attn_mask_type!r}; "
        "give (-1, -1) or two numbers >= 0"
    )


def window_pair(window_size: Any) -> tuple[int, int]:
    """(left, right) of a sequence of two integers; ValueError for anything else."""
    try:
        left, right = window_size
        return operator.index(left), operator.index(right)
    except (TypeError, ValueError):
        raise ValueError(
            f"window_size={window_size!r} is no pair of integers; give (left, right), -1 for unlimited"
        ) from None


def _warn(message: str) -> None:
    if not torch.compiler.is_compiling():
        warnings.warn(message, stacklevel=4)


def lengths_of(cu_seqlens: Tensor) -> Tensor:
    """Tokens of each sequence [b] from their cumulative sum [b + 1]."""
    return cu_seqlens[1:] - cu_seqlens[:-1]


def cumulative(lengths: Tensor) -> Tensor:
    """cu_seqlens [b + 1] int32 from the tokens of each sequence [b]."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def lengths_of_mask(masked: Tensor) -> Tensor:
    """Tokens of each sequence [b] int32 from a padding mask [b, 1, 1, s] or [b, s], True = padding."""
    return (~masked.flatten(1)).sum(dim=1, dtype=torch.int32)


def visible(request: AttentionRequest, inputs: AttentionInputs) -> Tensor | None:
    """visible[b | 1, h | 1, i | 1, j] bool; None when every query sees every key."""
    parts = []
    if request.mask.banded:
        parts.append(_band(request, inputs))
    if request.mask.padding:
        parts.append(_real(inputs.masked_kv, inputs.lengths_kv, request.seqlen_kv)[:, None, None, :])
        parts.append(_real(inputs.masked_q, inputs.lengths_q, request.seqlen_q)[:, None, :, None])
    if request.mask.arbitrary:
        assert inputs.masked is not None
        parts.append(~inputs.masked)
    if not parts:
        return None
    together = parts[0]
    for part in parts[1:]:
        together = together & part
    return together


def diagonal_shift(request: AttentionRequest, inputs: AttentionInputs) -> Tensor | int:
    """What j - i is on the diagonal: 0, or the surplus of keys over queries (by sequence: [b, 1, 1, 1])."""
    if not request.mask.bottom_right:
        return 0
    if not request.mask.padding:
        return request.seqlen_kv - request.seqlen_q
    assert inputs.lengths_q is not None and inputs.lengths_kv is not None
    return (inputs.lengths_kv - inputs.lengths_q)[:, None, None, None]


def distance(request: AttentionRequest, inputs: AttentionInputs) -> Tensor:
    """j - i - shift [b | 1, 1, i, j]: how far key j lies behind query i's place on the diagonal."""
    device = inputs.q.device
    i = torch.arange(request.seqlen_q, device=device)[:, None]
    j = torch.arange(request.seqlen_kv, device=device)[None, :]
    return (j - i)[None, None] - diagonal_shift(request, inputs)


def _band(request: AttentionRequest, inputs: AttentionInputs) -> Tensor:
    left, right = request.mask.window
    behind = distance(request, inputs)
    if left < 0:
        return behind <= right
    if right < 0:
        return behind >= -left
    return (behind >= -left) & (behind <= right)


def _real(masked: Tensor | None, lengths: Tensor | None, size: int) -> Tensor:
    """Is token [b, s] a real one: what the mask says, else whether it lies inside its sequence's length."""
    if masked is not None:
        return ~masked.reshape(-1, size)
    assert lengths is not None
    return torch.arange(size, device=lengths.device)[None, :] < lengths[:, None]
