"""Train a Llama-shaped language model in FP8 with plain PyTorch: `python examples/llama.py --steps 200`.

The model is a stack of `te.TransformerLayer` (RMSNorm, SwiGLU, rotary positions, grouped queries) over bytes. It is
trained on the text of a file, by default this one. A checkpoint contains the scales of the recipe, so `--resume`
continues with the losses of an uninterrupted run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import transformer_engine.pytorch as te
from transformer_engine.common import recipe

RECIPES: dict[str, Callable[[], recipe.Recipe]] = {
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=16),
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
}
VOCABULARY = 256  # bytes


class Llama(nn.Module):
    """A causal language model: logits [batch, sequence, VOCABULARY] of tokens [batch, sequence]."""

    def __init__(
        self, hidden: int, layers: int, heads: int, key_value_heads: int, dtype: torch.dtype
    ):
        super().__init__()
        # 8/3 of hidden, a multiple of 128 for every block format
        ffn = -(-hidden * 8 // (3 * 128)) * 128
        self.embedding = nn.Embedding(VOCABULARY, hidden, dtype=dtype)
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                hidden,
                ffn,
                heads,
                num_gqa_groups=key_value_heads,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                layer_number=number + 1,
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                params_dtype=dtype,
                attn_input_format="bshd",
                self_attn_mask_type="causal",
            )
            for number in range(layers)
        )
        self.norm = te.RMSNorm(hidden, dtype=dtype)
        # high precision, as usual
        self.head = nn.Linear(hidden, VOCABULARY, bias=False, dtype=dtype)
        self.rotary = te.attention.RotaryPositionEmbedding(hidden // heads)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        angles = self.rotary(tokens.shape[1]).to(x.device)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles)
        logits: Tensor = self.head(self.norm(x))
        return logits


def batch_of(text: Tensor, step: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Random windows of the text and their next bytes [batch, length]; they depend on the step only."""
    starts = torch.randint(
        len(text) - length - 1, (batch,), generator=torch.Generator().manual_seed(step)
    )
    windows = torch.stack([text[start : start + length + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


def main(argv: list[str] | None = None) -> list[float]:
    """Train and return the losses of the steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--recipe",
        choices=[*RECIPES, "none"],
        default="delayed",
        help="recipe of the matrix products; none: high precision (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=200, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--batch", type=int, default=8, help="sequences per step (default: %(default)s)"
    )
    parser.add_argument(
        "--length", type=int, default=64, help="tokens per sequence (default: %(default)s)"
    )
    parser.add_argument(
        "--hidden", type=int, default=128, help="hidden size (default: %(default)s)"
    )
    parser.add_argument(
        "--layers", type=int, default=2, help="Transformer layers (default: %(default)s)"
    )
    parser.add_argument(
        "--heads", type=int, default=4, help="attention heads (default: %(default)s)"
    )
    parser.add_argument(
        "--data", type=Path, default=Path(__file__), help="text file (default: this program)"
    )
    parser.add_argument("--checkpoint", type=Path, help="written after the last step")
    parser.add_argument("--resume", action="store_true", help="continue from --checkpoint")
    options = parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    model = Llama(options.hidden, options.layers, options.heads, options.heads // 2, dtype).to(
        device
    )
    # Master weights keep small updates of bfloat16 parameters; float32 parameters are their own masters.
    optimizer = te.optimizers.FusedAdam(
        model.parameters(), lr=2e-3, weight_decay=0.1, master_weights=dtype is torch.bfloat16
    )
    scaling = None if options.recipe == "none" else RECIPES[options.recipe]()
    first = 0
    if options.resume:
        state = torch.load(options.checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]

    text = (
        torch.frombuffer(bytearray(options.data.read_bytes()), dtype=torch.uint8).long().to(device)
    )
    losses = []
    for step in range(first, options.steps):
        inputs, targets = batch_of(text, step, options.batch, options.length)
        with te.autocast(enabled=scaling is not None, recipe=scaling):  # the forward pass only
            logits = model(inputs)
        loss = te.parallel_cross_entropy(logits, targets, reduce_loss=True, overwrite_input=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step + 1:4}  loss {losses[-1]:.3f}")
    if options.checkpoint is not None:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": options.steps,
        }
        torch.save(state, options.checkpoint)
    return losses


if __name__ == "__main__":
    main()
