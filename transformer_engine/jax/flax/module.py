"""Dense-layer and norm modules, at NVIDIA's path."""

from ...common import absent
from .attention import Softmax
from .base import TransformerEngineBase
from .dense_general import DenseGeneral
from .layernorm_dense_general import LayerNormDenseGeneral
from .layernorm_mlp import LayerNormMLP
from .low_rank import _apply_low_rank_adaptation, _normalize_axes
from .norm import LayerNorm

__all__ = [
    "DenseGeneral",
    "LayerNorm",
    "LayerNormDenseGeneral",
    "LayerNormMLP",
    "Softmax",
    "TransformerEngineBase",
    "_apply_low_rank_adaptation",
    "_normalize_axes",
]

absent.install_getter(__name__)
