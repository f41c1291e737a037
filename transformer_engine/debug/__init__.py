"""Precision debugging for layers by configuration files, through NVIDIA's package `nvdlfw_inspect`.

A debug session begins with `nvdlfw_inspect.api.initialize`, which gets a configuration file and the folder
`transformer_engine/debug/features`, and ends with `end_debug()`. `step()` after each training step writes the collected
statistics. Modules that exist before the session belong to it too.

| module | contents |
| --- | --- |
| `features` | the features of configuration files, one file for each subject |
| `features.api` | the routing of calls to features, and `TEConfigAPIMapper`, the base class of features |
| `features.utils` | statistics of tensors, over micro-batches and ranks |
| `pytorch.debug_state` | `TEDebugState`, the settings of the session |
| `pytorch.debug_quantization` | `DebugQuantizer`, the quantizer of a tensor of a debugged layer |
| `pytorch.session` | which layers compute by debug quantizers in a step |

Only the modules under `features` import `nvdlfw_inspect`, which the extra `debug` installs. A layer without a feature
in a step runs with its own quantizers and compiled passes.

A session in a training script:

    import nvdlfw_inspect.api as debug_api

    folder = os.path.join(os.path.dirname(transformer_engine.debug.__file__), "features")
    debug_api.initialize("debug.yaml", feature_dirs=[folder], log_dir="logs")
    for batch in batches:
        train_step(batch)
        debug_api.step()
    debug_api.end_debug()
"""

from __future__ import annotations

from .pytorch.debug_state import TEDebugState

__all__ = ["set_weight_tensor_tp_group_reduce"]


def set_weight_tensor_tp_group_reduce(enabled: bool) -> None:
    """Set whether statistics of sharded weights are reduced over the tensor-parallel group.

    The setting is read when a statistic is written, at the end of a step. All ranks must have the same setting.

    Args:
        enabled: True, the default, logs one value for the whole weight on every rank; False logs one for each shard.

    Raises:
        TypeError: The argument is not a bool.

    Example:
        ```python
        import transformer_engine.debug

        transformer_engine.debug.set_weight_tensor_tp_group_reduce(False)
        ```
    """
    TEDebugState.set_weight_tensor_tp_group_reduce(enabled)
