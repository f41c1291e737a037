"""One scale for shards that ranks quantized separately, so that their codes can be joined.

A layer quantizer takes its maximum over the ranks of a sharded tensor (`Quantizer.reduce_over`). A tensor
that a caller or a neighboring layer quantized has the scale of one shard. Before its codes are sent, they are
rescaled to the largest scale in the group. Codes are unchanged if the scales are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ..constants import dist_group_type
from ..primitives.operand import Operand
from ..tensor.quantizer import Operands
from ..tensor.storage.fsdp import GatheredPayload
from .faults import started


def with_common_scale(operands: Operands, group: dist_group_type | None) -> Operands:
    """Return both directions of a shard, rescaled to scales that are equal on all ranks in a group.

    Args:
        operands: Codes and scales of this rank's rows. Formats without a whole-tensor scale are unchanged.
        group: The process group. Every rank must call the function with operands in the same format.
    """
    return Operands(
        *[_common(part, group) if isinstance(part, Operand) else part for part in operands]  # pyright: ignore[reportArgumentType]
    )


def _common(operand: Operand, group: dist_group_type | None) -> Operand:
    """Return one direction of a shard, rescaled."""
    codes, scale, form, amax, _ = operand
    if form is None or scale is None:
        return operand
    if form.block is None:
        ((codes, scale),) = rescale_codes([(codes, scale)], group)
    elif amax is not None and not form.row_scaled:
        scale, amax = _rescale_blocks(scale, amax, group)
    return operand._replace(codes=codes, scale=scale, amax=amax)


def payload_with_common_scale(
    tensors: Sequence[Tensor], payload: GatheredPayload, group: dist_group_type | None
) -> tuple[tuple[Tensor, ...], GatheredPayload]:
    """Return the result of `gather_payload`, rescaled to scales that are equal on all ranks in a group.

    Args:
        tensors: Codes and scales of this rank's rows.
        payload: Their metadata, with whole-tensor scales.
        group: The process group. Every rank must call the function with a tensor in the same format.
    """
    parts = dict(zip(payload.fields, tensors, strict=True))
    dtypes = dict(zip(payload.fields, payload.dtypes, strict=True))
    unsharded = dict(payload.whole)
    for direction in ("", "_t"):
        codes, scale, amax = (name + direction for name in ("codes", "scale", "amax"))
        if codes not in parts:
            continue
        if scale in unsharded:
            local = parts[codes].view(dtypes[codes]), unsharded[scale]
            ((values, unsharded[scale]),) = rescale_codes([local], group)
            parts[codes] = values.view(torch.uint8)
        elif amax in unsharded:
            blocks, unsharded[amax] = _rescale_blocks(
                parts[scale].view(dtypes[scale]), unsharded[amax], group
            )
            parts[scale] = blocks.view(torch.uint8)
    return tuple(parts.values()), replace(payload, whole=unsharded)


def rescale_codes(
    shards: Sequence[tuple[Tensor, Tensor]], group: dist_group_type | None
) -> list[tuple[Tensor, Tensor]]:
    """Rescale several tensors' FP8 codes to the largest scale that a rank has for each, and return these scales too.

    All-zero codes have an arbitrary scale (1 for a maximum of zero), so such a rank takes the others' scale.

    Args:
        shards: Codes in an FP8 dtype, and the one-element scale, for each tensor on this rank.
        group: The process group. Every rank must call the function with as many tensors.
    """
    scales = torch.cat([scale.reshape(1) for _, scale in shards])
    used = torch.stack([(codes.float() != 0).any() for codes, _ in shards])
    largest = _maximum(torch.where(used, scales, torch.zeros_like(scales)), group)
    largest = torch.where(largest > 0, largest, scales)  # every rank has only zeros
    ratios = torch.where(used, scales / largest, torch.ones_like(scales))
    return [
        ((codes.float() * ratio).to(codes.dtype), common.reshape(scale.shape))
        for (codes, scale), ratio, common in zip(shards, ratios, largest, strict=True)
    ]


def _rescale_blocks(
    blocks: Tensor, amax: Tensor, group: dist_group_type | None
) -> tuple[Tensor, Tensor]:
    """Return NVFP4 block scales for the largest maximum of the ranks, and this maximum.

    Rounding the E4M3 scales changes values less than rounding the FP4 codes again would.
    """
    largest = _maximum(amax.clone(), group)
    ratio = torch.where(largest > 0, amax / largest, torch.ones_like(amax))
    return (blocks.float() * ratio).to(blocks.dtype), largest


def _maximum(local: Tensor, group: dist_group_type | None) -> Tensor:
    """Return the maximum over the ranks, written to `local` (under torch.compile: to a new tensor)."""
    if torch.compiler.is_compiling():
        from torch.distributed import _functional_collectives as functional

        ranks: dist_group_type = dist.group.WORLD if group is None else group  # pyright: ignore
        return functional.wait_tensor(functional.all_reduce(local, "max", ranks))
    started(
        "all_reduce", local, group, lambda: dist.all_reduce(local, dist.ReduceOp.MAX, group=group)
    )
    return local
