"""CUDA graphs of modules: forward and backward are captured once, and each later call is one launch.

    layers = te.make_graphed_callables(tuple(layers), sample_args, enabled=True, recipe=recipe)

`te.graphed(module)` captures by itself, without sample arguments.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ..common.checks import described
from ..common.recipe import DelayedScaling, Recipe
from .constants import dist_group_type
from .graphs import arguments, build
from .graphs import recorder as recorders
from .graphs.arguments import Asked, Options, Renamed
from .graphs.automatic import graphed
from .graphs.door import Door, Eagerly, hung
from .graphs.replayed import Replayed
from .module.base import TransformerEngineBaseModule
from .runtime.capture import (
    CudaRecorder,
    is_graph_capturing,
    set_capture_end,
    set_capture_start,
    unowned,
)

__all__ = [
    "graph_pool_handle",
    "graphed",
    "is_graph_capturing",
    "make_graphed_callables",
    "make_weak_ref",
    "restore_fp8_tensors",
    "save_fp8_tensors",
    "set_capture_end",
    "set_capture_start",
]


def make_weak_ref(x: Any) -> Any:
    """Return tensors that share the memory of the given ones without keeping it alive.

    Args:
        x: A tensor, or a tuple, list or dict of tensors, numbers and None, nested to any depth.

    Returns:
        The same structure. CUDA tensors are replaced by non-owning views; CPU tensors, numbers and None are unchanged.

    Raises:
        TypeError: x holds an object of another type.
    """
    if isinstance(x, torch.Tensor):
        return unowned(x) if x.is_cuda else x
    if isinstance(x, tuple | list):
        return type(x)(make_weak_ref(item) for item in x)
    if isinstance(x, dict):
        return {key: make_weak_ref(item) for key, item in x.items()}
    if x is None or isinstance(x, int | float | bool):
        return x
    raise TypeError(
        f"make_weak_ref takes tensors, numbers, None and containers of them, not {type(x).__name__}"
    )


def graph_pool_handle() -> Any:
    """A pool of memory for graphs to share, as `pool` of make_graphed_callables takes it."""
    return torch.cuda.graph_pool_handle()


def make_graphed_callables(
    modules: Any, sample_args: Any, num_warmup_iters: int = 3, allow_unused_input: bool = False,
    sample_kwargs: Any = None, fp8_enabled: bool | tuple[bool, ...] | None = None,
    fp8_calibrating: bool | None = None, fp8_recipe: Recipe | None = None,
    fp8_group: dist_group_type | None = None, fp8_weight_caching: bool | None = None,
    enabled: bool | tuple[bool, ...] | None = None, calibrating: bool | None = None,
    recipe: Recipe | None = None, amax_reduction_group: dist_group_type | None = None,
    cache_quantized_params: bool | None = None, _order: Any = None, _num_layers_per_chunk: Any = None,
    pool: Any = None, retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False, clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Any = None, post_warmup_hook: Any = None, capture_time_hooks: Any = None,
) -> Any:  # fmt: skip
    """The module, or the tuple of them, whose calls replay CUDA graphs, with the bits of calls without.

    sample_args, sample_kwargs   tensors of the shapes that calls will have, for each module of a tuple. The graphs read
                                 these very tensors. Among keywords None, a number, text, a dtype or a device may stand:
                                 the graphs keep it, and a call with another raises ValueError. A call passes every
                                 captured keyword. Others raise TypeError if the callable takes them and the value is
                                 not the default, since a replay would ignore them
    num_warmup_iters             runs before the capture, at least one. Nothing that they record or draw counts
    allow_unused_input           may an input want a gradient that there is none of?
    enabled, calibrating, recipe, amax_reduction_group   the autocast to capture under; enabled for each module where it
                                 is a tuple. Calls are made in an autocast of their own, whose end updates scales
    cache_quantized_params       quantize weights in the first microbatch of a step only: every call passes
                                 is_first_microbatch
    pool                         memory to share with other graphs
    retain_graph_in_backward     capture the backward with retain_graph=True
    clone_param_grads_on_return  parameters get gradients of their own; False: those that the next replay overwrites
    pre_warmup_hook, post_warmup_hook   called once, round the warm-up
    capture_time_hooks           for each callable {"forward_pre_hooks", ..: {id: hook(module)}}, called while warming
                                 up and capturing, never at a replay
    _order, _num_layers_per_chunk   a pipeline's schedule, see `graphs/order.py`: a function for each chunk, microbatch
                                 and layer is returned
    _reuse_graph_input_output_buffers   callables of an _order share buffers where the schedule lets them

    Modules keep their parameters and names; each gets `reset()` and `backward_dw()`. What a replay returns is
    overwritten by the next one. Without a GPU the callables come back wrapped and run eagerly.
    """
    options = {
        "enabled": Renamed("enabled", enabled, "fp8_enabled", fp8_enabled),
        "calibrating": Renamed("calibrating", calibrating, "fp8_calibrating", fp8_calibrating),
        "recipe": Renamed("recipe", recipe, "fp8_recipe", fp8_recipe),
        "group": Renamed("amax_reduction_group", amax_reduction_group, "fp8_group", fp8_group),
        "caches": Renamed("cache_quantized_params", cache_quantized_params, "fp8_weight_caching", fp8_weight_caching),
    }  # fmt: skip
    chosen = {name: option.chosen() for name, option in options.items()}
    asked = _asked(
        modules,
        sample_args,
        sample_kwargs,
        chosen,
        Options(
            num_warmup_iters,
            pool,
            allow_unused_input,
            pre_warmup_hook,
            retain_graph_in_backward,
            post_warmup_hook,
            _reuse_graph_input_output_buffers,
            clone_param_grads_on_return,
            False if chosen["caches"] is None else chosen["caches"],
        ),
        (_order, _num_layers_per_chunk),
        capture_time_hooks,
    )
    recorder = recorders.recorder_here(pool)
    if isinstance(recorder, CudaRecorder):
        arguments.check_places(asked)
    blocks = build.blocks_of(asked)
    if recorder is None:
        warnings.warn(
            "CUDA graphs need a GPU, and there is none here: the callables run eagerly", stacklevel=2
        )
        runs: list[Any] = [Eagerly(block) for block in blocks]
    else:
        graphs = [Replayed(block, asked.options.clones_gradients) for block in blocks]
        runs = build.recorded(graphs, build.Plan.of(asked), recorder)
    doors = [Door(run, sample) for run, sample in zip(runs, asked.samples, strict=True)]
    if asked.chunks is not None:
        return tuple(doors)
    made = tuple(hung(door) for door in doors)
    return made[0] if asked.single else made


def _asked(
    modules: Any,
    sample_args: Any,
    sample_kwargs: Any,
    chosen: dict[str, Any],
    options: Options,
    schedule: tuple[Any, Any],
    hooks: Any,
) -> Asked:
    """The call, checked."""
    callables, single = arguments.callables_of(modules)
    training = all(c.training for c in callables if isinstance(c, torch.nn.Module))
    options = arguments.check_options(options, schedule[0], training)
    steps, chunks, which = arguments.schedule_of(*schedule, len(callables))
    samples = arguments.samples_of(
        sample_args, sample_kwargs, single and chunks is None, len(which), sample_kwargs is not None
    )
    quantizations = arguments.quantizations_of(
        chosen["enabled"], chosen["calibrating"], chosen["recipe"], chosen["group"], len(callables)
    )
    watching = arguments.hooks_of(hooks, len(callables))
    return Asked(callables, which, samples, steps, chunks, quantizations, options, watching, single)


def save_fp8_tensors(modules: Any, recipe: Recipe | None) -> list[Any] | None:
    """Copies of all scales and histories of delayed scaling, in the order of the modules; None under another recipe."""
    if not isinstance(recipe, DelayedScaling):
        return None
    saved: list[Any] = []
    for layer in _quantized_layers(modules):
        if layer.primary_weights_in_fp8:
            layer.adjust_amax_history_length(recipe.amax_history_len)
        saved.append(layer.get_fp8_meta_tensors())
    return saved


def restore_fp8_tensors(modules: Any, fp8_tensors: list[Any] | None) -> None:
    """Put back what `save_fp8_tensors` copied; states that were made since begin anew."""
    if fp8_tensors is None:
        return
    layers = _quantized_layers(modules)
    if len(layers) != len(fp8_tensors):
        raise RuntimeError(
            f"states of {len(fp8_tensors)} layers were saved, {len(layers)} are to be restored; give the same modules"
        )
    for layer, saved in zip(layers, fp8_tensors, strict=True):
        layer.reset_fp8_meta_tensors(saved if any(saved.values()) else None)
    fp8_tensors.clear()


def _quantized_layers(modules: Any) -> list[TransformerEngineBaseModule]:
    given = modules if isinstance(modules, (tuple, list)) else (modules,)
    for module in given:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"{described(module)} is no module; give modules")
    return [m for module in given for m in module.modules() if isinstance(m, TransformerEngineBaseModule)]
