"""Layers through monkey-patched names: y = norm(x) @ w.T + b by a module's general_gemm and apply_normalization.

Other libraries assign their functions to `module.linear` and its neighbours. The classes here have the names
and the arguments that those libraries expect, and look every function up in the module when they call it, forward and
backward. They multiply unquantized matrices only. Layers use them only while a name is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functions.layer import leading_shape
from ..functions.linear_spec import LinearSpec
from ..functions.norm_linear import NormLinearSpec
from ..functions.normalization import Norm
from ..primitives.column_sums import column_sums
from ..runtime.autograd import Function
from ..runtime.double_backward import once_differentiable
from ..runtime.tracing import reshape_result
from .replaceable import ReplaceableFunction

_extensions: list[Callable[[], Any]] = []


def provide_extensions(load: Callable[[], Any]) -> None:
    """Set the function that returns `cpp_extensions`, which is built on this package and imported on first use."""
    _extensions[:] = [load]


def extension(name: str) -> Any:
    """Return a name from `cpp_extensions`."""
    return getattr(_extensions[0](), name)


def general_gemm(*args: Any, **kwargs: Any) -> Any:
    """Call `cpp_extensions.general_gemm`."""
    return extension("general_gemm")(*args, **kwargs)


@dataclass(frozen=True)
class NormByName:
    """A Norm whose forward is a module's apply_normalization, or `module._common`'s where that one is not replaced."""

    norm: Norm
    file: ModuleType

    @property
    def kind(self) -> str:
        return self.norm.kind

    def forward(
        self, x: Tensor, gamma: Tensor, beta: Tensor | None, cast: None = None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        norm = self.norm
        is_replaced = "apply_normalization" in self.file._replaced.names
        return (self.file if is_replaced else self.file._common).apply_normalization(
            x, None, gamma, beta, norm.eps, None, x.dtype, norm.kind, 0, norm.zero_centered
        )

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        mean: Tensor | None,
        rstdev: Tensor,
        gamma: Tensor,
        add: Tensor | None = None,
        rounds_first: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.norm.backward(dy, x, mean, rstdev, gamma, add, rounds_first)


class _Products(NamedTuple):
    """Gradients for one product."""

    input: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def _product(
    inp: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec, file: ModuleType
) -> Tensor:
    """Compute y [M, N] = inp [M, K] @ weight.T + bias, with tensor-parallel communication."""
    x = spec.parallel.enter_forward(inp)
    y = file.general_gemm(weight, x, out_dtype=spec.dtype, layout="TN", bias=bias)[0]
    return spec.parallel.leave_forward(y)


def _gradients(
    dy: Tensor, inp: Tensor, weight: Tensor, spec: LinearSpec, file: ModuleType, dtypes: Any
) -> _Products:
    """Compute dx [M, K] = dy @ w, then dw [N, K] = dy.T @ x: replacements distinguish the two by their order."""
    dy = spec.parallel.enter_backward(dy.contiguous())
    dx = dw = None
    if spec.needs_grad_input:
        dx = file.general_gemm(weight, dy, out_dtype=spec.dtype, layout="NN", grad=True)[0]
        dx = spec.parallel.leave_backward(dx)
    if spec.needs_grad_weight:
        x = spec.parallel.enter_forward(inp)
        dw = file.general_gemm(x, dy, out_dtype=dtypes[0], layout="NT", grad=True)[0]
        dw = spec.weight_gradient.place(dw)
    return _Products(dx, dw, column_sums(dy, dtypes[1]) if spec.needs_grad_bias else None)


def _dtypes(weight: Tensor, bias: Tensor | None) -> tuple[torch.dtype, torch.dtype]:
    return weight.dtype, weight.dtype if bias is None else bias.dtype


class LinearByName(Function, metaclass=ReplaceableFunction):
    """y [.., N] from Linear. ctx is None where no gradient is recorded."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, inp: Tensor, bias: Tensor | None, spec: Any, file: ModuleType
    ) -> Tensor:
        flat = inp.reshape(-1, inp.shape[-1])
        weight = weight.to(spec.dtype)
        y = _product(flat, weight, bias, spec, file)
        if ctx is not None:
            ctx.save_for_backward(flat, weight)
            ctx.spec, ctx.file, ctx.shape, ctx.dtypes = spec, file, inp.shape, _dtypes(weight, bias)
        return reshape_result(y, (*leading_shape(tuple(inp.shape[:-1]), y.shape[0]), y.shape[-1]))

    @staticmethod
    @once_differentiable("Linear")
    def backward(ctx, grad_output):
        inp, weight = ctx.saved_tensors
        dy = grad_output.reshape(-1, grad_output.shape[-1])
        grads = _gradients(dy, inp, weight, ctx.spec, ctx.file, ctx.dtypes)
        dx = None if grads.input is None else grads.input.view(ctx.shape)
        return grads.weight, dx, grads.bias, None, None


class LayerNormLinearByName(Function, metaclass=ReplaceableFunction):
    """y [.., N], or (y, norm(x)), from LayerNormLinear. ctx is None where no gradient is recorded."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: Tensor,
        ln_weight: Tensor,
        ln_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        spec: NormLinearSpec,
        file: ModuleType,
    ) -> Any:
        flat = inp.reshape(-1, inp.shape[-1])
        normed, mean, rstdev = NormByName(spec.norm, file).forward(flat, ln_weight, ln_bias)
        weight = weight.to(spec.linear.dtype)
        y = _product(normed, weight, bias, spec.linear, file)
        if spec.returns_norm_output:
            normed = reshape_result(normed, inp.shape)
        if ctx is not None:
            ctx.save_for_backward(flat, ln_weight, mean, rstdev, normed, weight)
            ctx.spec, ctx.file, ctx.shape, ctx.dtypes = spec, file, inp.shape, _dtypes(weight, bias)
        y = reshape_result(y, (*leading_shape(tuple(inp.shape[:-1]), y.shape[0]), y.shape[-1]))
        return (y, normed) if spec.returns_norm_output else y

    @staticmethod
    @once_differentiable("LayerNormLinear")
    def backward(ctx, grad_output, grad_norm_output=None):
        inp, gamma, mean, rstdev, normed, weight = ctx.saved_tensors
        spec: NormLinearSpec = ctx.spec
        dy = grad_output.reshape(-1, grad_output.shape[-1])
        grads = _gradients(dy, normed.reshape(inp.shape), weight, spec.linear, ctx.file, ctx.dtypes)
        d_normed = grads.input
        if grad_norm_output is not None:
            also = grad_norm_output.reshape(inp.shape)
            d_normed = also if d_normed is None else d_normed + also
        if d_normed is None:
            return None, None, None, grads.weight, grads.bias, None, None
        dx, dgamma, dbeta = spec.norm.backward(d_normed, inp, mean, rstdev, gamma)
        dbeta = dbeta if ctx.needs_input_grad[2] else None
        return dx.view(ctx.shape), dgamma, dbeta, grads.weight, grads.bias, None, None


class GroupedLinearByName(Function, metaclass=ReplaceableFunction):
    """y [sum M_i, N] from GroupedLinear, weights before biases. ctx is None where no gradient is recorded."""

    @staticmethod
    def forward(
        ctx: Any, inp: Tensor, spec: Any, file: ModuleType, *weights_and_biases: Tensor
    ) -> Tensor:
        count = len(spec.rows)
        weights = [weight.to(spec.groups[0].dtype) for weight in weights_and_biases[:count]]
        biases = weights_and_biases[count:]
        parts = zip(inp.split(spec.rows), weights, biases, spec.groups, strict=True)
        y = torch.cat([_product(x, weight, bias, group, file) for x, weight, bias, group in parts])
        if ctx is not None:
            ctx.save_for_backward(inp, *weights)
            ctx.spec, ctx.file, ctx.dtypes = spec, file, _dtypes(weights_and_biases[0], biases[0])
        return y

    @staticmethod
    @once_differentiable("GroupedLinear")
    def backward(ctx, grad_output):
        inp, *weights = ctx.saved_tensors
        spec = ctx.spec
        parts = zip(
            grad_output.split(spec.rows), inp.split(spec.rows), weights, spec.groups, strict=True
        )
        grads = [
            _gradients(dy, x, weight, group, ctx.file, ctx.dtypes) for dy, x, weight, group in parts
        ]
        inputs = [grad.input for grad in grads if grad.input is not None]
        dx = torch.cat(inputs) if inputs else None
        return dx, None, None, *(grad.weight for grad in grads), *(grad.bias for grad in grads)


def call_by_name(function: Any, records: bool, *args: Any) -> Any:
    """Call function.apply(*args), or its forward where no gradient is recorded: other libraries replace either."""
    return function.apply(*args) if records else function.forward(None, *args)


def check_unquantized(spec: LinearSpec, replaced: set[str], layer: str) -> None:
    """Raise NotImplementedError if a replaced product would get quantized operands."""
    if not spec.is_unquantized:
        raise NotImplementedError(
            f"{', '.join(sorted(replaced))} of {layer}'s module is replaced, which supports unquantized products "
            "only; leave the autocast (or quantized parameters), or restore the original"
        )
