"""Distributed training: collectives, tensor parallelism, random states, recomputation."""

import functools
from typing import TYPE_CHECKING, Any

import torch

from ...common import absent
from ...common.numbers import with_article
from .collectives import (
    DeferredGather,
    allreduce,
    gather_along_first_dim,
    gather_split_1d_tensor,
    get_distributed_rank,
    get_distributed_world_size,
    rank,
    reduce_scatter_along_first_dim,
    split_tensor_into_1d_equal_chunks,
    world_size,
)
from .faults import named_failures
from .recompute import (
    activation_recompute_forward,
    checkpoint,
    get_activation_recompute_contexts,
    has_te_modules,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
)
from .rng import (
    CudaRNGStatesTracker,
    get_all_rng_states,
    graph_safe_rng_available,
    is_graph_safe_rng_state,
    set_all_rng_states,
)
from .symmetric_memory import (
    get_symmetric_memory_tensor,
    is_symm_backed,
    release_symm_mem_pool,
    symm_mem_alloc,
    symmetric_all_reduce,
)
from .tensor_parallel import (
    TensorParallel,
    initialize_affine_weight_gpu,
    set_tensor_model_parallel_attributes,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import (
        FullyShardedDataParallel as FullyShardedDataParallel,  # created on first use
    )

__all__ = [
    "CudaRNGStatesTracker",
    "DeferredGather",
    "TensorParallel",
    "activation_recompute_forward",
    "allreduce",
    "checkpoint",
    "gather_along_first_dim",
    "gather_split_1d_tensor",
    "get_activation_recompute_contexts",
    "get_all_rng_states",
    "get_distributed_rank",
    "get_distributed_world_size",
    "get_symmetric_memory_tensor",
    "graph_safe_rng_available",
    "has_te_modules",
    "in_fp8_activation_recompute_phase",
    "initialize_affine_weight_gpu",
    "is_fp8_activation_recompute_enabled",
    "is_graph_safe_rng_state",
    "is_symm_backed",
    "named_failures",
    "prepare_te_modules_for_fsdp",
    "rank",
    "reduce_scatter_along_first_dim",
    "release_symm_mem_pool",
    "set_all_rng_states",
    "set_tensor_model_parallel_attributes",
    "split_tensor_into_1d_equal_chunks",
    "symm_mem_alloc",
    "symmetric_all_reduce",
    "world_size",
]

# Callers test with this original name whether a handle gathers packed codes.
_NVFP4AllGatherAsyncHandle = DeferredGather


def prepare_te_modules_for_fsdp(fsdp_root: torch.nn.Module) -> None:
    """Validate a model wrapped in FullyShardedDataParallel and set `fsdp_group` on each wrapped layer.

    Each rank keeps the full activations that its layers save for the backward pass, so they need no gather. The
    attribute exists for callers that read it.

    Args:
        fsdp_root: The outermost `torch.distributed.fsdp.FullyShardedDataParallel` wrapper.

    Raises:
        TypeError: The root is not wrapped in FullyShardedDataParallel.
        RuntimeError: A wrapped layer holds quantized parameters, which FullyShardedDataParallel cannot shard.
    """
    # Importing FSDP takes as long as importing the rest of the package, and only callers that use FSDP need it.
    from torch.distributed.fsdp import FullyShardedDataParallel

    if not isinstance(fsdp_root, FullyShardedDataParallel):
        raise TypeError(
            f"the root is {with_article(type(fsdp_root))}; wrap it in torch.distributed.fsdp.FullyShardedDataParallel "
            "first, or use fully_shard, which needs no preparation"
        )
    wrapped = [m for m in fsdp_root.modules() if isinstance(m, FullyShardedDataParallel)]
    # Layers with quantizers, and linear attention, which has none.
    layers = [
        (wrapper, wrapper.module) for wrapper in wrapped if hasattr(wrapper.module, "fast_setattr")
    ]
    for _, layer in layers:
        if getattr(layer, "primary_weights_in_fp8", False):
            raise RuntimeError(
                f"{type(layer).__name__} holds quantized parameters, which FullyShardedDataParallel cannot shard; "
                "use torch.distributed.fsdp.fully_shard, or leave quantized_model_init"
            )
    for wrapper, layer in layers:
        layer.fsdp_group = wrapper.process_group  # pyright: ignore


@functools.cache
def _fully_sharded_class() -> type[torch.nn.Module]:
    """Define torch's FSDP class with `prepare_te_modules_for_fsdp` after wrapping."""
    # Imported on first use, as in prepare_te_modules_for_fsdp.
    from torch.distributed import fsdp

    class FullyShardedDataParallel(fsdp.FullyShardedDataParallel):
        """torch.distributed.fsdp.FullyShardedDataParallel that calls `prepare_te_modules_for_fsdp` after wrapping.

        Args:
            module: The module to shard. Its layers must not hold quantized parameters.
            *args: Further arguments for torch's class.
            **kwargs: Further arguments for torch's class.

        Raises:
            RuntimeError: A wrapped layer holds quantized parameters.
        """

        def __init__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            super().__init__(module, *args, **kwargs)
            prepare_te_modules_for_fsdp(self)

    FullyShardedDataParallel.__module__ = __name__
    FullyShardedDataParallel.__qualname__ = "FullyShardedDataParallel"
    return FullyShardedDataParallel


absent.install_getter(__name__, {"FullyShardedDataParallel": _fully_sharded_class})
