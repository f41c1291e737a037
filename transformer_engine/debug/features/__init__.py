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

`nvdlfw_inspect` executes each file in the folder as a separate module, so imports are absolute, and state is kept in
`utils.stats_buffer`. This file has the timing that all logging features share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformer_engine.common.numbers import parse_int


def intervals(config: Mapping[str, Any]) -> list[tuple[int, int | None]]:
    """Parse a configuration's step intervals (first, last), both inclusive; None for no last step.

    Raises:
        TypeError: A step is not a whole number.
        ValueError: `start_end_list` is not a list of pairs.
    """
    pairs = config.get("start_end_list")
    if not pairs:
        return [
            _interval(
                "start_step", config.get("start_step") or 0, "end_step", config.get("end_step")
            )
        ]
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise ValueError(
                f"start_end_list={pairs} holds {pair!r}; give pairs of a first and a last step, for example "
                "[[0, 10], [50, 60]]"
            )
    return sorted(
        [_interval("start_end_list", first, "start_end_list", last) for first, last in pairs]
    )


def _interval(first_name: str, first: Any, last_name: str, last: Any) -> tuple[int, int | None]:
    """Convert a step interval to numbers; None and -1 mean no last step."""
    return parse_int(first_name, first), None if last in (None, -1) else parse_int(last_name, last)


def configured_stats(config: Mapping[str, Any]) -> Sequence[Any]:
    """Statistics that a configuration names; ValueError if it names none."""
    if not config.get("stats"):
        raise ValueError(
            f"stats={config.get('stats')!r} names no statistics; add `stats: [..]` to the configuration"
        )
    return config["stats"]


def next_enabled_iter(config: Mapping[str, Any], iteration: int) -> tuple[bool, int | None]:
    """Whether a feature is enabled in a step, and the next step in which it is; None for no step.

    A feature is enabled in steps that are multiples of `freq` (1 by default) and within an interval: from `start_step`
    (0) to `end_step` (none), or one of the pairs [first, last] in `start_end_list`. Both ends belong to the interval.

    Args:
        config: The feature's configuration.
        iteration: The step.

    Raises:
        TypeError: `freq` or a step is not a whole number.
        ValueError: `freq` is below 1, or `start_end_list` is not a list of pairs.
    """
    value = config.get("freq")
    frequency = 1 if value is None else parse_int("freq", value, least=1)
    spans = intervals(config)
    inside = any(start <= iteration and (end is None or iteration <= end) for start, end in spans)
    next_iterations = []
    for start, end in spans:
        first = -(-max(start, iteration + 1) // frequency) * frequency
        if end is None or first <= end:
            next_iterations.append(first)
    return inside and iteration % frequency == 0, min(next_iterations, default=None)
