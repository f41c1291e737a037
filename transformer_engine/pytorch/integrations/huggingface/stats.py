"""How many attentions went where: counters of this process, under the names of NeMo Automodel's.

te_hits                   computed by DotProductAttention
fallback_mask             left to torch: no mask type describes the mask, or it could not be read
fallback_scale_mismatch   left to torch: the call's scale is not the one that the layer was made for
fallback_input            left to torch: shapes or dtypes that DotProductAttention does not take

A compiled function counts nothing: a number that changes would compile it again.
"""

from __future__ import annotations

import logging

import torch

from ....common import env

logger = logging.getLogger(__name__)

_counts = {"te_hits": 0, "fallback_mask": 0, "fallback_scale_mismatch": 0, "fallback_input": 0}
_logged_every = env.watch("TE_ATTENTION_LOG_EVERY")


def get_te_attention_stats() -> dict[str, int]:
    """A copy of the counters."""
    return dict(_counts)


def reset_te_attention_stats() -> None:
    """Every counter is 0 again."""
    for name in _counts:
        _counts[name] = 0


def count(name: str) -> None:
    """One more attention of that name; with TE_ATTENTION_LOG_EVERY=n each n-th call logs all counters."""
    if torch.compiler.is_compiling():
        return
    _counts[name] += 1
    if _logged_every() is not None:
        every = int(env.get("TE_ATTENTION_LOG_EVERY") or 0)
        if every > 0 and sum(_counts.values()) % every == 0:
            logger.info("attentions so far: %s", _counts)
