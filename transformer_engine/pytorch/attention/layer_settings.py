"""MultiheadAttentionConfig: MultiheadAttention settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..distributed.tensor_parallel import OverlapFlags
from ..module.config import Config
from ..primitives.attention.mask import canonical_name
from ..runtime.warn_once import warn_once
from .heads import Heads

_PROJECTIONS = ("layernorm_qkv", "qkv", "layernorm_query", "query_layer", "key_value")
# {setting: attributes of children that receive its value when it is assigned}.
CHILD_ATTRIBUTES = {
    "attn_mask_type": ("core_attention.attn_mask_type",),
    "layer_number": ("core_attention.layer_number",),
    "qkv_format": ("core_attention.qkv_format",),
    "return_bias": ("proj.return_bias",),
    "return_layernorm_output": (
        "layernorm_qkv.return_layernorm_output",
        "layernorm_query.return_layernorm_output",
    ),
    "sequence_parallel": tuple(
        f"{child}.sequence_parallel" for child in (*_PROJECTIONS, "core_attention", "proj")
    ),
    "softcap": ("core_attention.softcap",),
    "window_size": ("core_attention.window_size",),
}
# Constructor arguments that are stored unchanged as settings of the same name.
STORED_ARGUMENTS = (
    "attention_type",
    "attn_mask_type",
    "fuse_qkv_params",
    "hidden_size",
    "input_layernorm",
    "layer_number",
    "num_attention_heads",
    "qk_norm_before_rope",
    "qk_norm_type",
    "qkv_format",
    "return_bias",
    "return_layernorm_output",
    "rotary_pos_interleaved",
    "softcap",
    "tp_group",
)
# Settings that determined which children and parameters exist; they cannot be assigned.
FIXED = frozenset(
    {
        *(
            "attention_type",
            "fuse_qkv_params",
            "hidden_size",
            "input_layernorm",
            "num_attention_heads",
        ),
        *("num_gqa_groups", "qk_norm_type", "qkv_weight_interleaved"),
    }
)
# Constructor arguments that the layer passes on to its projections.
PROJECTION_ARGUMENTS = (
    "bias",
    "device",
    "fuse_wgrad_accumulation",
    "get_rng_state_tracker",
    "params_dtype",
    "tp_group",
    *OverlapFlags._fields,
)
# Constructor arguments that the layer passes on to its first norm, and to its core attention.
NORM_ARGUMENTS = ("normalization", "return_layernorm_output", "zero_centered_gamma")
CORE_ARGUMENTS = (
    "attention_dropout",
    "attention_type",
    "attn_mask_type",
    "bottom_right_diagonal",
    "get_rng_state_tracker",
    "layer_number",
    "qkv_format",
    "softcap",
    "softmax_type",
    "window_size",
)


def child_name(parent: str | None, child: str) -> str | None:
    """Return the name for the child of a named layer."""
    return None if parent is None else f"{parent}.{child}"


def warn_without_norm(return_layernorm_output: bool, input_layernorm: bool) -> None:
    """Warn once about return_layernorm_output=True on a layer without a norm."""
    if return_layernorm_output and not input_layernorm:
        warn_once(
            "return_layernorm_output without a norm",
            "return_layernorm_output=True has no effect without input_layernorm=True: the MultiheadAttention has no "
            "norm to return; make another one with input_layernorm=True",
        )


@dataclass(frozen=True, eq=False)
class MultiheadAttentionConfig(Config):
    """Layer settings under the names of the constructor.

    Attributes:
        heads: Heads on one tensor-parallel rank.
        returns_norm: The layer has a norm and returns its output.
    """

    attention_type: str = "self"
    attn_mask_type: str = "causal"
    window_size: tuple[int, int] | None = None
    softcap: float = 0.0
    layer_number: int | None = None
    qkv_format: str = "sbhd"
    input_layernorm: bool = False
    return_layernorm_output: bool = False
    return_bias: bool = False
    rotary_pos_interleaved: bool = False
    qk_norm_type: str | None = None
    qk_norm_before_rope: bool = False
    num_attention_heads: int = 1
    num_gqa_groups: int = 1
    hidden_size: int = 1
    hidden_size_per_attention_head: int = 1
    fuse_qkv_params: bool = False
    qkv_weight_interleaved: bool = True
    tp_size: int = 1
    tp_group: Any = None
    sequence_parallel: bool = False
    heads: Heads = field(default_factory=lambda: Heads(1, 1, 1, True))

    returns_norm: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "attn_mask_type", canonical_name(self.attn_mask_type))
        object.__setattr__(
            self, "returns_norm", self.return_layernorm_output and self.input_layernorm
        )

    def check(self) -> None:
        warn_without_norm(self.return_layernorm_output, self.input_layernorm)

    @property
    def ranks(self) -> int:
        """The number of ranks that share the tokens of a sequence."""
        return self.tp_size if self.sequence_parallel else 1
