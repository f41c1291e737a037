"""Model shapes: a table of known ones, a Hugging Face `config.json`, or sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..checks import suggestion


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes for a Transformer decoder, with RMSNorm, rotary embeddings and no biases.

    Attributes:
        name: Name in reports.
        hidden: Token vector size.
        layers: Number of layers.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        head_dim: Head size.
        ffn: Size between the two products in the MLP, or in one expert.
        vocabulary: Number of tokens in the vocabulary.
        gated: The MLP is gated (SwiGLU, two matrices before the activation); otherwise GELU.
        experts: Number of experts per layer; 0 for a dense MLP.
        experts_per_token: Experts that each token is sent to.
        tied: The output projection shares the embedding's matrix.

    Raises:
        ValueError: A size is not a positive integer, or the sizes contradict each other.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    gated: bool = True
    experts: int = 0
    experts_per_token: int = 0
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocabulary"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"{name}={value!r} of model {self.name!r} must be an integer of at least 1"
                )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; give numbers that divide"
            )
        if self.experts < 0 or bool(self.experts) != bool(self.experts_per_token):
            raise ValueError(
                f"experts={self.experts} and experts_per_token={self.experts_per_token} must both be positive, or "
                "both be 0 for a dense model"
            )
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} exceeds experts={self.experts}; a token is sent to each "
                "expert at most once"
            )

    @property
    def projection(self) -> int:
        """Number of columns in queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def attention_parameters(self) -> int:
        """Number of parameters in a layer's attention and both norms."""
        return self.hidden * (self.projection + self.heads * self.head_dim + 2)

    def expert_parameters(self) -> int:
        """Number of parameters in the dense MLP, or in one expert."""
        return self.hidden * self.ffn * (3 if self.gated else 2)

    def layer_parameters(self) -> int:
        """Number of parameters in a layer, with all experts and the router."""
        return (
            self.attention_parameters()
            + max(self.experts, 1) * self.expert_parameters()
            + self.experts * self.hidden
        )

    def parameters(self) -> int:
        """Number of parameters in the model."""
        return self.layers * self.layer_parameters() + self.hidden * (
            1 + self.vocabulary * (1 if self.tied else 2)
        )

    def flops_per_token(self, sequence: int) -> float:
        """Floating-point operations for one token's forward and backward pass, without recomputation.

        Counts the products, for the experts that a token is sent to, and causal attention over half the sequence.
        """
        matrices = self.hidden * (self.projection + self.heads * self.head_dim)
        matrices += (
            max(self.experts_per_token, 1) * self.expert_parameters() + self.experts * self.hidden
        )
        attention = 2 * self.heads * self.head_dim * sequence
        return 3.0 * (self.layers * (2 * matrices + attention) + 2 * self.hidden * self.vocabulary)


def _llama(
    name: str, hidden: int, layers: int, heads: int, ffn: int, vocabulary: int = 128256
) -> ModelShape:
    return ModelShape(name, hidden, layers, heads, 8, 128, ffn, vocabulary)


MODELS = {
    shape.name: shape
    for shape in (
        replace(_llama("llama-1b", 2048, 16, 32, 8192), head_dim=64, tied=True),
        replace(_llama("llama-3b", 3072, 28, 24, 8192), tied=True),
        _llama("llama-8b", 4096, 32, 32, 14336),
        _llama("llama-70b", 8192, 80, 64, 28672),
        _llama("llama-405b", 16384, 126, 128, 53248),
        replace(_llama("mistral-7b", 4096, 32, 32, 14336, 32768)),
        replace(_llama("mixtral-8x7b", 4096, 32, 32, 14336, 32000), experts=8, experts_per_token=2),
        replace(
            _llama("mixtral-8x22b", 6144, 56, 48, 16384, 32768), experts=8, experts_per_token=2
        ),
        ModelShape(
            "qwen3-30b-a3b", 2048, 48, 32, 4, 128, 768, 151936, experts=128, experts_per_token=8
        ),
        ModelShape(
            "qwen3-235b-a22b", 4096, 94, 64, 4, 128, 1536, 151936, experts=128, experts_per_token=8
        ),
        ModelShape("gpt3-175b", 12288, 96, 96, 96, 128, 49152, 50257, gated=False, tied=True),
    )
}

# Field names in Hugging Face configurations, in order of preference.
_CONFIG_NAMES: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd"),
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "ffn": ("moe_intermediate_size", "intermediate_size", "n_inner"),
    "vocabulary": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "tied": ("tie_word_embeddings",),
}
# Layers that the simulator does not compute, and the fields that announce them.
_UNSUPPORTED = {
    "kv_lora_rank": "latent attention (MLA)",
    "n_shared_experts": "shared experts",
    "shared_expert_intermediate_size": "shared experts",
    "first_k_dense_replace": "dense layers before those with experts",
    "mlp_only_layers": "dense layers between those with experts",
    "layer_types": "layers of different kinds",
}


def model_shape(model: str | Path | ModelShape, **sizes: Any) -> ModelShape:
    """Resolve the shape of a model.

    Args:
        model: A name from `MODELS`, the path of a `config.json` (or its folder), a `ModelShape`, or any other name
            together with all required sizes.
        sizes: Fields of `ModelShape` that replace the model's; None leaves a field unchanged.

    Raises:
        ValueError: The model is unknown and sizes are missing, a size is invalid, or the configuration has layers that
            the simulator does not compute.
    """
    overrides = {name: value for name, value in sizes.items() if value is not None}
    if isinstance(model, ModelShape):
        return replace(model, **overrides)
    if str(model) in MODELS:
        return replace(MODELS[str(model)], **overrides)
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return replace(_config_shape(path), **overrides)
    if {"hidden", "layers", "heads"} <= overrides.keys():
        heads, hidden = overrides["heads"], overrides["hidden"]
        if "head_dim" not in overrides and heads and hidden % heads:
            raise ValueError(f"hidden={hidden} is not divisible by heads={heads}; give head_dim")
        overrides.setdefault("kv_heads", heads)
        overrides.setdefault("head_dim", hidden // max(heads, 1))
        overrides.setdefault("ffn", 4 * hidden)
        overrides.setdefault("vocabulary", 128256)
        return ModelShape(name=str(model), **overrides)
    raise ValueError(
        f"model {str(model)!r} is neither known nor the path of a config.json{suggestion(str(model), MODELS)}"
        f"; choose from {', '.join(MODELS)}, or give hidden, layers and heads"
    )


def _config_shape(path: Path) -> ModelShape:
    """Read the shape that a Hugging Face configuration describes."""
    try:
        config: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not valid JSON: {error}; give a config.json of Hugging Face"
        ) from None
    if not isinstance(config, Mapping):
        raise ValueError(f"{path} holds no JSON object; give a config.json of Hugging Face")
    config = config.get("text_config", config)
    if not isinstance(config, Mapping):
        raise ValueError(
            f"{path} has a text_config that is not an object; give a config.json of Hugging Face"
        )
    for name, kind in _UNSUPPORTED.items():
        value = config.get(name)
        uniform = isinstance(value, list) and all(item == value[0] for item in value)
        if value and not uniform:
            raise ValueError(
                f"{path} has {name}={value!r}: {kind} are not simulated; give the sizes of a model with equal layers"
            )
    config_values: dict[str, Any] = {}
    for name, keys in _CONFIG_NAMES.items():
        value = next((config[key] for key in keys if config.get(key) is not None), None)
        if value is not None:
            if type(value) is not int and name != "tied":
                raise ValueError(
                    f"{path} has {name}={value!r}, which is not a whole number; repair it"
                )
            config_values[name] = value
    if not config_values.get("experts"):
        # A dense model's configuration may have expert fields.
        config_values.update(experts=0, experts_per_token=0)
    names = {field.name for field in fields(ModelShape)}
    shape = {
        "gated": config.get("hidden_act", config.get("activation_function"))
        in ("silu", "swish", "gelu_pytorch_tanh")
    }
    missing = [
        name for name in ("hidden", "layers", "heads", "vocabulary") if name not in config_values
    ]
    if missing:
        keys = " or ".join(_CONFIG_NAMES[missing[0]])
        raise ValueError(f"{path} has no field {keys}; add it, or give {missing[0]}")
    config_values.setdefault("kv_heads", config_values["heads"])
    config_values.setdefault("head_dim", config_values["hidden"] // max(config_values["heads"], 1))
    config_values.setdefault("ffn", 4 * config_values["hidden"])
    shape |= {name: value for name, value in config_values.items() if name in names}
    return ModelShape(name=config.get("model_type", path.parent.name), **shape)
