"""`te doctor --self-test`: the backends of this machine against the reference, as text to paste into a report."""

from __future__ import annotations

import json
import sys

from ...common import optional


def run(as_json: bool) -> int:
    """Run the self-test, print its report and return the exit code: 1 if a backend differs from the reference."""
    if (reason := optional.failure("torch")) is not None:
        print(
            f"error: the self-test needs torch: {reason}; {optional.install_command('pytorch')}",
            file=sys.stderr,
        )
        return 2
    from ...pytorch.inspect.self_test import self_test

    test = self_test(progress=lambda path: print(f"testing {path}", file=sys.stderr, flush=True))
    print(json.dumps(test.as_dict(), indent=2) if as_json else test.report())
    return 1 if test.failed else 0
