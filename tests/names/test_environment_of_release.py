"""NVTE_PLUGIN, removed variables, and deprecated arguments of release 2.20."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import transformer_engine
import transformer_engine.pytorch as te
from transformer_engine import common
from transformer_engine.pytorch import router
from transformer_engine.pytorch.router import check_histogram, mark_qb_bin_bounds_validated

_ROOT = Path(__file__).resolve().parents[2]


LOADED = "import transformer_engine.pytorch, os; print(os.environ.get('LOADED'))"


def run_import(
    tmp_path: Path, code: str = LOADED, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh process with these variables; warnings are text in its stderr."""
    environment = os.environ | variables | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{_ROOT}"}
    command = [sys.executable, "-W", "always", "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


def test_a_plugin_is_loaded_at_import(tmp_path):
    (tmp_path / "plugin_of_test.py").write_text(
        "import os\n\n\ndef load_plugins():\n    os.environ['LOADED'] = 'yes'\n"
    )
    assert run_import(tmp_path, NVTE_PLUGIN="plugin_of_test").stdout.strip() == "yes"


REPLACING = """
import os, sys, types
import transformer_engine_torch_nv

def load_plugins():
    own = types.ModuleType("transformer_engine_torch")
    own.gelu = "the plugin's"
    own.flash_attention = own.get_attention_backend = print
    sys.modules["transformer_engine_torch"] = own
"""
READING = """
import transformer_engine.pytorch, sys, torch
import transformer_engine_torch as tex, transformer_engine_torch_nv as nv
from transformer_engine_torch_nv import DType, gelu
x = torch.ones(2)
expected = torch.nn.functional.gelu(x, approximate='tanh')
print(tex.gelu, nv.__name__, nv.gelu is gelu, torch.equal(gelu(x, None), expected))
print(tex is sys.modules["transformer_engine_torch"], "quantize" in dir(nv), "quantize" in nv.__all__)
"""


def test_a_plugin_replaces_the_extension_and_reads_it_by_its_second_name(tmp_path):
    (tmp_path / "replacing_plugin.py").write_text(REPLACING)
    result = run_import(tmp_path, READING, NVTE_PLUGIN="replacing_plugin")
    assert result.stdout.splitlines() == [
        "the plugin's transformer_engine_torch_nv True True",
        "True True True",
    ]
    assert (
        "has flash_attention and get_attention_backend, which DotProductAttention does not call"
        in result.stderr
    )


def test_the_second_name_is_the_extension_itself_without_a_replacement(tmp_path):
    (tmp_path / "quiet_plugin.py").write_text("def load_plugins():\n    pass\n")
    code = (
        "import transformer_engine.pytorch, transformer_engine_torch_nv as nv; f = nv.gelu\n"
        "import transformer_engine_torch as tex; print(tex.gelu is f)"
    )
    result = run_import(tmp_path, code, NVTE_PLUGIN="quiet_plugin")
    assert result.stdout.strip() == "True" and "RuntimeWarning" not in result.stderr


def test_a_plugin_that_fails_and_a_removed_variable_warn(tmp_path):
    result = run_import(
        tmp_path, NVTE_PLUGIN="plugin_that_is_missing", NVTE_FUSED_ATTN_BACKEND="1"
    ).stderr
    assert (
        "RuntimeWarning: NVTE_PLUGIN='plugin_that_is_missing' was not loaded: ModuleNotFoundError"
        in result
    )
    assert "FutureWarning: NVTE_FUSED_ATTN_BACKEND is removed" in result


def test_the_former_name_of_merging_probs_warns():
    rows, map_ = torch.ones(2, 4), torch.ones(2, 1, dtype=torch.int32)
    permuted, row_id_map = te.moe_permute(rows, map_, map_type="mask")
    options = {"probs": torch.ones(2, 1), "restore_shape": rows.shape, "map_type": "mask"}
    with pytest.warns(UserWarning, match="use that name") as caught:
        te.moe_unpermute(permuted, row_id_map, **options)
    assert len(caught) == 1
    with pytest.raises(ValueError, match="give one of them"), warnings.catch_warnings():
        warnings.simplefilter("error")
        te.moe_unpermute(permuted, row_id_map, torch.ones(2, 1), **options)


@pytest.mark.parametrize("norm", [te.LayerNorm, te.RMSNorm])
def test_deferred_initialization_of_norms_warns(norm):
    module = norm(8, device="cpu")
    with torch.no_grad():
        module.weight.zero_()
    with pytest.warns(DeprecationWarning, match="defer_init of reset_parameters is deprecated"):
        module.reset_parameters(defer_init=True)
    assert not module.weight.any()
    module.reset_parameters()
    assert torch.equal(module.weight, torch.ones(8))


def test_gradients_set_to_none_by_the_constructor_warn():
    parameters = [torch.nn.Parameter(torch.ones(2))]
    for optimizer, options in (
        (te.optimizers.FusedAdam, {}),
        (te.optimizers.FusedSGD, {"lr": 0.1}),
    ):
        with pytest.warns(DeprecationWarning, match="set_grad_none is deprecated"):
            optimizer(parameters, set_grad_none=True, **options)


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


def test_bounds_that_are_marked_during_a_capture_are_read_again_outside_of_captures(monkeypatch):
    bounds, histogram = torch.tensor([1.0, -1.0]), torch.zeros(4, 8, dtype=torch.int32)
    arguments = (histogram, bounds, "two_kernel", torch.randn(2, 4))
    monkeypatch.setattr(router, "is_capturing", lambda device: True)
    mark_qb_bin_bounds_validated(bounds)
    assert check_histogram(*arguments) is not None
    monkeypatch.setattr(router, "is_capturing", lambda device: False)
    with pytest.raises(ValueError, match="the lower one first"):
        check_histogram(*arguments)
    mark_qb_bin_bounds_validated(bounds)
    monkeypatch.setattr(router, "is_capturing", lambda device: True)
    assert check_histogram(*arguments) is not None


def test_bounds_that_are_inference_tensors_are_read_in_each_call():
    with torch.inference_mode():
        bounds, histogram = torch.tensor([-1.0, 1.0]), torch.zeros(4, 8, dtype=torch.int32)
    arguments = (histogram, bounds, "two_kernel", torch.randn(2, 4))
    assert check_histogram(*arguments) is not None
    with torch.inference_mode():
        bounds.neg_()
    with pytest.raises(ValueError, match="the lower one first"):
        check_histogram(*arguments)
    with pytest.raises(ValueError, match=r"inference tensor.*outside of torch\.inference_mode"):
        mark_qb_bin_bounds_validated(bounds)


def test_versions_of_cudnn_are_decoded_and_compared(monkeypatch):
    assert common.decode_cudnn_version(91200) == common.MIN_CUDNN_VERSION
    assert common.decode_cudnn_version(8905) == (8, 9, 5)
    common.check_cudnn_version(91200)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    common.check_cudnn_version()  # nothing to check
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91100)
    with pytest.raises(
        RuntimeError, match=r"cuDNN is 9\.11\.0, the API of release 2\.20 demands 9\.12\.0"
    ):
        common.check_cudnn_version()


def test_the_device_api_of_nccl_is_reported_as_unused():
    assert not transformer_engine.is_nccl_ep_available()
    with pytest.raises(RuntimeError, match=r"transformer_engine\.pytorch\.ep"):
        transformer_engine.require_nccl_ep()
