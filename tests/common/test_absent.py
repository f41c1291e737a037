"""Absent names of the original raise Python's exceptions with a message that states the reason and the replacement."""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import re
import subprocess
import sys
from types import ModuleType

import pytest

from tests.support import programs
from transformer_engine import __version__
from transformer_engine.common import absent

USE = {
    "transformer_engine.tensorflow": "use transformer_engine.pytorch",
    "transformer_engine.pytorch.custom_recipes.quantization_mxfp8": "recipe.CustomRecipe",
}
ATTENTION = "transformer_engine.pytorch.attention"
NAMES = {
    ("transformer_engine", "paddle"): "use transformer_engine.pytorch",
    ("transformer_engine", "nothing"): "docs/support.md",
    ("transformer_engine.common.recipe", "Nothing"): "docs/support.md",
    ("transformer_engine.pytorch.fp8", "nothing"): r"dir\(transformer_engine.pytorch.fp8\)",
    ("transformer_engine.pytorch.module.linear", "nothing"): "docs/support.md",
    ("transformer_engine_torch", "nothing"): "docs/support.md",
    # Modules that are imported only on request.
    ("transformer_engine.pytorch.cpu_offload_v1", "nothing"): "docs/support.md",
    ("transformer_engine.pytorch.custom_recipes", "quantization_mxfp8"): "recipe.CustomRecipe",
    ("transformer_engine.pytorch.custom_recipes.gemm", "nothing"): "recipe.CustomRecipe",
    (
        "transformer_engine.pytorch.custom_recipes.quantizer_factories",
        "nothing",
    ): "recipe.CustomRecipe",
    ("transformer_engine.jax.debug.experimental", "nothing"): "docs/support.md",
    ("transformer_engine.jax.flax.module", "nothing"): "docs/support.md",
    ("transformer_engine.jax.version_utils", "nothing"): "docs/support.md",
    ("transformer_engine.common.formats", "nothing"): "docs/support.md",
    # Names that a row gives in one of the modules that have them in the original.
    (f"{ATTENTION}.dot_product_attention.backends", "FusedAttention"): "te.explain reports it",
    (f"{ATTENTION}.dot_product_attention.backends", "FlashAttention"): "te.explain reports it",
    (f"{ATTENTION}.dot_product_attention", "FusedAttention"): "te.explain reports it",
    (f"{ATTENTION}.multi_head_attention", "UnfusedDotProductAttention"): "te.explain reports it",
    ("transformer_engine.pytorch", "dot_product_attention"): "use te.DotProductAttention",
    ("transformer_engine.jax.flax.moe", "PermutationBackend"): "leave the argument out",
    ("transformer_engine.jax", "ShardingResource"): "in a MeshResource",
    ("transformer_engine.jax.sharding", "ShardingType"): "in a MeshResource",
    ("transformer_engine.jax", "update_fp8_metas"): "te.update_collections",
    ("transformer_engine.jax.moe", "record_ep_bootstrap_signature_for_moe"): "leave it out",
    ("transformer_engine.jax.cpp_extensions", "SoftmaxPrimitive"): "NVTE_JAX_CUSTOM_CALLS",
    (
        "transformer_engine.jax.quantize.helper",
        "DelayedScalingQuantizeConfig",
    ): "get_quantize_config_with_recipe",
    ("transformer_engine.jax.quantize", "apply_padding_to_scale_inv"): "stored without padding",
    ("transformer_engine_jax", "get_fused_attn_fwd_workspace_sizes"): "XLA allocates those",
    ("transformer_engine_jax", "get_norm_bwd_workspace_sizes"): "XLA allocates those",
    ("transformer_engine_jax", "get_grouped_gemm_workspace_size"): "XLA allocates those",
    ("transformer_engine_jax", "pack_fused_attn_descriptor"): "pass the settings as arguments",
    ("transformer_engine_jax", "initialize_cgemm_communicator"): "collective_gemm_bootstrap",
    ("transformer_engine_jax", "set_ep_communicator"): "ep_bootstrap",
}


def imported(module: str) -> ModuleType:
    """The module; skips the test where its framework is not installed."""
    for needed in ("jax", "flax") if re.match(r"transformer_engine[._]jax", module) else ():
        pytest.importorskip(needed)
    return importlib.import_module(module)


@pytest.mark.parametrize("name", USE)
def test_an_import_error_names_the_missing_module_and_a_replacement(name: str):
    with pytest.raises(ModuleNotFoundError, match=USE[name]) as raised:
        importlib.import_module(name)
    assert str(raised.value).startswith(name)
    assert __version__ in str(raised.value)


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_missing_imported_name_raises_with_the_same_text(module: str, name: str):
    imported(module)
    with pytest.raises(ImportError, match=NAMES[module, name]) as raised:
        exec(f"from {module} import {name}")
    assert type(raised.value) is ImportError and raised.value.name == module
    assert name in str(raised.value)


NEAR = {
    "transformer_engine.pytorch.Lineer": "Linear",
    "transformer_engine.pytorch.linear": "Linear",
    "transformer_engine.pytorch.revert_hff": "revert_hf",
    "transformer_engine.common.recipe.DelayedScalling": "DelayedScaling",
    "transformer_engine_torch.gelu_": "gelu",
}


@pytest.mark.parametrize("path", NEAR)
def test_misspelled_name_suggests_the_nearest_one(path: str):
    module, _, name = path.rpartition(".")
    near, result = NEAR[path], imported(module)
    with pytest.raises(AttributeError, match=f"did you mean '{near}'"):
        getattr(result, name)
    with pytest.raises(ImportError, match=f"did you mean '{near}'"):
        exec(f"from {module} import {name}")


def test_name_that_is_not_near_any_other_suggests_none():
    with pytest.raises(AttributeError) as raised:
        imported("transformer_engine.pytorch").nothing  # noqa: B018
    assert "did you mean" not in str(raised.value)


def test_a_name_of_one_framework_is_not_suggested_for_the_other():
    imported("transformer_engine.jax")
    with pytest.raises(ImportError, match=r"docs/support\.md"):
        exec("from transformer_engine.jax.attention import FusedAttention")


def test_a_name_behind_many_others_is_seen_as_an_import():
    """Beyond 256 names the instruction carries a prefix."""
    names = ", ".join(["Linear"] * 300)
    many = "; ".join(f"a{i} = {i}" for i in range(300))
    with pytest.raises(ImportError, match=r"docs/support\.md"):
        exec(f"{many}\nfrom transformer_engine.pytorch import {names}, nothing")


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_an_attribute_is_an_attribute_error_with_the_same_words(module: str, name: str):
    result = imported(module)
    assert not hasattr(result, name) and getattr(result, name, None) is None
    with pytest.raises(AttributeError, match=NAMES[module, name]) as raised:
        getattr(result, name)
    assert raised.value.name == name and raised.value.obj is result


@pytest.mark.parametrize("name", ["transformer_engine.paddle", "transformer_engine.tensorflow"])
def test_a_search_for_an_absent_module_finds_none_and_does_not_raise(name: str):
    assert importlib.util.find_spec(name) is None


def test_a_guarded_import_of_a_client_continues():
    try:
        importlib.import_module("transformer_engine.paddle.features")

        result = True
    except ModuleNotFoundError as error:
        result = False
        assert error.name == "transformer_engine.paddle"
    assert not result


def test_missing_special_attributes_keep_pythons_message():
    import transformer_engine.pytorch as te

    with pytest.raises(
        AttributeError, match=r"module 'transformer_engine\.pytorch' has no attribute '__wrapped__'"
    ):
        te.__wrapped__  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_packages_of_others_are_left_alone():
    assert absent.Finder().find_spec("transformer_engine_extensions") is None
    with pytest.raises(
        ModuleNotFoundError, match="No module named 'transformer_engine_extensions'"
    ):
        importlib.import_module("transformer_engine_extensions")


def test_the_sentence_is_there_before_a_framework_is():
    done = subprocess.run(
        [sys.executable, "-c", "import transformer_engine.tensorflow"],
        capture_output=True,
        text=True,
    )
    assert "transformer_engine.tensorflow is not in this package" in done.stderr


@pytest.mark.parametrize("start", absent.ABSENT)
def test_a_row_covers_no_name_that_exists(start: str):
    if start in ("transformer_engine.pytorch.ops", "transformer_engine.pytorch.custom_recipes"):
        pytest.skip(
            "the package has a part of the original's names; the row covers the missing ones"
        )
    module, _, name = start.rpartition(".")
    assert not fnmatch.filter(dir(imported(module)), name)


@pytest.mark.parametrize(
    ("imported", "used"),
    [
        ("transformer_engine.jax", "transformer_engine.jax.flax.module.TransformerEngineBase"),
        ("transformer_engine.pytorch", "transformer_engine.pytorch.triton.permutation"),
        ("transformer_engine.pytorch", "transformer_engine.pytorch.cpu_offload_v1"),
    ],
)
def test_a_module_is_an_attribute_of_its_package_without_its_own_import(imported: str, used: str):
    pytest.importorskip("flax" if ".jax" in imported else "torch")
    program = f"import {imported}; print({used}.__name__); print(hasattr({imported}, 'no_module'))"
    name, absent_name = programs.output_without_gpu("-c", program).split()
    assert name in (used, used.rpartition(".")[2]) and absent_name == "False"
