"""out [b, q, h, d_v] = softmax(scale q k^T, masked) v of q, k, v [b, h, s, d], the layout of transformers' attentions.

One DotProductAttention for each kind of call of a layer: heads, sizes, scale and dropout are its constructor's. They
are no children of the layer, whose checkpoints stay those of the stock model, and have no parameters.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ....common import env
from ...attention import DotProductAttention
from ...runtime.tracing import constant_while_tracing
from .masks import Masking

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class CoreSettings:
    """What calls of one DotProductAttention have in common; causal: a window without a limit is another one then."""

    heads: int
    groups: int
    size: int
    size_v: int
    scale: float
    dropout: float = 0.0
    causal: bool = True

    def made(self) -> DotProductAttention:
        """A DotProductAttention of that kind."""
        return DotProductAttention(
            self.heads,
            (self.size, self.size_v),
            num_gqa_groups=self.groups,
            attention_dropout=self.dropout,
            qkv_format="bshd",
            attn_mask_type="causal" if self.causal else "no_mask",
            softmax_scale=self.scale,
        )


class Cores:
    """The DotProductAttentions of one layer."""

    def __init__(self) -> None:
        self._made: dict[CoreSettings, DotProductAttention] = {}

    def of(self, kind: CoreSettings) -> DotProductAttention:
        """That of a kind, made at its first call."""
        core = self._made.get(kind)
        if core is None:
            core = self._made[kind] = kind.made()
        return core


class _Traced:
    """Attributes: what compiled functions call that met a layer before its first eager call."""


_traced = _Traced()


@constant_while_tracing
def _make_while_tracing(name: str, text: str) -> bool:
    if not hasattr(_traced, name):
        numbers = [float.fromhex(part) for part in text.split()]
        setattr(
            _traced,
            name,
            CoreSettings(*[int(n) for n in numbers[:4]], *numbers[4:6], causal=bool(numbers[6])).made(),
        )
    return True


def core_of(module: torch.nn.Module, kind: CoreSettings) -> DotProductAttention:
    """The module's DotProductAttention of a kind; a compiler has it made by a call that it takes for a constant."""
    if not torch.compiler.is_compiling():
        cores = module.__dict__.get("_te_cores")
        if cores is None:
            cores = module.__dict__["_te_cores"] = Cores()
        return cores.of(kind)
    text = " ".join([float(getattr(kind, part.name)).hex() for part in fields(kind)])
    name = f"of_{id(module)}_{text.replace('.', '_')}"
    _make_while_tracing(name, text)
    return getattr(_traced, name)


def attend(core: DotProductAttention, q: Tensor, k: Tensor, v: Tensor, masking: Masking) -> Tensor:
    """out [b, q, h, d_v] of q, k, v [b, h, s, d] under a masking."""
    if masking.keys is not None:
        begin, end = masking.keys
        k, v = k[:, :, begin:end], v[:, :, begin:end]
    batch, _, queries, _ = q.shape
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if not masking.packed:
        out = core(q, k, v, attn_mask_type=masking.name, window_size=masking.window, **masking.arguments)
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


def in_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in torch.autocast's dtype where one is on, as torch casts them for its own attention."""
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


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
