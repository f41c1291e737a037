"""`te doctor`: prints the findings and remedies; the exit code is 1 if there is a problem.

It needs only the standard library and this package, so that it can report everything that is missing.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from .checks import Finding, examine, healthy
from .environment import gather

SIGNS = {"good": "ok  ", "note": "note", "problem": "FAIL"}


def run(as_json: bool) -> int:
    """Print the findings as lines or as JSON and return the exit code."""
    findings = examine(gather())
    print(as_text(findings) if not as_json else json.dumps(as_dict(findings), indent=2))
    return 0 if healthy(findings) else 1


def as_text(findings: list[Finding]) -> str:
    """One line a finding, its remedy below, and the sum."""
    lines = []
    for finding in findings:
        lines.append(f"{SIGNS[finding.status]}  {finding.check:<16}{finding.said}")
        if finding.remedy:
            lines.append(f"      {'':<16}-> {finding.remedy}")
    problems = sum(finding.status == "problem" for finding in findings)
    lines.append("nothing stands in the way" if not problems else f"{problems} problem(s), marked FAIL")
    return "\n".join(lines)


def as_dict(findings: list[Finding]) -> dict[str, object]:
    """The same for programs: keys healthy and findings."""
    return {"healthy": healthy(findings), "findings": [asdict(finding) for finding in findings]}


def main(arguments: list[str]) -> int:
    """`te doctor` where the libraries of the command line are missing: no option but --json."""
    unknown = [argument for argument in arguments if argument != "--json"]
    if unknown:
        print(f"error: te doctor takes no {unknown[0]}; it has --json alone", file=sys.stderr)
        return 2
    return run("--json" in arguments)
