"""Expert parallelism: tokens are sent to the device of their expert, and the experts' outputs are sent back.

Call the functions inside shard_map, where the expert axis is manual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..common.checks import described, integer, switch, whole
from ..common.numbers import with_article
from .functions.ep_exchange import (
    EpConfig,
    EpHandle,
    check_routed,
    dispatch_tokens,
    planned,
    returned,
)
from .permutation import align_counts
from .runtime.checks import check_dtype, check_instance, check_integers, check_sizes, check_values
from .sharding import (
    get_mesh_axis_size,
    is_mesh_available,
    mesh_resource_or_default,
    with_sharding_constraint,
)

__all__ = [
    "EpConfig",
    "EpHandle",
    "EpLayerConfig",
    "ep_bootstrap",
    "ep_combine",
    "ep_dispatch",
    "ep_finalize",
    "ep_handle_mem_size",
    "ep_prepare",
]


@dataclass(frozen=True)
class EpLayerConfig:
    """Settings for one layer's dispatch; `ep_bootstrap` defines the expert placement.

    Attributes:
        top_k: Experts per token.
        dispatch_output_per_expert_alignment: Each local expert's received rows start at a multiple of this number, with
            zeros in between. 0 and 1 mean no alignment.
    """

    top_k: int
    dispatch_output_per_expert_alignment: int = 0

    def __post_init__(self) -> None:
        whole("top_k", self.top_k)
        whole("dispatch_output_per_expert_alignment", self.dispatch_output_per_expert_alignment, 0)


@dataclass(frozen=True)
class _Bootstrap:
    """Expert placement, and the limits that later calls are checked against; none after `set_ep_config`."""

    config: EpConfig
    limits: dict[str, int]


_bootstrap: _Bootstrap | None = None  # written by ep_bootstrap, set_ep_config and ep_finalize


def ep_bootstrap(
    world_size: int | None,
    rank: int | None,
    num_experts: int,
    max_tokens_per_rank: int,
    recv_capacity_per_rank: int,
    hidden_dim: int,
    max_token_dtype: Any = jnp.bfloat16,
    max_num_sms: int = 0,
    drop_on_overflow: bool = False,
) -> EpConfig:
    """Set the expert placement and the size limits for later dispatches.

    The expert axis is the ep_resource of the current MeshResource, "ep" by default.

    Args:
        world_size: Number of devices along the expert axis; None derives it from the current mesh, or from all
            processes without a mesh.
        rank: This process's device index along the axis; None derives it from the process. XLA's collectives do not
            read it.
        num_experts: Number of experts on all devices, a multiple of world_size.
        max_tokens_per_rank: Most tokens that a device may dispatch.
        recv_capacity_per_rank: Most rows in a receive buffer.
        hidden_dim: Largest token width.
        max_token_dtype: Widest token dtype: float32, bfloat16 or float16. Dispatches are not checked against it.
        max_num_sms: Has no effect; XLA schedules its collectives.
        drop_on_overflow: Has no effect: rows beyond the capacity are always dropped. Without alignment, a
            total_recv_tokens above the capacity shows it; with alignment, the rows in between count as well.

    Returns:
        The placement, which `ep_dispatch` and `ep_combine` accept instead of an EpLayerConfig.

    Raises:
        ValueError: rank is outside [0, world_size), or world_size does not divide num_experts.
        TypeError: max_token_dtype is not float32, bfloat16 or float16, or an argument has the wrong type.
        RuntimeError: ep_bootstrap or set_ep_config was called before; call ep_finalize first.
    """
    axis = mesh_resource_or_default().ep_resource or "ep"
    if world_size is None:
        world_size = get_mesh_axis_size(axis) if is_mesh_available() else jax.device_count()
    whole("world_size", world_size)
    if rank is None:
        rank = jax.process_index() % world_size
    for name, value in (
        ("num_experts", num_experts),
        ("max_tokens_per_rank", max_tokens_per_rank),
        ("recv_capacity_per_rank", recv_capacity_per_rank),
        ("hidden_dim", hidden_dim),
    ):
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
    if check_dtype("max_token_dtype", max_token_dtype) not in (
        jnp.float32,
        jnp.bfloat16,
        jnp.float16,
    ):
        raise TypeError(
            f"max_token_dtype={described(max_token_dtype)}; pass float32, bfloat16 or float16"
        )
    global _bootstrap
    if _bootstrap is not None:
        earlier = f"ep_bootstrap was called with {_bootstrap.limits}"
        if not _bootstrap.limits:
            earlier = f"set_ep_config has set {_bootstrap.config}"
        raise RuntimeError(f"{earlier}; call ep_finalize first")
    config = EpConfig(num_experts, world_size, axis)
    limits = {
        "tokens": max_tokens_per_rank,
        "capacity": recv_capacity_per_rank,
        "hidden": hidden_dim,
    }
    _bootstrap = _Bootstrap(config, limits)
    return config


def set_ep_config(config: EpConfig) -> None:
    """Set the expert placement without size limits, in place of `ep_bootstrap`.

    Args:
        config: Expert placement on devices.
    """
    check_instance("config", config, EpConfig)
    global _bootstrap
    _bootstrap = _Bootstrap(config, {})


def get_ep_config() -> EpConfig:
    """Expert placement from the last `ep_bootstrap` or `set_ep_config`.

    Raises:
        RuntimeError: None was set.
    """
    if _bootstrap is None:
        raise RuntimeError(
            "no placement of experts is set; call ep_bootstrap or set_ep_config first"
        )
    return _bootstrap.config


def bootstrap_capacity() -> int | None:
    """Receive-buffer rows passed to `ep_bootstrap`; None without a call."""
    return None if _bootstrap is None else _bootstrap.limits.get("capacity")


def _bootstrap_command() -> str:
    """Remedy for missing limits."""
    if _bootstrap is None:
        return "call ep_bootstrap first"
    return "set_ep_config does not set it: call ep_finalize, then ep_bootstrap"


def ep_finalize() -> None:
    """Discard the settings of ep_bootstrap or set_ep_config, if any."""
    global _bootstrap
    _bootstrap = None


reset_ep_config = ep_finalize


def ep_dispatch(
    cfg: EpLayerConfig | EpConfig,
    topk_idx: Array,
    tokens: Array,
    topk_weights: Array,
    recv_capacity_per_rank: int,
) -> tuple[Array, Array, EpHandle, Array, Array]:
    """Send each token to the devices of its experts.

    Args:
        cfg: Layer settings, or the placement that `ep_bootstrap` returned.
        topk_idx: Expert indices for this device's tokens, int [T, k], distinct per token. An index outside [0,
            num_experts) sends nothing. A device with fewer experts than k receives at most one row per expert and
            token.
        tokens: Tokens of this device [T, H], float32, bfloat16 or float16.
        topk_weights: Routing weights [T, k].
        recv_capacity_per_rank: Receive-buffer rows. Rows beyond it are dropped.

    Returns:
        A tuple: recv_tokens [capacity, H], sorted by local expert; recv_topk_weights [capacity]; the EpHandle for
        `ep_combine`; token_counts int32 [local experts], the rows per expert within the capacity, including alignment;
        and total_recv_tokens int32 [], the number of rows sent to this device.

    Raises:
        ValueError: Shapes do not match, sizes exceed the ep_bootstrap limits, topk_idx does not have cfg.top_k columns,
            or the expert axis is not manual here.
        RuntimeError: cfg is an EpLayerConfig and ep_bootstrap was not called.
    """
    placement = placement_of(cfg)
    check_routed(topk_idx, tokens, topk_weights)
    align_size = _alignment(cfg, topk_idx)
    check_sizes_of_bootstrap(topk_idx.shape[0], recv_capacity_per_rank, tokens.shape[-1])
    recv, recv_weights, handle, counts, total = dispatch_tokens(
        placement,
        topk_idx,
        tokens,
        topk_weights,
        recv_capacity_per_rank,
        align_size,
        recv_capacity_per_rank,
    )
    return (
        recv,
        recv_weights,
        handle,
        _count_rows(counts, align_size, recv_capacity_per_rank),
        total,
    )


def ep_prepare(cfg: EpLayerConfig | EpConfig, topk_idx: Array) -> tuple[Array, Array, EpHandle]:
    """Exchange the token routing without the tokens.

    Args:
        cfg: As in `ep_dispatch`. `ep_bootstrap` sets the receive buffer's size.
        topk_idx: As in `ep_dispatch`.

    Returns:
        A tuple: token_counts, total_recv_tokens and the EpHandle, equal to the results of `ep_dispatch`.

    Raises:
        ValueError: topk_idx is not a matrix with cfg.top_k columns, or the expert axis is not manual here.
        RuntimeError: ep_bootstrap was not called.
    """
    placement = placement_of(cfg)
    check_integers("topk_idx", topk_idx)
    align_size = _alignment(cfg, topk_idx)
    capacity = bootstrap_capacity()
    if capacity is None:
        raise RuntimeError(
            f"ep_prepare requires the rows of the receive buffer; {_bootstrap_command()}, or ep_dispatch with them"
        )
    check_sizes_of_bootstrap(topk_idx.shape[0], capacity, 1)
    handle, counts = planned(placement, topk_idx, align_size)
    return _count_rows(counts, align_size, capacity), counts.sum(), handle


def ep_handle_mem_size(cfg: EpLayerConfig) -> int:
    """EpHandle size in bytes for the largest dispatch.

    Args:
        cfg: Layer settings.

    Raises:
        RuntimeError: ep_bootstrap was not called.
    """
    check_instance("cfg", cfg, EpLayerConfig)
    placement = placement_of(cfg)
    assert _bootstrap is not None
    if "tokens" not in _bootstrap.limits:
        raise RuntimeError(f"the largest number of tokens is unknown; {_bootstrap_command()}")
    tokens = _bootstrap.limits["tokens"]
    slots = placement.devices * tokens * min(cfg.top_k, placement.local_experts)
    return jnp.dtype(jnp.int32).itemsize * (tokens * cfg.top_k + slots + 2 * placement.devices)


def _count_rows(counts: Array, align_size: int, capacity: int) -> Array:
    """Per-expert rows within a buffer, including alignment, int32 [local experts]."""
    ends = jnp.minimum(jnp.cumsum(align_counts(counts, align_size)), capacity)
    return jnp.diff(ends, prepend=0).astype(jnp.int32)


def _alignment(cfg: EpLayerConfig | EpConfig, topk_idx: Array) -> int:
    """Return the alignment of each expert's first row; raise ValueError if topk_idx does not have cfg.top_k columns."""
    if topk_idx.ndim != 2:
        raise ValueError(
            f"topk_idx has shape {topk_idx.shape}; pass [T, k], the experts of each token"
        )
    if not isinstance(cfg, EpLayerConfig):
        return 1
    if topk_idx.shape[1] != cfg.top_k:
        raise ValueError(
            f"topk_idx has {topk_idx.shape[1]} columns; EpLayerConfig(top_k={cfg.top_k}) requires {cfg.top_k}, "
            "one per chosen expert"
        )
    return max(1, cfg.dispatch_output_per_expert_alignment)


def placement_of(cfg: EpLayerConfig | EpConfig) -> EpConfig:
    """Expert placement for a config; an EpLayerConfig uses that of `ep_bootstrap` or `set_ep_config`."""
    if isinstance(cfg, EpConfig):
        return cfg
    if not isinstance(cfg, EpLayerConfig):
        raise TypeError(f"cfg={described(cfg)} is {with_article(type(cfg))}; pass an EpLayerConfig")
    if _bootstrap is None:
        raise RuntimeError(
            f"{cfg} requires the placement of experts; call ep_bootstrap or set_ep_config first"
        )
    return _bootstrap.config


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
        expert_out: Expert outputs [capacity, H], in recv_tokens order. The caller multiplies them by
            recv_topk_weights.
        num_local_tokens: Number of tokens T that this device dispatched.
        out_sharding: Sharding constraint for the result, or None.

    Returns:
        Sums [T, H] in expert_out's dtype, accumulated in float32.

    Raises:
        ValueError: num_local_tokens, a shape, or the number of rows of expert_out does not match the dispatch.
        TypeError: An argument has the wrong type.
        RuntimeError: cfg is an EpLayerConfig and ep_bootstrap was not called.
    """
    placement = placement_of(cfg)
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


def check_sizes_of_bootstrap(tokens: int, capacity: int, hidden: int) -> None:
    """Raise ValueError if a dispatch is larger than `ep_bootstrap` allows."""
    whole("recv_capacity_per_rank", capacity)
    limits = {} if _bootstrap is None else _bootstrap.limits
    for name, value, key in (
        ("tokens", tokens, "tokens"),
        ("recv_capacity_per_rank", capacity, "capacity"),
        ("hidden", hidden, "hidden"),
    ):
        if value > limits.get(key, value):
            raise ValueError(
                f"{name}={value}; ep_bootstrap was called for at most {limits[key]}; call ep_finalize, then "
                f"ep_bootstrap for {value}"
            )
