"""The replacement of a graphed callable: it checks a call, and runs the recordings or the callable itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...common.checks import described
from ..quantization.autocast import AutocastState, autocast
from .arguments import Sample
from .block import Block
from .caching import called_as, microbatch, say_first
from .replayed import Arguments, Replayed
from .signature import CONSTANTS

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Eagerly:
    """The callable as it is, under the autocast that a graph of it would have been captured with."""

    def __init__(self, block: Block):
        self.block = block

    def run(self, tensors: Sequence[Tensor], first: bool | None, stream: Any, event: Any) -> Any:
        block = self.block
        args, kwargs = block.arguments(tensors)
        if first is not None and block.module in block.layers:
            args, kwargs = called_as(first, block.module, args, kwargs)  # pyright: ignore[reportArgumentType]
        with microbatch(block.module, block.layers, first), _under(block.quantization):
            return block.call(*args, **kwargs)

    def backward_dw(self) -> None:
        for layer in self.block.delayed:
            type(layer).backward_dw(layer)  # pyright: ignore[reportArgumentType]  # not the instance's door

    def reset(self) -> None:
        """There is no graph to free."""


def _under(state: AutocastState) -> autocast:
    return autocast(state.enabled, state.calibrating, state.recipe, state.group, _graph=True)


@dataclass(frozen=True)
class Keywords:
    """The keywords that a callable takes: their defaults, and whether it takes any other in **kwargs."""

    defaults: Mapping[str, Any]
    takes_any: bool

    @staticmethod
    def of(function: Callable[..., Any]) -> Keywords:
        """Read the signature of a function. One without a signature (a builtin) may take any keyword."""
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            return Keywords({}, True)
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        named = {parameter.name: parameter.default for parameter in parameters if parameter.kind in _NAMED}
        return Keywords(named, takes_any)

    def check_without_effect(self, kwargs: Mapping[str, Any], captured: Collection[str]) -> None:
        """Raise TypeError for a keyword that was not captured and would change the result of the callable."""
        for name, value in kwargs.items():
            if name in captured or not (name in self.defaults or self.takes_any):
                continue
            default = self.defaults.get(name)  # in **kwargs: None, as callers pass options that are not set
            constant = isinstance(value, CONSTANTS) and type(value) is type(default)
            if value is not default and not (constant and value == default):
                raise TypeError(
                    f"keyword {name}={described(value)} was not captured, and a replay of the graph would ignore it; "
                    f"capture the callable with it (sample_kwargs), or leave {name} at its default"
                )


class Door:
    """The call (args, kwargs, is_first_microbatch=, cuda_graph_stream=, cuda_graph_event=) -> outputs of a graph.

    If the module is not in the mode it was captured in (training or evaluation), its own forward runs. A keyword that
    was not captured is accepted only if the callable does not take it or its value is the default. Any other value
    raises TypeError.
    """

    def __init__(self, runs: Eagerly | Replayed, sample: Sample):
        block = runs.block
        self.runs = runs
        self.caches = block.caches
        self.module = block.module
        self.training = block.training
        self.original: Callable[..., Any] = block.call
        self.arguments = Arguments(sample, block.inputs)
        self.keywords = Keywords.of(block.call if block.module is None else block.module.forward)

    def __call__(
        self,
        *args: Any,
        is_first_microbatch: bool | None = None,
        cuda_graph_stream: Any = None,
        cuda_graph_event: Any = None,
        **kwargs: Any,
    ) -> Any:
        if self.module is not None and self.module.training != self.training:
            first = {} if is_first_microbatch is None else {"is_first_microbatch": is_first_microbatch}
            return self.original(*args, **kwargs, **first)
        tensors = self.arguments.tensors(args, kwargs)
        if len(kwargs) > len(self.arguments.names):
            self.keywords.check_without_effect(kwargs, self.arguments.names)
        first = None
        if self.caches:
            if not isinstance(is_first_microbatch, bool):
                raise ValueError(
                    f"is_first_microbatch={described(is_first_microbatch)}: with cache_quantized_params=True every "
                    "call says whether it is the first microbatch of a step; pass True or False"
                )
            first = is_first_microbatch
            if isinstance(self.runs, Replayed):
                say_first(first)
        return self.runs.run(tensors, first, cuda_graph_stream, cuda_graph_event)

    def __deepcopy__(self, memo: dict[int, Any]) -> Door:
        raise TypeError(
            "a graphed module cannot be copied: its graphs write to its own memory; copy it before "
            "make_graphed_callables, or use te.graphed(), whose copies begin without graphs"
        )

    def backward_dw(self) -> None:
        """The weight gradients that delay_wgrad_compute=True has put off in the last backward."""
        self.runs.backward_dw()

    def reset(self) -> None:
        """Free the graphs: a later call raises."""
        self.runs.reset()


def hung(door: Door) -> Any:
    """The module itself with the door in its forward's place; of a plain function, the door."""
    module = door.module
    if module is None:
        return door
    vars(module).update(forward=door, backward_dw=door.backward_dw, reset=door.reset)
    return module
