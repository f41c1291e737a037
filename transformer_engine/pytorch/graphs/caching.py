"""Quantized weights in a graph: renewed for the first microbatch of a step, kept for the others.

A graph runs the same kernels every time. They quantize each weight and write the codes where a flag on the device says
that this is the first microbatch; everywhere else the codes stay as they are.
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
    return inspect.signature(kind.forward)  # pyright: ignore[reportFunctionMemberAccess]


def layers_with_weights(module: torch.nn.Module | None) -> list[ProductsModule]:
    """The layers inside of a module that quantize weights."""
    if module is None:
        return []
    return [layer for layer in module.modules() if isinstance(layer, ProductsModule)]


@contextmanager
def microbatch(
    module: torch.nn.Module | None, layers: Iterable[ProductsModule], first: bool | None
) -> Iterator[None]:
    """Inside of the block each layer is called with is_first_microbatch=first, whoever calls it.

    Modules of other libraries keep it in an attribute of that name, and write it after their first call. None: layers
    are called as they are, and such modules as if nobody had told them.
    """
    told = [m for m in (() if module is None else module.modules()) if _FIRST in vars(m)]
    before = [vars(m)[_FIRST] for m in told]
    with ExitStack() as hooks:
        for m, known in zip(told, before, strict=True):
            setattr(m, _FIRST, first)
            hooks.callback(setattr, m, _FIRST, known)
        if first is not None:
            call = functools.partial(called_as, first)
            for layer in layers:
                hooks.callback(layer.register_forward_pre_hook(call, with_kwargs=True).remove)
        yield


def called_as(first: bool, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(args, kwargs) of a call of the layer, with is_first_microbatch=first in them."""
    bound = _parameters(type(layer)).bind(layer, *args, **kwargs)
    bound.arguments[_FIRST] = first
    return bound.args[1:], bound.kwargs


class _Written:
    """What was last written into the flag, and into which state of which tensor."""

    value: bool | None = None
    flag: Tensor | None = None
    version = -1


def say_first(first: bool) -> None:
    """Write the flag on the device that captured layers read; nothing where it says so already."""
    flag = FP8GlobalStateManager.get_skip_fp8_weight_update_tensor()
    written = _Written
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
    """Inside of the block captured layers read the flag where weights are cached, and find none where they are not."""
    state = FP8GlobalStateManager.quantization_state
    flag = state.skip_fp8_weight_update_tensor
    if cached and flag is None:
        say_first(True)
    elif not cached:
        state.skip_fp8_weight_update_tensor = None
    try:
        yield
    finally:
        if not cached:
            state.skip_fp8_weight_update_tensor = flag
