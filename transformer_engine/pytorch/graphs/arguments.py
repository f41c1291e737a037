"""Validation of the arguments of make_graphed_callables, before anything runs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ...common.checks import described, function_or_none
from ...common.numbers import to_bool, to_float, to_int, with_article
from ..quantization import check_recipe_support, get_default_recipe
from ..quantization.autocast import AutocastState
from ..runtime.checks import MODULE_HOOKS, group_or_none
from ..runtime.warn_once import warn_once
from .order import ModelChunks, ScheduledStep, list_chunks, order_steps, plain_steps
from .signature import CONSTANTS, ArgumentLeaves

# The events that hooks may observe during warm-up and capture.
HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


class RenamedOption(NamedTuple):
    """The value of an option under its name and under its earlier name."""

    name: str
    value: Any
    earlier_name: str
    earlier: Any

    def chosen(self) -> Any:
        """Return the value that is set; raise ValueError if both are."""
        if self.earlier is None:
            return self.value
        if self.value is not None:
            raise ValueError(
                f"{self.name} and its earlier name {self.earlier_name} are both set; leave the latter out"
            )
        warnings.warn(
            f"{self.earlier_name} is deprecated; use {self.name}", DeprecationWarning, stacklevel=4
        )
        return self.earlier


@dataclass(frozen=True)
class SampleArguments:
    """The sample arguments of one callable; only keywords may have leaves that are not tensors.

    Attributes:
        leaves: The flattened arguments.
        names: Keyword names.
        args: Positional argument count.
    """

    leaves: ArgumentLeaves
    names: tuple[str, ...]
    args: int


@dataclass(frozen=True)
class GraphOptions:
    """The options of make_graphed_callables."""

    warm_ups: int
    pool: Any
    allow_unused_input: bool
    pre_warmup_hook: Any
    retain_graph: bool
    post_warmup_hook: Any
    reuses_buffers: bool
    clones_gradients: bool
    caches: bool


@dataclass(frozen=True)
class CaptureRequest:
    """A validated make_graphed_callables call.

    Attributes:
        callables: The callables; microbatches may share a module.
        which: Callable index per sample.
        samples: The sample arguments.
        steps: Pass order.
        chunks: Assignment of callables to model chunks, or None.
        quantizations: Autocast state per callable.
        options: The other options.
        hooks: capture_time_hooks per callable.
        single: Whether a single callable was given without a tuple.
    """

    callables: tuple[Any, ...]
    which: tuple[int, ...]
    samples: tuple[SampleArguments, ...]
    steps: tuple[ScheduledStep, ...]
    chunks: ModelChunks | None
    quantizations: tuple[AutocastState, ...]
    options: GraphOptions
    hooks: tuple[dict[str, dict[int, Any]], ...]
    single: bool

    @property
    def modules(self) -> list[torch.nn.Module]:
        return [c for c in self.callables if isinstance(c, torch.nn.Module)]


def list_callables(modules: Any) -> tuple[tuple[Any, ...], bool]:
    """Return (callables, whether a single callable was given without a tuple)."""
    single = not isinstance(modules, tuple)
    callables = (modules,) if single else modules
    if not callables:
        raise ValueError("modules is an empty tuple; give one callable or more")
    for function in callables:
        if not callable(function):
            raise TypeError(
                f"modules holds {described(function)}, which cannot be called; give a module or a tuple of them"
            )
    for module in callables:
        if isinstance(module, torch.nn.Module):
            reason = obstacle(module)
            if reason is not None:
                raise RuntimeError(reason)
    trainings = {module.training for module in callables if isinstance(module, torch.nn.Module)}
    if len(trainings) > 1:
        raise RuntimeError(
            "some modules are in training mode and some are not; call train() or eval() on all of them"
        )
    return callables, single


def obstacle(module: torch.nn.Module) -> str | None:
    """Return why a graph cannot replay the module, or None."""
    for name, layer in module.named_modules():
        if any(getattr(layer, hooks) for hooks in MODULE_HOOKS):
            where = name or type(layer).__name__
            return f"{where} has hooks, which a replayed graph would not call; register them afterwards, or remove them"
    for name, buffer in module.named_buffers():
        if buffer.requires_grad:
            return f"buffer {name} wants a gradient, which a graph makes for parameters only; make it a parameter"
    return None


def list_samples(
    sample_args: Any, sample_kwargs: Any, single: bool, count: int, kwargs_given: bool
) -> tuple[SampleArguments, ...]:
    """Return samples for `count` callables; raise TypeError for leaves that a graph does not support."""
    args = (sample_args,) if single else sample_args
    if (
        not isinstance(args, (tuple, list))
        or len(args) != count
        or not all(isinstance(a, (tuple, list)) for a in args)
    ):
        if single and not isinstance(sample_args, (tuple, list)):
            raise TypeError(
                f"sample_args is {with_article(type(sample_args))}; give a tuple of tensors"
            )
        raise ValueError(
            f"sample_args must be {count} tuples of tensors, one for each callable and microbatch"
        )
    if not kwargs_given:
        keywords: Sequence[Any] = ({},) * count
    else:
        keywords = (sample_kwargs,) if single else sample_kwargs
        of_each = isinstance(keywords, (tuple, list)) and len(keywords) == count
        if not of_each or not all(isinstance(k, dict) for k in keywords):
            expected = "a dict" if single else f"{count} dicts, one for each of sample_args"
            raise ValueError(f"sample_kwargs={described(sample_kwargs)}; give {expected}")
    return tuple(_sample(tuple(a), k) for a, k in zip(args, keywords, strict=True))


def check_places(request: CaptureRequest) -> None:
    """Raise ValueError for tensors outside the GPU, whose operations a graph does not record."""
    for number, sample in enumerate(request.samples):
        for tensor in sample.leaves.tensors:
            if not tensor.is_cuda:
                raise ValueError(
                    f"sample {number} holds a tensor on {tensor.device}; a CUDA graph records what a GPU does, give "
                    "samples on it"
                )
    for module in request.modules:
        for name, parameter in module.named_parameters():
            if not parameter.is_cuda:
                raise ValueError(
                    f"{type(module).__name__}.{name} is on {parameter.device}; a CUDA graph records what a GPU does, "
                    'call module.to("cuda")'
                )


def _sample(args: tuple[Any, ...], kwargs: dict[str, Any]) -> SampleArguments:
    first_of_keywords = len(pytree.tree_leaves(args))
    leaves = ArgumentLeaves.of(args, kwargs)
    for i, leaf in enumerate(leaves.constants):
        if i not in leaves.positions and (i < first_of_keywords or not isinstance(leaf, CONSTANTS)):
            raise TypeError(
                f"sample arguments hold {described(leaf)}; a graph takes tensors, and in keywords None, numbers, text, "
                "dtypes and devices; bind what else there is: functools.partial(module, ..)"
            )
    return SampleArguments(leaves, tuple(kwargs), len(args))


def list_quantizations(
    enabled: Any, calibrating: Any, recipe: Any, group: Any, count: int
) -> tuple[AutocastState, ...]:
    """Return the autocast of each callable."""
    flags = tuple(enabled) if isinstance(enabled, (tuple, list)) else (enabled,) * count
    flags = tuple(to_bool("enabled", flag) for flag in flags)
    if len(flags) != count:
        raise ValueError(
            f"enabled has {len(flags)} entries for {count} modules; give one a module, or a single one"
        )
    calibrates = to_bool("calibrating", calibrating)
    group_or_none("amax_reduction_group", group)
    if any(flags) or calibrates:
        recipe = get_default_recipe() if recipe is None else recipe
    else:
        recipe = None
    if any(flags):
        supported, reason = check_recipe_support(recipe)
        if not supported:
            raise RuntimeError(f"{type(recipe).__name__} cannot run here: {reason}")
    return tuple(AutocastState(flag, calibrates, recipe, group, True) for flag in flags)


def build_schedule(
    order: Any, layers_per_chunk: Any, callables: int
) -> tuple[tuple[ScheduledStep, ...], ModelChunks | None, tuple[int, ...]]:
    """Return `(steps, chunks, for each sample its callable)`."""
    if order is None:
        if layers_per_chunk is not None:
            warn_once(
                "make_graphed_callables(_num_layers_per_chunk=) without _order",
                "_num_layers_per_chunk has no effect without _order; give an order, or leave it out",
            )
        return tuple(plain_steps(callables)), None, tuple(range(callables))
    # Convert an order to a list of ints, and floats for weight gradients.
    listed = order.tolist() if hasattr(order, "tolist") else order
    if isinstance(listed, (str, bytes)) or not isinstance(listed, Sequence):
        raise TypeError(
            f"_order={described(order)} is not a sequence; give a list of numbers, see graphs/order.py"
        )
    entries = [to_float(f"_order[{index}]", entry) for index, entry in enumerate(listed)]
    for index, entry in enumerate(entries):
        if not math.isfinite(entry):
            raise ValueError(
                f"_order[{index}]={entry} is not finite; give the number of a model chunk"
            )
    order = [int(entry) if entry.is_integer() else entry for entry in entries]
    chunks = list_chunks(order, callables, layers_per_chunk)
    number = callables * chunks.microbatches
    return tuple(order_steps(order, chunks)), chunks, tuple(chunks.layer(i) for i in range(number))


def list_hooks(hooks: Any, count: int) -> tuple[dict[str, dict[int, Any]], ...]:
    """Return capture_time_hooks as one dict per callable."""
    if hooks is None:
        return ({},) * count
    if len(hooks) != count:
        raise ValueError(
            f"capture_time_hooks has {len(hooks)} entries for {count} callables; give one each, or None"
        )
    for entry in hooks:
        for kind in entry or ():
            if kind not in HOOKS:
                raise ValueError(
                    f"capture_time_hooks holds {kind!r}; its keys are {', '.join(HOOKS)}"
                )
    return tuple(entry or {} for entry in hooks)


def check_options(options: GraphOptions, order: Any, training: bool) -> GraphOptions:
    """Return the options with numbers and flags converted.

    Raises:
        TypeError, ValueError: An option is invalid.
        RuntimeError: The mode of the modules or of torch.autocast rules out a capture.
    """
    options = replace(
        options,
        warm_ups=to_int("num_warmup_iters", options.warm_ups, 0),
        allow_unused_input=to_bool("allow_unused_input", options.allow_unused_input),
        retain_graph=to_bool("retain_graph_in_backward", options.retain_graph),
        reuses_buffers=to_bool("_reuse_graph_input_output_buffers", options.reuses_buffers),
        clones_gradients=to_bool("clone_param_grads_on_return", options.clones_gradients),
        caches=to_bool("cache_quantized_params", options.caches),
    )
    function_or_none("pre_warmup_hook", options.pre_warmup_hook)
    function_or_none("post_warmup_hook", options.post_warmup_hook)
    if options.reuses_buffers and order is None:
        raise ValueError(
            "_reuse_graph_input_output_buffers=True needs _order to say when a buffer is free; give one"
        )
    if options.reuses_buffers and not training:
        raise RuntimeError(
            "_reuse_graph_input_output_buffers frees buffers in the backward, which eval() mode lacks"
        )
    if torch.is_autocast_cache_enabled() and torch.is_autocast_enabled():
        raise RuntimeError(
            "torch.autocast caches casts of weights, which a graph would not update; enter it with cache_enabled=False"
        )
    return options
