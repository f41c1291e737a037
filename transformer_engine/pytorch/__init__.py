"""transformer_engine.pytorch: layers, recipes and quantized tensors for PyTorch, on a GPU or a CPU."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any

from . import requirements  # isort: skip
from .runtime import plugins  # isort: skip  (loads the plugin of NVTE_PLUGIN)
from .. import common as common
from ..common import absent
from ..common import recipe as recipe
from ..common.dispatch import use_backend
from ..common.planning import plan
from . import float8_tensor as float8_tensor
from . import fp8 as fp8
from . import jit, ops, optimizers, quantization, tensor
from . import router as router
from .attention import (
    DotProductAttention,
    GatedDeltaNet2Attention,
    GatedDeltaNetAttention,
    GatedDeltaProductAttention,
    InferenceParams,
    MultiheadAttention,
    RotaryPositionEmbedding,
)
from .attention.mla_projection import FusedMLAQUpProjFunction, FusedMLAQUpProjRopeQuant
from .compat import by_name
from .constants import CPLoadBalancingStrategy, DType
from .cpu_offload import ManualOffloadSynchronizer, get_cpu_offload_context, mark_not_offload
from .cross_entropy import fused_linear_cross_entropy, parallel_cross_entropy
from .distributed import CudaRNGStatesTracker, checkpoint
from .distributed.userbuffers import UserBufferQuantizationMode, destroy_ub, initialize_ub
from .export import onnx_export
from .graph import graphed, make_graphed_callables
from .inspect.algorithms import autotune, deterministic
from .inspect.batch_invariance import batch_invariant, is_batch_invariant
from .inspect.explain import explain
from .inspect.memory_plan import memory_plan
from .inspect.observation import Observation, observe
from .inspect.verification import verify
from .inspect.verification_report import Verification
from .module import (
    Fp8Padding,
    Fp8Unpadding,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
)
from .newton_schulz import CusolverMpCtx, newton_schulz, newton_schulz_tp
from .permutation import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from .quantization import (
    DelayedScalingRequest,
    QuantizerRequest,
    QuantizerRole,
    autocast,
    emulate,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)
from .quantized_tensor import prepare_for_saving, restore_from_func_ctx, restore_from_saved
from .runtime.device import get_cudnn_version, get_device_compute_capability
from .runtime.device_checks import check
from .tensor import (
    GroupedTensor,
    GroupedTensorStorage,
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
)
from .tensor.formats import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Float8TensorStorage,
    HybridQuantizedTensor,
    HybridQuantizedTensorStorage,
    HybridQuantizer,
    IdentityQuantizer,
    IdentityTensor,
    IdentityTensorStorage,
    MXFP8Quantizer,
    MXFP8Tensor,
    MXFP8TensorStorage,
    NVFP4Quantizer,
    NVFP4Tensor,
    NVFP4TensorStorage,
)
from .tensor.module_parameters import load_plain_state_dict, plain_state_dict
from .transformer import TransformerLayer
from .utils import deinterleave_glu_tensor, interleave_glu_tensor

# NVIDIA's engine has a module for this one function, and a package attribute with the same name that is the function.
sys.modules[f"{__name__}.torch_version"] = jit
torch_version = jit.torch_version

if TYPE_CHECKING:
    # Submodules that the statements above import.
    from . import (
        attention,
        constants,
        cpu_offload,
        cross_entropy,
        distributed,
        export,
        graph,
        module,
        permutation,
        quantized_tensor,
        transformer,
        utils,
    )

    # Submodules and names that `_load` imports.
    from . import conversion, cpp_extensions, distributed_weight, ep, integrations, triton  # isort: skip
    from .conversion import save_quantized
    from .integrations.huggingface import convert_hf, revert_hf
    from .integrations.torch_modules import conversion_table, convert, restore

__all__ = [
    "CPLoadBalancingStrategy",
    "CudaRNGStatesTracker",
    "CusolverMpCtx",
    "DType",
    "DelayedScalingRequest",
    "DotProductAttention",
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "Fp8Padding",
    "Fp8Unpadding",
    "FusedMLAQUpProjFunction",
    "FusedMLAQUpProjRopeQuant",
    "GatedDeltaNet2Attention",
    "GatedDeltaNetAttention",
    "GatedDeltaProductAttention",
    "GroupedLinear",
    "GroupedTensor",
    "GroupedTensorStorage",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "HybridQuantizer",
    "IdentityQuantizer",
    "IdentityTensor",
    "IdentityTensorStorage",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "ManualOffloadSynchronizer",
    "MultiheadAttention",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "Observation",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "QuantizerRequest",
    "QuantizerRole",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "UserBufferQuantizationMode",
    "Verification",
    "attention",
    "autocast",
    "autotune",
    "batch_invariant",
    "check",
    "checkpoint",
    "common",
    "constants",
    "conversion",
    "conversion_table",
    "convert",
    "convert_hf",
    "cpp_extensions",
    "cpu_offload",
    "cross_entropy",
    "deinterleave_glu_tensor",
    "destroy_ub",
    "deterministic",
    "distributed",
    "distributed_weight",
    "emulate",
    "ep",
    "explain",
    "export",
    "float8_tensor",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "fused_linear_cross_entropy",
    "get_cpu_offload_context",
    "get_cudnn_version",
    "get_default_recipe",
    "get_device_compute_capability",
    "graph",
    "graphed",
    "initialize_ub",
    "integrations",
    "interleave_glu_tensor",
    "is_batch_invariant",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "jit",
    "load_plain_state_dict",
    "make_graphed_callables",
    "mark_not_offload",
    "memory_plan",
    "module",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "newton_schulz",
    "newton_schulz_tp",
    "observe",
    "onnx_export",
    "ops",
    "optimizers",
    "parallel_cross_entropy",
    "permutation",
    "plain_state_dict",
    "plan",
    "prepare_for_saving",
    "quantization",
    "quantized_model_init",
    "quantized_tensor",
    "recipe",
    "restore",
    "restore_from_func_ctx",
    "restore_from_saved",
    "revert_hf",
    "router",
    "save_quantized",
    "tensor",
    "torch_version",
    "transformer",
    "triton",
    "use_backend",
    "utils",
    "verify",
]

# Imported on first use. cpp_extensions is built on transformer_engine_torch, which imports this package.
# Checkpoint conversion and integrations take a tenth of the import time, and most programs do not use them.
_LAZY_SUBMODULES = (
    "conversion",
    "cpp_extensions",
    "distributed_weight",
    "ep",
    "integrations",
    "triton",
)
_LAZY_NAMES = {
    "conversion_table": "integrations.torch_modules",
    "convert": "integrations.torch_modules",
    "convert_hf": "integrations.huggingface",
    "restore": "integrations.torch_modules",
    "revert_hf": "integrations.huggingface",
    "save_quantized": "conversion",
}


def _load(name: str) -> Any:
    """Import a lazy public name and store it in this module."""
    if name in _LAZY_SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY_NAMES[name]}"), name)
    globals()[name] = value
    return value


by_name.provide_extensions(functools.partial(_load, "cpp_extensions"))


def __dir__() -> list[str]:
    return sorted(__all__)


absent.install_getter(
    __name__, {name: functools.partial(_load, name) for name in (*_LAZY_SUBMODULES, *_LAZY_NAMES)}
)
absent.install_getters("transformer_engine")
