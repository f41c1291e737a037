"""transformer_engine.jax: layers, recipes and quantized tensors for JAX and Flax, on a GPU or a CPU."""

from . import _old_paths, requirements  # isort: skip
from .. import common
from ..common import absent
from . import (
    activation,
    attention,
    checkpoint_policies,
    cpp_extensions,
    dense,
    ep,
    flax,
    layernorm,
    layernorm_dense,
    layernorm_mlp,
    moe,
    permutation,
    quantize,
    router,
    sharding,
    softmax,
)
from .explain import explain
from .primitives.launching import prepare_compiler as _prepare_compiler
from .quantize import NVTE_FP8_COLLECTION_NAME, autocast, fp8_autocast, update_collections
from .runtime.platform import expects_gpu as _expects_gpu
from .sharding import MeshResource

__all__ = [
    "NVTE_FP8_COLLECTION_NAME",
    "MeshResource",
    "activation",
    "attention",
    "autocast",
    "checkpoint_policies",
    "common",
    "cpp_extensions",
    "dense",
    "ep",
    "explain",
    "flax",
    "fp8_autocast",
    "layernorm",
    "layernorm_dense",
    "layernorm_mlp",
    "moe",
    "permutation",
    "quantize",
    "router",
    "sharding",
    "softmax",
    "update_collections",
]


def __dir__() -> list[str]:
    return sorted(__all__)


absent.install_getters("transformer_engine")
if _expects_gpu():
    _prepare_compiler()
