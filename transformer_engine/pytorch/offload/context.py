"""Offloading as a caller meets it: a context round each layer's forward, and a function for each layer's output.

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
from ...common.checks import switch, whole, whole_or_none
from ..runtime.device import has_cuda
from .hooks import OffloadContext
from .legacy import context_of_groups
from .synchronizer import DefaultOffloadSynchronizer, ManualOffloadSynchronizer


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def get_cpu_offload_context(
    enabled: bool = False, num_layers: int | None = 1, model_layers: int = 1,
    offload_activations: bool = True, offload_weights: bool = False, double_buffering: bool = False,
    manual_synchronization: bool = False, retain_pinned_cpu_buffers: bool = False, offload_stream: Any = None,
) -> tuple[Any, Callable[[Tensor], Tensor]] | tuple[Any, Callable[[Tensor], Tensor], Any]:  # fmt: skip
    """(context, synchronize), and with manual_synchronization a ManualOffloadSynchronizer: see the top of this file.

    num_layers                 how many layers, from the first on, wait on the host
    model_layers               how many layers a step calls
    manual_synchronization     nothing moves but by the calls of the third result
    retain_pinned_cpu_buffers  keep the host's buffers from step to step, as a CUDA graph needs them
    offload_stream             the stream to copy on, with manual_synchronization; default a new one
    offload_activations, offload_weights, double_buffering   of earlier releases; weights are never offloaded

    Without a GPU there is nothing to move, and layers are called as ever. Under NVTE_CPU_OFFLOAD_V1=1 the results are
    those of the original's first form.
    """
    for name, value in (
        ("enabled", enabled),
        ("offload_activations", offload_activations),
        ("offload_weights", offload_weights),
        ("double_buffering", double_buffering),
        ("manual_synchronization", manual_synchronization),
        ("retain_pinned_cpu_buffers", retain_pinned_cpu_buffers),
    ):
        switch(name, value)
    nothing = (nullcontext(), _unchanged, None) if manual_synchronization else (nullcontext(), _unchanged)
    if not enabled:
        return nothing
    if not (offload_activations or offload_weights):
        raise ValueError("neither activations nor weights are to be offloaded; set offload_activations=True")
    if offload_weights:
        warnings.warn(
            "offload_weights is deprecated: weights stay on the GPU", DeprecationWarning, stacklevel=2
        )
        if not offload_activations:
            return nothing
    _check_layers(num_layers, model_layers, manual_synchronization, offload_stream)
    if not has_cuda():
        warnings.warn("CPU offload: there is no GPU here, so no activation moves", stacklevel=2)
    if env.flag("NVTE_CPU_OFFLOAD_V1"):
        if manual_synchronization:
            raise ValueError(
                "NVTE_CPU_OFFLOAD_V1=1 has no manual_synchronization; unset the variable, or leave the keyword out"
            )
        assert num_layers is not None
        return context_of_groups(num_layers, model_layers)
    if manual_synchronization:
        manual = ManualOffloadSynchronizer(model_layers, retain_pinned_cpu_buffers, offload_stream)
        context = OffloadContext(manual)
        return context, context.synchronize, manual
    context = OffloadContext(
        DefaultOffloadSynchronizer(model_layers, num_layers, retain_pinned_cpu_buffers, offload_stream)
    )
    return context, context.synchronize


def _check_layers(num_layers: int | None, model_layers: int, manual: bool, stream: Any) -> None:
    whole("model_layers", model_layers)
    if manual:
        return
    whole_or_none("num_layers", num_layers, 0)
    if stream is not None:
        raise ValueError(
            "offload_stream is for manual_synchronization=True; set that, or leave the stream out"
        )
    offloaded = model_layers - 1 if num_layers is None else num_layers
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
