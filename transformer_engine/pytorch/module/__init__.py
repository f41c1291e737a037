"""The layers: nn.Modules that hold parameters and turn their state into the specs that functions take."""

from ..distributed.userbuffers import UserBufferQuantizationMode, destroy_ub, initialize_ub
from .base import TransformerEngineBaseModule
from .fp8_padding import Fp8Padding
from .fp8_unpadding import Fp8Unpadding
from .grouped_linear import GroupedLinear, is_module_grouped_tensor_path_supported
from .layernorm import LayerNorm
from .layernorm_linear import LayerNormLinear
from .layernorm_mlp import LayerNormMLP
from .linear import Linear
from .rmsnorm import RMSNorm

__all__ = [
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "TransformerEngineBaseModule",
    "UserBufferQuantizationMode",
    "destroy_ub",
    "initialize_ub",
    "is_module_grouped_tensor_path_supported",
]
