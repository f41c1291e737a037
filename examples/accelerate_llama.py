"""Fine-tune a Hugging Face model in FP8 with Accelerate: `accelerate launch examples/accelerate_llama.py`.

Accelerate replaces the model's `Linear` layers by layers of this package and enters the recipe in `model(...)`. Without
`--model` the program trains a small Llama with random weights, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import TERecipeKwargs
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def main(argv: list[str] | None = None) -> list[float]:
    """Train and return the losses of the steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder, or an id on the Hugging Face hub")
    parser.add_argument(
        "--steps", type=int, default=50, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--state", help="folder for the state of the training, with scales and histories"
    )
    options = parser.parse_args(argv)

    scaling = TERecipeKwargs(fp8_format="HYBRID", amax_history_len=16, amax_compute_algo="max")
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[scaling])
    torch.manual_seed(0)
    model: Any
    if options.model is None:
        model = LlamaForCausalLM(LlamaConfig(**TINY))
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    vocabulary = model.config.vocab_size
    model, optimizer = accelerator.prepare(model, optimizer)

    # Rows that count upwards from a random start; replace them by the batches of your tokenizer and data set.
    first = torch.randint(0, vocabulary, (16, 1), device=accelerator.device)
    tokens = (first + torch.arange(32, device=accelerator.device)) % vocabulary
    losses = []
    for step in range(options.steps):
        loss = model(tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0:
            accelerator.print(f"step {step + 1:4}  loss {losses[-1]:.3f}")
    if options.state is not None:
        accelerator.save_state(options.state)
    return losses


if __name__ == "__main__":
    main()
