"""scale = (fp8_max / amax) / 2^margin, from the histories of amaxes that the steps before have seen.

An amax history is float32 [length, n], one column a tensor. Row 0 collects the running step; an update turns
it into the last row, drops the oldest (row 1) and clears row 0. States that share direction, recipe and group
share a pool: one reduction over the group and one set of kernels for all. Nothing reads a value on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common import env
from ...common.recipe import DelayedScaling
from ..constants import dist_group_type
from ..primitives.scale_update import advance_scales, amax_of, rolled, scale_of
from ..tracing import constant_while_tracing

Algorithm = str | Callable[..., Tensor]


_default_sf_compute = scale_of  # the original's name


def _amax_of(history: Tensor, algorithm: Algorithm) -> Tensor:
    """amax [n] of a history [length, n] whose row 0 is the latest step."""
    return algorithm(history) if callable(algorithm) else amax_of(history, algorithm)


def _reduce(histories: Sequence[Tensor], group: dist_group_type) -> None:
    """Row 0 of every history = its maximum over the ranks of group, in one collective."""
    latest = torch.cat([history[0] for history in histories])
    torch.distributed.all_reduce(latest, op=torch.distributed.ReduceOp.MAX, group=group)
    parts = latest.split([history.shape[1] for history in histories])
    for history, part in zip(histories, parts, strict=True):
        history[0].copy_(part)


# A partitioner that recomputes a cast in the backward pass would keep `scale` itself for it, which the end of
# the autocast block changes in between. It never recomputes a registered operator, and so keeps this copy.
@torch.library.custom_op("transformer_engine::scale_snapshot", mutates_args=())
def scale_snapshot(scale: torch.Tensor) -> torch.Tensor:
    """A copy of scale as it is now."""
    return scale.clone()


@scale_snapshot.register_fake
def _snapshot_fake(scale):
    return torch.empty_like(scale)


# Under functionalization a mutation that the schema does not declare may move past reads of the same tensor.
@torch.library.custom_op(
    "transformer_engine::update_scales",
    mutates_args=("histories", "scales"),
    schema="(Tensor(a!)[] histories, Tensor(b!)[] scales, str algorithm, float fp8_max, int margin, "
    "bool keep_idle, str group) -> ()",
)
def _update_op(
    histories: list[Tensor],
    scales: list[Tensor],
    algorithm: str,
    fp8_max: float,
    margin: int,
    keep_idle: bool,
    group: str,
) -> None:
    if group:
        resolve: Any = torch.distributed.distributed_c10d._resolve_process_group
        _reduce(histories, resolve(group))
    advance_scales(histories, scales, algorithm, fp8_max, margin, keep_idle)


@_update_op.register_fake
def _update_fake(histories, scales, algorithm, fp8_max, margin, keep_idle, group) -> None:
    return None


def _amax_and_scale_update(
    amax_history: Tensor, scale: Tensor, fp8_max: float, recipe: DelayedScaling
) -> None:
    """The literal update in place: every column rolls, and both algorithms may be callables."""
    amax = _amax_of(amax_history, recipe.amax_compute_algo)
    if recipe.scaling_factor_compute_algo is None:
        new_scale = _default_sf_compute(amax, scale, fp8_max, recipe.margin)
    else:
        new_scale = recipe.scaling_factor_compute_algo(amax, scale, fp8_max, recipe)
    scale.copy_(new_scale)
    amax_history.copy_(rolled(amax_history))


@constant_while_tracing
def _rolls_idle_histories() -> bool:
    return env.flag("NVTE_UNFUSED_FP8_UPDATE")


def update_scales(
    histories: list[Tensor],
    scales: list[Tensor],
    fp8_max: float,
    recipe: DelayedScaling,
    group: dist_group_type | None = None,
) -> None:
    """Reduce row 0 over group, then bring all scales and histories one step forward, in place.

    Tensors that were not quantized since the last update keep theirs, unless NVTE_UNFUSED_FP8_UPDATE=1 or an
    algorithm is a callable.
    """
    algorithm = recipe.amax_compute_algo
    if callable(algorithm) or recipe.scaling_factor_compute_algo is not None:
        if group is not None:
            _reduce(histories, group)
        for history, scale in zip(histories, scales, strict=True):
            _amax_and_scale_update(history, scale, fp8_max, recipe)
        return
    keep_idle = not _rolls_idle_histories()
    if torch.compiler.is_compiling():
        name = "" if group is None else group.group_name
        _update_op(histories, scales, algorithm, float(fp8_max), recipe.margin, keep_idle, name)
        return
    if group is not None:
        _reduce(histories, group)
    advance_scales(histories, scales, algorithm, float(fp8_max), recipe.margin, keep_idle)


def update_states(
    states: Sequence[Any], forward: bool, recipe: DelayedScaling, group: dist_group_type | None
) -> None:
    """Bring states of one direction and recipe one step forward, reduced over group where the recipe asks for it."""
    largest = recipe.fp8_format.value
    update_scales(
        [state.amax_history for state in states],
        [state.scale_in_place for state in states],
        largest.max_fwd if forward else largest.max_bwd,
        recipe,
        group if recipe.reduce_amax else None,
    )


class Pool:
    """The delayed-scaling states of one direction, recipe and group; ranks must agree on their order."""

    def __init__(self, forward: bool, recipe: DelayedScaling, group: dist_group_type | None):
        self.forward = forward
        self.recipe = recipe
        self.group = group
        # Strong references: ranks agree on what was registered, not on what was garbage collected.
        self.states: list[Any] = []

    def update(self) -> None:
        if len(self.states) > 0:
            update_states(self.states, self.forward, self.recipe, self.group)


class Registration(NamedTuple):
    """Where a state is registered, kept on the state so that the next forward pass finds it at once."""

    pools: dict[str, Pool]
    pool: Pool
    recipe: DelayedScaling
    group: dist_group_type | None


class _Registry:
    """All pools by key; the only writer is this module."""

    def __init__(self) -> None:
        self.pools: dict[str, Pool] = {}


_registry = _Registry()


def autocast_key(recipe: DelayedScaling, group: dist_group_type | None) -> str:
    """What tells apart two regions whose amaxes must not be mixed."""
    return f"{recipe!r}:{0 if group is None else id(group)}"


def buffer_key(forward: bool, recipe: DelayedScaling, group: dist_group_type | None) -> str:
    """The key of a pool."""
    return ("forward_" if forward else "backward_") + autocast_key(recipe, group)


def register(state: Any, forward: bool, recipe: DelayedScaling, group: dist_group_type | None) -> None:
    """Have the updates of (forward, recipe, group) include the state, and those of no other pool."""
    held = state.registration
    if held is not None and held.pools is _registry.pools:
        if held.recipe is recipe and held.group is group:
            return
        held.pool.states = [member for member in held.pool.states if member is not state]
    key = buffer_key(forward, recipe, group)
    pool = _registry.pools.get(key)
    if pool is None:
        pool = Pool(forward, recipe, group)
        _registry.pools[key] = pool
    pool.states.append(state)
    state.registration = Registration(_registry.pools, pool, recipe, group)


def unregister(state: Any) -> None:
    """Leave the state out of all later updates."""
    held = state.registration
    if held is not None and held.pools is _registry.pools:
        held.pool.states = [member for member in held.pool.states if member is not state]
    state.registration = None


def pools() -> dict[str, Pool]:
    """All pools by key."""
    return _registry.pools


def update_all(forward: bool) -> None:
    """Update every pool of one direction, in order of registration."""
    for pool in _registry.pools.values():
        if pool.forward == forward:
            pool.update()


def reset() -> None:
    """Forget every pool."""
    _registry.pools = {}
