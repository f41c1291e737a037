"""Attention enumerations: masks, biases, sinks and layouts."""

from __future__ import annotations

import enum

from ....common.checks import described, member


class AttnBiasType(enum.Enum):
    """How a bias is used: none, before scores are scaled, or after it."""

    NO_BIAS = 0
    PRE_SCALE_BIAS = 1
    POST_SCALE_BIAS = 2


class AttnMaskType(enum.Enum):
    """The keys that are hidden from a query, in addition to a mask or a window."""

    NO_MASK = 0
    PADDING_MASK = 1
    CAUSAL_MASK = 2
    PADDING_CAUSAL_MASK = 3
    CAUSAL_BOTTOM_RIGHT_MASK = 4
    PADDING_CAUSAL_BOTTOM_RIGHT_MASK = 5

    def is_causal(self) -> bool:
        """Whether keys after the query are hidden."""
        return self not in (self.NO_MASK, self.PADDING_MASK)

    def is_padding(self) -> bool:
        """Whether tokens that belong to no sequence are hidden."""
        return self in (
            self.PADDING_MASK,
            self.PADDING_CAUSAL_MASK,
            self.PADDING_CAUSAL_BOTTOM_RIGHT_MASK,
        )

    def is_bottom_right(self) -> bool:
        """Whether the diagonal ends at the last query and the last key."""
        return self in (self.CAUSAL_BOTTOM_RIGHT_MASK, self.PADDING_CAUSAL_BOTTOM_RIGHT_MASK)


class AttnSoftmaxType(enum.Enum):
    """Additional term in the softmax denominator: none, exp(0), exp(a learnable number per head)."""

    VANILLA_SOFTMAX = 0
    OFF_BY_ONE_SOFTMAX = 1
    LEARNABLE_SOFTMAX = 2

    @classmethod
    def from_str(cls, softmax_type: str) -> AttnSoftmaxType:
        """Get the member called "vanilla", "off-by-one" (or with _) or "learnable"."""
        names = {"vanilla": 0, "off-by-one": 1, "off_by_one": 1, "learnable": 2}
        if not isinstance(softmax_type, str) or softmax_type not in names:
            raise ValueError(
                f"softmax_type={described(softmax_type)}; choose 'vanilla', 'off_by_one' or 'learnable'"
            )
        return cls(names[softmax_type])


class QKVFormat(enum.Enum):
    """Tensor axis order; THD: rows in [b, s] contain several sequences."""

    SBHD = 0
    BSHD = 1
    THD = 2


class QKVLayout(enum.Enum):
    """How query, key and value are packed into arrays, and whether rows contain several sequences."""

    BS3HD = "bs3hd"
    BSHD_BS2HD = "bshd_bs2hd"
    BSHD_BSHD_BSHD = "bshd_bshd_bshd"
    T3HD = "t3hd"
    THD_T2HD = "thd_t2hd"
    THD_THD_THD = "thd_thd_thd"

    def is_qkvpacked(self) -> bool:
        return self in (self.BS3HD, self.T3HD)

    def is_kvpacked(self) -> bool:
        return self in (self.BSHD_BS2HD, self.THD_T2HD)

    def is_separate(self) -> bool:
        return self in (self.BSHD_BSHD_BSHD, self.THD_THD_THD)

    def is_thd(self) -> bool:
        return self in (self.T3HD, self.THD_T2HD, self.THD_THD_THD)

    def get_qkv_format(self) -> QKVFormat:
        return QKVFormat.THD if self.is_thd() else QKVFormat.BSHD

    def to_qkvpacked(self) -> QKVLayout:
        return QKVLayout.T3HD if self.is_thd() else QKVLayout.BS3HD

    def to_kvpacked(self) -> QKVLayout:
        return QKVLayout.THD_T2HD if self.is_thd() else QKVLayout.BSHD_BS2HD

    def to_separate(self) -> QKVLayout:
        return QKVLayout.THD_THD_THD if self.is_thd() else QKVLayout.BSHD_BSHD_BSHD


_MASKS = {
    "no_mask": AttnMaskType.NO_MASK,
    "padding": AttnMaskType.PADDING_MASK,
    "causal": AttnMaskType.CAUSAL_MASK,
    "padding_causal": AttnMaskType.PADDING_CAUSAL_MASK,
    "causal_padding": AttnMaskType.PADDING_CAUSAL_MASK,
    "causal_bottom_right": AttnMaskType.CAUSAL_BOTTOM_RIGHT_MASK,
    "bottom_right_causal": AttnMaskType.CAUSAL_BOTTOM_RIGHT_MASK,
}
_MASKS |= {
    "_".join(words): AttnMaskType.PADDING_CAUSAL_BOTTOM_RIGHT_MASK
    for words in (
        ("padding", "causal", "bottom_right"),
        ("padding", "bottom_right", "causal"),
        ("causal", "padding", "bottom_right"),
        ("causal", "bottom_right", "padding"),
        ("bottom_right", "padding", "causal"),
        ("bottom_right", "causal", "padding"),
    )
}


def canonicalize_attn_mask_type(attn_mask_type: str) -> AttnMaskType:
    """Get a mask by name; the ValueError for another name lists the masks.

    Args:
        attn_mask_type: Mask name, such as "padding_causal".
    """
    if not isinstance(attn_mask_type, str) or attn_mask_type not in _MASKS:
        names = [
            next(name for name, mask_type in _MASKS.items() if mask_type is mask)
            for mask in AttnMaskType
        ]
        raise ValueError(
            f"attn_mask_type={described(attn_mask_type)}; choose one of {', '.join(names)} (padding, causal and "
            "bottom_right may be in any order)"
        )
    return _MASKS[attn_mask_type]


def check_kinds(
    bias: AttnBiasType, mask: AttnMaskType, layout: QKVLayout, softmax: AttnSoftmaxType
) -> None:
    """Raise TypeError unless each is a member: a name or a number would equal no member, and count as the first."""
    member("attn_bias_type", bias, AttnBiasType)
    member("attn_mask_type", mask, AttnMaskType)
    member("qkv_layout", layout, QKVLayout)
    member("softmax_type", softmax, AttnSoftmaxType)
