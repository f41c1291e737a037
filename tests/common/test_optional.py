"""A failed import is a sentence, computed once; installed libraries are found without importing them."""

from __future__ import annotations

import sys
import types

import pytest

from transformer_engine.common import optional


def test_a_missing_module_is_reported_as_not_installed(tmp_path):
    assert not optional.installed("no_such_package_of_ours")
    said = optional.failure("no_such_package_of_ours")
    assert said == (
        "importing no_such_package_of_ours failed: ModuleNotFoundError: No module named 'no_such_package_of_ours'; "
        "repair the package or uninstall it"
    )


def test_a_module_is_found_without_being_imported_and_imported_once(tmp_path, monkeypatch):
    counter = tmp_path / "counter"
    (tmp_path / "counted_package.py").write_text(
        f"open({str(counter)!r}, 'a').write('x')\nraise OSError('no part')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert optional.installed("counted_package") and not counter.exists()
    for _ in range(3):
        assert "OSError: no part" in (optional.failure("counted_package") or "")
    assert counter.read_text() == "x"


def test_a_module_without_a_specification_counts_as_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "made_by_hand", types.ModuleType("made_by_hand"))
    assert optional.installed("made_by_hand") and optional.failure("made_by_hand") is None
    assert "made_by_hand has no part" in (optional.failure("made_by_hand", "part") or "")


def test_errors_other_than_failed_imports_are_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "dividing_package.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError):
        optional.failure("dividing_package")
