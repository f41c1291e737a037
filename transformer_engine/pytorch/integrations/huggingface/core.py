"""out [b, q, h, d_v] = softmax(softcap(scale q k^T), masked) v for q, k, v [b, h, s, d], transformers' layout.

A layer has one DotProductAttention for each call kind, because heads, sizes, scale and dropout are constructor
arguments. These modules have no parameters and are not children of the layer, so that its checkpoints do not change.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from ....common import env
from ...attention import DotProductAttention
from ...attention.dot_product_attention.fp8_recipe import attention_recipe
from ...quantization.autocast import current
from ...runtime.tracing import constant_while_tracing
from .masks import Masking

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class CoreSettings:
    """Settings of one DotProductAttention; `causal` is included because it changes unlimited windows."""

    heads: int
    groups: int
    size: int
    size_v: int
    scale: float
    dropout: float = 0.0
    causal: bool = True
    softcap: float = 0.0

    def made(self) -> DotProductAttention:
        """Return a DotProductAttention with these settings."""
        return DotProductAttention(
            self.heads,
            (self.size, self.size_v),
            num_gqa_groups=self.groups,
            attention_dropout=self.dropout,
            qkv_format="bshd",
            attn_mask_type="causal" if self.causal else "no_mask",
            softmax_scale=self.scale,
            softcap=self.softcap,
        )


@dataclass(eq=False)
class Cores:
    """The DotProductAttentions of one layer."""

    _made: dict[CoreSettings, DotProductAttention] = field(default_factory=dict)

    def of(self, kind: CoreSettings) -> DotProductAttention:
        """Return the module with these settings, created at the first call."""
        core = self._made.get(kind)
        if core is None:
            core = self._made[kind] = kind.made()
        return core


class _Traced:
    """Modules as attributes, for compiled functions that call a layer before its first eager call."""


_traced = _Traced()


@constant_while_tracing
def _make_while_tracing(name: str, text: str) -> bool:
    if not hasattr(_traced, name):
        numbers = [float.fromhex(part) for part in text.split()]
        heads, groups, size, size_v = (int(number) for number in numbers[:4])
        scale, dropout, causal, softcap = numbers[4:]
        settings = CoreSettings(heads, groups, size, size_v, scale, dropout, bool(causal), softcap)
        setattr(_traced, name, settings.made())
    return True


def find_core(module: torch.nn.Module, kind: CoreSettings) -> DotProductAttention:
    """Return the layer's DotProductAttention with these settings; while tracing, it is a constant.

    Compiled layers share one unless their attention is FP8, which has a state: a graph that reads an attribute of its
    layer's identity is compiled again for every layer, and fails beyond torch's recompile limit.
    """
    if not torch.compiler.is_compiling():
        cores = module.__dict__.get("_te_cores")
        if cores is None:
            cores = module.__dict__["_te_cores"] = Cores()
        return cores.of(kind)
    text = " ".join([float(getattr(kind, part.name)).hex() for part in fields(kind)])
    state = current()
    has_scales = state.enabled and attention_recipe(state.recipe) is not None
    name = f"of_{id(module) if has_scales else 'all'}_{text.replace('.', '_')}"
    _make_while_tracing(name, text)
    return getattr(_traced, name)


def attend(core: DotProductAttention, q: Tensor, k: Tensor, v: Tensor, masking: Masking) -> Tensor:
    """Return out [b, q, h, d_v] for q, k, v [b, h, s, d] under a masking."""
    if masking.keys is not None:
        begin, end = masking.keys
        k, v = k[:, :, begin:end], v[:, :, begin:end]
    batch, _, queries, _ = q.shape
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if not masking.packed:
        out = core(
            q, k, v, attn_mask_type=masking.name, window_size=masking.window, **masking.arguments
        )
    else:
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        out = core(
            q,
            k,
            v,
            qkv_format="thd",
            attn_mask_type=masking.name,
            window_size=masking.window,
            **masking.arguments,
        )
    return out.view(batch, queries, core.num_attention_heads, -1)


def cast_to_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v in the dtype of an active torch.autocast, to which torch casts them for its own attention."""
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


logger = logging.getLogger(__name__)

_counts = {"te_hits": 0, "fallback_mask": 0, "fallback_scale_mismatch": 0, "fallback_input": 0}
_logged_every = env.watch("TE_ATTENTION_LOG_EVERY")


def get_te_attention_stats() -> dict[str, int]:
    """Return a copy of the attention call counters by path."""
    return dict(_counts)


def reset_te_attention_stats() -> None:
    """Reset every counter to 0."""
    for name in _counts:
        _counts[name] = 0


def count(name: str) -> None:
    """Add 1 to a counter; with TE_ATTENTION_LOG_EVERY=n, every n-th call logs all counters."""
    if torch.compiler.is_compiling():
        return
    _counts[name] += 1
    if _logged_every() is not None:
        every = int(env.get("TE_ATTENTION_LOG_EVERY") or 0)
        if every > 0 and sum(_counts.values()) % every == 0:
            logger.info("attentions so far: %s", _counts)
