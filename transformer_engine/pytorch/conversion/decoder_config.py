"""DecoderConfig: the configuration of a causal decoder, to which the configs of all families are converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ...common.checks import check_option, positive, whole
from ..constants import ActivationName, NormalizationName

ACTIVATIONS = ("swiglu", "geglu", "gelu", "relu")
NORMS = ("RMSNorm", "LayerNorm")


@dataclass(frozen=True)
class RotaryConfig:
    """Angles = position * frequency, with frequencies base^(-2i/d), stretched as the model family defines.

    Args:
        base: Frequency base.
        factor: Divides positions; 1 changes nothing.
        low: "llama3": frequencies with fewer turns in `trained` positions are divided by factor. None divides all.
        high: "llama3": frequencies with more turns are kept; those between low and high are blended.
        trained: Position count that the model was trained on.
    """

    base: float = 10000.0
    factor: float = 1.0
    low: float | None = None
    high: float | None = None
    trained: int | None = None


@dataclass(frozen=True)
class DecoderConfig:
    """`Decoder` sizes and options: TransformerLayers between an embedding and a head.

    Args:
        vocabulary: Vocabulary size.
        hidden: Feature size.
        feed_forward: Activation output size.
        layers: Layer count.
        heads: Query heads.
        groups: Key and value heads.
        head_size: Head size.
        positions: Most positions that the model was made for.
        norm: "RMSNorm" or "LayerNorm".
        epsilon: Added to the mean square or the variance.
        zero_centered: Norms multiply by 1 + weight.
        activation: Feed-forward activation.
        qkv_bias: Add biases to queries, keys and values.
        output_bias: Add a bias to the attention output.
        mlp_bias: Add biases in the feed-forward layers.
        rotary: Rotary embedding; None learns a position embedding.
        windows: Tokens that each layer attends to, with its own; None for all earlier tokens.
        qk_norm: Normalize query and key heads before the rotary embedding.
        tied: The head is the embedding weight.
        embedding_scale: Embedded token factor, rounded to the parameter dtype.
    """

    vocabulary: int
    hidden: int
    feed_forward: int
    layers: int
    heads: int
    groups: int
    head_size: int
    positions: int
    norm: NormalizationName = "RMSNorm"
    epsilon: float = 1e-6
    zero_centered: bool = False
    activation: ActivationName = "swiglu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    rotary: RotaryConfig | None = None
    windows: tuple[int | None, ...] = ()
    qk_norm: bool = False
    tied: bool = False
    embedding_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in (
            "vocabulary",
            "hidden",
            "feed_forward",
            "layers",
            "heads",
            "groups",
            "head_size",
        ):
            whole(name, getattr(self, name))
        whole("positions", self.positions)
        check_option("norm", self.norm, NORMS)
        check_option("activation", self.activation, ACTIVATIONS)
        positive("epsilon", self.epsilon)
        positive("embedding_scale", self.embedding_scale)
        if self.heads % self.groups:
            raise ValueError(
                f"groups={self.groups} does not divide heads={self.heads}; every group serves equally many heads"
            )
        if len(self.windows) != self.layers:
            raise ValueError(
                f"windows names {len(self.windows)} of {self.layers} layers; give one for each"
            )
        for window in self.windows:
            if window is not None:
                whole("window", window)

    @staticmethod
    def read(content: Mapping[str, Any], source: str) -> DecoderConfig:
        """Return the config that `as_dict` wrote; the ValueError for another content names the source."""
        names = {field.name for field in fields(DecoderConfig)}
        strange = sorted(set(content) ^ names)
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
