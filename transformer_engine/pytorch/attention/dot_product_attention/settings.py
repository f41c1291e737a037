"""Attention layer settings, one call's arguments, and tensor metadata."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...constants import CPLoadBalancingStrategy
from ...functions.attention.context_parallel.groups import ContextGroups, context_groups
from ...module.base import ModuleConfig
from ...primitives.attention.mask import canonical_name
from ...runtime.tracing import float_constant, specialize
from ..inference import InferenceParams


@dataclass(frozen=True, eq=False)
class AttentionConfig(ModuleConfig):
    """DotProductAttention settings under its constructor's names.

    Attributes:
        attn_mask_type: Canonical name.
        window_size: As given; each call resolves it together with its mask type.
        cp_group, cp_global_ranks, cp_stream, cp_comm_type, load_balancing_strategy:
            `set_context_parallel_group` arguments.
        _scale_text, _dropout_text, _softcap_text: Numbers as text, for a tracing compiler.
    """

    num_attention_heads: int = 1
    num_gqa_groups: int = 1
    num_gqa_groups_per_partition: int = 1
    head_dim_qk: int = 1
    head_dim_v: int = 1
    attention_dropout: float = 0.0
    qkv_format: str = "sbhd"
    attn_mask_type: str = "causal"
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool | None = None
    softcap: float = 0.0
    layer_number: int | None = None
    attention_type: str = "self"
    softmax_scale: float = 1.0
    softmax_type: str = "vanilla"
    return_max_logit: bool = False
    cp_group: Any = None
    cp_global_ranks: Any = None
    cp_stream: Any = None
    cp_comm_type: str = "p2p"
    load_balancing_strategy: CPLoadBalancingStrategy = CPLoadBalancingStrategy.DUAL_CHUNK_SWAP
    _scale_text: str = field(init=False, default="")
    _dropout_text: str = field(init=False, default="")
    _softcap_text: str = field(init=False, default="")
    _context: ContextGroups | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        derived = {
            "attn_mask_type": canonical_name(self.attn_mask_type),
            "_scale_text": float(self.softmax_scale).hex(),
            "_dropout_text": float(self.attention_dropout).hex(),
            "_softcap_text": float(self.softcap).hex(),
            "_context": context_groups(
                self.cp_group, self.cp_stream, self.cp_comm_type, self.load_balancing_strategy
            ),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def heads(self) -> int:
        """Query heads on this tensor-parallel rank."""
        return self.num_attention_heads // self.tp_size

    @property
    def context(self) -> ContextGroups | None:
        """Groups for the ranks that share a sequence; None if this rank has all of it."""
        return self._context

    def scale_and_dropout(self, training: bool) -> tuple[float, float]:
        """Return softmax_scale and the dropout in force; constants in a graph, whose compiler would use symbols."""
        if torch.compiler.is_compiling():
            dropout = float_constant(self._dropout_text) if training else 0.0
            return float_constant(self._scale_text), dropout
        return self.softmax_scale, self.attention_dropout if training else 0.0

    def softcap_of_call(self, softcap: float | None) -> float:
        """Return a call's softcap, by default the layer's; a constant in a graph."""
        if torch.compiler.is_compiling():
            return float_constant(self._softcap_text) if softcap is None else specialize(softcap)
        return self.softcap if softcap is None else softcap


class AttentionArguments(NamedTuple):
    """The arguments of an attention's forward(), under their public names.

    The outermost public call packs them once; TransformerLayer, MultiheadAttention and DotProductAttention pass the
    record on. Tensors come first: `argument_facts` replaces them by their metadata in a key.
    """

    attention_mask: Tensor | tuple[Tensor, Tensor] | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    core_attention_bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    inference_params: InferenceParams | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    attn_mask_type: str | None = None
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool | None = None
    core_attention_bias_type: str = "no_bias"
    pad_between_seqs: bool | None = None
    softcap: float | None = None
    thd_attention_policies: Any = None
    thd_attention_policy_dispatch: str = "auto"
    qkv_format: str | None = None
    num_splits: int | None = 1
    score_mod: Callable[..., Tensor] | None = None

    def as_keywords(self) -> dict[str, Any]:
        """Return the keywords that MultiheadAttention.forward takes too, for a module with hooks or another class.

        Arguments from release 2.20 are left out if they have their defaults: modules for earlier releases lack them.
        """
        named = dict(zip(self._fields[:_OF_LAYERS], self, strict=False))
        if self.softcap is None:
            del named["softcap"]
        if self.thd_attention_policies is None:
            del named["thd_attention_policies"], named["thd_attention_policy_dispatch"]
        return named


NO_ARGUMENTS = AttentionArguments()
# The first fields of AttentionArguments are tensors; the last ones are not attention layer arguments.
_TENSORS, _CACHE = 7, 7
_OF_LAYERS = AttentionArguments._fields.index("qkv_format")


def pack_arguments(*fields: Any) -> AttentionArguments:
    """Pack the first fields of AttentionArguments; NO_ARGUMENTS if all have their defaults."""
    for value, default in zip(fields, NO_ARGUMENTS, strict=False):
        if value is not default:
            return AttentionArguments(*fields)
    return NO_ARGUMENTS


def argument_facts(a: AttentionArguments) -> tuple[Any, ...]:
    """Return the arguments as part of a key: tensor metadata, and whether there is a cache.

    Raises:
        AttributeError: An argument is another object in a tensor's place.
    """
    mask: Any = a.attention_mask
    if type(mask) is tuple:
        mask = tuple(
            [None if x is None else (x.shape, x.dtype, x.device, x.requires_grad) for x in mask]
        )
    elif mask is not None:
        mask = (mask.shape, mask.dtype, mask.device, mask.requires_grad)
    return (
        mask,
        *[
            None if x is None else (x.shape, x.dtype, x.device, x.requires_grad)
            for x in a[1:_TENSORS]
        ],
        a.inference_params is not None,
        *a[_CACHE + 1 :],
    )


def describe_arguments(facts: tuple[Any, ...]) -> AttentionArguments:
    """Return the arguments that `argument_facts` was called with, with descriptions in place of tensors."""
    mask, *tensors = facts[:_TENSORS]
    if mask and type(mask[0]) is torch.Size:
        mask = TensorFacts(*mask)
    elif mask is not None:
        mask = tuple([None if x is None else TensorFacts(*x) for x in mask])
    described: list[Any] = [None if x is None else TensorFacts(*x) for x in tensors]
    return AttentionArguments(mask, *described, facts[_CACHE] or None, *facts[_CACHE + 1 :])  # pyright: ignore[reportCallIssue]


class TensorFacts(NamedTuple):
    """Tensor metadata, for checks before the tensor exists.

    Attributes:
        shape: Tensor shape.
        dtype: Tensor dtype.
        device: Tensor device.
        requires_grad: Whether autograd needs the tensor's gradient.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @property
    def ndim(self) -> int:
        """Axis count."""
        return len(self.shape)

    def numel(self) -> int:
        """Element count."""
        return math.prod(self.shape)


def tensor_metadata(x: Tensor) -> TensorFacts:
    """Return a tensor's metadata."""
    return TensorFacts(x.shape, x.dtype, x.device, x.requires_grad)


def is_tensor(x: object) -> bool:
    """Return whether an object is a tensor or a tensor description."""
    return isinstance(x, (Tensor, TensorFacts))


def is_pair(mask: object) -> bool:
    """Return whether query and key masks are given, rather than one mask or its description."""
    return isinstance(mask, tuple) and not isinstance(mask, TensorFacts)
