"""Combined parallelism, recipes, recomputation and graphs match one-device gradients, as recorded."""

from __future__ import annotations

import itertools
from dataclasses import asdict

import pytest

from tests.distributed.compositions import (
    VALUES,
    Composition,
    outcome,
    pairs,
    pairwise,
    read_outcomes,
)

ROWS = pairwise()
# By default two compositions, which together cover every kind of parallelism, run on threads.
THREADS = [row for row in ROWS if not row.in_processes]
CHEAP = [row for row in THREADS if row.cp == row.ep == row.fsdp == 2] + [
    row for row in THREADS if row.sp and row.graphs and row.ranks == 2
]
OTHERS = [row for row in ROWS if row not in CHEAP]


def composition_name(row: Composition) -> str:
    return " ".join(f"{name}={value}" for name, value in asdict(row).items())


def read_outcome(row: Composition) -> str:
    (result,) = [
        argument["outcome"]
        for argument in read_outcomes()
        if asdict(row).items() <= argument.items()
    ]
    return result


@pytest.mark.parametrize("row", CHEAP, ids=composition_name)
def test_a_composition_has_the_recorded_outcome(row: Composition):
    assert len(CHEAP) == 2
    assert outcome(row) == read_outcome(row) == "equal"


@pytest.mark.slow
@pytest.mark.parametrize("row", OTHERS, ids=composition_name)
def test_every_other_composition_has_the_recorded_outcome(row: Composition):
    assert outcome(row) == read_outcome(row) == "equal"


def test_every_pair_of_settings_is_recorded():
    assert [
        asdict(row).items() <= argument.items()
        for row, argument in zip(ROWS, read_outcomes(), strict=True)
    ].count(False) == 0
    possible = [
        row for value in itertools.product(*VALUES) if (row := Composition(*value)).possible
    ]
    assert set().union(*map(pairs, possible)) == set().union(*map(pairs, ROWS))
