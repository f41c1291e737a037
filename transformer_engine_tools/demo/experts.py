"""A Transformer layer whose feed-forward part is a mixture of experts: two experts compute each byte.

scores = router(norm(x)); rows = the tokens in expert order, each expert's padded for the recipe y =
x + sum over a token's experts of probability * fc2_e(swiglu(fc1_e(row)))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from transformer_engine import pytorch as te
from transformer_engine.pytorch.functions.activation import activation
from transformer_engine.pytorch.module.row_groups import alignment
from transformer_engine.pytorch.router import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)
from transformer_engine.pytorch.runtime.autograd import TorchFunction
from transformer_engine.pytorch.runtime.double_backward import once_differentiable

from .config import RunConfig

CHOSEN = 2  # experts per token
BALANCE = 0.01  # the weight of the loss that balances experts, as in the Switch Transformer (arXiv:2101.03961)


class MixtureOfExperts(nn.Module):
    """y [.., hidden] = sum of probability * fc2_e(swiglu(fc1_e(norm(x)))) over a token's two experts.

    The router stays in float32: with one output an expert it is little work, and decides for whole tokens. In training
    the gradient includes the load-balancing loss, which the reported loss excludes.
    """

    def __init__(self, config: RunConfig, deviation: float):
        super().__init__()
        device, dtype, count = config.device, getattr(torch, config.precision), config.experts
        # as much work a token as one feed-forward layer
        inner = -(-config.feed_forward // (CHOSEN * 128)) * 128
        options: dict[str, Any] = {"bias": False, "params_dtype": dtype, "device": device}
        self.norm = te.RMSNorm(config.hidden, device=device, dtype=dtype)
        self.router = nn.Linear(
            config.hidden, count, bias=False, device=device, dtype=torch.float32
        )
        self.fc1 = te.GroupedLinear(
            count, config.hidden, 2 * inner, init_method=_normal(0.02), **options
        )
        self.fc2 = te.GroupedLinear(
            count, inner, config.hidden, init_method=_normal(deviation), **options
        )
        nn.init.normal_(self.router.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, -2)
        probs, routing_map, loss = self._route(tokens)
        rows, _, row_id_map, pad_offsets, splits = te.moe_permute_and_pad_with_probs(
            tokens, probs, routing_map, routing_map.sum(0), alignment()
        )
        rows = self.fc2(activation("swiglu", self.fc1(rows, splits)), splits)
        y = te.moe_unpermute(rows, row_id_map, probs, pad_offsets=pad_offsets)
        return (y if loss is None else _AddAuxiliaryLoss.apply(y, loss)).view(x.shape)

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute the experts' weights [tokens, experts], the map of chosen experts, and the load-balancing loss."""
        logits = self.router(tokens.float())
        probs, routing_map = fused_topk_with_score_function(
            logits,
            CHOSEN,
            use_pre_softmax=False,
            num_groups=None,
            group_topk=None,
            scaling_factor=None,
            score_function="softmax",
            expert_bias=None,
        )
        if not torch.is_grad_enabled():
            return probs, routing_map, None
        _, scores = fused_compute_score_for_moe_aux_loss(logits, CHOSEN, "softmax")
        count, experts = logits.shape
        loss = fused_moe_aux_loss(scores, routing_map.sum(0), count, experts, CHOSEN, BALANCE)
        return probs, routing_map, loss


class ExpertsLayer(nn.Module):
    """y = h + experts(norm(h)), h = x + attention(norm(x)); causal, as the dense layers of the demonstration."""

    def __init__(self, config: RunConfig, number: int, deviation: float):
        super().__init__()
        self.attention = te.MultiheadAttention(
            config.hidden,
            config.heads,
            attention_dropout=0.0,
            init_method=_normal(0.02),
            output_layer_init_method=_normal(deviation),
            layer_number=number,
            attn_mask_type="causal",
            input_layernorm=True,
            normalization="RMSNorm",
            fuse_qkv_params=True,
            bias=False,
            params_dtype=getattr(torch, config.precision),
            device=config.device,
            qkv_format="bshd",
        )
        self.experts = MixtureOfExperts(config, deviation)

    def forward(
        self, x: Tensor, rotary_pos_emb: Tensor, inference_params: te.InferenceParams | None = None
    ) -> Tensor:
        attended = self.attention(
            x, rotary_pos_emb=rotary_pos_emb, inference_params=inference_params
        )
        x = x + attended
        return x + self.experts(x)


class _AddAuxiliaryLoss(TorchFunction):
    """y unchanged; `loss` gets a gradient as if it were added to the training loss."""

    @staticmethod
    def forward(ctx, y, loss):
        return y.view_as(y)

    @staticmethod
    @once_differentiable("the loss that balances experts")
    def backward(ctx, dy):
        return dy, torch.ones((), dtype=torch.float32, device=dy.device)


def _normal(deviation: float) -> Any:
    return lambda weight: nn.init.normal_(weight, std=deviation)
