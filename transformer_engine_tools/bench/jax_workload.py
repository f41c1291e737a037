"""JaxWorkload: y = function(params, state, *inputs) as one compiled program, measured with its state donated.

The measurements are:

    gpu_ms: GPU time in a call's kernels, from XLA's profiler. Time in which streams overlap counts once. Before each
        call the GPU overwrites its L2 cache and sleeps, as before a torch call. Without the pause, consecutive calls
        heat the GPU, and its clock is about 6% lower (H200).
    cpu_ms: Time until the call returns to the host.
    eager_ms: Time per call in a loop, in which each call waits on the device for the state of the previous call.
    peak_mib: Temporary memory, and results that do not reuse an argument's memory, from XLA's memory analysis.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import torch
from jax import Array
from jax.experimental.compilation_cache import compilation_cache

from .measure import EVICTING, SLEEP, Effort, Figures, Timing, pause, span_length

# A product with FP8 operands that XLA has handed to cuBLASLt.
FP8_CALL = 'custom_call_target="__cublas$lt$matmul$f8"'
PROFILED = 9  # calls


@dataclass(frozen=True)
class JaxWorkload:
    """The workload that a provider built for a case.

    Attributes:
        function: Computes y from parameters, state and inputs.
        inputs: Arrays, which receive gradients in a backward step.
        params: Parameters, which receive gradients in a backward step.
        state: Scales and histories. The gradient of the state is its next value, which the next call receives.
        context: Context manager that is entered while the program is traced.
    """

    function: Callable[..., Any]
    inputs: tuple[Array, ...]
    params: Any = field(default_factory=dict)
    state: Any = field(default_factory=dict)
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def measured(self, backward: bool, device: torch.device, effort: Effort) -> Figures:
        """Measure the forward program, or with `backward` the forward and backward program."""
        on_gpu = device.type == "cuda"
        with _cache_on_disk() if on_gpu else nullcontext():
            compiling, call = self._compiled(backward)
            cached = None
            if on_gpu:
                jax.clear_caches()  # programs that this process has traced and compiled
                cached = self._compiled(backward)[0]
        for _ in range(effort.warmup):
            jax.block_until_ready(call())
        start = time.perf_counter()
        jax.block_until_ready(call())
        runs = effort.runs(1e3 * (time.perf_counter() - start))
        start = time.perf_counter()
        jax.block_until_ready([call() for _ in range(runs)][-1])
        wall = 1e3 * (time.perf_counter() - start) / runs
        if device.type != "cuda":
            timing = Timing(gpu_ms=None, cpu_ms=None, eager_ms=wall)
        else:
            returned = []  # milliseconds until a call on an idle device returns
            for _ in range(runs):
                start = time.perf_counter()
                results = call()
                returned.append(1e3 * (time.perf_counter() - start))
                jax.block_until_ready(results)
            cpu = statistics.median(returned)
            timing = Timing(_profile_gpu(call, 1e-3 * cpu), cpu, wall)
        plan = call.program.memory_analysis()
        beyond = plan.temp_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
        return Figures(
            timing,
            peak_mib=beyond / 2**20,
            compile_s=compiling,
            cached_s=cached,
            fp8_calls=call.program.as_text().count(FP8_CALL),
        )

    def _compiled(self, backward: bool) -> tuple[float, _CompiledCall]:
        start = time.perf_counter()
        with self.context():
            call = _CompiledCall(self, backward)
        return time.perf_counter() - start, call


@contextmanager
def _cache_on_disk() -> Iterator[None]:
    """Use a new, empty folder for JAX's cache of compiled programs."""
    settings = {
        "jax_compilation_cache_dir": "",
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    previous = {name: getattr(jax.config, name) for name in settings}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, value in (settings | {"jax_compilation_cache_dir": folder}).items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
            yield
        finally:
            for name, value in previous.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()


class _CompiledCall:
    """Calls to a compiled program; each call consumes the previous call's state and reuses its buffers."""

    def __init__(self, workload: JaxWorkload, backward: bool):
        self.state = workload.state
        self.rest = (workload.params, *workload.inputs)
        if backward:
            y = jax.eval_shape(workload.function, workload.params, workload.state, *workload.inputs)
            key = jax.random.key(1)
            gradient = jax.tree.map(lambda leaf: jax.random.normal(key, leaf.shape, leaf.dtype), y)
            self.rest = (gradient, *self.rest)
        function = workload.function

        def forward_step(state: Any, params: Any, *inputs: Array) -> tuple[Any, Any]:
            return state, function(params, state, *inputs)

        def training_step(
            state: Any, gradient: Any, params: Any, *inputs: Array
        ) -> tuple[Any, Any]:
            y, pullback = jax.vjp(function, params, state, *inputs)
            params_gradient, state, *inputs_gradient = pullback(gradient)
            # Without y in the results XLA would remove the last product, which nothing else uses.
            return state, (y, params_gradient, inputs_gradient)

        step = training_step if backward else forward_step
        self.program: Any = jax.jit(step, donate_argnums=0).lower(self.state, *self.rest).compile()

    def __call__(self) -> Any:
        self.state, results = self.program(self.state, *self.rest)
        return results


def _profile_gpu(call: _CompiledCall, host: float) -> float | None:
    """Measure the median kernel time of a call in milliseconds; None if the profiler recorded no kernels.

    Args:
        call: The compiled call.
        host: Seconds that the host needs to queue a call.
    """
    other = torch.empty(EVICTING, dtype=torch.uint8, device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(PROFILED):
                pause(other, host)
                torch.cuda.synchronize()
                jax.block_until_ready(call())
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        calls = [
            profiled_call
            for file in files
            for profiled_call in _calls(jax.profiler.ProfileData.from_file(str(file)))
        ]
    return statistics.median(calls) / 1e6 if calls else None


def _calls(profile: Any) -> list[float]:
    """Sum each call's kernel nanoseconds on the GPUs' streams, except torch's stream, which sleeps.

    If the profiler missed the sleep of torch, all calls get the mean.
    """
    sleeps, spans = [], []
    for plane in profile.planes:
        for line in plane.lines if plane.name.startswith("/device:GPU") else ():
            events = list(line.events) if line.name.startswith("Stream") else []
            slept = [event.start_ns for event in events if SLEEP in event.name]
            sleeps += slept
            if not slept:
                spans += [(event.start_ns, event.start_ns + event.duration_ns) for event in events]
    if not spans:
        return []
    if not sleeps:
        return [span_length(spans) / PROFILED]
    ends = [*sorted(sleeps)[1:], float("inf")]
    return [
        span_length(span for span in spans if begin <= span[0] < end)
        for begin, end in zip(sorted(sleeps), ends, strict=True)
    ]
