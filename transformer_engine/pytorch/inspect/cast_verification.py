"""Casts from every float32 number, compared bit for bit: kernels with the reference, and both with the definition.

`verify_casts` proves three statements, each on all inputs that exist:

1. The reference's conversions to E4M3, E5M2 and E2M1 match the codes of `cast_oracle`. So do all
   kernel conversions that this GPU can run, with three multipliers. Codes decode to their values.
2. Block scales equal the reference, and `cast_oracle` where the rule is one operation, for every possible maximum.
3. Codes from blocks and fused producers equal the reference.

A sample (by default) takes every 64th part of the float32 numbers, and all 16-bit numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...common.dispatch import Backend
from ...common.formats import E2M1, E4M3, E5M2, FLOAT32_MAX, Element
from ..primitives.quantize import Quantized, QuantizeRequest, QuantizeSpec
from ..primitives.quantize.backends import REFERENCE, TRITON
from ..primitives.quantize.encodings import cast, encode_e2m1
from ..primitives.quantize.format_row import QuantizeInputs
from ..runtime import self_tested
from . import cast_oracle
from .cast_kernels import (
    VERIFIED_SPECS,
    conversions,
    decoded,
    encoded,
    flat_bytes,
    has_row_blocks,
    producers,
)

PART = 1 << 26  # float32 numbers that are compared at once on a GPU; 64 parts are all numbers
PARTS = (1 << 32) // PART
SAMPLED = 1 << 20  # numbers per part in a sample
MULTIPLIERS = {"1": 1.0, "2^127": 2.0**127, "2^-126": 2.0**-126}
EXPONENTS = range(-126, 128)
MIX = -1640531527  # odd, so that i * MIX visits all 2^32 patterns in an order without runs
MIXER = 6364136223846793005  # multiplier from Knuth's linear congruential generator, for digests
SPECS = dict(VERIFIED_SPECS)
# Options that the self-test does not compute: a block's maximum mapped to 4 or 6, square blocks, E5M2.
for _name, _spec in list(SPECS.items()):
    _variants = {}
    if _spec.format.four_over_six and not _spec.two_dimensional:
        _variants[f"{_name} 4over6"] = replace(_spec, four_over_six="MAE")
    if _spec.format.two_dimensional:
        _variants[f"{_name} square"] = replace(_spec, two_dimensional=True)
    if E5M2.name in _spec.format.elements:
        _variants[f"{_name} e5m2"] = replace(_spec, element=E5M2)
    SPECS |= {name: spec for name, spec in _variants.items() if spec not in SPECS.values()}
Pairs = Iterator[tuple[Tensor, Tensor]]  # (found, expected), bytes with equal shapes


@dataclass(frozen=True)
class CastResult:
    """The comparison of one statement.

    Attributes:
        name: What was compared.
        compared: Bytes.
        different: Bytes that differ.
        digest: Hash over the bytes found, the same on every machine for the same version and sample.
        seconds: Comparison time.
    """

    name: str
    compared: int
    different: int
    digest: str
    seconds: float

    def line(self) -> str:
        """The result in one line."""
        state = "equal" if not self.different else f"DIFFERENT: {self.different:,}"
        return f"{self.name:<85}  {self.compared:>15,} bytes  {self.digest}  {state}"


@dataclass(frozen=True)
class CastVerification:
    """All comparisons, and the machine."""

    machine: dict[str, str]
    complete: bool
    results: tuple[CastResult, ...]

    @property
    def equal(self) -> bool:
        """Whether no byte differs."""
        return not any(result.different for result in self.results)

    def as_dict(self) -> dict[str, Any]:
        """The certificate as plain data."""
        results = [
            asdict(result) | {"seconds": round(result.seconds, 2)} for result in self.results
        ]
        return {
            "machine": self.machine,
            "complete": self.complete,
            "equal": self.equal,
            "compared": sum(result.compared for result in self.results),
            "results": results,
        }

    def report(self) -> str:
        """One line per comparison, and the total."""
        lines = [f"{name}: {value}" for name, value in self.machine.items()]
        lines += [result.line() for result in self.results]
        compared = sum(result.compared for result in self.results)
        different = sum(result.different for result in self.results)
        inputs = "all float32 numbers" if self.complete else "a sample of the float32 numbers"
        lines.append(f"{compared:,} bytes compared ({inputs}), {different:,} differ")
        return "\n".join(lines)


class Numbers:
    """The float32 numbers in a verification, by parts.

    Args:
        device: Where they are computed.
        complete: All numbers; otherwise a sample from every part, or from fewer parts on a CPU.
    """

    def __init__(self, device: torch.device, complete: bool):
        self.device = device
        self.complete = complete
        self.parts = range(0, PARTS, 1 if complete or device.type == "cuda" else 16)
        self.size = PART if complete else SAMPLED if device.type == "cuda" else 1 << 16

    def ordered(self) -> Iterator[Tensor]:
        """Yield [rows, 1024] bit patterns in ascending order; neighbours have one exponent."""
        for part in self.parts:
            yield self._patterns(part)

    def mixed(self) -> Iterator[Tensor]:
        """Yield the same patterns in an order in which neighbours have different exponents."""
        for part in self.parts:
            yield self._patterns(part) * MIX

    def floats(self) -> Iterator[Tensor]:
        """Yield float32 numbers in ascending bit order."""
        for bits in self.ordered():
            yield bits.view(torch.float32)

    def _patterns(self, part: int) -> Tensor:
        # A sample takes the numbers at equal distances, with different last bits in each part.
        step = PART // self.size
        first = part * PART + (0 if step == 1 else 2654435761 * (part + 1) % step)
        index = torch.arange(self.size, dtype=torch.int64, device=self.device) * step + first
        return torch.where(index < 1 << 31, index, index - (1 << 32)).to(torch.int32).view(-1, 1024)

    def halves(self, dtype: torch.dtype) -> Tensor:
        """Return every number in a 16-bit dtype, [256, 256]."""
        bits = torch.arange(-(1 << 15), 1 << 15, device=self.device).to(torch.int16)
        return bits.view(dtype).view(256, 256)


def verify_casts(
    complete: bool = False,
    device: torch.device | None = None,
    progress: Callable[[CastResult], None] = lambda result: None,
) -> CastVerification:
    """Compare every cast on this machine with the reference and with its definition.

    Args:
        complete: Compare all float32 numbers: minutes on a GPU, hours on a CPU. Otherwise a sample.
        device: Cast device; by default the current CUDA device, or the CPU without one.
        progress: Called with the result of each comparison when it ends.
    """
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    numbers = Numbers(device, complete)
    results = []
    for name, pairs in _comparisons(numbers):
        results.append(_compare(name, pairs()))
        progress(results[-1])
    return CastVerification(self_tested.machine_facts(), complete, tuple(results))


def _compare(name: str, pairs: Pairs) -> CastResult:
    begin = time.perf_counter()
    compared, different, digest = 0, 0, 0
    for actual, expected in pairs:
        assert actual.shape == expected.shape and actual.dtype == expected.dtype == torch.uint8, (
            name
        )
        compared += actual.numel()
        different += int((actual != expected).sum())
        digest = (digest * MIXER + _digest(actual)) % (1 << 64)
    return CastResult(name, compared, different, f"{digest:016x}", time.perf_counter() - begin)


def _digest(data: Tensor) -> int:
    """Return a hash of bytes, the same on every device: the sum of mixed words and positions, modulo 2^64."""
    flat = data.reshape(-1)
    words = torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(torch.int64)
    mixed = (words ^ (torch.arange(len(words), device=data.device) * MIXER)) * MIXER
    return int(((mixed ^ (mixed >> 32)) * MIXER).sum()) % (1 << 64)


def _comparisons(numbers: Numbers) -> Iterator[tuple[str, Callable[[], Pairs]]]:
    for element in (E4M3, E5M2, E2M1):
        yield (
            f"reference {element.name}, every float32",
            partial(_reference_codes, numbers, element),
        )
    on_gpu = numbers.device.type == "cuda"
    for element in (E4M3, E5M2):
        for way in conversions(element, numbers.device):
            yield f"decoded {element.name}, {way}", partial(_decode_numbers, numbers, element, way)
            for name, multiplier in MULTIPLIERS.items():
                title = f"kernel {element.name}, {way}, multiplier {name}, every float32"
                yield title, partial(_kernel_codes, numbers, element, way, multiplier)
            title = f"kernel {element.name}, {way}, every bfloat16 and float16, every exponent of the multiplier"
            yield title, partial(_halves, numbers, element, way)
            yield (
                f"kernel {element.name}, {way}, random multipliers",
                partial(_products, numbers, element, way),
            )
    for name, spec in SPECS.items():
        if has_row_blocks(spec) and (on_gpu or _has_oracle(spec)):
            yield f"scales of {name}, every maximum", partial(_scales, numbers, spec)
        if on_gpu:
            yield f"codes of {name}, every float32", partial(_block_codes, numbers, spec)
            yield f"codes of {name}, scale 1", partial(_anchor_codes, numbers, spec)
    if on_gpu:
        for name, pairs in producers(
            numbers.halves, EXPONENTS if numbers.complete else EXPONENTS[::16]
        ):
            yield name, pairs


def _reference_codes(numbers: Numbers, element: Element) -> Pairs:
    for x in numbers.floats():
        codes = encode_e2m1(x) if element is E2M1 else cast(x, element)
        yield flat_bytes(codes), cast_oracle.element_codes(x, element).view(-1)


def _kernel_codes(numbers: Numbers, element: Element, way: str, multiplier: float) -> Pairs:
    """Codes by the kernels with and without a transposed copy."""
    for x in numbers.floats():
        expected = cast_oracle.element_codes(cast_oracle.products(x, multiplier), element)
        yield flat_bytes(encoded(x, element, way, multiplier)), expected.view(-1)
        if multiplier == 1.0 and x.device.type == "cuda":
            codes_t = encoded(x, element, way, multiplier, transposed=True)
            yield flat_bytes(codes_t), flat_bytes(expected.t())


def _decode_numbers(numbers: Numbers, element: Element, way: str) -> Pairs:
    expected = cast_oracle.code_values(element, numbers.device)
    numbers_by_code = decoded(element, way, numbers.device)
    # A NaN has no defined sign or payload.
    both = [
        torch.where(values.isnan(), torch.nan, values) for values in (numbers_by_code, expected)
    ]
    yield flat_bytes(both[0]), flat_bytes(both[1])


def _halves(numbers: Numbers, element: Element, way: str) -> Pairs:
    for dtype in (torch.bfloat16, torch.float16):
        x = numbers.halves(dtype)
        for exponent in EXPONENTS:
            multiplier = 2.0**exponent
            expected = cast_oracle.element_codes(
                cast_oracle.products(x.float(), multiplier), element
            )
            yield flat_bytes(encoded(x, element, way, multiplier)), expected.view(-1)


def _products(numbers: Numbers, element: Element, way: str) -> Pairs:
    """Random multipliers on random numbers: the multiplication before the conversion rounds once."""
    generator = torch.Generator("cpu").manual_seed(0)
    for _ in range(256 if numbers.complete else 32):
        bits = torch.randint(
            0x00800000, 0x7F000000, (1,), generator=generator, dtype=torch.int32, device="cpu"
        )
        multiplier = bits.view(torch.float32).item()
        # Products within the range of the codes: numbers around the inverse multiplier.
        normal = torch.randn(
            1 << 10, 1 << 10, generator=generator, dtype=torch.float64, device="cpu"
        )
        x = (normal * 64 / multiplier).float().to(numbers.device)
        expected = cast_oracle.element_codes(cast_oracle.products(x, multiplier), element)
        yield flat_bytes(encoded(x, element, way, multiplier)), expected.view(-1)


def _quantized(x: Tensor, spec: QuantizeSpec) -> Pairs:
    """Compare the kernel with the reference: codes and scales in both directions."""
    for actual, expected in zip(
        _quantize(TRITON, x, spec), _quantize(REFERENCE, x, spec), strict=True
    ):
        if actual is not None and expected is not None:
            yield flat_bytes(actual), flat_bytes(expected)


def _quantize(backend: Backend[QuantizeRequest], x: Tensor, spec: QuantizeSpec) -> Quantized:
    request = QuantizeRequest(spec, (x.shape[0], x.shape[1]), x.dtype, x.device)
    assert backend.bind is not None
    call = backend.bind(request)
    assert callable(call), f"{backend.name} cannot quantize {request}: {call}"
    return call(x, QuantizeInputs())


def _scales(numbers: Numbers, spec: QuantizeSpec) -> Pairs:
    """Blocks with one number other than zero, whose magnitudes cover every finite float32."""
    length = spec.format.length
    rowwise = replace(spec, columnwise=False)
    for bits in numbers.ordered():
        if int(bits[0, 0]) < 0:
            break  # negative numbers have the same magnitudes
        amax = bits.view(torch.float32)
        amax = torch.where(amax.isfinite(), amax, 0.0)
        for part in amax.view(-1, min(amax.numel(), (1 << 28) // length)):
            x = torch.zeros((len(part) // 8, 8, length), device=part.device)
            x[:, :, 5] = part.view(-1, 8)
            x = x.view(-1, 8 * length)
            if x.device.type == "cuda":
                yield from _quantized(x, rowwise)
            if _has_oracle(spec):
                scale = _quantize(REFERENCE, x, rowwise).scale
                assert scale is not None
                yield flat_bytes(scale), flat_bytes(_define_scales(part, spec))


def _has_oracle(spec: QuantizeSpec) -> bool:
    """Return whether `_define_scales` knows the scales of a format."""
    return spec.format.has_exponent_scales or (
        spec.format.scale == "float32" and not spec.power_of_two
    )


def _define_scales(amax: Tensor, spec: QuantizeSpec) -> Tensor:
    """Return the stored scales of blocks by definition."""
    if spec.format.has_exponent_scales:
        return cast_oracle.power_scales(amax, spec.element)
    scale = cast_oracle.quotients(spec.element.maximum, amax).clamp(max=FLOAT32_MAX)
    return cast_oracle.quotients(1.0, torch.where(amax > 0, scale, 1.0))


def _block_codes(numbers: Numbers, spec: QuantizeSpec) -> Pairs:
    """Matrices with all numbers in ascending and in mixed order; NaN and infinity stay in their blocks."""
    for patterns in (numbers.ordered(), numbers.mixed()):
        for bits in patterns:
            x = bits.view(torch.float32)
            # one such value would decide the scale of the matrix
            if spec.format.levels is not None:
                x = torch.where(x.isfinite(), x, 0.0)
            yield from _quantized(x, spec)


def _anchor_codes(numbers: Numbers, spec: QuantizeSpec) -> Pairs:
    """Blocks whose maximum makes their scale 1, filled with all numbers up to it."""
    largest = spec.element.maximum
    for bits in numbers.ordered():
        x = bits.view(torch.float32)
        x = torch.where(x.abs() <= largest, x, 0.0)
        if not bool(x.any()):
            continue
        for offset in (0, 1):  # the second time, the numbers that anchors replaced have moved
            block = spec.format.length
            shifted = x.roll((offset, offset), (0, 1))
            shifted[:, ::block] = largest
            shifted[::block, :] = largest
            if (unit_amax := spec.format.unit_amax) is not None:
                shifted[0, 0] = unit_amax
            yield from _quantized(shifted, spec)
