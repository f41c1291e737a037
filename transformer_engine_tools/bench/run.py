"""Figure rows: every case by every provider that supports it, and the failures as sentences."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .cases import Case
from .measure import FULL, Effort
from .providers import Provider
from .roofs import Roofs


@dataclass(frozen=True)
class Row:
    """The figures of a case by a provider; None if not applicable.

    Attributes:
        gpu_ms: See `measure`, as for cpu_ms and eager_ms.
        rate: Rate over gpu_ms (eager_ms on a CPU).
        unit: "TFLOP/s" for the products or "GB/s" for the bytes.
        roof: Rate as a fraction of this machine's measured roof.
        peak_mib: See `measure.Figures`, as for compile_s, cached_s and fp8_calls.
        error: Reason for missing figures.
    """

    case: str
    family: str
    recipe: str
    provider: str
    gpu_ms: float | None = None
    cpu_ms: float | None = None
    eager_ms: float | None = None
    rate: float | None = None
    unit: str | None = None
    roof: float | None = None
    peak_mib: float | None = None
    compile_s: float | None = None
    cached_s: float | None = None
    fp8_calls: int | None = None
    error: str | None = None

    @property
    def time_ms(self) -> float | None:
        """GPU time, or wall time without a GPU."""
        return self.eager_ms if self.gpu_ms is None else self.gpu_ms

    def as_dict(self) -> dict[str, Any]:
        """Fields that are not None, with rounded figures."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in values.items()
        }


def run(
    cases: Iterable[Case],
    providers: Iterable[Provider],
    device: torch.device,
    roofs: Roofs,
    effort: Effort = FULL,
    observe: Callable[[str], None] = lambda name: None,
) -> Iterator[Row]:
    """Measure the cases one by one; call `observe` with the name of each case before it begins."""
    available = [provider for provider in providers if provider.unavailable_reason(device) is None]
    for case in cases:
        for provider in available:
            observe(f"{case.name} {provider.name}")
            row = _row(case, provider, device, roofs, effort)
            if row is not None:
                yield row


def _row(
    case: Case, provider: Provider, device: torch.device, roofs: Roofs, effort: Effort
) -> Row | None:
    """Time one case with one provider; None if the provider does not compute it."""
    torch.manual_seed(0)
    try:
        workload = provider.workload(case, device)
        if workload is None:
            return None
        figures = workload.measured(case.backward, device, effort)
    except Exception as error:  # an exception of a library or compiler is the case's result
        sentence = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return Row(case.name, case.family, case.recipe, provider.name, error=sentence)
    finally:
        # The next case must find an empty device and a compiler without history: after eight modules in one process
        # torch.compile would run the ninth uncompiled.
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    timing = figures.timing
    work = case.moved or case.operations
    return Row(
        case.name,
        case.family,
        case.recipe,
        provider.name,
        *timing,
        rate=work / timing.busiest / (1e6 if case.moved else 1e9) if work else None,
        unit=("GB/s" if case.moved else "TFLOP/s") if work else None,
        roof=roofs.share(case, timing.busiest),
        peak_mib=figures.peak_mib,
        compile_s=figures.compile_s,
        cached_s=figures.cached_s,
        fp8_calls=figures.fp8_calls,
    )
