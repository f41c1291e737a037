"""Token exchange between the experts' devices.

GPUs exchange only the filled rows with lax.ragged_all_to_all. Other platforms lack that operation and exchange whole
buffers with a dense all_to_all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..permutation import align_counts, sufficient_rows
from ..runtime.checks import check_array, check_integers, check_values


@dataclass(frozen=True)
class EpConfig:
    """Expert placement on devices.

    Attributes:
        num_experts: Number of experts on all devices.
        devices: Number of devices along the axis. Each holds num_experts / devices consecutive experts.
        axis: Mesh axis over which the experts are sharded.
    """

    num_experts: int
    devices: int
    axis: str = "ep"

    def __post_init__(self) -> None:
        """Raise ValueError unless every device holds the same positive number of experts."""
        if self.devices < 1 or self.num_experts < 1 or self.num_experts % self.devices:
            raise ValueError(
                f"num_experts={self.num_experts} on devices={self.devices}; give a positive multiple of devices"
            )

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.devices


class EpHandle(NamedTuple):
    """Routing for one dispatch, which `ep_combine` reverses.

    Attributes:
        sent: int32 [T, k], send-buffer slot for each token's choices.
        arrived: int32 [devices * slots], receive-buffer row for each received slot. A row past the end of
            the buffer marks a dropped slot, the largest int32 an empty one.
        sizes: int32 [2, devices], number of slots sent to each device and received from each device.

    A send buffer has `slots` = T * min(k, local experts) slots per device; a slot carries one token to one expert.
    """

    sent: Array
    arrived: Array
    sizes: Array


def planned(cfg: EpConfig, topk_idx: Array, align_size: int = 1) -> tuple[EpHandle, Array]:
    """Exchange the routing for choices [T, k].

    Args:
        cfg: Expert placement.
        topk_idx: As in `ep_dispatch`.
        align_size: The rows of each expert start at a multiple of this number.

    Returns:
        The routing, and the tokens of each local expert, int32 [local experts], including dropped ones.
    """
    check_integers("topk_idx", topk_idx)
    _check_axis(cfg)
    count, picks = topk_idx.shape
    slots = count * min(picks, cfg.local_experts)
    chosen = (topk_idx >= 0) & (topk_idx < cfg.num_experts)
    device = jnp.where(chosen, topk_idx // cfg.local_experts, cfg.devices)
    # The place of each choice in its device's block: the number of earlier choices for the same device.
    flat_device = device.ravel()
    one_hot = jax.nn.one_hot(flat_device, cfg.devices + 1, dtype=jnp.int32)
    place = (
        jnp.take_along_axis(jnp.cumsum(one_hot, axis=0), flat_device[:, None], axis=1)[:, 0] - 1
    ).reshape(count, picks)
    # Choices that are not sent get an index past the end, which scatter drops; any other index is a slot in use.
    sent = jnp.where(chosen & (place < slots), device * slots + place, cfg.devices * slots)
    expert = jnp.full(cfg.devices * slots, cfg.local_experts, jnp.int32)
    expert = expert.at[sent.ravel()].set(
        (topk_idx % cfg.local_experts).ravel().astype(jnp.int32), mode="drop"
    )
    # Slot counts sent to each device and received from each device, int32 [2, devices].
    sent_sizes = (device.ravel() == jnp.arange(cfg.devices)[:, None]).sum(axis=1, dtype=jnp.int32)
    sent_sizes = jnp.minimum(sent_sizes, slots)
    received_sizes = (
        sent_sizes if cfg.devices == 1 else lax.all_to_all(sent_sizes, cfg.axis, 0, 0, tiled=True)
    )
    sizes = jnp.stack((sent_sizes, received_sizes))
    expert = _exchange(expert, sizes, cfg.local_experts, cfg)
    counts = jnp.bincount(expert, length=cfg.local_experts + 1).astype(jnp.int32)
    padded = align_counts(counts, align_size)
    order = jnp.argsort(expert, stable=True)
    slot = jnp.arange(order.size, dtype=jnp.int32)
    offsets = (jnp.cumsum(padded) - padded) - (jnp.cumsum(counts) - counts)
    arrived = jnp.zeros_like(slot).at[order].set(slot) + offsets[expert]
    arrived = jnp.where(expert < cfg.local_experts, arrived, jnp.iinfo(jnp.int32).max)
    return EpHandle(sent, arrived, sizes), counts[:-1]


def dispatch_tokens(
    cfg: EpConfig,
    topk_idx: Array,
    tokens: Array,
    topk_weights: Array,
    capacity: int,
    align_size: int = 1,
    rows_of_buffer: int | None = None,
) -> tuple[Array, Array, EpHandle, Array, Array]:
    """Dispatch as `ep.ep_dispatch`, with token_counts that include dropped rows and exclude alignment.

    Args:
        cfg: Expert placement.
        topk_idx: As in `ep_dispatch`.
        tokens: As in `ep_dispatch`.
        topk_weights: As in `ep_dispatch`.
        capacity: Number of tokens that the receive buffer holds at least; used only if rows_of_buffer is None.
        align_size: Each expert's rows start at a multiple of this number, with zeros in between.
        rows_of_buffer: Receive-buffer rows. By default the buffer holds `capacity` tokens for any
            distribution over the experts.

    Returns:
        As `ep_dispatch`.
    """
    check_routed(topk_idx, tokens, topk_weights)
    rows = rows_of_buffer or sufficient_rows(capacity, cfg.local_experts, align_size)
    handle, counts = planned(cfg, topk_idx, align_size)
    recv = send_tokens(cfg, handle, jnp.asarray(tokens), rows)
    return recv, send_weights(cfg, handle, topk_weights, rows), handle, counts, counts.sum()


def send_tokens(cfg: EpConfig, handle: EpHandle, tokens: Array, room: int) -> Array:
    """Fill the receive buffer [room, H] with all devices' tokens [T, H]; rows without a token are zero."""
    count, picks = handle.sent.shape
    # The token in each send-buffer slot; the number of tokens for an empty slot.
    source = jnp.full(handle.arrived.shape, count, jnp.int32)
    source = source.at[handle.sent.ravel()].set(
        jnp.repeat(jnp.arange(count, dtype=jnp.int32), picks), mode="drop"
    )
    return _receive(cfg, handle, tokens.at[source].get(mode="fill", fill_value=0), room)


def send_weights(cfg: EpConfig, handle: EpHandle, topk_weights: Array, room: int) -> Array:
    """Fill the receive buffer [room] with the weights [T, k] of all devices; rows without a token are zero."""
    slots = jnp.zeros(handle.arrived.shape, topk_weights.dtype)
    slots = slots.at[handle.sent.ravel()].set(topk_weights.ravel(), mode="drop")
    return _receive(cfg, handle, slots, room)


def _receive(cfg: EpConfig, handle: EpHandle, slots: Array, room: int) -> Array:
    """Exchange the send-buffer slots, and move received slots to their rows in a buffer [room, ...]."""
    slot_count = handle.arrived.size
    row_slots = jnp.full(room, slot_count, jnp.int32)
    row_slots = row_slots.at[handle.arrived].set(
        jnp.arange(slot_count, dtype=jnp.int32), mode="drop"
    )
    return _exchange(slots, handle.sizes, 0, cfg).at[row_slots].get(mode="fill", fill_value=0)


def returned(cfg: EpConfig, handle: EpHandle, expert_out: Array) -> Array:
    """Return the experts' outputs [T, k, H] to the order of the tokens' choices; zeros for choices not sent."""
    slots = expert_out.at[handle.arrived].get(mode="fill", fill_value=0)
    received = _exchange(slots, handle.sizes[::-1], 0, cfg)
    return received.at[handle.sent].get(mode="fill", fill_value=0)


def _exchange(x: Array, sizes: Array, empty: int, cfg: EpConfig) -> Array:
    """Exchange slots [devices * slots, ...] between devices; block d of the input is sent to device d.

    sizes is int32 [2, devices], the filled slots in each sent and received block. All other slots hold `empty`.
    """
    if cfg.devices == 1:
        return x
    slots = x.shape[0] // cfg.devices

    def dense(x: Array, sizes: Array) -> Array:
        parts = x.reshape(cfg.devices, slots, *x.shape[1:])
        return lax.all_to_all(parts, cfg.axis, split_axis=0, concat_axis=0).reshape(x.shape)

    def ragged(x: Array, sizes: Array) -> Array:
        starts = jnp.arange(cfg.devices, dtype=jnp.int32) * slots
        # Offset of this device's block in every receiver's buffer.
        offsets = jnp.full(cfg.devices, lax.axis_index(cfg.axis) * slots, jnp.int32)
        return lax.ragged_all_to_all(
            x,
            jnp.full(x.shape, empty, x.dtype),
            starts,
            sizes[0],
            offsets,
            sizes[1],
            axis_name=cfg.axis,
        )

    return lax.platform_dependent(x, sizes, cuda=ragged, default=dense)


def check_routed(topk_idx: Array, tokens: Array, topk_weights: Array) -> None:
    """Raise an error unless tokens [T, H], choices and weights [T, k] fit together."""
    check_values("tokens", tokens)
    check_integers("topk_idx", topk_idx)
    check_array("topk_weights", topk_weights)
    agree = topk_idx.ndim == tokens.ndim == 2 and topk_idx.shape[0] == tokens.shape[0]
    if not agree or topk_weights.shape != topk_idx.shape:
        raise ValueError(
            f"tokens {tokens.shape}, topk_idx {topk_idx.shape}, topk_weights {topk_weights.shape}; pass [T, H], [T, k] "
            "and [T, k]"
        )


def _check_axis(cfg: EpConfig) -> None:
    """Raise ValueError unless the expert axis is manual here and has the config's number of devices."""
    if cfg.devices == 1:
        return
    try:
        size = lax.axis_size(cfg.axis)
    except NameError as error:
        raise ValueError(
            f"axis={cfg.axis!r} of the EpConfig is not manual here; call inside shard_map over a mesh with that axis, "
            "or bootstrap within autocast(mesh_resource=MeshResource(ep_resource=..)), which names it"
        ) from error
    if size != cfg.devices:
        raise ValueError(
            f"axis {cfg.axis!r} has {size} devices, the placement of experts {cfg.devices}; choose one number for both"
        )
