"""Expert parallelism: tokens are sent to the ranks of their experts, and the experts' outputs are sent back.

Call `ep_bootstrap` once per process, make one `EpBuffer` for each dispatch in flight, and call `ep_dispatch`, the
experts and `ep_combine`. All ranks in the group make the same calls in the same order, forward and backward, also ranks
without tokens. Rows travel through `torch.distributed.all_to_all_single` on any backend (NCCL, gloo, threads).

Without `recv_capacity_per_rank` (eager mode) the host waits once per dispatch for the sizes, and only filled rows
travel. With it no call waits for the device, so that a CUDA graph can capture the calls. The exchange then has a fixed
size: for each rank `max_tokens_per_rank` rows, or recv_capacity_per_rank if that is less.

Under `torch.compile` the functions run eagerly between compiled parts; `fullgraph=True` raises torch's error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...common import absent
from ...common.checks import whole_or_none
from ...common.numbers import with_article
from ..distributed.symmetric_memory import is_symm_backed, release_symm_mem_pool, symm_mem_alloc
from ..functions.expert_exchange import combine, dispatch, through_buffers
from ..runtime.checks import floating, same_device, tensor
from ..runtime.tracing import run_eagerly
from ..tensor import QuantizedTensor
from .buffer import EpBuffer, check_buffer, ep_prepare, exchange_routing
from .settings import ep_bootstrap, ep_finalize, is_ep_bootstrapped

__all__ = [
    "EpBuffer",
    "ep_bootstrap",
    "ep_combine",
    "ep_dispatch",
    "ep_finalize",
    "ep_prepare",
    "is_ep_bootstrapped",
    "is_symm_backed",
    "release_symm_mem_pool",
    "symm_mem_alloc",
]

if TYPE_CHECKING:
    _BOOTSTRAPPED: bool

# Megatron-core reads _BOOTSTRAPPED, which is the function's result.
absent.install_getter(__name__, {"_BOOTSTRAPPED": is_ep_bootstrapped})


@run_eagerly(
    "expert parallelism exchanges tokens between ranks, in numbers that are read on the host"
)
def ep_dispatch(
    buffer: EpBuffer,
    tokens: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    *,
    recv_tokens: Tensor | None = None,
    recv_topk_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Send each token to the ranks of its experts.

    Rows are ordered by local expert, then by rank, token and choice. Each expert's rows are padded with zeros
    to a multiple of the buffer's alignment; unused receive buffer rows are zero. Backward: a token's gradient
    is the sum over its rows, without weights; topk_weights receives recv_topk_weights's gradient.

    Args:
        buffer: Dispatch buffer.
        tokens: Tokens of this rank [T, H], or [.., H] with T leading elements, of a floating-point dtype.
        topk_idx: Experts of the tokens, as in `ep_prepare`.
        topk_weights: Expert weights per token, float32 [T, k].
        recv_tokens: Buffer [R, H] in the tokens' dtype that receives the rows; the result shares
            its memory. Only with recv_capacity_per_rank and without dispatch_fwd_quant_recipe.
        recv_topk_weights: Buffer float32 [R] that receives the weights; the result shares its memory. Only with
            recv_capacity_per_rank.

    Returns:
        `(recv_tokens [R, H], recv_topk_weights [R], tokens_per_expert [num_local_experts])`. R is
        recv_capacity_per_rank, or in eager mode the received row count. With
        dispatch_fwd_quant_recipe recv_tokens is one quantized tensor with all experts' rows.

    Raises:
        TypeError: An argument has another type, or topk_weights is not float32.
        ValueError: A shape or device does not match, receive buffers are passed in eager mode, or
            the arguments of another rank are invalid. Then every rank raises an error.
        NotImplementedError: tokens are quantized.
        RuntimeError: As in `ep_prepare`.
    """
    check_buffer(buffer)

    def check() -> None:
        _check_tokens(buffer, topk_idx, tokens, topk_weights)
        _check_receive_buffers(buffer, tokens, recv_tokens, recv_topk_weights)

    routing = exchange_routing(buffer, topk_idx, check)
    rows, row_weights = dispatch(
        tokens.reshape(-1, buffer.hidden_dim),
        topk_weights.reshape(-1, buffer.top_k),
        routing,
        buffer._dispatch_quantizer,
    )
    rows = through_buffers(rows, recv_tokens, None)
    return rows, through_buffers(row_weights, recv_topk_weights, None), routing.tokens_per_expert


def _check_tokens(buffer: EpBuffer, topk_idx: Tensor, tokens: Tensor, weights: Tensor) -> None:
    """Raise an error for tokens or weights that do not fit the buffer and the expert ids."""
    floating("tokens", tokens)
    if isinstance(tokens, QuantizedTensor):
        raise NotImplementedError(
            f"tokens is {with_article(type(tokens))}; pass plain tokens, and dispatch_fwd_quant_recipe to EpBuffer"
        )
    tensor("topk_weights", weights)
    if weights.dtype != torch.float32:
        raise TypeError(
            f"topk_weights is {weights.dtype}; pass float32, for example topk_weights.float()"
        )
    if weights.shape != topk_idx.shape:
        raise ValueError(
            f"topk_weights is {list(weights.shape)}; pass the shape of topk_idx, {list(topk_idx.shape)}"
        )
    if tokens.dim() < 2 or tokens.shape[-1] != buffer.hidden_dim:
        raise ValueError(
            f"tokens are {list(tokens.shape)}; pass [T, {buffer.hidden_dim}], hidden_dim of the EpBuffer"
        )
    if tokens.numel() // buffer.hidden_dim != topk_idx.numel() // buffer.top_k:
        raise ValueError(
            f"tokens are {list(tokens.shape)}, topk_idx is {list(topk_idx.shape)}; pass one row of topk_idx per token"
        )
    for name, value in (("tokens", tokens), ("topk_weights", weights)):
        same_device(name, value, "topk_idx", topk_idx.device)


def _check_receive_buffers(
    buffer: EpBuffer, tokens: Tensor, rows: Tensor | None, weights: Tensor | None
) -> None:
    capacity = buffer.recv_capacity_per_rank
    shapes = {"recv_tokens": (capacity, buffer.hidden_dim), "recv_topk_weights": (capacity,)}
    dtypes = {"recv_tokens": getattr(tokens, "dtype", None), "recv_topk_weights": torch.float32}
    for (name, shape), receive_buffer in zip(shapes.items(), (rows, weights), strict=True):
        if receive_buffer is None:
            continue
        tensor(name, receive_buffer)
        if capacity is None:
            raise ValueError(
                f"{name} requires a fixed number of rows; pass recv_capacity_per_rank to ep_bootstrap"
            )
        if tuple(receive_buffer.shape) != shape or receive_buffer.dtype != dtypes[name]:
            raise ValueError(
                f"{name} is {receive_buffer.dtype} {list(receive_buffer.shape)}; pass {dtypes[name]} {list(shape)}"
            )
    if rows is not None and buffer._dispatch_quantizer is not None:
        raise ValueError(
            "recv_tokens does not hold quantized rows; leave it out with dispatch_fwd_quant_recipe"
        )


@run_eagerly(
    "expert parallelism exchanges tokens between ranks, in numbers that are read on the host"
)
def ep_combine(
    buffer: EpBuffer,
    expert_out: Tensor,
    *,
    num_local_tokens: int | None = None,
    grad_out: Tensor | None = None,
) -> Tensor:
    """Send the experts' outputs back and sum the k rows of each token, without weights.

    The rows of a token on one rank are summed in float32 and sent in the dtype of expert_out; the
    sums from all ranks are added in float32. Rows without a token do not contribute. Backward: each
    row receives the gradient of its token, and the other rows zero.

    Args:
        buffer: Buffer from the last `ep_dispatch`, whose routing is reversed.
        expert_out: Expert outputs [R, H], multiplied by recv_topk_weights by the caller.
        num_local_tokens: Result rows; rows beyond the dispatched tokens are zero. None for max_tokens_per_rank.
        grad_out: Buffer [R, H] in the dtype of expert_out that receives its gradient.

    Returns:
        Sums [num_local_tokens, H] in token order.

    Raises:
        RuntimeError: `ep_dispatch` or `ep_prepare` was not called with this buffer.
        TypeError: An argument has another type.
        ValueError: expert_out or grad_out has another shape.
    """
    check_buffer(buffer)
    routing = buffer._routing
    if routing is None:
        raise RuntimeError(
            "ep_combine reverses a dispatch; call ep_dispatch with this buffer first"
        )
    whole_or_none("num_local_tokens", num_local_tokens, 0)
    floating("expert_out", expert_out)
    if isinstance(expert_out, QuantizedTensor):
        raise TypeError(
            f"expert_out is {with_article(type(expert_out))}, whose rows cannot be summed; dequantize() it"
        )
    shape = (routing.rows, buffer.hidden_dim)
    if tuple(expert_out.shape) != shape:
        raise ValueError(
            f"expert_out is {list(expert_out.shape)}; pass one output per received row, {list(shape)}"
        )
    if grad_out is not None:
        tensor("grad_out", grad_out)
        if tuple(grad_out.shape) != shape or grad_out.dtype != expert_out.dtype:
            raise ValueError(
                f"grad_out is {grad_out.dtype} {list(grad_out.shape)}; pass {expert_out.dtype} {list(shape)}"
            )
    sums = combine(through_buffers(expert_out, None, grad_out), routing, buffer._gradient_quantizer)
    rows = buffer.max_tokens_per_rank if num_local_tokens is None else num_local_tokens
    missing = rows - sums.shape[0]
    return torch.nn.functional.pad(sums, (0, 0, 0, missing)) if missing > 0 else sums[:rows]
