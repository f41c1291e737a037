"""attn_implementation="transformer_engine": DotProductAttention as a transformers attention function.

    register_te_attention()
    model = AutoModelForCausalLM.from_pretrained(.., attn_implementation="transformer_engine")

This function never falls back to torch: a mask that no mask type describes is passed to DotProductAttention unchanged,
and unsupported options raise an error.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from ....common import optional
from . import masks
from .core import CoreSettings, attend, cast_to_autocast, count, find_core

NAME = "transformer_engine"


def register_te_attention() -> None:
    """Make "transformer_engine" an attn_implementation value in this process; ImportError without transformers."""
    if not optional.installed("transformers"):
        raise ImportError(
            'attn_implementation="transformer_engine" needs transformers 4.53 or later; pip install transformers'
        )
    for module, name in (
        ("transformers.modeling_utils", "AttentionInterface"),
        ("transformers.masking_utils", "AttentionMaskInterface"),
    ):
        reason = optional.failure(module, name)
        if reason is not None:
            raise ImportError(
                f"{reason}; transformers 4.53 or later has it: pip install -U transformers"
            )
    modeling = importlib.import_module("transformers.modeling_utils")
    masking = importlib.import_module("transformers.masking_utils")
    modeling.AttentionInterface.register(NAME, te_attention_forward)
    masking.AttentionMaskInterface.register(NAME, masking.sdpa_mask)


def te_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return (out [b, q, h, d_v], None) for query [b, h, q, d] and key, value [b, groups, kv, d].

    The arguments follow transformers. attention_mask None means causal if is_causal, or otherwise the module, says
    so, and there are several queries. softcap c limits the scaled scores s to c * tanh(s / c) before the mask.
    """
    for name, remedy in (
        ("s_aux", "load the model without attention sinks"),
        ("position_bias", "load the model without a position bias"),
    ):
        if options.get(name) is not None:
            raise NotImplementedError(
                f'{name} is not computed by attn_implementation={NAME!r}; use attn_implementation="eager" or {remedy}'
            )
    q, k, v = cast_to_autocast(query, key, value)
    scale = q.shape[3] ** -0.5 if scaling is None else scaling
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None:
        causal = q.shape[2] > 1 and causal
        masking = masks.maskless_masking(causal, q.shape[2], k.shape[2], sliding_window)
    else:
        masking = masks.mask_masking(attention_mask, q.shape[0]) or masks.as_it_is(attention_mask)
    sizes = q.shape[1], k.shape[1], q.shape[3], v.shape[3]
    core = find_core(module, CoreSettings(*sizes, scale, dropout, masking.causal, softcap or 0.0))
    count("te_hits")
    return attend(core, q, k, v, masking), None
