"""Sequential: a container that runs consecutive fusible operations as fused chains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...common.explanation import is_explaining, note
from ...common.numbers import with_article
from ..quantization.resizable_state import CheckedLoading
from .bare_calls import are_bare, unfused_reason
from .fuser import OperationFuser
from .operation import BasicOperation, FusibleOperation
from .parts import NO_CHANNELS, Part, call_parts, connecting_channels


class Sequential(CheckedLoading):
    """Runs modules one after another, as `torch.nn.Sequential`, and fuses consecutive operations.

    Other modules may stand between operations; they separate fused chains.

    Args:
        *args: Modules in order, or one dict of names and modules.
    """

    def __init__(self, *args: torch.nn.Module | Mapping[str, torch.nn.Module]) -> None:
        super().__init__()
        # Fused chains and other modules in order, which clients read; None before a forward pass and after a change.
        self._module_groups: list[OperationFuser | torch.nn.Module] | None = None
        # The modules and those that fuse, for which the parts were computed; and the parts.
        self._divided: tuple[list[Any], list[Any], list[Part]] = [], [], []
        if len(args) == 1 and isinstance(args[0], Mapping):
            for name, module in args[0].items():
                self.add_module(name, module)
        else:
            for module in args:
                self.append(module)  # pyright: ignore[reportArgumentType]

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        self._module_groups = None
        super().add_module(name, module)

    def _name_at(self, index: int) -> str:
        keys = list(self._modules)
        if not -len(keys) <= index < len(keys):
            raise IndexError(f"index {index} is out of range for a Sequential of {len(keys)} modules")
        return keys[index]

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return type(self)({key: self._modules[key] for key in list(self._modules)[index]})  # pyright: ignore
        return self._modules[self._name_at(index)]

    def __setitem__(self, index: int, module: torch.nn.Module) -> None:
        self._module_groups = None
        self._modules[self._name_at(index)] = self._checked_module(module)

    def __delitem__(self, index: int | slice) -> None:
        self._module_groups = None
        keys = list(self._modules)[index] if isinstance(index, slice) else [self._name_at(index)]
        for key in keys:
            del self._modules[key]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter([module for module in self._modules.values() if module is not None])  # pyright: ignore[reportArgumentType]

    def append(self, module: torch.nn.Module) -> Sequential:
        """Append a module and return the container."""
        numbers = [int(key) for key in self._modules if key.isdigit()]
        key = str(max(numbers, default=-1) + 1)
        self.add_module(key, self._checked_module(module))
        return self

    def extend(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        """Append modules and return the container."""
        for module in modules:
            self.append(module)
        return self

    def insert(self, idx: int, module: torch.nn.Module) -> Sequential:
        """Insert a module before an index, renumber the modules, and return the container."""
        modules = list(self)
        modules.insert(idx, self._checked_module(module))
        self._module_groups = None
        self._modules = {str(i): child for i, child in enumerate(modules)}
        return self

    def pop(self, idx: int | slice) -> Any:
        """Remove modules and return them."""
        removed = self[idx]
        del self[idx]
        return removed

    def __iadd__(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        return self.extend(modules)

    def __add__(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        return type(self)(
            {key: module for key, module in self._modules.items() if module is not None}
        ).extend(modules)

    def _checked_module(self, module: Any) -> torch.nn.Module:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"{module!r} is {with_article(type(module))}; a Sequential holds torch.nn.Module objects, "
                "such as te.ops.Linear(..) and te.ops.ReLU()"
            )
        return module

    def __getstate__(self) -> dict[str, Any]:
        """Copy the state without the groups of modules, which a copy recreates."""
        return {**self.__dict__, "_module_groups": None, "_divided": ([], [], [])}

    def forward(
        self,
        input: Tensor,
        *extra_inputs: Tensor,
        op_kwargs: Mapping[BasicOperation | int, dict[str, Any]] | None = None,
    ) -> Any:
        """Run the modules.

        Args:
            input: The main input.
            *extra_inputs: Extra inputs of the operations, in order.
            op_kwargs: Keyword arguments of basic operations, by operation or by index in the container.

        Returns:
            The output, or a tuple of the output and the extra outputs of the operations.

        Raises:
            ValueError: The number of extra inputs does not fit, or `op_kwargs` names something that is not a basic
                operation of this container.
        """
        parts = self._parts()
        if len(parts) == 1 and parts[0].is_fused_chain and not op_kwargs:
            return parts[0].module(input, *extra_inputs)
        return call_parts(parts, input, extra_inputs, self._kwargs_by_operation(op_kwargs))

    def _parts(self) -> list[Part]:
        """Divide the modules into fused chains and single modules; cached until the modules or their hooks change.

        An operation with hooks or with another `forward` is a part of its own, because fusion would skip both.
        """
        modules = [module for module in self._modules.values() if module is not None]
        operations = [module for module in modules if isinstance(module, FusibleOperation)]
        # Usually all operations are bare, and one call finds that out.
        fused = operations if are_bare(operations) else [op for op in operations if are_bare([op])]
        if is_explaining():
            self._note_unfused()
        if self._module_groups is not None and (modules, fused) == self._divided[:2]:
            return self._divided[2]
        runs: list[list[Any]] = []  # of fused operations, or one other module each
        for module in modules:
            if runs and module in fused and runs[-1][-1] in fused:
                runs[-1].append(module)
            else:
                runs.append([module])
        members = [
            [basic for op in run if isinstance(op, FusibleOperation) for basic in op.basic_operations()]
            for run in runs
        ]
        parts: list[Part] = []
        for run, basic_ops, channels in zip(runs, members, connecting_channels(members), strict=True):
            if run[0] not in fused:
                parts.append(Part(run[0], basic_ops, channels))
                continue
            for operation in run:
                operation.connect(NO_CHANNELS)
            parts.append(Part(OperationFuser(run, channels), basic_ops, channels))
        self._module_groups = [part.module for part in parts]
        self._divided = modules, fused, parts
        return parts

    def _note_unfused(self) -> None:
        """Report to `te.explain` why operations do not fuse."""
        for name, module in self._modules.items():
            reason = unfused_reason(module) if isinstance(module, FusibleOperation) else None
            if reason is not None:
                note(f"{type(module).__name__} ({name} of {type(self).__name__}) is not fused: {reason}")

    def _kwargs_by_operation(
        self, op_kwargs: Mapping[Any, dict[str, Any]] | None
    ) -> dict[int, dict[str, Any]]:
        """Return {id(operation): keyword arguments}.

        Raises:
            ValueError: A key is not a basic operation of this container.
        """
        result: dict[int, dict[str, Any]] = {}
        members = {id(module) for module in self}
        for target, options in (op_kwargs or {}).items():
            if isinstance(target, int) and not -len(self) <= target < len(self):
                raise ValueError(f"op_kwargs names operation {target} of a Sequential of {len(self)} modules")
            op = self[target] if isinstance(target, int) else target
            if not isinstance(op, BasicOperation):
                raise ValueError(
                    f"op_kwargs names {with_article(type(op))}; only basic operations take keyword arguments"
                )
            if id(op) not in members:
                raise ValueError(f"op_kwargs names {with_article(type(op))} that is not in this Sequential")
            result[id(op)] = dict(options)
        return result
