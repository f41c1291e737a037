"""Base classes for fusible operations: FusibleOperation, BasicOperation, FusedOperation and OperationContext.

A basic operation has one main input and one main output, and optionally extra inputs and outputs. A fused operation
stands for several consecutive basic operations. `Sequential` and `OperationFuser` run operation chains.

To write an operation, derive from `BasicOperation` and implement `op_forward` and `op_backward`.
The operations of this package have private passes instead (`pass_operation.py`).
"""

from __future__ import annotations

import itertools
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ...common.checks import suggests_keywords
from ...common.numbers import with_article
from ..compat.replaceable import any_intercepted
from ..quantization.resizable_state import CheckedLoading
from ..tensor.quantizer import Quantizer
from .channels import Channels
from .intercepted_calls import list_interceptable
from .lent_parameters import LentParameters
from .links import check_options_count
from .parts import NO_CHANNELS, ContainerPart, call_parts, connecting_channels
from .recipe_slots import RECIPE_ATTRIBUTES, RecipeSlots

_revisions = itertools.count(1)


@dataclass
class OperationContext:
    """State that the forward pass of one basic operation leaves to its backward pass.

    Operations may set further attributes.

    Attributes:
        saved_tensors: In the backward pass, the tensors that `save_for_backward` received.
        to_save: In the forward pass, the tensors to save.
        requires_grad: Whether a backward pass will reach the operation.
        input_requires_grad: Whether the backward pass needs the operation's input gradient.
    """

    saved_tensors: tuple[Tensor | None, ...] | None = None
    to_save: tuple[Tensor | None, ...] | None = None
    requires_grad: bool = True
    input_requires_grad: bool = True
    _saved_range: tuple[int, int] | None = field(default=None, repr=False)
    # Main input shape, then extra input shapes; None where unknown.
    _input_shapes: tuple[tuple[int, ...] | None, ...] = field(default=(), repr=False)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save tensors for the backward pass; a second call replaces the first call's tensors."""
        self.to_save = tensors


class FusibleOperation(CheckedLoading, metaclass=ABCMeta):
    """An operation that can belong to a fused chain.

    Args:
        args: `torch.nn.Module` arguments; subclasses define their own.
        kwargs: `torch.nn.Module` keyword arguments.
    """

    # `OperationFuser`; set by `fuser.py`, which is built on operations.
    _fuser: ClassVar[Any]
    # Channel names that connect the operation with others in its container, where it is called by itself.
    _channels: frozenset[str] = NO_CHANNELS

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = suggests_keywords(cls.__init__)
        if cls.__call__ is not torch.nn.Module.__call__:
            cls._own_forward = None  # a fused chain would not run `__call__`

    @property
    @abstractmethod
    def is_fused_op(self) -> bool:
        """Whether the operation represents several basic operations."""

    def pre_first_fuser_forward(self) -> None:
        """Prepare the operation before its first forward pass, for example by allocating deferred parameters."""

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Prepare the operation before each forward pass.

        Args:
            requires_grad: Whether a backward pass will reach the operation.
        """

    def get_input_quantizer(self) -> Quantizer | None:
        """Return the quantizer that the operation applies to its input, or None."""
        return None

    def get_grad_output_quantizer(self) -> Quantizer | None:
        """Return the quantizer that the operation applies to its output gradient, or None."""
        return None

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[Tensor, Iterable[Iterable[Tensor | None]]]:
        """Compute the forward pass within a chain.

        Args:
            basic_op_ctxs: One context per basic operation.
            input_: The main input.
            basic_op_extra_inputs: Extra inputs per basic operation.
            prev_op_grad_output_quantizer: Quantizer for the previous operation's output gradient, or None.
            next_op_input_quantizer: Quantizer for the next operation's input, or None.
            basic_op_kwargs: Keyword arguments per basic operation.

        Returns:
            The main output, and the extra outputs per basic operation.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no forward pass; implement fuser_forward, or op_forward of a BasicOperation"
        )

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> tuple[Tensor | None, Iterable[Iterable[Tensor | None]], Iterable[Iterable[Tensor | None]]]:
        """Compute the backward pass within a chain.

        Args:
            basic_op_ctxs: Forward-pass contexts.
            grad_output: Main output gradient.
            basic_op_grad_extra_outputs: Extra output gradients per basic operation.

        Returns:
            The main input gradient, parameter gradients per basic operation in the order of
            `parameters()`, and extra input gradients per basic operation.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no backward pass; implement fuser_backward, or op_backward of a BasicOperation"
        )

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor: ...

    def forward(self, input: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        """Apply the operation alone.

        Args:
            input: The main input.
            *extra_inputs: The extra inputs.
            **kwargs: Keyword arguments, if the operation is, or consists of, one basic operation. A fused operation
                accepts `basic_op_kwargs`: one dict, possibly empty, for each of its basic operations.

        Returns:
            The output, or a tuple with the output and the extra outputs.

        Raises:
            ValueError: There are too few or too many extra inputs or entries in `basic_op_kwargs`, or the operation
                does not accept a keyword argument.
        """
        members = self.basic_operations()
        options: list[dict[str, Any]] | None = (
            kwargs.pop("basic_op_kwargs", None) if self.is_fused_op else None
        )
        if kwargs and (options is not None or len(members) != 1):
            raise ValueError(
                f"{type(self).__name__} stands for {len(members)} basic operations and does not accept the keyword "
                f"argument {sorted(kwargs)[0]!r}; pass basic_op_kwargs, one dict for each of them"
            )
        if kwargs:
            options = [kwargs]
        if self.is_fused_op and any_intercepted(list_interceptable(members)):
            return self._call_members(members, input, extra_inputs, options)
        fuser: Any = self.__dict__.get("_own_fuser")
        if fuser is None or fuser._basic_ops != members or fuser.channels != self._channels:
            fuser = type(self)._fuser([self], self._channels)
            if not torch.compiler.is_compiling():  # checkpoints in a graph forbid side effects
                object.__setattr__(self, "_own_fuser", fuser)
        return fuser(input, *extra_inputs, basic_op_kwargs=options)

    def _call_members(
        self,
        members: Sequence[Any],
        input: Tensor,
        extra_inputs: Sequence[Tensor],
        options: list[dict[str, Any]] | None,
    ) -> Any:
        """Call the basic operations of a fused operation one after another as modules, so that their hooks run.

        Args:
            members: The basic operations, or modules that replace them, which have no extra tensors and options.
            input: The main input.
            extra_inputs: The extra inputs.
            options: Keyword arguments by basic operation.
        """
        groups = [[member] if isinstance(member, BasicOperation) else [] for member in members]
        basic_ops = [operation for group in groups for operation in group]
        if options is not None:
            check_options_count(options, len(basic_ops))
        channels = connecting_channels(groups, self._channels)
        parts = [
            ContainerPart(member, group, names)
            for member, group, names in zip(members, groups, channels, strict=True)
        ]
        options_by_id = {
            id(op): op_options for op, op_options in zip(basic_ops, options or (), strict=False)
        }
        return call_parts(parts, input, extra_inputs, options_by_id, self._channels)

    def connect(self, channels: frozenset[str]) -> None:
        """Make separate calls to the operation read and return channel tensors.

        Only `parts.py` calls this method: `ContainerPart.call` and `disconnect`.

        Args:
            channels: Channel names that connect the operation with others in its container.
        """
        if channels != self._channels:
            # Not a change to the operation's settings, which `_revision` counts.
            object.__setattr__(self, "_channels", channels)

    # The `forward` of this class that computes the same as a fused chain; a user's class may have another one.
    _own_forward: ClassVar[Callable[..., Any] | None] = forward

    def __getstate__(self) -> dict[str, Any]:
        """Copy the state without the fuser, which a copy recreates."""
        return {name: value for name, value in self.__dict__.items() if name != "_own_fuser"}

    def basic_operations(self) -> list[BasicOperation]:
        """Return the basic operations that this operation consists of, in order."""
        raise NotImplementedError(
            f"{type(self).__name__} derives from neither BasicOperation nor FusedOperation"
        )


class BasicOperation(LentParameters, Channels, RecipeSlots, FusibleOperation, metaclass=ABCMeta):
    """An operation with one main input and one main output that does not consist of other operations.

    Derived classes implement `op_forward` and `op_backward`. A class with extra inputs or outputs sets
    `num_extra_inputs` and `num_extra_outputs`, and implements `fuser_forward` and `fuser_backward` instead. A class
    that quantizes tensors overrides `num_quantizers`.

    Attributes:
        num_extra_inputs: Extra input tensor count.
        num_extra_outputs: Extra output tensor count.
    """

    is_fused_op = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    # Attributes that the representation shows, by argument name.
    _shown: ClassVar[dict[str, str]] = {}

    # Another number after each write to an attribute. Keys (`call_key.py`) contain parameters, `training` and the
    # version of the quantizers apart from this number.
    _revision: int = 0
    # Whether a tracing compiler has executed `pre_first_fuser_forward`.
    _initialized_while_tracing: bool = False

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self._create_recipe_slots()
        self._extra_input_channels = [None] * self.num_extra_inputs
        self._extra_output_channels = [None] * self.num_extra_outputs
        self._extra_output_to_caller = [True] * self.num_extra_outputs
        self._captured_by_fuser = False

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._owned:
            self._set_lent_parameter(name, value)
            return
        super().__setattr__(name, value)
        if name != "training" and name not in RECIPE_ATTRIBUTES and not isinstance(value, Tensor):
            object.__setattr__(self, "_revision", next(_revisions))

    def __delattr__(self, name: str) -> None:
        is_tensor = isinstance(self.__dict__.get(name), Tensor)
        super().__delattr__(name)
        if not is_tensor:
            object.__setattr__(self, "_revision", next(_revisions))

    def own_tensors(self) -> list[Tensor]:
        """Return the tensors that the operation reads as its parameters, in gradient order.

        Each is a parameter, or what a parametrization, pruning or FSDP has put in its place.
        """
        return list(self.parameters())

    def call_facts(self, extra_inputs: tuple[Tensor, ...]) -> Hashable:
        """Return what a call's passes depend on besides attributes and input and parameter metadata."""
        return None

    def distributed_weight_unsupported_reason(self) -> str | None:
        """Return why no parameter may be a `DistributedWeight`, with what to use; None if it may be."""
        return "use te.ops.BasicLinear, te.ops.GroupedLinear, or a layer such as te.Linear"

    def extra_repr(self) -> str:
        return ", ".join(
            [f"{name}={getattr(self, attribute)}" for name, attribute in self._shown.items()]
        )

    def basic_operations(self) -> list[BasicOperation]:
        return [self]

    def get_input_quantizer(self) -> Quantizer | None:
        return self.get_quantizer("forward", 0) if self.num_quantizers("forward") else None

    def get_grad_output_quantizer(self) -> Quantizer | None:
        return self.get_quantizer("backward", 0) if self.num_quantizers("backward") else None

    @abstractmethod
    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the forward pass.

        Args:
            ctx: Context, which saves the tensors that the backward pass reads.
            input_: The input.
            prev_op_grad_output_quantizer: Quantizer for the previous operation's output gradient, or None.
            next_op_input_quantizer: Quantizer for the next operation's input, or None. The
                operation may return its output quantized by it.
            **kwargs: Call keyword arguments.

        Returns:
            The output.
        """

    @abstractmethod
    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, Iterable[Tensor | None]]:
        """Compute the backward pass.

        Args:
            ctx: Forward-pass context.
            grad_output: Output gradient.

        Returns:
            The input gradient, and the parameter gradients in the order of `parameters()`.
        """

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[Tensor, Iterable[Iterable[Tensor | None]]]:
        reject_extra_tensors(self, "op_forward", "override fuser_forward and fuser_backward")
        output = self.op_forward(
            basic_op_ctxs[0],
            input_,
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            next_op_input_quantizer=next_op_input_quantizer,
            **basic_op_kwargs[0],
        )
        return output, [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> tuple[Tensor | None, Iterable[Iterable[Tensor | None]], Iterable[Iterable[Tensor | None]]]:
        reject_extra_tensors(self, "op_backward", "override fuser_forward and fuser_backward")
        returned: Any = self.op_backward(basic_op_ctxs[0], grad_output)
        pair = isinstance(returned, (tuple, list)) and len(returned) == 2
        if not pair or not isinstance(returned[1], Iterable) or isinstance(returned[1], Tensor):
            found = returned[1] if pair else returned
            of_values = (
                f" of {len(returned)} values"
                if isinstance(returned, (tuple, list)) and not pair
                else ""
            )
            raise TypeError(
                f"{type(self).__name__}.op_backward returned {with_article(type(found))}{of_values}"
                f"{' as the gradients of the parameters' if pair else ''}; return a tuple (grad_input, gradients of "
                "the parameters), with () for no parameters"
            )
        return returned[0], [returned[1]], [()]


def reject_extra_tensors(op: BasicOperation, method: str, remedy: str) -> None:
    """Raise RuntimeError if an operation has extra inputs or outputs, which a method cannot pass."""
    if op.num_extra_inputs or op.num_extra_outputs:
        raise RuntimeError(
            f"{type(op).__name__}.{method} cannot pass {op.num_extra_inputs} extra inputs and {op.num_extra_outputs} "
            f"extra outputs; {remedy}"
        )


class FusedOperation(FusibleOperation):
    """An operation that replaces several consecutive basic operations.

    It holds neither parameters nor state. Derived classes implement `fuser_forward` or `fuser_backward`, or both. A
    class that replaces only the backward pass reads what the forward pass of the basic operations saves. A class that
    replaces only the forward pass calls `fuser_forward` on the basic operations with their contexts; for operations of
    this package without saved state, the chain runs that forward pass again, and their gradients belong to its result.

    Args:
        basic_ops: The basic operations, in order.

    Raises:
        ValueError: The basic operation list is empty.
    """

    is_fused_op = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__()
        self.basic_ops = torch.nn.ModuleList(basic_ops)
        if not len(self.basic_ops):
            raise ValueError(
                f"{type(self).__name__} has no basic operations; give the operations that it replaces"
            )

    def basic_operations(self) -> list[BasicOperation]:
        return list(self.basic_ops._modules.values())  # pyright: ignore[reportReturnType]

    def get_input_quantizer(self) -> Quantizer | None:
        return self.basic_operations()[0].get_input_quantizer()

    def get_grad_output_quantizer(self) -> Quantizer | None:
        return self.basic_operations()[-1].get_grad_output_quantizer()

    def pre_first_fuser_forward(self) -> None:
        for op in self.basic_operations():
            op.pre_first_fuser_forward()

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        for op in self.basic_operations():
            op.pre_fuser_forward(requires_grad=requires_grad)
