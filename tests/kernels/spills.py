"""Stack that compiled launches may use: kernel, limit in bytes per thread, and the launches that need it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Spill:
    """Launches of a kernel that spill registers.

    Attributes:
        kernel: Module and name of the kernel.
        stack: Limit in bytes per thread.
        constants: The launch's constants, as text; launches with other values are excluded.
        rows: Rows in the hardware table; empty: every row.
        releases: Triton releases, (major, minor); empty: every release.
    """

    kernel: str
    stack: int
    constants: Mapping[str, str] = field(default_factory=dict)
    rows: tuple[str, ...] = ()
    releases: tuple[tuple[int, int], ...] = ()

    def matches(
        self, kernel: str, constants: Mapping[str, str], row: str, release: tuple[int, ...]
    ) -> bool:
        return (
            kernel == self.kernel
            and all(constants.get(name) == value for name, value in self.constants.items())
            and (not self.rows or row in self.rows)
            and (not self.releases or release[:2] in self.releases)
        )


WHOLE, PREDICATED = {"EVEN": "True"}, {"EVEN": "False"}
ODD_ROWS = {**PREDICATED, "PAIRS": "False"}
BLOCKS_1D, SQUARES = {"SQUARE": "False"}, {"SQUARE": "True"}
FLOAT32_SCALES, IDENTITY = {"POWER_OF_TWO": "False"}, {"CURVE": "identity"}

OLDEST, NEWEST = ((3, 6),), ((3, 9),)
AMPERE, BLACKWELL, CONSUMER_BLACKWELL = ("8.0", "8.6"), ("10.0", "10.3", "11.0"), ("12.0", "12.1")

# Kernels without tiles that can be predicated, and whole tiles.
WHOLE_SPILLS = (
    Spill("attention.attend", 128),
    Spill("attention_backward.grad_keys", 144),
    # Tiles that were measured on an H200, with the sum of the result in registers too.
    Spill("grouped_gemm.columns_kernel", 264, {"ACCUMULATE": "True", "SCALING": "0"}, ("9.0",)),
    Spill("grouped_gemm.columns_kernel", 264, {"ACCUMULATE": "True", "SCALING": "1"}, ("9.0",)),
    Spill("delayed_scaling._advance", 8),
    Spill("activation_cast.backward_kernel", 8, WHOLE),
    Spill("activation_recompute.recompute_kernel", 8, WHOLE, ("10.0", "10.3")),
    Spill("block_cast.both_blocks_kernel", 16, WHOLE),
    Spill("block_cast.square_block_kernel", 8, {**WHOLE, **FLOAT32_SCALES}, ("8.0",), NEWEST),
    Spill("block_fused.backward_kernel", 256, WHOLE, ("8.0",)),
    # Three tiles in flight, which Triton 3.7 and newer hold without stack; two need none with 3.6.
    Spill("block_fused.backward_kernel", 336, {**WHOLE, **SQUARES, **IDENTITY}, ("8.6",), OLDEST),
    # 4 warps, fastest for 1 x 128 blocks on an H200. 8 warps need no stack on 9.0; squares were not timed.
    Spill("block_fused.backward_kernel", 296, {**WHOLE, **SQUARES, **IDENTITY}, ("9.0",)),
    Spill(
        "block_fused.backward_kernel", 120, {**WHOLE, **BLOCKS_1D, **IDENTITY}, ("9.0",), ((3, 9),)
    ),
    Spill(
        "block_fused.backward_kernel",
        328,
        {**WHOLE, **SQUARES, **IDENTITY, **FLOAT32_SCALES},
        ("9.0",),
    ),
    Spill("block_fused.backward_kernel", 144, {**WHOLE, **BLOCKS_1D, **IDENTITY}, ("10.0", "10.3")),
    Spill("block_fused.backward_kernel", 472, {**WHOLE, **SQUARES, **IDENTITY}, ("10.0", "10.3")),
)
# Predicated tiles: sizes that are not multiples of the tile sizes.
PREDICATED_SPILLS = (
    Spill("block_cast.both_blocks_kernel", 24, ODD_ROWS, ("8.0", *BLACKWELL)),
    Spill("block_fused.forward_kernel", 8, {**ODD_ROWS, **BLOCKS_1D}, ("8.0", "8.9")),
    Spill("block_fused.forward_kernel", 56, {**ODD_ROWS, **BLOCKS_1D}, BLACKWELL),
    Spill("block_fused.forward_kernel", 16, {**ODD_ROWS, **SQUARES, **FLOAT32_SCALES}, BLACKWELL),
    Spill("block_fused.backward_kernel", 96, {**PREDICATED, **BLOCKS_1D}, AMPERE),
    Spill("block_fused.backward_kernel", 80, {**PREDICATED, **BLOCKS_1D}, ("9.0",), ((3, 7),)),
    Spill("block_fused.backward_kernel", 40, {**ODD_ROWS, **BLOCKS_1D}, BLACKWELL),
    Spill("block_fused.backward_kernel", 24, {**PREDICATED, **BLOCKS_1D}, CONSUMER_BLACKWELL),
    Spill(
        "block_fused.backward_kernel", 32, {**ODD_ROWS, **SQUARES, **IDENTITY}, CONSUMER_BLACKWELL
    ),
    Spill(
        "block_fused.backward_kernel",
        40,
        {**PREDICATED, **SQUARES, **FLOAT32_SCALES},
        ("8.6", *CONSUMER_BLACKWELL),
    ),
    Spill(
        "block_fused.backward_kernel", 24, {**PREDICATED, **SQUARES, **FLOAT32_SCALES}, BLACKWELL
    ),
    Spill(
        "block_fused.forward_kernel",
        8,
        {**ODD_ROWS, **SQUARES, **FLOAT32_SCALES},
        CONSUMER_BLACKWELL,
    ),
    Spill(
        "block_fused.backward_kernel",
        24,
        {**PREDICATED, **SQUARES, **IDENTITY},
        ("9.0",),
        ((3, 9),),
    ),
    Spill("block_fused.forward_kernel", 16, {**ODD_ROWS, **BLOCKS_1D}, ("9.0",), ((3, 9),)),
    Spill("grouped_block_cast.row_block_kernel", 32, PREDICATED, ("9.0",), ((3, 9),)),
    Spill("block_cast.square_block_kernel", 24, {**ODD_ROWS, **FLOAT32_SCALES}, CONSUMER_BLACKWELL),
    Spill("grouped_block_cast.square_block_kernel", 8, PREDICATED, ("10.0", "10.3")),
    Spill("grouped_block_cast.square_block_kernel", 80, {**PREDICATED, **FLOAT32_SCALES}, AMPERE),
    Spill(
        "grouped_block_cast.square_block_kernel",
        56,
        {**PREDICATED, **FLOAT32_SCALES},
        CONSUMER_BLACKWELL,
    ),
    Spill("grouped_block_cast.row_block_kernel", 16, PREDICATED, ("8.0", "8.9")),
    Spill("grouped_block_cast.row_block_kernel", 56, PREDICATED, CONSUMER_BLACKWELL),
    Spill("grouped_cast.maximum_kernel", 56, PREDICATED, ("8.0", "8.9", "9.0"), ((3, 7),)),
    Spill("activation_cast.forward_kernel", 8, PREDICATED, ("8.0",)),
    Spill("mxfp8.matrices_kernel", 8, PREDICATED, ("8.6", "9.0", "11.0")),
)
# The same with the oldest and the newest release of Triton alone.
RELEASE_SPILLS = (
    Spill("activation_cast.backward_kernel", 8, PREDICATED, ("8.0",), OLDEST),
    Spill("block_fused.forward_kernel", 40, {**ODD_ROWS, **BLOCKS_1D}, ("8.0",), OLDEST),
    Spill(
        "block_fused.backward_kernel",
        40,
        {**PREDICATED, **SQUARES, **IDENTITY, **FLOAT32_SCALES},
        ("8.0",),
        OLDEST,
    ),
    Spill(
        "block_fused.backward_kernel", 296, {**ODD_ROWS, **BLOCKS_1D, **IDENTITY}, ("8.6",), OLDEST
    ),
    Spill("block_cast.square_block_kernel", 32, {**PREDICATED, **FLOAT32_SCALES}, AMPERE, OLDEST),
    Spill(
        "block_cast.square_block_kernel",
        8,
        {**PREDICATED, **FLOAT32_SCALES},
        CONSUMER_BLACKWELL,
        OLDEST,
    ),
    Spill("block_cast.both_blocks_kernel", 32, ODD_ROWS, ("11.0",), ((3, 7),)),
    Spill("grouped_block_cast.row_block_kernel", 16, PREDICATED, ("8.6",), OLDEST),
    Spill("grouped_block_cast.row_block_kernel", 16, PREDICATED, ("11.0",), ((3, 7),)),
    Spill(
        "grouped_block_cast.square_block_kernel",
        16,
        {**PREDICATED, **FLOAT32_SCALES},
        ("8.9",),
        OLDEST,
    ),
    Spill(
        "grouped_block_cast.square_block_kernel",
        120,
        {**PREDICATED, **FLOAT32_SCALES},
        CONSUMER_BLACKWELL,
        OLDEST,
    ),
    Spill("nvfp4.block_kernel", 24, {**PREDICATED, "SQUARE": "False"}, ("10.0", "10.3"), OLDEST),
    Spill("block_cast.square_block_kernel", 16, {**PREDICATED, **FLOAT32_SCALES}, ("8.0",), NEWEST),
    Spill("block_fused.backward_kernel", 16, {**ODD_ROWS, **SQUARES, **IDENTITY}, ("8.0",), NEWEST),
    Spill("transpose.transpose_kernel", 8, ODD_ROWS, ("8.0",), NEWEST),
)
SPILLS = WHOLE_SPILLS + PREDICATED_SPILLS + RELEASE_SPILLS


def stack_limit(
    kernel: str, constants: Mapping[str, str], row: str, release: tuple[int, ...]
) -> int:
    """Stack bytes per thread that a launch may use, compiled for a row by a Triton release."""
    return max(
        (spill.stack for spill in SPILLS if spill.matches(kernel, constants, row, release)),
        default=0,
    )
