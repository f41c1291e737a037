"""FP8GlobalStateManager: NVIDIA's interface to autocast state and delayed-scaling buffers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...common.recipe import DelayedScaling, Recipe
from ..constants import dist_group_type
from ..runtime.device import canonical_device, has_cuda
from . import delayed_scaling, model_init, recompute_states, support
from .autocast import AutocastState, autocast, current, here, reinstate, snapshot
from .autocast import reset as close_all_blocks
from .extra_state import BUFFER_INFO
from .families import FormatAttributes, FormatChecks


class StateAttributes(FormatAttributes):
    """Read-only class attributes from earlier releases; `autocast` and `quantized_model_init` write their values."""

    @property
    def FP8_ENABLED(cls) -> bool:
        return current().enabled

    @property
    def FP8_CALIBRATION(cls) -> bool:
        return current().calibrating

    @property
    def FP8_RECIPE(cls) -> Recipe | None:
        return current().recipe

    @property
    def FP8_DISTRIBUTED_GROUP(cls) -> dist_group_type | None:
        return current().group

    @property
    def FP8_GRAPH_CAPTURING(cls) -> bool:
        return current().graph

    @property
    def FP8_PARAMETERS(cls) -> bool:
        return model_init.current_model_init().enabled

    @property
    def HIGH_PRECISION_INIT_VAL(cls) -> bool:
        return model_init.current_model_init().preserve_high_precision_init_val

    @property
    def IS_FIRST_FP8_MODULE(cls) -> bool:
        return bool(snapshot()[1])

    @property
    def AUTOCAST_DEPTH(cls) -> int:
        return here().enabled_blocks

    @property
    def FP8_AUTOCAST_DEPTH(cls) -> int:
        return here().enabled_blocks

    # {pool key: [a tensor per state]}; for amaxes, the row of the running step.
    @property
    def global_amax_buffer(cls) -> dict[str, list[Tensor]]:
        return _read_pools(lambda state: state.amax_history[0])

    @property
    def global_amax_history_buffer(cls) -> dict[str, list[Tensor]]:
        return _read_pools(lambda state: state.amax_history)

    @property
    def global_scale_buffer(cls) -> dict[str, list[Tensor]]:
        return _read_pools(lambda state: state.scale_in_place)

    @property
    def skip_fp8_weight_update_tensor(cls) -> Tensor | None:
        return FP8GlobalStateManager.quantization_state.skip_fp8_weight_update_tensor


def _read_pools(read: Callable[[Any], Tensor]) -> dict[str, list[Tensor]]:
    return {
        key: list(map(read, pool.states)) for key, pool in delayed_scaling.registry.pools.items()
    }


_RECOMPUTE_POSITION = "global_fp8_buffer_pos_fwd_recompute"
_UPDATED = "updated_scaling_fwd"


def is_captured(state: AutocastState) -> bool:
    """Return whether a call under this state is captured in a graph."""
    return state.graph or (has_cuda() and torch.cuda.is_current_stream_capturing())


class _OpenedBlocks(threading.local):
    """The blocks that `autocast_enter` opened in this thread, innermost last."""

    def __init__(self) -> None:
        self.blocks: list[autocast] = []

    def forget_closed(self) -> None:
        """Remove the innermost blocks that were closed with their own `__exit__`."""
        while self.blocks and not self.blocks[-1].is_open:
            self.blocks.pop()


_opened = _OpenedBlocks()


class FP8GlobalState:
    """The part of the global state that callers write: a device flag to skip weight quantization."""

    def __init__(self) -> None:
        self.skip_fp8_weight_update_tensor: Tensor | None = None
        # One (scale, amax_history) copy queue per module, oldest forward pass first.
        self.recompute_buffers: list[deque[list[tuple[Tensor, Tensor]]]] = []


class FP8GlobalStateManager(FormatChecks, metaclass=StateAttributes):
    """Class methods on the `autocast`, `delayed_scaling` and `model_init` state."""

    quantization_state = FP8GlobalState()

    @classmethod
    def reset(cls) -> None:
        """Restore the state after import."""
        close_all_blocks()
        _opened.blocks.clear()
        model_init.reset()
        delayed_scaling.reset()
        recompute_states.marked_by_hand.clear()
        cls.quantization_state.skip_fp8_weight_update_tensor = None
        cls.quantization_state.recompute_buffers = []

    # The settings of the innermost autocast block.

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return current().enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return current().calibrating

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        recipe = current().recipe
        return support.default_recipe() if recipe is None else recipe

    @classmethod
    def get_fp8_group(cls) -> dist_group_type | None:
        return current().group

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """Return whether `make_graphed_callables` or another capture on the current stream is recording."""
        return is_captured(current())

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """Return True for the first caller in an outermost enabled block, then False until the next block."""
        holder = here()
        first, holder.first_module = holder.first_module, False
        return first

    @classmethod
    def get_autocast_state(cls) -> tuple[AutocastState, bool]:
        return snapshot()

    @classmethod
    def set_autocast_state(cls, state: tuple[AutocastState, bool]) -> None:
        reinstate(state)

    @classmethod
    def autocast_enter(
        cls,
        enabled: bool = False,
        calibrating: bool = False,
        fp8_recipe: Recipe | None = None,
        fp8_group: dist_group_type | None = None,
        _graph: bool = False,
    ) -> autocast:
        """Open an autocast block, and return it.

        Close it with `autocast_exit`, or with the returned object's `__exit__`.
        """
        block = autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)
        block.__enter__()
        _opened.forget_closed()
        _opened.blocks.append(block)
        return block

    @classmethod
    def autocast_exit(cls, enabled: bool, _graph: bool) -> None:
        """Close the block that the thread's last `autocast_enter` opened.

        Leaving the outermost enabled block updates the forward scales of delayed scaling, as with `te.autocast`.

        Args:
            enabled: As given to `autocast_enter`.
            _graph: As given to `autocast_enter`.

        Raises:
            RuntimeError: No block is open, or the open one was entered with other arguments.
        """
        _opened.forget_closed()
        blocks = _opened.blocks
        if not blocks:
            raise RuntimeError("autocast_exit found no open block; call autocast_enter first")
        entered = blocks[-1].state
        if (bool(entered.enabled), bool(entered.graph)) != (bool(enabled), bool(_graph)):
            raise RuntimeError(
                f"autocast_exit(enabled={enabled}, _graph={_graph}) does not match the last "
                f"autocast_enter(enabled={entered.enabled}, _graph={entered.graph}); give both the same arguments"
            )
        blocks.pop().__exit__(None, None, None)

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        return model_init.current_model_init().enabled

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        return model_init.current_model_init().preserve_high_precision_init_val

    # Delayed-scaling buffers.

    @classmethod
    def get_meta_tensor_key(cls, forward: bool = True) -> str:
        return "scaling_fwd" if forward else "scaling_bwd"

    @classmethod
    def get_fwd_bwd_key(cls, forward: bool = True) -> str:
        return "forward" if forward else "backward"

    @classmethod
    def get_buffer_info(cls) -> str:
        return BUFFER_INFO

    @classmethod
    def get_unique_autocast_key(cls, recipe: DelayedScaling, group: dist_group_type | None) -> str:
        return delayed_scaling.autocast_key(recipe, group)

    @classmethod
    def get_key_in_buffer(
        cls, forward: bool, fp8_recipe: DelayedScaling, fp8_group: dist_group_type | None
    ) -> str:
        return delayed_scaling.buffer_key(forward, fp8_recipe, fp8_group)

    @classmethod
    def split_key_in_buffer(cls, key: str) -> tuple[bool, str]:
        """Return (whether it is a forward key, the rest)."""
        direction, rest = key.split("_", 1)
        return direction == "forward", rest

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: dict[str, Any]) -> None:
        """Register the module's states for scale updates; a repeated call returns early."""
        group = fp8_meta.get("fp8_group")
        for forward, key in ((True, "scaling_fwd"), (False, "scaling_bwd")):
            scaling = fp8_meta.get(key)
            if scaling is None:
                continue
            for delayed in scaling.delayed_states:
                delayed_scaling.register(delayed, forward, delayed.recipe, group)

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """Reduce the running amaxes of one direction and bring its scales one step forward."""
        delayed_scaling.update_all(forward)

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: bool | Tensor) -> None:
        """Set the device flag in place, so that captured graphs see it."""
        flag = cls.quantization_state.skip_fp8_weight_update_tensor
        if flag is None:
            flag = torch.zeros(1, dtype=torch.float32, device=canonical_device())
            cls.quantization_state.skip_fp8_weight_update_tensor = flag
        if isinstance(skip, Tensor):
            flag.copy_(skip)
        else:
            flag.fill_(float(skip))

    @classmethod
    def get_skip_fp8_weight_update_tensor(cls) -> Tensor | None:
        return cls.quantization_state.skip_fp8_weight_update_tensor

    # Recomputation: the second forward pass of a module quantizes with the scales of its first.

    @classmethod
    def copy_forward_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict[str, Any]) -> None:
        """Queue copies of the forward scales and histories, for recomputing this forward pass."""
        copies = [
            (d.scale.clone(), d.amax_history.clone())
            for d in fp8_meta["scaling_fwd"].delayed_states
        ]
        buffers = cls.quantization_state.recompute_buffers
        if _RECOMPUTE_POSITION not in fp8_meta:
            fp8_meta[_RECOMPUTE_POSITION] = len(buffers)
            buffers.append(deque())
        buffers[fp8_meta[_RECOMPUTE_POSITION]].append(copies)

    @classmethod
    def get_old_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict[str, Any]) -> None:
        """Save the present forward values, and copy in the values of the oldest queued forward pass."""
        delayed = fp8_meta["scaling_fwd"].delayed_states
        fp8_meta[_UPDATED] = [(d.scale.clone(), d.amax_history.clone()) for d in delayed]
        position = fp8_meta.get(_RECOMPUTE_POSITION)
        buffers = cls.quantization_state.recompute_buffers
        if position is None or position >= len(buffers) or len(buffers[position]) == 0:
            raise RuntimeError(
                "recomputation found no forward values of this module; "
                "run its forward pass inside te.checkpoint first"
            )
        write_states(delayed, buffers[position].popleft())

    @classmethod
    def restore_fp8_meta_tensors(cls, fp8_meta: dict[str, Any]) -> None:
        """Undo `get_old_fp8_meta_tensors_for_recompute`."""
        write_states(fp8_meta["scaling_fwd"].delayed_states, fp8_meta.pop(_UPDATED))


def write_states(states: Sequence[Any], values: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy a scale and a history into each delayed-scaling state."""
    for state, (scale, history) in zip(states, values, strict=True):
        state.scale.copy_(scale)
        if state.amax_history.shape == history.shape:
            state.amax_history.copy_(history)
        else:
            state.load_history(history)
