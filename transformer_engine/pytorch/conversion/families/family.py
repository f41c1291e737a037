"""Family: a kind of checkpoint as data, {our tensor: their tensors and the layout}, and its settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..decoder_config import DecoderConfig
from ..layouts import Grouped, GroupedInOne, Layout, Same, Stacked, Transposed
from .settings import Settings

LayoutOf = Callable[[DecoderConfig], Layout]


def same(config: DecoderConfig) -> Layout:
    return Same()


def transposed(config: DecoderConfig) -> Layout:
    return Transposed()


def gate_and_up(config: DecoderConfig) -> Layout:
    return Stacked(2)


def grouped(config: DecoderConfig) -> Grouped:
    return Grouped(config.heads, config.groups, config.head_size)


def grouped_in_one(config: DecoderConfig) -> Layout:
    return GroupedInOne(grouped(config))


class Row(NamedTuple):
    """Our tensor and theirs; "{i}" is the layer. A row whose tensor a model has not is no row of it."""

    ours: str
    theirs: tuple[str, ...]
    layout: LayoutOf = same


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint.

    model_type   what its config.json calls itself
    settings     its config.json as a DecoderConfig; ValueError for what no TransformerLayer computes
    rows         every tensor, by name
    head         their name of a head that may be the embedding's weight
    prefix       of all their names, which some files leave out
    derived      the names of tensors that follow from the settings: they are not read
    """

    model_type: str
    settings: Callable[[Settings], DecoderConfig]
    rows: tuple[Row, ...]
    head: str = "lm_head.weight"
    prefix: str = ""
    derived: re.Pattern[str] = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


_OURS = "layers.{i}."
_THEIRS = "model.layers.{i}."
QKV = f"{_OURS}self_attention.layernorm_qkv."
PROJECTION = f"{_OURS}self_attention.proj."
MLP = f"{_OURS}layernorm_mlp."


def _of_queries_keys_values(part: str) -> tuple[str, ...]:
    return tuple(f"{_THEIRS}self_attn.{letter}_proj.{part}" for letter in "qkv")


# The names that Llama brought, which most families keep.
LLAMA_ROWS = (
    Row("embedding.weight", ("model.embed_tokens.weight",)),
    Row(f"{QKV}layer_norm_weight", (f"{_THEIRS}input_layernorm.weight",)),
    Row(f"{QKV}weight", _of_queries_keys_values("weight"), grouped),
    Row(f"{QKV}bias", _of_queries_keys_values("bias"), grouped),
    Row(f"{PROJECTION}weight", (f"{_THEIRS}self_attn.o_proj.weight",)),
    Row(f"{PROJECTION}bias", (f"{_THEIRS}self_attn.o_proj.bias",)),
    Row(f"{MLP}layer_norm_weight", (f"{_THEIRS}post_attention_layernorm.weight",)),
    Row(
        f"{MLP}fc1_weight",
        (f"{_THEIRS}mlp.gate_proj.weight", f"{_THEIRS}mlp.up_proj.weight"),
        gate_and_up,
    ),
    Row(f"{MLP}fc1_bias", (f"{_THEIRS}mlp.gate_proj.bias", f"{_THEIRS}mlp.up_proj.bias"), gate_and_up),
    Row(f"{MLP}fc2_weight", (f"{_THEIRS}mlp.down_proj.weight",)),
    Row(f"{MLP}fc2_bias", (f"{_THEIRS}mlp.down_proj.bias",)),
    Row("norm.weight", ("model.norm.weight",)),
    Row("head.weight", ("lm_head.weight",)),
)
