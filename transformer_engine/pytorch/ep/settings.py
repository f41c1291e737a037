"""Expert placement on the ranks of a process group: `ep_bootstrap` and `ep_finalize`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ...common.checks import switch, whole, whole_or_none
from ..constants import dist_group_type
from ..distributed import collectives
from ..distributed.expert_parallel import ExpertPlacement
from ..runtime.checks import group_or_none, values_dtype
from ..runtime.device import canonical_device
from ..runtime.warn_once import warn_once


@dataclass(frozen=True, slots=True)
class EpSettings:
    """`ep_bootstrap` arguments."""

    placement: ExpertPlacement
    capacity: int | None
    drop: bool


class _WithoutGroups:
    """Settings key for a process without torch.distributed."""


_ALONE = _WithoutGroups()
# One entry per default process group: in the threaded backend each thread has its own. An entry ends with its group.
_settings: WeakKeyDictionary[Any, EpSettings] = WeakKeyDictionary()


def _scope() -> Any:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else _ALONE


def current_settings() -> EpSettings | None:
    """Return the settings of `ep_bootstrap`, or None before it."""
    return _settings.get(_scope())


def is_ep_bootstrapped() -> bool:
    """Return whether `ep_bootstrap` was called without a later `ep_finalize`."""
    return _scope() in _settings


def ep_bootstrap(
    ep_group: dist_group_type | None,
    num_experts: int,
    max_tokens_per_rank: int,
    hidden_dim: int,
    num_topk: int | None = None,
    recv_capacity_per_rank: int | None = None,
    max_num_sms: int = 0,
    zero_copy: bool = False,
    drop_on_overflow: bool = False,
    max_token_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Set the expert placement on the ranks of a group: expert e is on rank e // (num_experts / size).

    The ranks compare their arguments, so every rank in the group calls this function.

    Args:
        ep_group: Process group of the experts; None for the default group. A one-rank group exchanges nothing.
        num_experts: Expert count on all ranks, a multiple of the group size.
        max_tokens_per_rank: Most tokens on a rank in one dispatch.
        hidden_dim: Token width.
        num_topk: Experts per token; None if only the buffers define it.
        recv_capacity_per_rank: Rows in a rank's receive buffer. None selects the eager mode.
        max_num_sms: Has no effect; torch.distributed schedules the exchange.
        zero_copy: Has no effect; torch.distributed sends from and receives into ordinary memory.
        drop_on_overflow: Drop rows beyond the capacity. By default they are an error: a
            RuntimeError on a CPU, a device assertion on a GPU.
        max_token_dtype: Has no effect; buffers have the dtype of the tokens.

    Raises:
        RuntimeError: ep_bootstrap was called before; call `ep_finalize` first.
        ValueError: A number is invalid, the ranks have different arguments, or zero_copy or drop_on_overflow is
            given without recv_capacity_per_rank.
    """
    group_or_none("ep_group", ep_group)
    whole("num_experts", num_experts)
    whole("max_tokens_per_rank", max_tokens_per_rank)
    whole("hidden_dim", hidden_dim)
    whole_or_none("num_topk", num_topk)
    whole_or_none("recv_capacity_per_rank", recv_capacity_per_rank)
    whole("max_num_sms", max_num_sms, 0)
    switch("zero_copy", zero_copy)
    switch("drop_on_overflow", drop_on_overflow)
    values_dtype("max_token_dtype", max_token_dtype)
    if is_ep_bootstrapped():
        raise RuntimeError(
            "ep_bootstrap was called before; call ep_finalize before another ep_bootstrap"
        )
    if recv_capacity_per_rank is None and (zero_copy or drop_on_overflow):
        name = "zero_copy" if zero_copy else "drop_on_overflow"
        raise ValueError(
            f"{name}=True requires recv_capacity_per_rank, the rows of the receive buffer; pass it"
        )
    size, rank = collectives.world_size(ep_group), collectives.rank(ep_group)
    if rank < 0:
        raise ValueError("this process is not a member of ep_group; pass a group that contains it")
    numbers = {
        "num_experts": num_experts,
        "max_tokens_per_rank": max_tokens_per_rank,
        "hidden_dim": hidden_dim,
        "num_topk": num_topk or 0,
        "recv_capacity_per_rank": recv_capacity_per_rank or 0,
        "drop_on_overflow": int(drop_on_overflow),
    }
    if collectives.world_size(ep_group) != 1:
        on_gpu = "nccl" in dist.get_backend_config(ep_group)
        local_numbers = torch.tensor(
            [list(numbers.values())], device=canonical_device("cuda" if on_gpu else "cpu", "device")
        )
        every_rank = collectives.gather_along_first_dim(local_numbers, ep_group)[0].t().tolist()
        for name, values in zip(numbers, every_rank, strict=True):
            if len(set(values)) > 1:
                raise ValueError(
                    f"{name} is {values} on the ranks of ep_group, in their order; pass the same on all ranks"
                )
    if num_experts % size:
        raise ValueError(
            f"num_experts={num_experts} is not a multiple of the {size} ranks of ep_group; pass a multiple"
        )
    for name, value, default in (
        ("max_num_sms", max_num_sms, 0),
        ("zero_copy", zero_copy, False),
        ("max_token_dtype", max_token_dtype, torch.bfloat16),
    ):
        if value != default:
            warn_once(
                f"ep_bootstrap({name}=)",
                f"{name}={value} has no effect: rows travel through torch.distributed; leave it out",
            )
    placement = ExpertPlacement(ep_group, size, rank, num_experts)
    _settings[_scope()] = EpSettings(placement, recv_capacity_per_rank, bool(drop_on_overflow))


def ep_finalize() -> None:
    """Discard the settings from `ep_bootstrap`; without an earlier `ep_bootstrap` do nothing."""
    _settings.pop(_scope(), None)
