"""TEDebugState: settings for this process's debug session.

The attributes are on the class, because `nvdlfw_inspect` has one session for each process. This module imports neither
torch nor `nvdlfw_inspect`; without that package, no session can be active.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from ...common.numbers import to_bool


class TEDebugState:
    """The debug session of this process.

    Attributes:
        layer_count: Number for the next layer without a name, which is called "Layer_1", "Layer_2" and so on.
        layers_initialized: {layer name: True} for the layers whose features have been looked up in this session.
        weight_tensor_tp_group_reduce: Reduce statistics of sharded weights over the tensor-parallel group.
        debug_enabled: A session is active; None before the first look.
    """

    layer_count: ClassVar[int] = 1
    layers_initialized: ClassVar[dict[str, bool]] = {}
    weight_tensor_tp_group_reduce: ClassVar[bool] = True
    debug_enabled: ClassVar[bool | None] = None

    @classmethod
    def manager(cls) -> Any:
        """Manager of the `nvdlfw_inspect` session; None without a session."""
        return getattr(sys.modules.get("nvdlfw_inspect.api"), "DEBUG_MANAGER", None)

    @classmethod
    def initialize(cls) -> bool:
        """Whether a session is active; also updates `debug_enabled`. Modules may be created before the session."""
        cls.debug_enabled = cls.manager() is not None
        return cls.debug_enabled

    @classmethod
    def _reset(cls) -> None:
        """Restore the defaults, after a session."""
        cls.layer_count = 1
        cls.layers_initialized = {}
        cls.weight_tensor_tp_group_reduce = True
        cls.debug_enabled = None

    @classmethod
    def get_layer_count(cls) -> int:
        """Number a layer without a name; the next call returns the next number."""
        cls.layer_count += 1
        return cls.layer_count - 1

    @classmethod
    def set_weight_tensor_tp_group_reduce(cls, enabled: bool) -> None:
        """Set `weight_tensor_tp_group_reduce`; see `transformer_engine.debug.set_weight_tensor_tp_group_reduce`."""
        cls.weight_tensor_tp_group_reduce = to_bool("enabled", enabled)

    @classmethod
    def get_iteration(cls) -> int:
        """Number of the training step.

        Raises:
            RuntimeError: No session is active.
        """
        manager = cls.manager()
        if manager is None:
            raise RuntimeError(
                "no debug session is active; call nvdlfw_inspect.api.initialize(..) first"
            )
        return manager._trainer_iteration_count
