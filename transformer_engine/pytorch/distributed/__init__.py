"""Distributed training: collectives, tensor parallelism, random states, recomputation."""

from ...common.formats import TENSOR_FORMATS
from .collectives import (
    DeferredGather,
    allreduce,
    gather_along_first_dim,
    get_distributed_rank,
    get_distributed_world_size,
    rank,
    reduce_scatter_along_first_dim,
    symmetric_all_reduce,
    world_size,
)
from .fully_sharded import prepare_te_modules_for_fsdp
from .recompute import (
    activation_recompute_forward,
    checkpoint,
    get_activation_recompute_contexts,
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
    "DeferredGather",
    "TensorParallel",
    "activation_recompute_forward",
    "allreduce",
    "checkpoint",
    "gather_along_first_dim",
    "get_activation_recompute_contexts",
    "get_all_rng_states",
    "get_distributed_rank",
    "get_distributed_world_size",
    "graph_safe_rng_available",
    "has_te_modules",
    "in_fp8_activation_recompute_phase",
    "initialize_affine_weight_gpu",
    "is_fp8_activation_recompute_enabled",
    "prepare_te_modules_for_fsdp",
    "rank",
    "reduce_scatter_along_first_dim",
    "set_all_rng_states",
    "set_tensor_model_parallel_attributes",
    "symmetric_all_reduce",
    "world_size",
]

# Callers test with these names of the original whether a handle is a gather of packed codes.
globals().update(
    {
        f"_{form.name.upper()}AllGatherAsyncHandle": DeferredGather
        for form in TENSOR_FORMATS
        if form.packing > 1
    }
)
