"""Sequential: a container that runs its modules one after another, and fuses consecutive operations.

A container divides its modules into parts (`parts.py`) and calls the parts in order. A part is one of two kinds:

- A fused chain: one or more consecutive operations. An `OperationFuser` runs the chain (`fuser.py`, the next file to
  read).
- A single module: a module that is not an operation, such as torch.nn.Linear, or an operation that must be called as a
  module, for example because it has a hook (`intercepted_calls.py`).

`Sequential.forward` runs a call, and `_find_parts` returns its parts. An operation is either basic, or it consists of
basic operations, such as `te.ops.Linear` of a product and a bias. For example, a container of Linear, GELU,
torch.nn.Dropout and Linear has three parts: the chain of BasicLinear, Bias and GELU; the module Dropout; and the chain
of BasicLinear and Bias.

Besides the main input and output, operations may have extra inputs and outputs. The caller passes an extra input,
unless a channel provides it (`channels.py`): after `a.set_extra_output_channel(0, "s")` and
`b.set_extra_input_channel(0, "s")`, operation b reads the extra output of the earlier operation a.

torch.compile sees the same parts. After a hook is added to or removed from an operation with channels, run the
container once before a compiler traces it within a checkpoint (`ContainerPart.call`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...common.explanation import is_explaining, note
from ...common.numbers import to_int, with_article
from ..compat.replaceable import any_intercepted
from ..quantization.resizable_state import CheckedLoading
from .fuser import OperationFuser
from .intercepted_calls import list_interceptable, unfused_reason
from .operation import BasicOperation, FusedOperation, FusibleOperation
from .parts import ContainerPart, call_parts, connecting_channels, disconnect


class Sequential(CheckedLoading, torch.nn.Sequential):
    """Runs modules one after another, as `torch.nn.Sequential`, and fuses consecutive operations.

    Modules that are not operations are allowed; each ends the fused chain before it. After the main input,
    `forward` takes the extra inputs that no channel provides. After the main output, it returns the extra
    outputs, except those that are set to `output_to_caller=False` (`set_extra_output_channel`).

    State dicts are checked before they are loaded (`CheckedLoading`). The list methods follow `Sequential`
    in NVIDIA's Transformer Engine, with whose checkpoints module names must agree. They differ from
    `torch.nn.Sequential`: `+` and `+=` accept any iterable, a removal does not rename the remaining modules, `extend`
    and `append` name modules by the number after the highest one, and `insert` renames all modules and, as
    `list.insert`, accepts an index outside of the list. `*` repeats the same modules, which share their parameters.
    A child is None after `chain.name = None` or `add_module(name, None)`: iteration and calls skip it, indices and
    `len` count it.

    Args:
        *args: Modules in order, or one dict {name: module}.
    """

    # Division for the last call in eager mode. `_find_parts` writes it, `__getstate__` leaves it out of copies.
    _division: _Division | None = None

    def __init__(self, *args: torch.nn.Module | Mapping[str, torch.nn.Module]) -> None:
        super().__init__()
        if len(args) == 1 and isinstance(args[0], Mapping):
            for name, module in args[0].items():
                self.add_module(name, module)
        else:
            for module in args:
                self.append(_check_module(module))

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles, without the division; a copy computes its own."""
        return {name: value for name, value in self.__dict__.items() if name != "_division"}

    if TYPE_CHECKING:
        # Declared as Tensor, the usual result; with extra outputs it is a tuple (`forward`).
        def __call__(
            self,
            input: Tensor,
            *extra_inputs: Tensor,
            op_kwargs: Mapping[BasicOperation | int, dict[str, Any]] | None = None,
        ) -> Tensor: ...

    def forward(
        self,
        input: Tensor,
        *extra_inputs: Tensor,
        op_kwargs: Mapping[BasicOperation | int, dict[str, Any]] | None = None,
    ) -> Any:
        """Run the modules.

        Args:
            input: The main input.
            *extra_inputs: Extra inputs that no channel provides, in the order of the operations.
            op_kwargs: {basic operation: dict of keyword arguments}. The operation is a child of the container, which
                may also be given by its index, or one of the `basic_ops` of a child. If two keys name one operation,
                the later one counts.

        Returns:
            The output, or a tuple (output, *extra outputs).

        Raises:
            TypeError: An input of an operation is not a tensor; `op_kwargs` or a value in it is not a dict.
            ValueError: There are too few or too many extra inputs, or a key of `op_kwargs` names no basic
                operation in this container, or the operation does not accept a keyword argument.
        """
        parts = self._find_parts()
        if is_explaining():
            self._note_unfused()
        # The usual case, without the time that `call_parts` takes for extra tensors between parts.
        if len(parts) == 1 and parts[0].is_fused_chain and op_kwargs is None:
            return parts[0].runner(input, *extra_inputs)
        return call_parts(parts, input, extra_inputs, _options_by_operation(self, op_kwargs))

    def _find_parts(self) -> list[ContainerPart]:
        """Parts for this call, from the cached division if nothing has changed.

        This is checked in each call, because torch does not tell a container about new hooks, `compile()` or changes
        within a child.

        An operation fuses unless something intercepts its calls (`any_intercepted`): a hook, `compile()`, or a
        replaced `forward` or `__call__`. A fused chain calls no module, so it would skip the interception. The same
        holds for the basic operations of an operation.
        """
        modules: list[torch.nn.Module | None] = list(self._modules.values())
        operations = self._list_operations(modules)
        ops_and_basic_ops = list_interceptable(operations)
        fusing_ops = _without_intercepted(operations, ops_and_basic_ops)
        # Modules compare by identity: the same objects in the same order, and the same of them intercepted. In torch
        # 2.11, Dynamo cannot trace comparisons between tuples with lists.
        cached = self._division
        if (
            cached is not None
            and cached.modules == modules
            and cached.ops_and_basic_ops == ops_and_basic_ops
            and cached.fusing_ops == fusing_ops
        ):
            return cached.parts
        parts = self._build_parts(fusing_ops)
        if not torch.compiler.is_compiling():  # no side effects while tracing
            # Parts depend on the channels, which can therefore not change after the first call.
            for part in parts:
                for operation in part.basic_ops:
                    operation.fix_channels()
            self._division = _Division(modules, operations, ops_and_basic_ops, fusing_ops, parts)
        return parts

    def _list_operations(self, modules: list[torch.nn.Module | None]) -> list[FusibleOperation]:
        """Subset of the modules that are operations.

        Cached with the parts: isinstance with an abstract class would take time in each call.
        """
        cached = self._division
        if cached is not None and cached.modules == modules:
            return cached.operations
        return [module for module in modules if isinstance(module, FusibleOperation)]

    def _build_parts(self, fusing_ops: list[FusibleOperation]) -> list[ContainerPart]:
        """Divide the modules into chains of consecutive operations, and single modules.

        Args:
            fusing_ops: The operations that fuse.

        Raises:
            ValueError: A channel has no producer, several, or one that is not earlier than its reader.
        """
        groups: list[list[Any]] = []
        for module in self:
            if groups and module in fusing_ops and groups[-1][-1] in fusing_ops:
                groups[-1].append(module)
            else:
                groups.append([module])
        ops_by_group = [
            [operation for module in group for operation in _basic_ops_in(module)]
            for group in groups
        ]
        channels_by_group = connecting_channels(ops_by_group)
        parts: list[ContainerPart] = []
        for group, group_ops, channels in zip(groups, ops_by_group, channels_by_group, strict=True):
            runner: OperationFuser | torch.nn.Module
            if group[0] in fusing_ops:
                # These operations may have run as single modules before, until a hook was removed. In a chain
                # the fuser links their channels instead.
                disconnect([*group, *group_ops])
                runner = OperationFuser(group, channels)
            else:
                runner = group[0]  # a group of one module
            parts.append(ContainerPart(runner, group_ops, channels))
        return parts

    @property
    def _module_groups(self) -> list[OperationFuser | torch.nn.Module] | None:
        """`OperationFuser` or single module of each part in order, for inspection.

        NVIDIA's Transformer Engine uses this name. The value is None until the first forward pass in eager
        mode, and after a change of modules until the next forward pass.
        """
        cached = self._division
        if cached is None or cached.modules != list(self._modules.values()):
            return None
        return [part.runner for part in cached.parts]

    def _note_unfused(self) -> None:
        """Add a note to `te.explain` for each operation that does not fuse, with the reason."""
        for name, module in self._modules.items():
            reason = unfused_reason(module) if isinstance(module, FusibleOperation) else None
            if reason is not None:
                note(
                    f"{type(module).__name__} ({name} of {type(self).__name__}) is not fused: {reason}"
                )

    # List methods; see the class docstring for the differences from torch.nn.Sequential.

    def _module_name(self, index: int) -> str:
        keys = list(self._modules)
        if not -len(keys) <= index < len(keys):
            raise IndexError(
                f"index {index} is out of range for a Sequential of {len(keys)} modules"
            )
        return keys[index]

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return type(self)({key: self._modules[key] for key in list(self._modules)[index]})
        return self._modules[self._module_name(index)]

    def __setitem__(self, index: int, module: torch.nn.Module) -> None:
        setattr(self, self._module_name(index), _check_module(module))

    def __delitem__(self, index: int | slice) -> None:
        keys = (
            list(self._modules)[index] if isinstance(index, slice) else [self._module_name(index)]
        )
        for key in keys:
            del self._modules[key]

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter([module for module in self._modules.values() if module is not None])

    def append(self, module: torch.nn.Module) -> Sequential:
        """Append a module and return the container."""
        numbers = [int(key) for key in self._modules if key.isdigit()]
        self.add_module(str(max(numbers, default=-1) + 1), _check_module(module))
        return self

    def extend(self, modules: Iterable[torch.nn.Module]) -> Sequential:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Append modules and return the container."""
        for module in modules:
            self.append(module)
        return self

    def insert(self, idx: int, module: torch.nn.Module) -> Sequential:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Insert a module before an index, and return the container.

        All modules are named by their indices afterwards, so that the numbers follow the order. Names from a dict
        are lost, and the keys of state dicts change with the names.
        """
        modules = list(self._modules.values())
        modules.insert(idx, _check_module(module))
        self._modules = {str(i): child for i, child in enumerate(modules)}
        return self

    def pop(self, idx: int | slice) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Remove and return the module at an index, or a Sequential of the modules in a slice."""
        removed = self[idx]
        del self[idx]
        return removed

    def __iadd__(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        return self.extend(modules)

    def __add__(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        return self[:].extend(modules)

    def __imul__(self, count: int) -> Sequential:
        return self.extend(list(self) * (to_int("factor", count, 1) - 1))

    def __mul__(self, count: int) -> Sequential:
        product = self[:]
        product *= count
        return product


def _options_by_operation(
    container: Sequential, op_kwargs: Mapping[Any, dict[str, Any]] | None
) -> dict[int, dict[str, Any]]:
    """Check `op_kwargs` and convert its keys: {id(operation): keyword arguments}.

    Raises:
        TypeError: `op_kwargs`, or the value of a key, is not a dict.
        ValueError: A key names no basic operation that is a child or a basic operation of a child.
    """
    if op_kwargs is None:
        return {}
    if not isinstance(op_kwargs, Mapping):
        raise TypeError(
            f"op_kwargs={op_kwargs!r} is {with_article(type(op_kwargs))}; give a dict {{basic operation, or the "
            "index of one: dict of keyword arguments}"
        )
    basic_ids = {id(operation) for module in container for operation in _basic_ops_in(module)}
    result: dict[int, dict[str, Any]] = {}
    for target, options in op_kwargs.items():
        if not isinstance(options, Mapping):
            raise TypeError(
                f"op_kwargs contains {options!r}, which is {with_article(type(options))}; give a dict of keyword "
                "arguments"
            )
        if isinstance(target, int) and not -len(container) <= target < len(container):
            raise ValueError(
                f"op_kwargs names operation {target} of a Sequential of {len(container)} modules"
            )
        op = container[target] if isinstance(target, int) else target
        if not isinstance(op, BasicOperation):
            remedy = (
                "; use one of its basic_ops as the key" if isinstance(op, FusedOperation) else ""
            )
            raise ValueError(
                f"op_kwargs names {with_article(type(op))}, but only basic operations take keyword arguments"
                f"{remedy}"
            )
        if id(op) not in basic_ids:
            raise ValueError(
                f"op_kwargs names {with_article(type(op))} that is neither in this Sequential nor in one of its "
                "fused operations"
            )
        result[id(op)] = dict(options)
    return result


class _Division(NamedTuple):
    """Division of a Sequential into parts, and its dependencies.

    Channels are left out, because the first call fixes them (`fix_channels`).

    Attributes:
        modules: All modules of the container, in order (the values of `_modules`).
        operations: The operations among the modules.
        ops_and_basic_ops: The operations and their basic operations. The latter are included so that
            replacing one (`linear.basic_ops[0] = wrapper`) divides the container again.
        fusing_ops: The operations that fuse: nothing intercepts their calls or their basic operations' calls.
        parts: Fused chains and single modules, in order.
    """

    modules: list[torch.nn.Module | None]
    operations: list[FusibleOperation]
    ops_and_basic_ops: list[FusibleOperation]
    fusing_ops: list[FusibleOperation]
    parts: list[ContainerPart]


def _basic_ops_in(module: torch.nn.Module) -> list[BasicOperation]:
    """Basic operations of a module; empty if the module is not an operation.

    A user may replace a basic operation of a fused operation by another module, which is left out.
    """
    if not isinstance(module, FusibleOperation):
        return []
    return [
        operation
        for operation in module.basic_operations()
        if isinstance(operation, BasicOperation)
    ]


def _without_intercepted(
    operations: list[FusibleOperation], ops_and_basic_ops: list[FusibleOperation]
) -> list[FusibleOperation]:
    """Subset of operations for which neither their calls nor those of their basic operations are intercepted.

    Args:
        operations: The operations.
        ops_and_basic_ops: The operations and all their basic operations (`list_interceptable`).
    """
    if not any_intercepted(ops_and_basic_ops):  # the usual case, in one loop
        return operations
    return [op for op in operations if not any_intercepted(list_interceptable([op]))]


def _check_module(module: Any) -> torch.nn.Module:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"{module!r} is {with_article(type(module))}; a Sequential holds torch.nn.Module objects, such as "
            "te.ops.Linear(..) and te.ops.ReLU()"
        )
    return module
