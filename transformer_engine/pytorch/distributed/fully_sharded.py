"""prepare_te_modules_for_fsdp: record the FSDP process group on each wrapped layer."""

from __future__ import annotations

import torch


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
            f"the root is a {type(fsdp_root).__name__}; wrap it in torch.distributed.fsdp.FullyShardedDataParallel "
            "first, or use fully_shard, which needs no preparation"
        )
    wrapped = [m for m in fsdp_root.modules() if isinstance(m, FullyShardedDataParallel)]
    layers = [(wrapper, wrapper.module) for wrapper in wrapped if hasattr(wrapper.module, "fp8_meta")]
    for _, layer in layers:
        if getattr(layer, "primary_weights_in_fp8", False):
            raise RuntimeError(
                f"{type(layer).__name__} holds quantized parameters, which FullyShardedDataParallel cannot shard; "
                "use torch.distributed.fsdp.fully_shard, or leave quantized_model_init"
            )
    for wrapper, layer in layers:
        layer.fsdp_group = wrapper.process_group  # pyright: ignore
