"""cases [A x B]: every pair of two lists, of which a cover runs always and the others when all is asked for.

A pair tells of its two members and of the two together. Where the second is rare and a pair takes seconds, the cover
holds every member of both lists and the pairs that have failed for reasons of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

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
