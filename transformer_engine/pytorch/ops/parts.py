"""Parts of a container that are called one after another, and the extra tensors that pass between them.

A container is one part if all of its modules fuse. A hook on an operation, or a module that is no operation, divides it
into several. Each part is a differentiable function of its own: a tensor of a channel leaves one part as an extra
output and enters another one as an extra input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .links import Links, Slot, extra_inputs_error

if TYPE_CHECKING:
    from .operation import BasicOperation

NO_CHANNELS: frozenset[str] = frozenset()


class Part:
    """A part of a container.

    Args:
        module: A fused chain (`OperationFuser`), an operation that is called by itself, or another module.
        basic_ops: Its basic operations; empty for another module.
        channels: Names of the channels that connect the part with other parts.
    """

    def __init__(self, module: Any, basic_ops: Sequence[BasicOperation], channels: frozenset[str]) -> None:
        self.module, self.basic_ops, self.channels = module, basic_ops, channels
        self.is_fused_chain = not isinstance(module, torch.nn.Module)
        links = Links(basic_ops, channels)
        # By extra input: the name of its channel, None for an input from the caller; and whether the part adds into it.
        self.inputs = [
            (self._of(slot)._extra_input_channels[slot.index], getattr(self._of(slot), "_in_place", False))
            for slot in links.public_inputs
        ]
        # By extra output: the name of its channel, and whether the caller receives it.
        self.outputs = [
            (
                self._of(slot)._extra_output_channels[slot.index],
                self._of(slot)._extra_output_to_caller[slot.index],
            )
            for slot in links.public_outputs
        ]

    def _of(self, slot: Slot) -> BasicOperation:
        return self.basic_ops[slot.op]

    def call(self, x: Any, extra_inputs: Sequence[Tensor], kwargs: list[dict[str, Any]]) -> Any:
        """Call the module.

        Args:
            x: The main input.
            extra_inputs: The extra inputs of the part.
            kwargs: Keyword arguments of each basic operation.
        """
        if not self.basic_ops:
            return self.module(x)
        if self.is_fused_chain:
            return self.module(x, *extra_inputs, basic_op_kwargs=kwargs if any(kwargs) else None)
        self.module.connect(self.channels)
        return self.module(x, *extra_inputs, **(kwargs[0] if len(kwargs) == 1 else {}))


def connecting_channels(
    parts: Sequence[Sequence[BasicOperation]], outside: frozenset[str] = NO_CHANNELS
) -> list[frozenset[str]]:
    """Return by part the names of the channels that connect it with others.

    Args:
        parts: The basic operations of each part.
        outside: Names of the channels that connect all of these parts with other operations.

    Raises:
        ValueError: A channel has no producer, several, or one that is not earlier than its reader.
    """
    Links([op for part in parts for op in part], outside)  # raises the errors
    written = [{name for op in part for name in op._extra_output_channels if name} for part in parts]
    read = [{name for op in part for name in op._extra_input_channels if name} for part in parts]
    found: list[frozenset[str]] = []
    for i in range(len(parts)):
        read_elsewhere = outside.union(*read[:i], *read[i + 1 :])
        found.append(frozenset((written[i] & read_elsewhere) | (read[i] - written[i])))
    return found


def call_parts(
    parts: Sequence[Part],
    input: Tensor,
    extra_inputs: Sequence[Tensor],
    op_kwargs: Mapping[int, dict[str, Any]],
    outside: frozenset[str] = NO_CHANNELS,
) -> Any:
    """Call parts one after another.

    Args:
        parts: The parts.
        input: The main input of the first part.
        extra_inputs: Extra inputs from the caller, in order.
        op_kwargs: {id(basic operation): keyword arguments}.
        outside: Names of the channels that connect the parts with other operations, for which the caller stands.

    Returns:
        The output, or a tuple of the output and the extra outputs.

    Raises:
        ValueError: The number of extra inputs does not fit.
    """
    from_caller = [name for part in parts for name, _ in part.inputs if name is None or name in outside]
    if len(extra_inputs) != len(from_caller):
        raise extra_inputs_error(len(extra_inputs), [op for part in parts for op in part.basic_ops])
    x: Any = input
    given = iter(extra_inputs)
    channels: dict[str, Tensor] = {}
    outputs: list[Tensor] = []
    for part in parts:
        part_inputs: list[Tensor] = []
        for name, in_place in part.inputs:
            if name is None or name not in channels:
                part_inputs.append(next(given))
            else:
                # Other parts may have saved the tensor for their backward passes.
                part_inputs.append(channels[name].clone() if in_place else channels[name])
        result = part.call(x, part_inputs, [op_kwargs.get(id(op), {}) for op in part.basic_ops])
        if not part.outputs:
            x = result
            continue
        x, *part_outputs = result
        for (name, to_caller), output in zip(part.outputs, part_outputs, strict=True):
            if name in part.channels:
                channels[name] = output
            if to_caller or name in outside:
                outputs.append(output)
    return (x, *outputs) if outputs else x
