"""out = softmax(scale * q @ k.T) @ v of tokens over devices, put together from attentions of one device.

Every device has its queries and sees the keys of one device after the other, gathered or going round: parts of one
attention, each computed by a kernel, add up by the logarithms of their denominators (arXiv:2310.01889). Of a causal
mask whose tokens are dealt out in two chunks, r and 2n - 1 - r, the keys of every other device cost two blocks of a
chunk by a chunk: the later queries see its earlier keys; if that device stands before this one so do the earlier
queries, else the later ones see its later keys too. So all devices run one program with the same work, and choose
tokens at run time instead of branches. No scores of [s, s] are made.

Of a causal mask with a window every chunk sees itself and those in front of it as far as the window reaches, whoever
has them: the keys at distance 1, 2, .. come to it, and those beyond go nowhere.
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
from ..primitives.attention.masks import Window
from ..sharding import automatic_axes, mesh_in_use, mesh_resource_or_default
from .plan import ContextParallel

Pair = tuple[Array, Array]


class _Block(NamedTuple):
    """Local queries [first, first + q) and tokens of another device's keys [key, key + k), all of whom they see.

    counts   do they? bool [1 or b]; None: on every device; where they do not, the block is computed and left out
    left     query i sees the keys from i - left on alone; None: all
    """

    first: Array | int
    queries: int
    key: Array | int
    keys: int
    counts: Array | None = None
    left: int | None = None


@dataclass(frozen=True)
class _Problem:
    plan: ContextParallel
    request: AttentionRequest
    scale: float

    @property
    def causal(self) -> bool:
        return self.request.mask.is_causal()

    @property
    def chunks(self) -> int:
        """Stretches of the sequence, by which a window is counted, that a device has."""
        return 2 if self.request.window is not None and self.plan.balanced else 1

    def own(self, queries: int, keys: int) -> Parts:
        """What queries see of the keys that lie with them."""
        return self._parts(queries, keys, self.request.mask, self.request.window)

    def part(self, block: _Block) -> Parts:
        window = None if block.left is None else (block.left, -1)
        return self._parts(block.queries, block.keys, AttnMaskType.NO_MASK, window)

    def _parts(self, queries: int, keys: int, mask: AttnMaskType, window: Window | None) -> Parts:
        request = self.request._replace(mask=mask, window=window, queries=queries, keys=keys)
        return attention_parts(request, self.scale)

    def blocks(self, rows: int, queries: int, keys: int, rank: Array, step: int) -> tuple[_Block, ...]:
        """What the queries of device `rank` see of the keys of device rank - step, beside its own; rows: of the batch.

        With a window: of the keys of chunks that lie `step` in front.
        """
        if not self.causal:
            return (_Block(0, queries, 0, keys),)
        if self.request.window is not None:
            return (self._within_window(rows, keys, rank, step),)
        before = (rank >= step)[None]
        if not self.plan.balanced:
            # The last device computes every block anyway, and the others would only wait for it.
            return (_Block(0, queries, 0, keys, before),)
        half = queries // 2
        return (
            _Block(half, half, 0, half),
            _Block(jnp.where(before[0], 0, half), half, jnp.where(before[0], 0, half), half),
        )

    def _within_window(self, rows: int, tokens: int, rank: Array, step: int) -> _Block:
        assert self.request.window is not None
        left = self.request.window[0] - step * tokens  # query i sees the keys from i - left on
        chunk = jnp.stack((rank, 2 * self.plan.devices - 1 - rank)[: self.chunks])
        counts = jnp.tile(chunk >= step, rows // self.chunks)
        if left < 0:
            # The last queries see none of them, and nobody the first keys.
            return _Block(0, tokens + left, -left, tokens + left, counts, 0)
        return _Block(0, tokens, 0, tokens, counts, left if left < tokens - 1 else None)

    def reach(self, tokens: int) -> int:
        """How many chunks of so many tokens in front of its own a query can see."""
        assert self.request.window is not None
        in_front = self.chunks * self.plan.devices - 1
        return min(in_front, (self.request.window[0] + tokens - 1) // tokens)


def attention_in_parts(
    plan: ContextParallel, request: AttentionRequest, query: Array, key: Array, value: Array, scale: float,
    sink: Array | None,
) -> Array:  # fmt: skip
    """out [b, q, h, dv] of arrays whose tokens are laid over plan.axis, a whole sequence in each row.

    request   of the whole attention, its mask causal or none; a window goes with a causal one
    sink      float32 [1, h or 1, 1, 1], differentiable
    """
    for x in (query, key):
        plan.order(x.shape[1], False)  # refuses tokens that do not go round
    request = request._replace(layout=request.layout.to_separate())
    problem = _Problem(plan, request, scale)
    tokens = _laid(plan, query.shape[0], key.shape[2])
    heads = tokens[2] if sink is not None and sink.shape[1] > 1 else None
    mapped = jax.shard_map(
        functools.partial(_attend_chunks, problem),
        mesh=mesh_in_use(),
        in_specs=(PartitionSpec(plan.axis), tokens, tokens, tokens, PartitionSpec(None, heads)),
        out_specs=tokens,
        axis_names=set(automatic_axes()),
        check_vma=False,
    )
    # The device's place is given: lax.axis_index is not lowered where another shard_map holds part of the mesh.
    return jax.jit(mapped)(jnp.arange(plan.devices, dtype=jnp.int32), query, key, value, sink)


def _laid(plan: ContextParallel, batch: int, groups: int) -> PartitionSpec:
    """How [b, s, h, d] lies: tokens over plan.axis, heads over the axes of tensors, the batch over all others.

    Every axis cuts what it divides, also where arrays lay otherwise: partitioners of kernels see no axes beside those
    that are manual, and would have every device compute the whole.
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
    """The chunks of a device as rows of the batch, each with a place of its own in the sequence."""
    rows, tokens = query.shape[0] * problem.chunks, query.shape[1] // problem.chunks
    arrays = (x.reshape(rows, tokens, *x.shape[2:]) for x in (query, key, value))
    out: Any = _attend(problem, rank, *arrays, sink)
    return out.reshape(*query.shape[:3], -1)


def _forward(
    problem: _Problem, rank: Array, query: Array, key: Array, value: Array, sink: Array | None
) -> tuple[Array, Any]:
    queries, keys = query.shape[1], key.shape[1]
    out, level = problem.own(queries, keys).forward(query, key, value)
    total = out.astype(jnp.float32)
    for step, (ks, vs) in _visited(problem, rank[0], (key, value)):
        for block in problem.blocks(query.shape[0], queries, keys, rank[0], step):
            seen = (_cut(x, block.key, block.keys) for x in (ks, vs))
            part, part_level = problem.part(block).forward(_cut(query, block.first, block.queries), *seen)
            if block.counts is not None:
                part_level = jnp.where(block.counts[:, None, None], part_level, -jnp.inf)
            both = (
                _cut(total, block.first, block.queries),
                _cut(level, block.first, block.queries, 2),
            )
            total_rows, level_rows = _merged(*both, part, part_level)
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
    run = problem.own(queries, keys).backward
    wide = [x.astype(jnp.float32) for x in run(query, key, value, out, level, dout)]
    dq, own = wide[0], (wide[1], wide[2])
    collected = _Collected(problem, rank[0], own)
    for step, (ks, vs) in _visited(problem, rank[0], (key, value)):
        dks, dvs = (jnp.zeros(x.shape, jnp.float32) for x in own)
        for block in problem.blocks(query.shape[0], queries, keys, rank[0], step):
            rows = [_cut(x, block.first, block.queries) for x in (query, out, dout)]
            rows_level = _cut(level, block.first, block.queries, 2)
            seen = (_cut(x, block.key, block.keys) for x in (ks, vs))
            made = problem.part(block).backward(rows[0], *seen, rows[1], rows_level, rows[2])
            if block.counts is not None:
                counts = block.counts[:, None, None, None]
                made = [jnp.where(counts, x, jnp.zeros_like(x)) for x in made]
            dq = _added(dq, made[0], block.first)
            dks, dvs = _added(dks, made[1], block.key), _added(dvs, made[2], block.key)
        collected.add(step, (dks, dvs))
    dk, dv = collected.home()
    dsink = None
    if sink is not None:
        # The sink is a score whose value is zero: ds = p * (0 - sum(dout * out)).
        delta = jnp.einsum("bqhd,bqhd->bhq", dout.astype(jnp.float32), out.astype(jnp.float32))
        each = -(jnp.exp(sink[..., 0] - level) * delta).sum(axis=(0, 2))[None, :, None, None]
        dsink = each if sink.shape[1] > 1 else each.sum(axis=1, keepdims=True)
    return None, dq.astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype), dsink


_attend.defvjp(_forward, _backward)


def _visited(problem: _Problem, rank: Array, own: Pair) -> Iterator[tuple[int, Pair]]:
    """(step, keys and values) of all other devices, or of the chunks that a window reaches; see `_Problem.blocks`."""
    plan = problem.plan
    if problem.request.window is not None:
        for step in range(1, problem.reach(own[0].shape[1]) + 1):
            yield step, _moved(problem, own, step)
        return
    if plan.ring:
        there = own
        for step in range(1, plan.devices):
            there = _passed_on(plan, there)
            yield step, there
        return
    gathered = [lax.all_gather(x, plan.axis) for x in own]
    for step in range(1, plan.devices):
        device = (rank - step) % plan.devices
        yield step, tuple(lax.dynamic_index_in_dim(x, device, 0, False) for x in gathered)  # pyright: ignore


def _passed_on(plan: ContextParallel, arrays: Pair) -> Pair:
    return tuple(lax.ppermute(x, plan.axis, plan.neighbours) for x in arrays)  # pyright: ignore[reportReturnType]


def _moved(problem: _Problem, arrays: Pair, distance: int) -> Pair:
    """Every chunk's array [b * chunks, ..] in the place of that `distance` behind it; 0 where none has come."""

    def moved(x: Array) -> Array:
        chunks = x.reshape(-1, problem.chunks, *x.shape[1:])
        there = [jnp.zeros_like(chunks[:, 0])] * problem.chunks
        for (place, other), devices in problem.plan.moves(distance).items():
            # ppermute answers 0 to whom nothing is sent, so that what comes from either place adds up.
            there[other] = there[other] + lax.ppermute(chunks[:, place], problem.plan.axis, devices)
        return jnp.stack(there, axis=1).reshape(x.shape)

    return moved(arrays[0]), moved(arrays[1])


class _Collected:
    """Gradients of the keys and values that a device has seen, in the order of `_visited`, on their way home."""

    def __init__(self, problem: _Problem, rank: Array, own: Pair):
        self.problem, self.plan, self.rank = problem, problem.plan, rank
        self.steps = [own]

    def add(self, step: int, of_others: Pair) -> None:
        if self.problem.request.window is not None:
            home = _moved(self.problem, of_others, -step)
            self.steps = [(self.steps[0][0] + home[0], self.steps[0][1] + home[1])]
            return
        if not self.plan.ring:
            self.steps.append(of_others)
            return
        # They travel one step behind their keys and values.
        there = _passed_on(self.plan, self.steps[0])
        self.steps = [(there[0] + of_others[0], there[1] + of_others[1])]

    def home(self) -> Pair:
        """The sums over all devices, of this one's keys and values."""
        if self.problem.request.window is not None:
            return self.steps[0]
        if self.plan.ring:
            return _passed_on(self.plan, self.steps[0])
        devices = self.plan.devices
        order = (self.rank - jnp.arange(devices)) % devices
        stacked = (jnp.take(jnp.stack(x), order, axis=0) for x in zip(*self.steps, strict=True))
        return tuple(lax.psum_scatter(x, self.plan.axis) for x in stacked)  # pyright: ignore[reportReturnType]


def _merged(total: Array, level: Array, part: Array, part_level: Array) -> Pair:
    """Two attentions to different keys as one to both: outputs [b, q, h, d], levels [b, h, q]."""
    both = jnp.logaddexp(level, part_level)
    first, second = (_rows(jnp.exp(x - both)) for x in (level, part_level))
    return total * first + part.astype(jnp.float32) * second, both


def _rows(level: Array) -> Array:
    """[b, h, q] -> [b, q, h, 1]"""
    return jnp.moveaxis(level, 1, 2)[..., None]


def _cut(x: Array, first: Array | int, size: int, axis: int = 1) -> Array:
    return x if x.shape[axis] == size else lax.dynamic_slice_in_dim(x, first, size, axis)


def _added(x: Array, part: Array, first: Array | int) -> Array:
    """x with a part added to its tokens from `first` on."""
    rows = _cut(x, first, part.shape[1]) + part.astype(x.dtype)
    return lax.dynamic_update_slice_in_dim(x, rows, first, 1)
