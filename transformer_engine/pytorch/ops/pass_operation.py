"""PassOperation and PassFusedOperation: operations of this package, whose passes neighbors fuse with."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..runtime.device import canonical_device
from ..runtime.tracing import constant_while_tracing
from ..tensor.quantizer import Quantizer
from .chain import run_backward, run_forward
from .operation import (
    BasicOperation,
    FusedOperation,
    FusibleOperation,
    OperationContext,
    reject_extra_tensors,
)
from .passes.contract import InputFacts, OperationCall, OperationPasses
from .recipe_slots import operations_by_name


class PassOperation(BasicOperation, metaclass=ABCMeta):
    """A basic operation whose forward and backward functions are an `OperationPasses`.

    A derived class implements `passes`. A user's class that overrides `op_forward` or `fuser_forward` runs by these
    methods instead, without fusion.

    Attributes:
        parameter_names: Parameter names that the passes read.
        option_names: Call keyword arguments that the operation accepts.
    """

    parameter_names: tuple[str, ...] = ()
    option_names: frozenset[str] = frozenset()

    @abstractmethod
    def passes(self, x: InputFacts, call: OperationCall) -> tuple[OperationPasses, InputFacts]:
        """Forward and backward function for one call kind.

        Args:
            x: Input metadata.
            call: Call metadata.

        Returns:
            The passes, and the output metadata.
        """

    def pass_parameters(self) -> list[Tensor]:
        """The parameters that the passes read: the tensors in `own_tensors`, or views of their memory."""
        return self.own_tensors()

    def own_tensors(self) -> list[Tensor]:
        tensors = [getattr(self, name) for name in self.parameter_names]
        return [tensor for tensor in tensors if tensor is not None]

    def required_parameters(self) -> tuple[str, ...]:
        """Parameter names that the operation requires."""
        return self.parameter_names

    def pre_first_fuser_forward(self) -> None:
        if any(tensor.is_meta for tensor in self.own_tensors()):
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Allocate parameters on the meta device and fill all parameters with initial values."""

    def allocate_parameters(self) -> None:
        """Replace parameters on the meta device by uninitialized ones on the default device."""
        for name in self.parameter_names:
            parameter = getattr(self, name)
            if parameter is not None and parameter.is_meta:
                values = torch.empty_like(parameter, device=canonical_device("cuda"))
                allocated = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
                vars(allocated).update(vars(parameter))
                self.register_parameter(name, allocated)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        prev_op_grad_output_quantizer: Quantizer | None = None,
        next_op_input_quantizer: Quantizer | None = None,
        **kwargs: Any,
    ) -> Tensor:
        reject_extra_tensors(self, "op_forward", "call fuser_forward")
        return run_forward([self], [ctx], input_, [()], [kwargs])[0]

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, Iterable[Tensor | None]]:
        reject_extra_tensors(self, "op_backward", "call fuser_backward")
        grad_input, parameters, _ = run_backward([ctx], grad_output, [()])
        return grad_input, parameters[0]

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None = None,
        next_op_input_quantizer: Quantizer | None = None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[Tensor, Iterable[Iterable[Tensor | None]]]:
        if type(self).op_forward is PassOperation.op_forward:
            return run_forward(
                [self], basic_op_ctxs, input_, basic_op_extra_inputs, basic_op_kwargs
            )
        return super().fuser_forward(
            basic_op_ctxs,
            input_,
            basic_op_extra_inputs=basic_op_extra_inputs,
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            next_op_input_quantizer=next_op_input_quantizer,
            basic_op_kwargs=basic_op_kwargs,
        )

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> tuple[Tensor | None, Iterable[Iterable[Tensor | None]], Iterable[Iterable[Tensor | None]]]:
        if type(self).op_backward is PassOperation.op_backward:
            return run_backward(basic_op_ctxs, grad_output, basic_op_grad_extra_outputs)
        return super().fuser_backward(
            basic_op_ctxs, grad_output, basic_op_grad_extra_outputs=basic_op_grad_extra_outputs
        )


def check_parameters(ops: Iterable[BasicOperation]) -> None:
    """Raise RuntimeError if a required parameter of an operation is None."""
    for op in ops:
        for name in op.required_parameters() if isinstance(op, PassOperation) else ():
            if getattr(op, name) is None:
                raise RuntimeError(
                    f"{type(op).__name__}.{name} is None; assign a torch.nn.Parameter, or construct the layer "
                    "without it"
                )


def initialize_operations(ops: Iterable[FusibleOperation]) -> None:
    """Run `pre_first_fuser_forward` for each operation.

    The base-class methods can be traced. An override, such as a user's, may assign attributes, which is an
    error in a traced checkpoint. While torch.compile traces, an override is therefore executed instead of
    traced, and `_initialized_while_tracing` keeps later fusers from running it again.
    """
    for op in ops:
        method = type(op).pre_first_fuser_forward
        if method is FusedOperation.pre_first_fuser_forward:
            initialize_operations(op.basic_operations())
        elif method in (
            FusibleOperation.pre_first_fuser_forward,
            PassOperation.pre_first_fuser_forward,
        ):
            op.pre_first_fuser_forward()
        elif torch.compiler.is_compiling() and isinstance(op, BasicOperation):
            _initialize_while_tracing(op._traced_name)
        elif not getattr(op, "_initialized_while_tracing", False):
            op.pre_first_fuser_forward()


@constant_while_tracing
def _initialize_while_tracing(name: str) -> bool:
    op: Any = operations_by_name[name]
    if not op._initialized_while_tracing:
        op.pre_first_fuser_forward()
        object.__setattr__(op, "_initialized_while_tracing", True)  # keeps `_revision`
    return True


class PassFusedOperation(FusedOperation):
    """A fused operation that runs by the passes of its members, which are operations of this package.

    It has no kernels of its own: `chain.py` decides which members a kernel computes together.
    """

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        basic_op_kwargs: list[dict[str, Any]],
        **quantizers: Any,
    ) -> tuple[Tensor, Iterable[Iterable[Tensor | None]]]:
        ops = self.basic_operations()
        return run_forward(ops, basic_op_ctxs, input_, basic_op_extra_inputs, basic_op_kwargs)

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> tuple[Tensor | None, Iterable[Iterable[Tensor | None]], Iterable[Iterable[Tensor | None]]]:
        return run_backward(basic_op_ctxs, grad_output, basic_op_grad_extra_outputs)


def has_pass(op: FusibleOperation, direction: str) -> bool:
    """Whether the "forward" or "backward" pass of an operation is an `OperationPasses`.

    It is not if a user's class overrides a method that computes the pass.
    """
    fuser_method, op_method = f"fuser_{direction}", f"op_{direction}"
    if isinstance(op, PassFusedOperation):
        is_inherited = getattr(type(op), fuser_method) is getattr(PassFusedOperation, fuser_method)
        return is_inherited and all(has_pass(member, direction) for member in op.basic_operations())
    return isinstance(op, PassOperation) and all(
        getattr(type(op), name) is getattr(PassOperation, name)
        for name in (fuser_method, op_method)
    )


def has_passes(op: FusibleOperation) -> bool:
    """Whether both passes of an operation are `OperationPasses`."""
    return has_pass(op, "forward") and has_pass(op, "backward")
