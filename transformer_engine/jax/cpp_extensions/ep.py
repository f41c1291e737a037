"""Expert-parallel settings and functions under NVIDIA's path; XLA's collectives exchange the tokens.

`ep_dispatch_fwd`, `ep_dispatch_bwd`, `ep_combine_fwd` and `ep_combine_bwd` are the passes of `ep_dispatch` and
`ep_combine` for callers that define their own gradient. NVIDIA's parameters are not documented, so that these
functions take those of `ep_dispatch` and `ep_combine`. Call them inside shard_map, where the expert axis is manual.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from ...common import absent
from ...common.checks import whole
from ..ep import (
    EpConfig,
    EpLayerConfig,
    check_sizes_of_bootstrap,
    ep_combine,
    ep_dispatch,
    ep_handle_mem_size,
    ep_prepare,
    get_ep_config,
    placement_of,
    reset_ep_config,
    set_ep_config,
)
from ..functions.ep_exchange import EpHandle, check_routed, returned, send_tokens, send_weights
from ..runtime.checks import check_instance, check_shaped, check_sizes, check_values

__all__ = [
    "EpConfig",
    "EpLayerConfig",
    "ep_combine",
    "ep_combine_bwd",
    "ep_combine_fwd",
    "ep_dispatch",
    "ep_dispatch_bwd",
    "ep_dispatch_fwd",
    "ep_handle_mem_size",
    "ep_prepare",
    "get_ep_config",
    "reset_ep_config",
    "set_ep_config",
]


def ep_dispatch_fwd(
    cfg: EpLayerConfig | EpConfig,
    handle_mem: EpHandle,
    topk_idx: Array,
    tokens: Array,
    topk_weights: Array,
    recv_capacity_per_rank: int,
) -> tuple[Array, Array]:
    """Send each token to its experts' devices by a routing from `ep_prepare`.

    Args:
        cfg: As in `ep_dispatch`.
        handle_mem: Routing that `ep_prepare` returned for topk_idx.
        topk_idx: As in `ep_dispatch`; its shape is checked, its values are in the routing.
        tokens: As in `ep_dispatch`.
        topk_weights: As in `ep_dispatch`.
        recv_capacity_per_rank: As in `ep_dispatch`.

    Returns:
        recv_tokens [capacity, H] and recv_topk_weights [capacity], as in `ep_dispatch`.

    Raises:
        ValueError: Shapes do not match, or sizes exceed the ep_bootstrap limits.
        TypeError: An argument has the wrong type.
        RuntimeError: cfg is an EpLayerConfig and ep_bootstrap was not called.
    """
    placement = placement_of(cfg)
    check_instance("handle_mem", handle_mem, EpHandle)
    check_routed(topk_idx, tokens, topk_weights)
    if handle_mem.sent.shape != topk_idx.shape:
        raise ValueError(
            f"topk_idx has shape {topk_idx.shape}, the routing of handle_mem {handle_mem.sent.shape}; call ep_prepare "
            "with the same topk_idx"
        )
    check_sizes_of_bootstrap(topk_idx.shape[0], recv_capacity_per_rank, tokens.shape[-1])
    return (
        send_tokens(placement, handle_mem, jnp.asarray(tokens), recv_capacity_per_rank),
        send_weights(placement, handle_mem, topk_weights, recv_capacity_per_rank),
    )


def ep_dispatch_bwd(
    cfg: EpLayerConfig | EpConfig,
    handle_mem: EpHandle,
    grad_recv_tokens: Array,
    grad_recv_topk_weights: Array,
) -> tuple[Array, Array]:
    """Compute the gradients for `ep_dispatch`'s tokens and topk_weights.

    Args:
        cfg: The config of the dispatch.
        handle_mem: The handle of the dispatch.
        grad_recv_tokens: Gradient of recv_tokens [capacity, H].
        grad_recv_topk_weights: Gradient of recv_topk_weights [capacity].

    Returns:
        grad_tokens [T, H], sums over each token's rows, accumulated in float32; grad_topk_weights [T, k].

    Raises:
        ValueError: Shapes do not match.
        TypeError: An argument has the wrong type.
        RuntimeError: cfg is an EpLayerConfig and ep_bootstrap was not called.
    """
    placement = placement_of(cfg)
    check_instance("handle_mem", handle_mem, EpHandle)
    _check_rows("grad_recv_tokens", grad_recv_tokens)
    check_shaped("grad_recv_topk_weights", grad_recv_topk_weights, grad_recv_tokens.shape[:1])
    rows = returned(placement, handle_mem, grad_recv_tokens)
    grad_tokens = rows.astype(jnp.float32).sum(axis=1).astype(grad_recv_tokens.dtype)
    return grad_tokens, returned(placement, handle_mem, grad_recv_topk_weights)


def ep_combine_fwd(
    cfg: EpLayerConfig | EpConfig,
    handle_mem: EpHandle,
    token_counts: Array,
    expert_out: Array,
    num_local_tokens: int,
) -> Array:
    """Send the experts' outputs back and sum them per token, as `ep_combine` without a sharding constraint.

    Args:
        cfg: As in `ep_combine`.
        handle_mem: As in `ep_combine`.
        token_counts: As in `ep_combine`.
        expert_out: As in `ep_combine`.
        num_local_tokens: As in `ep_combine`.

    Returns:
        Sums [T, H] in expert_out's dtype, accumulated in float32.
    """
    return ep_combine(cfg, handle_mem, token_counts, expert_out, num_local_tokens)


def ep_combine_bwd(
    cfg: EpLayerConfig | EpConfig,
    handle_mem: EpHandle,
    token_counts: Array,
    grad: Array,
    recv_capacity_per_rank: int,
) -> Array:
    """Compute the gradient for `ep_combine`'s expert_out [capacity, H]; rows that hold no token are zero.

    Args:
        cfg: The config of the dispatch.
        handle_mem: The handle of the dispatch.
        token_counts: The counts of the dispatch, int32 [local experts].
        grad: Gradient of the sums [T, H].
        recv_capacity_per_rank: Number of rows of expert_out.

    Raises:
        ValueError: grad does not have one row per token of the dispatch, or the counts exceed the capacity.
        TypeError: An argument has the wrong type.
        RuntimeError: cfg is an EpLayerConfig and ep_bootstrap was not called.
    """
    placement = placement_of(cfg)
    check_instance("handle_mem", handle_mem, EpHandle)
    _check_rows("grad", grad)
    whole("recv_capacity_per_rank", recv_capacity_per_rank)
    check_sizes("token_counts", token_counts, placement.local_experts, recv_capacity_per_rank)
    if grad.shape[0] != handle_mem.sent.shape[0]:
        raise ValueError(
            f"grad has {grad.shape[0]} rows; {handle_mem.sent.shape[0]} tokens were dispatched; pass one row per token"
        )
    rows = send_tokens(placement, handle_mem, grad, recv_capacity_per_rank)
    valid = jnp.arange(recv_capacity_per_rank) < token_counts.sum()
    return jnp.where(valid[:, None], rows, 0)


def _check_rows(name: str, rows: Array) -> None:
    """Raise an error unless a value is a floating-point matrix."""
    check_values(name, rows)
    if rows.ndim != 2:
        raise ValueError(
            f"{name} has shape {rows.shape}; pass a matrix, one row of H values per token"
        )


absent.install_getter(__name__)
