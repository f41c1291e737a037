"""CUDA graphs for modules: forward and backward are captured once, and each later call is one launch.

    layers = te.make_graphed_callables(tuple(layers), sample_args, enabled=True, recipe=recipe)

`te.graphed(module)` captures by itself, without sample arguments.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ..common.checks import described, suggests_keywords
from ..common.recipe import DelayedScaling, Recipe
from .constants import dist_group_type
from .graphs import arguments, build
from .graphs.arguments import CaptureRequest, GraphOptions, RenamedOption
from .graphs.graphed_callable import EagerBlock, GraphedCallable
from .graphs.recorded_block import RecordedBlock
from .graphs.step import graphed
from .module.base import TransformerEngineBaseModule
from .runtime.capture import (
    CudaRecorder,
    alias_unowned,
    is_graph_capturing,
    set_capture_end,
    set_capture_start,
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
        return alias_unowned(x) if x.is_cuda else x
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
    """Return a memory pool that graphs can share, for `pool` of make_graphed_callables.

    Without a GPU, where callables run eagerly, the pool is None.
    """
    return torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None


@suggests_keywords
def make_graphed_callables(
    modules: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    fp8_enabled: bool | tuple[bool, ...] | None = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: Recipe | None = None,
    fp8_group: dist_group_type | None = None,
    fp8_weight_caching: bool | None = None,
    enabled: bool | tuple[bool, ...] | None = None,
    calibrating: bool | None = None,
    recipe: Recipe | None = None,
    amax_reduction_group: dist_group_type | None = None,
    cache_quantized_params: bool | None = None,
    _order: Any = None,
    _num_layers_per_chunk: Any = None,
    pool: Any = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Any = None,
    post_warmup_hook: Any = None,
    capture_time_hooks: Any = None,
) -> Any:
    """Return the module or module tuple, whose calls now replay CUDA graphs, bit-equal to eager calls.

    Modules keep their parameters and names; each gets `reset()` and `backward_dw()`. The next replay
    overwrites the results of a replay. Without a GPU the callables are wrapped and run eagerly.

    Args:
        modules: A module, or a module tuple.
        sample_args: Tensors with the shapes of later calls, one tuple per module in a tuple. The
            graphs read these tensors.
        num_warmup_iters: Runs before the capture, at least one. They change no state.
        allow_unused_input: Allow inputs that require a gradient and get none.
        sample_kwargs: Keyword arguments of the calls. None, numbers, strings, dtypes and devices are kept by
            the graph; a call with another value raises ValueError. A call passes every captured keyword.
        fp8_enabled: Earlier name for enabled.
        fp8_calibrating: Earlier name for calibrating.
        fp8_recipe: Earlier name for recipe.
        fp8_group: Earlier name for amax_reduction_group.
        fp8_weight_caching: Earlier name for cache_quantized_params.
        enabled: Quantize, as in `autocast`; a tuple has one value per module.
        calibrating: As in `autocast`.
        recipe: As in `autocast`. Calls are made in a separate autocast block.
        amax_reduction_group: As in `autocast`.
        cache_quantized_params: Quantize weights in the first microbatch of a step only. Every call
            passes is_first_microbatch.
        pool: Memory to share with other graphs.
        retain_graph_in_backward: Capture the backward pass with retain_graph=True.
        clone_param_grads_on_return: Copy parameter gradients; otherwise the next replay overwrites them.
        pre_warmup_hook: Called once before the warm-up.
        post_warmup_hook: Called once after the warm-up.
        capture_time_hooks: For each callable {"forward_pre_hooks", ..: {id: hook(module)}}, called while warming up
            and capturing, never in a replay.

    `_order` and `_num_layers_per_chunk` are a pipeline schedule; a function for each chunk, microbatch and layer is
    returned. With `_reuse_graph_input_output_buffers` they share buffers where the schedule allows it.
    """
    options = {
        "enabled": RenamedOption("enabled", enabled, "fp8_enabled", fp8_enabled),
        "calibrating": RenamedOption(
            "calibrating", calibrating, "fp8_calibrating", fp8_calibrating
        ),
        "recipe": RenamedOption("recipe", recipe, "fp8_recipe", fp8_recipe),
        "group": RenamedOption(
            "amax_reduction_group", amax_reduction_group, "fp8_group", fp8_group
        ),
        "caches": RenamedOption(
            "cache_quantized_params",
            cache_quantized_params,
            "fp8_weight_caching",
            fp8_weight_caching,
        ),
    }
    chosen = {name: option.chosen() for name, option in options.items()}
    request = _check_request(
        modules,
        sample_args,
        sample_kwargs,
        chosen,
        GraphOptions(
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
    recorder = build.graph_recorder(pool)
    if isinstance(recorder, CudaRecorder):
        arguments.check_places(request)
    blocks = build.build_blocks(request)
    if recorder is None:
        warnings.warn(
            "CUDA graphs need a GPU, and there is none here: the callables run eagerly",
            stacklevel=2,
        )
        runs: list[Any] = [EagerBlock(block) for block in blocks]
    else:
        graphs = [RecordedBlock(block, request.options.clones_gradients) for block in blocks]
        runs = build.recorded(graphs, build.CapturePlan.of(request), recorder)
    graphed_callables = [
        GraphedCallable(run, sample) for run, sample in zip(runs, request.samples, strict=True)
    ]
    if request.chunks is not None:
        return tuple(graphed_callables)
    results: list[Any] = []
    for replacement in graphed_callables:
        module = replacement.module
        if module is not None:
            vars(module).update(
                forward=replacement, backward_dw=replacement.backward_dw, reset=replacement.reset
            )
        results.append(replacement if module is None else module)
    return results[0] if request.single else tuple(results)


def _check_request(
    modules: Any,
    sample_args: Any,
    sample_kwargs: Any,
    chosen: dict[str, Any],
    options: GraphOptions,
    schedule: tuple[Any, Any],
    hooks: Any,
) -> CaptureRequest:
    """Validate the arguments of make_graphed_callables."""
    callables, single = arguments.list_callables(modules)
    training = all(c.training for c in callables if isinstance(c, torch.nn.Module))
    options = arguments.check_options(options, schedule[0], training)
    steps, chunks, which = arguments.build_schedule(*schedule, len(callables))
    samples = arguments.list_samples(
        sample_args, sample_kwargs, single and chunks is None, len(which), sample_kwargs is not None
    )
    quantizations = arguments.list_quantizations(
        chosen["enabled"], chosen["calibrating"], chosen["recipe"], chosen["group"], len(callables)
    )
    watching = arguments.list_hooks(hooks, len(callables))
    return CaptureRequest(
        callables, which, samples, steps, chunks, quantizations, options, watching, single
    )


def save_fp8_tensors(modules: Any, recipe: Recipe | None) -> list[Any] | None:
    """Copy all delayed-scaling scales and amax histories, in module order; returns None for other recipes.

    Args:
        modules: A module, or a module list.
        recipe: The recipe of the modules; only delayed scaling has states.
    """
    if not isinstance(recipe, DelayedScaling):
        return None
    saved: list[Any] = []
    for layer in _quantized_layers(modules):
        if layer.primary_weights_in_fp8:
            layer.adjust_amax_history_length(recipe.amax_history_len)
        saved.append(layer.get_fp8_meta_tensors())
    return saved


def restore_fp8_tensors(modules: Any, fp8_tensors: list[Any] | None) -> None:
    """Restore the states that `save_fp8_tensors` copied; states created since then are reset.

    Args:
        modules: The modules that were given to `save_fp8_tensors`.
        fp8_tensors: Its result; None changes nothing.
    """
    if fp8_tensors is None:
        return
    layers = _quantized_layers(modules)
    if len(layers) != len(fp8_tensors):
        raise RuntimeError(
            f"the saved states are of {len(fp8_tensors)} layers, the modules have {len(layers)}; give the same modules"
        )
    for layer, saved in zip(layers, fp8_tensors, strict=True):
        layer.reset_fp8_meta_tensors(saved if any(saved.values()) else None)
    fp8_tensors.clear()


def _quantized_layers(modules: Any) -> list[TransformerEngineBaseModule]:
    several = modules if isinstance(modules, (tuple, list)) else (modules,)
    for module in several:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"{described(module)} is not a module; give modules")
    return [
        m
        for module in several
        for m in module.modules()
        if isinstance(m, TransformerEngineBaseModule)
    ]
