"""DecoderConfig: the configuration of a causal decoder, to which the configs of all families are converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ...common.checks import one_of, positive, whole

ACTIVATIONS = ("swiglu", "geglu", "gelu", "relu")
NORMS = ("RMSNorm", "LayerNorm")


@dataclass(frozen=True)
class RotaryConfig:
    """angles = position * frequency: base^(-2i/d), stretched as the family says.

    factor       positions are divided by it; 1: not at all
    low, high    "llama3": frequencies with fewer than `low` turns in `trained` positions are divided by factor, those
                 with more than `high` are kept, and what lies between is blended; None: all are divided
    """

    base: float = 10000.0
    factor: float = 1.0
    low: float | None = None
    high: float | None = None
    trained: int | None = None


@dataclass(frozen=True)
class DecoderConfig:
    """A stack of TransformerLayer between an embedding and a head.

    vocabulary, hidden, feed_forward, layers, heads, groups, head_size   extents; groups: of keys and values
    positions      the most that the model was made for
    norm, epsilon, zero_centered   of all norms; zero_centered: they multiply by 1 + weight
    activation     of the feed-forward layer
    qkv_bias, output_bias, mlp_bias   which products add one
    rotary         how queries and keys turn; None: positions have an embedding instead
    windows        how many tokens a layer attends to, its own included; None: all before it
    qk_norm        are queries and keys normalized by heads, before they turn?
    tied           is the head the embedding's weight?
    embedding_scale   what embedded tokens are multiplied by, as the parameters' dtype rounds it
    """

    vocabulary: int
    hidden: int
    feed_forward: int
    layers: int
    heads: int
    groups: int
    head_size: int
    positions: int
    norm: str = "RMSNorm"
    epsilon: float = 1e-6
    zero_centered: bool = False
    activation: str = "swiglu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    rotary: RotaryConfig | None = None
    windows: tuple[int | None, ...] = ()
    qk_norm: bool = False
    tied: bool = False
    embedding_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("vocabulary", "hidden", "feed_forward", "layers", "heads", "groups", "head_size"):
            whole(name, getattr(self, name))
        whole("positions", self.positions)
        one_of("norm", self.norm, NORMS)
        one_of("activation", self.activation, ACTIVATIONS)
        positive("epsilon", self.epsilon)
        positive("embedding_scale", self.embedding_scale)
        if self.heads % self.groups:
            raise ValueError(
                f"groups={self.groups} does not divide heads={self.heads}; every group serves equally many heads"
            )
        if len(self.windows) != self.layers:
            raise ValueError(f"windows names {len(self.windows)} of {self.layers} layers; give one for each")
        for window in self.windows:
            if window is not None:
                whole("window", window)

    @staticmethod
    def read(content: Mapping[str, Any], source: str) -> DecoderConfig:
        """The config that `as_dict` wrote; ValueError, naming source, where it is none."""
        known = {field.name for field in fields(DecoderConfig)}
        strange = sorted(set(content) ^ known)
        if strange:
            raise ValueError(
                f"{source} describes no decoder of this release (its {strange[0]!r}); convert it anew"
            )
        rotary = content["rotary"]
        try:
            return DecoderConfig(
                **{
                    **content,
                    "rotary": None if rotary is None else RotaryConfig(**rotary),
                    "windows": tuple(content["windows"]),
                }
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"{source} describes no decoder: {error}") from None
