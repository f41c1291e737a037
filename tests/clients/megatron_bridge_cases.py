"""Megatron-Bridge as published, on a CPU: providers, LoRA, and Hugging Face checkpoint conversion.

Prints {case: result} as JSON; if a case raises, the result is its traceback. Functions that need CUDA,
Apex or a later Python are replaced: Megatron's rotary embeddings read the current CUDA device, and the
full-layer spec uses Apex's norm after the last layer.
"""

from __future__ import annotations

import json
import tempfile
import traceback
import typing
import warnings
from collections.abc import Callable
from typing import Any

import torch
import typing_extensions

from tests.clients import megatron_cases
from tests.clients.megatron_cases import BF16, LENGTH, VOCABULARY

SIZES = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 128,
    "vocab_size": VOCABULARY,
    "seq_length": LENGTH,
    "make_vocab_size_divisible_by": 32,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
}
FP8 = {**BF16, "fp8": "hybrid", "fp8_recipe": "tensorwise"}


def start() -> None:
    """Replace what a CPU or Python 3.11 lacks, and start Megatron."""
    vars(typing).setdefault("override", typing_extensions.override)
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")  # pyright: ignore
    megatron_cases.start()
    from megatron.bridge.models import gpt_full_te_layer_autocast_spec as full_layer
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    get_cuda_rng_tracker().add("model-parallel-rng", 1234)
    full_layer.FusedLayerNorm = TENorm


def built(provider: Any) -> Any:
    """Finalize a provider and build its model."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    provider.finalize()
    return provider.provide(pre_process=True, post_process=True)


def model(**settings: Any) -> Any:
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    torch.manual_seed(0)
    gpt = built(GPTModelProvider(**{**SIZES, **settings}))
    return gpt.bfloat16() if settings.get("bf16") else gpt


def lora_losses() -> dict[str, list[float]]:
    """Losses with both LoRA layers, made from modules and from te.ops, starting with the same adapters."""
    from megatron.bridge.peft.lora import LoRA

    losses = {}
    for fused in (False, True):
        gpt = model()
        gpt.config.use_transformer_engine_op_fuser = fused
        before = megatron_cases.model_loss(gpt).item()
        gpt = LoRA(dim=4, alpha=8, dropout=0.0)(gpt, training=True)
        kinds = {type(module).__name__ for module in gpt.modules()}
        assert ("TEFusedLoRALinear" if fused else "LoRALinear") in kinds
        trained = [p for p in gpt.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=5e-3)
        losses[str(fused)] = [before]
        for _ in range(4):
            loss = megatron_cases.model_loss(gpt)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[str(fused)].append(loss.item())
    return losses


def compare_conversion() -> dict[str, Any]:
    """Hugging Face Llama: logit differences, and whether the exported weights are equal."""
    from megatron.bridge import AutoBridge
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    stock = LlamaForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        stock.save_pretrained(folder)
        bridge = AutoBridge.from_hf_pretrained(folder, torch_dtype=torch.float32)
        provider = bridge.to_megatron_provider(load_weights=False)
        changes = {
            name: SIZES[name]
            for name in SIZES
            if name.startswith(("use_cpu", "gradient", "make_vocab"))
        }
        for name, value in {**changes, "params_dtype": torch.float32, "bf16": False}.items():
            setattr(provider, name, value)
        gpt = built(provider).eval()
        bridge.load_hf_weights([gpt])
        tokens, positions, mask = megatron_cases.batch()
        with torch.no_grad():
            logits, exact = gpt(tokens, positions, mask), stock(tokens).logits
        exported = dict(bridge.export_hf_weights([gpt], cpu=True, show_progress=False))
    state = stock.state_dict()
    return {
        "error": (logits - exact).abs().max().item(),
        "largest": exact.abs().max().item(),
        "equal": state.keys() == exported.keys()
        and all(torch.equal(exported[n], x) for n, x in state.items()),
    }


CASES: dict[str, Callable[[], Any]] = {
    "train float32": lambda: megatron_cases.train_model(model()),
    "train fp8": lambda: megatron_cases.train_model(model(**FP8)),
    "train full layer": lambda: megatron_cases.train_model(
        model(**BF16, use_transformer_engine_full_layer_spec=True)
    ),
    "train full layer fp8": lambda: megatron_cases.train_model(
        model(**FP8, use_transformer_engine_full_layer_spec=True)
    ),
    "lora": lora_losses,
    "convert": compare_conversion,
}


def main() -> None:
    warnings.simplefilter("ignore")
    start()
    results = {}
    for name, case in CASES.items():
        try:
            results[name] = case()
        except Exception:
            results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
