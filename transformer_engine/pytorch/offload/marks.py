"""Marks on saved tensors: tensors that stay on the device, and the moment from which others may be copied.

Four marks are tensor attributes, which autograd preserves:

* `_TE_do_not_offload`: parameters, and tensors derived from them.
* `start_reload_event`: the moment from which the values are complete.
* `offload_base_tensor`: copy the base of this view once for all views; implied for views with gaps.
* `_TE_cached_weight`: weights that are quantized once for several microbatches. The next step
  writes to their memory if its reference count shows that no backward pass will read it.

Two more make copies overlap with the layer that saved their tensors: the moment at which a matrix is complete, well
before the layer ends (`mark_ready`), and the moment at which a backward pass reads a tensor (`await_values`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...common.checks import described, switch
from ..primitives.grouped_gemm import GroupedOperand
from ..primitives.operand import Operand
from ..tensor.quantized_tensor import QuantizedTensorStorage
from ..tensor.quantizer import TransposedValues

# Copying fewer elements costs more time than their memory is worth.
SMALLEST = 256 * 1024
STAYS, READY, BY_BASE = "_TE_do_not_offload", "start_reload_event", "offload_base_tensor"
CACHED = "_TE_cached_weight"
READY_MOMENT, READ_LATE = "_TE_ready_moment", "_TE_read_late"


class _Active(threading.local):
    """The synchronizer for the context that is open in this thread; None outside all contexts.

    Attributes:
        used: Whether a context was opened in any thread, because autograd runs backward passes in other threads.
        caches: Whether any layer has cached a quantized weight.
    """

    synchronizer: Any = None
    used: ClassVar[bool] = False
    caches: ClassVar[bool] = False


class _DeferredWaits(threading.local):
    """Waits for tensors that the running node has unpacked: {storage: function that waits for the values}."""

    waits: dict[int, Callable[[], None]]
    open: bool = False

    def __init__(self) -> None:
        self.waits = {}


active = _Active()
_deferred = _DeferredWaits()


class ReadyMoment(NamedTuple):
    """The moment at which a tensor was complete, and its version then: a later write invalidates the moment."""

    version: int
    moment: Any


def is_cpu_offload_enabled() -> bool:
    """Return whether a `get_cpu_offload_context` context is open."""
    return active.synchronizer is not None


def mark_not_offload(*tensors: Tensor | QuantizedTensorStorage | None) -> None:
    """Keep tensors on the device, also if a layer saves them inside an offloading context.

    Args:
        tensors: Tensors or storages; None is skipped.
    """
    for part in _parts(tensors):
        setattr(part, STAYS, True)


def mark_cached(parts: Sequence[Tensor | None]) -> None:
    """Mark the tensors of a cached weight, for which `countable` makes aliases."""
    type(active).caches = True
    for part in parts:
        if part is not None:
            setattr(part, CACHED, True)


def countable(tensor: Tensor | None) -> Tensor | None:
    """Return an alias for a cached weight's tensor, for hooks that hold the tensor itself; another tensor unchanged.

    Python's references to a tensor do not increase the reference count of its memory, but every alias does.
    """
    if tensor is None or not getattr(tensor, CACHED, False):
        return tensor
    alias = tensor.detach()
    if getattr(tensor, STAYS, False):
        setattr(alias, STAYS, True)
    return alias


def mark_ready(saved: Any) -> None:
    """Mark the saved input of a layer inside a context as complete; without a context, do nothing."""
    if active.synchronizer is None or torch.compiler.is_compiling():
        return
    link = active.synchronizer.link
    for values in list_tensors(saved):
        if link.takes(values):
            setattr(values, READY_MOMENT, ReadyMoment(values._version, link.mark()))


def ready_moment(tensor: Tensor, link: Any) -> Any:
    """Return the moment from which a tensor, which is being saved, may be copied."""
    ready = getattr(tensor, READY, None)
    if ready is not None:
        return ready
    # Removed from the tensor, which may outlive the moment, for example a graph capture.
    marked = vars(tensor).pop(READY_MOMENT, None)
    return (
        marked.moment if marked is not None and marked.version == tensor._version else link.mark()
    )


def save_deferred(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor to save for a backward that unpacks it early: an alias that no other node can have saved."""
    if (
        tensor is None
        or isinstance(tensor, QuantizedTensorStorage)
        or not moves(tensor)
        or not _is_dense(tensor)
    ):
        return countable(tensor)
    detached = tensor.detach()
    if hasattr(tensor, READY):
        setattr(detached, READY, getattr(tensor, READY))
    vars(detached).update({READY_MOMENT: vars(tensor).pop(READY_MOMENT, None), READ_LATE: True})
    return detached


@contextmanager
def defer_waits() -> Iterator[None]:
    """Unpack `save_deferred` tensors inside without their values; the caller calls `await_values` for each.

    Other tensors have their values: a checkpoint that recomputes one runs its function inside.
    """
    _deferred.waits.clear()
    _deferred.open = True
    try:
        yield
    finally:
        _deferred.open = False


def defer_wait(tensor: Tensor, wait: Callable[[], None]) -> bool:
    """Defer a wait to the `await_values` of a `save_deferred` tensor; return False outside `defer_waits`."""
    if _deferred.open:
        _deferred.waits[tensor.untyped_storage()._cdata] = wait
    return _deferred.open


def await_values(tensor: Tensor | None) -> None:
    """Make the computation wait for the values of a tensor that was unpacked early."""
    if tensor is not None and _deferred.waits:
        # By storage: autograd wraps the result of a hook in a new tensor.
        wait = _deferred.waits.pop(tensor.untyped_storage()._cdata, None)
        if wait is not None:
            wait()


def keep_weight(weight: Any) -> None:
    """Keep the saved weight of a layer on the device: it is a parameter, or its codes are computed in every step."""
    for values in list_tensors(weight):
        setattr(values, STAYS, True)


def list_tensors(saved: Any) -> list[Tensor]:
    """Return the tensors in a saved operand or matrix that may be worth a copy, without a single maximum."""
    if isinstance(saved, Operand):
        per_row = saved.format is not None and saved.format.row_scaled
        parts = (saved.codes, saved.scale, saved.amax if per_row else None)
        return [part for part in parts if part is not None]
    if isinstance(saved, list):
        return [tensor for member in saved for tensor in list_tensors(member)]
    if isinstance(saved, GroupedOperand):
        return [tensor for tensor in saved.tensors() if tensor is not None]
    values = saved.values if isinstance(saved, TransposedValues) else saved
    return [values] if isinstance(values, Tensor) else []


def mark_activation_offload(
    *tensors: Tensor | QuantizedTensorStorage | None, offload: bool = True
) -> None:
    """Accept NVIDIA's call: every saved activation is offloaded, unless `offload` is False.

    Args:
        tensors: Tensors, quantized tensors or None.
        offload: False keeps the tensors on the device.
    """
    switch("offload", offload)
    if not offload:
        mark_not_offload(*tensors)


def start_offload(
    *tensors: Tensor | QuantizedTensorStorage | None, offload_base_tensor: bool = False
) -> None:
    """Allow copying these tensors from now on: later code does not change them.

    Args:
        tensors: Tensors, quantized tensors or None.
        offload_base_tensor: Copy the base of a view, once for all its views.
    """
    switch("offload_base_tensor", offload_base_tensor)
    synchronizer = active.synchronizer
    if synchronizer is None:
        return
    for part in _parts(tensors):
        if synchronizer.link.takes(part):
            setattr(part, READY, synchronizer.link.mark())
            if offload_base_tensor and part._base is not None:
                setattr(part, BY_BASE, True)


def moves(values: Tensor) -> bool:
    """Return whether a tensor on the device is an activation that is worth a copy."""
    return not (
        values.numel() < SMALLEST
        or isinstance(values, torch.nn.Parameter)
        or isinstance(values._base, torch.nn.Parameter)
        or getattr(values, STAYS, False)
        or isinstance(values, torch._subclasses.FakeTensor)
    )


def dense_memory(values: Tensor) -> Tensor | None:
    """Return the dense memory [n] to copy for values: their own, or the view base's.

    A view with gaps keeps its whole base alive, so that the base is copied. None: values with gaps that have no base.
    """
    base = values._base
    if base is not None and (getattr(values, BY_BASE, False) or not _is_dense(values)):
        values = base
    if _is_dense(values):
        return values.detach().as_strided((values.numel(),), (1,), values.storage_offset())
    warnings.warn(
        f"a saved tensor {list(values.shape)} with strides {values.stride()} stays on the GPU: its memory has gaps; "
        "save a contiguous one",
        stacklevel=2,
    )
    return None


def _is_dense(values: Tensor) -> bool:
    """Return whether the values fill their memory without gaps, for any order of dimensions."""
    if values.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(
        (d, n) for d, n in zip(values.stride(), values.shape, strict=True) if n > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def _parts(tensors: tuple[Any, ...]) -> list[Tensor]:
    """Return the plain tensors in tensors and quantized tensors."""
    parts: list[Tensor] = []
    for tensor in tensors:
        if tensor is None:
            continue
        if isinstance(tensor, QuantizedTensorStorage):
            parts += [part for part in tensor.as_storage().flatten()[0] if part is not None]
        if isinstance(tensor, Tensor):
            parts.append(tensor)
        elif not isinstance(tensor, QuantizedTensorStorage):
            raise TypeError(
                f"{described(tensor)} is not a tensor; give tensors or quantized tensors"
            )
    return parts
