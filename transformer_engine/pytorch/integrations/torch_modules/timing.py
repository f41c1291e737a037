"""Times for a module and its conversion, forward and backward, at the sample's shapes."""

from __future__ import annotations

import functools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .layers import Converter
from .sample import SampleCall

# Least time per measurement over several steps, and the measurement count per side, in turns.
_SECONDS, _ROUNDS = 0.01, 5
# Calls with other shapes beyond the most frequent ones are not timed.
_SHAPES = 3
_WARM_STEPS = 3  # the engine generates and compiles in the first two
# At most this many steps per measurement: a GPU's queue holds about 1,000 launches.
_REPEATS = 20
_IDLE, _CYCLES_PER_SECOND = 1.3, 2e9  # idle time in units of the host's time, and the fastest clock


class Cost(NamedTuple):
    """Cost of calls to a module: milliseconds, and bytes held between forward and backward pass.

    Attributes:
        ms: Forward and backward passes on the device, without waits for the host.
        held: Bytes in the input, the output and the saved tensors; None if the device does not count them.
        host_ms: The same passes alone, from the first launch until the device has finished. It exceeds `ms` where
            launches take longer than kernels.
    """

    ms: float
    held: int | None
    host_ms: float = 0.0


class Comparison(NamedTuple):
    """Cost of a module before and after its conversion."""

    original: Cost
    converted: Cost


def compare(module: nn.Module, converter: Converter, calls: Counter[SampleCall]) -> Comparison:
    """Time module copies with random parameters and inputs.

    Args:
        module: The module, not converted.
        converter: Converter for the copy.
        calls: Its calls in the sample. The three most frequent kinds are timed, each as often as it occurs.
    """
    copies = _copy(module), _copy(module)
    converter.convert(copies[1])
    costs = []
    for call, count in calls.most_common(_SHAPES):
        for copy in copies:
            copy.requires_grad_(call.trains)
        costs.append((count, time_functions(copies, call)))
    return sum_costs(costs)


def sum_costs(costs: Iterable[tuple[int, Sequence[Cost]]]) -> Comparison:
    """Sum the costs of original and converted calls.

    Args:
        costs: For each kind of call, its count, and the costs of one original and one converted call.
    """
    totals: list[list[Any]] = [[0.0, 0, 0.0], [0.0, 0, 0.0]]
    for count, sides in costs:
        for total, side in zip(totals, sides, strict=True):
            total[0] += count * side.ms
            total[1] = None if side.held is None else total[1] + count * side.held
            total[2] += count * side.host_ms
    return Comparison(Cost(*totals[0]), Cost(*totals[1]))


def _copy(module: Any) -> nn.Module:
    """A module with the same class, sizes, dtype and device, with its own parameters."""
    parameter = next(module.parameters())
    options = {"device": parameter.device, "dtype": parameter.dtype}
    if isinstance(module, nn.Linear):
        return nn.Linear(
            module.in_features, module.out_features, module.bias is not None, **options
        )
    return type(module)(module.normalized_shape, eps=module.eps, **options)


def time_functions(functions: Sequence[Callable[..., Tensor]], call: SampleCall) -> list[Cost]:
    """Time functions on random tensors like in a call, in turns.

    Args:
        functions: Functions or modules.
        call: Shapes, dtype, device and gradients of the tensors.
    """
    device = call.device
    wait = functools.partial(wait_for_device, device)
    inputs = [
        torch.randn(shape, dtype=call.dtype, device=device, requires_grad=call.needs_grad)
        for shape in call.shapes
    ]
    steps = [_step(function, inputs) for function in functions]
    for step in steps:
        for _ in range(_WARM_STEPS):
            step()
    single = min(time_steps(step, 1, wait) for step in steps)
    repeats = max(1, min(_REPEATS, int(_SECONDS / max(single, 1e-6))))
    host: list[list[float]] = [[] for _ in steps]
    kernels: list[list[float]] = [[] for _ in steps]
    for _ in range(_ROUNDS):
        for number, step in enumerate(steps):
            seconds = time_steps(step, repeats, wait)
            host[number].append(seconds / repeats)
            kernels[number].append(_time_kernels(step, repeats, device, seconds) / repeats)
    return [
        Cost(
            1e3 * statistics.median(kernels[number]),
            _count_held_bytes(function, inputs),
            1e3 * statistics.median(host[number]),
        )
        for number, function in enumerate(functions)
    ]


def _step(function: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], Any]:
    """Function that runs the forward pass, and the backward pass if anything requires a gradient."""
    parameters: list[Tensor] = [*function.parameters()] if isinstance(function, nn.Module) else []
    differentiable = [tensor for tensor in (*inputs, *parameters) if tensor.requires_grad]

    def step() -> Any:
        output = function(*inputs)
        if not output.requires_grad:
            return output
        return torch.autograd.grad(output, differentiable, torch.ones_like(output))

    return step


def time_steps(step: Callable[[], Any], repeats: int, wait: Callable[[], Any]) -> float:
    """Seconds for some steps, including the host's time.

    Args:
        step: Function to time.
        repeats: Number of calls.
        wait: Function that waits for the work of the device before the first call and after the last.
    """
    wait()
    begin = time.perf_counter()
    for _ in range(repeats):
        step()
    wait()
    return time.perf_counter() - begin


def _time_kernels(
    step: Callable[[], Any], repeats: int, device: torch.device, seconds: float
) -> float:
    """Seconds of the device for some steps; on a CPU the steps' own seconds.

    A kernel that idles for longer than the host takes for its launches precedes the steps, so that they follow each
    other without gaps.
    """
    if device.type != "cuda":
        return seconds
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        torch.cuda._sleep(int(_IDLE * seconds * _CYCLES_PER_SECOND))
        begin.record()
        for _ in range(repeats):
            step()
        end.record()
    wait_for_device(device)
    return 1e-3 * begin.elapsed_time(end)


def _count_held_bytes(function: Callable[..., Tensor], inputs: list[Tensor]) -> int | None:
    """Bytes in the inputs, the output and saved tensors that exist after a forward pass; None on a CPU."""
    device = inputs[0].device
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(device)
    copies = [tensor.clone() for tensor in inputs]
    output = function(*copies)
    del copies
    allocated = torch.cuda.memory_allocated(device) - before
    del output
    return allocated


def wait_for_device(device: torch.device | None = None) -> None:
    """Wait for the work of a GPU, by default of the current one; without a GPU there is nothing to wait for."""
    if torch.cuda.is_available() if device is None else device.type == "cuda":
        torch.cuda.synchronize(device)
