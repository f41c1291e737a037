"""Which cases of a parametrized test always run, and which only on request (`make test ARGS="-m slow"`).

cases [A x B]: every pair from two lists; a cover of the pairs always runs.

A pair tests its two members and their combination. If combinations rarely fail and a pair takes seconds, the
cover holds every member of both lists and the combinations that have failed before.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import pytest


def cross_cases(
    firsts: Iterable[str], seconds: Iterable[str], always: Collection[tuple[str, str]]
) -> list:
    """Every (first, second); those outside `always`, which must hold each first and each second, are slow."""
    firsts, seconds = list(firsts), list(seconds)
    left_out = {*firsts, *seconds} - {name for pair in always for name in pair}
    unknown = [pair for pair in always if pair[0] not in firsts or pair[1] not in seconds]
    if left_out or unknown:
        raise ValueError(
            f"no pair that runs always holds {sorted(left_out)}; {unknown} are not pairs of the lists"
        )
    return [
        pytest.param(a, b, marks=() if (a, b) in always else pytest.mark.slow)
        for a in firsts
        for b in seconds
    ]


def cover(
    items: Sequence[pytest.Item], count: int | None = None, *, pairs: bool = False
) -> list[pytest.Item]:
    """Cases from one test that together contain each parameter's values, or the first `count` cases.

    The next case is the one with the most values that no earlier case holds, so that few cases differ in much.

    Args:
        items: Cases of one test.
        count: Maximum number of cases.
        pairs: Cover each pair of values, from two parameters, that occurs in a case.
    """
    values = {
        item: set(itertools.combinations(_case_parameters(item), 2 if pairs else 1))
        for item in items
    }
    missing = set().union(*values.values())
    chosen: list[pytest.Item] = []
    while missing and (count is None or len(chosen) < count):
        best = max(items, key=lambda item: len(values[item] & missing))
        chosen.append(best)
        missing -= values[best]
    return chosen or list(items[:1])


def _case_parameters(item: pytest.Item) -> list[tuple[str, int]]:
    """A case's parameters as (name, value identity); all cases with the same value share the identity."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return []
    return [
        (name, id(value))
        for name, value in sorted(callspec.params.items(), key=lambda given: given[0])
    ]


def group_cases(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Group cases by test."""
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.split("[")[0]].append(item)
    return cases


def mark_all_but_samples_slow(items: Iterable[pytest.Item]) -> None:
    """Mark the cases outside the cover as slow, for each test marked `sampled`.

    The mark has the same arguments as `cover`.
    """
    sampled = [item for item in items if item.get_closest_marker("sampled") is not None]
    # Cases for GPUs have a separate cover: if they are skipped, the other cases still hold every value.
    on_gpu = [item for item in sampled if item.get_closest_marker("gpu") is not None]
    elsewhere = [item for item in sampled if item.get_closest_marker("gpu") is None]
    for cases in (*group_cases(on_gpu).values(), *group_cases(elsewhere).values()):
        quick = [item for item in cases if item.get_closest_marker("slow") is None]
        marker = quick[0].get_closest_marker("sampled") if quick else None
        if marker is not None:
            chosen = set(cover(quick, *marker.args, **marker.kwargs))
            for item in quick:
                if item not in chosen:
                    item.add_marker(pytest.mark.slow)
