"""line = the kernels and products that one pass started, in order, to be started again on other tensors.

A pass goes from a layer down to its launches by many questions, whose answers are the same in every call of its kind.
A `Recording` watches one call from below: what a launch or a product is started on is something that the pass was
given, or something that an earlier one of them made. Nothing else may be in the line, or it would repeat what holds for
one call alone; the recording then says so (`refusal`), and the pass stays as it is.

What watches
    launches and products   say themselves what they start (`program`, `launch`, `product`)
    torch's own functions   a `TorchFunctionMode` sees those that are called from Python: views are harmless, a tensor
                            that one of them computes is of unknown origin, a write ends the recording
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from ...common.kernels.launch import ALIGNMENT, Handle


class Place(NamedTuple):
    """An address: so many bytes behind the beginning of a buffer."""

    buffer: int
    offset: int


class Form(NamedTuple):
    """How a tensor lies in its memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Form:
        return Form(tuple(tensor.shape), tensor.stride(), tensor.dtype)


class Made(NamedTuple):
    """Steps that make buffers: one of a form, one by a function of nothing, or several numbers float32 [1]."""

    buffer: int
    form: Form


class Called(NamedTuple):
    buffer: int
    make: Callable[[], Tensor]


class Numbers(NamedTuple):
    buffers: tuple[int, ...]
    zeroed: tuple[bool, ...]


class Started(NamedTuple):
    """A kernel on addresses; None where it is given nothing."""

    handle: Handle
    places: tuple[Place | None, ...]


class Multiplied(NamedTuple):
    """A product of a library: what starts it, its operands and result, and the rest by the library's numbers."""

    plan: Any
    left: Place
    right: Place
    result: Place
    pointers: tuple[Place | None, ...]


class Result(NamedTuple):
    """What a pass answers: a buffer, as it was made or in another form."""

    place: Place
    form: Form


Step = Made | Called | Numbers | Started | Multiplied


class _Buffer(NamedTuple):
    begin: int
    end: int
    form: Form
    memory: StorageWeakRef

    def holds(self, address: int) -> bool:
        return self.begin <= address < self.end and not self.memory.expired()


class _Active:
    """The recording that runs, in whichever thread."""

    recording: Recording | None = None


active = _Active()
_one_at_a_time = threading.Lock()


class Recording(TorchFunctionMode):
    """What happens in a block, in this thread, to what the pass is given.

    steps    what is started and made, in order
    refusal  why this is no line; None: it is one
    passing  is that so in this call alone?
    """

    def __init__(self, given: Sequence[Tensor | None], device: torch.device):
        super().__init__()
        self.device = device
        self.steps: list[Step] = []
        self.refusal: str | None = None
        self.passing = False
        self.fresh: tuple[Tensor, ...] = ()
        self.buffers: list[_Buffer | None] = []
        self._thread = threading.get_ident()
        for tensor in given:
            self._give(tensor)
        self.given = len(self.buffers)

    def __enter__(self) -> Recording:
        _one_at_a_time.acquire()
        super().__enter__()
        active.recording = self
        return self

    def __exit__(self, *raised: Any) -> None:
        active.recording = None
        super().__exit__(*raised)
        _one_at_a_time.release()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        schema = getattr(func, "_schema", None)
        writes = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
        if writes or "out" in (kwargs or {}) or (schema is not None and schema.is_mutable):
            self.refuse(f"torch's {name} writes to a tensor")
        return func(*args, **(kwargs or {}))

    def refuse(self, reason: str, passing: bool = False) -> None:
        if self.refusal is None and threading.get_ident() == self._thread:
            self.refusal, self.passing = reason, passing

    # What launches and products say.

    def program(
        self,
        makers: Sequence[Callable[[], Tensor]],
        zeroed: Sequence[bool],
        made: Sequence[Tensor],
        started: Sequence[tuple[Any, tuple[Tensor | None, ...]]],
    ) -> None:
        """Makers made the first of `made`, the rest are numbers; each of `started` is a handle and its tensors."""
        if self._is_not_mine():
            return
        for make, tensor in zip(makers, made, strict=False):
            self._make(make, tensor)
        if zeroed:
            first = len(self.buffers)
            for tensor in made[len(makers) :]:
                self._add(tensor)
            self.steps.append(Numbers(tuple(range(first, len(self.buffers))), tuple(zeroed)))
        for handle, tensors in started:
            self._start(handle, tensors)

    def launch(
        self, makers: Sequence[Any], handle: Any, inputs: Sequence[Tensor | None], made: Sequence[Any]
    ) -> None:
        """One launch; None among its makers where it makes nothing."""
        if self._is_not_mine():
            return
        for make, tensor in zip(makers, made, strict=True):
            if make is not None:
                self._make(make, tensor)
        self._start(handle, (*inputs, *made))

    def product(
        self, plan: Any, left: Tensor, right: Tensor, result: Tensor, pointers: Sequence[Tensor | None]
    ) -> None:
        """A product into a result that was made for it (`fresh`), as what else it writes may be."""
        if self._is_not_mine():
            return
        if not any(result is tensor for tensor in self.fresh):
            self.refuse("a product is none that a layer repeats")
            return
        for tensor in self.fresh:
            self.steps.append(Made(len(self.buffers), Form.of(tensor)))
            self._add(tensor)
        self.fresh = ()
        if not all(self._begins_aligned(tensor) for tensor in (left, right, *pointers) if tensor is not None):
            self.refuse("a product reads what is not aligned", passing=True)
        of_left, of_right, of_result = (self._place(tensor) for tensor in (left, right, result))
        if of_left is not None and of_right is not None and of_result is not None:  # else it was refused
            others = tuple([self._place(tensor) for tensor in pointers])
            self.steps.append(Multiplied(plan, of_left, of_right, of_result, others))

    def _is_not_mine(self) -> bool:
        return threading.get_ident() != self._thread or self.refusal is not None

    def _make(self, make: Callable[[], Tensor], tensor: Tensor) -> None:
        number = len(self.buffers)
        whole = isinstance(make, partial) and make.func is torch.empty_strided
        self.steps.append(Made(number, Form.of(tensor)) if whole else Called(number, make))
        self._add(tensor)

    def _start(self, handle: Any, tensors: Sequence[Tensor | None]) -> None:
        if not isinstance(handle, Handle):
            self.refuse("Triton's calling convention is not known")
            return
        self.steps.append(Started(handle, tuple([self._place(tensor) for tensor in tensors])))

    def _begins_aligned(self, tensor: Tensor) -> bool:
        place = self._place(tensor)
        return place is None or place.buffer >= self.given or self.is_aligned(place.buffer)

    # Whose memory an address is in.

    def _give(self, tensor: Tensor | None) -> None:
        if tensor is None:
            self.buffers.append(None)
            return
        self._add(tensor)
        *others, mine = [buffer for buffer in self.buffers if buffer is not None]
        if tensor.device != self.device or mine.begin == mine.end:
            self.refuse("what it is given is empty, or on another device")
        elif any(mine.begin < other.end and other.begin < mine.end for other in others):
            self.refuse("two of the tensors that it is given share memory", passing=True)

    def _add(self, tensor: Tensor) -> None:
        begin, memory = tensor.data_ptr(), StorageWeakRef(tensor.untyped_storage())
        self.buffers.append(_Buffer(begin, begin + _bytes(tensor), Form.of(tensor), memory))

    def _buffer_at(self, address: int) -> int | None:
        for number, buffer in enumerate(self.buffers):
            if buffer is not None and buffer.holds(address):
                return number
        return None

    def _place(self, tensor: Tensor | None) -> Place | None:
        if tensor is None:
            return None
        address = tensor.data_ptr()
        number = self._buffer_at(address)
        if number is None:
            self.refuse("it reads a tensor that it was not given, and that no kernel of it made")
            return None
        place = Place(number, address - self.buffers[number].begin)  # pyright: ignore[reportOptionalMemberAccess]
        if place.offset % ALIGNMENT:
            self.refuse("it reads from within a buffer, not aligned")
        return place

    def is_aligned(self, number: int) -> bool:
        """Was a buffer that is given where kernels may count on it? Another one is read as it lies."""
        buffer = self.buffers[number]
        return buffer is not None and buffer.begin % ALIGNMENT == 0

    def results(self, tensors: Sequence[Tensor | None]) -> list[Result | None]:
        """Of what the pass has answered, what it is."""
        found: list[Result | None] = []
        for tensor in tensors:
            if tensor is not None and type(tensor) not in (Tensor, torch.nn.Parameter):
                self.refuse("it answers something that is no plain tensor")
            place = self._place(tensor)
            found.append(None if place is None or tensor is None else Result(place, Form.of(tensor)))
        return found


_WRITES = frozenset({"__setitem__", "__set__", "__iadd__", "__imul__", "__isub__", "__itruediv__"})


def _bytes(tensor: Tensor) -> int:
    """From the first byte of a tensor to behind its last."""
    if not tensor.numel():
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()
