"""Write the tables of docs/performance.md from the records in benchmarks/results/; --check only compares.

python docs/performance_table.py [--check]
"""

from __future__ import annotations

import json
import sys
from typing import Any

from generated import ROOT, write

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
    """Microseconds of one decoding step and its share of the copy's rate, one column per implementation."""
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


def sections() -> dict[str, str]:
    """Return {name: table} of the page."""
    records = {
        name: json.loads((RESULTS / FILES.get(name, f"{name}_h200.json")).read_text()) for name in TABLES
    }
    return {
        name: "\n".join(table(records[name].get("results") or records[name]["cases"])) + "\n"
        for name, table in TABLES.items()
    }


if __name__ == "__main__":
    sys.exit(write(__file__, {PAGE: sections()}))
