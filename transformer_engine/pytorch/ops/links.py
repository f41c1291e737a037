"""Links: where a chain's extra inputs come from, the caller or an earlier operation's channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.numbers import with_article
from ..tensor.storage.quantized_tensor_storage import QuantizedTensorStorage
from .channels import Channels


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are views of the same memory; in a compiled graph, whether they are the same."""
    return a is b or (not torch.compiler.is_compiling() and torch._C._is_alias_of(a, b))  # pyright: ignore


def sum_values(a: Any, b: Any) -> Tensor:
    """a + b in a's dtype. A sum with a quantized tensor is computed in float32 and rounded once."""
    if not (isinstance(a, QuantizedTensorStorage) or isinstance(b, QuantizedTensorStorage)):
        return a + b
    wide = [
        tensor.dequantize(dtype=torch.float32)
        if isinstance(tensor, QuantizedTensorStorage)
        else tensor.float()
        for tensor in (a, b)
    ]
    return (wide[0] + wide[1]).to(a.dtype)


def check_tensor(name: str, value: Any) -> None:
    """Raise TypeError unless a value is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {with_article(type(value))}; give a torch.Tensor")


def extra_inputs_error(count: int, ops: Sequence[Channels]) -> ValueError:
    """Return the error for too few or too many extra inputs, which names the operations that read extra inputs."""
    readers: list[str] = []
    for index, op in enumerate(ops):
        readers += [f"{type(op).__name__} (operation {index})"] * op._extra_input_channels.count(
            None
        )
    if not readers:
        names = ", ".join([type(op).__name__ for op in ops])
        return ValueError(
            f"number of extra inputs: {count} given, but {names} read none; pass the main input alone"
        )
    return ValueError(
        f"number of extra inputs: {count} given, {len(readers)} read by {', '.join(readers)}; give one tensor for each "
        "extra input, in the order of the operations"
    )


def check_options_count(options: Sequence[dict[str, Any]], count: int) -> None:
    """Raise ValueError unless there is one dict of keyword arguments for each basic operation."""
    if len(options) != count:
        raise ValueError(
            f"basic_op_kwargs has {len(options)} entries for {count} basic operations; give one dict for each"
        )


class Slot(NamedTuple):
    """An extra input or output: the operation's index in the chain, and the tensor's index in the operation."""

    op: int
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]


class Links:
    """Connects extra inputs and outputs of consecutive operations with each other and with the caller.

    Args:
        ops: The basic operations in order.
        outer_channels: Channel names that connect the operations with other chains. The caller gives what
            the operations read from them, and receives what the operations write to them.

    Raises:
        ValueError: A channel has no producer, several, or one that is not earlier than its reader.

    Attributes:
        public_inputs: Extra inputs that the caller gives, in order.
        public_outputs: Extra outputs that the caller receives, in order.
        sources: The extra output that an extra input reads.
        has_channels: An extra input reads a channel, or an extra output is not returned to the caller.
    """

    def __init__(
        self, ops: Sequence[Channels], outer_channels: frozenset[str] = frozenset()
    ) -> None:
        self._ops = ops
        self.public_inputs: list[Slot] = []
        self.public_outputs: list[Slot] = []
        self.sources: dict[Slot, Slot] = {}
        producers: dict[str, Slot] = {}
        for op, operation in enumerate(ops):
            for index in range(operation.num_extra_outputs):
                name = operation._extra_output_channels[index]
                if operation._extra_output_to_caller[index] or name in outer_channels:
                    self.public_outputs.append(Slot(op, index))
                if name is None:
                    continue
                if name in producers:
                    raise ValueError(
                        f"channel {name!r} has several producers, operations {producers[name].op} and {op}; give each "
                        "channel a name of its own"
                    )
                producers[name] = Slot(op, index)
        for op, operation in enumerate(ops):
            for index in range(operation.num_extra_inputs):
                name = operation._extra_input_channels[index]
                if name is None or (name in outer_channels and name not in producers):
                    self.public_inputs.append(Slot(op, index))
                    continue
                source = producers.get(name)
                if source is None:
                    raise ValueError(
                        f"channel {name!r} has no producer; name an extra output of an earlier operation"
                    )
                if source.op >= op:
                    raise ValueError(
                        f"channel {name!r} is produced by operation {source.op}, which is not earlier than its reader, "
                        f"operation {op}; put the producer first"
                    )
                self.sources[Slot(op, index)] = source
        extra_outputs = sum([operation.num_extra_outputs for operation in ops])
        self.has_channels = bool(self.sources) or len(self.public_outputs) < extra_outputs
        # Places of caller extra inputs that an operation adds into.
        self._written = [
            place
            for place, slot in enumerate(self.public_inputs)
            if getattr(ops[slot.op], "_in_place", False)
        ]

    def connects(self, before: Sequence[int], after: Sequence[int]) -> bool:
        """Return whether an operation in `after` reads a channel that one in `before` writes."""
        return any(
            reader.op in after and source.op in before for reader, source in self.sources.items()
        )

    def convert_extra_inputs(self, x: Tensor, extra_inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Check the caller's extra inputs, and return tensors that the operations may write to.

        Operations convert values that are not tensors. An extra input that an operation adds into is cloned if another
        input shares its memory, or if it is a leaf that requires a gradient.

        Args:
            x: The main input.
            extra_inputs: The caller's extra inputs.

        Raises:
            TypeError: A value is not a tensor, and its operation does not convert it.
        """
        tensors: list[Any] = []
        for slot, value in zip(self.public_inputs, extra_inputs, strict=True):
            if not isinstance(value, Tensor):
                operation = self._ops[slot.op]
                converted = operation.accept_extra_input(slot.index, value)
                name = (
                    f"extra input {slot.index} of {type(operation).__name__} (operation {slot.op})"
                )
                check_tensor(name, converted)
                value = converted
            tensors.append(value)
        for position in self._written:
            tensor, rest = tensors[position], (x, *tensors[:position], *tensors[position + 1 :])
            if (tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled()) or any(
                share_memory(tensor, other) for other in rest
            ):
                tensors[position] = tensor.clone()
        return tuple(tensors)

    def by_operation(self, extra_inputs: Sequence[Tensor]) -> list[list[Tensor | None]]:
        """Return the caller's extra inputs by operation; None where a channel provides the input."""
        extras: list[list[Tensor | None]] = [[None] * op.num_extra_inputs for op in self._ops]
        for slot, tensor in zip(self.public_inputs, extra_inputs, strict=True):
            extras[slot.op][slot.index] = tensor
        return extras

    def with_channels(
        self,
        extras: list[list[Tensor | None]],
        outputs: list[tuple[Any, ...]],
        indices: Sequence[int],
    ) -> list[tuple[Any, ...]]:
        """Return all extra inputs for some operations, by operation.

        Args:
            extras: The caller's extra inputs (`by_operation`).
            outputs: Extra outputs by operation, as far as they are computed.
            indices: The operations.
        """
        found: list[tuple[Any, ...]] = []
        for op in indices:
            tensors = list(extras[op])
            for index in range(len(tensors)):
                source = self.sources.get(Slot(op, index))
                if source is not None and outputs[source.op]:
                    tensors[index] = outputs[source.op][source.index]
            found.append(tuple(tensors))
        return found

    def check_outputs(self, op: int, outputs: tuple[Any, ...]) -> None:
        """Raise RuntimeError unless an operation returned its extra outputs.

        A fused operation may return None for a channel that only its own operations read.
        """
        operation = self._ops[op]
        if len(outputs) != operation.num_extra_outputs:
            raise RuntimeError(
                f"{type(operation).__name__} returned {len(outputs)} extra outputs, but declares "
                f"num_extra_outputs={operation.num_extra_outputs}; return one tensor for each"
            )
        for index, tensor in enumerate(outputs):
            if tensor is None and Slot(op, index) in self.public_outputs:
                raise RuntimeError(
                    f"{type(operation).__name__} returned None for extra output {index}, which the caller or a later "
                    "operation reads; return a tensor"
                )
            if tensor is not None and not isinstance(tensor, (Tensor, QuantizedTensorStorage)):
                raise TypeError(
                    f"{type(operation).__name__} returned {with_article(type(tensor))} for extra output {index}; "
                    "return a tensor"
                )

    def gradients_of_outputs(
        self, op: int, by_slot: dict[Slot, Tensor | None], extra_inputs: list[tuple[Any, ...]]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradient per extra output of an operation, summed over all its readers."""
        sums: list[Tensor | None] = []
        for index in range(self._ops[op].num_extra_outputs):
            slot = Slot(op, index)
            total = by_slot.get(slot)
            for reader, source in self.sources.items():
                grad = extra_inputs[reader.op][reader.index] if source == slot else None
                if grad is not None:
                    total = grad if total is None else sum_values(total, grad)
            sums.append(total)
        return tuple(sums)
