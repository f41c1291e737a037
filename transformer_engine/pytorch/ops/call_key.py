"""Call keys: everything that a chain's passes depend on, apart from tensor values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...common import env
from ..quantization.autocast import AutocastState
from ..runtime.device import autocast_dtype
from .chain import fusion_enabled
from .operation import BasicOperation


class CallKeys:
    """Computes the key for each chain call.

    Args:
        basic_ops: The chain's operations. Each is a `PassOperation`.
    """

    def __init__(self, basic_ops: Sequence[BasicOperation]) -> None:
        self._ops: list[tuple[Any, bool]] = [
            (op, type(op).call_facts is not BasicOperation.call_facts) for op in basic_ops
        ]

    def key_and_inputs(
        self, state: AutocastState, x: Tensor, extra_inputs: Sequence[Tensor]
    ) -> tuple[tuple[Any, ...], list[Any]]:
        """Return the key for a call, and the chain's inputs.

        Both are collected in one loop over the operations, because it runs in every warm call.

        Args:
            state: The autocast state.
            x: The main input.
            extra_inputs: The extra inputs.

        Returns:
            The key, and a list: x, then for each operation its parameters and extra inputs.
        """
        device = x.device
        key: list[Any] = [
            torch.is_grad_enabled(),
            autocast_dtype(device.type),
            env.generation(),
            state.enabled,
            fusion_enabled(),
            (type(x), x.shape, x.dtype, device, x.requires_grad),
        ]
        inputs: list[Any] = [x]
        offset = 0
        for op, has_call_facts in self._ops:
            # The revision changes with every attribute, the version with the quantizers that the passes contain.
            key += (op._revision, op._quantizers_version, op.training)
            for tensor in [getattr(op, name) for name in op.parameter_names]:
                if tensor is None:
                    key.append(None)
                    continue
                inputs.append(tensor)
                key.append(
                    (type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)
                )
            op_extra_inputs: Sequence[Tensor] = ()
            if op.num_extra_inputs:
                op_extra_inputs = extra_inputs[offset : offset + op.num_extra_inputs]
                offset += op.num_extra_inputs
                inputs += op_extra_inputs
                key += [
                    (type(t), t.shape, t.dtype, t.device, t.requires_grad) for t in op_extra_inputs
                ]
            if has_call_facts:
                key.append(op.call_facts(op_extra_inputs))
        return tuple(key), inputs
