"""Checkpoint families as data: {our tensor: their tensors and the layout}, and their config.json reader."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..constants import ActivationName
from .decoder_config import DecoderConfig
from .layouts import Grouped, GroupedInOne, Stacked, Transposed, Unchanged, WeightLayout
from .settings import Settings, llama_like, windows

LayoutOf = Callable[[DecoderConfig], WeightLayout]


def unchanged(config: DecoderConfig) -> WeightLayout:
    return Unchanged()


def transposed(config: DecoderConfig) -> WeightLayout:
    return Transposed()


def gate_and_up(config: DecoderConfig) -> WeightLayout:
    return Stacked(2)


def grouped(config: DecoderConfig) -> Grouped:
    return Grouped(config.heads, config.groups, config.head_size)


def grouped_in_one(config: DecoderConfig) -> WeightLayout:
    return GroupedInOne(grouped(config))


class TensorNames(NamedTuple):
    """The name of one tensor of ours and their names; "{i}" is the layer. Models without the tensor skip the row."""

    ours: str
    theirs: tuple[str, ...]
    layout: LayoutOf = unchanged


@dataclass(frozen=True)
class CheckpointFamily:
    """One checkpoint family.

    Attributes:
        model_type: `model_type` in its config.json.
        settings: Converts its config.json to a DecoderConfig; raises ValueError for settings that TransformerLayer
            lacks.
        rows: All tensors, keyed by name.
        head: Their name for an output head that may be tied to the embedding.
        prefix: Common prefix of their names, which some files omit.
        derived: Names of tensors that follow from the settings and are not read.
        layers: Setting with the layer count.
    """

    model_type: str
    settings: Callable[[Settings], DecoderConfig]
    rows: tuple[TensorNames, ...]
    head: str = "lm_head.weight"
    prefix: str = ""
    derived: re.Pattern[str] = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
    layers: str = "num_hidden_layers"

    def count_stored_layers(self, names: Iterable[str], ours: bool) -> int:
        """Layer count for which a checkpoint has tensors.

        Args:
            names: The checkpoint's tensor names.
            ours: Whether they are our names. Their names may lack the common prefix.
        """
        (begin,) = {
            (row.ours if ours else row.theirs[0]).partition("{i}")[0]
            for row in self.rows
            if "{i}" in row.ours
        }
        prefix = "" if ours else self.prefix
        pattern = re.compile(
            rf"(?:{re.escape(prefix)})?{re.escape(begin.removeprefix(prefix))}(\d+)\."
        )
        found = (pattern.match(name) for name in names)
        return len({match[1] for match in found if match is not None})


_OURS = "layers.{i}."
_LLAMA_LAYER = "model.layers.{i}."
QKV = f"{_OURS}self_attention.layernorm_qkv."
PROJECTION = f"{_OURS}self_attention.proj."
MLP = f"{_OURS}layernorm_mlp."
# Endings of our weight names that `save_quantized` quantizes.
QUANTIZED = ("layernorm_qkv.weight", "proj.weight", "fc1_weight", "fc2_weight")


def _qkv_names(part: str) -> tuple[str, ...]:
    return tuple(f"{_LLAMA_LAYER}self_attn.{letter}_proj.{part}" for letter in "qkv")


# Llama's tensor names, which most families share.
LLAMA_ROWS = (
    TensorNames("embedding.weight", ("model.embed_tokens.weight",)),
    TensorNames(f"{QKV}layer_norm_weight", (f"{_LLAMA_LAYER}input_layernorm.weight",)),
    TensorNames(f"{QKV}weight", _qkv_names("weight"), grouped),
    TensorNames(f"{QKV}bias", _qkv_names("bias"), grouped),
    TensorNames(f"{PROJECTION}weight", (f"{_LLAMA_LAYER}self_attn.o_proj.weight",)),
    TensorNames(f"{PROJECTION}bias", (f"{_LLAMA_LAYER}self_attn.o_proj.bias",)),
    TensorNames(f"{MLP}layer_norm_weight", (f"{_LLAMA_LAYER}post_attention_layernorm.weight",)),
    TensorNames(
        f"{MLP}fc1_weight",
        (f"{_LLAMA_LAYER}mlp.gate_proj.weight", f"{_LLAMA_LAYER}mlp.up_proj.weight"),
        gate_and_up,
    ),
    TensorNames(
        f"{MLP}fc1_bias",
        (f"{_LLAMA_LAYER}mlp.gate_proj.bias", f"{_LLAMA_LAYER}mlp.up_proj.bias"),
        gate_and_up,
    ),
    TensorNames(f"{MLP}fc2_weight", (f"{_LLAMA_LAYER}mlp.down_proj.weight",)),
    TensorNames(f"{MLP}fc2_bias", (f"{_LLAMA_LAYER}mlp.down_proj.bias",)),
    TensorNames("norm.weight", ("model.norm.weight",)),
    TensorNames("head.weight", ("lm_head.weight",)),
)


def _llama_settings(settings: Settings) -> DecoderConfig:
    """Read the Llama 1 to 3.3 config: RMSNorm, SwiGLU, rotary halves, grouped keys and values."""
    bias = settings.switch("attention_bias", False)
    return llama_like(
        settings, qkv_bias=bias, output_bias=bias, mlp_bias=settings.switch("mlp_bias", False)
    )


def _mistral_settings(settings: Settings) -> DecoderConfig:
    """Read the Mistral config: Llama with sliding-window attention."""
    window = settings.content.get("sliding_window")
    if window is not None:
        window = settings.integer("sliding_window")
    return llama_like(
        settings, windows=windows(settings, window, settings.integer("num_hidden_layers"))
    )


def _upper_windows(settings: Settings) -> tuple[int | None, ...]:
    """Return the windows of Qwen: with use_sliding_window, the layers from max_window_layers on have one."""
    layers = settings.integer("num_hidden_layers")
    if (
        not settings.switch("use_sliding_window", False)
        or settings.content.get("sliding_window") is None
    ):
        return (None,) * layers
    window = settings.integer("sliding_window")
    if settings.content.get("layer_types") is not None:
        return windows(settings, window, layers)
    first = settings.integer("max_window_layers", layers)
    return tuple(window if layer >= first else None for layer in range(layers))


def _qwen2_settings(settings: Settings) -> DecoderConfig:
    """Read the Qwen2 and 2.5 config: Llama with query, key and value biases."""
    return llama_like(settings, qkv_bias=True, windows=_upper_windows(settings))


def _qwen3_settings(settings: Settings) -> DecoderConfig:
    """Read the Qwen3 config: Llama that normalizes queries and keys per head before the rotation."""
    bias = settings.switch("attention_bias", False)
    return llama_like(
        settings,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        head_size=settings.integer("head_dim", 128),
        windows=_upper_windows(settings),
    )


# Early files of Gemma name the activation "gelu" and mean the tanh approximation.
_GEMMA_ACTIVATIONS: dict[str, ActivationName] = {"gelu_pytorch_tanh": "geglu", "gelu": "geglu"}


def _gemma_settings(settings: Settings) -> DecoderConfig:
    """Read the Gemma 1 config: norms with 1 + weight, GeGLU, embeddings times sqrt(hidden), tied head."""
    bias = settings.switch("attention_bias", False)
    named = "hidden_activation" if settings.content.get("hidden_activation") else "hidden_act"
    return llama_like(
        settings,
        activation=settings.choice(named, "gelu_pytorch_tanh", _GEMMA_ACTIVATIONS),
        head_size=settings.integer("head_dim", 256),
        zero_centered=True,
        qkv_bias=bias,
        output_bias=bias,
        tied=settings.switch("tie_word_embeddings", True),
        embedding_scale=settings.integer("hidden_size") ** 0.5,
    )


_GPT2_ACTIVATIONS: dict[str, ActivationName] = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
}


def _gpt2_settings(settings: Settings) -> DecoderConfig:
    """Read the GPT-2 config: LayerNorm, biases everywhere, learned positions, weights [in, out]."""
    hidden, heads, layers = (settings.integer(name) for name in ("n_embd", "n_head", "n_layer"))
    settings.demand("scale_attn_by_inverse_layer_idx", (False,), "all layers scale alike here")
    settings.demand("scale_attn_weights", (True,), "scores are scaled by sqrt(head size) here")
    settings.demand("add_cross_attention", (False,), "decoders without an encoder are converted")
    return DecoderConfig(
        vocabulary=settings.integer("vocab_size"),
        hidden=hidden,
        feed_forward=settings.integer("n_inner", 4 * hidden),
        layers=layers,
        heads=heads,
        groups=heads,
        head_size=hidden // max(1, heads),
        positions=settings.integer("n_positions"),
        norm="LayerNorm",
        epsilon=settings.number("layer_norm_epsilon", 1e-5),
        activation=settings.choice("activation_function", "gelu_new", _GPT2_ACTIVATIONS),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        windows=(None,) * layers,
        tied=settings.switch("tie_word_embeddings", True),
    )


def _weight_and_bias(
    ours: str, theirs: str, between: str = "", layout=transposed
) -> tuple[TensorNames, TensorNames]:
    """Return rows for a weight and its bias in one GPT-2 layer."""
    return (
        TensorNames(f"{ours}{between}weight", (f"transformer.h.{{i}}.{theirs}.weight",), layout),
        TensorNames(f"{ours}{between}bias", (f"transformer.h.{{i}}.{theirs}.bias",), layout),
    )


FAMILIES = {
    family.model_type: family
    for family in (
        CheckpointFamily("gemma", _gemma_settings, LLAMA_ROWS),
        CheckpointFamily(
            "gpt2",
            _gpt2_settings,
            (
                TensorNames("embedding.weight", ("transformer.wte.weight",)),
                TensorNames("position_embedding.weight", ("transformer.wpe.weight",)),
                *_weight_and_bias(QKV, "ln_1", "layer_norm_"),
                *_weight_and_bias(QKV, "attn.c_attn", layout=grouped_in_one),
                *_weight_and_bias(PROJECTION, "attn.c_proj"),
                *_weight_and_bias(MLP, "ln_2", "layer_norm_"),
                *_weight_and_bias(MLP, "mlp.c_fc", "fc1_"),
                *_weight_and_bias(MLP, "mlp.c_proj", "fc2_"),
                TensorNames("norm.weight", ("transformer.ln_f.weight",)),
                TensorNames("norm.bias", ("transformer.ln_f.bias",)),
                TensorNames("head.weight", ("lm_head.weight",)),
            ),
            prefix="transformer.",
            derived=re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"),
            layers="n_layer",
        ),
        CheckpointFamily("llama", _llama_settings, LLAMA_ROWS),
        CheckpointFamily("mistral", _mistral_settings, LLAMA_ROWS),
        CheckpointFamily("qwen2", _qwen2_settings, LLAMA_ROWS),
        CheckpointFamily(
            "qwen3",
            _qwen3_settings,
            (
                *LLAMA_ROWS,
                TensorNames(
                    "layers.{i}.self_attention.q_norm.weight",
                    ("model.layers.{i}.self_attn.q_norm.weight",),
                ),
                TensorNames(
                    "layers.{i}.self_attention.k_norm.weight",
                    ("model.layers.{i}.self_attn.k_norm.weight",),
                ),
            ),
        ),
    )
}


def family_named(model_type: object) -> CheckpointFamily:
    """Return the family for a checkpoint's model_type.

    Raises:
        ValueError: The family is unknown; the message lists all families.
    """
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    raise ValueError(
        f"model_type {model_type!r} has no table of names; known types: {', '.join(sorted(FAMILIES))}"
    )
