"""Linear attention as a tracing compiler sees it: one operator per pass.

The backends are loops over tokens or chunks, or library functions that compilers do not trace. The
operators take the settings as strings. The backward operator computes the forward pass again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime.autograd import Function
from ...runtime.double_backward import once_differentiable
from ...runtime.operator_definition import define_operator
from ...runtime.tracing import distinct_tensors
from .request import Compute, DeltaInputs, DeltaResult, DeltaSpec, Option, compute_dtype

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? w, Tensor? a_log, Tensor? dt_bias, "
    "Tensor? initial_state, Tensor? cu_seqlens, str rule, str scale, str options"
)
_COUNT = len(DeltaInputs._fields)
_GRADIENTS = _COUNT - 1  # for all inputs but the bounds


class TracedLinearAttention:
    """The forward and backward operators, which call `compute` when a graph runs."""

    def __init__(self, compute: Compute):
        self._compute = compute
        self.forward = define_operator(
            "transformer_engine",
            f"linear_attention({_INPUTS}) -> (Tensor, Tensor)",
            "default",
            self._forward,
            _results,
        )
        self.backward = define_operator(
            "transformer_engine",
            f"linear_attention_backward(Tensor grad_output, Tensor? grad_state, {_INPUTS})"
            f" -> ({', '.join(['Tensor'] * _GRADIENTS)})",
            "default",
            self._backward,
            _gradient_results,
        )

    def __call__(self, spec: DeltaSpec, *tensors: Tensor | None) -> DeltaResult:
        """Compute a call, differentiable once."""
        distinct = distinct_tensors(tensors)
        output, state = _TracedPasses.apply(self, *spec[:2], ",".join(spec.options), *distinct)
        return output, state if Option.FINAL_STATE in spec.options else None

    def _forward(self, *args) -> tuple[Tensor, Tensor]:
        inputs, spec = _unpack_arguments(args)
        with torch.no_grad():
            output, state = self._compute(inputs, spec)
        # Results of an operator share no memory with its inputs.
        if 0 in inputs.q.shape:
            output, state = output.clone(), None if state is None else state.clone()
        return output.contiguous(), _absent(output) if state is None else state.contiguous()

    def _backward(self, grad_output, grad_state, *args) -> tuple[Tensor, ...]:
        inputs, spec = _unpack_arguments(args)
        leaves = [
            None if x is None else x.detach().requires_grad_(x.is_floating_point()) for x in inputs
        ]
        with torch.enable_grad():
            output, state = self._compute(DeltaInputs(*leaves), spec)  # pyright: ignore
        results = [(output, grad_output)]
        if state is not None and grad_state is not None:
            results.append((state, grad_state))
        results = [(y, dy) for y, dy in results if y.requires_grad]
        differentiable = [x for x in leaves[:_GRADIENTS] if x is not None]
        computed: list[Tensor | None] = [None] * len(differentiable)
        if results:
            ys, dys = zip(*results, strict=True)
            computed = list(torch.autograd.grad(ys, differentiable, dys, allow_unused=True))
        gradients = iter(zip(differentiable, computed, strict=True))
        filled: list[Tensor] = []
        for x in leaves[:_GRADIENTS]:
            if x is None:
                filled.append(_absent(grad_output))
                continue
            leaf, gradient = next(gradients)
            filled.append(torch.zeros_like(leaf) if gradient is None else gradient.contiguous())
        return tuple(filled)


class _TracedPasses(Function):
    @staticmethod
    def forward(ctx, operators, rule, scale, options, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.settings = (operators, rule, scale, options)
        ctx.set_materialize_grads(False)
        return operators.forward(*tensors, rule, scale, options)

    @staticmethod
    @once_differentiable("linear attention in a compiled graph")
    def backward(ctx, grad_output, grad_state):
        operators, rule, scale, options = ctx.settings
        tensors = ctx.saved_tensors
        if grad_output is None:
            q, v = tensors[0], tensors[2]
            grad_output = q.new_zeros(*q.shape[:-1], v.shape[-1])
        if Option.FINAL_STATE not in options.split(","):
            grad_state = None
        gradients = operators.backward(
            grad_output.contiguous(), grad_state, *tensors, rule, scale, options
        )
        present = zip(tensors, gradients, strict=False)
        return (None,) * 4 + tuple(None if x is None else dx for x, dx in present) + (None,)


def _unpack_arguments(args: tuple) -> tuple[DeltaInputs, DeltaSpec]:
    rule, scale, options = args[_COUNT:]
    spec = DeltaSpec(rule, scale, tuple(options.split(",")) if options else ())
    return DeltaInputs(*args[:_COUNT]), spec


def _absent(like: Tensor) -> Tensor:
    return like.new_empty(0)


def _results(*args) -> tuple[Tensor, Tensor]:
    """Allocate the output and the state."""
    inputs, spec = _unpack_arguments(args)
    q, v = inputs.q, inputs.v
    output = q.new_empty(*q.shape[:-1], v.shape[-1])
    if Option.FINAL_STATE not in spec.options:
        return output, _absent(output)
    sequences = q.shape[0] if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1
    shape = (sequences, q.shape[2], v.shape[-1], q.shape[-1])
    return output, q.new_empty(shape, dtype=compute_dtype(inputs))


def _gradient_results(grad_output, grad_state, *args) -> tuple[Tensor, ...]:
    """Allocate the gradients; absent inputs get empty gradients."""
    return tuple(
        _absent(grad_output) if x is None else x.new_empty(x.shape) for x in args[:_GRADIENTS]
    )
