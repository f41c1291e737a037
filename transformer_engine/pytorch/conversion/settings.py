"""Settings: config.json from another library, read value by value; errors name a missing or invalid value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ...common.checks import described
from ...common.numbers import to_bool
from .decoder_config import DecoderConfig, RotaryConfig

CONFIG_FILE = "config.json"
Choice = TypeVar("Choice")


@dataclass(eq=False)
class Settings:
    """The content of a config.json; `source` is its name in error messages."""

    content: Mapping[str, Any]
    source: str

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a whole number; a missing or null setting has the default."""
        return self._value(name, default, (int,), "a whole number")

    def number(self, name: str, default: float | None = None) -> float:
        return float(self._value(name, default, (int, float), "a number"))

    def switch(self, name: str, default: bool) -> bool:
        """Return the truth value of a setting as transformers reads it: null is false."""
        return to_bool(f"{self.source}: {name}", self.content.get(name, default))

    def choice(self, name: str, default: str, choices: Mapping[str, Choice]) -> Choice:
        """Return the entry in `choices` for the setting `name`."""
        value = self.content.get(name) or default
        if value not in choices:
            raise ValueError(
                f"{self.source}: {name}={described(value)} is not computed by TransformerLayer; "
                f"it takes {', '.join(choices)}"
            )
        return choices[value]

    def demand(self, name: str, allowed: Collection[Any], why: str) -> None:
        """Raise ValueError for a setting outside the allowed values; a missing setting is valid."""
        value = self.content.get(name)
        if value is not None and value not in allowed:
            raise ValueError(f"{self.source}: {name}={described(value)}: {why}")

    def _value(self, name: str, default: Any, kinds: tuple[type, ...], expected: str) -> Any:
        value = self.content.get(name)
        if value is None:
            value = default
        if value is None:
            raise ValueError(
                f"{self.source} has no {name!r}; take the config.json that belongs to the weights"
            )
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ValueError(
                f"{self.source}: {name}={described(value)} is not {expected}; repair it"
            )
        return value


def llama_like(settings: Settings, **different: Any) -> DecoderConfig:
    """Return the config for a family with the setting names of Llama; `different` overrides fields."""
    layers, heads = settings.integer("num_hidden_layers"), settings.integer("num_attention_heads")
    hidden = settings.integer("hidden_size")
    common: dict[str, Any] = {
        "vocabulary": settings.integer("vocab_size"),
        "hidden": hidden,
        "feed_forward": settings.integer("intermediate_size"),
        "layers": layers,
        "heads": heads,
        "groups": settings.integer("num_key_value_heads", heads),
        "head_size": settings.integer("head_dim", hidden // max(1, heads)),
        "positions": settings.integer("max_position_embeddings"),
        "epsilon": settings.number("rms_norm_eps", 1e-6),
        "rotary": rotary(settings),
        "windows": (None,) * layers,
        "tied": settings.switch("tie_word_embeddings", False),
    }
    if "activation" not in different:
        common["activation"] = settings.choice("hidden_act", "silu", {"silu": "swiglu"})
    return DecoderConfig(**(common | different))


def rotary(settings: Settings) -> RotaryConfig:
    """Read rope_theta and rope_scaling, or rope_parameters, which replaces both in later transformers releases."""
    parameters = (
        settings.content.get("rope_parameters") or settings.content.get("rope_scaling") or {}
    )
    if not isinstance(parameters, Mapping):
        raise ValueError(
            f"{settings.source}: rope_scaling={described(parameters)} is not an object; repair it"
        )
    scaling = Settings(parameters, f"{settings.source}, rope_scaling")
    base = scaling.number("rope_theta", settings.number("rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if (
        parameters.get("partial_rotary_factor", settings.content.get("partial_rotary_factor", 1.0))
        != 1.0
    ):
        raise ValueError(
            f"{settings.source}: partial_rotary_factor is not 1; all features of a head turn here"
        )
    if kind == "default":
        return RotaryConfig(base)
    if kind == "linear":
        return RotaryConfig(base, scaling.number("factor"))
    if kind == "llama3":
        return RotaryConfig(
            base,
            scaling.number("factor"),
            scaling.number("low_freq_factor"),
            scaling.number("high_freq_factor"),
            scaling.integer("original_max_position_embeddings"),
        )
    raise ValueError(
        f"{settings.source}: rope_type={described(kind)} is not supported; default, linear and llama3 are"
    )


def windows(settings: Settings, window: int | None, layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer; with `layer_types`, only sliding layers have one."""
    kinds = settings.content.get("layer_types")
    if kinds is None or window is None:
        return (window,) * layers
    lookup = {"full_attention": None, "sliding_attention": window}
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or any(kind not in lookup for kind in kinds)
    ):
        raise ValueError(
            f"{settings.source}: layer_types={described(kinds)} does not name {layers} layers as full_attention or "
            "sliding_attention"
        )
    return tuple(lookup[kind] for kind in kinds)
