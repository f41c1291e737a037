"""UnfusedDotProductAttention: the reference backend as a module, under NVIDIA's name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....common.dispatch import use_backend
from .dot_product_attention import DotProductAttention


class UnfusedDotProductAttention(torch.nn.Module):
    """out [.., h * d_v] = softmax(softmax_scale * q k^T + bias) v by plain float32 operations.

    The arguments have the same names as in DotProductAttention. softmax_type "learnable" needs a parameter,
    which only DotProductAttention has, and raises NotImplementedError here. A `use_backend(attention=...)`
    around the call forces another backend; compiled code calls DotProductAttention instead.
    """

    def __init__(
        self,
        softmax_scale: float,
        *,
        attention_type: str = "self",
        attention_dropout: float = 0.0,
        layer_number: int | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
    ) -> None:
        super().__init__()
        if softmax_type == "learnable":
            raise ValueError(
                "softmax_type='learnable' needs a parameter, which this module does not have; use DotProductAttention "
                "inside use_backend(attention='reference')"
            )
        self.options: dict[str, Any] = {
            "softmax_scale": softmax_scale,
            "attention_type": attention_type,
            "attention_dropout": attention_dropout,
            "layer_number": layer_number,
            "softmax_type": softmax_type,
            "return_max_logit": return_max_logit,
        }
        self._layers: dict[tuple[int, int, int, int], DotProductAttention] = {}

    def forward(
        self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, **options: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return out, or (out, max_logit [h]); options are the keywords of DotProductAttention.forward."""
        sizes = (
            query_layer.shape[-2],
            key_layer.shape[-2],
            query_layer.shape[-1],
            value_layer.shape[-1],
        )
        layer = self._layer(sizes).train(self.training)
        with use_backend(attention="reference"):
            return layer(query_layer, key_layer, value_layer, **options)

    def _layer(self, sizes: tuple[int, int, int, int]) -> DotProductAttention:
        if sizes not in self._layers:
            heads, groups, size_qk, size_v = sizes
            self._layers[sizes] = DotProductAttention(
                heads, (size_qk, size_v), num_gqa_groups=groups, **self.options
            )
        return self._layers[sizes]
