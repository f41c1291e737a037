"""The variables that a function reads besides its arguments, as parts of a signature.

A capture freezes these variables: numbers keep their values, tensors their addresses, objects their identities. The
modules and optimizers among them are collected separately, because their own settings belong to the signature too.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .signature import PLAIN_TYPES, SameObject, address_of

# Levels of objects whose attributes are read: the object of a bound method, and its attributes.
_LEVELS = 2
# Longer containers count by identity, so that a data set is not read in every call.
_MAX_ELEMENTS = 64
_CONSTANT_PACKAGES = ("transformer_engine.pytorch.", "transformer_engine.common.")


@dataclass
class References:
    """The variables of a function.

    Attributes:
        facts: (name, value) of every variable that is not a module or an optimizer.
        modules: Modules that the variables hold.
        optimizers: Optimizers that the variables hold.
    """

    facts: list[tuple[str, Any]] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)

    @staticmethod
    def of(function: Callable[..., Any]) -> References:
        """Read the variables of a function, of the functions that it refers to, and of the object of a method."""
        found = References()
        found._read_function(function)
        return found

    def _read_function(self, function: Any) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        if isinstance(function, functools.partial):
            self._read("an argument of functools.partial", (function.args, function.keywords), 0)
            self._read_function(function.func)
        elif isinstance(function, types.MethodType):
            self._read("self", function.__self__, _LEVELS)
            self._read_function(function.__func__)
        elif isinstance(function, types.FunctionType):
            for name, value in _variables(function):
                called = isinstance(value, types.FunctionType | types.MethodType | functools.partial)
                if called and getattr(value, "__module__", None) == function.__module__:
                    self._read_function(value)
                else:
                    self._read(name, value, _LEVELS - 1)
            self._read("a default of the function", (function.__defaults__, function.__kwdefaults__), 0)
            if hasattr(function, "__wrapped__"):
                self._read_function(function.__wrapped__)
        elif callable(function) and type(function).__call__ is not type.__call__:
            self._read("self", function, _LEVELS)

    def _read(self, name: str, value: Any, levels: int) -> None:
        """Add a variable, and the attributes of an object down to a number of levels."""
        kind = type(value)
        if kind in PLAIN_TYPES:
            self.facts.append((name, (kind, value)))
        elif isinstance(value, Tensor):
            # Results of autograd are overwritten by every replay.
            place = None if value.grad_fn is not None else (address_of(value), value.shape, value.dtype)
            self.facts.append((name, (kind, place)))
        elif isinstance(value, types.ModuleType | type):
            return
        elif id(value) in self._seen:
            self.facts.append((name, SameObject(value)))
        elif isinstance(value, torch.nn.Module):
            self._seen.add(id(value))
            self.modules.append(value)
        elif isinstance(value, torch.optim.Optimizer):
            self._seen.add(id(value))
            self.optimizers.append(value)
        elif isinstance(value, list | tuple | dict | set | frozenset):
            self._read_container(name, value, levels)
        else:
            self._read_object(name, value, levels)

    def _read_container(self, name: str, value: Any, levels: int) -> None:
        if not isinstance(value, tuple):
            self._seen.add(id(value))
        self.facts.append((name, (type(value), len(value))))
        if len(value) > _MAX_ELEMENTS:
            self.facts.append((name, SameObject(value)))
        elif isinstance(value, set | frozenset):
            plain = [element for element in value if type(element) in PLAIN_TYPES]
            self.facts.append((name, frozenset(plain)))
        else:
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, element in pairs:
                self._read(f"{name}[{key!r}]", element, levels)

    def _read_object(self, name: str, value: Any, levels: int) -> None:
        self._seen.add(id(value))
        self.facts.append((name, SameObject(value)))
        attributes = getattr(value, "__dict__", None)
        # Objects of this package, such as recipes, are constants of a step, other than modules and optimizers.
        ours = (type(value).__module__ or "").startswith(_CONSTANT_PACKAGES)
        if levels > 0 and isinstance(attributes, dict) and not callable(value) and not ours:
            for attribute, element in attributes.items():
                self._read(f"{name}.{attribute}", element, levels - 1)


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Iterate over the names and values of the closure and of the global variables that a function reads."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"variable {name}", cell.cell_contents
        except ValueError:  # the variable has no value yet
            continue
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield f"global variable {name}", function.__globals__[name]
