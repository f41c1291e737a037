"""Offloading saved tensors: a context for the forward pass of each layer and a function for its output.

context, synchronize = get_cpu_offload_context(enabled=True, num_layers=6, model_layers=8)
for layer in layers:
    with context:
        x = layer(x)
    x = synchronize(x)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from ...common import env
from ...common.checks import suggests_keywords
from ...common.numbers import to_bool, to_int
from ..runtime.device import has_cuda
from ..runtime.warn_once import warn_once
from .hooks import OffloadContext, context_of_groups
from .synchronizer import DefaultOffloadSynchronizer, ManualOffloadSynchronizer


@suggests_keywords
def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Any = None,
) -> tuple[Any, Callable[[Tensor], Tensor]] | tuple[Any, Callable[[Tensor], Tensor], Any]:
    """Return a context for the forward pass of each layer and a function for its output; see the module's example.

    Args:
        enabled: Offload; False returns a context and a function without effect.
        num_layers: Layer count, from the first on, whose saved tensors are offloaded; None means
            all but the last.
        model_layers: Layers per step.
        manual_synchronization: Also return a ManualOffloadSynchronizer, whose methods start all copies.
        retain_pinned_cpu_buffers: Keep the host buffers from step to step, which CUDA graphs need.
        offload_stream: Copy stream with `manual_synchronization`, by default a new one.
        offload_activations: Offload the saved activations.
        offload_weights: Option from earlier releases; weights are never offloaded.
        double_buffering: Option from earlier releases, without effect.

    Without a GPU nothing is offloaded. With NVTE_CPU_OFFLOAD_V1=1 the results follow NVIDIA's
    first version.
    """
    enabled, offload_weights = (
        to_bool("enabled", enabled),
        to_bool("offload_weights", offload_weights),
    )
    offload_activations = to_bool("offload_activations", offload_activations)
    to_bool("double_buffering", double_buffering)
    manual_synchronization = to_bool("manual_synchronization", manual_synchronization)
    retain_pinned_cpu_buffers = to_bool("retain_pinned_cpu_buffers", retain_pinned_cpu_buffers)
    nothing: Any = (nullcontext(), lambda tensor: tensor)
    if manual_synchronization:
        nothing = (*nothing, None)
    if not enabled:
        return nothing
    if not (offload_activations or offload_weights):
        raise ValueError(
            "neither activations nor weights are to be offloaded; set offload_activations=True"
        )
    if offload_weights:
        warnings.warn(
            "offload_weights is deprecated: weights stay on the GPU",
            DeprecationWarning,
            stacklevel=2,
        )
        if not offload_activations:
            return nothing
    model_layers = to_int("model_layers", model_layers, 1)
    offloaded = model_layers - 1 if num_layers is None else to_int("num_layers", num_layers, 0)
    if env.flag("NVTE_CPU_OFFLOAD_V1"):
        if manual_synchronization:
            raise ValueError(
                "NVTE_CPU_OFFLOAD_V1=1 has no manual_synchronization; unset the variable, or leave the keyword out"
            )
        if offloaded > model_layers - 1:  # the first version accepts all layers in a model
            warn_once(
                "NVTE_CPU_OFFLOAD_V1 with all layers offloaded",
                f"num_layers={offloaded}: the backward pass begins with the last layer, which stays on the GPU; "
                f"{model_layers - 1} layers are offloaded",
            )
            offloaded = model_layers - 1
    if not manual_synchronization:
        _check_layers(offloaded, model_layers, offload_stream)
    if not has_cuda():
        warnings.warn("CPU offload: there is no GPU here, so no activation moves", stacklevel=2)
    if env.flag("NVTE_CPU_OFFLOAD_V1"):
        return context_of_groups(offloaded, model_layers)
    if manual_synchronization:
        manual = ManualOffloadSynchronizer(model_layers, retain_pinned_cpu_buffers, offload_stream)
        context = OffloadContext(manual)
        return context, context.synchronize, manual
    synchronizer = DefaultOffloadSynchronizer(
        model_layers, offloaded, retain_pinned_cpu_buffers, offload_stream
    )
    context = OffloadContext(synchronizer)
    return context, context.synchronize


def _check_layers(offloaded: int, model_layers: int, stream: Any) -> None:
    if stream is not None:
        raise ValueError(
            "offload_stream is for manual_synchronization=True; set that, or leave the stream out"
        )
    if offloaded > model_layers - 1:
        raise ValueError(
            f"num_layers={offloaded} > model_layers - 1 = {model_layers - 1}: the backward begins with the last layer, "
            "which stays on the GPU; offload fewer layers"
        )
    if offloaded == model_layers - 1:
        warnings.warn(
            f"num_layers={offloaded} of model_layers={model_layers} leaves no layer during which copies could run; "
            "offload one layer fewer to hide them",
            stacklevel=3,
        )
