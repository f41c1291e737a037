"""Ranks working together: collectives, the tensor-parallel boundary, random states, recomputation."""

from .collectives import (
    allreduce,
    gather_along_first_dim,
    rank,
    reduce_scatter_along_first_dim,
    symmetric_all_reduce,
    world_size,
)
from .recompute import (
    activation_recompute_forward,
    checkpoint,
    has_te_modules,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
)
from .rng import CudaRNGStatesTracker, get_all_rng_states, graph_safe_rng_available, set_all_rng_states
from .tensor_parallel import (
    TensorParallel,
    initialize_affine_weight_gpu,
    set_tensor_model_parallel_attributes,
)

__all__ = [
    "CudaRNGStatesTracker",
    "TensorParallel",
    "activation_recompute_forward",
    "allreduce",
    "checkpoint",
    "gather_along_first_dim",
    "get_all_rng_states",
    "graph_safe_rng_available",
    "has_te_modules",
    "in_fp8_activation_recompute_phase",
    "initialize_affine_weight_gpu",
    "is_fp8_activation_recompute_enabled",
    "rank",
    "reduce_scatter_along_first_dim",
    "set_all_rng_states",
    "set_tensor_model_parallel_attributes",
    "symmetric_all_reduce",
    "world_size",
]
