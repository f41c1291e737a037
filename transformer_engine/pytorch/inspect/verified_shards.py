"""Parameter and activation shards: a rank's place in a mesh, and the part of a whole tensor on that rank.

| mesh dimension | names | shards |
| --- | --- | --- |
| data | dp, ddp, fsdp, data, dp_replicate, dp_shard, replicate, shard | the batch |
| context | cp, context | tokens: chunks r and 2 n - 1 - r of 2 n |
| tensor | tp, tensor | parameters; tokens if sequence parallel |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..distributed.collectives import gather_along_first_dim, rank, world_size
from ..functions.attention.context_parallel.schedule import chunk_pair

ROLES = {
    "data": ("dp", "ddp", "fsdp", "data", "dp_replicate", "dp_shard", "replicate", "shard"),
    "context": ("cp", "context"),
    "tensor": ("tp", "tensor"),
}


@dataclass(frozen=True)
class RankPlace:
    """Coordinates of this rank, and the dimensions along which the ranks share activations.

    Attributes:
        data: Data-parallel (coordinate, size).
        context: Context-parallel (coordinate, size).
        tensor: Tensor-parallel (coordinate, size).
        data_groups: Process groups for data-parallel dimensions that have several ranks.
        context_groups: Process groups for context-parallel dimensions that have several ranks.
        tensor_group: Tensor-parallel process group.
        tokens_over_tensor: The model's inputs and outputs are sharded along the tokens over tensor-parallel ranks.
        sequence_dim: Token dimension in activations.
        batch_dim: Batch dimension in activations.
    """

    data: tuple[int, int] = (0, 1)
    context: tuple[int, int] = (0, 1)
    tensor: tuple[int, int] = (0, 1)
    data_groups: tuple[Any, ...] = ()
    context_groups: tuple[Any, ...] = ()
    tensor_group: Any = None
    tokens_over_tensor: bool = False
    sequence_dim: int = 0
    batch_dim: int = 1

    @property
    def copies(self) -> int:
        """Data- and context-parallel rank count, over which gradients are averaged."""
        return self.data[1] * self.context[1]

    def shard_batch(self, full: Tensor) -> Tensor:
        """Return this rank's part of an input or output for the whole batch; other tensors are returned unchanged."""
        if full.dim() <= max(self.sequence_dim, self.batch_dim):
            return full
        for size, dim in ((self.data[1], self.batch_dim), (2 * self.context[1], self.sequence_dim)):
            if size > (2 if dim == self.sequence_dim else 1) and full.shape[dim] % size:
                raise ValueError(
                    f"dimension {dim} of a batch tensor {list(full.shape)} is not divisible by {size}, the number of "
                    "parts of the mesh; pad the batch or pass shard_fn"
                )
        part = self._activation(full)
        if not self.tokens_over_tensor or self.tensor[1] == 1:
            return part
        if part.shape[self.sequence_dim] % self.tensor[1]:
            raise ValueError(
                f"{part.shape[self.sequence_dim]} tokens of a rank are not divisible by the {self.tensor[1]} "
                "tensor-parallel ranks that share them; pad the sequence"
            )
        return _chunk(part, self.sequence_dim, self.tensor)

    def shard_activation(
        self, full: Tensor, shape: Sequence[int], parts: Sequence[int]
    ) -> Tensor | None:
        """Return the part of a one-device activation that has the given shape on this rank.

        Args:
            full: One-device activation.
            shape: This rank's activation shape.
            parts: Sizes of the parts of the last dimension that are sharded one by one.

        Returns:
            The part, or None if no sharding over the batch, the tokens and the features has this shape.
        """
        shape = tuple(shape)
        candidates = [full]
        if full.dim() <= max(self.sequence_dim, self.batch_dim):
            sharded = None
        else:
            chunks = 2 * self.context[1] if self.context[1] > 1 else 1
            if full.shape[self.batch_dim] % self.data[1] or full.shape[self.sequence_dim] % chunks:
                sharded = None
            else:
                sharded = self._activation(full)
        if sharded is not None:
            candidates = [sharded]
            if self.tensor[1] > 1 and sharded.shape[self.sequence_dim] % self.tensor[1] == 0:
                candidates.append(_chunk(sharded, self.sequence_dim, self.tensor))
        base = candidates[0]
        if self.tensor[1] > 1 and base.dim():
            candidates.append(shard_parts(base, base.dim() - 1, self.tensor, parts))
        if self.tensor[1] > 1 and base.dim() == 4:  # [tokens, batch, heads, head_dim]
            candidates.append(shard_parts(base, 2, self.tensor, (base.shape[2],)))
        return next((part for part in candidates if tuple(part.shape) == shape), None)

    def _activation(self, full: Tensor) -> Tensor:
        part = _chunk(full, self.batch_dim, self.data)
        rank, size = self.context
        if size == 1:
            return part
        chunks = part.chunk(2 * size, self.sequence_dim)
        return torch.cat([chunks[number] for number in chunk_pair(size, rank)], self.sequence_dim)


def find_rank_place(
    mesh: Any, sequence_parallel: bool, sequence_dim: int, batch_dim: int
) -> RankPlace:
    """Return this rank's place in a mesh whose dimensions have names.

    Raises:
        ValueError: A dimension has no name or an unknown one, or the mesh does not have all ranks.
    """
    if mesh is None:
        if world_size() > 1:
            raise ValueError(
                f"mesh=None in a process group of {world_size()} ranks; pass the DeviceMesh with the names of its "
                "dimensions, for example init_device_mesh('cuda', (2,), mesh_dim_names=('tp',))"
            )
        return RankPlace(sequence_dim=sequence_dim, batch_dim=batch_dim)
    names: tuple[str, ...] = tuple(mesh.mesh_dim_names or ())
    role_of_name = {name: role for role, members in ROLES.items() for name in members}
    unknown = [name for name in names if name not in role_of_name]
    if unknown or not names:
        raise ValueError(
            f"mesh dimensions {list(names)}: give each one of the names {', '.join(role_of_name)}; they "
            f"determine the sharding"
        )
    if mesh.size() != world_size():
        raise ValueError(
            f"the mesh has {mesh.size()} ranks and the default process group {world_size()}; every rank takes part"
        )
    roles: dict[str, tuple[int, int]] = dict.fromkeys(ROLES, (0, 1))
    groups: dict[str, list[Any]] = {role: [] for role in ROLES}
    for name in names:
        group = mesh.get_group(name)
        (index, size), role = roles[role_of_name[name]], role_of_name[name]
        roles[role] = (index * world_size(group) + rank(group), size * world_size(group))
        if world_size(group) > 1:
            groups[role].append(group)
    if len(groups["tensor"]) > 1:
        raise ValueError(
            f"mesh dimensions {list(names)}: only one can be tensor parallel; flatten them to one"
        )
    return RankPlace(
        roles["data"],
        roles["context"],
        roles["tensor"],
        tuple(groups["data"]),
        tuple(groups["context"]),
        next(iter(groups["tensor"]), None),
        sequence_parallel,
        sequence_dim,
        batch_dim,
    )


def sharded_dim(full: Sequence[int], local: Sequence[int], size: int) -> int | None:
    """Return the dimension of a tensor-parallel shard, or None for a replicated parameter.

    Raises:
        ValueError: The shapes do not belong to a tensor and one of its `size` shards.
    """
    if tuple(full) == tuple(local):
        return None
    dims = [dim for dim, (n, m) in enumerate(zip(full, local, strict=False)) if n != m]
    if len(full) != len(local) or len(dims) != 1 or local[dims[0]] * size != full[dims[0]]:
        raise ValueError(
            f"a parameter is {list(full)} on one device and {list(local)} on a rank of {size} tensor-parallel ranks; "
            f"one dimension must be {size} times smaller"
        )
    return dims[0]


def shard_parts(full: Tensor, dim: int, position: tuple[int, int], parts: Sequence[int]) -> Tensor:
    """Return a rank's shards of all parts along `dim`, joined; the whole tensor if a part is not divisible."""
    if any(part % position[1] for part in parts) or sum(parts) != full.shape[dim]:
        return full
    return torch.cat([_chunk(part, dim, position) for part in full.split(list(parts), dim)], dim)


def gather_parts(
    local: Tensor, dim: int, group: Any, parts: Sequence[int]
) -> tuple[Tensor, list[Tensor]]:
    """Gather a tensor-parallel parameter; the inverse of `shard_parts`.

    Returns:
        The whole tensor, and the shards on all ranks.
    """
    shards = list(gather_along_first_dim(local[None], group)[0])
    sizes = [part // len(shards) for part in parts]
    split = [shard.split(sizes, dim) for shard in shards]
    return torch.cat([piece[i] for i in range(len(parts)) for piece in split], dim), shards


def _chunk(tensor: Tensor, dim: int, position: tuple[int, int]) -> Tensor:
    index, size = position
    return tensor if size == 1 else tensor.chunk(size, dim)[index]
