"""fingerprint(objects) = {place: value}: all state that a rejected call could have changed.

Tensors count with their bytes, gradients and identity, package objects with all their attributes.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import os
import types
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from transformer_engine.common import dispatch
from transformer_engine.pytorch.distributed import rng
from transformer_engine.pytorch.primitives.gemm.request import Switch
from transformer_engine.pytorch.quantization import (
    FP8GlobalStateManager,
    delayed_scaling,
    model_init,
    recompute_states,
    support,
)
from transformer_engine.pytorch.quantization.autocast import here, snapshot
from transformer_engine.pytorch.runtime import device_checks

PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    enum.Enum,
    torch.Size,
)
# Caches keyed by shapes and names: no result depends on the call order.
MEMORIES = ("_foreseen", "_plans")
OURS = ("transformer_engine", "transformer_engine_torch")


def fingerprint(*watched: Any) -> dict[str, Any]:
    """Current state of the watched objects and the process."""
    results: dict[str, Any] = {}
    visit = _Visit(results)
    for number, value in enumerate(watched):
        visit(f"watched[{number}]", value)
    visit("process", _process())
    return results


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The places where two fingerprints differ."""
    if before == after:
        return []
    return sorted(index for index in {*before, *after} if before.get(index) != after.get(index))


def _process() -> dict[str, Any]:
    """State that belongs to none of the caller's objects."""
    return {
        "torch random state": torch.get_rng_state().numpy().tobytes(),
        "cuda random state": torch.cuda.get_rng_state().numpy().tobytes()
        if torch.cuda.is_available()
        else None,
        "tracked random states": rng._tracked,
        "environment": repr(vars(os.environ)["_data"]),  # the variables before they are decoded
        "autocast": snapshot(),
        "model init": model_init.current_model_init(),
        "pools": delayed_scaling.registry.pools,
        "emulation": support._switch,
        "recomputation": (
            here().recomputes,
            here().recomputing,
            recompute_states.runs(),
            recompute_states.marked_by_hand,
        ),
        "checks of numbers on a device": list(device_checks._waiting),
        "callers' flags": FP8GlobalStateManager.quantization_state,
        "forced backends": dict(dispatch._forced),
        "observers": list(dispatch._observers),
        "autotune": Switch.depth,
        "gradients on": torch.is_grad_enabled(),
        "torch.autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
    }


class _Visit:
    """Walks objects into `found`; the second visit of an object is a reference to the first."""

    def __init__(self, result: dict[str, Any]):
        self.found = result
        self.seen: dict[int, str] = {}
        self.kept: list[Any] = []  # so that no id is used twice

    def __call__(self, position: str, value: Any) -> None:
        kind = _kind(type(value))
        if kind is _Kind.PLAIN:
            self.found[position] = repr(value)
            return
        if id(value) in self.seen:
            self.found[position] = f"the object at {self.seen[id(value)]}"
            return
        self.seen[id(value)] = position
        self.kept.append(value)
        if kind is _Kind.TENSOR:
            self._tensor(position, value)
        elif kind is _Kind.MAPPING:
            self.found[position] = [type(value).__name__, *map(repr, value)]
            for index, (key, item) in enumerate(value.items()):
                self(f"{position}[{key if isinstance(key, str) else index}]", item)
        elif kind is _Kind.SEQUENCE:
            self.found[position] = (type(value).__name__, len(value))
            for index, item in enumerate(value):
                self(f"{position}[{index}]", item)
        elif kind is _Kind.GENERATOR:
            self.found[position] = hashlib.sha256(value.get_state().numpy().tobytes()).hexdigest()
        elif kind is _Kind.OBJECT:
            self._object(position, value)
        else:
            self.found[position] = (type(value).__name__, id(value))

    def _tensor(self, position: str, value: torch.Tensor) -> None:
        # In-place writes raise the version, even if the bits stay the same.
        self.found[position] = (
            type(value).__name__,
            id(value),
            value.dtype,
            tuple(value.shape),
            value.requires_grad,
        )
        if _is_ours(type(value)):
            for name, payload in vars(value).items():
                self(f"{position}.{name}", payload)
        elif not value.is_meta:
            plain = value.detach().contiguous().reshape(-1)
            raw = plain.view(torch.uint8) if plain.numel() else plain
            self.found[f"{position} bytes"] = hashlib.sha256(
                raw.cpu().numpy().tobytes()
            ).hexdigest()
            for name, extra in getattr(value, "__dict__", {}).items():
                self(f"{position}.{name}", extra)
        if value.is_leaf and value.grad is not None:
            self(f"{position}.grad", value.grad)

    def _object(self, position: str, value: Any) -> None:
        self.found[position] = type(value).__name__
        attributes = getattr(value, "__dict__", None)
        if attributes is None:
            fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
            attributes = {field.name: getattr(value, field.name) for field in fields}
        for name, attribute in list(attributes.items()):
            if name not in MEMORIES and _kind(type(attribute)) is not _Kind.FUNCTION:
                self(f"{position}.{name}", attribute)


class _Kind(enum.Enum):
    PLAIN, FUNCTION, TENSOR, MAPPING, SEQUENCE, GENERATOR, OBJECT, OTHER = range(8)


@functools.cache  # checking against abstract classes and type tuples takes half a fingerprint's time
def _kind(of: type) -> _Kind:
    kinds = {
        PLAIN: _Kind.PLAIN,
        (types.FunctionType, types.MethodType, type): _Kind.FUNCTION,
        (torch.Tensor,): _Kind.TENSOR,
        (Mapping,): _Kind.MAPPING,
        (list, tuple, set, frozenset, deque): _Kind.SEQUENCE,
        (torch.Generator,): _Kind.GENERATOR,
        (torch.nn.Module,): _Kind.OBJECT,
    }
    for classes, kind in kinds.items():
        if issubclass(of, classes):
            return kind
    return _Kind.OBJECT if _is_ours(of) else _Kind.OTHER


def _is_ours(of: type) -> bool:
    return of.__module__.split(".")[0] in OURS
