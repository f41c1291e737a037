"""The features that a configuration file enables for layers; `nvdlfw_inspect.api.initialize` gets this folder.

| feature | effect | file |
| --- | --- | --- |
| `DisableFP8GEMM`, `DisableQuantizationGEMM` | some products in high precision | `disable_quantization.py` |
| `DisableFP8Layer`, `DisableQuantizationLayer` | all products in high precision | `disable_quantization.py` |
| `FakeQuant` | values of FP8 or MXFP8 in high-precision products | `fake_quant.py` |
| `PerTensorScaling` | current scaling of some tensors under delayed scaling | `fake_quant.py` |
| `LogTensorStats` | statistics of values | `log_tensor_stats.py` |
| `LogFp8TensorStats`, `LogNvfp4TensorStats` | statistics of quantization errors | `log_fp8_tensor_stats.py` |
| `DumpTensors` | tensors in files | `dump_tensors.py` |

`nvdlfw_inspect` executes each file of the folder as a separate module, so imports are absolute, and state is kept in
`utils.stats_buffer`. This file has the timing that all logging features share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def intervals(config: Mapping[str, Any]) -> list[tuple[int, int | None]]:
    """Return the intervals of steps (first, last) of a configuration, both inclusive; None for no last step."""
    if config.get("start_end_list"):
        return sorted(
            [(int(start), None if end in (None, -1) else int(end)) for start, end in config["start_end_list"]]
        )
    end = config.get("end_step")
    return [(int(config.get("start_step") or 0), None if end in (None, -1) else int(end))]


def next_enabled_iter(config: Mapping[str, Any], iteration: int) -> tuple[bool, int | None]:
    """Return whether a feature is enabled in a step, and the next step in which it is; None for no step.

    A feature is enabled in steps that are multiples of `freq` (1 by default) and within an interval: from `start_step`
    (0) to `end_step` (none), or one of the pairs [first, last] of `start_end_list`. Both ends belong to the interval.

    Args:
        config: The configuration of the feature.
        iteration: The step.

    Raises:
        ValueError: `freq` is not positive.
    """
    frequency = int(config.get("freq") or 1)
    if frequency < 1:
        raise ValueError(f"freq={config['freq']} is not positive; give the number of steps per logged step")
    spans = intervals(config)
    inside = any(start <= iteration and (end is None or iteration <= end) for start, end in spans)
    nexts = []
    for start, end in spans:
        first = -(-max(start, iteration + 1) // frequency) * frequency
        if end is None or first <= end:
            nexts.append(first)
    return inside and iteration % frequency == 0, min(nexts, default=None)
