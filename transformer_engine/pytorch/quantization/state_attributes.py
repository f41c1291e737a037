"""FP8GlobalStateManager's class attributes: names under which earlier releases kept their state, read at each look."""

from __future__ import annotations

from typing import Any

from ...common.recipe import Recipe
from ..constants import dist_group_type
from . import delayed_scaling, model_init, support
from . import families as _rows  # noqa: F401 - before the kinds at the end are read
from .autocast import current, enabled_blocks, snapshot
from .family import all_families


class StateAttributes(type):
    """Class attributes that say what is; what they are made of has other writers (autocast, quantized_model_init)."""

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
        return enabled_blocks()

    @property
    def FP8_AUTOCAST_DEPTH(cls) -> int:
        return enabled_blocks()

    @property
    def global_amax_buffer(cls) -> dict[str, list[Any]]:
        """{key of a pool: [running amax [n] of each of its states]}"""
        return {
            key: [s.amax_history[0] for s in pool.states] for key, pool in delayed_scaling.pools().items()
        }

    @property
    def global_amax_history_buffer(cls) -> dict[str, list[Any]]:
        return {key: [s.amax_history for s in pool.states] for key, pool in delayed_scaling.pools().items()}

    @property
    def global_scale_buffer(cls) -> dict[str, list[Any]]:
        return {key: [s.scale_in_place for s in pool.states] for key, pool in delayed_scaling.pools().items()}

    @property
    def skip_fp8_weight_update_tensor(cls) -> Any:
        return cls.quantization_state.skip_fp8_weight_update_tensor  # pyright: ignore[reportAttributeAccessIssue]


def _answer(kind: str, part: int) -> property:
    return property(lambda cls: support.checks()[f"check_{kind}_support"]()[part])


# <kind>_available and reason_for_no_<kind>, of every kind that a recipe needs.
for _kind in dict.fromkeys(row.kind for row in all_families() if row.kind is not None):
    setattr(StateAttributes, f"{_kind}_available", _answer(_kind, 0))
    setattr(StateAttributes, f"reason_for_no_{_kind}", _answer(_kind, 1))
