"""use_flash, use_fused, use_unfused = get_attention_backend(parameters): the choice in NVIDIA's terms.

"flash" is an installed flash-attn package, "unfused" the reference backend, and "fused" (16-bit,
"F16_arbitrary_seqlen") every other backend, PyTorch's FlashAttention included.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from packaging.version import Version

from ....common import env
from ....common.hardware import NO_GPU
from ...compat.argument_orders import accepts_older_orders
from ...compat.combined_quantization import combine_and_quantize as combine_and_quantize
from ...functions.attention import fp8
from ...primitives.attention.backends import flash2, flash3, flash4
from ...primitives.attention.call import AttentionCall, Switches
from ...primitives.attention.choose import TABLE, logger
from ...primitives.attention.layout import get_qkv_layout as get_qkv_layout
from ...primitives.attention.mask import check_set_window_size as check_set_window_size
from ...primitives.attention.mask import resolve
from ...primitives.attention.packed import cumulative, lengths_of_mask, sequence_lengths
from ...runtime.determinism import RAISES, torch_determinism
from ...runtime.device import canonical_device, current_hardware
from .fp8_recipe import scaling_kind
from .score_mod import GraphScoreMod


class NVTE_Fused_Attn_Backend(enum.IntEnum):
    """Fused attention kinds, by the numbers that NVTE_FUSED_ATTN_BACKEND takes."""

    NVTE_No_Backend = -1
    NVTE_F16_max512_seqlen = 0
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


# AttentionParams fields that are AttentionCall fields, by both names.
_SAME = {
    "qkv_dtype": "dtype",
    "batch_size": "batch",
    "num_heads": "heads",
    "num_gqa_groups": "groups",
    "max_seqlen_q": "seqlen_q",
    "max_seqlen_kv": "seqlen_kv",
    "head_dim_qk": "head_dim_qk",
    "head_dim_v": "head_dim_v",
    "core_attention_bias_type": "bias",
    "softmax_type": "softmax",
    "softcap": "softcap",
    "attention_dropout": "dropout",
    "pad_between_seqs": "padded_between",
    "return_max_logit": "max_logit",
    "deterministic": "deterministic",
    "num_splits": "num_splits",
}


@dataclass
class AttentionParams:
    """The settings that NVIDIA's selection reads; `request` converts them to an AttentionCall.

    Attributes:
        core_attention_bias_shape: Bias shape, or its pattern such as "1hss"; by default [1, h, s, s].
    """

    qkv_type: type = torch.Tensor
    qkv_dtype: torch.dtype = torch.bfloat16
    nominal_dtype: torch.dtype = torch.bfloat16
    qkv_layout: str = "sbh3d"
    batch_size: int = 1
    num_heads: int = 16
    num_gqa_groups: int = 16
    max_seqlen_q: int = 128
    max_seqlen_kv: int = 128
    head_dim_qk: int = 64
    head_dim_v: int = 64
    attn_mask_type: str = "no_mask"
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool = True
    alibi_slopes_shape: torch.Size | list[int] | None = None
    core_attention_bias_type: str = "no_bias"
    core_attention_bias_shape: tuple[int, ...] | str | None = None
    core_attention_bias_requires_grad: bool = True
    pad_between_seqs: bool = False
    attention_dropout: float = 0.0
    context_parallel: bool = False
    cp_comm_type: str = "p2p"
    cp_size: int = 1
    cp_size_a2a: int = 1
    deterministic: bool = False
    is_training: bool = True
    fp8: bool = False
    fp8_meta: dict[str, Any] | None = None
    fp8_output: bool = False
    inference_params: Any = None
    num_tokens_q: int = 0
    num_tokens_kv: int = 0
    softmax_type: str = "vanilla"
    softmax_scale: float = 1.0
    return_max_logit: bool = False
    cuda_graph: bool = False
    num_splits: int = 1
    checkpoint_core_attention: bool = False
    softcap: float = 0.0
    has_score_mod: bool = False
    has_score_mod_bprop: bool = False

    def __post_init__(self) -> None:
        self.window_size = check_set_window_size(self.attn_mask_type, self.window_size)

    def __eq__(self, other: object) -> bool:
        """Return whether all fields are equal; for fp8_meta, whose states change at every step, only its recipe."""
        if not isinstance(other, AttentionParams):
            return NotImplemented
        names = [f.name for f in fields(self) if f.name != "fp8_meta"]
        recipe, other_recipe = ((p.fp8_meta or {}).get("recipe") for p in (self, other))
        return recipe == other_recipe and all(
            getattr(self, name) == getattr(other, name) for name in names
        )

    @classmethod
    def of(cls, call: AttentionCall, fp8: bool = False) -> AttentionParams:
        """Return a call in NVIDIA's terms."""
        kv_format = call.kv_format
        return cls(
            **{theirs: getattr(call, ours) for theirs, ours in _SAME.items()},
            nominal_dtype=call.dtype,
            softmax_scale=call.scale,
            qkv_layout=f"{'paged_kv_' * bool(call.page_size)}{call.q_format}_{kv_format}_{kv_format}",
            attn_mask_type=call.mask.name,
            window_size=call.mask.window,
            bottom_right_diagonal=call.mask.bottom_right,
            alibi_slopes_shape=None if call.slopes_shape is None else list(call.slopes_shape),
            core_attention_bias_shape=call.bias_shape,
            core_attention_bias_requires_grad=call.bias_gradient,
            is_training=call.needs_gradient,
            fp8=fp8,
            has_score_mod=call.score_mod is not None,
        )

    def request(self) -> AttentionCall:
        """Return the same attention as an AttentionCall."""
        # ("thd", "bshd") for "thd_2bshd", ("bshd", "bshd") for "bs3hd".
        parts = [
            "".join(c for c in part if c.isalpha())
            for part in self.qkv_layout.removeprefix("paged_kv_").split("_")
        ]
        q_format, kv_format = parts[0], parts[-1]
        device = canonical_device("cuda")
        cache = self.inference_params
        bias_shape = self._bias_shape()
        return AttentionCall(
            **{ours: getattr(self, theirs) for theirs, ours in _SAME.items()},
            device_type=device.type,
            hardware=current_hardware() if device.type == "cuda" else NO_GPU,
            torch_deterministic=torch_determinism() == RAISES,
            switches=Switches.from_environment(),
            q_format=q_format,
            kv_format=kv_format,
            mask=resolve(self.attn_mask_type, self.window_size, self.bottom_right_diagonal),
            scale=self.head_dim_qk**-0.5 if self.softmax_scale == 1.0 else self.softmax_scale,
            needs_gradient=self.is_training and cache is None,
            bias_shape=bias_shape,
            bias_gradient=bias_shape is not None and self.core_attention_bias_requires_grad,
            slopes_shape=None
            if self.alibi_slopes_shape is None
            else tuple(self.alibi_slopes_shape),
            slopes_given=self.alibi_slopes_shape is not None,
            page_size=cache.page_size if cache is not None and cache.is_paged else 0,
            cached=cache is not None,
            score_mod=GraphScoreMod(
                _leave_unchanged, {}, _leave_unchanged if self.has_score_mod_bprop else None, {}
            )
            if self.has_score_mod or self.has_score_mod_bprop
            else None,
        )

    def _bias_shape(self) -> tuple[int, ...] | None:
        """Bias shape; None for a bias type without a tensor."""
        if self.core_attention_bias_type not in ("pre_scale_bias", "post_scale_bias"):
            return None
        layout = self.core_attention_bias_shape or "1hss"
        extents = (self.batch_size, self.num_heads, self.max_seqlen_q, self.max_seqlen_kv)
        if isinstance(layout, str):
            # A pattern such as "1hss", "b1ss" or "111s".
            size_by_axis = [
                {"1": 1, axis: extent} for axis, extent in zip("bhss", extents, strict=True)
            ]
            if len(layout) != 4 or any(
                axis not in size for axis, size in zip(layout, size_by_axis, strict=True)
            ):
                raise ValueError(
                    f"core_attention_bias_shape={layout!r}; write b, h, s, s for the axes, and 1 for broadcast axes"
                )
            return tuple(size[axis] for axis, size in zip(layout, size_by_axis, strict=True))
        shape = tuple(layout)
        if len(shape) != 4 or any(
            n not in (1, extent) for n, extent in zip(shape, extents, strict=True)
        ):
            raise ValueError(
                f"core_attention_bias_shape={shape} does not broadcast to {extents}; give these sizes, or 1"
            )
        return shape


_ADDED = (
    "nominal_dtype",
    "cp_size_a2a",
    "num_tokens_q",
    "num_tokens_kv",
    "softmax_scale",
    "softcap",
)
AttentionParams.__init__ = accepts_older_orders(
    v2_19=_ADDED, v2_11=(*_ADDED, "bottom_right_diagonal")
)(AttentionParams.__init__)


def _leave_unchanged(graph: Any, score: torch.Tensor, tensors: Any) -> torch.Tensor:
    """Return the scores, or their gradient, unchanged: a placeholder for a score_mod and its gradient."""
    return score


def get_attention_backend(
    attention_params: AttentionParams,
) -> tuple[bool, Version | None, bool, NVTE_Fused_Attn_Backend | None, bool, list[bool]]:
    """Return (use_flash, its version, use_fused, its kind, use_unfused, [flash, fused, unfused] that are supported).

    At most one "use" is true. All are false if no backend supports the attention, or if the NVTE_*
    switches disable all backends. Context-parallel ranks use the backends of their parts.
    """
    params = attention_params
    request = params.request()
    if params.fp8:
        # cuDNN's kernels are "fused", emulation is "unfused".
        recipe = (params.fp8_meta or {}).get("recipe")
        request = replace(request, fp8="delayed" if recipe is None else scaling_kind(recipe))
        verdicts = fp8.FORWARD.explain(request)
        fused = any(verdict.chosen and verdict.backend == "cudnn" for verdict in verdicts)
        emulated = request.switches.unfused
        kind = NVTE_Fused_Attn_Backend.NVTE_FP8 if fused else None
        return False, None, fused, kind, emulated and not fused, [False, fused, emulated]
    verdicts = TABLE.explain(request)
    for verdict in verdicts:
        logger.debug("%s: %s", verdict.backend, verdict.reason or "selected")
    supported = [b.name for b in TABLE.candidates(request) if b.rejection_reason(request) is None]
    versions = {name: find() for name, find in FLASH.items()}
    flash = [name for name in supported if name in versions]
    fused = [name for name in supported if name not in versions and name != "reference"]
    if env.get("NVTE_FUSED_ATTN_BACKEND") not in (None, "1") or not request.switches.fused:
        fused = []
    unfused = "reference" in supported
    backend_name = next((name for name in supported if name in (*flash, *fused, "reference")), None)
    return (
        backend_name in flash,
        versions[flash[0]] if backend_name in flash else None,
        backend_name in fused,
        NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen if backend_name in fused else None,
        backend_name == "reference",
        [bool(flash), bool(fused), unfused],
    )


def fused_attention_support(
    attention_params: AttentionParams,
) -> tuple[NVTE_Fused_Attn_Backend, str]:
    """Return the fused attention kind that supports a call and "", or No_Backend and the reasons.

    Args:
        attention_params: The call.
    """
    supported = get_attention_backend(attention_params)[-1][1]
    if supported and attention_params.fp8:
        return NVTE_Fused_Attn_Backend.NVTE_FP8, ""
    if supported:
        return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""
    request = attention_params.request()
    if attention_params.fp8:
        recipe = (attention_params.fp8_meta or {}).get("recipe")
        request = replace(request, fp8="delayed" if recipe is None else scaling_kind(recipe))
        verdicts = [v for v in fp8.FORWARD.explain(request) if v.backend == "cudnn"]
    else:
        verdicts = [v for v in TABLE.explain(request) if v.backend not in (*FLASH, "reference")]
    words = [f"{verdict.backend}: {verdict.reason}" for verdict in verdicts if verdict.reason]
    kind = env.get("NVTE_FUSED_ATTN_BACKEND")
    if kind not in (None, "1"):
        words.insert(0, f"NVTE_FUSED_ATTN_BACKEND={kind} requests another kind")
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend, "; ".join(words)


# Functions that return the version of each installed flash-attn package.
FLASH: dict[str, Callable[[], Version | None]] = {
    "flash4": lambda: _version(flash4.VERSION),
    "flash3": lambda: Version("3.0.0b1") if flash3.INSTALLED else None,
    "flash2": lambda: _version(flash2.VERSION),
}


def _version(text: str | None) -> Version | None:
    return None if text is None else Version(text)


def _get_supported_versions(version_min: Any, version_max: Any) -> str:
    """Return a version range in words, such as ">= 2.1.1, <= 2.8.3"."""
    return f">= {version_min}, <= {version_max}"


def get_cu_seqlens(mask: torch.Tensor) -> torch.Tensor:
    """Return cu_seqlens [b + 1] int32 for a padding mask [b, 1, 1, s], True = padding."""
    return cumulative(lengths_of_mask(mask))


def get_full_cu_seqlens(
    batch_size: int, max_seqlen: int, device: torch.device | str
) -> torch.Tensor:
    """Return cu_seqlens int32 [batch_size + 1] for sequences that all have max_seqlen tokens."""
    return torch.arange(batch_size + 1, dtype=torch.int32, device=device) * max_seqlen


def get_thd_padding_mask(
    num_tokens: int, cu_seqlens: torch.Tensor, cu_seqlens_padded: torch.Tensor
) -> torch.Tensor:
    """Return which packed tokens belong to no sequence, bool [num_tokens], True = padding.

    Args:
        num_tokens: Tokens in the packed tensor.
        cu_seqlens: Cumulative real token counts [b + 1].
        cu_seqlens_padded: Padded sequence bounds [b + 1].
    """
    token = torch.arange(num_tokens, device=cu_seqlens.device)
    starts = cu_seqlens_padded.long()
    sequence = torch.searchsorted(starts, token, right=True) - 1
    after_last = sequence >= starts.shape[0] - 1
    sequence = sequence.clamp(0, starts.shape[0] - 2)
    return after_last | (token - starts[sequence] >= sequence_lengths(cu_seqlens)[sequence])


class AttentionLogging:
    """Attention choice log: NVTE_DEBUG=1 enables it, NVTE_DEBUG_LEVEL=2 adds the reasons of all backends."""

    _log_level = logging.WARNING
    _formatter = logging.Formatter("[%(levelname)-8s | %(name)-19s]: %(message)s")
    _stream_handler = logging.StreamHandler()
    fa_logger = logger
    _is_logging_setup = False

    @staticmethod
    def setup_logging() -> None:
        """Set level and handler of the log from the environment."""
        level = env.get("NVTE_DEBUG_LEVEL") if env.get("NVTE_DEBUG") else 0
        log_level = {0: logging.WARNING, 1: logging.INFO}.get(int(level or 0), logging.DEBUG)
        AttentionLogging._log_level = log_level
        AttentionLogging._stream_handler.setFormatter(AttentionLogging._formatter)
        logger.setLevel(log_level)
        if AttentionLogging._stream_handler not in logger.handlers:
            logger.addHandler(AttentionLogging._stream_handler)
        AttentionLogging._is_logging_setup = True


class FlashAttentionUtils:
    """Installed versions of flash-attn packages 2, 3 and 4, under NVIDIA's names."""

    version_required = Version("2.1.1")
    version_required_blackwell = Version("2.7.3")
    max_version = Version("2.8.3")
    version = _version(flash2.VERSION)
    is_installed = version is not None and flash2.is_supported(str(version))
    v2_plus = version is not None and version >= Version("2")
    v2_1_plus = version is not None and version >= Version("2.1")
    v2_3_plus = version is not None and version >= Version("2.3")
    v2_4_plus = version is not None and version >= Version("2.4")
    v2_4_1_plus = version is not None and version >= Version("2.4.1")
    v2_5_7_plus = version is not None and version >= Version("2.5.7")
    v2_6_0_plus = version is not None and version >= Version("2.6.0")
    v2_7_0_plus = version is not None and version >= Version("2.7.0")
    v3_is_installed = flash3.INSTALLED
    fa3_version = FLASH["flash3"]()
    use_v3 = flash3.INSTALLED
    v4_is_installed = flash4.VERSION is not None
    fa4_version = _version(flash4.VERSION)

    @staticmethod
    def is_version_supported(
        version: Version | str | None, minimum: Version | str | None = None
    ) -> bool:
        """Return whether a version is at least the minimum.

        Args:
            version: flash-attn version; None is never supported.
            minimum: None means the range for flash-attn 2: from 2.1.1 up to, not including, 2.8.4;
                local versions such as 2.8.3+cu128 count as their release.
        """
        if version is None:
            return False
        release = Version(str(version))
        if minimum is not None:
            return release >= Version(str(minimum))
        return flash2.is_supported(str(release))
