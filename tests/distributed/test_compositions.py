"""Compositions of parallelism, recipes and recomputation give the gradients of one device, as the page says."""

from __future__ import annotations

import itertools
from dataclasses import asdict

import pytest

from tests.distributed.compositions import RECIPES, Composition, outcome, pairs, pairwise, recorded

ROWS = pairwise()
PROCESSES = [row for row in ROWS if row.in_processes and row.ranks > 1]
THREADS = [row for row in ROWS if row not in PROCESSES]


def name_of(row: Composition) -> str:
    return " ".join(f"{name}={value}" for name, value in asdict(row).items())


def expected(row: Composition) -> str:
    (found,) = [given["outcome"] for given in recorded() if asdict(row).items() <= given.items()]
    return found


@pytest.mark.parametrize("row", THREADS, ids=name_of)
def test_a_composition_has_the_recorded_outcome(row: Composition):
    assert outcome(row) == expected(row) == "equal"


@pytest.mark.slow
@pytest.mark.parametrize("row", PROCESSES, ids=name_of)
def test_a_composition_of_processes_has_the_recorded_outcome(row: Composition):
    assert outcome(row) == expected(row) == "equal"


def test_every_pair_of_settings_is_recorded():
    assert [asdict(row).items() <= given.items() for row, given in zip(ROWS, recorded(), strict=True)].count(
        False
    ) == 0
    values = ((1, 2), (False, True), (1, 2), (1, 2), tuple(RECIPES), (False, True))
    possible = [row for value in itertools.product(*values) if (row := Composition(*value)).possible]
    assert set().union(*map(pairs, possible)) == set().union(*map(pairs, ROWS))
