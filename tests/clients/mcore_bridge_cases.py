"""A Qwen3 that mcore-bridge, ms-swift's model library, builds from Megatron layers; see test_mcore_bridge.py.

python mcore_bridge_cases.py FOLDER: prints the differences from the transformers model, the FP8 training
losses, and the layer classes as JSON. On a CPU, Megatron's rotary embedding finds "cpu" as CUDA's device.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.clients import megatron_cases

VOCABULARY, LENGTH, STEPS = 128, 32, 6


def add_random_states() -> None:
    """States under Megatron's layer names, which Megatron adds on a GPU."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    for seed, name in enumerate(("model-parallel-rng", "data-parallel-rng", "expert-parallel-rng")):
        tracker.add(name, 100 + seed)


def built(folder: Path, config: Any, **settings: Any) -> Any:
    """Load a folder's model, built from Megatron's layers."""
    from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config

    created = ModelConfig(
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        **hf_to_mcore_config(config),
        **settings,
    )
    model = get_mcore_model(created)[0]
    created.bridge.load_weights([model], str(folder))
    return model


def main(folder: Path) -> None:
    megatron_cases.start()
    add_random_states()
    torch.cuda.current_device = lambda: "cpu"
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    reference = Qwen3ForCausalLM(config).float()
    reference.save_pretrained(folder)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
    call = {
        "input_ids": tokens,
        "position_ids": torch.arange(LENGTH).expand(2, -1),
        "attention_mask": None,
    }
    ours = built(folder, config)
    with torch.no_grad():
        expected = reference(tokens).logits
        difference = (ours(**call) - expected).abs().max() / expected.abs().max()
    quantized = built(folder, config, fp8="hybrid", fp8_recipe="tensorwise")
    optimizer = torch.optim.AdamW(quantized.parameters(), 1e-2)
    losses = []
    for _ in range(STEPS):
        loss = quantized(**call, labels=tokens.roll(-1, 1)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    classes = sorted(
        {base.__module__ for module in quantized.modules() for base in type(module).__mro__}
    )
    engine = [name for name in classes if name.startswith("transformer_engine.")]
    print(json.dumps({"difference": difference.item(), "losses": losses, "classes": engine}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
