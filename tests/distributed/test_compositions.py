"""Compositions of parallelism, recipes, recomputation and graphs give the gradients of one device, as recorded."""

from __future__ import annotations

import itertools
from dataclasses import asdict

import pytest

from tests.distributed.compositions import VALUES, Composition, outcome, pairs, pairwise, recorded

ROWS = pairwise()
# By default two compositions, which together cover every kind of parallelism, run on threads.
THREADS = [row for row in ROWS if not row.in_processes]
CHEAP = [row for row in THREADS if row.cp == row.ep == row.fsdp == 2] + [
    row for row in THREADS if row.sp and row.graphs and row.ranks == 2
]
OTHERS = [row for row in ROWS if row not in CHEAP]


def name_of(row: Composition) -> str:
    return " ".join(f"{name}={value}" for name, value in asdict(row).items())


def expected(row: Composition) -> str:
    (found,) = [given["outcome"] for given in recorded() if asdict(row).items() <= given.items()]
    return found


@pytest.mark.parametrize("row", CHEAP, ids=name_of)
def test_a_composition_has_the_recorded_outcome(row: Composition):
    assert len(CHEAP) == 2
    assert outcome(row) == expected(row) == "equal"


@pytest.mark.slow
@pytest.mark.parametrize("row", OTHERS, ids=name_of)
def test_every_other_composition_has_the_recorded_outcome(row: Composition):
    assert outcome(row) == expected(row) == "equal"


def test_every_pair_of_settings_is_recorded():
    assert [asdict(row).items() <= given.items() for row, given in zip(ROWS, recorded(), strict=True)].count(
        False
    ) == 0
    possible = [row for value in itertools.product(*VALUES) if (row := Composition(*value)).possible]
    assert set().union(*map(pairs, possible)) == set().union(*map(pairs, ROWS))
