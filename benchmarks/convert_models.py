"""Models of plain PyTorch for `convert.py`: a Llama, a mixture of experts, vision and diffusion transformers, a GPT."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Size:
    """Model shape, and sequences per step.

    Attributes:
        kind: "llama", "moe", "vit", "dit" or "gpt".
        outputs: Vocabulary, or number of classes or channels.
        experts: Number of experts, which grouped_mm multiplies.
        chosen: Experts per token.
    """

    kind: str
    layers: int
    hidden: int
    inner: int
    heads: int
    groups: int
    outputs: int
    batch: int
    length: int
    experts: int = 0
    chosen: int = 0


SIZES = {
    "llama-1b": Size("llama", 8, 2048, 8192, 32, 8, 32768, 2, 4096),
    "qwen3-moe": Size("moe", 2, 2048, 768, 16, 4, 32768, 2, 4096, experts=128, chosen=8),
    "vit-l": Size("vit", 12, 1024, 4096, 16, 16, 1000, 64, 256),
    "dit-xl": Size("dit", 14, 1152, 4608, 16, 16, 32, 64, 256),
    "gpt-57m": Size("gpt", 8, 768, 3072, 12, 12, 256, 32, 512),
    "tiny": Size("llama", 2, 64, 128, 4, 2, 96, 2, 32),
    "tiny-moe": Size("moe", 2, 64, 32, 4, 2, 96, 2, 32, experts=4, chosen=2),
}


class Attention(nn.Module):
    """Separate projections, and torch's attention; rotary positions if angles are given."""

    def __init__(self, size: Size, bias: bool, causal: bool) -> None:
        super().__init__()
        self.head, self.causal = size.hidden // size.heads, causal
        self.grouped = size.groups != size.heads
        self.wq = nn.Linear(size.hidden, size.hidden, bias)
        self.wk, self.wv = (nn.Linear(size.hidden, size.groups * self.head, bias) for _ in range(2))
        self.wo = nn.Linear(size.hidden, size.hidden, bias)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head)) for w in (self.wq, self.wk, self.wv))
        if angles is not None:
            q, k = (_rotate(value, *angles) for value in (q, k))
        q, k, v = (value.transpose(1, 2) for value in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.grouped)
        return self.wo(y.transpose(1, 2).flatten(2))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class RotaryBlock(nn.Module):
    """RMSNorm, rotary attention and the `feed_forward` of a subclass."""

    def __init__(self, size: Size, eps: float) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(size.hidden, eps=eps) for _ in range(2))
        self.attention = Attention(size, bias=False, causal=True)

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor] | None, condition: Tensor | None
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))

    def feed_forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class LlamaBlock(RotaryBlock):
    """RMSNorm, rotary attention and SwiGLU, as in torchtitan."""

    def __init__(self, size: Size) -> None:
        super().__init__(size, eps=1e-5)
        self.w1, self.w3 = (nn.Linear(size.hidden, size.inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(size.inner, size.hidden, bias=False)

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    """SwiGLU experts in two parameters, each for the rows of the tokens that choose it, as in transformers."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.experts, self.chosen = size.experts, size.chosen
        self.router = nn.Linear(size.hidden, size.experts, bias=False)
        self.gate_up_proj = nn.Parameter(torch.empty(size.experts, 2 * size.inner, size.hidden))
        self.down_proj = nn.Parameter(torch.empty(size.experts, size.hidden, size.inner))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, numbers = self.router(tokens).float().softmax(-1).topk(self.chosen)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        ordered, order = numbers.flatten().sort()
        ends = torch.searchsorted(
            ordered, torch.arange(self.experts, device=x.device), right=True
        ).to(torch.int32)
        owners = order // self.chosen
        gate, up = F.grouped_mm(tokens[owners], self.gate_up_proj.mT, offs=ends).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * up, self.down_proj.mT, offs=ends)
        y = y * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, owners, y).view_as(x)


class ExpertsBlock(RotaryBlock):
    """RMSNorm, rotary attention and experts, as in Qwen3-MoE."""

    def __init__(self, size: Size) -> None:
        super().__init__(size, eps=1e-6)
        self.experts = Experts(size)

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.experts(x)


class EncoderBlock(nn.Module):
    """LayerNorm, attention with biases and GELU, as in timm's ViT and in GPT-2."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(size.hidden) for _ in range(2))
        self.attention = Attention(size, bias=True, causal=size.kind == "gpt")
        self.fc1, self.fc2 = nn.Linear(size.hidden, size.inner), nn.Linear(size.inner, size.hidden)

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor] | None, condition: Tensor | None
    ) -> Tensor:
        x = x + self.attention(self.norm1(x), angles)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class DiffusionBlock(nn.Module):
    """Norms without parameters that a condition shifts and scales (adaLN-Zero), as in DiT."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.norm2 = (
            nn.LayerNorm(size.hidden, elementwise_affine=False, eps=1e-6) for _ in range(2)
        )
        self.attention = Attention(size, bias=True, causal=False)
        self.fc1, self.fc2 = nn.Linear(size.hidden, size.inner), nn.Linear(size.inner, size.hidden)
        self.modulation = nn.Linear(size.hidden, 6 * size.hidden)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(condition))[
            :, None
        ].chunk(6, -1)
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1, angles)
        h = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.fc2(F.gelu(self.fc1(h), approximate="tanh"))


BLOCKS = {
    "llama": LlamaBlock,
    "moe": ExpertsBlock,
    "vit": EncoderBlock,
    "gpt": EncoderBlock,
    "dit": DiffusionBlock,
}


class Model(nn.Module):
    """Batch loss; language models read tokens, the others patch features."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.reads_tokens = size.kind in ("llama", "moe", "gpt")
        self.embedding = (nn.Embedding if self.reads_tokens else nn.Linear)(
            size.outputs, size.hidden
        )
        self.layers = nn.ModuleList([BLOCKS[size.kind](size) for _ in range(size.layers)])
        norm = (
            nn.RMSNorm(size.hidden, eps=1e-5)
            if size.kind in ("llama", "moe")
            else nn.LayerNorm(size.hidden)
        )
        self.norm, self.head = norm, nn.Linear(size.hidden, size.outputs, bias=False)
        frequencies = 1e4 ** -(
            torch.arange(0, size.hidden // size.heads, 2).float() / (size.hidden // size.heads)
        )
        angles = torch.outer(torch.arange(size.length).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos()[None, :, None], persistent=False)
        self.register_buffer("sin", angles.sin()[None, :, None], persistent=False)

    def forward(self, x: Tensor, targets: Tensor, condition: Tensor | None) -> Tensor:
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(
                h, (self.cos, self.sin) if self.size.kind in ("llama", "moe") else None, condition
            )
        y = self.head(self.norm(h))
        if self.size.kind == "dit":
            return F.mse_loss(y.float(), targets)
        if self.size.kind == "vit":
            y = y.mean(1)
        return F.cross_entropy(y.flatten(0, -2).float(), targets.flatten())


def make_model(size: Size, device: str) -> Model:
    """Model in bfloat16 with weights from N(0, 0.02), which depend on torch's seed."""
    with torch.device(device):
        model = Model(size).to(BF16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return model


def make_batch(size: Size, device: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs, targets and a diffusion transformer's condition."""
    shape = size.batch, size.length
    options = {"device": device, "dtype": BF16}
    if size.kind in ("llama", "moe", "gpt"):
        tokens = torch.randint(0, size.outputs, shape, device=device)
        return tokens, tokens.roll(-1, 1), None
    x = torch.randn(*shape, size.outputs, **options)
    if size.kind == "vit":
        return x, torch.randint(0, size.outputs, (size.batch,), device=device), None
    return (
        x,
        torch.randn(*shape, size.outputs, device=device),
        torch.randn(size.batch, size.hidden, **options),
    )
