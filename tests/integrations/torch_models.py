"""Small models of plain PyTorch: a decoder with grouped projections, an encoder with biases, experts in a loop."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEAD, VOCABULARY, LENGTH = 64, 16, 96, 24


class Attention(nn.Module):
    def __init__(self, causal: bool = True, groups: int = 4) -> None:
        super().__init__()
        self.causal = causal
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, groups * HEAD, bias=False) for _ in range(2))
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.wo(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """RMSNorm, attention and SwiGLU, as in torchtitan's Llama."""

    def __init__(self, groups: int = 4) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(2))
        self.attention = Attention(groups=groups)
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Decoder(nn.Module):
    """A causal language model from tokens [b, s] to logits [b, s, vocabulary]."""

    def __init__(self, layers: int = 2, tied: bool = False, groups: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block(groups) for _ in range(layers)])
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class Encoder(nn.Module):
    """LayerNorm, biases and GELU, as in a vision transformer; features [b, s, WIDTH] to classes [b, 16]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(causal=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(x.mean(1))


class Experts(nn.Module):
    """A router and experts in a loop, each with the tokens that choose it; the last one receives none."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(experts)])
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.arange(len(x)) % 7 % (len(self.experts) - 1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            y = y.index_add(0, rows, expert(x[rows]))
        return y * self.scale


def tokens(batch: int = 2) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def features(batch: int = 2) -> Tensor:
    return torch.randn(batch, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
