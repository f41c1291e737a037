"""Generate text for many requests with a paged cache and continuous batching: `python examples/continuous_batching.py`.

Requests join the batch when a place and enough pages are free, and leave it when they are complete. A step processes
the prompts of new requests and one token of every other request together. The weights are random: the program shows
the scheduling, and checks that batching does not change a request's tokens.
"""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import transformer_engine.pytorch as te

HIDDEN, HEADS, KEY_VALUE_HEADS, VOCABULARY = 64, 4, 2, 96
LONGEST, PAGE = 128, 16  # tokens of a sequence, tokens of a page


@dataclass
class Request:
    """A prompt, the number of tokens to generate, and the tokens so far."""

    name: int
    prompt: list[int]
    count: int
    generated: list[int] = field(default_factory=list)

    @property
    def pages(self) -> int:
        """Pages that the complete sequence needs."""
        return -(-(len(self.prompt) + self.count) // PAGE)


class Decoder(nn.Module):
    """A small causal language model whose layers read and write a cache of keys and values."""

    def __init__(self, layers: int, device: str):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, device=device)
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                HIDDEN,
                4 * HIDDEN,
                HEADS,
                num_gqa_groups=KEY_VALUE_HEADS,
                layer_number=number + 1,
                attn_input_format="bshd",
                self_attn_mask_type="causal",
                device=device,
            )
            for number in range(layers)
        )
        self.head = nn.Linear(HIDDEN, VOCABULARY, device=device)
        self.angles = te.attention.RotaryPositionEmbedding(HIDDEN // HEADS)(LONGEST).to(device)

    def forward(self, tokens: Tensor, cache: te.InferenceParams) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.angles, inference_params=cache)
        logits: Tensor = self.head(x)
        return logits


@torch.no_grad()
def generate(model: Decoder, requests: list[Request], places: int, pages: int) -> int:
    """Complete all requests with at most `places` sequences and `pages` pages at a time; return the steps."""
    device = model.head.weight.device
    cache = te.InferenceParams(
        max_batch_size=places,
        max_sequence_length=LONGEST,
        num_heads_kv=KEY_VALUE_HEADS,
        head_dim_k=HIDDEN // HEADS,
        dtype=torch.float32,
        is_paged=True,
        page_size=PAGE,
        total_num_pages=pages,
    )
    waiting, running, steps = deque(requests), list[Request](), 0
    while waiting or running:
        used = sum(request.pages for request in running)
        while waiting and len(running) < places and used + waiting[0].pages <= pages:
            used += waiting[0].pages
            running.append(waiting.popleft())
        if not running:
            raise ValueError(
                f"request {waiting[0].name} needs {waiting[0].pages} of {pages} pages; raise --pages"
            )
        # A new request contributes its prompt, every other request its last token.
        rows = [request.generated[-1:] or request.prompt for request in running]
        longest = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        cache.pre_step({request.name: len(row) for request, row in zip(running, rows, strict=True)})
        logits = model(tokens, cache)
        for index, (request, row) in enumerate(zip(running, rows, strict=True)):
            request.generated.append(int(logits[index, len(row) - 1].argmax()))
        running = [request for request in running if len(request.generated) < request.count]
        steps += 1
    return steps


def main(argv: list[str] | None = None) -> dict[int, list[int]]:
    """Generate and return the tokens of each request."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=8,
        help="requests that join the batch (default: %(default)s)",
    )
    parser.add_argument("--places", type=int, default=4, help="sequences per step")
    parser.add_argument(
        "--pages", type=int, default=16, help="pages of the cache, shared by the sequences"
    )
    parser.add_argument(
        "--layers", type=int, default=2, help="Transformer layers (default: %(default)s)"
    )
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    model = Decoder(options.layers, "cuda" if torch.cuda.is_available() else "cpu").eval()
    draw = torch.Generator().manual_seed(1)
    requests = [
        Request(
            name,
            torch.randint(
                VOCABULARY, (int(torch.randint(3, 30, (), generator=draw)),), generator=draw
            ).tolist(),
            int(torch.randint(4, 12, (), generator=draw)),
        )
        for name in range(options.requests)
    ]
    steps = generate(model, requests, options.places, options.pages)
    for request in requests:
        print(
            f"request {request.name}: {len(request.prompt):2} prompt tokens -> {request.generated}"
        )
    print(f"{steps} steps for {sum(request.count for request in requests)} tokens")
    return {request.name: request.generated for request in requests}


if __name__ == "__main__":
    main()
