"""loss = mean(cross_entropy(hidden [M, K] @ weight [V, K].T + bias [V], target [M])), never holding [M, V] logits.

Rows go through in chunks: logits of a chunk, its losses, their gradient in place of the logits, and from it the chunk's
part of every gradient, all in the forward pass. The backward multiplies by the gradient of the loss, one number. A loss
a row has M numbers to multiply by, unknown beforehand: its logits are made again, chunk by chunk, in the backward.

The gradient of the weight is added up in float32, four bytes an element; so is that of the bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import Function

from ...common.labels import Labels
from ..primitives.column_sums import column_sums
from ..primitives.cross_entropy import cross_entropy_gradient
from ..primitives.gemm import Epilogue, gemm, plain
from ..runtime.double_backward import once_differentiable
from .cross_entropy import CrossEntropy, counted, row_losses

_CHUNKS = 24  # a chunk has at most this part of the rows, 4.2 %: of 8192 rows 320
_FEWEST_ROWS = 16
_TILE = 64  # rows that a product's tile has at least: chunks are whole tiles


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, labels: Labels, mean: bool
) -> Tensor:
    """float32 [] or, without mean, [M]; hidden, weight and bias of one dtype, targets int64 [M]."""
    function = _Mean if mean else _Rows
    return function.apply(hidden, weight, bias, targets, labels)  # pyright: ignore[reportReturnType]


def chunk_rows(rows: int) -> int:
    """How many rows go through together."""
    part = rows // _CHUNKS
    return part // _TILE * _TILE if part >= _TILE else max(part, _FEWEST_ROWS)


@dataclass
class _Gradients:
    """What chunks add to; None: nobody asks."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def wanted(cls, ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> _Gradients:
        """Those of the function's first three inputs that need one; weight and bias as zeros of float32."""
        of_hidden, of_weight, of_bias, *_ = ctx.needs_input_grad
        return cls(
            torch.empty_like(hidden) if of_hidden else None,
            torch.zeros_like(weight, dtype=torch.float32) if of_weight else None,
            torch.zeros_like(bias, dtype=torch.float32) if of_bias and bias is not None else None,
        )

    def add(self, rows: slice, grad_logits: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """The part of one chunk: grad_logits [m, V] and hidden [m, K]."""
        if self.hidden is not None:
            into = Epilogue(hidden.dtype, out=self.hidden[rows])
            gemm(plain(grad_logits), plain(weight.t()), into)
        if self.weight is not None:
            added = Epilogue(torch.float32, out=self.weight, accumulate=True)
            gemm(plain(grad_logits.t()), plain(hidden.t()), added)
        if self.bias is not None:
            self.bias += column_sums(grad_logits, torch.float32)

    def results(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        """In the dtypes of the inputs."""
        of_weight = None if self.weight is None else self.weight.to(weight.dtype)
        self.weight = None
        of_bias = None if self.bias is None or bias is None else self.bias.to(bias.dtype)
        return self.hidden, of_weight, of_bias


class _Mean(Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, labels):
        count = counted(targets, labels)
        gradients = _Gradients.wanted(ctx, hidden, weight, bias)
        differentiated = any(ctx.needs_input_grad)
        total = torch.zeros(1, dtype=torch.float32, device=hidden.device)
        factor = 1.0 / count
        for rows, logits in _chunks(hidden, weight, bias):
            losses, statistics = row_losses(logits, targets[rows], CrossEntropy(labels))
            total += losses.sum()
            if differentiated:
                of_logits = cross_entropy_gradient(logits, targets[rows], statistics, factor, labels, True)
                gradients.add(rows, of_logits, hidden[rows], weight)
        ctx.save_for_backward(*gradients.results(weight, bias))
        return (total / count)[0]

    @staticmethod
    @once_differentiable("fused_linear_cross_entropy")
    def backward(ctx, grad_loss):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors
        # The product is rounded once more: the gradient of a mean is multiplied by 1 as a rule.
        return *(None if grad is None else grad * grad_loss.to(grad.dtype) for grad in saved), None, None


class _Rows(Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, labels):
        parts = [
            row_losses(logits, targets[rows], CrossEntropy(labels))
            for rows, logits in _chunks(hidden, weight, bias)
        ]
        ctx.save_for_backward(hidden, weight, bias, targets, torch.cat([part[1] for part in parts]))
        ctx.labels = labels
        return torch.cat([part[0] for part in parts])

    @staticmethod
    @once_differentiable("fused_linear_cross_entropy")
    def backward(ctx, grad_loss):  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, targets, statistics = ctx.saved_tensors
        factors = grad_loss.to(torch.float32).contiguous()
        gradients = _Gradients.wanted(ctx, hidden, weight, bias)
        for rows, logits in _chunks(hidden, weight, bias):
            facts = (targets[rows], statistics[rows], factors[rows])
            of_logits = cross_entropy_gradient(logits, *facts, ctx.labels, True)
            gradients.add(rows, of_logits, hidden[rows], weight)
        return *gradients.results(weight, bias), None, None


def _chunks(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their logits [m, V] in hidden's dtype), chunk after chunk, in one buffer."""
    total = hidden.shape[0]
    most = min(chunk_rows(total), total)
    buffer = hidden.new_empty(most, weight.shape[0])
    for start in range(0, total, most):
        rows = slice(start, min(start + most, total))
        logits = buffer[: rows.stop - start]
        yield rows, gemm(plain(hidden[rows]), plain(weight), Epilogue(hidden.dtype, bias, logits))
