"""Time for a linear layer's products by cuBLASLt, called directly and through torch.

    python benchmarks/products.py [--json FILE] [--only TEXT]

A layer [tokens, in] -> [tokens, out] has three: forward y = x @ w.T, dgrad dx = dy @ w, wgrad dw = dy.T @ x; wgrad+
adds to a float32 gradient that is there; a step is the three of a square layer, with the quantizations that a recipe
adds. gpu ms is the median over calls whose launches are all queued before the first
runs, the L2 cache overwritten before each, the two backends in turns. host us is the time to queue one warm product
of a small layer, everything included that a product passes through.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from record import GPU, machine, options, parser, select_cases, write

from transformer_engine.common import formats
from transformer_engine.pytorch.primitives.gemm import (
    TABLE,
    Epilogue,
    GemmRequest,
    cublaslt,
    cublaslt_library,
    cublaslt_plan,
    gemm,
    plain,
    tuning,
)
from transformer_engine.pytorch.primitives.operand import Operand
from transformer_engine.pytorch.primitives.quantize import QuantizeSpec, quantize
from transformer_engine_tools.bench.measure import Effort, measure, measure_in_turns

LAYERS = (
    (8192, 4096, 4096),
    (8192, 4096, 28672),
    (8192, 14336, 4096),
    (128, 1024, 4096),
    (2048, 2048, 2048),
)
KINDS = ("bf16", "fp8 fast", "fp8 split", "block")
PRODUCTS = ("forward", "forward+bias", "dgrad", "wgrad", "wgrad+")
STEPS = tuple(
    (tokens, width) for tokens in (128, 512, 2048, 8192) for width in (1024, 2048, 4096, 8192)
)
RUNS = 15
HOST = Effort(warmup=20, fewest=200, most=200)  # a host time is a median over many calls


class Case(NamedTuple):
    """One product: the backends' arguments, and the backend that torch would use."""

    name: str
    a: Operand
    b: Operand
    epilogue: Epilogue
    through_torch: str


def main() -> None:
    chosen = options(parser(__doc__))
    products, hosts, steps, tuned = [], [], [], []
    print(f"{'product':44} {'cublaslt ms':>11} {'torch ms':>9} {'ratio':>6} {'TFLOP/s':>8}")
    for case in select_cases(cases(), chosen.only):
        products.append(row := compare_backends(case))
        print(
            f"{case.name:44} {row['cublaslt_ms']:11.4f} {row['torch_ms']:9.4f} {row['ratio']:6.3f}"
            f" {row['tflop_s']:8.0f}",
            flush=True,
        )
    for tokens, width in STEPS if chosen.only in "steps" else ():
        steps.append(row := step_row(tokens, width))
        print(row, flush=True)
    for case in tuning_cases() if chosen.only in "tuned" else ():
        tuned.append(row := tuning_row(case))
        print(row, flush=True)
    for case in host_cases():
        hosts.append(row := host_row(case))
        print(
            f"{case.name:44} {row['cublaslt_us']:8.2f} us, {case.through_torch} {row['torch_us']:8.2f} us"
        )
    library = cublaslt_library.unavailable_reason() or cublaslt_library.bindings().get_version()
    found = {"products": products, "host": hosts, "steps": steps, "tune_plan": tuned}
    write(chosen.json, machine(cublaslt=library), **found)


def compare_backends(case: Case) -> dict[str, object]:
    backends = [TABLE.named("cublaslt"), TABLE.named(case.through_torch)]
    request = GemmRequest.of(case.a, case.b, case.epilogue)
    for backend in backends:
        if reason := backend.unsupported_reason(request):
            raise SystemExit(f"{case.name}: {backend.name} does not support it: {reason}")
    a, b, epilogue = case[1:4]
    ours, theirs = measure_in_turns([lambda run=x.run: run(a, b, epilogue) for x in backends], RUNS)
    rate = 2 * a.rows * b.rows * a.depth / ours / 1e9
    return {
        "case": case.name,
        "cublaslt_ms": round(ours, 4),
        "torch_ms": round(theirs, 4),
        "torch": case.through_torch,
        "ratio": round(ours / theirs, 4),
        "tflop_s": round(rate, 1),
    }


def cases() -> Iterator[Case]:
    for tokens, inner, outer in LAYERS:
        for kind in KINDS:
            for product in PRODUCTS:
                yield create_case(kind, product, tokens, inner, outer)


def create_case(kind: str, product: str, tokens: int, inner: int, outer: int) -> Case:
    exact = kind != "fp8 fast"
    m, n, k = {"forward": (tokens, outer, inner), "dgrad": (tokens, inner, outer)}.get(
        product.split("+")[0], (outer, inner, tokens)
    )
    bias = out = None
    if product == "forward+bias":
        bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    if product == "wgrad+":
        out = torch.zeros(m, n, device="cuda")
    epilogue = Epilogue(torch.bfloat16, bias, out, out is not None, exact)
    name = f"{kind} {product} {tokens}x{inner}->{outer}"
    if kind == "bf16":
        a = _random(m, k) if not product.startswith("wgrad") else _random(k, m).t()
        b = _random(n, k) if product.startswith("forward") else _random(k, n).t()
        return Case(name, plain(a), plain(b), epilogue, "matmul")
    if kind == "block":
        weight = formats.BLOCK_1D if product.startswith("wgrad") else formats.BLOCK_2D
        a, b = _quantized(formats.BLOCK_1D, m, k), _quantized(weight, n, k)
        return Case(name, a, b, epilogue, "scaled_mm_block")
    gradient = formats.E4M3 if product.startswith("forward") else formats.E5M2
    a, b = _quantized(formats.FLOAT8, m, k, gradient), _quantized(formats.FLOAT8, n, k)
    return Case(name, a, b, epilogue, "scaled_mm")


def tuning_cases() -> Iterator[Case]:
    for tokens, inner, outer in LAYERS:
        for kind in KINDS:
            for product in ("forward", "dgrad", "wgrad"):
                yield create_case(kind, product, tokens, inner, outer)


def tuning_row(case: Case) -> dict[str, object]:
    """GPU ms with the heuristic's first algorithm and with the tuned one, and the duration of tuning."""
    a, b, epilogue = case[1:4]
    problem = cublaslt.make_problem(GemmRequest.of(a, b, epilogue))
    first, best = cublaslt_plan.CublasPlan(problem), cublaslt_plan.CublasPlan(problem)
    begin = time.perf_counter()
    best.adopt(tuning._fastest(best, a, b, epilogue))
    torch.cuda.synchronize()
    took = time.perf_counter() - begin
    before, after = measure_in_turns(
        [functools.partial(plan.run, a, b, epilogue) for plan in (first, best)], RUNS
    )
    changed = first.algorithm != best.algorithm
    return {
        "case": case.name,
        "first_ms": round(before, 4),
        "tuned_ms": round(after, 4),
        "changed": changed,
        "tuning_s": round(took, 3),
    }


def step_row(tokens: int, width: int) -> dict[str, object]:
    """GPU ms of a linear layer's three products [tokens, width] -> [tokens, width], FP8 quantization included."""
    x, w, dy = _random(tokens, width), _random(width, width), _random(tokens, width)
    scale = torch.ones(1, device="cuda")
    calls = {"bf16": functools.partial(_step_bf16, x, w, dy)}
    for kind, (form, weight_form, argument) in {
        "delayed": (formats.FLOAT8, formats.FLOAT8, scale),
        "current": (formats.FLOAT8, formats.FLOAT8, None),
        "block": (formats.BLOCK_1D, formats.BLOCK_2D, None),
    }.items():
        calls[kind] = functools.partial(_step_fp8, x, w, dy, form, weight_form, argument)
    found = measure_in_turns(list(calls.values()), RUNS)
    return {
        "tokens": tokens,
        "width": width,
        **{kind: round(ms, 4) for kind, ms in zip(calls, found, strict=True)},
    }


def _step_bf16(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> None:
    epilogue = Epilogue(torch.bfloat16)
    gemm(plain(x), plain(w), epilogue)
    gemm(plain(dy), plain(w.t()), epilogue)
    gemm(plain(dy.t()), plain(x.t()), epilogue)


def _step_fp8(x, w, dy, form, weight_form, scale) -> None:
    epilogue = Epilogue(torch.bfloat16)
    spec = QuantizeSpec(form, formats.E4M3, columnwise=True)
    x_row, x_column = _both(x, spec, scale)
    w_row, w_column = _both(w, dataclasses.replace(spec, format=weight_form), scale)
    gradient = formats.E5M2 if form == formats.FLOAT8 else formats.E4M3
    dy_row, dy_column = _both(dy, dataclasses.replace(spec, element=gradient), scale)
    gemm(x_row, w_row, epilogue._replace(exact=form != formats.FLOAT8))
    gemm(dy_row, w_column, epilogue)
    gemm(dy_column, x_column, epilogue)


def _both(
    tensor: torch.Tensor, spec: QuantizeSpec, scale: torch.Tensor | None
) -> tuple[Operand, Operand]:
    q = quantize(tensor, spec, multiplier=scale)
    assert q.codes is not None and q.codes_t is not None
    return (
        Operand(q.codes, q.scale, spec.format, None, torch.bfloat16),
        Operand(q.codes_t, q.scale_t, spec.format, None, torch.bfloat16),
    )


def host_cases() -> Iterator[Case]:
    for kind in KINDS[:1] + KINDS[2:]:
        for product in PRODUCTS:
            yield create_case(kind, product, 128, 256, 256)


def host_row(case: Case) -> dict[str, object]:
    """Host time of a warm product by each backend, with the other backend removed from the table."""
    backends, found = TABLE.backends, {}
    for label, absent in (("cublaslt_us", ""), ("torch_us", "cublaslt")):
        TABLE.backends = tuple(backend for backend in backends if backend.name != absent)
        TABLE.forget()
        timing = measure(lambda: gemm(case.a, case.b, case.epilogue), GPU, HOST)
        assert timing.cpu_ms is not None
        found[label] = round(1e3 * timing.cpu_ms, 2)
    TABLE.backends = backends
    TABLE.forget()
    return {"case": case.name, **found}


def _random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)


def _quantized(form: formats.TensorFormat, rows: int, depth: int, element=formats.E4M3) -> Operand:
    q = quantize(_random(rows, depth), QuantizeSpec(form, element))
    assert q.codes is not None
    return Operand(q.codes, q.scale, form, None, torch.bfloat16)


if __name__ == "__main__":
    main()
