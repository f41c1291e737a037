"""Writes the tables of docs/performance.md from the records in benchmarks/results/; --check only compares.

python docs/performance_table.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"


def layers(rows: list[dict[str, Any]]) -> list[str]:
    """Times on the GPU, of the host and of a plain loop, the product rate and the peak memory of each layer."""
    lines = ["| case | recipe | GPU ms | host ms | wall ms | TFLOP/s | peak MiB |", "|" + " --- |" * 7]
    for row in rows:
        family, recipe, shape = row["case"].split("/")
        times = (f"{row['gpu_ms']:.3f}", f"{row['cpu_ms']:.2f}", f"{row['eager_ms']:.2f}")
        rest = (row.get("rate", ""), row.get("peak_mib", ""))
        lines.append("| " + " | ".join(map(str, (f"{family} {shape}", recipe, *times, *rest))) + " |")
    return lines


def kernels(rows: list[dict[str, Any]]) -> list[str]:
    """Times on the GPU and the bandwidth of each kernel."""
    lines = ["| case | GPU ms | GB/s |", "|" + " --- |" * 3]
    return lines + [f"| {row['case']} | {row['gpu_ms']:.4f} | {row['rate']} |" for row in rows]


TABLES = {"layers": layers, "kernels": kernels}


def updated(page: str) -> str:
    """The page with the text between each table's markers replaced."""
    for name, table in TABLES.items():
        record = json.loads((RESULTS / f"{name}_h200.json").read_text())
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = page.split(start)
        page = before + start + "\n".join(table(record["results"])) + "\n" + end + rest.split(end)[1]
    return page


def main() -> int:
    page = PAGE.read_text()
    fresh = updated(page)
    if "--check" in sys.argv[1:]:
        if fresh != page:
            print("docs/performance.md is older than its records; run python docs/performance_table.py")
        return int(fresh != page)
    PAGE.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
