"""ContextGroups: process groups for ranks that share a sequence, and collectives over them.

Collectives use `all_to_all_single`, `all_gather_into_tensor`, `reduce_scatter_tensor` and `all_reduce` only, which
every process-group backend provides: NCCL, gloo and torch's threaded group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .....common.checks import described
from ....constants import CPLoadBalancingStrategy
from ....distributed.faults import NamedFailures, started

COMMUNICATION = ("p2p", "all_gather", "a2a", "a2a+p2p")


@dataclass(frozen=True, eq=False)
class ContextGroups:
    """The groups of a rank.

    Combined rank: heads_size * ring_rank + heads_rank, among heads_size * ring_size ranks.

    Attributes:
        communication: Requested cp_comm_type value, without one-rank levels.
        heads_group: Group that exchanges heads for tokens; None without.
        ring_group: Group whose ranks pass on, or gather, keys and values; None without.
        stream: CUDA stream for ring transfers; None for the current one.
        strategy: Token division among the ranks.
    """

    communication: str
    heads_group: Any
    heads_size: int
    heads_rank: int
    ring_group: Any
    ring_size: int
    ring_rank: int
    stream: Any
    strategy: CPLoadBalancingStrategy = CPLoadBalancingStrategy.DUAL_CHUNK_SWAP

    @property
    def balanced(self) -> bool:
        """Whether a rank holds two chunks of every sequence instead of one contiguous packed buffer piece."""
        return self.strategy is CPLoadBalancingStrategy.DUAL_CHUNK_SWAP

    @property
    def size(self) -> int:
        """Rank count that shares a sequence."""
        return self.heads_size * self.ring_size

    @property
    def rank(self) -> int:
        """Combined rank."""
        return self.heads_size * self.ring_rank + self.heads_rank


def context_groups(
    cp_group: Any,
    cp_stream: Any,
    cp_comm_type: str,
    strategy: CPLoadBalancingStrategy = CPLoadBalancingStrategy.DUAL_CHUNK_SWAP,
) -> ContextGroups | None:
    """Return this rank's groups; None if no sequence is shared.

    Raises:
        AssertionError: The strategy is not a CPLoadBalancingStrategy.
        TypeError: A group is not a process group.
        ValueError: cp_comm_type does not exist, or cp_group does not have the form that it requires.
    """
    CPLoadBalancingStrategy.check(strategy)
    if cp_comm_type not in COMMUNICATION:
        raise ValueError(f"cp_comm_type={cp_comm_type!r}; choose one of {', '.join(COMMUNICATION)}")
    if cp_group is None:
        return None
    members = list(cp_group) if isinstance(cp_group, (list, tuple)) else [cp_group]
    sizes: list[int] = []
    for group in members:
        try:
            sizes.append(dist.get_world_size(group))
        except (AttributeError, TypeError) as error:
            raise TypeError(
                f"cp_group={described(group)} is not a process group; give a torch.distributed.ProcessGroup, a list of "
                "two for cp_comm_type='a2a+p2p', or None"
            ) from error
    hierarchical = cp_comm_type == "a2a+p2p"
    if all(size <= 1 for size in sizes):
        return None
    if len(members) != (2 if hierarchical else 1):
        expected = (
            "a list of two: the group of the all-to-all, then that of the ring"
            if hierarchical
            else "one group"
        )
        raise ValueError(
            f"cp_group holds {len(members)} groups, of sizes {sizes}; cp_comm_type={cp_comm_type!r} takes {expected}"
        )
    ranks = [dist.get_rank(group) for group in members]
    if min(ranks) < 0:
        raise ValueError(
            f"this process is not a member of cp_group (ranks {ranks}); give a group that contains it"
        )
    heads = hierarchical or cp_comm_type == "a2a"
    first, last = (members[0], sizes[0], ranks[0]), (members[-1], sizes[-1], ranks[-1])
    alone = (None, 1, 0)
    if not heads or sizes[0] == 1:
        first = alone
    if cp_comm_type == "a2a" or sizes[-1] == 1:
        last = alone
    communication = cp_comm_type
    if hierarchical and alone in (first, last):
        communication = "p2p" if first is alone else "a2a"
    return ContextGroups(communication, *first, *last, cp_stream, strategy)


def all_to_all(parts: Tensor, group: Any) -> Callable[[], Tensor]:
    """Send parts[i] in [size, ..] to rank i; the returned function waits and returns the received [size, ..]."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    work: Any = started(
        "all_to_all of context parallelism",
        parts,
        group,
        lambda: dist.all_to_all_single(received, parts, group=group, async_op=True),
    )

    def wait() -> Tensor:
        work.wait()
        return received

    return wait


def all_gather(x: Tensor, group: Any, size: int) -> Callable[[], Tensor]:
    """Gather [size, ..] from x [..] on every rank; the returned function waits and returns the result."""
    x = x.contiguous()
    gathered = x.new_empty(size, *x.shape)
    work: Any = started(
        "all_gather of context parallelism",
        x,
        group,
        lambda: dist.all_gather_into_tensor(
            gathered.view(-1), x.view(-1), group=group, async_op=True
        ),
    )

    def wait() -> Tensor:
        work.wait()
        return gathered

    return wait


def reduce_scatter(parts: Tensor, group: Any) -> Tensor:
    """Sum parts[rank] over all ranks, from parts [size, ..]."""
    parts = parts.contiguous()
    reduced = torch.empty_like(parts[0])
    with NamedFailures("reduce_scatter of context parallelism", parts, group):
        dist.reduce_scatter_tensor(reduced.view(-1), parts.view(-1), group=group)
    return reduced


class Ring:
    """Transfers from every rank to the next one in the ring, issued on a separate stream if there is one.

    A transfer is an all-to-all with parts for one rank only, which NCCL performs as one send and one receive.
    """

    def __init__(self, groups: ContextGroups):
        self.group, self.size, self.rank = groups.ring_group, groups.ring_size, groups.ring_rank
        stream = groups.stream
        self.stream = (
            stream if isinstance(stream, torch.cuda.Stream) and torch.cuda.is_available() else None
        )

    def send(self, x: Tensor, from_ring: bool = False) -> Callable[[], Tensor]:
        """Begin to send a flat tensor to the next rank.

        Args:
            x: The tensor.
            from_ring: The ring's stream produced the tensor, so that the transfer waits for no computation.

        Returns:
            Function that waits for the tensor from the previous rank, with the same size, and returns it.
        """
        sends, receives = [0] * self.size, [0] * self.size
        sends[(self.rank + 1) % self.size] = receives[(self.rank - 1) % self.size] = x.numel()
        with self._issuing(x, from_ring):
            received = torch.empty_like(x)
            work: Any = started(
                "transfer to the next rank of context parallelism",
                x,
                self.group,
                lambda: dist.all_to_all_single(
                    received, x, receives, sends, group=self.group, async_op=True
                ),
            )

        def wait() -> Tensor:
            nonlocal x
            with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
                work.wait()
            if self.stream is not None:
                torch.cuda.current_stream().wait_stream(self.stream)
                received.record_stream(torch.cuda.current_stream())
            del x  # sent: its memory may be reused
            return received

        return wait

    def circulate(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the flat tensors of all ranks: the local one, then the tensors from previous ranks in turn.

        The transfer of the next tensor is under way while the caller computes with the present one.
        """
        for step in range(self.size):
            arriving = self.send(x, step > 0) if step + 1 < self.size else None
            yield x
            if arriving is not None:
                x = arriving()

    def _issuing(self, x: Tensor, from_ring: bool) -> AbstractContextManager[Any]:
        if self.stream is None:
            return nullcontext()
        if not from_ring:
            self.stream.wait_stream(torch.cuda.current_stream())
            x.record_stream(self.stream)
        return torch.cuda.stream(self.stream)
