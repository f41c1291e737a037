"""Writes the tables of docs/plan.md (plans) and docs/plan_accuracy.md (errors, exceptions); --check only compares.

python docs/plan_table.py [--check]
"""

from __future__ import annotations

import runpy
import sys
from itertools import groupby
from typing import Any

from generated import ROOT, write

from transformer_engine.common.planning import plan

ACCURACY = runpy.run_path(str(ROOT / "benchmarks" / "plan_accuracy.py"))
PAGE, ACCURACY_PAGE = ROOT / "docs" / "plan.md", ROOT / "docs" / "plan_accuracy.md"
# Model, devices, and the fastest arguments for `plan` that `search` returned.
PLANS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("llama-8b", 8, {"fsdp": 8}),
    ("llama-8b", 64, {"fsdp": 32}),
    ("llama-8b", 512, {"fsdp": 32}),
    ("llama-8b", 4096, {"fsdp": 32}),
    ("llama-70b", 32, {"fsdp": 16, "tp": 2, "micro_batch": 2, "recompute": "full"}),
    ("llama-70b", 64, {"fsdp": 32, "tp": 2, "micro_batch": 2, "recompute": "full"}),
    ("llama-70b", 512, {"fsdp": 32, "tp": 2, "micro_batch": 2, "recompute": "full"}),
    ("llama-70b", 4096, {"fsdp": 32, "tp": 2, "micro_batch": 2, "recompute": "full"}),
    ("mixtral-8x7b", 32, {"cp": 4, "pp": 4, "ep": 8}),
    ("mixtral-8x7b", 64, {"cp": 4, "pp": 8, "ep": 8}),
    ("mixtral-8x7b", 512, {"fsdp": 128, "ep": 8}),
    ("mixtral-8x7b", 4096, {"fsdp": 128, "ep": 8}),
)


def _kind(check: Any) -> tuple[str, bool]:
    return check.group, not check.fitted


def accuracy(plan_records: list[Any]) -> str:
    """Error table by measurement type, for all measurements that the simulator claims to meet."""
    lines = [
        "| measurements | constants | number | within 15 % | mean error | largest error |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    claimed = [check for check in plan_records if check.reason is None]
    for (group, held_out), rows in groupby(sorted(claimed, key=_kind), _kind):
        errors = [check.error for check in rows]
        within = sum([abs(error) <= 0.15 for error in errors])
        mean = sum(map(abs, errors)) / len(errors)
        role = "held out" if held_out else "fitted"
        lines.append(
            f"| {group} | {role} | {len(errors)} | {within} | {mean:.1%} | {max(errors, key=abs):+.1%} |"
        )
    return "\n".join(lines) + "\n"


def exceptions(plan_records: list[Any]) -> str:
    """One table per reason, with the measurements for which no accuracy is claimed."""
    lines: list[str] = []
    # several patterns may share a reason
    for reason in dict.fromkeys(ACCURACY["NOT_CLAIMED"].values()):
        rows = [
            f"| {check.group}: `{check.case}` | {check.measured:.4g} | {check.predicted:.4g} | {check.error:+.0%} |"
            for check in plan_records
            if check.reason == reason
        ]
        lines += [f"**{reason[0].upper()}{reason[1:]}.**", ""]
        lines += [
            "| measurement | measured | predicted | error |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    return "\n".join(lines)


def plans() -> str:
    """Plan table from 8 to 4,096 devices."""
    lines = [
        "| model | devices | mesh | micro-batches | recompute | step ms | tokens/s | MFU | peak GiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model, devices, options in PLANS:
        result = plan(model, devices, recipe="current", global_batch=devices, **options)
        lines.append(
            f"| {model} | {devices:,} | {result.mesh} | {result.micro_batches} x {result.micro_batch} "
            f"| {result.recompute} | {result.step_ms:,.0f} | {result.tokens_per_s:,.0f} | {result.utilization:.0%} "
            f"| {result.memory.peak / 2**30:.0f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    measured = ACCURACY["checks"]()
    errors = {"accuracy": accuracy(measured), "exceptions": exceptions(measured)}
    sys.exit(write(__file__, {PAGE: {"plans": plans()}, ACCURACY_PAGE: errors}))
