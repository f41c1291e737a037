"""One attention call as data: what a backend reads before it says yes or no, and the tensors it then gets.

Legend: b batch, h query heads, g key and value heads (h a multiple of g), s sequence, t packed tokens, d head
size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common import env
from .mask import UNLIMITED, Mask

BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
QKV_FORMATS = ("sbhd", "bshd", "thd")


@dataclass(frozen=True)
class Switches:
    """The families of backends that the environment leaves on; fused_kind: NVTE_FUSED_ATTN_BACKEND."""

    flash: bool = True
    fused: bool = True
    unfused: bool = True
    flash2: bool = True
    flash3: bool = True
    flash4: bool = True
    fused_kind: str | None = None

    @classmethod
    def from_environment(cls) -> Switches:
        """The switches as the NVTE_* variables are."""
        return cls(
            flash=bool(env.get("NVTE_FLASH_ATTN")),
            fused=bool(env.get("NVTE_FUSED_ATTN")),
            unfused=bool(env.get("NVTE_UNFUSED_ATTN")),
            flash2=bool(env.get("NVTE_FLASH_ATTN_V2")),
            flash3=bool(env.get("NVTE_FLASH_ATTN_V3")),
            flash4=bool(env.get("NVTE_FLASH_ATTN_V4")),
            fused_kind=env.get("NVTE_FUSED_ATTN_BACKEND"),  # pyright: ignore[reportArgumentType]
        )


@dataclass(frozen=True)
class Shape:
    """How large the tensors of a call are and how they lie.

    seqlen_q, seqlen_kv  longest sequence (the padded extent)
    q_format, kv_format  sbhd, bshd or thd; they differ only when keys come from a cache
    page_size            > 0: keys and values lie in pages of so many tokens
    bias_shape           of the bias [1 | b, 1 | h, 1 | s_q, 1 | s_kv]
    slopes_shape         of ALiBi's slopes, (h,) or (b, h);  masked_shape  of the arbitrary mask
    """

    dtype: torch.dtype
    batch: int
    heads: int
    groups: int
    seqlen_q: int
    seqlen_kv: int
    head_dim_qk: int
    head_dim_v: int
    q_format: str
    kv_format: str
    page_size: int = 0
    bias_shape: tuple[int, ...] | None = None
    slopes_shape: tuple[int, ...] | None = None
    masked_shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Options:
    """What is computed of the tensors.

    dropout          probability that is in force (0 in evaluation)
    padded_between   thd: tokens of no sequence lie between the sequences
    padding_tensors  padding came as mask tensors, which need not hide a suffix
    same_lengths     queries and keys have the same lengths, sequence by sequence
    slopes_given     ALiBi's slopes are not the usual ones;  bias_gradient  the bias's gradient is wanted
    num_splits       parts that a sequence of keys is computed in; 0: as many as the backend likes
    cached           keys come from a cache of earlier steps
    fp8              kind of FP8 attention; None: tensors are used in their own dtype
    score_mod        score_mod(score, b, h, i, j) -> score, applied to scale * q k^T
    """

    mask: Mask
    scale: float
    bias: str = "no_bias"
    softmax: str = "vanilla"
    dropout: float = 0.0
    padded_between: bool = False
    max_logit: bool = False
    needs_gradient: bool = True
    bias_gradient: bool = False
    slopes_given: bool = False
    padding_tensors: bool = False
    same_lengths: bool = False
    num_splits: int = 1
    cached: bool = False
    fp8: str | None = None
    score_mod: Callable[..., Tensor] | None = None


@dataclass(frozen=True)
class Device:
    """Where a call is computed, and what is allowed there; capability: (0, 0) on a CPU."""

    type: str
    capability: tuple[int, int] = (0, 0)
    deterministic: bool = False
    switches: Switches = field(default_factory=Switches)


@dataclass(frozen=True)
class AttentionRequest:
    """softmax(scale * q k^T + bias) v for b sequences; no tensor and no tensor's value is in here."""

    shape: Shape
    options: Options
    device: Device

    @classmethod
    def of(cls, **fields: Any) -> AttentionRequest:
        """A request from the fields of its three records, the device's type as device_type."""
        shape, options, device = _sorted(fields)
        return cls(Shape(**shape), Options(**options), Device(**device))

    def changed(self, **fields: Any) -> AttentionRequest:
        """The same but for some fields of its records."""
        shape, options, device = _sorted(fields)
        return AttentionRequest(
            replace(self.shape, **shape), replace(self.options, **options), replace(self.device, **device)
        )

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.options, self.device))

    def __hash__(self) -> int:
        """Made once: backends look their plans up by a request in each call."""
        return self._hash

    @functools.cached_property
    def features(self) -> tuple[Feature, ...]:
        """What a backend has to know in order to take the request, in the order in which it is refused."""
        return tuple(feature for feature, needed in _NEEDED.items() if needed(self))

    @property
    def packed(self) -> bool:
        """Are tokens of all sequences in one axis?"""
        return self.shape.q_format == "thd"

    @property
    def empty(self) -> bool:
        """Is a size 0?"""
        return 0 in (self.shape.batch, self.shape.seqlen_q, self.shape.seqlen_kv)

    @property
    def diagonal(self) -> bool:
        """Does it matter which keys lie on the diagonal?"""
        return self.options.mask.banded or self.options.bias == "alibi"

    @property
    def square(self) -> bool:
        """Are there as many keys as queries in every sequence, as far as the request tells?"""
        equal = self.shape.seqlen_q == self.shape.seqlen_kv
        return self.options.same_lengths or (not self.options.mask.padding and equal)

    @property
    def ends_aligned(self) -> bool:
        """Does the diagonal, where it matters, end in the last query and key of every sequence?"""
        return self.options.mask.bottom_right or not self.diagonal or self.square

    @property
    def starts_aligned(self) -> bool:
        """Does the diagonal, where it matters, begin in the first query and key of every sequence?"""
        return not (self.options.mask.bottom_right and self.diagonal) or self.square


_SHAPE, _OPTIONS, _DEVICE = (frozenset(record.__dataclass_fields__) for record in (Shape, Options, Device))


def _sorted(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Fields by the record that they belong to; TypeError for one of none."""
    shape: dict[str, Any] = {}
    options: dict[str, Any] = {}
    device: dict[str, Any] = {}
    for name, value in given.items():
        if name in _SHAPE:
            shape[name] = value
        elif name in _OPTIONS:
            options[name] = value
        elif name == "device_type" or name in _DEVICE:
            device[name.removeprefix("device_")] = value
        else:
            raise TypeError(f"a request has no field {name!r}; choose one of Shape, Options and Device")
    return shape, options, device


class Feature(str, Enum):
    """What a request may ask for beside dense self attention under a causal mask or none.

    A backend names the features that it takes and is not asked about requests with any other. A new one is refused
    everywhere until a backend says that it takes it.
    """

    EMPTY = "an empty tensor"
    FP8 = "FP8 attention"
    SCORE_MOD = "score_mod"
    PRE_SCALE_BIAS = "core_attention_bias_type='pre_scale_bias'"
    POST_SCALE_BIAS = "core_attention_bias_type='post_scale_bias'"
    ALIBI = "core_attention_bias_type='alibi'"
    OFF_BY_ONE = "softmax_type='off-by-one'"
    LEARNABLE = "softmax_type='learnable'"
    MAX_LOGIT = "return_max_logit"
    DROPOUT = "attention_dropout"
    FULL_DROPOUT = "attention_dropout=1.0"
    ARBITRARY = "attn_mask_type='arbitrary'"
    PADDING_TENSORS = "padding given as mask tensors (give cu_seqlens_q and cu_seqlens_kv)"
    PADDING = "lengths of padded sequences"
    PACKED = "qkv_format='thd'"
    PADDED_BETWEEN = "tokens between packed sequences"
    WINDOW = "window_size"
    TOP_LEFT = (
        "a diagonal that begins top left where lengths of queries and keys may differ "
        "(one cu_seqlens tensor for both says that they are the same)"
    )
    BOTTOM_RIGHT = "a diagonal that ends bottom right where lengths of queries and keys may differ"
    GROUPS = "grouped heads"
    TWO_SIZES = "heads of two sizes"
    CACHED = "a cache of keys and values"
    PAGED = "a paged cache"
    DETERMINISTIC = "deterministic gradients"

    def __str__(self) -> str:
        return self.value


_NEEDED: dict[Feature, Callable[[AttentionRequest], bool]] = {
    Feature.EMPTY: lambda r: r.empty,
    Feature.FP8: lambda r: r.options.fp8 is not None,
    Feature.SCORE_MOD: lambda r: r.options.score_mod is not None,
    Feature.PRE_SCALE_BIAS: lambda r: r.options.bias == "pre_scale_bias",
    Feature.POST_SCALE_BIAS: lambda r: r.options.bias == "post_scale_bias",
    Feature.ALIBI: lambda r: r.options.bias == "alibi",
    Feature.OFF_BY_ONE: lambda r: r.options.softmax == "off-by-one",
    Feature.LEARNABLE: lambda r: r.options.softmax == "learnable",
    Feature.MAX_LOGIT: lambda r: r.options.max_logit,
    Feature.DROPOUT: lambda r: r.options.dropout > 0.0,
    Feature.FULL_DROPOUT: lambda r: r.options.dropout >= 1.0,
    Feature.ARBITRARY: lambda r: r.options.mask.arbitrary,
    Feature.PADDING_TENSORS: lambda r: r.options.padding_tensors,
    Feature.PADDING: lambda r: r.options.mask.padding and not r.packed,
    Feature.PACKED: lambda r: r.packed,
    Feature.PADDED_BETWEEN: lambda r: r.options.padded_between,
    Feature.WINDOW: lambda r: r.options.mask.window not in (UNLIMITED, (-1, 0)),
    Feature.TOP_LEFT: lambda r: not r.ends_aligned,
    Feature.BOTTOM_RIGHT: lambda r: not r.starts_aligned,
    Feature.GROUPS: lambda r: r.shape.groups != r.shape.heads,
    Feature.TWO_SIZES: lambda r: r.shape.head_dim_qk != r.shape.head_dim_v,
    Feature.CACHED: lambda r: r.options.cached or r.shape.q_format != r.shape.kv_format,
    Feature.PAGED: lambda r: r.shape.page_size > 0,
    Feature.DETERMINISTIC: lambda r: r.device.deterministic and r.options.needs_gradient,
}
assert _NEEDED.keys() == set(Feature), "a feature that no request could have"


class AttentionInputs(NamedTuple):
    """The tensors of one call.

    q [.., h, d_qk], k [.., g, d_qk], v [.., g, d_v] in request.q_format and request.kv_format
    lengths_*  [b] int32 tokens of each sequence;  starts_*  [b + 1] int32 where each begins in a thd tensor
    masked_*   [b, 1, 1, s] padding masks;  masked  arbitrary mask, broadcastable to [b, h, s_q, s_kv]
    bias       broadcastable to [b, h, s_q, s_kv];  slopes  float32 [h] or [b, h] of ALiBi
    sink       float32 [h]: the logit of a key without a value
    page_table int32 [b, pages]: page of token j is page_table[b, j // page_size]; k, v [pages, page_size, g, d]
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lengths_q: Tensor | None = None
    lengths_kv: Tensor | None = None
    starts_q: Tensor | None = None
    starts_kv: Tensor | None = None
    masked_q: Tensor | None = None
    masked_kv: Tensor | None = None
    masked: Tensor | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None
    sink: Tensor | None = None
    page_table: Tensor | None = None


class Attended(NamedTuple):
    """What a backend's forward returns.

    output     [.., h, d_v] in request.q_format, contiguous
    lse        float32, natural logarithm of the softmax's denominator, sink included: [b, h, s_q], thd [h, t];
               -inf where a query sees no key. None is allowed when no gradient is needed
    rng_state  int64 [2] (seed, offset) on the device, when there is dropout
    max_logit  float32 [h], the largest visible scale * q k^T + bias, when the request asks for it
    """

    output: Tensor
    lse: Tensor | None = None
    rng_state: Tensor | None = None
    max_logit: Tensor | None = None


class Gradients(NamedTuple):
    """What a backend's backward returns: each in the shape and dtype of its input."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    sink: Tensor | None = None


class AttentionResult(NamedTuple):
    """output [.., h * d_v] in request.q_format; max_logit float32 [h], when the request asks for it."""

    output: Tensor
    max_logit: Tensor | None = None
