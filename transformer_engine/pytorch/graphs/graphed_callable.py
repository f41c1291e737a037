"""Replacement for a graphed callable: checks call arguments and replays the graphs, or runs eagerly."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...common.checks import described
from ...common.numbers import with_article
from ..quantization.autocast import autocast
from ..runtime.warn_once import warn_once
from .arguments import SampleArguments
from .caching import microbatch, with_first_microbatch, write_first_flag
from .recorded_block import RecordedBlock
from .signature import CONSTANTS
from .static_block import StaticBlock

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Arguments:
    """Takes the tensors of a call out of its arguments and checks them against the captured ones.

    Args:
        sample: The captured arguments.
        statics: The captured tensors.
    """

    def __init__(self, sample: SampleArguments, statics: Sequence[Tensor]):
        self.structure = sample.leaves.structure
        self.names = sample.names
        self.count = sample.args
        self.facts = [(tensor.shape, tensor.dtype, tensor.device) for tensor in statics]
        self.is_flat = not sample.names and len(statics) == sample.args
        self.positions = sample.leaves.positions
        constants = enumerate(sample.leaves.constants)
        self.constants = [(i, value) for i, value in constants if i not in self.positions]

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Tensor]:
        """Return the tensors of a call, in the dtype and on the device of the captured ones.

        Raises:
            TypeError, ValueError: An argument's structure, shape or dtype differs from the capture.
        """
        for name in self.names:
            if name not in kwargs:
                raise TypeError(
                    f"keyword {name} was captured and is missing; pass it in every call"
                )
        if len(args) != self.count:
            raise TypeError(f"{len(args)} positional arguments; {self.count} were captured")
        if self.is_flat:
            leaves: Sequence[Any] = args
        else:
            leaves, structure = pytree.tree_flatten(
                (args, {name: kwargs[name] for name in self.names})
            )
            if structure != self.structure:
                raise TypeError(
                    "the arguments are nested differently from the captured ones; pass the same structure"
                )
            if self.constants:
                for i, captured in self.constants:
                    if type(leaves[i]) is not type(captured) or leaves[i] != captured:
                        raise ValueError(
                            f"a keyword's {described(leaves[i])} was captured as {described(captured)}, which the "
                            "graph keeps; capture one for each value"
                        )
                leaves = [leaves[i] for i in self.positions]
        for i, (leaf, facts) in enumerate(zip(leaves, self.facts, strict=True)):
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"argument {i} is {with_article(type(leaf))}; a tensor was captured"
                )
            if (leaf.shape, leaf.dtype, leaf.device) != facts:
                leaves = list(leaves)
                leaves[i] = _as_captured(i, leaf, *facts)
        return leaves


def _as_captured(
    position: int, tensor: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Copy an argument to the captured dtype and device, differentiably.

    Raises:
        ValueError: The argument has another shape, or a dtype that cannot be converted.
    """
    if tensor.shape != shape:
        raise ValueError(
            f"argument {position} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}; the graph "
            f"was captured for {list(shape)} {dtype} on {device}. Capture one for each shape"
        )
    if not torch.can_cast(tensor.dtype, dtype):
        raise ValueError(
            f"argument {position} is {tensor.dtype}; the graph was captured for {dtype}: convert it to {dtype}"
        )
    if tensor.dtype != dtype:
        warn_once(
            "argument of a graphed callable in another dtype",
            f"argument {position} is {tensor.dtype}, the graph was captured for {dtype}: it is converted; pass {dtype}",
        )
    return tensor.to(device, dtype)


@dataclass(eq=False)
class EagerBlock:
    """Runs the callable eagerly, under the autocast that its graph would be captured with."""

    block: StaticBlock

    def run(self, tensors: Sequence[Tensor], first: bool | None, stream: Any, event: Any) -> Any:
        block = self.block
        args, kwargs = block.arguments(tensors)
        if first is not None and block.module in block.layers:
            args, kwargs = with_first_microbatch(first, block.module, args, kwargs)
        state = block.quantization
        with (
            microbatch(block.module, block.layers, first),
            autocast(state.enabled, state.calibrating, state.recipe, state.group, _graph=True),
        ):
            return block.call(*args, **kwargs)

    def backward_dw(self) -> None:
        for layer in self.block.delayed:
            type(layer).backward_dw(layer)  # pyright: ignore[reportArgumentType]  # the method of the class: `backward_dw` of a graphed module is replaced

    def reset(self) -> None:
        """Do nothing, because no graph was captured."""


@dataclass(frozen=True)
class Keywords:
    """The keywords that a callable takes: their defaults, and whether it takes any other in **kwargs."""

    defaults: Mapping[str, Any]
    takes_any: bool

    @staticmethod
    def of(function: Callable[..., Any]) -> Keywords:
        """Read the signature of a function. A function without a signature (a builtin) may take any keyword."""
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            return Keywords({}, True)
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        named = {
            parameter.name: parameter.default
            for parameter in parameters
            if parameter.kind in _NAMED
        }
        return Keywords(named, takes_any)


class GraphedCallable:
    """The call (args, kwargs, is_first_microbatch=, cuda_graph_stream=, cuda_graph_event=) -> outputs of a graph.

    If the module is not in the mode it was captured in (training or evaluation), its own forward runs. A keyword that
    was not captured is accepted only if the callable does not take it or its value is the default. Any other value
    raises TypeError.
    """

    def __init__(self, runs: EagerBlock | RecordedBlock, sample: SampleArguments):
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
            first = (
                {} if is_first_microbatch is None else {"is_first_microbatch": is_first_microbatch}
            )
            return self.original(*args, **kwargs, **first)
        tensors = self.arguments.tensors(args, kwargs)
        if len(kwargs) > len(self.arguments.names):
            for name, value in kwargs.items():
                if name in self.arguments.names or not (
                    name in self.keywords.defaults or self.keywords.takes_any
                ):
                    continue
                # In **kwargs: None, as callers pass options that are not set.
                default = self.keywords.defaults.get(name)
                constant = isinstance(value, CONSTANTS) and type(value) is type(default)
                if value is not default and not (constant and value == default):
                    raise TypeError(
                        f"keyword {name}={described(value)} was not captured, and a replay of the graph would ignore "
                        f"it; capture the callable with it (sample_kwargs), or leave {name} at its default"
                    )
        first = None
        if self.caches:
            if not isinstance(is_first_microbatch, bool):
                raise ValueError(
                    f"is_first_microbatch={described(is_first_microbatch)}: with cache_quantized_params=True every "
                    "call says whether it is the first microbatch of a step; pass True or False"
                )
            first = is_first_microbatch
            if isinstance(self.runs, RecordedBlock):
                write_first_flag(first)
        return self.runs.run(tensors, first, cuda_graph_stream, cuda_graph_event)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedCallable:
        raise TypeError(
            "a graphed module cannot be copied: its graphs write to its own memory; copy it before "
            "make_graphed_callables, or use te.graphed(), whose copies begin without graphs"
        )

    def backward_dw(self) -> None:
        """Compute the weight gradients that delay_wgrad_compute=True postponed in the last backward pass."""
        self.runs.backward_dw()

    def reset(self) -> None:
        """Free the graphs; a later call raises RuntimeError."""
        self.runs.reset()
