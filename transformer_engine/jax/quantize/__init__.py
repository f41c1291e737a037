"""Quantizers, quantized tensors and recipes of transformer_engine.jax."""

from . import device_utils, helper, metadata, misc, quantizer, tensor
from .config import (
    NVTE_FP8_COLLECTION_NAME,
    QuantizeConfig,
    autocast,
    fp8_autocast,
    get_device_compute_capability,
    get_global_quantize_recipe,
    get_quantization_recipe,
    get_quantize_config,
    get_quantize_config_with_recipe,
    get_supported_quantization_recipes,
    get_supported_scaling_modes,
    is_fp8_available,
    is_fp8_gemm_with_all_layouts_supported,
    is_quantize_recipe_supported,
    is_scaling_mode_supported,
    update_collections,
)
from .factory import QuantizeMeta, QuantizeMetaSet, QuantizerFactory
from .grouped import GroupedNoScaleTensor, GroupedQuantizer, GroupedScaledTensor1x
from .hadamard import apply_rht, get_rht_matrix, get_wgrad_sign_vector, should_use_rht
from .quantizers import (
    BlockScaleQuantizer,
    CurrentScaleQuantizer,
    DelayedScaleQuantizer,
    NVFP4Quantizer,
    Quantizer,
    QuantizerSet,
    noop_quantizer_set,
)
from .scaling_modes import AmaxComputeAlgo, QuantizeLayout, ScalingMode, TensorSource, TensorUsage
from .settings import compute_scale_from_amax
from .sharing import fan_out
from .tensors import (
    AbstractBaseTensor,
    AbstractBaseTensor1x,
    NoScaleTensor,
    ScaledTensor,
    ScaledTensor1x,
    ScaledTensor2x,
    ScaledTensorFactory,
    ScalingModeToDequantizerMap,
)
