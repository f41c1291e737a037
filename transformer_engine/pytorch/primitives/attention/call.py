"""AttentionCall: one attention as hashable metadata; AttentionInputs: its tensors.

Every layer above passes the record on unchanged, and every backend reads it. A new option is an
`AttentionCall` field, a `Feature` if some backend does not support it, and code in the backends that do.

Legend: b batch, h query heads, g key and value heads (h is a multiple of g), s sequence, t packed tokens, d head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common import dispatch, env
from ....common.hardware import NO_GPU, Hardware
from ...runtime.determinism import RAISES
from ...runtime.device import current_hardware
from .mask import Mask

BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
QKV_FORMATS = ("sbhd", "bshd", "thd")


@dataclass(frozen=True)
class Switches:
    """Backend families that the environment leaves enabled; fused_kind is NVTE_FUSED_ATTN_BACKEND."""

    flash: bool = True
    fused: bool = True
    unfused: bool = True
    flash2: bool = True
    flash3: bool = True
    flash4: bool = True
    fused_kind: str | None = None

    @classmethod
    def from_environment(cls) -> Switches:
        """Read the NVTE_* variables."""
        return cls(
            flash=bool(env.get("NVTE_FLASH_ATTN")),
            fused=bool(env.get("NVTE_FUSED_ATTN")),
            unfused=bool(env.get("NVTE_UNFUSED_ATTN")),
            flash2=bool(env.get("NVTE_FLASH_ATTN_V2")),
            flash3=bool(env.get("NVTE_FLASH_ATTN_V3")),
            flash4=bool(env.get("NVTE_FLASH_ATTN_V4")),
            fused_kind=env.get("NVTE_FUSED_ATTN_BACKEND"),  # pyright: ignore[reportArgumentType]
        )


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """softmax(softcap(scale * q k^T) + bias) v for b sequences, without tensors and without values of tensors.

    Attributes:
        seqlen_q, seqlen_kv: Longest sequence length (the padded extent).
        q_format, kv_format: "sbhd", "bshd" or "thd"; different only if keys come from a cache.
        page_size: Tokens per cache page; 0 without pages.
        bias_shape: Bias shape, [1 | b, 1 | h, 1 | s_q, 1 | s_kv].
        slopes_shape: ALiBi slopes shape, [h] or [b, h].
        masked_shape: Arbitrary mask shape.
        softcap: Limit c of c * tanh(score / c), applied to the scaled scores, which contain a pre_scale_bias. Other
            biases are added afterwards. 0: no limit.
        dropout: Probability in force; 0 in evaluation.
        padded_between: thd: there are tokens between sequences that belong to no sequence.
        padding_tensors: Padding is given as mask tensors, which may hide any tokens.
        same_lengths: Queries and keys have equal lengths, sequence by sequence.
        slopes_given: The ALiBi slopes are the caller's.
        bias_gradient: The bias gradient is needed.
        num_splits: Parts in which the keys of a sequence are processed; 0 lets the backend choose.
        cached: Keys come from a cache of earlier steps.
        fp8: FP8 attention scaling ("delayed", "current", "mxfp8" or "block"); None computes in `dtype`.
        score_mod: score_mod(score, b, h, i, j) -> score, applied to the scores after softcap and bias.
        hardware: Row of the device in the hardware table; `NO_GPU` on a CPU.
        deterministic: Gradients must be bitwise repeatable.
        torch_deterministic: PyTorch's own operators have bitwise repeatable gradients.
        batch_invariant: A query's result must have the same bits for any number of queries, keys and sequences beside
            its own keys.
        needs_gradient: A gradient is needed, or may be needed if a checkpoint runs the call again.
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

    mask: Mask
    scale: float
    bias: str = "no_bias"
    softmax: str = "vanilla"
    softcap: float = 0.0
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

    device_type: str
    batch_invariant: bool = False
    hardware: Hardware = NO_GPU
    deterministic: bool = False
    torch_deterministic: bool = False
    switches: Switches = field(default_factory=Switches)

    @classmethod
    def on(cls, device_type: str, deterministic: int, **fields: Any) -> AttentionCall:
        """Return a call on a device of this process, with its hardware and the environment's switches.

        Args:
            device_type: "cuda" or "cpu".
            deterministic: `torch_determinism()`; the environment may require determinism too.
            **fields: The other fields.
        """
        return cls(
            device_type=device_type,
            hardware=current_hardware() if device_type == "cuda" else NO_GPU,
            deterministic=bool(deterministic) or not env.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO"),
            torch_deterministic=deterministic == RAISES,
            batch_invariant=dispatch.requirements.batch_invariant,
            switches=Switches.from_environment(),
            **fields,
        )

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple([getattr(self, name) for name in self.__dataclass_fields__]))

    def __hash__(self) -> int:
        """Return a hash that is computed once: backends look up plans by the record in every call."""
        return self._hash

    @functools.cached_property
    def features(self) -> tuple[Feature, ...]:
        """Features that a backend must support, in the order in which they are reported as unsupported."""
        return tuple(feature for feature, uses in _NEEDED.items() if uses(self))

    @property
    def demands_determinism(self) -> bool:
        """Whether the backend must have deterministic gradients, by the environment and not by needs_gradient.

        Evaluation then has the training backend. Steps over a key-value cache never have a backward pass.
        """
        return self.deterministic and (self.needs_gradient or not self.cached)

    @functools.cached_property
    def banded(self) -> bool:
        """Whether the mask depends on the distance between query and key; read in every torch attention call."""
        return self.mask.banded

    @property
    def packed(self) -> bool:
        """Whether the tokens of all sequences share one axis."""
        return self.q_format == "thd"

    @property
    def diagonal(self) -> bool:
        """Whether the result depends on the position of the diagonal."""
        return self.mask.banded or self.bias == "alibi"

    @property
    def square(self) -> bool:
        """Whether every sequence is known to have as many keys as queries."""
        return self.same_lengths or (not self.mask.padding and self.seqlen_q == self.seqlen_kv)

    @property
    def ends_aligned(self) -> bool:
        """Whether the diagonal, if it matters, ends at the last query and key of every sequence."""
        return self.mask.bottom_right or not self.diagonal or self.square

    @property
    def starts_aligned(self) -> bool:
        """Whether the diagonal, if it matters, begins at the first query and key of every sequence."""
        return not (self.mask.bottom_right and self.diagonal) or self.square

    @property
    def plain_causal(self) -> bool:
        """Whether the mask is j <= i and nothing else, by a causal name without lengths."""
        aligned = not self.mask.bottom_right or self.seqlen_q == self.seqlen_kv
        return self.mask.causal and aligned and self.mask.name.startswith("causal")


class Feature(str, Enum):
    """Call features beyond dense self attention with a causal mask or none.

    A backend lists the features that it supports; calls with any other feature are unsupported there.
    """

    EMPTY = "an empty tensor"
    FP8 = "FP8 attention"
    SCORE_MOD = "score_mod"
    SCORE_MOD_BPROP = "score_mod_bprop"
    SOFTCAP = "softcap"
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
    BATCH_INVARIANT = "results that do not depend on the batch (te.batch_invariant)"

    def __str__(self) -> str:
        return self.value


_NEEDED: dict[Feature, Callable[[AttentionCall], bool]] = {
    Feature.EMPTY: lambda call: 0 in (call.batch, call.seqlen_q, call.seqlen_kv),
    Feature.FP8: lambda call: call.fp8 is not None,
    Feature.SCORE_MOD: lambda call: call.score_mod is not None,
    Feature.SCORE_MOD_BPROP: lambda call: getattr(call.score_mod, "bprop", None) is not None,
    Feature.SOFTCAP: lambda call: call.softcap != 0.0,
    Feature.PRE_SCALE_BIAS: lambda call: call.bias == "pre_scale_bias",
    Feature.POST_SCALE_BIAS: lambda call: call.bias == "post_scale_bias",
    Feature.ALIBI: lambda call: call.bias == "alibi",
    Feature.OFF_BY_ONE: lambda call: call.softmax == "off-by-one",
    Feature.LEARNABLE: lambda call: call.softmax == "learnable",
    Feature.MAX_LOGIT: lambda call: call.max_logit,
    Feature.DROPOUT: lambda call: call.dropout > 0.0,
    Feature.FULL_DROPOUT: lambda call: call.dropout >= 1.0,
    Feature.ARBITRARY: lambda call: call.mask.arbitrary,
    Feature.PADDING_TENSORS: lambda call: call.padding_tensors,
    Feature.PADDING: lambda call: call.mask.padding and not call.packed,
    Feature.PACKED: lambda call: call.packed,
    Feature.PADDED_BETWEEN: lambda call: call.padded_between,
    Feature.WINDOW: lambda call: call.mask.banded and not call.mask.causal,
    Feature.TOP_LEFT: lambda call: not call.ends_aligned,
    Feature.BOTTOM_RIGHT: lambda call: not call.starts_aligned,
    Feature.GROUPS: lambda call: call.groups != call.heads,
    Feature.TWO_SIZES: lambda call: call.head_dim_qk != call.head_dim_v,
    Feature.CACHED: lambda call: call.cached or call.q_format != call.kv_format,
    Feature.PAGED: lambda call: call.page_size > 0,
    Feature.DETERMINISTIC: lambda call: call.demands_determinism,
    Feature.BATCH_INVARIANT: lambda call: call.batch_invariant,
}
assert _NEEDED.keys() == set(Feature), "a feature without a condition"


class AttentionInputs(NamedTuple):
    """The tensors of one call.

    Attributes:
        q, k, v: [.., h, d_qk], [.., g, d_qk], [.., g, d_v] in call.q_format and call.kv_format.
        lengths_q, lengths_kv: Tokens per sequence [b] int32.
        starts_q, starts_kv: Sequence starts in a thd tensor, [b + 1] int32.
        masked_q, masked_kv: Padding masks [b, 1, 1, s].
        masked: Arbitrary mask, broadcastable to [b, h, s_q, s_kv].
        bias: Broadcastable to [b, h, s_q, s_kv].
        slopes: ALiBi slopes, float32 [h] or [b, h].
        sink: Logit for a key without a value, float32 [h].
        page_table: int32 [b, pages]; page_table[b, j // page_size] holds token j, and k, v are
            [pages, page_size, g, d].
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
    """A backend's forward-pass results.

    Attributes:
        output: [.., h, d_v] in call.q_format, contiguous.
        lse: Natural log of the softmax denominator, sink included, float32 [b, h, s_q], for thd [h,
            t]; -inf for a query without a visible key. May be None if no gradient is needed.
        rng_state: int64 [2] (seed, offset) on the device, with dropout.
        max_logit: Largest visible score after softcap and bias, float32 [h], if call.max_logit.
    """

    output: Tensor
    lse: Tensor | None = None
    rng_state: Tensor | None = None
    max_logit: Tensor | None = None


class Gradients(NamedTuple):
    """A backend's backward-pass results, each in the shape and dtype of its input.

    Attributes:
        q: Gradient of the queries.
        k: Gradient of the keys.
        v: Gradient of the values.
        bias: Gradient of the bias, or None.
        sink: Gradient of the softmax sink, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    sink: Tensor | None = None


class AttentionResult(NamedTuple):
    """output [.., h * d_v] in call.q_format; max_logit float32 [h] if call.max_logit."""

    output: Tensor
    max_logit: Tensor | None = None
