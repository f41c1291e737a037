"""Token routing to experts on other ranks, and the all-to-all row exchange.

Every rank gathers the choices of all tokens once and computes the same routing from them. A token travels
once to each rank that holds any of its experts; that rank copies the token to one row per expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..primitives.permutation import INDEX, Routes
from . import collectives

_NONE = -1  # no expert in a choice; no row or slot in a map
_REJECTED = -1  # token count for a rank whose arguments are invalid


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Expert placement on the ranks of a group: expert e is on rank e // local_experts.

    Attributes:
        group: Process group; None for the default group.
        size: Rank count.
        rank: This process's rank.
        num_experts: Number of experts on all ranks, a multiple of size.
    """

    group: Any
    size: int
    rank: int
    num_experts: int

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.size


@dataclass(frozen=True, slots=True)
class Wire:
    """Exchange sizes.

    Attributes:
        group: Process group; None for the default group.
        size: Rank count.
        sends: Rows for each rank. None: equal parts for all ranks.
        receives: Rows from each rank. None: equal parts from all ranks.
    """

    group: Any
    size: int
    sends: tuple[int, ...] | None
    receives: tuple[int, ...] | None

    def reversed(self) -> Wire:
        """Return the exchange that sends every row back."""
        return Wire(self.group, self.size, self.receives, self.sends)


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """Routing of one dispatch.

    Attributes:
        wire: Sizes for the exchange from the tokens' ranks to the experts' ranks.
        sent: From tokens [T] to send buffer slots; column r is rank r.
        slots_sent: Slots in the send buffer.
        received: From receive buffer slots to local expert rows; column j is choice j.
        slots_received: Slots in the receive buffer.
        rows: Rows in the local experts, including alignment and unused rows.
        tokens_per_expert: Rows per local expert, including alignment, int64 [local experts].
        total: Rows that the local experts need, including rows beyond the capacity, int64 [1]; on the CPU if the
            host knows it.
    """

    wire: Wire
    sent: Routes
    slots_sent: int
    received: Routes
    slots_received: int
    rows: int
    tokens_per_expert: Tensor
    total: Tensor


def gather_choices(
    choices: Tensor | None, tokens: int, top_k: int, placement: ExpertPlacement, device: Any
) -> Tensor:
    """Gather the choices of all ranks.

    Args:
        choices: Experts for this rank's tokens, int32 or int64 [T, k]. None if this rank's
            arguments are invalid: the other ranks then report this rank instead of waiting for it.
        tokens: Most tokens on a rank.
        top_k: k.
        placement: Expert placement.
        device: Result device.

    Returns:
        int32 [size, tokens * k + 1]: the choices, -1 where a rank has fewer tokens, and the token
        count per rank, -1 if its arguments are invalid.
    """
    message = torch.full((1, tokens * top_k + 1), _NONE, dtype=torch.int32, device=device)
    if choices is not None:
        message[0, : choices.numel()] = choices.reshape(-1)
        message[0, -1] = choices.shape[0]
    return collectives.gather_along_first_dim(message, placement.group)[0]


def route(
    gathered: Tensor,
    local_tokens: int,
    top_k: int,
    placement: ExpertPlacement,
    alignment: int,
    capacity: int | None,
    drop: bool,
) -> ExpertRouting:
    """Compute the routing on this rank from the choices of all ranks.

    Rows are ordered by expert, then by rank, token and choice. Without a capacity the host waits once for the sizes.

    Args:
        gathered: Result from `gather_choices`, int32 [size, tokens * k + 1].
        local_tokens: Token count on this rank.
        top_k: k.
        placement: Expert placement.
        alignment: The rows of each expert are padded to a multiple of this number.
        capacity: Rows per rank. None: as many as needed.
        drop: Rows beyond the capacity are dropped; otherwise they are an error.

    Raises:
        ValueError: The arguments of a rank are invalid.
        RuntimeError: A rank needs more rows than its capacity. On a GPU both errors end the process when the kernel
            runs, unless the host waits for the sizes.
    """
    size, rank = placement.size, placement.rank
    choices, tokens = gathered[:, :-1].reshape(size, -1, top_k).long(), gathered[:, -1].long()
    # The row of each choice on its expert's rank, and the end of each expert's rows.
    experts = placement.num_experts
    expert = torch.where((choices >= 0) & (choices < experts), choices, experts).reshape(-1)
    ordered, order = expert.sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(experts + 1, device=expert.device))
    counts = bounds.diff()
    padded = (counts + (alignment - 1)).div(alignment, rounding_mode="floor") * alignment
    ends = padded.view(size, -1).cumsum(1)
    shift = torch.cat(((ends.view(-1) - padded) - bounds[:-1], bounds.new_zeros(1)))
    row = torch.arange(ordered.shape[0], device=expert.device) + shift[ordered]
    valid = ordered < experts
    if capacity is not None:
        valid = valid & (row < capacity)
    rows = (
        torch.empty_like(row).scatter_(0, order, torch.where(valid, row, _NONE)).view(choices.shape)
    )
    owner = torch.where(
        rows >= 0, choices.div(placement.local_experts, rounding_mode="floor"), size
    )
    ranks = torch.arange(size, device=gathered.device)
    sends = (owner[rank, :local_tokens, :, None] == ranks).any(1)  # [T, size]
    receives = (owner == rank).any(2)  # [size, tokens]
    totals = ends[:, -1]
    if capacity is None:
        numbers = torch.cat((tokens, sends.sum(0), receives.sum(1), totals[rank].view(1))).tolist()
        _check_ranks(numbers[:size])
        out, back = tuple(numbers[size : 2 * size]), tuple(numbers[2 * size : 3 * size])
        wire, room = Wire(placement.group, size, out, back), numbers[-1]
        total = torch.tensor([room], device="cpu")
        slots_sent, slots_received = sum(out), sum(back)
        first_sent, first_received = (_starts(count, gathered.device) for count in (out, back))
    else:
        _check_capacity(tokens, totals, capacity, drop)
        slots = min(choices.shape[1], capacity)
        wire, room, total = (
            Wire(placement.group, size, sends=None, receives=None),
            capacity,
            totals[rank].view(1),
        )
        slots_sent = slots_received = size * slots
        first_sent = first_received = ranks * slots
    slot_sent = torch.where(sends, first_sent + sends.cumsum(0) - 1, _NONE)
    slot_received = torch.where(
        receives, first_received[:, None] + receives.cumsum(1) - 1, slots_received
    )
    # The last row collects choices for tokens that are not received.
    row_of_slot = torch.full((slots_received + 1, top_k), _NONE, device=gathered.device)
    local_rows = torch.where(owner == rank, rows, _NONE).view(-1, top_k)
    row_of_slot.scatter_(0, slot_received.view(-1, 1).expand(-1, top_k), local_rows)
    local_ends = ends[rank] if capacity is None else ends[rank].clamp(max=capacity)
    return ExpertRouting(
        wire,
        Routes(slot_sent.t().reshape(-1).int(), INDEX, local_tokens, size),
        slots_sent,
        Routes(row_of_slot[:-1].t().reshape(-1).int(), INDEX, slots_received, top_k),
        slots_received,
        room,
        local_ends.diff(prepend=local_ends.new_zeros(1)),
        total,
    )


def _starts(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the first slot per rank, int64 [size]."""
    ends = torch.tensor(counts, device=device).cumsum(0)
    return ends - ends.new_tensor(counts)


def _check_ranks(tokens: Sequence[int]) -> None:
    """Raise ValueError if a rank reported invalid arguments instead of its token count."""
    rejected = [rank for rank, count in enumerate(tokens) if count == _REJECTED]
    if rejected:
        raise ValueError(
            f"ranks {rejected} of the expert-parallel group called with invalid arguments; see their errors"
        )


def _check_capacity(tokens: Tensor, totals: Tensor, capacity: int, drop: bool) -> None:
    """Report invalid arguments of a rank, and rows beyond the capacity, on every rank."""
    if tokens.is_cpu:
        _check_ranks(tokens.tolist())
        over = (
            []
            if drop
            else [(rank, rows) for rank, rows in enumerate(totals.tolist()) if rows > capacity]
        )
        if over:
            required = ", ".join(f"{rows} on rank {rank}" for rank, rows in over)
            raise RuntimeError(
                f"recv_capacity_per_rank={capacity} rows do not suffice, {required} are needed; increase it, or pass "
                "drop_on_overflow=True to ep_bootstrap"
            )
        return
    # A GPU is not waited for.
    valid = (tokens != _REJECTED).all()
    torch._assert_async(valid, "a rank of the expert-parallel group called with invalid arguments")
    if not drop:
        enough = (totals <= capacity).all()
        torch._assert_async(
            enough, f"recv_capacity_per_rank={capacity} rows do not suffice; increase it"
        )


def exchange(parts: Sequence[Tensor], wire: Wire) -> list[Tensor]:
    """Send the rows of each tensor to the ranks and return the received rows, ordered by rank."""
    if wire.size == 1:
        return list(parts)
    received, works = [], []
    for part in parts:
        part = part.contiguous()
        rows = part.shape[0] if wire.receives is None else sum(wire.receives)
        out = part.new_empty(rows, *part.shape[1:])
        sizes = (
            (None, None) if wire.receives is None else (list(wire.receives), list(wire.sends or ()))
        )
        works.append(dist.all_to_all_single(out, part, *sizes, group=wire.group, async_op=True))
        received.append(out)
    for work in works:
        work.wait()
    return received
