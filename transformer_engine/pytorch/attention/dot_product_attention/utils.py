"""use_flash, use_fused, use_unfused = get_attention_backend(parameters): the original's view of the choice.

Its families map onto our table as the NVTE_* switches do: "unfused" is the reference, "fused" is torch_sdpa
(16-bit, "F16_arbitrary_seqlen"). "flash" is never reported: it means an installed flash-attn, which no
backend here calls.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from packaging.version import Version

from ....common import env
from ...device import canonical_device
from .backends import reference, torch_sdpa
from .choose import TABLE, logger
from .mask import check_set_window_size, cumulative, lengths_of_mask, resolve
from .request import AttentionRequest, Switches


class NVTE_Fused_Attn_Backend(enum.IntEnum):
    """Kinds of fused attention, by the numbers that NVTE_FUSED_ATTN_BACKEND takes."""

    NVTE_No_Backend = -1
    NVTE_F16_max512_seqlen = 0
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


@dataclass(eq=True)
class AttentionParams:
    """What the original's selection looks at; see AttentionRequest for ours."""

    qkv_type: type = torch.Tensor
    qkv_dtype: torch.dtype = torch.bfloat16
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
    core_attention_bias_shape: str | None = None
    core_attention_bias_requires_grad: bool = False
    pad_between_seqs: bool = False
    attention_dropout: float = 0.0
    context_parallel: bool = False
    cp_comm_type: str = "p2p"
    cp_size: int = 1
    deterministic: bool = False
    is_training: bool = True
    fp8: bool = False
    fp8_meta: dict[str, Any] | None = field(default=None, compare=False)
    fp8_output: bool = False
    inference_params: Any = None
    softmax_type: str = "vanilla"
    return_max_logit: bool = False
    cuda_graph: bool = False
    num_splits: int = 1
    checkpoint_core_attention: bool = False
    has_score_mod: bool = False
    has_score_mod_bprop: bool = False

    def __post_init__(self) -> None:
        self.window_size = check_set_window_size(self.attn_mask_type, self.window_size)

    def request(self) -> AttentionRequest:
        """The same attention as our backends are asked for it."""
        q_format, kv_format = _formats(self.qkv_layout)
        return AttentionRequest(
            dtype=self.qkv_dtype,
            device_type=canonical_device("cuda").type,
            batch=self.batch_size,
            heads=self.num_heads,
            groups=self.num_gqa_groups,
            seqlen_q=self.max_seqlen_q,
            seqlen_kv=self.max_seqlen_kv,
            head_dim_qk=self.head_dim_qk,
            head_dim_v=self.head_dim_v,
            q_format=q_format,
            kv_format=kv_format,
            mask=resolve(self.attn_mask_type, self.window_size, self.bottom_right_diagonal),
            scale=self.head_dim_qk**-0.5,
            bias=self.core_attention_bias_type,
            softmax=self.softmax_type,
            dropout=self.attention_dropout,
            padded_between=self.pad_between_seqs,
            max_logit=self.return_max_logit,
            needs_gradient=self.is_training,
            deterministic=self.deterministic,
            switches=Switches.from_environment(),
        )


def _formats(qkv_layout: str) -> tuple[str, str]:
    """("thd", "bshd") of "thd_2bshd", ("bshd", "bshd") of "bs3hd"."""
    parts = [
        "".join(c for c in part if c.isalpha()) for part in qkv_layout.removeprefix("paged_kv_").split("_")
    ]
    return parts[0], parts[-1]


def get_attention_backend(
    attention_params: AttentionParams,
) -> tuple[bool, Version | None, bool, NVTE_Fused_Attn_Backend | None, bool, list[bool]]:
    """(use_flash, its version, use_fused, its kind, use_unfused, [flash, fused, unfused] that could be used).

    At most one "use" is true. None of them is when the attention needs what no backend has: FP8, context
    parallelism over several ranks, a score_mod or a paged cache.
    """
    params = attention_params
    missing = params.fp8 or params.context_parallel or params.has_score_mod
    missing = missing or (params.inference_params is not None and params.inference_params.is_paged)
    request = params.request()
    fused = not missing and request.switches.fused and torch_sdpa.refuses(request) is None
    fused = fused and env.get("NVTE_FUSED_ATTN_BACKEND") in (None, "1")
    unfused = not missing and reference.refuses(request) is None
    for verdict in TABLE.explain(request):
        logger.debug("%s: %s", verdict.backend, verdict.refusal or "selected")
    kind = NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen if fused else None
    return False, None, fused, kind, unfused and not fused, [False, fused, unfused]


def get_cu_seqlens(mask: torch.Tensor) -> torch.Tensor:
    """cu_seqlens [b + 1] int32 of a padding mask [b, 1, 1, s], True = padding."""
    return cumulative(lengths_of_mask(mask))


class AttentionLogging:
    """The log of attention choices: NVTE_DEBUG=1 turns it on, NVTE_DEBUG_LEVEL=2 adds every refusal."""

    _log_level = logging.WARNING
    _formatter = logging.Formatter("[%(levelname)-8s | %(name)-19s]: %(message)s")
    _stream_handler = logging.StreamHandler()
    fa_logger = logger
    _is_logging_setup = False

    @staticmethod
    def setup_logging() -> None:
        """Set level and handler of the log from the environment."""
        level = env.get("NVTE_DEBUG_LEVEL") if env.get("NVTE_DEBUG") else 0
        chosen = {0: logging.WARNING, 1: logging.INFO}.get(int(level or 0), logging.DEBUG)
        AttentionLogging._log_level = chosen
        AttentionLogging._stream_handler.setFormatter(AttentionLogging._formatter)
        logger.setLevel(chosen)
        if AttentionLogging._stream_handler not in logger.handlers:
            logger.addHandler(AttentionLogging._stream_handler)
        AttentionLogging._is_logging_setup = True


class FlashAttentionUtils:
    """What callers ask about flash-attn: no backend here calls it, so no version counts as installed."""

    is_installed = False
    version: Version | None = None
    version_required = Version("2.1.1")
    version_required_blackwell = Version("2.7.3")
    max_version = Version("2.8.3")
    v2_plus = False
    v2_1_plus = False
    v2_3_plus = False
    v2_4_plus = False
    v2_4_1_plus = False
    v2_5_7_plus = False
    v2_6_0_plus = False
    v2_7_0_plus = False
    v3_is_installed = False
    fa3_version: Version | None = None
    use_v3 = False
    v4_is_installed = False
    fa4_version: Version | None = None

    @staticmethod
    def is_version_supported(version: Version) -> bool:
        """Is version one that an installed flash-attn would be used at?"""
        return FlashAttentionUtils.version_required <= version <= FlashAttentionUtils.max_version
