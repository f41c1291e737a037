"""Element types by the numbers of the original's headers."""

from __future__ import annotations

import enum

DType = enum.IntEnum(
    "DType",
    {
        "kByte": 0, "kInt32": 2, "kInt64": 3, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6, "kFloat8E4M3": 7,
        "kFloat8E5M2": 8, "kFloat8E8M0": 9, "kFloat4E2M1": 10,
    },
    module="transformer_engine_jax",
)  # fmt: skip
