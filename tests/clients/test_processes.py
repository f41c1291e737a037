"""Client programs run in separate processes; these tests need no client."""

from __future__ import annotations

import importlib.util

import pytest

from tests.clients import processes

PROGRAM = "import os; print(os.getpid(), os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ.get('WORD'))"


def test_a_program_runs_once_and_is_read_again():
    first = processes.once(["-c", PROGRAM], 1, WORD="a")
    assert processes.once(["-c", PROGRAM], 1, WORD="a") == first
    other = processes.once(["-c", PROGRAM], 1, WORD="b")
    assert other.split()[0] != first.split()[0]
    assert (first.split()[1:], other.split()[1:]) == (["0", "1", "a"], ["0", "1", "b"])


def test_the_output_of_the_first_rank_is_returned():
    assert processes.once(["-c", PROGRAM], 2).split()[1:3] == ["0", "2"]


@pytest.mark.parametrize(
    "package, how",
    [("thunder", "requirements_torch211.txt"), ("no_such_client", "`make test-clients`")],
)
def test_a_missing_client_is_skipped_with_its_requirements_file(package, how, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(pytest.skip.Exception, match=f"{package} is not installed; .*{how}"):
        processes.skip_unless_installed((package,))
