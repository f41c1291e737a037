"""out = softmax(scale * q @ k.T) @ v of tokens over devices, put together from attentions of one device.

Every device has its queries and sees the keys of one device after the other, gathered or going round: parts of one
attention, each computed by a kernel, add up by the logarithms of their denominators (arXiv:2310.01889). Of a causal
mask whose tokens are dealt out in two chunks, r and 2n - 1 - r, the keys of every other device cost two blocks of a
chunk by a chunk: the later queries see its earlier keys; if that device stands before this one so do the earlier
queries, else the later ones see its later keys too. So all devices run one program with the same work, and choose
tokens at run time instead of branches. No scores of [s, s] are made.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, PartitionSpec

from ..primitives.attention import AttentionRequest, Parts, attention_parts
from ..primitives.attention.enums import AttnMaskType
from ..sharding import mesh_in_use, mesh_resource_or_default
from .plan import ContextParallel

Pair = tuple[Array, Array]


class _Block(NamedTuple):
    """Local queries [first, first + q) and tokens of another device's keys [key, key + k), all of whom they see.

    counts   do they? None: on every device; where they do not, the block is computed and left out
    """

    first: Array | int
    queries: int
    key: Array | int
    keys: int
    counts: Array | None = None


@dataclass(frozen=True)
class _Problem:
    plan: ContextParallel
    request: AttentionRequest
    scale: float

    @property
    def causal(self) -> bool:
        return self.request.mask.is_causal()

    def parts(self, queries: int, keys: int, causal: bool) -> Parts:
        mask = AttnMaskType.CAUSAL_MASK if causal else AttnMaskType.NO_MASK
        return attention_parts(self.request._replace(mask=mask, queries=queries, keys=keys), self.scale)

    def blocks(self, queries: int, keys: int, rank: Array, step: int) -> tuple[_Block, ...]:
        """What the queries of device `rank` see of the keys of device rank - step, beside its own."""
        if not self.causal:
            return (_Block(0, queries, 0, keys),)
        before = rank >= step
        if not self.plan.balanced:
            # The last device computes every block anyway, and the others would only wait for it.
            return (_Block(0, queries, 0, keys, before),)
        half = queries // 2
        return (
            _Block(half, half, 0, half),
            _Block(jnp.where(before, 0, half), half, jnp.where(before, 0, half), half),
        )


def attention_in_parts(
    plan: ContextParallel, request: AttentionRequest, query: Array, key: Array, value: Array, scale: float,
    sink: Array | None,
) -> Array:  # fmt: skip
    """out [b, q, h, dv] of arrays whose tokens are laid over plan.axis, a whole sequence in each row.

    request   of the whole attention, its mask causal or none
    sink      float32 [1, h or 1, 1, 1], differentiable
    """
    for x in (query, key):
        plan.order(x.shape[1], False)  # refuses tokens that do not go round
    request = request._replace(layout=request.layout.to_separate())
    problem = _Problem(plan, request, scale)
    tokens = _laid(plan, query.shape[0], key.shape[2])
    heads = tokens[2] if sink is not None and sink.shape[1] > 1 else None
    mapped = jax.shard_map(
        functools.partial(_attend, problem),
        mesh=mesh_in_use(),
        in_specs=(PartitionSpec(plan.axis), tokens, tokens, tokens, PartitionSpec(None, heads)),
        out_specs=tokens,
        axis_names=set(_automatic_axes()),
        check_vma=False,
    )
    # The device's place is given: lax.axis_index is not lowered where another shard_map holds part of the mesh.
    return jax.jit(mapped)(jnp.arange(plan.devices, dtype=jnp.int32), query, key, value, sink)


def _automatic_axes() -> dict[str, int]:
    """The axes of the mesh that no shard_map around us holds, and their devices."""
    mesh = mesh_in_use()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, kind in kinds if kind is not AxisType.Manual}


def _laid(plan: ContextParallel, batch: int, groups: int) -> PartitionSpec:
    """How [b, s, h, d] lies: tokens over plan.axis, heads over the axes of tensors, the batch over all others.

    Every axis cuts what it divides, also where arrays lay otherwise: partitioners of kernels see no axes beside those
    that are manual, and would have every device compute the whole.
    """
    resource = mesh_resource_or_default()
    left = {"batch": batch, "heads": groups}
    cuts: dict[str, list[str]] = {"batch": [], "heads": []}
    for axis, devices in _automatic_axes().items():
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


def _forward(
    problem: _Problem, rank: Array, query: Array, key: Array, value: Array, sink: Array | None
) -> tuple[Array, Any]:
    queries, keys = query.shape[1], key.shape[1]
    out, level = problem.parts(queries, keys, problem.causal).forward(query, key, value)
    total = out.astype(jnp.float32)
    for step, (ks, vs) in _visited(problem.plan, rank[0], (key, value)):
        for block in problem.blocks(queries, keys, rank[0], step):
            seen = (_cut(x, block.key, block.keys) for x in (ks, vs))
            run = problem.parts(block.queries, block.keys, False).forward
            part, part_level = run(_cut(query, block.first, block.queries), *seen)
            if block.counts is not None:
                part_level = jnp.where(block.counts, part_level, -jnp.inf)
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
    run = problem.parts(queries, keys, problem.causal).backward
    wide = [x.astype(jnp.float32) for x in run(query, key, value, out, level, dout)]
    dq, own = wide[0], (wide[1], wide[2])
    collected = _Collected(problem.plan, rank[0], own)
    for step, (ks, vs) in _visited(problem.plan, rank[0], (key, value)):
        dks, dvs = (jnp.zeros(x.shape, jnp.float32) for x in own)
        for block in problem.blocks(queries, keys, rank[0], step):
            rows = [_cut(x, block.first, block.queries) for x in (query, out, dout)]
            rows_level = _cut(level, block.first, block.queries, 2)
            seen = (_cut(x, block.key, block.keys) for x in (ks, vs))
            run = problem.parts(block.queries, block.keys, False).backward
            made = run(rows[0], *seen, rows[1], rows_level, rows[2])
            if block.counts is not None:
                made = [jnp.where(block.counts, x, jnp.zeros_like(x)) for x in made]
            dq = _added(dq, made[0], block.first)
            dks, dvs = _added(dks, made[1], block.key), _added(dvs, made[2], block.key)
        collected.add((dks, dvs))
    dk, dv = collected.home()
    dsink = None
    if sink is not None:
        # The sink is a score whose value is zero: ds = p * (0 - sum(dout * out)).
        delta = jnp.einsum("bqhd,bqhd->bhq", dout.astype(jnp.float32), out.astype(jnp.float32))
        each = -(jnp.exp(sink[..., 0] - level) * delta).sum(axis=(0, 2))[None, :, None, None]
        dsink = each if sink.shape[1] > 1 else each.sum(axis=1, keepdims=True)
    return None, dq.astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype), dsink


_attend.defvjp(_forward, _backward)


def _visited(plan: ContextParallel, rank: Array, own: Pair) -> Iterator[tuple[int, Pair]]:
    """(step, keys and values of device rank - step), of all other devices."""
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


class _Collected:
    """Gradients of the keys and values that a device has seen, in the order of `_visited`, on their way home."""

    def __init__(self, plan: ContextParallel, rank: Array, own: Pair):
        self.plan, self.rank = plan, rank
        self.steps = [own]

    def add(self, of_others: Pair) -> None:
        if not self.plan.ring:
            self.steps.append(of_others)
            return
        # They travel one step behind their keys and values.
        there = _passed_on(self.plan, self.steps[0])
        self.steps = [(there[0] + of_others[0], there[1] + of_others[1])]

    def home(self) -> Pair:
        """The sums over all devices, of this one's keys and values."""
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
