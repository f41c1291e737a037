"""Which saved tensors stay where they are, and from which moment the others may be copied.

Three marks are attributes of a tensor, which a saved tensor keeps on its way through autograd:

    _TE_do_not_offload    parameters, and what was made of them
    start_reload_event    the moment from which its values are whole
    offload_base_tensor   copy all that this is a view of, once for all its views; views with gaps do without

Two more make copies overlap with the layer that saved their tensors: the moment at which a matrix was whole, well
before the layer ends (`whole_now`), and the moment at which a backward reads what it asked for (`arrived`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...common.checks import described, switch
from ..primitives.grouped_gemm import GroupedOperand
from ..primitives.operand import Operand
from ..tensor.quantized_tensor import QuantizedTensorStorage
from ..tensor.quantizer import Matrix

# Fewer elements take longer to schedule than their memory is worth.
SMALLEST = 256 * 1024
STAYS, READY, BY_BASE = "_TE_do_not_offload", "start_reload_event", "offload_base_tensor"
WHOLE, READ_LATE = "_TE_whole", "_TE_read_late"


class _Active(threading.local):
    """The synchronizer of the context that is open in this thread, None outside of all contexts.

    used   a context has been opened in any thread: autograd runs backward passes in other threads
    """

    synchronizer: Any = None
    used: ClassVar[bool] = False


class _Expected(threading.local):
    """What the node that this thread runs has asked for: {storage: what lets the computation wait for its values}"""

    arrivals: dict[int, Callable[[], None]]
    open: bool = False

    def __init__(self) -> None:
        self.arrivals = {}


active = _Active()
_expected = _Expected()


class Whole(NamedTuple):
    """A moment, and the version of the tensor that was whole then: one that is written later is whole later."""

    version: int
    moment: Any


def is_cpu_offload_enabled() -> bool:
    """Is a context of `get_cpu_offload_context` open round the caller?"""
    return active.synchronizer is not None


def mark_not_offload(*tensors: Tensor | QuantizedTensorStorage | None) -> None:
    """Keep these tensors on the device, also where a layer saves them inside of an offloading context."""
    for part in _parts(tensors):
        setattr(part, STAYS, True)


def whole_now(saved: Any) -> None:
    """What a layer inside of a context saves of its input has its values from here on; nothing outside of one."""
    if active.synchronizer is None or torch.compiler.is_compiling():
        return
    link = active.synchronizer.link
    for values in tensors_of(saved):
        if link.takes(values):
            setattr(values, WHOLE, Whole(values._version, link.mark()))


def moment_of(tensor: Tensor, link: Any) -> Any:
    """From when on a tensor, which is being saved, may be copied."""
    ready = getattr(tensor, READY, None)
    if ready is not None:
        return ready
    # Taken off: a tensor may outlive what the moment belongs to, such as the capture of a graph.
    whole = vars(tensor).pop(WHOLE, None)
    return whole.moment if whole is not None and whole.version == tensor._version else link.mark()


def read_late(tensor: Tensor | None) -> Tensor | None:
    """The tensor for a node to save whose backward asks for it early: under a name that nothing else can have saved."""
    if (
        tensor is None
        or isinstance(tensor, QuantizedTensorStorage)
        or not moves(tensor)
        or not _is_dense(tensor)
    ):
        return tensor
    own = tensor.detach()
    if hasattr(tensor, READY):
        setattr(own, READY, getattr(tensor, READY))
    vars(own).update({WHOLE: vars(tensor).pop(WHOLE, None), READ_LATE: True})
    return own


@contextmanager
def asking_early() -> Iterator[None]:
    """Tensors saved by `read_late` and asked for inside may come without values: the caller calls `arrived` for each.

    Others have them: a checkpoint that has to make one of them again runs its function in here.
    """
    _expected.arrivals.clear()
    _expected.open = True
    try:
        yield
    finally:
        _expected.open = False


def comes_later(tensor: Tensor, arrive: Callable[[], None]) -> bool:
    """Will whoever asks for a tensor that was saved by `read_late` call `arrived`, which calls arrive?"""
    if _expected.open:
        _expected.arrivals[tensor.untyped_storage()._cdata] = arrive
    return _expected.open


def arrived(tensor: Tensor | None) -> None:
    """Let the computation go on only when a tensor that was asked for early has its values."""
    if tensor is not None and _expected.arrivals:
        # By storage: autograd makes a tensor of its own of the one that a hook gives it.
        arrive = _expected.arrivals.pop(tensor.untyped_storage()._cdata, None)
        if arrive is not None:
            arrive()


def keep_weight(weight: Any) -> None:
    """What a layer saves of its weight stays on the device: it is there anyway, or made anew in every step."""
    for values in tensors_of(weight):
        setattr(values, STAYS, True)


def tensors_of(saved: Any) -> list[Tensor]:
    """The tensors of a saved operand or matrix that may be worth moving: maxima per row may be, a single one is not."""
    if isinstance(saved, Operand):
        per_row = saved.format is not None and saved.format.row_scaled
        parts = (saved.codes, saved.scale, saved.amax if per_row else None)
        return [part for part in parts if part is not None]
    if isinstance(saved, list):
        return [tensor for member in saved for tensor in tensors_of(member)]
    if isinstance(saved, GroupedOperand):
        return [tensor for tensor in saved.tensors() if tensor is not None]
    values = saved.values if isinstance(saved, Matrix) else saved
    return [values] if isinstance(values, Tensor) else []


def mark_activation_offload(*tensors: Tensor | QuantizedTensorStorage | None, offload: bool = True) -> None:
    """Accepted for its callers: every saved activation is offloaded; offload=False marks what is none."""
    switch("offload", offload)
    if not offload:
        mark_not_offload(*tensors)


def start_offload(
    *tensors: Tensor | QuantizedTensorStorage | None, offload_base_tensor: bool = False
) -> None:
    """From here on these tensors may be copied: whoever is called later does not change them.

    offload_base_tensor   of a view, copy all that it is a view of, once for all its views
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
    """Is a tensor, on a device that copies begin at, worth moving, and an activation?"""
    return not (
        values.numel() < SMALLEST
        or isinstance(values, torch.nn.Parameter)
        or isinstance(values._base, torch.nn.Parameter)
        or getattr(values, STAYS, False)
        or isinstance(values, torch._subclasses.FakeTensor)
    )


def whole_of(values: Tensor) -> Tensor | None:
    """The stretch of memory [n] that is copied for values: theirs, or that of what they are a view of.

    A view with gaps keeps all of its base alive, so that base is what has to go. None: values with gaps of their own.
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
    """Do the values fill one stretch of memory, in whatever order of their dimensions?"""
    if values.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((d, n) for d, n in zip(values.stride(), values.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _parts(tensors: tuple[Any, ...]) -> list[Tensor]:
    """The plain tensors of tensors and quantized ones."""
    parts: list[Tensor] = []
    for given in tensors:
        if given is None:
            continue
        if isinstance(given, QuantizedTensorStorage):
            parts += [part for part in given.as_storage().flatten()[0] if part is not None]
        if isinstance(given, Tensor):
            parts.append(given)
        elif not isinstance(given, QuantizedTensorStorage):
            raise TypeError(f"{described(given)} is no tensor; give tensors or quantized tensors")
    return parts
