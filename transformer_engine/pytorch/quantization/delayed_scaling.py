"""scale = (fp8_max / amax) / 2^margin, from the amax histories of earlier steps.

This scale multiplies values before rounding, the inverse of the scale of an operand (`functions/linear.py`).

An amax history is float32 [length, n], one column per tensor. Row 0 collects the running step; an update turns it
into the last row, drops the oldest (row 1) and clears row 0. States that share direction, recipe and group share a
pool: one reduction over the group and one kernel set for all. Nothing reads a value on the host.

A pool holds weak references to its states, so that a deleted module costs nothing. Ranks that reduce together must
agree on the layout of the reduced tensor, but collect garbage at different times: the columns of a deleted state
remain as a zero gap, at its index in registration order. A state that a module replaces leaves no gap.

**torch.compile.** Scales have the bits of eager mode. These steps differ:

- **States.** A module creates them in its first call under the recipe (`module/numerics.py`). While it is traced,
  `trace_call` creates them outside of the graph, whose backward pass writes to them.
- **Maxima.** In eager mode the kernel that quantizes records the maximum. In a graph, a separate operation does, which
  the compiler sees: `spec.traced` excludes casts in other kernels (`input_cast` in `functions/linear_operands.py`).
- **Forward scales** change at the end of the outermost `autocast` block in both modes (`_update_scales` in
  `autocast.py`), in a graph if the block is in it.
- **Gradient scales.** In eager mode a callback at the end of the backward pass updates the scales
  in all modules (`functions/scale_update.py`). In a graph each module updates its own, in the
  backward pass of its first call there, which runs last (`traced_update` in `module/numerics.py`).
- **Checkpoints.** A second run reads the scales of the first (`recompute_states.py`), in a graph by the operator
  `replay_scale` (`compiled_runs.py`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common import env
from ...common.recipe import DelayedScaling
from ..constants import dist_group_type
from ..primitives.scale_update import advance_scales, history_amax, next_scale, roll_history
from ..runtime.tracing import constant_while_tracing
from .compiled_runs import is_second_run

Algorithm = str | Callable[..., Tensor]


_default_sf_compute = next_scale  # NVIDIA's name


# (group, forward, columns, device) for a maxima reduction. `before_reductions` alone appends.
_checks: list[Callable[[dist_group_type, bool, int, torch.device], None]] = []


def before_reductions(check: Callable[[dist_group_type, bool, int, torch.device], None]) -> None:
    """Register a function that every rank calls before a maxima reduction, except in compiled graphs.

    Args:
        check: `check(group, forward, columns, device)`, with the direction of the scales and the number of maxima.
    """
    _checks.append(check)


def _check(group: dist_group_type, forward: bool, columns: int, device: torch.device) -> None:
    """Call the registered functions."""
    if not torch.compiler.is_compiling():
        for check in _checks:
            check(group, forward, columns, device)


def _reduce(histories: Sequence[Tensor], group: dist_group_type, gaps: Sequence[int] = ()) -> None:
    """Replace row 0 of every history by its maximum over the ranks of the group, in one collective.

    Args:
        histories: Amax histories [length, n].
        group: Process group.
        gaps: Column counts for deleted states, before each history and after the last; empty without deleted states.
    """
    pieces: list[Tensor] = []
    places: list[int] = []
    for index, history in enumerate(histories):
        if gaps and gaps[index]:
            pieces.append(history.new_zeros(gaps[index]))
        places.append(len(pieces))
        pieces.append(history[0])
    if gaps and gaps[-1]:
        pieces.append(pieces[0].new_zeros(gaps[-1]))
    reduced = torch.cat(pieces)
    torch.distributed.all_reduce(reduced, op=torch.distributed.ReduceOp.MAX, group=group)
    parts = reduced.split([piece.numel() for piece in pieces])
    for history, place in zip(histories, places, strict=True):
        history[0].copy_(parts[place])


# Under functionalization a mutation that the schema does not declare may move past reads of the same tensor.
@torch.library.custom_op(
    "transformer_engine::update_scales",
    mutates_args=("histories", "scales"),
    schema="(Tensor(a!)[] histories, Tensor(b!)[] scales, str algorithm, float fp8_max, int margin, "
    "bool keep_idle, str group, int[] gaps=[]) -> ()",
)
def _update_op(
    histories: list[Tensor],
    scales: list[Tensor],
    algorithm: str,
    fp8_max: float,
    margin: int,
    keep_idle: bool,
    group: str,
    gaps: Sequence[int] = (),
) -> None:
    if is_second_run():
        return
    if group:
        resolve: Any = torch.distributed.distributed_c10d._resolve_process_group
        _reduce(histories, resolve(group), gaps)
    advance_scales(histories, scales, algorithm, fp8_max, margin, keep_idle)


@_update_op.register_fake
def _update_fake(histories, scales, algorithm, fp8_max, margin, keep_idle, group, gaps=()) -> None:
    return None


def _amax_and_scale_update(
    amax_history: Tensor, scale: Tensor, fp8_max: float, recipe: DelayedScaling
) -> None:
    """Update histories and scales in place by the definition; supports callables for both algorithms."""
    algorithm = recipe.amax_compute_algo
    amax = algorithm(amax_history) if callable(algorithm) else history_amax(amax_history, algorithm)
    if recipe.scaling_factor_compute_algo is None:
        new_scale = _default_sf_compute(amax, scale, fp8_max, recipe.margin)
    else:
        new_scale = recipe.scaling_factor_compute_algo(amax, scale, fp8_max, recipe)
    scale.copy_(new_scale)
    amax_history.copy_(roll_history(amax_history))


_ROLLS = "NVTE_UNFUSED_FP8_UPDATE"
_requested = env.watch(_ROLLS)


@constant_while_tracing
def _rolls_idle_histories() -> bool:
    return _requested() is not None and env.flag(_ROLLS)


def update_scales(
    histories: list[Tensor],
    scales: list[Tensor],
    fp8_max: float,
    recipe: DelayedScaling,
    group: dist_group_type | None = None,
    gaps: Sequence[int] = (),
) -> None:
    """Reduce row 0 over the group, then advance all scales and histories by one step, in place.

    Tensors that were not quantized since the last update keep their scales and histories, unless
    NVTE_UNFUSED_FP8_UPDATE=1 or an algorithm is a callable.
    """
    algorithm = recipe.amax_compute_algo
    if callable(algorithm) or recipe.scaling_factor_compute_algo is not None:
        if torch.compiler.is_compiling() and is_second_run():
            return
        if group is not None:
            _reduce(histories, group, gaps)
        for history, scale in zip(histories, scales, strict=True):
            _amax_and_scale_update(history, scale, fp8_max, recipe)
        return
    keep_idle = not _rolls_idle_histories()
    if torch.compiler.is_compiling():
        name = "" if group is None else group.group_name
        _update_op(
            histories, scales, algorithm, float(fp8_max), recipe.margin, keep_idle, name, list(gaps)
        )
        return
    if group is not None:
        _reduce(histories, group, gaps)
    advance_scales(histories, scales, algorithm, float(fp8_max), recipe.margin, keep_idle)


def reduction_group(
    recipe: DelayedScaling, group: dist_group_type | None
) -> dist_group_type | None:
    """Return the process group over which a scale update takes maxima, or None without a reduction.

    Args:
        recipe: The recipe. With reduce_amax=False nothing is reduced.
        group: amax_reduction_group of `autocast`. None means all ranks, as soon as torch.distributed is initialized.
    """
    if not recipe.reduce_amax:
        return None
    if group is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.group.WORLD if torch.distributed.get_world_size() > 1 else None
    return group


def histories_agree(recipe: Any, group: dist_group_type | None, members: dist_group_type) -> bool:
    """Return whether updating a recipe's scales takes maxima over all group members.

    Args:
        recipe: The recipe. Only delayed scaling has histories.
        group: amax_reduction_group of `autocast`.
        members: Process group whose ranks share a tensor.
    """
    if not getattr(recipe, "reduce_amax", False):
        return False
    ranks = torch.distributed.get_process_group_ranks
    # Without an amax_reduction_group the update takes maxima over the default group, which contains every other group.
    return group is None or set(ranks(members)) <= set(ranks(group))


def update_states(
    states: Sequence[Any],
    forward: bool,
    recipe: DelayedScaling,
    group: dist_group_type | None,
    gaps: Sequence[int] = (),
) -> None:
    """Advance states of one direction and recipe by one step, with maxima over `reduction_group(recipe, group)`."""
    largest = recipe.fp8_format.value
    reducing = reduction_group(recipe, group)
    if reducing is not None and len(states) > 0:
        history = states[0].amax_history
        columns = sum(state.amax_history.shape[1] for state in states) + sum(gaps)
        _check(reducing, forward, columns, history.device)
    update_scales(
        [state.amax_history for state in states],
        [state.scale_in_place for state in states],
        largest.max_fwd if forward else largest.max_bwd,
        recipe,
        reducing,
        gaps,
    )


class _Member(NamedTuple):
    """A state, or the column count of a deleted state."""

    state: weakref.ref[Any]
    columns: int


class Pool:
    """The delayed-scaling states for one direction, recipe, group and device, in registration order."""

    def __init__(
        self,
        forward: bool,
        recipe: DelayedScaling,
        group: dist_group_type | None,
        device: torch.device,
    ):
        self.forward = forward
        self.recipe = recipe
        self.group = group
        self.members: list[_Member] = []  # replaced as a whole, so that iteration needs no lock
        self.device = device

    @property
    def reduces(self) -> bool:
        """Whether an update takes maxima over a process group."""
        return reduction_group(self.recipe, self.group) is not None

    @property
    def states(self) -> list[Any]:
        """The states that are alive."""
        alive = [member.state() for member in self.members]
        return [state for state in alive if state is not None]

    def update(self) -> None:
        """Update all states by one step; a rank without states takes part in the reduction too."""
        states = [member.state() for member in self.members]
        if None in states:
            self._update_with_gaps()
        elif len(states) > 0:
            update_states(states, self.forward, self.recipe, self.group)

    def _update_with_gaps(self) -> None:
        """Update the states by one step where members were deleted, whose columns are zeros in the reduction."""
        states: list[Any] = []
        gaps = [0]
        for member in self.members:
            state = member.state()
            if state is None:
                gaps[-1] += member.columns
            else:
                states.append(state)
                gaps.append(0)
        group = reduction_group(self.recipe, self.group)
        if len(states) > 0:
            update_states(
                states, self.forward, self.recipe, self.group, () if group is None else gaps
            )
        elif group is not None and not torch.compiler.is_compiling():
            _check(group, self.forward, gaps[0], self.device)
            _reduce([torch.zeros(1, gaps[0], device=self.device)], group)
        if not torch.compiler.is_compiling():
            with _lock:
                self.tidy()
                _drop_empty(registry.pools)

    def tidy(self) -> None:
        """Drop deleted members; where they are gaps in a reduction, merge neighbours instead."""
        remaining: list[_Member] = []
        for member in self.members:
            if member.state() is not None:
                remaining.append(member)
            elif self.reduces:
                if remaining and remaining[-1].state() is None:
                    remaining[-1] = member._replace(columns=member.columns + remaining[-1].columns)
                else:
                    remaining.append(member)
        self.members = remaining


class Registration(NamedTuple):
    """Where a state is registered; stored on the state for a fast check in the next forward pass."""

    pools: dict[str, Pool]
    pool: Pool
    recipe: DelayedScaling
    group: dist_group_type | None


@dataclass
class _Registry:
    """All pools by key; the only writer is this module, under the lock."""

    pools: dict[str, Pool] = field(default_factory=dict)


registry = _Registry()
_lock = threading.Lock()
_updating = threading.Lock()


def autocast_key(recipe: DelayedScaling, group: dist_group_type | None) -> str:
    """Return the key for regions whose amaxes are reduced together."""
    return f"{recipe!r}:{0 if group is None else id(group)}"


def buffer_key(forward: bool, recipe: DelayedScaling, group: dist_group_type | None) -> str:
    """Return the key of a pool."""
    return ("forward_" if forward else "backward_") + autocast_key(recipe, group)


def register(
    state: Any, forward: bool, recipe: DelayedScaling, group: dist_group_type | None
) -> None:
    """Register a state with the (forward, recipe, group) pool on its device, and with no other pool."""
    registration = state.registration
    if (
        registration is not None
        and registration.pools is registry.pools
        and registration.recipe is recipe
        and registration.group is group
    ):
        return
    key = buffer_key(forward, recipe, group)
    device = state.scale_in_place.device
    with _lock:
        _leave(state)
        pools = registry.pools
        pool = pools.get(key)
        # a model on several devices: one more pool for each
        if pool is not None and pool.device != device:
            key = f"{key}:{device}"
            pool = pools.get(key)
        if pool is None:
            pool = Pool(forward, recipe, group, device)
            pools[key] = pool
        pool.tidy()
        pool.members = [*pool.members, _Member(weakref.ref(state), state.num_quantizers)]
        state.registration = Registration(pools, pool, recipe, group)


def unregister(state: Any) -> None:
    """Remove a state from all later updates."""
    with _lock:
        _leave(state)


def _leave(state: Any) -> None:
    registration = state.registration
    state.registration = None
    if registration is not None and registration.pools is registry.pools:
        registration.pool.members = [
            member for member in registration.pool.members if member.state() is not state
        ]
        _drop_empty(registration.pools)


def _drop_empty(pools: dict[str, Pool]) -> None:
    for key in [key for key, pool in pools.items() if not pool.members]:
        del pools[key]


def update_all(forward: bool) -> None:
    """Update every pool in one direction, in registration order; one thread at a time."""
    # the pools may be traced before a module registers its states
    if torch.compiler.is_compiling():
        _update_all(forward)
        return
    with _updating:
        _update_all(forward)


def _update_all(forward: bool) -> None:
    for pool in list(registry.pools.values()):
        if pool.forward == forward:
            pool.update()


def reset() -> None:
    """Drop every pool."""
    registry.pools = {}
