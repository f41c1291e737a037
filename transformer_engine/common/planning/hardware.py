"""GPU and link rates: measured constants, and the time for each kind of operation.

Milliseconds, bytes and floating-point operations throughout. `docs/plan.md` lists which measurements the constants are
fitted to, and the errors for all other measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..checks import suggestion
from ..formats import TENSOR_FORMATS, TensorFormat
from ..hardware import Capability, Hardware, hardware_of_gpu, nvidia

GIB = 1 << 30
US = 1e-3  # milliseconds
GB_PER_S = 1e6  # bytes per millisecond
HIGH_PRECISION = "none"  # name of the recipe without quantization, as in `te train`
OWN_RATES = ", or pass a GpuRates with measured rates"
Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_receive"]


@dataclass(frozen=True, slots=True, eq=False)
class GpuRates:
    """A GPU: data-sheet sizes, and measured rates; compares by identity.

    Attributes:
        name: Name in reports.
        hardware: The GPU's row in the hardware table.
        memory: Memory in bytes.
        peak: Dense bfloat16 FLOP/ms from the data sheet, which define the FLOP utilization.
        bandwidth: Bytes/ms for a copy, read and written bytes together.
        rates: FLOP/ms for large products by kind: "bf16", "fp8" (one scale, forward), "fp8_split" (one scale, with
            sums in float32: backward), "block" (128x128 weights), "block_1d" (both operands in rows of 128),
            "blocks_8bit" and "blocks_4bit" (a one-byte scale for each row block).
        depth: Contracted-axis elements, in bfloat16, whose time each tile in a grouped product takes to start and to
            store.
        grouped_codes: Part of the rates that quantized grouped products reach.
        attention: FLOP/ms for the forward and the backward pass by backend and head size.
        start: Milliseconds until a product has filled the GPU, once for each product.
        launch: Milliseconds for a small kernel.
        sustained: Part of the product and attention rates that remains in a long loop, at the power limit.
        nvlink: Link rate within a host relative to an H100's.
        host: Host milliseconds for each kernel that it launches one by one.
        calibrated: The rates were measured on this GPU; otherwise they follow from the data sheet.
    """

    name: str
    hardware: Hardware
    memory: int
    peak: float
    bandwidth: float
    rates: dict[str, float]
    attention: dict[str, dict[int, tuple[float, float]]]
    start: float = 6 * US
    depth: float = 320.0
    grouped_codes: float = 0.82
    launch: float = 4.5 * US
    sustained: float = 0.94
    nvlink: float = 1.0
    host: float = 50 * US
    calibrated: bool = True

    def product_ms(self, kind: str, flops: float, moved_bytes: float, tiled: float = 0.0) -> float:
        """Time for a product, or for products over row groups in one launch.

        Args:
            kind: A key in `rates`.
            flops: Floating-point operations.
            moved_bytes: Bytes in both operands and in the result.
            tiled: Elements in the groups' results; 0 for a plain product.
        """
        rate = self.rates[kind] * (self.grouped_codes if tiled and kind != "bf16" else 1.0)
        busy = flops / rate + 2 * self.depth * tiled / self.rates["bf16"]
        return self.start + max(busy, moved_bytes / self.bandwidth)

    def copy_ms(self, moved_bytes: float, efficiency: float = 1.0) -> float:
        """Time for a kernel that is limited by memory and moves a number of bytes."""
        return self.launch + moved_bytes / (self.bandwidth * efficiency)

    def attention_ms(self, backend: str, head_dim: int, flops: float, backward: bool) -> float:
        """Time for the forward or the backward pass of attention with a number of operations."""
        rates = self.attention[backend]
        nearest = min(rates, key=lambda size: abs(size - head_dim))
        return 4 * self.launch + flops / rates[nearest][backward]

    @property
    def source(self) -> str:
        """Where the rates are from: "measured" or "data sheet"."""
        return "measured" if self.calibrated else "data sheet"

    def scaled(
        self, name: str, *, products: float, fp8: float, bandwidth: float, **sizes: object
    ) -> GpuRates:
        """Build a GPU whose rates are multiples of this GPU's."""
        rates = {
            kind: rate * (products if kind == "bf16" else fp8) for kind, rate in self.rates.items()
        }
        attention = {
            backend: {
                size: (pair[0] * products, pair[1] * products) for size, pair in sizes_of.items()
            }
            for backend, sizes_of in self.attention.items()
        }
        changed = replace(
            self, name=name, rates=rates, attention=attention, bandwidth=self.bandwidth * bandwidth
        )
        return replace(changed, **sizes)


def _h200() -> GpuRates:
    return GpuRates(
        name="h200",
        hardware=nvidia(9, 0),
        memory=141 * 10**9,
        peak=989e9,
        bandwidth=4.2e9,
        rates={
            "bf16": 790e9,
            "fp8": 1500e9,
            "fp8_split": 1420e9,
            "block": 1270e9,
            "block_1d": 1030e9,
        },
        attention={
            "flash4": {64: (481e9, 543e9), 128: (764e9, 648e9), 256: (798e9, 395e9)},
            "cudnn": {64: (477e9, 413e9), 128: (685e9, 571e9), 256: (700e9, 370e9)},
        },
    )


H200 = _h200()
# The ratios come from a copy and large products in `te bench`, on an H100 and on an H200.
H100 = H200.scaled("h100", products=0.987, fp8=0.969, bandwidth=0.712, memory=79 * GIB)
# Data-sheet ratios; the formats with blocks of 16 and 32 take the part of the peak that FP8 reaches on an H200.
B200 = replace(
    H200.scaled(
        "b200",
        products=2250 / 989,
        fp8=4500 / 1979,
        bandwidth=8.0 / 4.8,
        hardware=nvidia(10, 0),
        memory=180 * 10**9,
        peak=2250e9,
        nvlink=2.0,
        calibrated=False,
    ),
    rates={
        "bf16": H200.rates["bf16"] * 2250 / 989,
        **{kind: H200.rates[kind] * 4500 / 1979 for kind in ("fp8", "fp8_split")},
        "blocks_8bit": H200.rates["fp8"] * 4500 / 1979,
        "blocks_4bit": H200.rates["fp8"] * 9000 / 1979,
    },
)
GPUS = {gpu.name: gpu for gpu in (H100, H200, B200)}


@dataclass(frozen=True, slots=True)
class LinkRates:
    """LinkRates within a host and between hosts.

    Attributes:
        devices_per_host: GPUs per host, all connected to each other.
        ring: Bytes/ms that a GPU sends in an all-gather or a reduce-scatter within a host.
        exchange: Bytes/ms that a GPU sends in an all-reduce, an all-to-all or to one other GPU within a host.
        start: Milliseconds for a collective without data within a host.
        network: Bytes/ms that each GPU sends to other hosts.
        hop: Additional milliseconds for each further host in an all-gather or a reduce-scatter, which pass data along a
            ring, and for each doubling of the hosts in the other collectives.
        contention: Part of a collective's time by which it delays concurrent kernels, whose multiprocessors it uses.
    """

    devices_per_host: int = 8
    ring: float = 250 * GB_PER_S
    exchange: float = 305 * GB_PER_S
    start: float = 32 * US
    network: float = 45 * GB_PER_S
    hop: float = 10 * US
    contention: float = 0.35

    def __post_init__(self) -> None:
        for name in (
            "devices_per_host",
            "ring",
            "exchange",
            "start",
            "network",
            "hop",
            "contention",
        ):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name}={value!r} of the links must be a positive number")
        if int(self.devices_per_host) != self.devices_per_host:
            raise ValueError(
                f"devices_per_host={self.devices_per_host!r} must be an integer of at least 1"
            )

    def collective_ms(self, kind: Collective, moved_bytes: float, size: int, stride: int) -> float:
        """Time for a collective.

        Args:
            kind: The collective.
            moved_bytes: Bytes in the gathered, reduced or exchanged buffer; for `send_receive`, the bytes that a
                rank sends.
            size: Number of ranks.
            stride: Distance between the group's neighboring ranks in the device order.

        Returns:
            0 for one rank. A group on several hosts uses the network of all its members on a host at once, because each
            GPU has its own adapter; an all-to-all sends each rank's part by that rank's adapter.
        """
        if size == 1:
            return 0.0
        sent = moved_bytes if kind == "send_receive" else moved_bytes * (size - 1) / size
        if kind == "all_reduce":
            sent *= 2
        ring = kind in ("all_gather", "reduce_scatter")
        rate = self.ring if ring else self.exchange
        within, hosts = self._spread(size, stride)
        if hosts == 1:
            return self.start + sent / rate
        start = self.start + self.hop * (hosts - 1 if ring else math.ceil(math.log2(hosts)))
        if kind in ("all_to_all", "send_receive"):
            across = sent if kind == "send_receive" else moved_bytes * (size - within) / size
            return start + max(across / self.network, (sent - across) / rate)
        return start + sent / min(rate, self.network * within)

    def contention_ms(self, hidden: float, size: int, stride: int) -> float:
        """Time by which collectives of a group delay concurrent kernels.

        Args:
            hidden: Milliseconds in which both run. A collective that the network limits uses fewer processors.
            size: Number of ranks.
            stride: Distance between neighboring ranks.
        """
        within, hosts = self._spread(size, stride)
        busy = 1.0 if hosts == 1 else min(1.0, self.network * within / self.ring)
        return self.contention * hidden * busy

    def _spread(self, size: int, stride: int) -> tuple[int, int]:
        """Count a group's ranks on one host, and its hosts."""
        within = min(size, max(1, self.devices_per_host // stride))
        return within, math.ceil(size / within)


DEFAULT_LINKS = LinkRates()


def host_links(gpu: GpuRates, **changes: Any) -> LinkRates:
    """Links for hosts with a GPU, measured on H100 and scaled to its NVLink, with other fields changed."""
    ring, exchange = (rate * gpu.nvlink for rate in (DEFAULT_LINKS.ring, DEFAULT_LINKS.exchange))
    return replace(DEFAULT_LINKS, **{"ring": ring, "exchange": exchange, **changes})


def unknown(kind: str, name: str, names: Iterable[str], remedy: str = "") -> ValueError:
    """Build the error for an unknown name, with the most similar known names."""
    names = list(names)
    return ValueError(
        f"{kind} {name!r} is unknown{suggestion(name, names)}; choose from {', '.join(names)}{remedy}"
    )


def gpu_named(name: str | GpuRates) -> GpuRates:
    """Get a GPU in the table; ValueError for another name."""
    if isinstance(name, GpuRates):
        return name
    if name in GPUS:
        return GPUS[name]
    if hardware_of_gpu(name):  # not a misspelt name: none of the others is meant
        raise ValueError(
            f"gpu {name!r} has no measured rates; choose from {', '.join(GPUS)}{OWN_RATES}"
        )
    raise unknown("gpu", name, GPUS, OWN_RATES)


@dataclass(frozen=True, slots=True)
class FormatCost:
    """Recipe costs: code bytes, product kinds, and how often a cast reads its input.

    Attributes:
        name: Recipe name.
        needs: Hardware capability that runs the recipe natively.
        products: Forward, input-gradient and weight-gradient product kinds in `GpuRates.rates`.
        code: Bytes for an element's code and its part of the scales.
        reads: Times that a cast reads its input; 2 where the scale is the maximum of this tensor.
        efficiency: Part of the copy rate that casts in one and in both directions reach.
        multiple: Rows and columns must be multiples of it.
        row_codes: The codes of the other direction are the transpose, so that a gather sends one direction.
    """

    name: str
    needs: Capability
    products: tuple[str, str, str]
    code: float = 2.0
    reads: int = 1
    efficiency: tuple[float, float] = (0.97, 0.92)
    multiple: int = 16
    row_codes: bool = False


def _block_costs(form: TensorFormat) -> FormatCost:
    """Costs for a format with a one-byte scale for each row block."""
    assert form.block is not None and form.block_products is not None
    length = form.block[1]
    # Two scale levels: one read finds the tensor's maximum.
    reads, efficiency = (1, (0.97, 0.83)) if form.levels is None else (2, (0.9, 0.7))
    kind = f"blocks_{8 // form.packing}bit"
    code = 1 / form.packing + 1 / length
    return FormatCost(
        form.name, form.block_products, (kind, kind, kind), code, reads, efficiency, length
    )


FORMATS = {
    row.name: row
    for row in (
        FormatCost(HIGH_PRECISION, "bf16 products", ("bf16", "bf16", "bf16"), multiple=1),
        FormatCost(
            "delayed", "fp8 products", ("fp8", "fp8_split", "fp8_split"), 1.0, row_codes=True
        ),
        FormatCost(
            "current",
            "fp8 products",
            ("fp8", "fp8_split", "fp8_split"),
            1.0,
            2,
            (1.0, 0.97),
            row_codes=True,
        ),
        FormatCost(
            "block",
            "fp8 products",
            ("block", "block", "block_1d"),
            1 + 4 / 128,
            efficiency=(0.97, 0.83),
        ),
        *[_block_costs(form) for form in TENSOR_FORMATS if form.scale != "float32"],
    )
}


def _computes(gpu: GpuRates, row: FormatCost) -> bool:
    """Does a GPU have the instructions and the rates of a recipe's products?"""
    return gpu.hardware.has(row.needs) and gpu.rates.keys() >= set(row.products)


def format_named(recipe: str, gpu: GpuRates) -> FormatCost:
    """Get the costs of a recipe on a GPU; ValueError if it is unknown or the GPU has no rates for it.

    "bf16" is another name for "none".
    """
    recipe = HIGH_PRECISION if recipe == "bf16" else recipe
    if recipe not in FORMATS:
        raise unknown("recipe", recipe, FORMATS)
    cost = FORMATS[recipe]
    if not _computes(gpu, cost):
        runs = [name for name, row in FORMATS.items() if _computes(gpu, row)]
        others = [name for name, other in GPUS.items() if _computes(other, cost)]
        reason = gpu.hardware.lacks(cost.needs) or "the table has no rate of its products"
        raise ValueError(
            f"recipe={recipe!r} has no products on gpu={gpu.name!r} ({reason}); choose from {', '.join(runs)}"
            + (f", or use {' or '.join(f'gpu={name!r}' for name in others)}" if others else "")
        )
    return cost
