"""Mask(name, window, bottom_right): a mask type, window and alignment, resolved together.

Every mask is the intersection of at most three parts: a band -left <= j - i - shift <= right (causal: right =
0), the padding of each sequence, and an arbitrary tensor. `visible` computes it from the tensors of a call.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from ....common.checks import suggestion
from ....common.numbers import to_int
from ...runtime.tracing import constant_while_tracing

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
# Longer than every sequence; kernels add it to positions in 32 bits.
WIDEST = 1 << 29


@dataclass(frozen=True)
class Mask:
    """A resolved mask.

    Attributes:
        window: (left, right); -1 is unlimited.
        bottom_right: The diagonal ends at the last query and key.
    """

    name: str
    window: tuple[int, int]
    bottom_right: bool

    @property
    def padding(self) -> bool:
        """Whether sequences have their own lengths."""
        return self.name.startswith("padding")

    @property
    def arbitrary(self) -> bool:
        """Whether a mask tensor hides keys."""
        return self.name == "arbitrary"

    @property
    def banded(self) -> bool:
        """Whether the mask depends on the distance between query and key."""
        return self.window != UNLIMITED

    @property
    def causal(self) -> bool:
        """Whether the band hides the keys behind the diagonal and no others."""
        return self.window == (-1, 0)

    def within(self, longest: int) -> Mask:
        """Clamp the window to `longest` tokens, which hides the same keys in sequences at most that long."""
        left, right = self.window
        return Mask(self.name, (min(left, longest), min(right, longest)), self.bottom_right)


def canonical_name(attn_mask_type: str, argument: str = "attn_mask_type") -> str:
    """Return the canonical name of a mask type: "causal,padding" and "padding,causal" are "padding_causal"."""
    name = attn_mask_type.replace(" ", "") if isinstance(attn_mask_type, str) else ""
    if "," in name:
        name = "_".join(sorted(name.split(","), key=lambda part: part != "padding"))
    if name not in NAMES:
        raise ValueError(
            f"{argument}={attn_mask_type!r} does not exist; choose one of {', '.join(NAMES)}"
            + suggestion(name, NAMES)
        )
    return name


def resolve(
    attn_mask_type: str, window_size: tuple[int, int] | None, bottom_right_diagonal: bool | None
) -> Mask:
    """Return the mask for a name, a window and an alignment.

    A causal name fixes the alignment ("causal" top left, "causal_bottom_right" bottom right).
    bottom_right_diagonal applies to the windows of other masks, which are aligned bottom right by default.
    """
    name = canonical_name(attn_mask_type)
    if "causal" in name:
        bottom_right = name.endswith("bottom_right")
    else:
        bottom_right = bottom_right_diagonal is not False
    return Mask(name, check_set_window_size(name, window_size), bottom_right).within(WIDEST)


def cached_mask_type(name: str) -> str:
    """Return the mask type for a step with cached keys, with lengths per sequence and bottom-right diagonals."""
    if name == "arbitrary":
        raise ValueError(
            "attn_mask_type='arbitrary' with inference_params; keys are masked by the cache's lengths, "
            "use a padding or a causal mask"
        )
    return "padding_causal_bottom_right" if "causal" in name else "padding"


def check_set_window_size(
    attn_mask_type: str, window_size: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Return (left, right), -1 for unlimited: right is 0 for causal masks, and (-1, 0) is for causal masks only."""
    causal = "causal" in canonical_name(attn_mask_type)
    if window_size is None:
        return (-1, 0) if causal else UNLIMITED
    left, right = window_pair(window_size)
    if causal:
        if left < -1 or right < -1:
            raise ValueError(
                f"window_size=({left}, {right}) has a size below -1; give -1 for no limit, or a number >= 0"
            )
        if right != 0:
            _warn(
                f"window_size=({left}, {right}) becomes ({left}, 0): {attn_mask_type!r} is causal"
            )
        return (left, 0)
    if (left, right) == UNLIMITED or (left >= 0 and right >= 0):
        return (left, right)
    if (left, right) == (-1, 0):
        _warn(
            f"window_size=(-1, 0) becomes (-1, -1): attn_mask_type={attn_mask_type!r} is not causal"
        )
        return UNLIMITED
    raise ValueError(
        f"window_size=({left}, {right}) is not allowed with attn_mask_type={attn_mask_type!r}; "
        "give (-1, -1) or two numbers >= 0"
    )


def window_pair(window_size: Any) -> tuple[int, int]:
    """Return (left, right) as ints.

    Raises:
        ValueError: The value is not two whole numbers.
    """
    try:
        left, right = window_size
        return to_int("left", left), to_int("right", right)
    except (TypeError, ValueError):
        raise ValueError(
            f"window_size={window_size!r} is not a pair of integers; give (left, right), -1 for unlimited"
        ) from None


@constant_while_tracing
def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)
