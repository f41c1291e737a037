"""The two ways a product reads a quantized matrix [rows, K]: along its columns or along its rows."""

from __future__ import annotations

COLS = "cols"  # contracts K: the row-wise codes [rows, K]
ROWS = "rows"  # contracts rows: the column-wise codes, transposed, [K, rows]
