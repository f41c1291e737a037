"""Files of the user's cache: one per key, private, atomic, and never an error of the caller."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.programs import search_path
from transformer_engine.common import store
from transformer_engine.common.store import Store

WRITER = """
import sys
from transformer_engine.common.store import Store
stored = Store("tests", b"TESTS001", "test files", "tests", "set TE_CACHE_DIR")
for number in range(50):
    stored.write(stored.path_of(sys.argv[1], number), f"{sys.argv[1]} {number}".encode())
"""


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("TE_CACHE_DIR", str(tmp_path / "cache"))
    store.warn.cache_clear()
    return Store("tests", b"TESTS001", "test files", "tests", "set TE_CACHE_DIR")


def entry_path(stored: Store, *key: object) -> Path:
    path = stored.path_of(*key)
    assert path is not None
    return path


def test_processes_that_write_at_the_same_time_lose_nothing(stored: Store):
    environment = {**os.environ, "PYTHONPATH": search_path()}
    command = [sys.executable, "-c", WRITER]
    writers = [subprocess.Popen([*command, str(number)], env=environment) for number in range(4)]
    assert [writer.wait(120) for writer in writers] == [0] * 4
    for writer in range(4):
        for number in range(50):
            assert stored.read(entry_path(stored, writer, number)) == f"{writer} {number}".encode()
    assert len(list(entry_path(stored, 0).parent.iterdir())) == 200  # and no temporary file


def test_a_folder_that_cannot_be_written_is_logged_once(stored: Store, tmp_path: Path, caplog):
    (tmp_path / "cache").write_text("a file where the folder should be")
    for number in range(3):
        stored.write(entry_path(stored, number), b"content")
        assert stored.read(entry_path(stored, number)) is None
    assert sum("cannot be kept in" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("error", [OSError("No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_write_leaves_the_old_file_alone(
    stored: Store, error, monkeypatch: pytest.MonkeyPatch
):
    path = entry_path(stored, "key")
    stored.write(path, b"old")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(store.os, "replace", fail)
    if isinstance(error, OSError):
        stored.write(path, b"new")
    else:
        with pytest.raises(KeyboardInterrupt):
            stored.write(path, b"new")
    assert list(path.parent.iterdir()) == [path]
    assert stored.read(path) == b"old"


@pytest.mark.parametrize("damage", [b"", b"TESTS00", b"TESTS001", b"TESTS001" + bytes(40)])
def test_a_damaged_file_is_deleted(stored: Store, damage: bytes, caplog):
    path = entry_path(stored, "key")
    stored.write(path, b"content")
    path.write_bytes(damage)
    assert stored.read(path) is None
    assert not path.exists() and "is not used" in caplog.text


def test_a_file_of_another_key_or_version_is_not_read(stored: Store):
    path, other = entry_path(stored, "key"), entry_path(stored, "other")
    stored.write(path, b"content")
    other.write_bytes(path.read_bytes())
    assert stored.read(other) is None
    assert replace(stored, magic=b"TESTS002").read(path) is None


def test_the_least_recently_used_files_are_deleted(stored: Store):
    few = replace(stored, limit=3)
    for age in range(3):
        few.write(entry_path(few, age), b"content")
        os.utime(entry_path(few, age), (1000 + age, 1000 + age))
    assert few.read(entry_path(few, 0)) == b"content"
    few.write(entry_path(few, 3), b"content")
    assert [few.read(entry_path(few, age)) is None for age in range(4)] == [
        False,
        True,
        False,
        False,
    ]


@pytest.mark.skipif(os.name != "posix", reason="modes of files exist on POSIX systems")
@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_not_read(stored: Store, mode: int, caplog):
    path = entry_path(stored, "key")
    stored.write(path, b"content")
    path.chmod(mode)
    assert stored.read(path) is None
    assert f"others may write it (mode {mode:o})" in caplog.text
