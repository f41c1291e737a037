"""Token dispatch to the ranks with their experts, and the sum over expert outputs, with gradients.

Both compose permutations and one exchange. The backward pass through the exchange is the reversed
exchange, so neither direction keeps tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..distributed.common_scale import payload_with_common_scale
from ..distributed.expert_parallel import ExpertRouting, Wire, exchange
from ..runtime.autograd import Function
from ..runtime.double_backward import once_differentiable
from ..tensor import QuantizedTensor
from ..tensor.quantizer import Quantizer
from ..tensor.storage.fsdp import gather_payload, join_payload
from .permutation import permute, unpermute


def dispatch(
    tokens: Tensor, weights: Tensor, routing: ExpertRouting, quantizer: Quantizer | None
) -> tuple[Tensor, Tensor]:
    """Send tokens and weights to the rows for their experts.

    Args:
        tokens: [T, H].
        weights: [T, k].
        routing: Token routing.
        quantizer: Quantizes the tokens before they are sent; None sends them unquantized.

    Returns:
        `(rows [R, H], row_weights [R])`. A row without a token is zero. The rows are quantized if the tokens are.
    """
    sent = tokens if quantizer is None else quantizer(tokens)
    slots = permute(sent, routing.sent, routing.slots_sent)[0]  # pyright: ignore[reportArgumentType]
    slot_weights = permute(weights, routing.sent, routing.slots_sent)[0]
    slots, slot_weights = _RowExchange.apply(routing.wire, slots, slot_weights)
    rows = permute(slots, routing.received, routing.rows)[0]
    row = routing.received.map.view(weights.shape[1], routing.slots_received).t().reshape(-1).long()
    # The last element collects weights for choices without a row.
    target = torch.where(row < 0, routing.rows, row)
    row_weights = weights.new_zeros(routing.rows + 1).scatter(0, target, slot_weights.reshape(-1))
    return rows, row_weights[: routing.rows]


def combine(rows: Tensor, routing: ExpertRouting, gradient_quantizer: Quantizer | None) -> Tensor:
    """Send expert rows [R, H] back and sum them per token, [T, H]; sums on each rank are rounded to the dtype.

    Args:
        rows: Expert outputs.
        routing: Dispatch routing.
        gradient_quantizer: Quantizes the gradient before the backward pass sends it; None sends it unquantized.
    """
    sums = unpermute(rows, routing.received)
    (slots,) = _RowExchange.apply(routing.wire.reversed(), sums)
    result = unpermute(slots, routing.sent)
    return (
        result
        if gradient_quantizer is None
        else _QuantizedGradient.apply(result, gradient_quantizer)
    )


def through_buffers(x: Tensor, result: Tensor | None, gradient: Tensor | None) -> Tensor:
    """Return x, written into the buffer `result`; the backward pass writes its gradient into the buffer `gradient`."""
    if result is None and gradient is None:
        return x
    return _ThroughBuffers.apply(x, _Buffers(result, gradient))


def exchange_any(parts: tuple[Tensor, ...], wire: Wire) -> list[Tensor]:
    """Exchange plain tensor rows, and row-wise codes and scales of quantized tensors."""
    plain: list[Tensor] = []
    rebuild: list[Callable[[list[Tensor]], Tensor]] = []
    for part in parts:
        start = len(plain)
        if isinstance(part, QuantizedTensor):
            rebuild.append(_sent_quantized(part, plain, wire))
            continue
        plain.append(part)
        rebuild.append(lambda received, start=start: received[start])
    received = exchange(plain, wire)
    return [make(received) for make in rebuild]


def _sent_quantized(
    part: QuantizedTensor, plain: list[Tensor], wire: Wire
) -> Callable[[list[Tensor]], Tensor]:
    """Append the codes and scales of a tensor to `plain`; return the function that joins the received ones."""
    storage: Any = part.as_storage().drop(columnwise=True)
    tensors, payload = payload_with_common_scale(*gather_payload(storage), wire.group)
    start, kind, dtype = len(plain), type(part), part.dtype
    plain.extend(tensors)

    def join(received: list[Tensor]) -> Tensor:
        return kind.from_storage(
            join_payload(received[start : start + len(tensors)], payload, dtype)
        )

    return join


class _RowExchange(Function):
    """Exchange for several tensors at once, so that all ranks call the collectives in the same order."""

    @staticmethod
    def forward(ctx: Any, wire: Wire, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.wire, ctx.dtypes = wire, [part.dtype for part in parts]
        return tuple(exchange_any(parts, wire))

    @staticmethod
    @once_differentiable("expert parallelism")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad[1:]
        sent = tuple(g for g, needed in zip(gradients, wanted, strict=True) if needed)
        returned = iter(exchange_any(sent, ctx.wire.reversed()))
        results = []
        for dtype, needed in zip(ctx.dtypes, wanted, strict=True):
            gradient = next(returned) if needed else None
            if isinstance(gradient, QuantizedTensor):
                gradient = gradient.dequantize(dtype=dtype)
            results.append(gradient)
        return None, *results


class _QuantizedGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer) -> Tensor:
        ctx.quantizer = quantizer
        return x.view_as(x)

    @staticmethod
    @once_differentiable("expert parallelism")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, None]:
        return ctx.quantizer(gradient), None


class _Buffers:
    """Caller-owned buffers, hidden from autograd."""

    def __init__(self, result: Tensor | None, gradient: Tensor | None):
        self.result, self.gradient = result, gradient


class _ThroughBuffers(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buffers: _Buffers) -> Tensor:
        ctx.buffers = buffers
        return _write_alias(x, buffers.result)

    @staticmethod
    @once_differentiable("expert parallelism")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _write_alias(gradient, ctx.buffers.gradient), None


def _write_alias(x: Tensor, buffer: Tensor | None) -> Tensor:
    """Copy x into a buffer and return its alias; without a buffer return an alias of x."""
    return x.view_as(x) if buffer is None else buffer.detach().copy_(x)
