"""Parts of a container, which are called one after another, and the extra tensors that pass between them.

A container is one part if all its modules fuse. A hook on an operation, or a module that is not an
operation, divides it into several. Each part is a separate autograd node. A channel's tensor
therefore leaves one part as an extra output and enters another one as an extra input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .channels import Channels
from .links import Links, extra_inputs_error

NO_CHANNELS: frozenset[str] = frozenset()


class ContainerPart:
    """A part of a container: a fused chain or a single module.

    Args:
        runner: What the part calls: the `OperationFuser` of a fused chain, or the single module.
        basic_ops: Its basic operations; empty for another module.
        channels: Channel names that connect it with other parts.

    Attributes:
        inputs: Per extra input the channel that provides it, None for the caller, and whether the part adds into it.
        outputs: Per extra output the channel that it is written to, or None, and whether the caller receives it.
    """

    def __init__(
        self, runner: Any, basic_ops: Sequence[Channels], channels: frozenset[str]
    ) -> None:
        self.runner, self.basic_ops, self.channels = runner, basic_ops, channels
        self.is_fused_chain = not isinstance(runner, torch.nn.Module)
        links = Links(basic_ops, channels)
        self.inputs: list[tuple[str | None, bool]] = []
        for slot in links.public_inputs:
            op = basic_ops[slot.op]
            self.inputs.append(
                (op._extra_input_channels[slot.index], getattr(op, "_in_place", False))
            )
        self.outputs: list[tuple[str | None, bool]] = []
        for slot in links.public_outputs:
            op, i = basic_ops[slot.op], slot.index
            self.outputs.append((op._extra_output_channels[i], op._extra_output_to_caller[i]))

    def call(self, x: Any, extra_inputs: Sequence[Tensor], options: list[dict[str, Any]]) -> Any:
        """Call the runner.

        Args:
            x: The main input.
            extra_inputs: The extra inputs.
            options: Keyword arguments for each basic operation.
        """
        if not self.basic_ops:
            return self.runner(x)
        if self.is_fused_chain:
            return self.runner(x, *extra_inputs, basic_op_kwargs=options if any(options) else None)
        # The connection outlives the call, because a checkpoint repeats `forward` in the backward pass. `disconnect`
        # ends it. A compiler that traces a checkpoint rejects this side effect, unless the connection exists already.
        self.runner.connect(self.channels)
        if not any(options):
            return self.runner(x, *extra_inputs)
        own_options = {"basic_op_kwargs": options} if self.runner.is_fused_op else options[0]
        return self.runner(x, *extra_inputs, **own_options)


def disconnect(operations: Sequence[Any]) -> None:
    """End the connections from `ContainerPart.call`, for operations that join a fused chain.

    The chain connects its operations itself. A separate call to one of them then reads and returns no channel tensors.

    Args:
        operations: The operations; basic operations of fused ones, which may have been called by themselves, included.
    """
    for operation in operations:
        operation.connect(NO_CHANNELS)


def connecting_channels(
    parts: Sequence[Sequence[Channels]], outer_channels: frozenset[str] = NO_CHANNELS
) -> list[frozenset[str]]:
    """Return per part the channel names that connect it with others.

    Args:
        parts: Basic operations by part.
        outer_channels: Channel names that connect these parts with further operations.

    Raises:
        ValueError: A channel has no producer, several, or one that is not earlier than its reader.
    """
    Links([op for part in parts for op in part], outer_channels)  # raises the errors
    written = [
        {name for op in part for name in op._extra_output_channels if name} for part in parts
    ]
    read = [{name for op in part for name in op._extra_input_channels if name} for part in parts]
    found: list[frozenset[str]] = []
    for i in range(len(parts)):
        read_elsewhere = outer_channels.union(*read[:i], *read[i + 1 :])
        found.append(frozenset((written[i] & read_elsewhere) | (read[i] - written[i])))
    return found


def call_parts(
    parts: Sequence[ContainerPart],
    input: Tensor,
    extra_inputs: Sequence[Tensor],
    options_by_id: Mapping[int, dict[str, Any]],
    outer_channels: frozenset[str] = NO_CHANNELS,
) -> Any:
    """Call parts one after another.

    Args:
        parts: The parts.
        input: The main input of the first part.
        extra_inputs: Extra inputs from the caller, in order.
        options_by_id: {id(basic operation): keyword arguments}.
        outer_channels: Channel names that connect the parts with further operations. The caller gives what
            the parts read from them, and receives what the parts write to them.

    Returns:
        The output, or a tuple (output, *extra outputs).

    Raises:
        ValueError: There are too few or too many extra inputs.
    """
    channels = [channel for part in parts for channel, _ in part.inputs]
    if len(extra_inputs) != sum([channel in (None, *outer_channels) for channel in channels]):
        raise extra_inputs_error(len(extra_inputs), [op for part in parts for op in part.basic_ops])
    x: Any = input
    remaining_inputs = iter(extra_inputs)
    tensors_of_channels: dict[str | None, Tensor] = {}
    outputs: list[Tensor] = []
    for part in parts:
        part_inputs: list[Tensor] = []
        for channel, is_written in part.inputs:
            if channel not in tensors_of_channels:
                part_inputs.append(next(remaining_inputs))
                continue
            tensor = tensors_of_channels[channel]
            # Other parts may have saved the tensor for their backward passes.
            part_inputs.append(tensor.clone() if is_written else tensor)
        result = part.call(x, part_inputs, [options_by_id.get(id(op), {}) for op in part.basic_ops])
        if not part.outputs:
            x = result
            continue
        x, *part_outputs = result
        for (channel, to_caller), tensor in zip(part.outputs, part_outputs, strict=True):
            if channel is not None:
                tensors_of_channels[channel] = tensor
            if to_caller or channel in outer_channels:
                outputs.append(tensor)
    return (x, *outputs) if outputs else x
