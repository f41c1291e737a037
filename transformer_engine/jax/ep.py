"""Experts on several devices: tokens go to the device of their expert and come back.

Called inside shard_map, where the axis of experts is manual. Between GPUs lax.ragged_all_to_all moves only the rows
that there are; other platforms, which lack it, a dense all_to_all of the greatest possible size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..common.checks import described, integer, switch, whole
from .checks import check_dtype, check_values
from .permutation import aligned, room_for
from .sharding import mesh_resource_or_default, with_sharding_constraint

__all__ = ["EpConfig", "EpHandle", "ep_bootstrap", "ep_combine", "ep_dispatch", "ep_finalize"]


@dataclass(frozen=True)
class EpConfig:
    """What a dispatch is made for.

    axis       the mesh axis that experts are laid over
    devices    how many it has; each holds num_experts / devices of them, one behind the other
    """

    num_experts: int
    devices: int
    axis: str = "ep"

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.devices


class EpHandle(NamedTuple):
    """What the way back needs.

    sent      int32 [T, k]: place in the send buffer of every choice of a token
    arrived   int32 [devices * slots]: row of the receive buffer that every arrived slot went to, or behind it
    sizes     int32 [2, devices]: how many slots went to every device, and how many came from it
    """

    sent: Array
    arrived: Array
    sizes: Array


_sizes: dict[str, Any] = {}


def ep_bootstrap(
    world_size: int,
    rank: int,
    num_experts: int,
    max_tokens_per_rank: int,
    recv_capacity_per_rank: int,
    hidden_dim: int,
    max_token_dtype: Any = jnp.bfloat16,
    max_num_sms: int = 0,
    drop_on_overflow: bool = False,
) -> EpConfig:
    """Check sizes once and remember them, so that later calls are held to them; answers the config of those calls.

    The axis of experts is the ep_resource of the MeshResource in force, "ep" where there is none.
    max_num_sms        taken for compatibility: XLA's collectives take what they need
    drop_on_overflow   rows that pass recv_capacity_per_rank are dropped and counted; else they are too, and the
                       caller compares total_recv_tokens with the capacity
    """
    for name, value in (
        ("world_size", world_size), ("num_experts", num_experts), ("max_tokens_per_rank", max_tokens_per_rank),
        ("recv_capacity_per_rank", recv_capacity_per_rank), ("hidden_dim", hidden_dim),
    ):  # fmt: skip
        whole(name, value)
    integer("rank", rank)
    whole("max_num_sms", max_num_sms, 0)
    switch("drop_on_overflow", drop_on_overflow)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} of world_size={world_size}; give one from 0 to {world_size - 1}")
    if num_experts % world_size:
        raise ValueError(
            f"world_size={world_size} does not divide num_experts={num_experts}; every device holds as many"
        )
    if check_dtype("max_token_dtype", max_token_dtype) not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"max_token_dtype={described(max_token_dtype)}; give float32, bfloat16 or float16")
    if _sizes:
        raise RuntimeError(f"ep_bootstrap was called with {_sizes}; call ep_finalize first")
    _sizes.update(tokens=max_tokens_per_rank, capacity=recv_capacity_per_rank, hidden=hidden_dim)
    return EpConfig(num_experts, world_size, mesh_resource_or_default().ep_resource or "ep")


def ep_finalize() -> None:
    """Forget the sizes of ep_bootstrap."""
    _sizes.clear()


def ep_dispatch(
    cfg: EpConfig, topk_idx: Array, tokens: Array, topk_weights: Array, recv_capacity_per_rank: int
) -> tuple[Array, Array, EpHandle, Array, Array]:
    """(recv_tokens [capacity, H], recv_topk_weights [capacity], handle, token_counts, total_recv_tokens).

    tokens [T, H], topk_idx int [T, k] and topk_weights [T, k] of this device. Rows arrive sorted by local expert.
    token_counts int32 [local experts] counts the rows that fit; total_recv_tokens int32 [] all that were sent here.
    An index outside of [0, E) is no choice and goes nowhere. The experts of a token are different ones: of a device
    with fewer experts than k, choices that pass one for each of its experts may go nowhere either.
    """
    recv, recv_weights, handle, counts, total = dispatched(
        cfg, topk_idx, tokens, topk_weights, recv_capacity_per_rank
    )
    ends = jnp.minimum(jnp.cumsum(counts), recv_capacity_per_rank)
    counts = jnp.diff(ends, prepend=0).astype(jnp.int32)
    return recv, recv_weights, handle, counts, total


def dispatched(
    cfg: EpConfig,
    topk_idx: Array,
    tokens: Array,
    topk_weights: Array,
    recv_capacity_per_rank: int,
    align_size: int = 1,
) -> tuple[Array, Array, EpHandle, Array, Array]:
    """As `ep_dispatch`, but token_counts counts all rows that came.

    align_size   the rows of every expert begin at a multiple of it, with zeros between; there is room for
                 recv_capacity_per_rank tokens, however experts share them out
    """
    _check_arrays(topk_idx, tokens, topk_weights)
    _check_axis(cfg)
    count, picks = topk_idx.shape
    _check_sizes(count, recv_capacity_per_rank, tokens.shape[-1])
    room = room_for(recv_capacity_per_rank, cfg.local_experts, align_size)
    slots = count * min(picks, cfg.local_experts)
    chosen = (topk_idx >= 0) & (topk_idx < cfg.num_experts)
    device = jnp.where(chosen, topk_idx // cfg.local_experts, cfg.devices)
    place = _place_among(device.ravel(), cfg.devices + 1).reshape(count, picks)
    # Behind the buffer, where nothing is written, lies what goes nowhere; a place of another device would be its slot.
    sent = jnp.where(chosen & (place < slots), device * slots + place, cfg.devices * slots)
    filled = (cfg.devices * slots,)
    sources = jnp.broadcast_to(jnp.arange(count)[:, None], (count, picks)).ravel()
    source = jnp.full(filled, count, jnp.int32).at[sent.ravel()].set(sources.astype(jnp.int32), mode="drop")
    local = jnp.full(filled, cfg.local_experts, jnp.int32)
    local = local.at[sent.ravel()].set((topk_idx % cfg.local_experts).ravel().astype(jnp.int32), mode="drop")
    weights = jnp.zeros(filled, topk_weights.dtype).at[sent.ravel()].set(topk_weights.ravel(), mode="drop")
    rows = jnp.asarray(tokens).at[source].get(mode="fill", fill_value=0)
    sizes = _sizes_of(device, slots, cfg)
    rows, weights = (_exchanged(x, sizes, 0, cfg) for x in (rows, weights))
    local = _exchanged(local, sizes, cfg.local_experts, cfg)
    counts = jnp.bincount(local, length=cfg.local_experts + 1).astype(jnp.int32)
    padded = aligned(counts, align_size)
    order = jnp.argsort(local, stable=True)
    slot = jnp.arange(order.size, dtype=jnp.int32)
    offsets = (jnp.cumsum(padded) - padded) - (jnp.cumsum(counts) - counts)
    arrived = jnp.zeros_like(slot).at[order].set(slot) + offsets[local]
    arrived = jnp.where(local < cfg.local_experts, arrived, room)
    inside = jnp.full(room, order.size, jnp.int32).at[arrived].set(slot, mode="drop")
    recv, recv_weights = (x.at[inside].get(mode="fill", fill_value=0) for x in (rows, weights))
    counts = counts[:-1]
    return recv, recv_weights, EpHandle(sent, arrived, sizes), counts, counts.sum()


def ep_combine(
    cfg: EpConfig,
    handle_mem: EpHandle,
    token_counts: Array,
    expert_out: Array,
    num_local_tokens: int,
    out_sharding: Any = None,
) -> Array:
    """out [T, H]: the sum of the rows that the experts made of a token; rows that were dropped count as zero."""
    if handle_mem.sent.shape[0] != num_local_tokens:
        raise ValueError(
            f"num_local_tokens={num_local_tokens}; {handle_mem.sent.shape[0]} tokens were dispatched"
        )
    valid = jnp.arange(expert_out.shape[0]) < token_counts.sum()
    found = returned(cfg, handle_mem, jnp.where(valid[:, None], expert_out, 0))
    return with_sharding_constraint(
        found.astype(jnp.float32).sum(axis=1).astype(expert_out.dtype), out_sharding
    )


def returned(cfg: EpConfig, handle: EpHandle, expert_out: Array) -> Array:
    """[T, k, H]: the row that every choice of a token was made into; zeros of a choice that went nowhere."""
    made = expert_out.at[handle.arrived].get(mode="fill", fill_value=0)
    back = _exchanged(made, handle.sizes[::-1], 0, cfg)
    return back.at[handle.sent].get(mode="fill", fill_value=0)


def _sizes_of(device: Array, slots: int, cfg: EpConfig) -> Array:
    """int32 [2, devices]: how many choices of experts go to every device, and how many came from it."""
    out = (device.ravel() == jnp.arange(cfg.devices)[:, None]).sum(axis=1, dtype=jnp.int32)
    out = jnp.minimum(out, slots)
    back = out if cfg.devices == 1 else lax.all_to_all(out, cfg.axis, 0, 0, tiled=True)
    return jnp.stack((out, back))


def _exchanged(x: Array, sizes: Array, empty: int, cfg: EpConfig) -> Array:
    """Slots [devices * slots, ..]: the first of those for device d go there, those of device d come at its place.

    sizes   int32 [2, devices], how many go and come; the slots behind them are `empty` at both ends
    """
    if cfg.devices == 1:
        return x
    slots = x.shape[0] // cfg.devices

    def dense(x: Array, sizes: Array) -> Array:
        parts = x.reshape(cfg.devices, slots, *x.shape[1:])
        return lax.all_to_all(parts, cfg.axis, split_axis=0, concat_axis=0).reshape(x.shape)

    def ragged(x: Array, sizes: Array) -> Array:
        starts = jnp.arange(cfg.devices, dtype=jnp.int32) * slots
        # At every receiver the place of this device.
        there = jnp.full(cfg.devices, lax.axis_index(cfg.axis) * slots, jnp.int32)
        return lax.ragged_all_to_all(
            x, jnp.full(x.shape, empty, x.dtype), starts, sizes[0], there, sizes[1], axis_name=cfg.axis
        )

    return lax.platform_dependent(x, sizes, cuda=ragged, default=dense)


def _place_among(kinds: Array, count: int) -> Array:
    """int32: how many earlier elements are of the same kind."""
    same = jax.nn.one_hot(kinds, count, dtype=jnp.int32)
    return jnp.take_along_axis(jnp.cumsum(same, axis=0), kinds[:, None], axis=1)[:, 0] - 1


def _check_arrays(topk_idx: Array, tokens: Array, topk_weights: Array) -> None:
    check_values("tokens", tokens)
    if not jnp.issubdtype(topk_idx.dtype, jnp.integer):
        raise TypeError(
            f"topk_idx is {described(topk_idx)}; it must hold whole numbers, the experts of every token"
        )
    agree = topk_idx.ndim == tokens.ndim == 2 and topk_idx.shape[0] == tokens.shape[0]
    if not agree or topk_weights.shape != topk_idx.shape:
        raise ValueError(
            f"tokens {tokens.shape}, topk_idx {topk_idx.shape}, topk_weights {topk_weights.shape}; give [T, H], [T, k] "
            "and [T, k]"
        )


def _check_axis(cfg: EpConfig) -> None:
    """ValueError unless the axis of experts is manual here and has the devices that the config was made for."""
    if cfg.devices == 1:
        return
    try:
        found = lax.axis_size(cfg.axis)
    except NameError as error:
        raise ValueError(
            f"axis={cfg.axis!r} of the EpConfig is not manual here; call inside shard_map over a mesh with that axis, "
            "or bootstrap within autocast(mesh_resource=MeshResource(ep_resource=..)), which names it"
        ) from error
    if found != cfg.devices:
        raise ValueError(f"axis {cfg.axis!r} has {found} devices; ep_bootstrap was called for {cfg.devices}")


def _check_sizes(tokens: int, capacity: int, hidden: int) -> None:
    whole("recv_capacity_per_rank", capacity)
    for name, value, key in (
        ("tokens", tokens, "tokens"), ("recv_capacity_per_rank", capacity, "capacity"), ("hidden", hidden, "hidden"),
    ):  # fmt: skip
        if _sizes and value > _sizes[key]:
            raise ValueError(
                f"{name}={value}; ep_bootstrap was called for at most {_sizes[key]}; call ep_finalize, then "
                f"ep_bootstrap for {value}"
            )
