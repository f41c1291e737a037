"""LentParameters: operations whose parameters another module owns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class LentParameters(torch.nn.Module):
    """A module that can read its parameters from another module, which owns them."""

    # The fused operation that owns this operation's parameters, and their names; see `lend_parameters`.
    _owner: torch.nn.Module | None = None
    _owned: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owner, name) if name in self._owned else super().__getattr__(name)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        if name in self._owned:
            assert self._owner is not None
            self._owner.register_parameter(name, param)
        else:
            super().register_parameter(name, param)

    def _set_lent_parameter(self, name: str, value: Any) -> None:
        """Set the owner's parameter; like an entry of `_parameters`, it may be any tensor.

        `torch.func.functional_call` with keys of a state dict, which name this module, sets the parameter here.
        """
        assert self._owner is not None
        if isinstance(value, torch.Tensor) and name in self._owner._parameters:
            self._owner._parameters[name] = value  # pyright: ignore[reportArgumentType]
        else:
            setattr(self._owner, name, value)

    def lend_parameters(self, owner: torch.nn.Module) -> None:
        """Move the parameters to a module, which owns them from now on; the operation reads them there.

        torch's tools for modules, such as parametrizations and pruning, replace entries of
        `_parameters` and attributes of the owner alone.
        """
        names = tuple(self._parameters)
        for name in names:
            owner.register_parameter(name, self._parameters.pop(name))
        # Not `setattr`, which would make the owner a child of its child.
        vars(self).update(_owner=owner, _owned=names)


def are_parametrized(operations: Iterable[LentParameters]) -> bool:
    """Return whether torch.nn.utils.parametrize has added its child to an operation or its owner."""
    owners = [operation._owner or operation for operation in operations]
    return any("parametrizations" in owner._modules for owner in owners)
