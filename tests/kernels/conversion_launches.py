"""Run every kernel that converts FP8 codes with one conversion; print {case: [result digest, equal]} as JSON.

A quantization is equal if it has the reference's bits. Other kernels have digests only, which are the same for
all conversions.

Arguments: "native", "instruction" or "integers", then "cuda" (a GPU with all three), or "cpu" for Triton's interpreter,
which has no PTX; then "--all" for more than quantizations, and "1/4" for the second out of
four parts.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1" if sys.argv[2] == "cpu" else "0"
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import triton
from torch import Tensor

from tests.kernels import interpreter
from tests.kernels.quantize_cases import CONTENTS, SPECS, matrix
from transformer_engine.common.formats import (
    BLOCK_1D,
    BLOCK_2D,
    E2M1,
    E4M3,
    E5M2,
    FLOAT8,
    FLOAT32_MAX,
    MXFP8,
    NVFP4,
    Element,
)
from transformer_engine.common.hardware import nvidia
from transformer_engine.common.kernels import (
    activation_codes,
    column_sums,
    fp8_attention,
    launch,
    norm,
    norm_codes,
    statistics,
)
from transformer_engine.common.kernels.block_cast import Blocks
from transformer_engine.common.kernels.cast import OneScale, cast
from transformer_engine.common.kernels.launch import Machine
from transformer_engine.pytorch.primitives import grouped_quantize
from transformer_engine.pytorch.primitives.grouped_gemm import Matrices, make_groups
from transformer_engine.pytorch.primitives.grouped_quantize import GroupedQuantizeRequest
from transformer_engine.pytorch.primitives.quantize import FORMATS, QuantizeRequest, QuantizeSpec
from transformer_engine.pytorch.primitives.quantize.backends import REFERENCE
from transformer_engine.pytorch.primitives.quantize.format_row import QuantizeInputs
from transformer_engine.pytorch.runtime import launching

WAY, DEVICE, *OPTIONS = sys.argv[1:]
ROWS = {"instruction": nvidia(8, 9), "integers": nvidia(8, 0)}
ON_CPU = DEVICE == "cpu"
ONE = (7.0, 1.7, 1.0)
Results = Sequence["Tensor | None"]
SPECIAL = (
    torch.nan,
    torch.inf,
    -torch.inf,
    0.0,
    -0.0,
    448.0,
    464.0,
    57344.0,
    61440.0,
    2.0**-10,
    2.0**-17,
)


def values(shape: tuple[int, int], seed: int = 0, special: bool = True) -> Tensor:
    """Normal values across many magnitudes, with special values in the first row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-12, 6, shape, generator=generator))
    if special:
        x[0, : len(SPECIAL)] = torch.tensor(SPECIAL)
    return x.to(torch.bfloat16).to(DEVICE)


def number(value: float) -> Tensor:
    return torch.tensor([value], device=DEVICE)


def quantizations(name: str, spec: QuantizeSpec) -> Iterator[tuple[str, Results, Results]]:
    """(name, kernel results, reference results)."""
    halves = (
        torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).reshape(256, 256)
    )
    square, narrow = (256, 256), (144, 66)
    kinds = itertools.cycle((torch.bfloat16, torch.float32, torch.float16))
    inputs = [(square, content, next(kinds)) for content in CONTENTS]
    inputs += [
        (shape, "special", torch.bfloat16) for shape in (narrow, (1, 4096), (2048, 4096), (129, 34))
    ]
    if ON_CPU:
        inputs = [((square, narrow)[len(name) % 2], "special", torch.bfloat16)]
    if spec.four_over_six:
        inputs = inputs[:1]
    for shape, content, dtype in inputs:
        if spec.format != NVFP4 or not any(extent % 2 for extent in shape):
            yield (
                f"{name} {shape} {content} {dtype}",
                *both(spec, matrix(*shape, content, dtype).to(DEVICE)),
            )
    if name in ("float8", "float8-both") or not (ON_CPU or spec.four_over_six):
        yield f"{name} every bfloat16", *both(spec, halves.to(DEVICE), number(1.0))


def both(spec: QuantizeSpec, x: Tensor, scale: Tensor | None = None) -> tuple[Results, Results]:
    scale = scale if spec.format == FLOAT8 else None
    random = None
    if spec.stochastic:
        generator = torch.Generator().manual_seed(1)
        random = tuple(
            torch.rand(s, generator=generator).to(DEVICE) for s in (x.shape, x.shape[::-1])
        )
    request = QuantizeRequest(spec, (x.shape[0], x.shape[1]), x.dtype, x.device, scale is not None)
    plan = FORMATS[spec.format.name].plan
    assert plan is not None
    inputs = QuantizeInputs(scale, random=random)  # pyright: ignore[reportArgumentType]
    return plan(request)(x, inputs), REFERENCE.bind(request)(x, inputs)


def activations(shape: tuple[int, int], element: Element) -> Iterator[tuple[str, Results]]:
    """Activations, their gradients and plain gradients, with single-scale codes or block codes."""
    rows, width = shape
    machine = Machine(3, 1 << 16, 6)
    for name, gated in (("gelu", False), ("swiglu", True), ("identity", False)):
        x = values((rows, 2 * width if gated else width))
        dy = values(shape, 1)
        for is_known in (True, False):
            how = OneScale(element, True, is_known, is_known, power_of_two=False, epsilon=0.0)
            inputs = (number(1.7) if is_known else None, number(0.5) if is_known else None)
            strides = (width, x.shape[1])
            title = f"{name} {element.name} {'given' if is_known else 'measured'} {shape}"
            if name != "identity":
                program = activation_codes.forward(
                    name, gated, shape, x.shape[1], "bfloat16", ONE, how
                )
                yield title, launching.perform(program, (x, *inputs)[: len(program.inputs)])
            program = activation_codes.backward(
                name, gated, shape, strides, "bfloat16", ONE, how, "float32"
            )
            last = None if name == "identity" else x
            yield (
                f"{title} backward",
                launching.perform(program, (dy, last, *inputs)[: len(program.inputs)]),
            )
        for square in (False, True):
            blocks = Blocks(element, True, square, not square, 0.0, FLOAT32_MAX)
            title = f"{name} {element.name} blocks square={square} {shape}"
            if name != "identity":
                program = activation_codes.forward_blocks(
                    name, gated, shape, x.shape[1], ONE, blocks, machine
                )
                yield title, launching.perform(program, (x,))
            if gated and width % 128:
                continue
            program = activation_codes.backward_blocks(
                name, gated, shape, (width, x.shape[1]), ONE, blocks, "float32", machine
            )
            yield (
                f"{title} backward",
                launching.perform(program, (dy, None if name == "identity" else x)),
            )


def norms(element: Element) -> Iterator[tuple[str, Results]]:
    """Norms for each plan: whole rows, streamed rows, rows of any length."""
    widths = (
        ((8, 256), (4, 5120))
        if ON_CPU
        else ((64, 256), (64, 4096), (64, 5120), (64, 10240), (16, 20480))
    )
    for rows, width in widths:
        x, gamma, beta = (
            values((rows, width), 2, special=False),
            values((1, width)),
            values((1, width), 3),
        )
        gamma, beta = gamma[0].nan_to_num(1.0, 1.0, 1.0), beta[0].nan_to_num(0.0, 0.0, 0.0)
        for is_known in (True, False):
            matrix = norm.NormRows(
                rows,
                width,
                width,
                "bfloat16",
                1e-5,
                zero_centered=False,
                centered=True,
                processors=3,
            )
            how = OneScale(element, True, is_known, is_known, power_of_two=False, epsilon=0.0)
            inputs = (number(1.7), number(0.5)) if is_known else (None, None)
            result = launching.perform(norm_codes.one_scale(matrix, how), (x, gamma, beta, *inputs))
            yield f"norm {element.name} {width} given={is_known}", result
        blocks = Blocks(
            element,
            columnwise=False,
            square=False,
            power_of_two=True,
            epsilon=0.0,
            value_for_inf=FLOAT32_MAX,
        )
        result = launching.perform(norm_codes.row_blocks(matrix, blocks), (x, gamma, beta))
        yield f"norm {element.name} {width} blocks", result


def others(element: Element) -> Iterator[tuple[str, Results]]:
    """Column sums with a cast, and FP8 attention with delayed scaling."""
    shape = (192, 130)
    follows = not ON_CPU
    after, machine = cast(shape, element, True, True, follows=follows), Machine(3, 1 << 16, 2)
    program = column_sums.sums_and_cast(shape, "float32", after, machine)
    yield f"column sums {element.name}", launching.perform(program, (values(shape),))
    sizes, dtype = (5000, 300, 2048), launch.codes_dtype(element)
    three = [values((1, size), size)[0] for size in sizes]
    scale, history = torch.linspace(0.5, 2.5, 9).to(DEVICE), torch.zeros(3, 9, device=DEVICE)
    result = launching.run(
        fp8_attention.codes_of_three(sizes, (2, 3), dtype), (*three, scale, history)
    )
    yield f"attention {element.name}", (*result[:3], result[3][:1], result[3][4:5], history)
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(result[0].dtype)
    record = fp8_attention.value_launch(256, (8, 3), "float32")
    yield (
        f"attention values {element.name}",
        launching.run(record, (codes, number(0.37), None, None)),
    )


def groups() -> Iterator[tuple[str, Results]]:
    """Row groups and matrices by address."""
    splits, depth = (3, 131, 0, 70), 144
    total = sum(splits)
    device = torch.device(DEVICE)
    x = values((total, depth))
    layout = make_groups(splits, total, torch.device(DEVICE))
    tensors = [values((128, depth), seed) for seed in range(3)]
    addresses = torch.tensor(
        [tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=device
    )
    for element, form in itertools.product((E4M3, E5M2), (FLOAT8, BLOCK_1D, BLOCK_2D)):
        spec = QuantizeSpec(form, element, columnwise=True, power_of_two=form != FLOAT8)
        for by_matrices in (False, True):
            if form == (BLOCK_1D if by_matrices else BLOCK_2D):
                continue
            count, shape = (3, (128, depth)) if by_matrices else (len(splits), (total, depth))
            request = GroupedQuantizeRequest(
                spec, by_matrices, count, shape, torch.bfloat16, x.device, None
            )
            argument = Matrices(tuple(tensors), addresses) if by_matrices else x
            result = grouped_quantize.triton.bind(request)(
                argument, None if by_matrices else layout, None
            )
            codes, scale, codes_t, scale_t = (
                result.codes,
                result.scale,
                result.codes_t,
                result.scale_t,
            )
            if form == FLOAT8:  # the first column has scales
                scale = scale_t = None if scale is None else scale[:, 0]
            yield (
                f"groups {form.name} {element.name} matrices={by_matrices}",
                (codes, scale, codes_t, scale_t),
            )


def measure() -> Iterator[tuple[str, Results]]:
    """Code statistics."""
    x = values((130, 256), special=False)
    for name, spec in {
        "float8": QuantizeSpec(FLOAT8, E4M3),
        "float8 e5m2": QuantizeSpec(FLOAT8, E5M2),
        "mxfp8": QuantizeSpec(MXFP8, E4M3),
        "nvfp4": SPECS["nvfp4-both"],
    }.items():
        request = QuantizeRequest(spec, (130, 256), x.dtype, x.device)
        result = REFERENCE.bind(request)(x, QuantizeInputs())
        assert result.codes is not None and result.scale is not None
        scalings = {
            FLOAT8: statistics.ONE_SCALE,
            MXFP8: statistics.EXPONENT_BLOCKS,
            NVFP4: statistics.TWO_LEVELS,
        }
        blocks = spec.format.block or (1, 1)
        strides = (
            *result.codes.stride(),
            *(result.scale.stride() if spec.format != FLOAT8 else (0, 0)),
        )
        form = statistics.Codes(
            scalings[spec.format], spec.format == NVFP4, blocks, spec.element.maximum, 1.0, strides
        )
        saved = torch.zeros(6, dtype=torch.float64, device=DEVICE)
        second = number(0.01) if spec.format == NVFP4 else None
        program = statistics.statistics((130, 256), x.stride(), form)  # pyright: ignore[reportArgumentType]
        launching.perform(program, (x, result.codes, result.scale, second, saved))
        yield f"statistics {name}", (saved,)


def digest(results: Results) -> str:
    """Hash over the results' bits; a float32 NaN may have any bits."""
    total = hashlib.sha1()
    for result in results:
        if result is not None:
            if result.dtype == torch.float32:
                result = torch.where(result.isnan(), torch.nan, result)
            total.update(result.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return total.hexdigest()


PATTERNS = {
    "instruction": r"\bcvt\.rn\.satfinite\.e[45]m[32]x2\.f32",
    "sum": r"\badd\S*f32\b.*0f4(?:6800000|3000000);",
}
COUNTS: dict[str, Counter[str]] = {}


def count_instructions(*, src, metadata, metadata_group, times, cache_hit) -> None:
    """Count the conversions in each compiled kernel's PTX."""
    for name, path in metadata_group.items():
        if name.endswith(".ptx"):
            ptx = Path(path).read_text()
            result = COUNTS.setdefault(name.removesuffix(".ptx"), Counter())
            result.update(
                {kind: len(re.findall(pattern, ptx)) for kind, pattern in PATTERNS.items()}
            )


def main() -> None:
    if ON_CPU:
        interpreter.repair()
        torch.set_num_threads(1)
        launching.processors = lambda device: launching.Processors(3, 1 << 16)
    else:
        triton.knobs.compilation.listener = count_instructions
    if WAY in ROWS:
        launch._tensor_hardware = lambda tensors: ROWS[WAY]
    everything = "--all" in OPTIONS
    part, parts = map(int, OPTIONS[-1].split("/")) if "/" in "".join(OPTIONS) else (0, 1)
    specs = SPECS
    if not ON_CPU:
        specs = SPECS | {
            "nvfp4-4over6": QuantizeSpec(NVFP4, E2M1, columnwise=True, four_over_six="MAE")
        }
    facts: dict[str, tuple[str, bool]] = {}
    produced: list[Iterator[tuple[str, Results]]] = []
    if everything:
        produced = [groups(), measure()]
        for element in (E4M3, E5M2):
            shapes = ((128, 128), (130, 66), (2048, 2560))[: 1 if ON_CPU or element == E5M2 else 3]
            produced += [
                *[activations(shape, element) for shape in shapes],
                norms(element),
                others(element),
            ]
    for name, spec in itertools.islice(specs.items(), part, None, parts):
        for case, result, expected in quantizations(name, spec):
            equal = all(interpreter.same_bits(m, e) for m, e in zip(result, expected, strict=True))
            facts[case] = digest(result), equal
    for name, result in itertools.chain(*produced[part::parts]):
        facts[name] = digest(result), True
    print(json.dumps({"cases": facts, "counts": COUNTS, "triton": triton.__version__}))


if __name__ == "__main__":
    main()
