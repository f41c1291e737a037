"""All-to-all: ranks exchange heads for tokens, so that each computes all tokens for its part of the heads.

The exchange is a differentiable permutation around an unmodified attention, which therefore supports everything that
the attention supports. Tensors that belong to heads (sinks, slopes, a bias) are divided in the same way: rank j of n
computes the heads [j h / n, (j + 1) h / n).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ....distributed.faults import check_backward
from ....primitives.attention.call import AttentionCall, AttentionInputs
from ....runtime.autograd import Function
from ....runtime.double_backward import once_differentiable, transposed
from .groups import ContextGroups, all_gather, all_to_all, reduce_scatter
from .layout import TokenOrder


class HeadExchange:
    """The exchange of one call.

    Args:
        call: Attention over the whole sequence.
        groups: The rank's groups.
        bounds: Packed sequences: cumulative query and key lengths [b + 1] over all ranks in the exchange.
    """

    def __init__(
        self,
        call: AttentionCall,
        groups: ContextGroups,
        bounds: tuple[Tensor | None, Tensor | None],
    ):
        self.call = call
        self.group, self.size, self.rank = groups.heads_group, groups.heads_size, groups.heads_rank
        self.queries = TokenOrder(call.q_format, self.size, bounds[0])
        self.keys = TokenOrder(call.kv_format, self.size, bounds[1])
        self.orders = (self.queries, self.keys, self.keys)

    def enter(self, inputs: AttentionInputs) -> AttentionInputs:
        """Return the tensors of this rank's heads, for all tokens in the group."""
        q, k, v = _Exchange.apply(self, self.orders, True, inputs.q, inputs.k, inputs.v)
        return self.enter_others(inputs)._replace(q=q, k=k, v=v)

    def enter_others(self, inputs: AttentionInputs) -> AttentionInputs:
        """Return the inputs with the mask, bias, slopes and sink parts that belong to this rank's heads."""
        masked = inputs.masked
        if masked is not None:
            if masked.dim() >= 2 and masked.shape[-2] != 1:
                masked = self._gather_rows(masked)
            if masked.dim() >= 3:
                masked = self._own_heads(masked, masked.dim() - 3)
        bias = inputs.bias
        if bias is not None:
            bias = _Shared.apply(self, bias.shape[-2] != 1, bias)
            bias = self._own_heads(bias, 1)
        slopes = inputs.slopes
        if slopes is not None:
            slopes = self._own_heads(slopes, slopes.dim() - 1).contiguous()
        sink = inputs.sink
        if sink is not None:
            sink = self._own_heads(_Shared.apply(self, False, sink), 0).contiguous()
        return inputs._replace(masked=masked, bias=bias, slopes=slopes, sink=sink)

    def leave(self, output: Tensor) -> Tensor:
        """Return the output [.., h * d_v] for this rank's tokens and all heads."""
        heads = self.call.heads // self.size
        (output,) = _Exchange.apply(self, (self.queries,), False, output.unflatten(-1, (heads, -1)))
        return output.flatten(-2)

    def all_heads(self, x: Tensor) -> Tensor:
        """Gather [h] from each rank's [h / n]."""
        return all_gather(x, self.group, self.size)().flatten(0, 1)

    def _own_heads(self, x: Tensor, axis: int) -> Tensor:
        return x if x.shape[axis] == 1 != self.call.heads else x.chunk(self.size, axis)[self.rank]

    def _gather_rows(self, x: Tensor) -> Tensor:
        """Gather the rows [.., s_q, s_kv] on all ranks for a tensor that has the rank's queries as rows."""
        parts = all_gather(x.movedim(-2, 0), self.group, self.size)()
        return TokenOrder("sbhd", self.size).whole(parts).movedim(0, -2)


class OwnHeads:
    """A score_mod that is called with this rank's head numbers among all heads."""

    def __init__(self, score_mod: Callable[..., Tensor], first: int):
        self._key = (score_mod, first)
        # a backend chooses by it, see Feature.SCORE_MOD_BPROP
        self.bprop = getattr(score_mod, "bprop", None)

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score_mod, first = self._key
        return score_mod(score, b, h + first, i, j)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnHeads) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def exchange_tokens(
    exchange: HeadExchange,
    orders: tuple[TokenOrder, ...],
    to_heads: bool,
    tensors: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """Exchange tokens for heads, or heads for tokens; transfers are under way while the next tensor is packed."""
    size, pending = exchange.size, []
    for order, x in zip(orders, tensors, strict=True):
        if to_heads:
            parts = x.unflatten(-2, (size, -1)).movedim(-3, 0)
        else:
            parts = order.parts(x)
        pending.append(all_to_all(parts, exchange.group))
    if to_heads:
        return tuple(order.whole(wait()) for order, wait in zip(orders, pending, strict=True))
    return tuple(wait().movedim(0, -3).flatten(-3, -2) for wait in pending)


class _Exchange(Function):
    """Autograd node for the exchange, a permutation over the elements of all ranks."""

    OPERATION = "context-parallel attention"

    @staticmethod
    def forward(
        ctx: Any,
        exchange: HeadExchange,
        orders: tuple[TokenOrder, ...],
        to_heads: bool,
        *tensors: Tensor,
    ) -> Any:
        ctx.exchange, ctx.orders, ctx.to_heads = exchange, orders, to_heads
        return exchange_tokens(exchange, orders, to_heads, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        exchange, orders, to_heads = ctx.exchange, ctx.orders, ctx.to_heads
        if not to_heads:
            check_backward(exchange.group, grads[0])

        def back(*grads: Tensor) -> tuple[Tensor, ...]:
            return exchange_tokens(exchange, orders, not to_heads, grads)

        def there(*tensors: Tensor) -> tuple[Tensor, ...]:
            return exchange_tokens(exchange, orders, to_heads, tensors)

        found = transposed(back, there, *grads)
        return None, None, None, *(found if isinstance(found, tuple) else (found,))


class _Shared(Function):
    """A bias, its rows gathered, or a sink that all ranks hold; the gradient is summed over the ranks."""

    OPERATION = "context-parallel attention"

    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, gathers_rows: bool, x: Tensor) -> Tensor:
        ctx.exchange, ctx.gathers_rows = exchange, gathers_rows
        return exchange._gather_rows(x) if gathers_rows else x.view_as(x)

    @staticmethod
    @once_differentiable("context-parallel attention")
    def backward(ctx: Any, grad: Tensor) -> Any:
        exchange, total = ctx.exchange, grad.float()
        if ctx.gathers_rows:
            parts = TokenOrder("sbhd", exchange.size).parts(total.movedim(-2, 0))
            total = reduce_scatter(parts, exchange.group).movedim(0, -2)
        else:
            dist.all_reduce(total, group=exchange.group)
        return None, None, total.to(grad.dtype)
