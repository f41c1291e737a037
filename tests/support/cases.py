"""Which cases of a parametrized test always run, and which only when all are requested (`make test ARGS="-m slow"`).

cases [A x B]: every pair of two lists, of which a cover runs always.

A pair tells of its two members and of the two together. Where the second is rare and a pair takes seconds, the cover
holds every member of both lists and the pairs that have failed for reasons of their own.
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
        raise ValueError(f"no pair that runs always holds {sorted(left_out)}; {unknown} are no pairs")
    return [
        pytest.param(a, b, marks=() if (a, b) in always else pytest.mark.slow)
        for a in firsts
        for b in seconds
    ]


def alternating(*lists: Iterable[object]) -> list:
    """Return every combination of members of three or more lists; every second one is slow.

    Those that always run have an even sum of positions. They hold each pair of members of two lists.
    """
    return [
        pytest.param(*(member for _, member in found), marks=pytest.mark.slow if odd else ())
        for found in itertools.product(*map(enumerate, lists))
        for odd in [sum(position for position, _ in found) % 2]
    ]


def cover(items: Sequence[pytest.Item], count: int | None = None) -> list[pytest.Item]:
    """Return cases of one test that together hold each value of each parameter, or the first `count` of such a list.

    The next case is the one with the most values that no earlier case holds, so that few cases differ in much.
    """
    values = {item: _values_of(item) for item in items}
    missing = set().union(*values.values())
    chosen: list[pytest.Item] = []
    while missing and (count is None or len(chosen) < count):
        best = max(items, key=lambda item: len(values[item] & missing))
        chosen.append(best)
        missing -= values[best]
    return chosen or list(items[:1])


def _values_of(item: pytest.Item) -> set[tuple[str, int]]:
    """Return the parameters of a case as (name, identity of the value), which all cases with the value share."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return set()
    return {(name, id(value)) for name, value in callspec.params.items()}


def by_test(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Return the cases of each test."""
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.split("[")[0]].append(item)
    return cases


def mark_all_but_samples_slow(items: Iterable[pytest.Item]) -> None:
    """Mark as slow, of each test marked `sampled` or `sampled(count)`, the cases outside of its cover."""
    sampled = [item for item in items if item.get_closest_marker("sampled") is not None]
    for cases in by_test(sampled).values():
        quick = [item for item in cases if item.get_closest_marker("slow") is None]
        marker = quick[0].get_closest_marker("sampled") if quick else None
        if marker is not None:
            chosen = cover(quick, *marker.args)
            for item in quick:
                if item not in chosen:
                    item.add_marker(pytest.mark.slow)
