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


def decode(rows: list[dict[str, Any]]) -> list[str]:
    """Microseconds of one decoding step and its share of the copy's rate, a column for each implementation."""
    names = list(dict.fromkeys(row["by"] for row in rows))
    lines = ["| batch, context | " + " | ".join(names) + " |", "|" + " --- |" * (len(names) + 1)]
    for case in dict.fromkeys(row["case"] for row in rows):
        cells = {row["by"]: row for row in rows if row["case"] == case}
        texts = [
            f"{cells[name]['gpu_us']:.0f} us, {cells[name]['percent_of_copy']:.0f} %"
            if "gpu_us" in cells.get(name, {})
            else ""
            for name in names
        ]
        batch, context = case.removeprefix("b").split("_s")
        lines.append(f"| {batch} x {context} | " + " | ".join(texts) + " |")
    return lines


TABLES = {"layers": layers, "kernels": kernels, "attention": layers, "decode": decode}
FILES = {"attention": "attention_te_bench_h200.json"}


def updated(page: str) -> str:
    """The page with the text between each table's markers replaced."""
    for name, table in TABLES.items():
        record = json.loads((RESULTS / FILES.get(name, f"{name}_h200.json")).read_text())
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = page.split(start)
        page = (
            before
            + start
            + "\n".join(table(record.get("results") or record["cases"]))
            + "\n"
            + end
            + rest.split(end)[1]
        )
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
