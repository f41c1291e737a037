"""NVTE_PLUGIN, removed variables, and deprecated arguments of release 2.20."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.router import check_histogram, mark_qb_bin_bounds_validated

_ROOT = Path(__file__).resolve().parents[2]


def imported(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Import the package in a fresh process with these variables, and print the warnings as text."""
    environment = os.environ | variables | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{_ROOT}"}
    code = "import transformer_engine.pytorch, os; print(os.environ.get('LOADED'))"
    command = [sys.executable, "-W", "always", "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


def test_a_plugin_is_loaded_at_import(tmp_path):
    (tmp_path / "plugin_of_test.py").write_text(
        "import os\n\n\ndef load_plugins():\n    os.environ['LOADED'] = 'yes'\n"
    )
    assert imported(tmp_path, NVTE_PLUGIN="plugin_of_test").stdout.strip() == "yes"


def test_a_plugin_that_fails_and_a_removed_variable_warn(tmp_path):
    found = imported(tmp_path, NVTE_PLUGIN="plugin_that_is_missing", NVTE_FUSED_ATTN_BACKEND="1").stderr
    assert "RuntimeWarning: NVTE_PLUGIN='plugin_that_is_missing' was not loaded: ModuleNotFoundError" in found
    assert "FutureWarning: NVTE_FUSED_ATTN_BACKEND is removed" in found


def test_the_former_name_of_merging_probs_warns():
    rows, map_ = torch.ones(2, 4), torch.ones(2, 1, dtype=torch.int32)
    permuted, row_id_map = te.moe_permute(rows, map_, map_type="mask")
    with pytest.warns(DeprecationWarning, match="give merging_probs"):
        te.moe_unpermute(
            permuted, row_id_map, probs=torch.ones(2, 1), restore_shape=rows.shape, map_type="mask"
        )


def test_marked_bounds_are_not_read_again():
    bounds, histogram = torch.tensor([1.0, -1.0]), torch.zeros(4, 8, dtype=torch.int32)
    arguments = (histogram, bounds, "two_kernel", torch.randn(2, 4))
    with pytest.raises(ValueError, match="give two finite numbers, the lower one first"):
        check_histogram(*arguments)
    mark_qb_bin_bounds_validated(bounds)  # the caller's promise
    assert check_histogram(*arguments) is not None
    bounds.add_(0.0)  # a later write ends it
    with pytest.raises(ValueError, match="the lower one first"):
        check_histogram(*arguments)
    with pytest.raises(ValueError, match=r"give contiguous float32 \[2\]"):
        mark_qb_bin_bounds_validated(torch.zeros(3))
