"""Checkpoints of grouped layers: one tensor per group, or one GroupedTensor, load into either form."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .grouped_tensor import GroupedTensor
from .quantized_tensor import QuantizedTensor


def join_members(members: Sequence[Tensor]) -> GroupedTensor:
    """Join the tensors of all groups into one; codes stay codes."""
    if all(isinstance(member, QuantizedTensor) for member in members):
        return GroupedTensor.of_members(members)
    plain = [m.dequantize() if isinstance(m, QuantizedTensor) else m for m in members]
    return GroupedTensor.from_stack(torch.stack(plain))


def convert_state(
    state_dict: MutableMapping[str, Any], prefix: str, single: Mapping[str, bool], count: int
) -> None:
    """Convert state dict parameters, in place, that were saved in the other form.

    Args:
        state_dict: The state dict.
        prefix: The layer's name prefix.
        single: By kind ("weight", "bias"), whether the layer has one parameter for all groups.
        count: Group count.
    """
    for kind, whole_wanted in single.items():
        full_name = prefix + kind
        members = [f"{prefix}{kind}{i}" for i in range(count)]
        if whole_wanted:
            if full_name not in state_dict and all(name in state_dict for name in members):
                state_dict[full_name] = join_members([state_dict.pop(name) for name in members])
        elif full_name in state_dict and len(state_dict[full_name]) == count:
            stack = state_dict.pop(full_name)
            grouped = isinstance(stack, GroupedTensor)
            parts = stack.split_into_quantized_tensors() if grouped else stack.unbind(0)
            state_dict.update(zip(members, parts, strict=True))
