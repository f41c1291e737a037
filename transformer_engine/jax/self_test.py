"""Self-test of JAX on this machine: backends of casts, products, fused producers and attention against references.

    python -m transformer_engine.jax.self_test SECONDS [LARGE SMALL TOKENS] [--wait] [--part PART/PARTS]

With --wait the programs run once a line of the standard input gives the `time.time()` of their end; with --part only
every PARTS-th path runs. Prints a JSON object with "machine" and "results" (`common.self_test`). The command line
starts this module in separate processes, because JAX otherwise allocates most of the memory of a GPU that PyTorch uses
too, and because one process traces its programs one after another.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from importlib.metadata import version
from threading import Thread
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..common.dispatch import observing, tables, use_backend
from ..common.formats import (
    BLOCK_1D,
    BLOCK_2D,
    E2M1,
    E4M3,
    E5M2,
    FLOAT8,
    MXFP8,
    NVFP4,
    TensorFormat,
)
from ..common.quantize_spec import QuantizeSpec
from ..common.self_test import (
    COMPILED,
    ROUNDING_BOUNDS,
    SAMPLE,
    SelfTestResult,
    SelfTestSizes,
    difference_reason,
    failure_message,
    progress_line,
)
from .attention.fused import fused_attn
from .primitives.activation import ActivationParams
from .primitives.activation_codes import activation_codes
from .primitives.attention.enums import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout
from .primitives.gemm import gemm
from .primitives.grouped_gemm import grouped_gemm
from .primitives.norm_codes import norm_codes
from .primitives.operand import Operand
from .primitives.quantize import OutputCast, Quantized, decoded, quantize
from .runtime.platform import has_gpu

Draw = Callable[..., Array]  # `draw_values`
Wanted = Callable[[str], bool]  # whether a path runs in this process
# Rounding a bfloat16 result twice, and Hopper's 14-bit sums; relative error in the Frobenius norm.
PRODUCT_BOUND = 4e-3
# P is rounded to bfloat16 before the second product, dP and dS in the backward pass too.
ATTENTION_BOUND = 2e-2
# Backends that the others are compared with; every other table has one with the name "reference".
REFERENCES = {
    "jax_norm_codes": "separate",
    "jax_activation_codes": "separate",
    "jax_grouped_gemm": "ragged_dot",
}
# Niceness of a process that compiles during the test of PyTorch, whose processes go first.
WAITING_NICENESS = 10
THREADS = 8  # programs that are lowered and compiled at a time
COMPILE_SHARE = 0.85  # of the time limit, after which no further case is compiled
RUNS, TIMED_SECONDS = 20, 0.02

SPECS = {
    "fp8": QuantizeSpec(FLOAT8, E4M3, columnwise=True),
    "fp8 e5m2": QuantizeSpec(FLOAT8, E5M2, columnwise=True),
    "fp8 block 1x128": QuantizeSpec(BLOCK_1D, E4M3, columnwise=True),
    "fp8 block 128x128": QuantizeSpec(BLOCK_2D, E4M3, columnwise=True),
    "mxfp8": QuantizeSpec(MXFP8, E4M3, columnwise=True),
    "mxfp8 e5m2": QuantizeSpec(MXFP8, E5M2, columnwise=True),
    "nvfp4": QuantizeSpec(NVFP4, E2M1, columnwise=True),
    "nvfp4 16x16": QuantizeSpec(NVFP4, E2M1, columnwise=True, two_dimensional=True),
    "nvfp4 hadamard": QuantizeSpec(NVFP4, E2M1, columnwise=True, hadamard=True),
    "nvfp4 stochastic": QuantizeSpec(NVFP4, E2M1, columnwise=True, stochastic=True),
}
# Path: left and right operands, as keys of SPECS; None for bfloat16.
PRODUCTS: dict[str, tuple[str | None, str | None]] = {
    "bf16 products": (None, None),
    "fp8 products": ("fp8", "fp8"),
    "fp8 products of gradients": ("fp8 e5m2", "fp8"),
    "fp8 block products": ("fp8 block 1x128", "fp8 block 128x128"),
    "fp8 block products of gradients": ("fp8 block 1x128", "fp8 block 1x128"),
    "mxfp8 products": ("mxfp8", "mxfp8"),
    "nvfp4 products": ("nvfp4", "nvfp4"),
}


@dataclass(frozen=True)
class JaxCase:
    """A computation that all backends for an operation repeat.

    Attributes:
        path: Kernels under test, for the report.
        name: Shape and options.
        operation: Name of the table whose backends are compared.
        compute: Function of the arguments, which a test traces once per backend.
        arguments: Arrays and pytrees of arrays.
        bound: Largest relative error in the Frobenius norm; None: all bits must be equal.
        expected: Independent function of the arguments; None: the results of the table's reference.
        baseline: The same computation in bfloat16 by XLA, for the time ratio.
    """

    path: str
    name: str
    operation: str
    compute: Callable[..., Any]
    arguments: tuple[Any, ...]
    bound: float | None = None
    expected: Callable[..., Any] | None = None
    baseline: Callable[..., Any] | None = None


def cases(sizes: SelfTestSizes, part: int = 0, parts: int = 1) -> Iterator[JaxCase]:
    """Yield the cases of every parts-th path, from the one with the index `part` on.

    Inputs are allocated when a case is taken.
    """
    draw, numbers = cache(draw_values), dict[str, int]()

    def wanted(path: str) -> bool:
        return numbers.setdefault(path, len(numbers)) % parts == part

    for generate in (_casts, _products, _attention, _fused, _grouped):
        yield from generate(draw, sizes, wanted)


def draw_values(*shape: int, seed: int = 0, spread: bool = True) -> Array:
    """Normal values in bfloat16; with `spread`, rows with different magnitudes and a zero block."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(shape, np.float32)
    if spread:
        values *= np.exp2(generator.integers(-6, 6, (shape[0], *(1,) * (len(shape) - 1)))).astype(
            np.float32
        )
        values.reshape(-1)[:32] = 0.0
    return jnp.asarray(values, jnp.bfloat16)


def _casts(draw: Draw, sizes: SelfTestSizes, wanted: Wanted) -> Iterator[JaxCase]:
    # The second extent is not a multiple of the tiles, for which other kernels are compiled.
    for extent, suffix in ((sizes.large, ""), (sizes.large // 4 - 16, " of uneven sizes")):
        x = draw(extent, extent)
        for name, spec in SPECS.items():
            path, shape = f"jax {name} casts{suffix}", f"{extent} x {extent}"
            if not wanted(path):
                continue
            random = ()
            if spec.stochastic:
                keys = jax.random.split(jax.random.key(1))
                random = tuple(jax.random.uniform(key, x.shape) for key in keys)
            yield JaxCase(
                path,
                shape,
                "jax_quantize",
                _Quantization(spec),
                (x, *random),
                baseline=lambda x, *random: -x,
            )
            if suffix or spec.stochastic or spec.hadamard:
                continue
            yield JaxCase(
                path,
                f"{shape}, decoded",
                "jax_quantize",
                partial(_cast_values, spec=spec),
                (x,),
                ROUNDING_BOUNDS[spec.element.name],
                lambda x: x.astype(jnp.float32),
            )


@dataclass(frozen=True)
class _Quantization:
    """Codes and scales of an array; the arrays after it are the random numbers of stochastic rounding."""

    spec: QuantizeSpec

    def __call__(self, x: Array, *random: Array) -> Quantized:
        return quantize(x, self.spec, random=(random[0], random[1]) if random else None)


def _cast_values(x: Array, spec: QuantizeSpec) -> Array:
    quantized = quantize(x, spec)
    assert quantized.codes is not None
    return decoded(
        Operand(quantized.codes, quantized.scale, quantized.amax, spec.operand_format, x.dtype)
    )


@cache
def _quantizer(name: str) -> Callable[[Array], Quantized]:
    return jax.jit(_Quantization(SPECS[name]))


def _operand(x: Array, name: str | None) -> Operand:
    """Quantize an array by the reference."""
    if name is None:
        return Operand(x, dtype=x.dtype)
    with use_backend(jax_quantize="reference"):
        quantized = _quantizer(name)(x)
    assert quantized.codes is not None
    form: TensorFormat = SPECS[name].operand_format
    return Operand(quantized.codes, quantized.scale, quantized.amax, form, x.dtype)


def _values(operand: Operand) -> Array:
    return operand.codes.astype(jnp.float32) if operand.format is None else decoded(operand)


def _exact_product(a: Operand, b: Operand, *_: Array) -> Array:
    """The product of decoded values, summed in float32."""
    return jnp.einsum("mk,nk->mn", _values(a), _values(b), precision=lax.Precision.HIGHEST)


def _products(draw: Draw, sizes: SelfTestSizes, wanted: Wanted) -> Iterator[JaxCase]:
    n = k = sizes.large
    w = draw(n, k, seed=1)
    for path, (left, right) in PRODUCTS.items():
        if not wanted(f"jax {path}"):
            continue
        for rows in (sizes.large, sizes.small):
            x = draw(rows, k)
            yield JaxCase(
                f"jax {path}",
                f"{rows} x {n} x {k}",
                "jax_gemm",
                lambda a, b, x, w: gemm(a, b, jnp.dtype(jnp.bfloat16)),
                (_operand(x, left), _operand(w, right), x, w),
                PRODUCT_BOUND,
                _exact_product,
                lambda a, b, x, w: x @ w.T,
            )


def _attend(q: Array, k: Array, v: Array) -> tuple[Array, ...]:
    def forward(q: Array, k: Array, v: Array) -> Array:
        settings = AttnBiasType.NO_BIAS, AttnMaskType.CAUSAL_MASK, QKVLayout.BSHD_BSHD_BSHD
        return fused_attn(
            (q, k, v),
            None,
            None,
            None,
            *settings,
            AttnSoftmaxType.VANILLA_SOFTMAX,
            q.shape[-1] ** -0.5,
            0.0,
            True,
        )

    out, pullback = jax.vjp(forward, q, k, v)
    return (out, *pullback(q.reshape(out.shape)))


def _attention(draw: Draw, sizes: SelfTestSizes, wanted: Wanted) -> Iterator[JaxCase]:
    if not wanted("jax attention"):
        return
    for heads, groups, depth in ((16, 16, 128), (16, 4, 64)):
        q = draw(2, sizes.tokens, heads, depth, spread=False)
        k, v = (draw(2, sizes.tokens, groups, depth, seed=seed, spread=False) for seed in (1, 2))
        name = f"2 x {sizes.tokens}, {heads} and {groups} heads of {depth}, causal"
        yield JaxCase("jax attention", name, "jax_attention", _attend, (q, k, v), ATTENTION_BOUND)


def _fused(draw: Draw, sizes: SelfTestSizes, wanted: Wanted) -> Iterator[JaxCase]:
    """Yield producers that return codes; expected are the codes of two steps."""
    x, weight = draw(sizes.large, sizes.large), draw(sizes.large, seed=4)
    for name, spec in {
        "fp8": SPECS["fp8"],
        "fp8 block 1x128": QuantizeSpec(BLOCK_1D, E4M3),
    }.items():
        cast, path = OutputCast(spec), f"jax {name} codes of fused producers"
        if not wanted(path):
            continue

        def norm(x: Array, weight: Array, cast: OutputCast = cast) -> Any:
            return norm_codes(x, weight, None, cast, False, False, 1e-5)[0]

        def activation(x: Array, _: Array, cast: OutputCast = cast) -> Any:
            pairs = x.reshape(x.shape[0], 2, -1)
            return activation_codes(pairs, cast, ("silu", "linear"), ActivationParams())

        yield JaxCase(path, "rmsnorm", "jax_norm_codes", norm, (x, weight))
        yield JaxCase(path, "swiglu", "jax_activation_codes", activation, (x, weight))


def _grouped(draw: Draw, sizes: SelfTestSizes, wanted: Wanted) -> Iterator[JaxCase]:
    size = sizes.large // 4
    splits = jnp.asarray([size // 2, 0, size, size // 2], jnp.int32)
    x = draw(2 * size, size)
    w = jnp.stack([draw(size, size, seed=seed) for seed in range(4)])
    name = f"{len(splits)} groups, {size} x {size}"

    def product(x: Array, w: Array, splits: Array, *scales: Array) -> Array:
        factors = (scales[0], scales[1]) if scales else None
        return grouped_gemm(x, w, splits, jnp.dtype(jnp.bfloat16), factors, features_first=True)

    codes = tuple(lax.reduce_precision(each, 4, 3).astype(jnp.float8_e4m3fn) for each in (x, w))
    scales = jnp.ones(4, jnp.float32), jnp.full(4, 0.5, jnp.float32)
    for kind, arguments in {"bf16": (x, w, splits), "fp8": (*codes, splits, *scales)}.items():
        path = f"jax grouped {kind} products"
        if not wanted(path):
            continue
        yield JaxCase(
            path,
            name,
            "jax_grouped_gemm",
            product,
            arguments,
            2 * PRODUCT_BOUND,
        )


class _Found(Exception):
    """Ends a trace at its first request."""


def first_request(case: JaxCase) -> Any:
    """The first request that a case makes to its operation; None if it makes none."""
    found: list[Any] = []

    def see(operation: str, request: Any) -> None:
        if operation == case.operation:
            found.append(request)
            raise _Found

    try:
        with observing(see):
            jax.eval_shape(lambda *arguments: case.compute(*arguments), *case.arguments)
    except _Found:
        return found[0]
    return None


@dataclass
class CasePrograms:
    """A case whose programs are compiled in threads.

    Attributes:
        programs: One per backend that supports the case.
        expected: Program of the expected results; None if no backend runs.
        baseline: Program for the time ratio.
        results: Results of the other backends.
    """

    case: JaxCase
    results: list[SelfTestResult]
    programs: dict[str, Future[Any]] = field(default_factory=dict)
    expected: Future[Any] | None = None
    baseline: Future[Any] | None = None


def compile_case(case: JaxCase, threads: ThreadPoolExecutor) -> CasePrograms:
    """Trace a case with every backend for its operation, and compile the programs in threads.

    Traces are made one after another, because `use_backend` applies to the process.
    """
    compilation = CasePrograms(case, [])
    try:
        request = first_request(case)
    except Exception as error:
        # a fault in the backend that the table chooses is a result in this test
        compilation.results.append(_failed(case, "chosen", error))
        return compilation
    reference = REFERENCES.get(case.operation, "reference")
    if request is None:
        reason = f"{case.operation} is not used on this machine"
        compilation.results.append(
            SelfTestResult(case.path, case.name, reference, "unsupported", reason=reason)
        )
        return compilation

    def submit(function: Callable[..., Any]) -> Future[Any]:
        # A new function: equal ones would be traced once, with the backend of the first.
        traced = jax.jit(lambda *arguments: function(*arguments)).trace(*case.arguments)
        # Triton compiles the kernels when a program is lowered, most of the time of the test if one after another.
        return threads.submit(lambda: traced.lower().compile())

    def submit_backend(backend: str) -> Future[Any]:
        with use_backend(**{case.operation: backend}):
            return submit(case.compute)

    for backend in tables[case.operation].candidates(request):
        if backend.name == reference and case.expected is None:
            continue
        if (reason := backend.rejection_reason(request)) is not None:
            compilation.results.append(
                SelfTestResult(case.path, case.name, backend.name, "unsupported", reason=reason)
            )
            continue
        try:
            compilation.programs[backend.name] = submit_backend(backend.name)
        except Exception as error:  # every library fault is a result in this test
            compilation.results.append(_failed(case, backend.name, error))
    if compilation.programs:
        try:
            with jax.default_matmul_precision("float32"):
                compilation.expected = (
                    submit_backend(reference) if case.expected is None else submit(case.expected)
                )
            compilation.baseline = None if case.baseline is None else submit(case.baseline)
        except Exception as error:
            compilation.results.append(_failed(case, "expected", error))
    return compilation


def run_case(compilation: CasePrograms) -> list[SelfTestResult]:
    """Run the programs of a case and compare their results."""
    case, results = compilation.case, compilation.results
    if compilation.expected is None:
        return results
    try:
        expected = _leaves(compilation.expected.result()(*case.arguments))
        baseline = compilation.baseline and compilation.baseline.result()
        time_of_baseline = (
            None if baseline is None else _milliseconds(partial(baseline, *case.arguments))
        )
    except Exception as error:
        return [*results, _failed(case, "expected", error)]
    for backend, program in compilation.programs.items():
        try:
            call = partial(program.result(), *case.arguments)
            results.append(_compare(case, backend, call, expected, time_of_baseline))
        except Exception as error:
            results.append(_failed(case, backend, error))
    return results


def _failed(case: JaxCase, backend: str, error: Exception) -> SelfTestResult:
    return SelfTestResult(case.path, case.name, backend, "failed", reason=failure_message(error))


def _leaves(results: Any) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(results)]


def _compare(
    case: JaxCase,
    backend: str,
    call: Callable[[], Any],
    expected: list[np.ndarray[Any, Any]],
    time_of_baseline: float | None,
) -> SelfTestResult:
    results = _leaves(call())
    equal, error = _equal(results, expected), None
    if case.bound is not None:
        pairs = [
            (x.astype(np.float64), y.astype(np.float64))
            for x, y in zip(results, expected, strict=True)
        ]
        errors = [np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30) for x, y in pairs]
        error = float("inf") if np.isnan(errors).any() else float(max(errors))
    reason = difference_reason(equal, error, case.bound)
    elapsed = _milliseconds(call)
    return SelfTestResult(
        case.path,
        case.name,
        backend,
        "failed" if reason else "passed",
        reason,
        equal if case.bound is None else None,
        error,
        elapsed,
        None if time_of_baseline is None else elapsed / time_of_baseline,
    )


def _equal(results: list[np.ndarray[Any, Any]], expected: list[np.ndarray[Any, Any]]) -> float:
    """Equal-byte share; 0 for different numbers, shapes or dtypes."""
    if [(x.shape, x.dtype) for x in results] != [(x.shape, x.dtype) for x in expected]:
        return 0.0
    same = total = 0
    for x, y in zip(results, expected, strict=True):
        left, right = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (x, y))
        same += int((left == right).sum())
        total += left.size
    return same / max(total, 1)


def _milliseconds(call: Callable[[], Any]) -> float:
    """Milliseconds per call of several calls in a row, after a first one."""
    jax.block_until_ready(call())
    begin = time.perf_counter()
    jax.block_until_ready(call())
    runs = max(1, min(RUNS, int(TIMED_SECONDS / max(time.perf_counter() - begin, 1e-6))))
    begin = time.perf_counter()
    jax.block_until_ready([call() for _ in range(runs)])
    return 1e3 * (time.perf_counter() - begin) / runs


def machine_facts() -> dict[str, str]:
    """Versions and devices of JAX."""
    device = jax.local_devices()[0]
    facts = {"JAX": f"{jax.__version__} on {device.device_kind}", "jaxlib": version("jaxlib")}
    if has_gpu():
        facts = {"gpu": device.device_kind} | facts
    return facts


def self_test(
    sizes: SelfTestSizes | None,
    seconds: float,
    progress: Callable[[str], None],
    wait: Callable[[], float] | None = None,
    part: tuple[int, int] = (0, 1),
) -> list[SelfTestResult]:
    """Compare every backend that supports the cases on this machine with a reference.

    Args:
        sizes: Case extents; by default large ones on a GPU and a sample on a CPU.
        seconds: Time after which the remaining cases are reported as not run.
        progress: Called with a line per path, before and after its cases.
        wait: Called between the compilation and the first run; returns the seconds for the runs.
        part: Index and number of the parts into which the paths are divided.
    """
    if sizes is None:
        sizes = SelfTestSizes() if has_gpu() else SAMPLE
    start, results = time.perf_counter(), []
    cores = max((os.cpu_count() or 1) // part[1], 1)
    with ThreadPoolExecutor(min(THREADS, cores)) as threads:
        progress("compiling programs of JAX")
        pending: list[CasePrograms] = []
        for case in cases(sizes, *part):
            if time.perf_counter() - start > COMPILE_SHARE * seconds:
                pending.append(CasePrograms(case, [_not_run(case)]))
            else:
                pending.append(compile_case(case, threads))
        if wait is not None:
            Thread(target=_report_end, args=(pending, progress), daemon=True).start()
            runs = wait()
            seconds = time.perf_counter() - start + runs
        for path, group in itertools.groupby(pending, lambda compilation: compilation.case.path):
            progress(f"testing {path}")
            found: list[SelfTestResult] = []
            for compilation in group:
                late = time.perf_counter() - start > seconds
                found += [_not_run(compilation.case)] if late else run_case(compilation)
            progress(progress_line(found, time.perf_counter() - start))
            results += found
        threads.shutdown(wait=False, cancel_futures=True)
    return results


def _report_end(pending: list[CasePrograms], progress: Callable[[str], None]) -> None:
    """Report when all programs are compiled; a command that tests several parts first runs those."""
    for compilation in pending:
        wait_for(
            [
                *compilation.programs.values(),
                *filter(None, (compilation.expected, compilation.baseline)),
            ]
        )
    progress(COMPILED)


def _not_run(case: JaxCase) -> SelfTestResult:
    return SelfTestResult(case.path, case.name, "all", "not run")


def main() -> None:
    """Print the results as JSON; the head of this file describes the command."""
    parser = argparse.ArgumentParser(prog="python -m transformer_engine.jax.self_test")
    parser.add_argument("seconds", type=float)
    parser.add_argument("extents", type=int, nargs="*", help="`SelfTestSizes`, or none")
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--part", default="0/1", help="index and number of the parts")
    options = parser.parse_args()
    index, parts = map(int, options.part.split("/"))
    if options.wait and hasattr(os, "nice"):
        os.nice(WAITING_NICENESS)
    results = self_test(
        SelfTestSizes(*options.extents) if options.extents else None,
        options.seconds,
        lambda line: print(line, file=sys.stderr, flush=True),
        (lambda: float(sys.stdin.readline() or 0.0) - time.time()) if options.wait else None,
        (index, parts),
    )
    print(
        json.dumps({"machine": machine_facts(), "results": [asdict(result) for result in results]})
    )


if __name__ == "__main__":
    main()
