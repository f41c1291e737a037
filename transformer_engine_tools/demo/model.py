"""logits [batch, sequence, 256] = a GPT over bytes: embedding, TransformerLayer blocks, RMSNorm, head."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_engine import pytorch as te

from .config import VOCABULARY, RunConfig
from .experts import ExpertsLayer


class ByteGPT(nn.Module):
    """Causal blocks with rotary positions, RMSNorm and SwiGLU.

    The blocks' matrix products use the active recipe. The embedding, the last norm and the head stay in the parameters'
    precision: with 256 outputs they are little work, and the most sensitive to rounding.

    Args:
        config: Model sizes.
        offload_layers: Number of blocks whose activations are offloaded to host memory.
        block_options: Further TransformerLayer arguments.
        context_ranks: Number of ranks that share each sequence.
    """

    def __init__(self, config: RunConfig, offload_layers: int = 0, **block_options: Any):
        super().__init__()
        self.context_ranks = 1
        self.offloaded, self.arrived, *_ = te.get_cpu_offload_context(
            enabled=offload_layers > 0, num_layers=offload_layers, model_layers=config.layers
        )
        device, dtype = torch.device(config.device), parameter_dtype(config)
        self.embedding = nn.Embedding(VOCABULARY, config.hidden, device=device, dtype=dtype)
        self.rotary = te.attention.RotaryPositionEmbedding(config.hidden // config.heads).to(device)
        self.layers = nn.ModuleList(
            _block(config, number, **block_options) for number in range(1, config.layers + 1)
        )
        self.norm = te.RMSNorm(config.hidden, device=device, dtype=dtype)
        self.head = nn.Linear(config.hidden, VOCABULARY, bias=False, device=device, dtype=dtype)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor, cache: te.InferenceParams | None = None) -> Tensor:
        """Compute logits for tokens [batch, sequence]; with a cache, tokens follow the cached ones."""
        length = (
            tokens.shape[1] * self.context_ranks if cache is None else cache.max_sequence_length
        )
        positions = self.rotary(length)
        hidden = self.embedding(tokens)
        trains = torch.is_grad_enabled()  # otherwise nothing is saved for a backward pass
        for layer in self.layers:
            with self.offloaded if trains else nullcontext():
                hidden = layer(hidden, rotary_pos_emb=positions, inference_params=cache)
            hidden = self.arrived(hidden) if trains else hidden
        return self.head(self.norm(hidden))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean cross-entropy in nats per byte, in float32."""
        logits = self(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def parameter_dtype(config: RunConfig) -> torch.dtype:
    """torch's dtype for a config's precision."""
    return getattr(torch, config.precision)


def _block(config: RunConfig, number: int, **options: Any) -> nn.Module:
    # Residual branches shrink with depth, as in GPT-2: the sum over 2 * layers branches keeps its variance.
    residual = 0.02 / (2 * config.layers) ** 0.5
    if config.experts:
        return ExpertsLayer(config, number, residual)
    return te.TransformerLayer(
        config.hidden,
        config.feed_forward,
        config.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method=lambda weight: nn.init.normal_(weight, std=0.02),
        output_layer_init_method=lambda weight: nn.init.normal_(weight, std=residual),
        layer_number=number,
        self_attn_mask_type="causal",
        params_dtype=parameter_dtype(config),
        fuse_qkv_params=True,
        bias=False,
        activation="swiglu",
        normalization="RMSNorm",
        device=config.device,
        attn_input_format="bshd",
        **options,
    )
