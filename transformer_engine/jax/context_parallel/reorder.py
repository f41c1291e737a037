"""Token distribution over ranks with equal shares of a causal triangle, and its inverse."""

from __future__ import annotations

import enum

import jax.numpy as jnp
import numpy as np
from jax import Array

from ...common.checks import integer, member, whole, whole_or_none
from ..runtime.checks import check_array


class ReorderStrategy(enum.Enum):
    """Chunks r and 2n - 1 - r out of 2n to rank r, or alternating stripes."""

    DualChunkSwap = 0
    Striped = 1


class CPStrategy(enum.Enum):
    """The exchange through which ranks with partial sequences attend to the full sequence."""

    DEFAULT = 0
    ALL_GATHER = 1
    RING = 2


def reorder_causal_load_balancing(
    tensor: Array,
    strategy: ReorderStrategy,
    cp_size: int,
    seq_dim: int,
    stripe_size: int | None = None,
) -> Array:
    """Reorder the tensor's sequence axis to the rank order.

    Args:
        tensor: The array whose axis `seq_dim` is reordered.
        strategy: How tokens are distributed over ranks.
        cp_size: Number of context-parallel ranks.
        seq_dim: Sequence axis.
        stripe_size: Tokens per stripe for the strategy Striped.
    """
    order = order_of_tokens(_extent(tensor, seq_dim), strategy, cp_size, stripe_size)
    return jnp.take(tensor, order, axis=seq_dim)


def inverse_reorder_causal_load_balancing(
    tensor: Array,
    strategy: ReorderStrategy,
    cp_size: int,
    seq_dim: int,
    stripe_size: int | None = None,
) -> Array:
    """Restore the tensor's original sequence order.

    Args:
        tensor: The array whose axis `seq_dim` is in rank order.

    The other arguments are as in `reorder_causal_load_balancing`.
    """
    order = order_of_tokens(_extent(tensor, seq_dim), strategy, cp_size, stripe_size)
    return jnp.take(tensor, np.argsort(order), axis=seq_dim)


def _extent(tensor: Array, seq_dim: int) -> int:
    check_array("tensor", tensor)
    integer("seq_dim", seq_dim)
    if not -tensor.ndim <= seq_dim < tensor.ndim:
        raise ValueError(
            f"seq_dim={seq_dim} of a tensor of shape {tensor.shape}; give the axis of its tokens"
        )
    return tensor.shape[seq_dim]


def order_of_tokens(
    length: int, strategy: ReorderStrategy, cp_size: int, stripe_size: int | None
) -> np.ndarray:
    """Token index at each place, for `length` tokens."""
    member("strategy", strategy, ReorderStrategy)
    whole("cp_size", cp_size)
    whole_or_none("stripe_size", stripe_size)
    if strategy is ReorderStrategy.DualChunkSwap:
        if stripe_size is not None:
            raise ValueError(
                f"stripe_size={stripe_size} belongs to Striped; give None with DualChunkSwap"
            )
        if cp_size % 2 and cp_size != 1:
            raise ValueError(
                f"cp_size={cp_size} is odd; DualChunkSwap needs an even number of ranks"
            )
        if length % (2 * cp_size):
            raise ValueError(
                f"the sequence has {length} tokens; pad it to a multiple of 2 * cp_size = {2 * cp_size}"
            )
        chunks = np.arange(length).reshape(2 * cp_size, -1)
        return np.concatenate(
            [chunks[[rank, 2 * cp_size - 1 - rank]].ravel() for rank in range(cp_size)]
        )
    stripe = 1 if stripe_size is None else stripe_size
    if length % (cp_size * stripe):
        raise ValueError(
            f"stripe_size={stripe_size} and {length} tokens; pad the tokens to a multiple of {cp_size * stripe}"
        )
    return np.arange(length).reshape(-1, cp_size, stripe).transpose(1, 0, 2).ravel()
