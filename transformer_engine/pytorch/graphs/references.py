"""The variables that a function reads besides its arguments, as signature parts.

A capture freezes these variables: numbers keep their values, tensors their addresses, objects their identities. The
modules, optimizers and random generators among them are collected separately: their own state belongs to a step too.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .signature import PLAIN_TYPES, SameObject, tensor_addresses

# Object levels whose attributes are read: an object, and its attributes.
_LEVELS = 2
# Methods that Python or torch calls.
_CALLED = ("__call__", "forward")
# Longer containers count by identity, so that a data set is not read in every call.
_MAX_ELEMENTS = 64
# This package's objects, such as recipes, are step constants, other than modules and optimizers.
_CONSTANT_PACKAGES = ("transformer_engine.pytorch.", "transformer_engine.common.")
# Library functions are not read: they keep no state between the calls in a step.
_LIBRARIES = frozenset({"torch", "numpy", *sys.stdlib_module_names})


@dataclass
class References:
    """The variables of a function.

    Attributes:
        facts: (name, value) for every variable that is not a module or an optimizer.
        modules: Modules that the variables hold.
        optimizers: Optimizers that the variables hold.
        generators: (name, host random generator) among the variables.
    """

    facts: list[tuple[str, Any]] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    generators: list[tuple[str, Any]] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)
    _classes: dict[type, None] = field(default_factory=dict)
    _attributes: set[str] = field(default_factory=set)

    @staticmethod
    def of(function: Callable[..., Any]) -> References:
        """Read the variables of a function, the functions that it refers to, and the object behind a method."""
        references = References()
        references._read_function("self", function)
        references._read_methods()
        return references

    def _read_function(self, name: str, function: Any) -> None:
        """Read the variables of a callable; `name` belongs to an object with a `__call__` method."""
        if isinstance(function, functools.partial):
            self._read(
                "an argument of functools.partial", (function.args, function.keywords), _LEVELS
            )
            self._read_function(name, function.func)
        elif isinstance(function, types.MethodType):
            self._read("self", function.__self__, _LEVELS)
            self._read_function("self", function.__func__)
        elif isinstance(function, types.FunctionType):
            self._read_variables(function)
        else:
            self._read(name, function, _LEVELS)

    def _read_variables(self, function: types.FunctionType) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        paths, attributes = _names(function.__code__)
        self._attributes |= attributes
        for name, value in _closure(function):
            self._read(name, value, _LEVELS)
        for path in paths:
            if path[0] in function.__globals__:
                self._read_path(function.__globals__[path[0]], path)
        self._read(
            "a default of the function", (function.__defaults__, function.__kwdefaults__), _LEVELS
        )
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self._read_function("self", wrapped)

    def _read_path(self, value: Any, path: tuple[str, ...]) -> None:
        """Read a global variable; for a module or a class, read the attribute that the function reads."""
        length = 1
        while length < len(path) and isinstance(value, types.ModuleType | type):
            if isinstance(value, types.ModuleType) and _is_library(value.__name__):
                return
            if path[length] not in (
                vars(value) if isinstance(value, types.ModuleType) else dir(value)
            ):
                return
            value = getattr(value, path[length])
            length += 1
        self._read("global variable " + ".".join(path[:length]), value, _LEVELS)

    def _read_methods(self) -> None:
        """Read the methods of the objects found, as far as a function that was read names them."""
        read: set[tuple[type, str]] = set()
        while True:
            waiting = [
                (owner, name)
                for kind in self._classes
                for owner in kind.__mro__
                for name in vars(owner)
                if (name in _CALLED or name in self._attributes) and (owner, name) not in read
            ]
            if not waiting:
                return
            read.update(waiting)
            for owner, name in waiting:
                member = vars(owner)[name]
                member = (
                    member.fget
                    if isinstance(member, property)
                    else getattr(member, "__func__", member)
                )
                if isinstance(member, types.FunctionType) and not _is_library(member.__module__):
                    self._read_variables(member)

    def _read(self, name: str, value: Any, levels: int) -> None:
        """Add a variable, and the attributes of an object down to a number of levels."""
        kind = type(value)
        if kind in PLAIN_TYPES:
            self.facts.append((name, (kind, value)))
        elif isinstance(value, Tensor):
            # A step that replaces a tensor passes a value to the next step; a replay would read the first one.
            self.facts.append(
                (name, (SameObject(value), tensor_addresses(value), value.shape, value.dtype))
            )
        elif isinstance(value, types.ModuleType | type):
            self.facts.append((name, SameObject(value)))
        elif is_generator(getattr(value, "__self__", None)):
            self._read(name, value.__self__, levels)
        elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            self.facts.append((name, _identity(value)))
            if not _is_library(getattr(value, "__module__", None)) or isinstance(
                value, functools.partial
            ):
                self._read_function(name, value)
        elif id(value) in self._seen:
            self.facts.append((name, SameObject(value)))
        elif isinstance(value, torch.nn.Module):
            self._read_module(name, value)
        elif isinstance(value, torch.optim.Optimizer):
            self._seen.add(id(value))
            self.optimizers.append(value)
        elif is_generator(value):
            self._seen.add(id(value))
            self.facts.append((name, SameObject(value)))
            self.generators.append((name, value))
        elif isinstance(value, list | tuple | dict | set | frozenset):
            self._read_container(name, value, levels)
        else:
            self._read_object(name, value, levels)

    def _read_module(self, name: str, module: torch.nn.Module) -> None:
        self._seen.add(id(module))
        self.modules.append(module)
        for layer in module.modules():
            if not _is_library(type(layer).__module__):
                self._classes[type(layer)] = None
                drawing = [
                    (key, value) for key, value in vars(layer).items() if is_generator(value)
                ]
                self.generators += [(f"{name}.{key}", value) for key, value in drawing]

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
        if levels == 0 or (type(value).__module__ or "").startswith(_CONSTANT_PACKAGES):
            return
        self._classes[type(value)] = None
        for attribute, element in _attributes(value):
            self._read(f"{name}.{attribute}", element, levels - 1)


def is_generator(value: Any) -> bool:
    """Return whether an object draws random numbers on the host."""
    if isinstance(value, random.Random):
        return True
    if isinstance(value, torch.Generator):
        return value.device.type == "cpu"
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(
        value, numpy.random.Generator | numpy.random.RandomState
    )


def _is_library(module: str | None) -> bool:
    name = module or ""
    return name.partition(".")[0] in _LIBRARIES or f"{name}.".startswith(_CONSTANT_PACKAGES)


def _identity(function: Any) -> Any:
    """Return the identity of a function; a bound method is a new object each time that it is read."""
    if isinstance(function, types.MethodType):
        return SameObject(function.__func__), SameObject(function.__self__)
    return SameObject(function)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the attributes of an object, in its dictionary and in its slots."""
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield from attributes.items()
    for owner in type(value).__mro__:
        for name, member in list(vars(owner).items()):
            if isinstance(member, types.MemberDescriptorType) and not _is_library(owner.__module__):
                try:
                    yield name, member.__get__(value)
                except AttributeError:  # the slot has no value yet
                    continue


def _closure(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Iterate over the names and values of a function's closure."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"variable {name}", cell.cell_contents
        except ValueError:  # the variable has no value yet
            continue


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[tuple[tuple[str, ...], ...], frozenset[str]]:
    """Return the global variables that a function and its inner functions use, and all attribute names.

    A global variable is a path: ("config", "scale") if the function reads `config.scale`.
    """
    paths: dict[tuple[str, ...], None] = {}
    attributes: set[str] = set()
    path: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"):
            paths[path] = None
            path = (instruction.argval,)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "STORE_ATTR"):
            attributes.add(instruction.argval)
            path = (*path, instruction.argval) if path else ()
        elif instruction.opname not in ("CACHE", "EXTENDED_ARG", "PUSH_NULL"):
            paths[path] = None
            path = ()
    paths[path] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, names = _names(constant)
            paths.update(dict.fromkeys(inner))
            attributes |= names
    paths.pop((), None)
    return tuple(paths), frozenset(attributes)
