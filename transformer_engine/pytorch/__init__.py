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
from .constants import CPLoadBalancingStrategy, DType
from .cpu_offload import ManualOffloadSynchronizer, get_cpu_offload_context, mark_not_offload
from .cross_entropy import fused_linear_cross_entropy, parallel_cross_entropy
from .distributed import CudaRNGStatesTracker, checkpoint
from .export import onnx_export
from .functions import by_name
from .graph import graphed, make_graphed_callables
from .inspect.algorithms import autotune, deterministic
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
from .module.userbuffers import UserBufferQuantizationMode, destroy_ub, initialize_ub
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
from .tensor.module_parameters import load_plain_state_dict, plain_state_dict
from .transformer import TransformerLayer
from .utils import deinterleave_glu_tensor, interleave_glu_tensor

# The quantizers and containers of every format, and is_<kind>_available of every kind of format.
globals().update(tensor.EXPORTS | quantization.availability())

# The original has a module for this one function, and a package attribute of the same name that is the function.
sys.modules[f"{__name__}.torch_version"] = jit
torch_version = jit.torch_version

if TYPE_CHECKING:
    from . import conversion as conversion
    from . import ep as ep
    from . import integrations as integrations
    from .conversion import save_quantized
    from .integrations.huggingface import convert_hf, revert_hf

# Imported on first use. cpp_extensions is built on transformer_engine_torch, which imports this package.
# Checkpoint conversion and integrations take a tenth of the import time, and most programs do not use them.
_LAZY_SUBMODULES = ("conversion", "cpp_extensions", "distributed_weight", "ep", "integrations", "triton")
_LAZY_NAMES = {
    "convert_hf": "integrations.huggingface",
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
    return sorted({*globals(), *_LAZY_SUBMODULES, *_LAZY_NAMES})


__getattr__ = absent.getter(
    __name__, {name: functools.partial(_load, name) for name in (*_LAZY_SUBMODULES, *_LAZY_NAMES)}
)
# Without __all__, `from transformer_engine.pytorch import *` would omit the lazy names. Names of Python's own libraries
# are imported above and do not belong to the package.
_FROM_PYTHON = ("Any", "TYPE_CHECKING", "annotations", "functools", "importlib", "sys")
__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    name for name in __dir__() if not name.startswith("_") and name not in _FROM_PYTHON
]
absent.install_getters("transformer_engine")
