"""Megatron-core classes that attention layers use, or equivalents if it is not installed.

Settings are read through their names, so that both config kinds work. In a Megatron model, the
module base class, the mask enum and the process groups must be Megatron's own.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ....common import optional
from ...module.parameters import default_init_method


class _LightMaskType(enum.Enum):
    """The keys that a query sees."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6


class _LightModule(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


def _megatron_attribute(module: str, name: str, otherwise: Any) -> Any:
    if (
        not optional.installed("megatron")
        or optional.failure("megatron.core", "parallel_state") is not None
    ):
        return otherwise
    return getattr(importlib.import_module(f"megatron.core.{module}"), name)


AttnMaskType: Any = _megatron_attribute("transformer.enums", "AttnMaskType", _LightMaskType)
"""The keys that a query sees: Megatron-core's enumeration, or one with the same names where it is missing."""
MegatronModule: Any = _megatron_attribute("transformer.module", "MegatronModule", _LightModule)
_ProcessGroups: Any = _megatron_attribute("process_groups_config", "ProcessGroupCollection", None)
_get_rng_tracker: Any = _megatron_attribute("tensor_parallel.random", "get_cuda_rng_tracker", None)


@dataclass
class TransformerConfig:
    """Attention layer settings, under Megatron-core's names.

    Args:
        hidden_size: Features per token.
        num_attention_heads: Query head count.
        num_layers: Number of layers of the model.
        num_query_groups: Key head count; None is num_attention_heads.
        kv_channels: Features per head; None is hidden_size / num_attention_heads.
        add_bias_linear: Whether linear layers have a bias.
        add_qkv_bias: Whether the query, key and value projection has a bias in any case.
        normalization: "LayerNorm" or "RMSNorm".
        layernorm_epsilon: Added to the variance.
        layernorm_zero_centered_gamma: Whether a norm's scale is 1 + gamma.
        attention_dropout: Probability that an attention weight is dropped.
        softmax_scale: Logit factor; None is 1 / sqrt(kv_channels).
        softmax_type: "vanilla", "off-by-one" or "learnable".
        window_size: Keys to the left and the right that a query attends to; None is unlimited.
        qk_layernorm: Whether queries and keys are normalized per head.
        qk_l2_norm: Whether rotated queries and keys are L2-normalized.
        attention_output_gate: Whether to also project a gate of the queries' size, whose sigmoid multiplies the output.
        rotary_interleaved: Whether adjacent features are rotated together.
        fused_single_qkv_rope: Whether one kernel splits and rotates the projection's result.
        no_rope_freq: Flags per layer: omit rotary embeddings.
        flash_decode: Whether caches hold rotated keys, so that a decoding step is one call.
        qk_clip: Whether to scale the query and key projections down if logits exceed qk_clip_threshold.
        qk_clip_threshold: Largest logit that qk_clip allows.
        qk_clip_alpha: Share of the scaling that the query projection takes.
        recompute_granularity: "selective" recomputes recompute_modules in the backward pass.
        recompute_modules: Parts to recompute; "core_attn" is the attention.
        delay_wgrad_compute: Whether weight gradients are computed in a later call.
        gradient_accumulation_fusion: Whether weight gradients accumulate into main_grad.
        sequence_parallel: Whether sequences are sharded over the tensor-parallel group.
        test_mode: Whether to check that query and key norms are equal on all tensor-parallel ranks.
        fp8: FP8 format, or None.
        fp8_recipe: FP8 recipe name.
        fp4: FP4 format, or None.
        params_dtype: Parameter dtype.
        device: Parameter device.
        init_method: Initializes the weights.
        output_layer_init_method: Initializes the output projection.
    """

    hidden_size: int
    num_attention_heads: int
    num_layers: int = 1
    num_query_groups: int | None = None
    kv_channels: int | None = None
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    normalization: str = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    layernorm_zero_centered_gamma: bool = False
    attention_dropout: float = 0.0
    softmax_scale: float | None = None
    softmax_type: str = "vanilla"
    window_size: tuple[int, int] | None = None
    qk_layernorm: bool = False
    qk_l2_norm: bool = False
    attention_output_gate: bool = False
    rotary_interleaved: bool = False
    fused_single_qkv_rope: bool = False
    no_rope_freq: list[int] | None = None
    flash_decode: bool = False
    qk_clip: bool = False
    qk_clip_threshold: float = 100.0
    qk_clip_alpha: float = 0.5
    recompute_granularity: str | None = None
    recompute_modules: list[str] = field(default_factory=lambda: ["core_attn"])
    delay_wgrad_compute: bool = False
    gradient_accumulation_fusion: bool = False
    sequence_parallel: bool = False
    test_mode: bool = False
    fp8: str | None = None
    fp8_recipe: str | None = None
    fp4: str | None = None
    params_dtype: torch.dtype = torch.float32
    device: Any = "cuda"
    init_method: Callable[[Tensor], Any] = default_init_method
    output_layer_init_method: Callable[[Tensor], Any] = default_init_method

    def __post_init__(self) -> None:
        if self.num_query_groups is None:
            self.num_query_groups = self.num_attention_heads
        if self.kv_channels is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"num_attention_heads={self.num_attention_heads} does not divide hidden_size={self.hidden_size}; "
                    "give kv_channels"
                )
            self.kv_channels = self.hidden_size // self.num_attention_heads


@dataclass
class ModuleSpec:
    """A class or a function that constructs a module, with additional arguments.

    Args:
        module: A class, or a function that constructs a module.
        params: Additional keyword arguments.
        submodules: Passed as the keyword `submodules` unless None.
    """

    module: Any
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inner = {} if self.submodules is None else {"submodules": self.submodules}
        return self.module(*args, **self.params, **inner, **kwargs)


@dataclass(frozen=True)
class ProcessGroups:
    """None: one rank."""

    tp: Any = None
    cp: Any = None
    pp: Any = None


@dataclass(frozen=True)
class PackedSequences:
    """Sequence offsets in a packed ("thd") batch, with the names in Megatron's PackedSeqParams.

    Args:
        cu_seqlens_q: Cumulative query lengths, int32 [b + 1].
        cu_seqlens_kv: Cumulative key lengths, int32 [b + 1].
        max_seqlen_q: Longest query sequence length.
        max_seqlen_kv: Longest key sequence length.
        cu_seqlens_q_padded: Query offsets with padding, int32 [b + 1].
        cu_seqlens_kv_padded: Key offsets with padding, int32 [b + 1].
        qkv_format: Axis order; "thd".
    """

    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    max_seqlen_q: int
    max_seqlen_kv: int
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    qkv_format: str = "thd"


def process_groups(groups: Any) -> Any:
    """Return an attention layer's process groups: the caller's, Megatron's if initialized, or none."""
    if groups is not None:
        for name in ("tp", "cp"):
            if not hasattr(groups, name):
                raise ValueError(f"pg_collection has no {name} group; make one with tp and cp")
        return groups
    if _ProcessGroups is not None and torch.distributed.is_initialized():
        return _ProcessGroups.use_mpu_process_groups(required_pgs=["tp", "cp", "dp"])
    return ProcessGroups()


def count_ranks(group: Any) -> int:
    """Return the size of a group; 1 for None."""
    return 1 if group is None else torch.distributed.get_world_size(group)


def rng_tracker() -> Callable[[], Any] | None:
    """Return Megatron's random state tracker if it is initialized, so that recomputation draws equal numbers."""
    if _get_rng_tracker is None or not _get_rng_tracker().is_initialized():
        return None
    return _get_rng_tracker


def built(spec: Any, *args: Any, **kwargs: Any) -> Any:
    """Construct the module from a spec, a class, or a function."""
    make = spec
    if not callable(spec) and hasattr(spec, "module"):
        make = ModuleSpec(spec.module, dict(spec.params or {}), getattr(spec, "submodules", None))
    if make is None:
        raise ValueError(
            "a submodule is None; give a ModuleSpec, a class or a function that makes it"
        )
    return make(*args, **kwargs)


def setting(config: Any, name: str, default: Any = None) -> Any:
    """Return a setting that Megatron's config lacks in some versions."""
    return getattr(config, name, default)


@dataclass
class SelfAttentionSubmodules:
    """The submodules of a SelfAttention: ModuleSpecs, classes, or functions that construct a module.

    Args:
        linear_qkv: Query, key and value projection.
        core_attention: Scaled dot-product attention.
        linear_proj: Output projection.
        q_layernorm: Query norm, or None.
        k_layernorm: Key norm, or None.
    """

    linear_qkv: Any = None
    core_attention: Any = None
    linear_proj: Any = None
    q_layernorm: Any = None
    k_layernorm: Any = None


@dataclass
class CrossAttentionSubmodules:
    """The submodules of a CrossAttention.

    Args:
        linear_q: Query projection.
        linear_kv: Key and value projection.
        core_attention: Scaled dot-product attention.
        linear_proj: Output projection.
    """

    linear_q: Any = None
    linear_kv: Any = None
    core_attention: Any = None
    linear_proj: Any = None
