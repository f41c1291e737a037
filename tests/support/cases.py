"""Which cases of a parametrized test always run, and which only when all are requested (`make test ARGS="-m slow"`).

cases [A x B]: every pair of two lists, of which a cover always runs.

A pair tests each of its two members and their combination. If combinations rarely fail and a pair takes seconds, the
cover holds every member of both lists and the combinations that have failed before.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import pytest


def crossed(firsts: Iterable[str], seconds: Iterable[str], always: Collection[tuple[str, str]]) -> list:
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
    """Return cases of one test that together hold each value of each parameter, or the first `count` of such a list.

    The next case is the one with the most values that no earlier case holds, so that few cases differ in much.

    Args:
        items: Cases of one test.
        count: Largest number of cases.
        pairs: Hold each pair of values of two parameters that occurs in a case.
    """
    values = {item: set(itertools.combinations(_values_of(item), 2 if pairs else 1)) for item in items}
    missing = set().union(*values.values())
    chosen: list[pytest.Item] = []
    while missing and (count is None or len(chosen) < count):
        best = max(items, key=lambda item: len(values[item] & missing))
        chosen.append(best)
        missing -= values[best]
    return chosen or list(items[:1])


def _values_of(item: pytest.Item) -> list[tuple[str, int]]:
    """Return the parameters of a case as (name, identity of the value), which all cases with the value share."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return []
    return [(name, id(value)) for name, value in sorted(callspec.params.items(), key=lambda given: given[0])]


def by_test(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Return the cases of each test."""
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.split("[")[0]].append(item)
    return cases


def mark_all_but_samples_slow(items: Iterable[pytest.Item]) -> None:
    """Mark as slow, of each test marked `sampled`, the cases outside of its cover.

    The arguments of the mark are those of `cover`.
    """
    sampled = [item for item in items if item.get_closest_marker("sampled") is not None]
    # Cases for GPUs have a separate cover: if they are skipped, the other cases still hold every value.
    on_gpu = [item for item in sampled if item.get_closest_marker("gpu") is not None]
    elsewhere = [item for item in sampled if item.get_closest_marker("gpu") is None]
    for cases in (*by_test(on_gpu).values(), *by_test(elsewhere).values()):
        quick = [item for item in cases if item.get_closest_marker("slow") is None]
        marker = quick[0].get_closest_marker("sampled") if quick else None
        if marker is not None:
            chosen = set(cover(quick, *marker.args, **marker.kwargs))
            for item in quick:
                if item not in chosen:
                    item.add_marker(pytest.mark.slow)
