"""out = softmax(scale * q @ k.T) @ v with tokens sharded over devices, assembled from single-device attentions.

Every device keeps its queries and receives the other devices' keys one device after the other, gathered or in a ring. A
kernel computes each part of the attention, and parts are added by the logarithms of their denominators
(arXiv:2310.01889).

With a causal mask and tokens in two chunks per device, r and 2n - 1 - r, every other device's keys need two blocks,
chunk x chunk. The later queries attend to the earlier keys of that device. If the device precedes this one, so do the
earlier queries; otherwise the later queries attend to its later keys too. All devices therefore run one program with
equal work, and select tokens at run time instead of branches. Scores [s, s] are never computed in full.

With a window, every chunk attends to itself and to the chunks before and after it that the window reaches. A causal
mask limits the window to the tokens before a query. The keys at distance 1, 2, .. move to the chunk; more distant keys
are not moved.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from ..primitives.attention import AttentionRequest, Parts, attention_parts
from ..primitives.attention.enums import AttnMaskType
from ..sharding import automatic_axes, mesh_in_use, mesh_resource_or_default
from .plan import ContextParallel

Pair = tuple[Array, Array]


class _Block(NamedTuple):
    """Local queries [first, first + queries) that attend to another device's keys [key, key + keys).

    Attributes:
        counts: Whether they do, bool [1 or b]; None on every device. Otherwise the block is computed and discarded.
        window: Query i attends to the keys from i - window[0] to i + window[1]; -1 means no limit, None all keys.
    """

    first: Array | int
    queries: int
    key: Array | int
    keys: int
    counts: Array | None = None
    window: tuple[int, int] | None = None


@dataclass(frozen=True)
class _Problem:
    """A full attention over devices; request: for the full attention."""

    plan: ContextParallel
    request: AttentionRequest
    scale: float

    @property
    def chunks(self) -> int:
        """Separate sequence ranges per device, to which a window is applied."""
        return 2 if self.request.window is not None and self.plan.balanced else 1

    def part(self, queries: int, keys: int, block: _Block | None = None) -> Parts:
        """Attention from local queries to local keys, or for a block, to another device's keys."""
        request = self.request._replace(queries=queries, keys=keys)
        if block is not None:
            request = request._replace(
                mask=AttnMaskType.NO_MASK,
                window=block.window,
                queries=block.queries,
                keys=block.keys,
            )
        return attention_parts(request, self.scale)

    def blocks(
        self, rows: int, queries: int, keys: int, rank: Array, step: int
    ) -> tuple[_Block, ...]:
        """Blocks in which device `rank`'s queries attend to keys from device rank - step, other than its own.

        With a window, the keys come from the chunks `step` before each chunk, or -step after it.

        Args:
            rows: Batch rows, with one row per chunk.
            queries: Queries per row.
            keys: Keys per row.
            rank: Device index.
            step: Distance, from 1 on; negative for later chunks.
        """
        if self.request.window is not None:
            return (self._window_block(rows, keys, rank, step),)
        if not self.request.mask.is_causal():
            return (_Block(0, queries, 0, keys),)
        before = (rank >= step)[None]
        if not self.plan.balanced:
            # The last device computes every block, and the others would only wait for it.
            return (_Block(0, queries, 0, keys, before),)
        half = queries // 2
        return (
            _Block(half, half, 0, half),
            _Block(jnp.where(before[0], 0, half), half, jnp.where(before[0], 0, half), half),
        )

    def _window_block(self, rows: int, tokens: int, rank: Array, step: int) -> _Block:
        assert self.request.window is not None
        reach = self.request.window[0 if step > 0 else 1]  # tokens before a query, or after it
        chunk = jnp.stack((rank, 2 * self.plan.devices - 1 - rank)[: self.chunks])
        other = chunk - step
        counts = jnp.tile(
            (other >= 0) & (other < self.chunks * self.plan.devices), rows // self.chunks
        )
        # Query i attends to the keys from i - limit on in an earlier chunk, and up to i + limit in a later one.
        limit = reach - abs(step) * tokens
        if reach < 0 or limit >= tokens - 1:
            return _Block(0, tokens, 0, tokens, counts)
        if limit >= 0:
            return _Block(0, tokens, 0, tokens, counts, (limit, -1) if step > 0 else (-1, limit))
        # No query attends to the keys at the far end, and the queries at the other end attend to no key.
        shift, size = -limit, tokens + limit
        if step > 0:
            return _Block(0, size, shift, size, counts, (0, -1))
        return _Block(shift, size, 0, size, counts, (-1, 0))


def attention_in_parts(
    plan: ContextParallel,
    request: AttentionRequest,
    query: Array,
    key: Array,
    value: Array,
    scale: float,
    sink: Array | None,
) -> Array:
    """Compute out [b, q, h, dv] from arrays whose tokens are sharded over plan.axis, with one full sequence per row.

    Args:
        plan: Mesh axis, strategy and token order.
        request: Request for the full attention, with a causal mask or none. A window requires as many keys as queries,
            and is (left, 0) with a causal mask; -1 means no limit.
        query: [b, q, h, d].
        key: [b, k, g, d].
        value: [b, k, g, dv].
        scale: Factor of the scores.
        sink: float32 [1, h or 1, 1, 1], differentiable, or None.
    """
    for x in (query, key):
        # raises ValueError for a number of tokens that the devices do not divide
        plan.order(x.shape[1], False)
    request = request._replace(layout=request.layout.to_separate())
    problem = _Problem(plan, request, scale)
    tokens = _token_sharding(plan, query.shape[0], key.shape[2])
    heads = tokens[2] if sink is not None and sink.shape[1] > 1 else None
    mapped = jax.shard_map(
        functools.partial(_attend_chunks, problem),
        mesh=mesh_in_use(),
        in_specs=(PartitionSpec(plan.axis), tokens, tokens, tokens, PartitionSpec(None, heads)),
        out_specs=tokens,
        axis_names=set(automatic_axes()),
        check_vma=False,
    )
    # The device index is an argument: lax.axis_index is not lowered inside another shard_map over part of the mesh.
    return jax.jit(mapped)(jnp.arange(plan.devices, dtype=jnp.int32), query, key, value, sink)


def _token_sharding(plan: ContextParallel, batch: int, groups: int) -> PartitionSpec:
    """Sharding for [b, s, h, d]: tokens over plan.axis, heads over tensor axes, the batch over all others.

    Every axis shards the dimensions that it divides, even if the arrays are sharded otherwise: kernel partitioners do
    not see axes that are not manual, and would have every device compute everything.
    """
    resource = mesh_resource_or_default()
    left = {"batch": batch, "heads": groups}
    cuts: dict[str, list[str]] = {"batch": [], "heads": []}
    for axis, devices in automatic_axes().items():
        first = "heads" if axis in (resource.tp_resource, resource.tpsp_resource) else "batch"
        for what in sorted(cuts, key=first.__ne__):
            if axis != plan.axis and left[what] % devices == 0:
                cuts[what].append(axis)
                left[what] //= devices
                break
    return PartitionSpec(tuple(cuts["batch"]) or None, plan.axis, tuple(cuts["heads"]) or None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    problem: _Problem, rank: Array, query: Array, key: Array, value: Array, sink: Array | None
) -> Array:
    return _forward(problem, rank, query, key, value, sink)[0]


def _attend_chunks(
    problem: _Problem, rank: Array, query: Array, key: Array, value: Array, sink: Array | None
) -> Array:
    """Compute a device's chunks as batch rows, each with its own position in the sequence."""
    rows, tokens = query.shape[0] * problem.chunks, query.shape[1] // problem.chunks
    arrays = (x.reshape(rows, tokens, *x.shape[2:]) for x in (query, key, value))
    out: Any = _attend(problem, rank, *arrays, sink)
    return out.reshape(*query.shape[:3], -1)


def _forward(
    problem: _Problem, rank: Array, query: Array, key: Array, value: Array, sink: Array | None
) -> tuple[Array, Any]:
    queries, keys = query.shape[1], key.shape[1]
    out, level = problem.part(queries, keys).forward(query, key, value)
    total = out.astype(jnp.float32)
    for step, (ks, vs) in _visit_chunks(problem, rank[0], (key, value)):
        for block in problem.blocks(query.shape[0], queries, keys, rank[0], step):
            keys_and_values = (_slice_axis(x, block.key, block.keys) for x in (ks, vs))
            part, part_level = problem.part(queries, keys, block).forward(
                _slice_axis(query, block.first, block.queries), *keys_and_values
            )
            if block.counts is not None:
                part_level = jnp.where(block.counts[:, None, None], part_level, -jnp.inf)
            both = (
                _slice_axis(total, block.first, block.queries),
                _slice_axis(level, block.first, block.queries, 2),
            )
            total_rows, level_rows = _merge_attentions(*both, part, part_level)
            total = lax.dynamic_update_slice_in_dim(total, total_rows, block.first, 1)
            level = lax.dynamic_update_slice_in_dim(level, level_rows, block.first, 2)
    if sink is not None:
        both_levels = jnp.logaddexp(level, sink[..., 0])
        total = total * _rows(jnp.exp(level - both_levels))
        level = both_levels
    out = total.astype(query.dtype)
    return out, (rank, query, key, value, sink, out, level)


def _backward(problem: _Problem, saved: Any, dout: Array) -> tuple[Any, ...]:
    rank, query, key, value, sink, out, level = saved
    queries, keys = query.shape[1], key.shape[1]
    run = problem.part(queries, keys).backward
    wide = [x.astype(jnp.float32) for x in run(query, key, value, out, level, dout)]
    dq, local_grads = wide[0], (wide[1], wide[2])
    collected = _Collected(problem, rank[0], local_grads)
    for step, (ks, vs) in _visit_chunks(problem, rank[0], (key, value)):
        dks, dvs = (jnp.zeros(x.shape, jnp.float32) for x in local_grads)
        for block in problem.blocks(query.shape[0], queries, keys, rank[0], step):
            rows = [_slice_axis(x, block.first, block.queries) for x in (query, out, dout)]
            rows_level = _slice_axis(level, block.first, block.queries, 2)
            keys_and_values = (_slice_axis(x, block.key, block.keys) for x in (ks, vs))
            gradients = problem.part(queries, keys, block).backward(
                rows[0], *keys_and_values, rows[1], rows_level, rows[2]
            )
            if block.counts is not None:
                counts = block.counts[:, None, None, None]
                gradients = [jnp.where(counts, x, jnp.zeros_like(x)) for x in gradients]
            dq = _add_part(dq, gradients[0], block.first)
            dks, dvs = (
                _add_part(dks, gradients[1], block.key),
                _add_part(dvs, gradients[2], block.key),
            )
        collected.add(step, (dks, dvs))
    dk, dv = collected.home()
    dsink = None
    if sink is not None:
        # The sink is a score with a zero value: ds = p * (0 - sum(dout * out)).
        delta = jnp.einsum("bqhd,bqhd->bhq", dout.astype(jnp.float32), out.astype(jnp.float32))
        each = -(jnp.exp(sink[..., 0] - level) * delta).sum(axis=(0, 2))[None, :, None, None]
        dsink = each if sink.shape[1] > 1 else each.sum(axis=1, keepdims=True)
    return None, dq.astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype), dsink


_attend.defvjp(_forward, _backward)


def _visit_chunks(problem: _Problem, rank: Array, local: Pair) -> Iterator[tuple[int, Pair]]:
    """Yield (step, keys and values) from all other devices, or from the chunks that a window reaches."""
    plan = problem.plan
    if (window := problem.request.window) is not None:
        tokens, most = local[0].shape[1], problem.chunks * plan.devices - 1
        # The chunks before and after its own that a query can attend to.
        before, after = (
            most if side < 0 else min(most, (side + tokens - 1) // tokens) for side in window
        )
        for step in (*range(1, before + 1), *range(-1, -after - 1, -1)):
            yield step, _move_chunks(problem, local, step)
        return
    if plan.ring:
        remote = local
        for step in range(1, plan.devices):
            remote = _pass_on(plan, remote)
            yield step, remote
        return
    gathered = [lax.all_gather(x, plan.axis) for x in local]
    for step in range(1, plan.devices):
        device = (rank - step) % plan.devices
        yield step, tuple(lax.dynamic_index_in_dim(x, device, 0, False) for x in gathered)


def _pass_on(plan: ContextParallel, arrays: Pair) -> Pair:
    return tuple(lax.ppermute(x, plan.axis, plan.neighbours) for x in arrays)


def _move_chunks(problem: _Problem, arrays: Pair, distance: int) -> Pair:
    """Move every chunk [b * chunks, ..] to the device with the chunk `distance` after it; 0 where none arrives."""

    def moved(x: Array) -> Array:
        chunks = x.reshape(-1, problem.chunks, *x.shape[1:])
        there = [jnp.zeros_like(chunks[:, 0])] * problem.chunks
        for (place, other), devices in problem.plan.moves(distance).items():
            # ppermute returns 0 where nothing is sent, so the arrays of both places can be added.
            there[other] = there[other] + lax.ppermute(chunks[:, place], problem.plan.axis, devices)
        return jnp.stack(there, axis=1).reshape(x.shape)

    return moved(arrays[0]), moved(arrays[1])


class _Collected:
    """Gradients for other devices' keys and values, in `_visit_chunks` order, which return to their devices."""

    def __init__(self, problem: _Problem, rank: Array, local: Pair):
        self.problem, self.plan, self.rank = problem, problem.plan, rank
        self.steps = [local]

    def add(self, step: int, of_others: Pair) -> None:
        """Add the key and value gradients from a step."""
        if self.problem.request.window is not None:
            home = _move_chunks(self.problem, of_others, -step)
            self.steps = [(self.steps[0][0] + home[0], self.steps[0][1] + home[1])]
            return
        if not self.plan.ring:
            self.steps.append(of_others)
            return
        # They move one step after their keys and values.
        remote = _pass_on(self.plan, self.steps[0])
        self.steps = [(remote[0] + of_others[0], remote[1] + of_others[1])]

    def home(self) -> Pair:
        """Gradients for this device's keys and values, summed over all devices."""
        if self.problem.request.window is not None:
            return self.steps[0]
        if self.plan.ring:
            return _pass_on(self.plan, self.steps[0])
        devices = self.plan.devices
        order = (self.rank - jnp.arange(devices)) % devices
        stacked = (jnp.take(jnp.stack(x), order, axis=0) for x in zip(*self.steps, strict=True))
        return tuple(lax.psum_scatter(x, self.plan.axis) for x in stacked)


def _merge_attentions(total: Array, level: Array, part: Array, part_level: Array) -> Pair:
    """Merge attentions to different keys: outputs [b, q, h, d], levels [b, h, q]."""
    both = jnp.logaddexp(level, part_level)
    first, second = (_rows(jnp.exp(x - both)) for x in (level, part_level))
    return total * first + part.astype(jnp.float32) * second, both


def _rows(level: Array) -> Array:
    """Transpose [b, h, q] to [b, q, h, 1]."""
    return jnp.moveaxis(level, 1, 2)[..., None]


def _slice_axis(x: Array, first: Array | int, size: int, axis: int = 1) -> Array:
    """Slice x[first : first + size] along an axis."""
    return x if x.shape[axis] == size else lax.dynamic_slice_in_dim(x, first, size, axis)


def _add_part(x: Array, part: Array, first: Array | int) -> Array:
    """Add a part to the tokens of x from `first` on."""
    rows = _slice_axis(x, first, part.shape[1]) + part.astype(x.dtype)
    return lax.dynamic_update_slice_in_dim(x, rows, first, 1)
