"""Context parallelism for one attention: the mesh axis, the strategy and the token order."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from ...common.checks import member, switch, text_or_none, whole_or_none
from ..primitives.attention.descriptor import Segments, SequenceDescriptor
from ..primitives.attention.enums import AttnMaskType, QKVLayout
from ..primitives.attention.masks import run_length_fill
from ..sharding import (
    automatic_axes,
    check_automatic_axis,
    get_mesh_axis_size,
    is_mesh_available,
    mesh_resource_or_default,
)
from .reorder import CPStrategy, ReorderStrategy, order_of_tokens


@dataclass(frozen=True)
class ContextParallel:
    """Attention over the devices along a mesh axis.

    Attributes:
        axis: Mesh axis name.
        devices: Number of devices.
        ring: Whether keys and values move around a ring; otherwise every device gathers them all.
        balanced: Whether tokens are in `reorder_causal_load_balancing` order: swapped chunks, or stripes in packed
            rows.
        stripe: Tokens per stripe.
    """

    axis: str
    devices: int
    ring: bool
    balanced: bool
    stripe: int

    @property
    def neighbours(self) -> list[tuple[int, int]]:
        """Pairs (device, next device) around the ring."""
        return [(rank, (rank + 1) % self.devices) for rank in range(self.devices)]

    def moves(self, distance: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """{(place, place): [(device, device)]}, the moves from every chunk to the chunk `distance` after it.

        A balanced device holds two chunks per full row, r and 2n - 1 - r, at places 0 and 1; otherwise one chunk.
        """
        count = 2 * self.devices if self.balanced else self.devices
        positions = [
            (c, 0) if c < self.devices else (2 * self.devices - 1 - c, 1) for c in range(count)
        ]
        segments_by_pair: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for chunk in range(max(0, -distance), min(count, count - distance)):
            (device, source), (other, target) = positions[chunk], positions[chunk + distance]
            segments_by_pair.setdefault((source, target), []).append((device, other))
        return segments_by_pair

    def order(self, tokens: int, packed: bool) -> np.ndarray:
        """Token index at each position in the sharded sequence."""
        if tokens % self.devices:
            raise ValueError(
                f"{tokens} tokens over {self.devices} devices of {self.axis!r}; pad them to a multiple of it"
            )
        if not self.balanced:
            return np.arange(tokens)
        if packed:
            return order_of_tokens(tokens, ReorderStrategy.Striped, self.devices, self.stripe)
        return order_of_tokens(tokens, ReorderStrategy.DualChunkSwap, self.devices, None)

    def segments(
        self,
        descriptor: object,
        mask_type: AttnMaskType,
        layout: QKVLayout,
        extents: tuple[int, int, int],
    ) -> Segments:
        """Sequence and position for every token in sharded order; bottom-right masks count positions from the end."""
        batch, queries, keys = extents
        orders = [self.order(tokens, layout.is_thd()) for tokens in (queries, keys)]
        if isinstance(descriptor, SequenceDescriptor) and (
            mask_type.is_padding() or layout.is_thd()
        ):
            segment_ids = descriptor.segments(batch, queries, keys)
            if not descriptor.segment_ids[0].size:
                # Lengths and offsets describe the original order; segment ids and positions the sharded order.
                segment_ids = Segments(
                    *(part[:, orders[i % 2]] for i, part in enumerate(segment_ids))
                )
        else:
            ones = [jnp.ones((batch, tokens), jnp.int32) for tokens in (queries, keys)]
            places = [jnp.broadcast_to(jnp.asarray(o, jnp.int32), (batch, o.size)) for o in orders]
            segment_ids = Segments(*ones, *places)
        if not mask_type.is_bottom_right():
            return segment_ids
        return segment_ids._replace(
            query_position=segment_ids.query_position - run_length_fill(segment_ids.query),
            key_position=segment_ids.key_position - run_length_fill(segment_ids.key),
        )


def make_plan(
    axis: str,
    strategy: CPStrategy,
    balanced: bool,
    layout: QKVLayout,
    stripe_size: int | None,
    tokens: tuple[int, int],
) -> ContextParallel | None:
    """Plan a call on `tokens` (queries, keys), or return None if one device computes everything.

    An empty axis means the `cp_resource` of the MeshResource in force. That default applies only where the tokens can
    be sharded over it: without load balancing, lengths that the devices do not divide are computed from whole arrays.
    """
    switch("context_parallel_causal_load_balanced", balanced)
    member("context_parallel_strategy", strategy, CPStrategy)
    text_or_none("context_parallel_axis", axis)
    whole_or_none("stripe_size", stripe_size)
    check_automatic_axis("context_parallel_axis", axis or None)
    used: str | None = axis
    if not axis:
        used = mesh_resource_or_default().cp_resource
        # The axis may be absent, or manual inside a shard_map.
        if used is not None and not (is_mesh_available() and used in automatic_axes()):
            used = None
    devices = get_mesh_axis_size(used)
    ring = strategy is CPStrategy.RING
    if (
        stripe_size is not None
        and stripe_size > 1
        and (ring or not layout.is_thd() or not balanced)
    ):
        raise ValueError(
            f"stripe_size={stripe_size}; stripes of several tokens are for packed rows, load-balanced, with ALL_GATHER"
        )
    if devices == 1 or used is None:
        return None
    if not axis and not balanced and any(length % devices for length in tokens):
        return None
    return ContextParallel(used, devices, ring, balanced, stripe_size or 1)
