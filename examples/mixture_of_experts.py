"""Train a mixture of experts in FP8: `python examples/mixture_of_experts.py`.

The router sends each token to two of the experts. The products of all experts are one grouped product per layer, in
which each expert has its own scale.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

CHOSEN = 2  # experts per token
BALANCE = 0.01  # weight of the loss that balances the experts


class MixtureOfExperts(nn.Module):
    """A gated feed-forward layer [tokens, hidden] -> [tokens, hidden] of several experts."""

    def __init__(self, hidden: int, inner: int, experts: int, device: str):
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(hidden, experts, bias=False, device=device)
        self.fc1 = te.GroupedLinear(experts, hidden, 2 * inner, bias=False, device=device)
        self.fc2 = te.GroupedLinear(experts, inner, hidden, bias=False, device=device)
        self.padding, self.unpadding = te.Fp8Padding(experts), te.Fp8Unpadding(experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs, the balancing loss and the number of tokens of each expert."""
        logits = self.router(x)
        probs, routing_map = te.router.fused_topk_with_score_function(
            logits, CHOSEN, False, None, None, None, "softmax", None
        )
        counts = routing_map.sum(0)
        _, scores = te.router.fused_compute_score_for_moe_aux_loss(logits, CHOSEN, "softmax")
        balance = te.router.fused_moe_aux_loss(
            scores, counts, len(x), self.experts, CHOSEN, BALANCE
        )

        rows, row_id_map = te.moe_permute(x, routing_map, len(x) * CHOSEN)  # sorted by expert
        splits = counts.tolist()
        rows, padded = self.padding(rows, splits)  # FP8 products need multiples of 16 rows
        gate, linear = self.fc1(rows, padded).chunk(2, dim=-1)
        rows = self.unpadding(self.fc2(F.silu(gate) * linear, padded), splits)
        return te.moe_unpermute(rows, row_id_map, probs), balance, counts


def main(argv: list[str] | None = None) -> list[float]:
    """Train and return the losses of the steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=60, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--experts", type=int, default=8, help="experts of the layer (default: %(default)s)"
    )
    parser.add_argument("--hidden", type=int, default=64, help="hidden size (default: %(default)s)")
    options = parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    layer = MixtureOfExperts(options.hidden, 2 * options.hidden, options.experts, device)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    # Tokens come from as many clusters as there are experts, and each cluster has its own function.
    centers = torch.randn(options.experts, options.hidden)
    functions = torch.randn(options.experts, options.hidden, options.hidden) / options.hidden**0.5

    losses = []
    counts = torch.zeros(options.experts)
    for step in range(options.steps):
        draw = torch.Generator().manual_seed(step)
        cluster = torch.randint(options.experts, (256,), generator=draw)
        tokens = centers[cluster] + torch.randn(256, options.hidden, generator=draw) / 2
        target = torch.einsum("th,tho->to", tokens, functions[cluster]).to(device)
        with te.autocast(recipe=Float8CurrentScaling()):
            output, balance, counts = layer(tokens.to(device))
        loss = (output - target).square().mean()
        (loss + balance).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step + 1:4}  loss {losses[-1]:.3f}  tokens per expert {counts.tolist()}")
    return losses


if __name__ == "__main__":
    main()
