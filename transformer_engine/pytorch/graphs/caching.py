"""Cached quantized weights in a graph: computed in the first microbatch of a step and reused in the others.

A graph runs the same kernels in every replay. They write the codes of a weight only if a flag on
the device marks the first microbatch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..module.linear_base import ProductsModule
from ..quantization import FP8GlobalStateManager

_FIRST = "is_first_microbatch"


@functools.cache
def _parameters(kind: type) -> inspect.Signature:
    return inspect.signature(kind.forward)


@contextmanager
def microbatch(
    module: torch.nn.Module | None, layers: Iterable[ProductsModule], first: bool | None
) -> Iterator[None]:
    """Pass is_first_microbatch=first to each layer call inside the block.

    Modules in other libraries keep the flag in an attribute with that name and write it after their
    first call. With None, layers are called unchanged, and the attribute is None.
    """
    flagged_modules = [m for m in (() if module is None else module.modules()) if _FIRST in vars(m)]
    before = [vars(m)[_FIRST] for m in flagged_modules]
    with ExitStack() as hooks:
        for m, previous in zip(flagged_modules, before, strict=True):
            setattr(m, _FIRST, first)
            hooks.callback(setattr, m, _FIRST, previous)
        if first is not None:
            call = functools.partial(with_first_microbatch, first)
            for layer in layers:
                hooks.callback(layer.register_forward_pre_hook(call, with_kwargs=True).remove)
        yield


def with_first_microbatch(
    first: bool, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return (args, kwargs) for a layer call with is_first_microbatch=first."""
    bound = _parameters(type(layer)).bind(layer, *args, **kwargs)
    bound.arguments[_FIRST] = first
    return bound.args[1:], bound.kwargs


class _LastFlag:
    """The value last written to the flag, and the flag tensor with its version."""

    value: bool | None = None
    flag: Tensor | None = None
    version = -1


def write_first_flag(first: bool) -> None:
    """Write the flag on the device that captured layers read, unless it has the value already."""
    flag = FP8GlobalStateManager.get_skip_fp8_weight_update_tensor()
    written = _LastFlag
    if (
        flag is not None
        and written.flag is flag
        and written.value is first
        and written.version == flag._version
    ):
        return
    FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(not first)
    flag = FP8GlobalStateManager.get_skip_fp8_weight_update_tensor()
    assert flag is not None
    written.value, written.flag, written.version = first, flag, flag._version


@contextmanager
def flagged(cached: bool) -> Iterator[None]:
    """Provide the flag to captured layers inside the block if weights are cached; remove it otherwise."""
    state = FP8GlobalStateManager.quantization_state
    flag = state.skip_fp8_weight_update_tensor
    if cached and flag is None:
        write_first_flag(True)
    elif not cached:
        state.skip_fp8_weight_update_tensor = None
    try:
        yield
    finally:
        if not cached:
            state.skip_fp8_weight_update_tensor = flag
