"""Head counts, head size, and the order of the heads in a fused QKV projection."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..functions.split_heads import split_heads
from ..runtime.warn_once import warn_once


@dataclass(frozen=True)
class Heads:
    """Heads on one tensor-parallel rank, and their order in a fused weight.

    Shapes below use h = queries, g = groups and d = size.

    Attributes:
        queries: Query head count.
        groups: Key and value head count.
        size: Features per head.
        interleaved: Whether the features are ordered by group (the group's queries, its key, its value). Otherwise all
            queries come first, then all keys, then all values.
    """

    queries: int
    groups: int
    size: int
    interleaved: bool

    def split_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [.., h, d], k [.., g, d], v [.., g, d] from x [.., (h + 2 g) d]."""
        return split_heads(x, self.queries, self.groups, self.size, self.interleaved)

    def split_kv(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return k [.., g, d], v [.., g, d] from x [.., 2 g d]."""
        if self.interleaved:
            k, v = x.unflatten(-1, (self.groups, 2 * self.size)).chunk(2, dim=-1)
        else:
            k, v = x.unflatten(-1, (2 * self.groups, self.size)).chunk(2, dim=-2)
        return k, v


def head_size(hidden_size: int, num_heads: int, kv_channels: int | None) -> int:
    """Return the features per head: `kv_channels`, or by default hidden_size // heads.

    If num_heads does not divide hidden_size, the projections have fewer than hidden_size features, as in NVIDIA's
    Transformer Engine, and a warning is issued once.
    """
    if kv_channels is not None:
        return kv_channels
    if hidden_size < num_heads:
        raise ValueError(
            f"num_attention_heads={num_heads} is above hidden_size={hidden_size}: each head would have no features; "
            "set kv_channels"
        )
    size = hidden_size // num_heads
    if size * num_heads != hidden_size:
        warn_once(
            f"{num_heads} heads of hidden_size={hidden_size}",
            f"num_attention_heads={num_heads} does not divide hidden_size={hidden_size}: each head has {size} "
            f"features, {size * num_heads} in total; choose a divisor of {hidden_size}, or state kv_channels={size}",
            stacklevel=4,  # the caller of the module's constructor
        )
    return size
