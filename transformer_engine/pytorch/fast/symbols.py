"""Symbolic tensors: running a pass on them records its launches and products without starting any.

Operations append the work that they would start (a `Program`, a `Launch`, a cuBLASLt product, a collective call) to
the `Instructions` of their symbols, and return symbols for the results. Views of a symbol are symbols for the same
buffer. Any other use of a symbol, such as a computation by torch, raises `NotRecordable` with the reason; such a
pass runs step by step. Nothing is computed, and no tensor is written. `compiled.py` states the gain.

`generated_pass.py` compiles the instructions into one function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.kernels.launch import ALIGNMENT, Launch
from ...common.numbers import with_article


class NotRecordable(Exception):
    """An operation does more than start launches and products on the tensors in its pass."""


class NotAligned(NotRecordable):
    """The tensors in this call are not aligned, but tensors in later calls may be."""


class TensorLayout(NamedTuple):
    """Tensor shape, strides and dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> TensorLayout:
        return TensorLayout(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @staticmethod
    def contiguous(shape: Sequence[int], dtype: torch.dtype) -> TensorLayout:
        return TensorLayout.of(torch.empty(tuple(shape), dtype=dtype, device="meta"))


class Allocate(NamedTuple):
    """Allocate a buffer with this layout, uninitialized or by a function without arguments."""

    buffer: int
    layout: TensorLayout
    make: Callable[[], Tensor] | None = None


class AllocateScalars(NamedTuple):
    """Allocate buffers float32 [1] each, where some must be zero."""

    buffers: tuple[int, ...]
    zeroed: tuple[bool, ...]


class Start(NamedTuple):
    """Start a kernel on buffers; None for an absent argument."""

    launch: Launch
    buffers: tuple[int | None, ...]


class Multiply(NamedTuple):
    """Start a cuBLASLt product: operands, result, and buffers for its other pointers."""

    plan: Any
    left: int
    right: int
    result: int
    pointers: tuple[int | None, ...]


class Apply(NamedTuple):
    """Call a function on tensors and objects, such as a half of a collective.

    Attributes:
        function: The function; it returns a tuple.
        arguments: Buffer and layout per argument; objects have layout None. None for an absent argument.
        results: Result buffers.
        is_tensor: Whether each result is a tensor; the others are objects, which only other functions take.
    """

    function: Callable[..., tuple[Any, ...]]
    arguments: tuple[tuple[int, TensorLayout | None] | None, ...]
    results: tuple[int, ...]
    is_tensor: tuple[bool, ...]


Instruction = Allocate | AllocateScalars | Start | Multiply | Apply


class Instructions:
    """Launches and products in a pass, in order.

    Args:
        inputs: The pass tensors; they are the first buffers. None for absent ones.
        device: The device for all tensors.

    Raises:
        NotRecordable: A tensor is empty, a subclass instance, or on another device.
    """

    def __init__(self, inputs: Sequence[Tensor | None], device: torch.device):
        self.device = device
        self.steps: list[Instruction] = []
        self.layouts: list[TensorLayout | None] = []
        self.inputs = tuple(inputs)
        self._by_address: dict[int, int] = {}
        for number, tensor in enumerate(inputs):
            if tensor is None:
                self.layouts.append(None)
                continue
            if type(tensor) not in (Tensor, torch.nn.Parameter):
                raise NotRecordable(f"a tensor is {with_article(type(tensor))}")
            if tensor.device != device or not tensor.numel():
                raise NotRecordable("a tensor is empty or on another device")
            self._by_address.setdefault(tensor.data_ptr(), number)
            self.layouts.append(TensorLayout.of(tensor))

    def symbols(self) -> list[Symbol | None]:
        """Return the input symbols."""
        return [
            None if layout is None else Symbol(self, number, _meta(layout))
            for number, layout in enumerate(self.layouts)
        ]

    def symbol(self, value: Any) -> Symbol | None:
        """Return `value` if it is a Symbol, otherwise the symbol for the input at its address.

        Raises:
            NotRecordable: The tensor is not a pass input.
        """
        if value is None or type(value) is Symbol:
            return value
        number = self._by_address.get(value.data_ptr())
        if number is None or type(value) not in (Tensor, torch.nn.Parameter):
            raise NotRecordable(
                "an operation reads a tensor that is neither an input nor a result of this pass"
            )
        return Symbol(self, number, _meta(TensorLayout.of(value)))

    def is_aligned(self, number: int) -> bool:
        """Return whether an input address has the alignment on which kernels rely."""
        tensor = self.inputs[number]
        return tensor is not None and tensor.data_ptr() % ALIGNMENT == 0

    def allocate(self, layout: TensorLayout, make: Callable[[], Tensor] | None = None) -> Symbol:
        """Append an allocation; return its symbol."""
        symbol = self._new(layout)
        self.steps.append(Allocate(symbol.buffer, layout, make))
        return symbol

    def append_allocation(self, maker: Callable[[], Tensor]) -> Symbol:
        """Append a buffer allocation by a function without arguments; return its symbol."""
        if isinstance(maker, partial) and maker.func is torch.empty_strided:
            return self.allocate(
                TensorLayout(tuple(maker.args[0]), tuple(maker.args[1]), maker.keywords["dtype"])
            )
        return self.allocate(TensorLayout.of(maker()), maker)  # a constant or a number

    def numbers(self, zeroed: tuple[bool, ...]) -> list[Symbol]:
        """Append an allocation for numbers float32 [1]; return their symbols."""
        symbols = [self._new(TensorLayout((1,), (1,), torch.float32)) for _ in zeroed]
        if symbols:
            self.steps.append(AllocateScalars(tuple([symbol.buffer for symbol in symbols]), zeroed))
        return symbols

    def start(self, launch: Launch, arguments: Sequence[Any]) -> None:
        """Append a launch with its inputs and outputs."""
        symbols = [self.symbol(argument) for argument in arguments]
        self.steps.append(Start(launch, tuple([None if s is None else s.buffer for s in symbols])))

    def multiply(
        self, plan: Any, left: Any, right: Any, result: Symbol, pointers: Sequence[Any]
    ) -> None:
        """Append a cuBLASLt product."""
        symbols = [self.symbol(tensor) for tensor in (left, right, *pointers)]
        buffers = [None if symbol is None else symbol.buffer for symbol in symbols]
        for number in buffers:
            if number is not None and number < len(self.inputs) and not self.is_aligned(number):
                raise NotAligned("a product reads a tensor that is not aligned")
        assert buffers[0] is not None and buffers[1] is not None
        self.steps.append(Multiply(plan, buffers[0], buffers[1], result.buffer, tuple(buffers[2:])))

    def apply(
        self,
        function: Callable[..., tuple[Any, ...]],
        arguments: Sequence[Any],
        layouts: Sequence[TensorLayout | None],
    ) -> list[Any]:
        """Append a function call.

        Args:
            function: Called with the tensors and objects in the arguments; it returns a tuple of
                aligned tensors and objects. It may write to its arguments.
            arguments: Symbols, pass inputs, objects from other calls, and None.
            layouts: Result layouts; None for an object.

        Returns:
            The tensor symbols and the `Opaque`s.
        """
        buffers: list[tuple[int, TensorLayout | None] | None] = []
        for argument in arguments:
            if isinstance(argument, Opaque):
                buffers.append((argument.buffer, None))
            else:
                symbol = self.symbol(argument)
                buffers.append(None if symbol is None else (symbol.buffer, symbol.layout))
        results: list[Any] = []
        for layout in layouts:
            if layout is None:
                self.layouts.append(None)
                results.append(Opaque(self, len(self.layouts) - 1))
            else:
                results.append(self._new(layout))
        is_tensor = tuple([layout is not None for layout in layouts])
        self.steps.append(
            Apply(function, tuple(buffers), tuple([result.buffer for result in results]), is_tensor)
        )
        return results

    def _new(self, layout: TensorLayout) -> Symbol:
        self.layouts.append(layout)
        return Symbol(self, len(self.layouts) - 1, _meta(layout))


class Opaque(NamedTuple):
    """An object that a pass function returns, and that only other functions take."""

    instructions: Instructions
    buffer: int


# Symbol attributes and methods that come from its tensor on the meta device.
_OF_META = frozenset({"shape", "dtype", "stride", "dim", "numel", "is_contiguous"})


class Symbol:
    """A tensor in a pass that is being recorded: a buffer, and the layout in which an operation uses it."""

    __slots__ = ("buffer", "instructions", "meta")

    is_cuda = True
    requires_grad = False

    def __init__(self, instructions: Instructions, buffer: int, meta: Tensor):
        if meta.storage_offset():
            raise NotRecordable("an operation reads a part of a tensor")
        self.instructions = instructions
        self.buffer = buffer
        self.meta = meta

    @property
    def device(self) -> torch.device:
        return self.instructions.device

    @property
    def layout(self) -> TensorLayout:
        return TensorLayout.of(self.meta)

    def contiguous(self) -> Symbol:
        if not self.meta.is_contiguous():
            raise NotRecordable("a tensor is copied because it is not contiguous")
        return self

    def detach(self) -> Symbol:
        return self

    def t(self) -> Symbol:
        return Symbol(self.instructions, self.buffer, self.meta.t())

    def view(self, *shape: Any) -> Symbol:
        try:
            return Symbol(self.instructions, self.buffer, self.meta.view(*shape))
        except RuntimeError as error:
            raise NotRecordable(f"a view of a tensor needs a copy: {error}") from None

    reshape = view

    def to(self, dtype: torch.dtype) -> Symbol:
        if dtype != self.dtype:
            raise NotRecordable(f"a tensor is converted from {self.dtype} to {dtype}")
        return self

    def __getattr__(self, name: str) -> Any:
        if name in _OF_META:
            return getattr(self.meta, name)
        raise NotRecordable(f"torch computes with a tensor of the pass ({name})")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotRecordable(
            f"torch computes with a tensor of the pass ({getattr(function, '__name__', function)})"
        )


def _not_recordable(name: str) -> Callable[..., Any]:
    def operator(self: Symbol, *_: Any) -> Any:
        raise NotRecordable(f"torch computes with a tensor of the pass ({name})")

    return operator


# Python reads operators from the class only.
for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "matmul",
    "neg",
    "getitem",
    "setitem",
    "bool",
    "float",
    "int",
    "len",
):
    setattr(Symbol, f"__{_name}__", _not_recordable(f"__{_name}__"))
for _name in ("add", "sub", "mul", "truediv", "matmul"):
    setattr(Symbol, f"__r{_name}__", _not_recordable(f"__r{_name}__"))
    setattr(Symbol, f"__i{_name}__", _not_recordable(f"__i{_name}__"))


def _meta(layout: TensorLayout) -> Tensor:
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device="meta")
