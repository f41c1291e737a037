"""Expert parallelism: tokens are sent to the device of their expert, and the experts' outputs are sent back.

Call the functions inside shard_map, where the expert axis is manual. GPUs exchange only the filled rows with
lax.ragged_all_to_all. Other platforms lack that operation and exchange whole buffers with a dense all_to_all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..common.checks import described, integer, switch, whole
from ..common.numbers import with_article
from .checks import check_array, check_dtype, check_instance, check_integers, check_sizes, check_values
from .permutation import aligned, room_for
from .sharding import mesh_resource_or_default, with_sharding_constraint

__all__ = [
    "EpConfig",
    "EpHandle",
    "EpLayerConfig",
    "ep_bootstrap",
    "ep_combine",
    "ep_dispatch",
    "ep_finalize",
]


@dataclass(frozen=True)
class EpConfig:
    """Placement of experts on devices.

    Attributes:
        num_experts: Number of experts on all devices.
        devices: Number of devices along the axis. Each holds num_experts / devices consecutive experts.
        axis: Mesh axis over which the experts are sharded.
    """

    num_experts: int
    devices: int
    axis: str = "ep"

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.devices


@dataclass(frozen=True)
class EpLayerConfig:
    """Settings of one layer's dispatch; the placement of experts is that of `ep_bootstrap`.

    Attributes:
        top_k: Number of experts per token.
        dispatch_output_per_expert_alignment: The received rows of each local expert start at a multiple of this
            number, with zeros in between. 0 and 1 mean no alignment.
    """

    top_k: int
    dispatch_output_per_expert_alignment: int = 0

    def __post_init__(self) -> None:
        whole("top_k", self.top_k)
        whole("dispatch_output_per_expert_alignment", self.dispatch_output_per_expert_alignment, 0)


class EpHandle(NamedTuple):
    """Routing of one dispatch, which `ep_combine` reverses.

    Attributes:
        sent: int32 [T, k], slot of the send buffer for each choice of each token.
        arrived: int32 [devices * slots], row of the receive buffer for each received slot. A row past the end of
            the buffer marks a dropped or empty slot.
        sizes: int32 [2, devices], number of slots sent to each device and received from each device.
    """

    sent: Array
    arrived: Array
    sizes: Array


@dataclass(frozen=True)
class _Bootstrap:
    """Arguments of `ep_bootstrap` that later calls are checked against."""

    config: EpConfig
    limits: dict[str, int]


_bootstrap: _Bootstrap | None = None  # written by ep_bootstrap and ep_finalize


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
    """Set the placement of experts and the size limits of later dispatches.

    The expert axis is the ep_resource of the current MeshResource, "ep" by default.

    Args:
        world_size: Number of devices along the expert axis.
        rank: Index of this process's device along the axis.
        num_experts: Number of experts on all devices, a multiple of world_size.
        max_tokens_per_rank: Largest number of tokens that a device may dispatch.
        recv_capacity_per_rank: Largest number of rows of a receive buffer.
        hidden_dim: Largest width of a token.
        max_token_dtype: Widest dtype of tokens: float32, bfloat16 or float16.
        max_num_sms: Has no effect; XLA schedules its collectives.
        drop_on_overflow: Has no effect: rows beyond the capacity are always dropped. Compare total_recv_tokens with
            the capacity to detect them.

    Returns:
        The placement, which `ep_dispatch` and `ep_combine` accept instead of an EpLayerConfig.

    Raises:
        ValueError: rank is outside [0, world_size), or world_size does not divide num_experts.
        TypeError: max_token_dtype is not a floating-point dtype of at least 16 bits.
        RuntimeError: ep_bootstrap was called before; call ep_finalize first.
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
        raise ValueError(
            f"rank={rank} of world_size={world_size}; pass an integer from 0 to {world_size - 1}"
        )
    if num_experts % world_size:
        raise ValueError(
            f"world_size={world_size} does not divide num_experts={num_experts}; choose a multiple of world_size"
        )
    if check_dtype("max_token_dtype", max_token_dtype) not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"max_token_dtype={described(max_token_dtype)}; pass float32, bfloat16 or float16")
    global _bootstrap
    if _bootstrap is not None:
        raise RuntimeError(f"ep_bootstrap was called with {_bootstrap.limits}; call ep_finalize first")
    config = EpConfig(num_experts, world_size, mesh_resource_or_default().ep_resource or "ep")
    limits = {"tokens": max_tokens_per_rank, "capacity": recv_capacity_per_rank, "hidden": hidden_dim}
    _bootstrap = _Bootstrap(config, limits)
    return config


def ep_finalize() -> None:
    """Discard the settings of ep_bootstrap; without an earlier ep_bootstrap do nothing."""
    global _bootstrap
    _bootstrap = None


def ep_dispatch(
    cfg: EpLayerConfig | EpConfig,
    topk_idx: Array,
    tokens: Array,
    topk_weights: Array,
    recv_capacity_per_rank: int,
) -> tuple[Array, Array, EpHandle, Array, Array]:
    """Send each token to the devices of its experts.

    Args:
        cfg: Settings of the layer, or the placement that `ep_bootstrap` returned.
        topk_idx: Experts of this device's tokens, int [T, k], distinct per token. An index outside [0, num_experts)
            sends nothing. A device with fewer experts than k receives at most one row per expert and token.
        tokens: Tokens of this device [T, H], float32, bfloat16 or float16.
        topk_weights: Routing weights [T, k].
        recv_capacity_per_rank: Number of rows of the receive buffer. Rows beyond it are dropped.

    Returns:
        A tuple of recv_tokens [capacity, H], sorted by local expert; recv_topk_weights [capacity]; the EpHandle for
        `ep_combine`; token_counts int32 [local experts], the rows of each expert within the capacity, including
        alignment; and total_recv_tokens int32 [], the number of rows sent to this device.

    Raises:
        ValueError: Shapes do not match, sizes exceed those of ep_bootstrap, topk_idx does not have cfg.top_k columns,
            or the expert axis is not manual here.
        RuntimeError: cfg is an EpLayerConfig and ep_bootstrap was not called.
    """
    placement = _placement(cfg)
    _check_arrays(topk_idx, tokens, topk_weights)
    align_size = 1
    if isinstance(cfg, EpLayerConfig):
        align_size = max(1, cfg.dispatch_output_per_expert_alignment)
        if topk_idx.shape[1] != cfg.top_k:
            raise ValueError(
                f"topk_idx has {topk_idx.shape[1]} columns; EpLayerConfig(top_k={cfg.top_k}) requires {cfg.top_k}, "
                "one per chosen expert"
            )
    recv, recv_weights, handle, counts, total = dispatched(
        placement, topk_idx, tokens, topk_weights, recv_capacity_per_rank, align_size, recv_capacity_per_rank
    )
    ends = jnp.minimum(jnp.cumsum(aligned(counts, align_size)), recv_capacity_per_rank)
    counts = jnp.diff(ends, prepend=0).astype(jnp.int32)
    return recv, recv_weights, handle, counts, total


def _placement(cfg: EpLayerConfig | EpConfig) -> EpConfig:
    """Return the placement of experts for a config; an EpLayerConfig uses that of ep_bootstrap."""
    if isinstance(cfg, EpConfig):
        return cfg
    if not isinstance(cfg, EpLayerConfig):
        raise TypeError(f"cfg={described(cfg)} is {with_article(type(cfg))}; pass an EpLayerConfig")
    if _bootstrap is None:
        raise RuntimeError(f"{cfg} requires the placement of experts; call ep_bootstrap first")
    return _bootstrap.config


def dispatched(
    cfg: EpConfig, topk_idx: Array, tokens: Array, topk_weights: Array, recv_capacity_per_rank: int,
    align_size: int = 1, rows_of_buffer: int | None = None,
) -> tuple[Array, Array, EpHandle, Array, Array]:  # fmt: skip
    """Dispatch as `ep_dispatch`, with token_counts that include dropped rows and exclude alignment.

    Args:
        cfg: Placement of the experts.
        topk_idx: As in `ep_dispatch`.
        tokens: As in `ep_dispatch`.
        topk_weights: As in `ep_dispatch`.
        recv_capacity_per_rank: Number of tokens for which the receive buffer has room.
        align_size: The rows of each expert start at a multiple of this number, with zeros in between.
        rows_of_buffer: Number of rows of the receive buffer. By default the buffer holds recv_capacity_per_rank
            tokens for any distribution over the experts.

    Returns:
        As `ep_dispatch`.
    """
    _check_arrays(topk_idx, tokens, topk_weights)
    _check_axis(cfg)
    count, picks = topk_idx.shape
    _check_sizes(count, recv_capacity_per_rank, tokens.shape[-1])
    room = rows_of_buffer or room_for(recv_capacity_per_rank, cfg.local_experts, align_size)
    slots = count * min(picks, cfg.local_experts)
    chosen = (topk_idx >= 0) & (topk_idx < cfg.num_experts)
    device = jnp.where(chosen, topk_idx // cfg.local_experts, cfg.devices)
    # For each slot, the number of earlier slots for the same device.
    kinds = device.ravel()
    same = jax.nn.one_hot(kinds, cfg.devices + 1, dtype=jnp.int32)
    place = (jnp.take_along_axis(jnp.cumsum(same, axis=0), kinds[:, None], axis=1)[:, 0] - 1).reshape(
        count, picks
    )
    # Choices that are not sent get an index past the end, which scatter drops; any other index is a slot in use.
    sent = jnp.where(chosen & (place < slots), device * slots + place, cfg.devices * slots)
    filled = (cfg.devices * slots,)
    sources = jnp.broadcast_to(jnp.arange(count)[:, None], (count, picks)).ravel()
    source = jnp.full(filled, count, jnp.int32).at[sent.ravel()].set(sources.astype(jnp.int32), mode="drop")
    local = jnp.full(filled, cfg.local_experts, jnp.int32)
    local = local.at[sent.ravel()].set((topk_idx % cfg.local_experts).ravel().astype(jnp.int32), mode="drop")
    weights = jnp.zeros(filled, topk_weights.dtype).at[sent.ravel()].set(topk_weights.ravel(), mode="drop")
    rows = jnp.asarray(tokens).at[source].get(mode="fill", fill_value=0)
    # Number of slots sent to each device and received from each device, int32 [2, devices].
    out = (device.ravel() == jnp.arange(cfg.devices)[:, None]).sum(axis=1, dtype=jnp.int32)
    out = jnp.minimum(out, slots)
    back = out if cfg.devices == 1 else lax.all_to_all(out, cfg.axis, 0, 0, tiled=True)
    sizes = jnp.stack((out, back))
    rows, weights = (_exchange(x, sizes, 0, cfg) for x in (rows, weights))
    local = _exchange(local, sizes, cfg.local_experts, cfg)
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
    cfg: EpLayerConfig | EpConfig,
    handle_mem: EpHandle,
    token_counts: Array,
    expert_out: Array,
    num_local_tokens: int,
    out_sharding: Any = None,
) -> Array:
    """Send the experts' outputs back and sum them per token; dropped rows count as zero.

    Args:
        cfg: The config of the dispatch.
        handle_mem: The handle that `ep_dispatch` returned.
        token_counts: The counts that `ep_dispatch` returned, int32 [local experts].
        expert_out: Outputs of the experts [capacity, H], in the order of recv_tokens. The caller multiplies them by
            recv_topk_weights.
        num_local_tokens: Number of tokens T that this device dispatched.
        out_sharding: Sharding constraint of the result, or None.

    Returns:
        Sums [T, H] in expert_out's dtype, accumulated in float32.

    Raises:
        ValueError: num_local_tokens, a shape, or the number of rows of expert_out does not match the dispatch.
        TypeError: An argument has the wrong type.
        RuntimeError: cfg is an EpLayerConfig and ep_bootstrap was not called.
    """
    placement = _placement(cfg)
    check_instance("handle_mem", handle_mem, EpHandle)
    whole("num_local_tokens", num_local_tokens)
    check_values("expert_out", expert_out)
    if expert_out.ndim != 2:
        raise ValueError(
            f"expert_out has shape {expert_out.shape}; pass [capacity, H], one output for each row of recv_tokens"
        )
    check_sizes("token_counts", token_counts, placement.local_experts, expert_out.shape[0])
    if handle_mem.sent.shape[0] != num_local_tokens:
        raise ValueError(
            f"num_local_tokens={num_local_tokens}; {handle_mem.sent.shape[0]} tokens were dispatched; pass that number"
        )
    valid = jnp.arange(expert_out.shape[0]) < token_counts.sum()
    outputs = returned(placement, handle_mem, jnp.where(valid[:, None], expert_out, 0))
    sums = outputs.astype(jnp.float32).sum(axis=1).astype(expert_out.dtype)
    return with_sharding_constraint(sums, out_sharding)


def returned(cfg: EpConfig, handle: EpHandle, expert_out: Array) -> Array:
    """Return the experts' outputs [T, k, H] in the order of the tokens' choices; zeros for choices not sent."""
    slots = expert_out.at[handle.arrived].get(mode="fill", fill_value=0)
    received = _exchange(slots, handle.sizes[::-1], 0, cfg)
    return received.at[handle.sent].get(mode="fill", fill_value=0)


def _exchange(x: Array, sizes: Array, empty: int, cfg: EpConfig) -> Array:
    """Exchange slots [devices * slots, ...] between devices; block d of the input is sent to device d.

    sizes is int32 [2, devices], the filled slots of each sent and received block. All other slots hold `empty`.
    """
    if cfg.devices == 1:
        return x
    slots = x.shape[0] // cfg.devices

    def dense(x: Array, sizes: Array) -> Array:
        parts = x.reshape(cfg.devices, slots, *x.shape[1:])
        return lax.all_to_all(parts, cfg.axis, split_axis=0, concat_axis=0).reshape(x.shape)

    def ragged(x: Array, sizes: Array) -> Array:
        starts = jnp.arange(cfg.devices, dtype=jnp.int32) * slots
        # Offset of this device's block in the buffer of every receiver.
        there = jnp.full(cfg.devices, lax.axis_index(cfg.axis) * slots, jnp.int32)
        return lax.ragged_all_to_all(
            x, jnp.full(x.shape, empty, x.dtype), starts, sizes[0], there, sizes[1], axis_name=cfg.axis
        )

    return lax.platform_dependent(x, sizes, cuda=ragged, default=dense)


def _check_arrays(topk_idx: Array, tokens: Array, topk_weights: Array) -> None:
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
    """Raise ValueError unless the expert axis is manual here and has the number of devices of the config."""
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
    limits = {} if _bootstrap is None else _bootstrap.limits
    for name, value, key in (
        ("tokens", tokens, "tokens"), ("recv_capacity_per_rank", capacity, "capacity"), ("hidden", hidden, "hidden"),
    ):  # fmt: skip
        if value > limits.get(key, value):
            raise ValueError(
                f"{name}={value}; ep_bootstrap was called for at most {limits[key]}; call ep_finalize, then "
                f"ep_bootstrap for {value}"
            )
