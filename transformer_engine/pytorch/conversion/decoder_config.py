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
    """angles = position * frequency: base^(-2i/d), scaled by the rule of the family.

    factor       divisor of positions; 1: none
    low, high    "llama3": frequencies with fewer than `low` turns in `trained` positions are divided by factor, those
                 with more than `high` are kept, and the others are blended; None: all are divided
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
    positions      the maximum number of positions of the model
    norm, epsilon, zero_centered   of all norms; zero_centered: they multiply by 1 + weight
    activation     of the feed-forward layer
    qkv_bias, output_bias, mlp_bias   products with a bias
    rotary         rotation of queries and keys; None: positions have an embedding instead
    windows        number of tokens that a layer attends to, including its own; None: all earlier ones
    qk_norm        normalize queries and keys by heads, before their rotation
    tied           the head uses the embedding's weight
    embedding_scale   factor of embedded tokens, rounded to the parameters' dtype
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
        """Return the config that `as_dict` wrote; the ValueError for another content names the source."""
        known = {field.name for field in fields(DecoderConfig)}
        strange = sorted(set(content) ^ known)
        if strange:
            raise ValueError(
                f"{source} describes no decoder of this release (its {strange[0]!r}); convert it again"
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
