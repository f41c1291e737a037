"""prepare_te_modules_for_fsdp: what a model under torch's first FullyShardedDataParallel has to be told."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FullyShardedDataParallel


def prepare_te_modules_for_fsdp(fsdp_root: torch.nn.Module) -> None:
    """Check a model that FSDP has wrapped, and note each wrapped layer's group as its `fsdp_group`.

    Activations that a layer keeps for its backward stay whole on every rank here, so that nothing has to be gathered;
    the note is for callers that read it. TypeError for a root that FSDP has not wrapped, RuntimeError for quantized
    parameters, whose bytes it cannot shard: `torch.distributed.fsdp.fully_shard` can.
    """
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
