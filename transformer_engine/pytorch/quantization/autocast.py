"""autocast: the modules called inside a block compute in the low precision of a recipe.

The block pushes one immutable record, `current()`, that a module reads once when its forward pass starts
(`ProductsModule.spec`; `module/linear.py` describes the path from the recipe to a cast). A block belongs to the thread
that entered it, and to the tasks and threads that run in a copy of its context.
"""

from __future__ import annotations

import threading
from contextlib import ContextDecorator
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

import torch

from ...common.checks import reject_keywords
from ...common.dispatch import requirements
from ...common.numbers import to_bool
from ...common.recipe import Recipe
from ..constants import dist_group_type
from ..runtime.checks import group_or_none
from ..runtime.tracing import export_mode, hide_from_selective_checkpoints, warn_deprecated
from . import delayed_scaling
from .support import check_batch_invariance, check_block, check_recipe_support, default_recipe


class AutocastState(NamedTuple):
    """The settings of the innermost autocast block, as modules read them.

    Attributes:
        enabled: Whether modules quantize by the recipe.
        calibrating: Whether modules that do not quantize record amaxes.
        recipe: The recipe of the block.
        group: Process group over which amaxes are reduced.
        graph: Whether the block is being captured in a CUDA graph, which updates scales itself.
    """

    enabled: bool = False
    calibrating: bool = False
    recipe: Recipe | None = None
    group: dist_group_type | None = None
    graph: bool = False


OUTSIDE = AutocastState()


_Entered = tuple[AutocastState, int]

# The innermost record and the enabled block count in the active context.
_entered: ContextVar[_Entered] = ContextVar("transformer_engine_autocast", default=(OUTSIDE, 0))


class _ThreadState:
    """The state of a thread: the innermost record, open enabled blocks, the first module, a recomputed function.

    torch.compile cannot read a context variable while it traces, so it reads and writes this object. Eager calls first
    copy the context to it (`here`), because the context changes when a thread switches tasks.

    Attributes:
        recomputes: Whether a function is running that runs twice, as in activation recomputation.
        recomputing: Whether this is its second run.
    """

    def __init__(self, entered: _Entered) -> None:
        self.entered = entered
        self.state, self.enabled_blocks = entered
        self.first_module = False
        self.recomputes = False
        self.recomputing = False

    def enter(self, state: AutocastState, enabled_blocks: int, traced: bool) -> None:
        """Set the innermost record and the number of open enabled blocks, also in the context, which tasks copy."""
        self.state, self.enabled_blocks = state, enabled_blocks
        if not traced:  # torch.compile cannot trace the write to the context
            self.entered = (state, enabled_blocks)
            _entered.set(self.entered)

    def follow(self, entered: _Entered) -> None:
        """Take the state of another context, to which the thread has switched."""
        self.entered = entered
        self.state, self.enabled_blocks = entered
        self.first_module = False


class _AutocastThread(threading.local):
    """State per thread; a thread that starts in a copied context begins with the state of that context."""

    def __init__(self) -> None:
        self.holder = _ThreadState(_entered.get())


_thread = _AutocastThread()
_is_compiling = torch.compiler.is_compiling


def here() -> _ThreadState:
    """Return this thread's state, updated from the active context."""
    return _thread.holder if _is_compiling() else eager_thread_state()


def eager_thread_state() -> _ThreadState:
    """Return `here()` for a caller that knows that no compiler is tracing."""
    holder = _thread.holder
    entered = _entered.get()
    if holder.entered is not entered:
        holder.follow(entered)
    return holder


def current() -> AutocastState:
    """Return the record of the innermost autocast block; outside all blocks, a record that is not enabled."""
    return here().state


def snapshot() -> tuple[AutocastState, bool]:
    """Return the state that `reinstate` restores, for recomputation."""
    holder = here()
    return holder.state, holder.first_module


def reinstate(moment: tuple[AutocastState, bool]) -> None:
    """Restore a snapshot in this thread, without opening or closing a block."""
    holder = here()
    holder.state, holder.first_module = moment


def reset() -> None:
    """Drop all blocks in this thread, also open ones."""
    holder = here()
    holder.enter(OUTSIDE, 0, _is_compiling())
    holder.first_module = False


class autocast(ContextDecorator):
    """Context manager and decorator: layers inside compute in the low precision of a recipe.

    Blocks nest; a disabled one inside an enabled one computes in high precision. Leaving a thread's
    outermost enabled block updates the forward scales of delayed scaling, unless gradients are off,
    the block raised, or this is the second run of a checkpointed function. An update is a
    collective in its group: the ranks of the group have to update the same layers equally often.

    Args:
        enabled: Quantize by the recipe.
        calibrating: With enabled=False compute in high precision, but record the maxima of delayed scaling.
        recipe: A recipe instance, by default `get_default_recipe()`.
        amax_reduction_group: Process group over which delayed scaling takes the absolute maximum. None: all ranks,
            if torch.distributed is initialized. A recipe with `reduce_amax=False` takes no maxima over ranks.
        others: Unknown arguments, which raise TypeError with the name to use.

    Raises:
        TypeError: An argument has the wrong type.
        RuntimeError: On entry, the machine does not support the recipe.

    Example:
        >>> import torch
        >>> import transformer_engine.pytorch as te
        >>> from transformer_engine.common import recipe
        >>> layer = te.Linear(32, 32, device="cpu")
        >>> with te.autocast(recipe=recipe.Float8CurrentScaling()):
        ...     output = layer(torch.randn(16, 32))
        >>> output.dtype
        torch.float32
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: dist_group_type | None = None,
        _graph: bool = False,
        **others: NoReturn,
    ):
        self.state = AutocastState(enabled, calibrating, recipe, amax_reduction_group, _graph)
        flags = type(enabled) is bool and type(calibrating) is bool
        complete = flags and (
            isinstance(recipe, Recipe) or (recipe is None and not (enabled or calibrating))
        )
        if others or not complete or amax_reduction_group is not None:
            self.state = _check_state(self.state, others)
        self._outer: AutocastState | None = None

    @property
    def is_open(self) -> bool:
        """Whether the block has been entered and not been left."""
        return self._outer is not None

    def _recreate_cm(self) -> autocast:
        """Return a new block for each decorated function call, so that recursion works."""
        state = self.state
        return autocast(state.enabled, state.calibrating, state.recipe, state.group, state.graph)

    def __enter__(self) -> None:
        if self._outer is not None:
            raise RuntimeError(
                "this autocast object is active already; create one for every with statement"
            )
        state = self.state
        if state.enabled and state.recipe is not None:
            supported, reason = check_recipe_support(state.recipe)
            if not supported:
                raise RuntimeError(f"{type(state.recipe).__name__} cannot run here: {reason}")
            if requirements.batch_invariant:
                check_batch_invariance(state.recipe)
        traced = _is_compiling()
        holder = _thread.holder if traced else eager_thread_state()
        self._outer, blocks = holder.state, holder.enabled_blocks
        if state.enabled and blocks == 0:
            holder.first_module = True
        holder.enter(state, blocks + state.enabled, traced)

    def __exit__(self, exception_type: object, exception: object, traceback: object) -> None:
        state, outer, self._outer = self.state, self._outer, None
        assert outer is not None, "left without having been entered"
        traced = _is_compiling()
        holder = _thread.holder if traced else eager_thread_state()
        blocks = holder.enabled_blocks - state.enabled
        holder.enter(outer, blocks, traced)
        outermost = state.enabled and blocks == 0
        if outermost and exception_type is None and (traced or delayed_scaling.registry.pools):
            _update_scales(holder, state, traced)


def _check_state(state: AutocastState, extra_fields: dict[str, Any]) -> AutocastState:
    """Check and convert the arguments of `autocast`; a block without a recipe gets the default recipe.

    Raises:
        TypeError: An argument has the wrong type, or `extra_fields` is not empty.
    """
    if extra_fields:
        names = ("enabled", "calibrating", "recipe", "amax_reduction_group")
        renamed = {"fp8_recipe": "recipe", "fp8_group": "amax_reduction_group"}
        reject_keywords("autocast", extra_fields, renamed, names)
    enabled, recipe = check_block(state.enabled, state.recipe), state.recipe
    calibrating = to_bool("calibrating", state.calibrating)
    if state.group is not None:
        group_or_none("amax_reduction_group", state.group)
    if recipe is None and (enabled or calibrating):
        recipe = default_recipe()
    return AutocastState(enabled, calibrating, recipe, state.group, state.graph)


def _update_scales(holder: _ThreadState, state: AutocastState, traced: bool) -> None:
    """Update the forward scales of delayed scaling when a thread's outermost enabled block ends."""
    if export_mode.onnx or state.graph:
        return
    if holder.recomputing and not traced:  # a traced update is left out when the graph runs
        return
    # The first run of a reentrant checkpoint has gradients off although its second run will train.
    if holder.recomputes and not traced:
        with hide_from_selective_checkpoints():
            delayed_scaling.update_all(forward=True)
    elif torch.is_grad_enabled() or holder.recomputes:
        delayed_scaling.update_all(forward=True)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: dist_group_type | None = None,
    _graph: bool = False,
    **others: NoReturn,
) -> autocast:
    """Deprecated alias for `autocast`.

    Args:
        enabled: Quantize by the recipe.
        calibrating: Record the maxima of delayed scaling without quantization.
        fp8_recipe: The recipe; `autocast` calls it recipe.
        fp8_group: The process group; `autocast` calls it amax_reduction_group.
        others: Unknown arguments, which raise TypeError with the name to use.
    """
    renamed = {"recipe": "fp8_recipe", "amax_reduction_group": "fp8_group"}
    reject_keywords("fp8_autocast", others, renamed, ("enabled", "calibrating", *renamed.values()))
    warn_deprecated("fp8_autocast", "autocast(enabled, calibrating, recipe, amax_reduction_group)")
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)
