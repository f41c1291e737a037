"""Tiny checkpoints of every family: settings as Hugging Face writes them, weights computed from their names."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.conversion.correspondence import Correspondence
from transformer_engine.pytorch.conversion.families import family_named
from transformer_engine.pytorch.conversion.safetensors import Described, write_shards
from transformer_engine.pytorch.conversion.settings import Settings

GOLDEN = Path(__file__).with_name("golden_logits.json")
VOCABULARY = 97
COLUMNS = slice(0, None, 12)  # of the recorded logits

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SMALL, "rms_norm_eps": 1e-5},
    "llama-3.1": {
        "model_type": "llama",
        **_SMALL,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "llama-linear": {
        "model_type": "llama",
        **_SMALL,
        "num_key_value_heads": 1,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "mistral": {"model_type": "mistral", **_SMALL, "head_dim": 32, "sliding_window": 4},
    "qwen2": {
        "model_type": "qwen2",
        **_SMALL,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "rope_theta": 1000000.0,
    },
    "qwen3": {"model_type": "qwen3", **_SMALL, "head_dim": 32, "use_sliding_window": False},
    "gemma": {
        "model_type": "gemma",
        **_SMALL,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "activation_function": "gelu_new",
    },
}


def noise(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return float32 numbers in [-0.5, 0.5), computed from the name with integer arithmetic, equal on all machines."""
    count = torch.Size(shape).numel()
    state = torch.arange(count, dtype=torch.int64) + (zlib.crc32(name.encode()) << 20)
    for factor, shift in (
        (-7046029254386353131, 31),
        (-4658895280553007687, 27),
        (-7723592293110705685, 33),
    ):
        state = state * factor
        state = state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))
    return (((state >> 24) & 0xFFFFFF).double() / 2**24 - 0.5).float().reshape(shape)


def weights(settings: dict[str, Any]) -> dict[str, Tensor]:
    """Return the named tensors of a checkpoint: norm weights around 1 (Gemma's around 0), others around 0."""
    family = family_named(settings["model_type"])
    config = family.settings(Settings(settings, "settings"))
    outputs = {}
    for name, shape in Correspondence.of(family, config).theirs.items():
        is_norm = len(shape) == 1 and name.endswith("weight")
        outputs[name] = 0.4 * noise(name, shape) + (
            1.0 if is_norm and not config.zero_centered else 0.0
        )
    return outputs


def tokens() -> Tensor:
    """Two sequences of 16 tokens."""
    return (torch.arange(32) ** 2 * 7 % VOCABULARY).view(2, 16)


def golden(name: str) -> Tensor:
    """Return every 12th column of the logits of transformers for the model (`record_logits.py`)."""
    recorded = json.loads(GOLDEN.read_text())
    return torch.tensor(recorded["logits"][name], dtype=torch.float64)


def write_checkpoint(folder: Path, name: str, *, most: int = 10**9, **changed: Any) -> Path:
    """Write a folder like save_pretrained, in files of at most `most` bytes; `changed` replaces tensors."""
    folder.mkdir(parents=True)
    settings = SETTINGS[name]
    (folder / "config.json").write_text(json.dumps({**settings, "torch_dtype": "float32"}))
    (folder / "tokenizer.json").write_text("{}")
    tensors = {
        key: value.contiguous()
        for key, value in (weights(settings) | changed).items()
        if value is not None
    }
    plan = {key: Described(value.dtype, tuple(value.shape)) for key, value in tensors.items()}
    write_shards(folder, plan, iter(tensors.items()), most)
    return folder
