"""te.convert on transformers models, with peft adapters, and under accelerate."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import transformer_engine.pytorch as te
from tests.clients import installed
from transformer_engine.common.recipe import Float8CurrentScaling

pytestmark = [*installed.needs("peft", "transformers"), installed.EMULATED]

RECIPE = Float8CurrentScaling()
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 16}),
    "phi": ("PhiConfig", "PhiForCausalLM", {}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "opt": ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "bert": ("BertConfig", "BertModel", {}),
    "t5": (
        "T5Config",
        "T5EncoderModel",
        {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4},
    ),
}


def model_named(name: str) -> Any:
    """A two-layer model with random weights, in evaluation mode."""
    import transformers

    config, model, options = MODELS[name]
    small = {
        "vocab_size": installed.VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    }  # fmt: skip
    if name in ("t5",):
        small = {"vocab_size": installed.VOCABULARY, "pad_token_id": 0}
    torch.manual_seed(0)
    return getattr(transformers, model)(
        getattr(transformers, config)(**{**small, **options})
    ).eval()


def output(model: nn.Module) -> torch.Tensor:
    result: Any = model(input_ids=installed.tokens())
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_convert_and_restore(name: str):
    model = model_named(name)
    keys, stock = list(model.state_dict()), output(model)
    te.convert(model, sample={"input_ids": installed.tokens()}, verbose=False)
    rows = list(te.conversion_table(model))
    assert any(row.choice == "te" and row.module.startswith("Linear") for row in rows)
    torch.testing.assert_close(output(model), stock, rtol=1e-4, atol=1e-4)
    te.restore(model)
    assert torch.equal(output(model), stock)
    te.convert(model, RECIPE, sample={"input_ids": installed.tokens()}, verbose=False)
    assert list(model.state_dict()) == keys
    error = (output(model) - stock).norm() / stock.norm()
    assert 0 < error < 0.2
    te.restore(model)
    assert torch.equal(output(model), stock)


def add_adapter(model: Any) -> Any:
    import peft

    torch.manual_seed(1)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"])
    )


def train_model(model: Any) -> list[float]:
    tokens = installed.tokens()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-2)
    losses = []
    for _ in range(8):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", [None, RECIPE], ids=["high precision", "current"])
def test_adapters_train_on_models_converted_before_or_after(recipe: Any):
    sample = {"input_ids": installed.tokens()}
    before = add_adapter(te.convert(installed.tiny_llama(), recipe, sample=sample, verbose=False))
    after = te.convert(
        add_adapter(installed.tiny_llama()), recipe, sample=sample, verbose=False, exclude="*lora_*"
    )
    stock = add_adapter(installed.tiny_llama())
    names = [set(model.state_dict()) for model in (before, after, stock)]
    assert names[0] == names[1] == names[2]
    losses = train_model(before)
    assert losses == train_model(after)
    assert losses[-1] < losses[0]
    if recipe is None:
        torch.testing.assert_close(losses, train_model(stock), rtol=1e-4, atol=1e-4)


def test_adapters_from_before_the_conversion_merge():
    """Adapters that peft adds to te.Linear after a conversion do not merge."""
    model = te.convert(
        add_adapter(installed.tiny_llama()), sample={"input_ids": installed.tokens()}, verbose=False
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    model.eval()
    expected = output(copy.deepcopy(model))
    merged = model.merge_and_unload()
    torch.testing.assert_close(output(merged), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["fp8_block", "mxfp8"])
def test_converted_models_are_saved_for_servers(form: str, tmp_path: Path):
    """A converted model's folder equals the original's, byte for byte."""
    model = installed.tiny_llama()
    te.save_quantized(model, tmp_path / "stock", form)
    te.convert(model, RECIPE, sample={"input_ids": installed.tokens()}, verbose=False)
    te.save_quantized(model, tmp_path / "converted", form)
    files = sorted(path.name for path in (tmp_path / "stock").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "converted").iterdir())
    for name in files:
        assert (tmp_path / "stock" / name).read_bytes() == (
            tmp_path / "converted" / name
        ).read_bytes()


def test_accelerate_keeps_converted_layers():
    from accelerate import Accelerator

    model = te.convert(
        installed.tiny_llama(), RECIPE, sample={"input_ids": installed.tokens()}, verbose=False
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = installed.tokens()
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    optimizer.step()
    assert "Converted" in type(model.model.layers[0].mlp.up_proj).__name__
