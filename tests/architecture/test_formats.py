"""Formats are data: few files name a format, and no code branches on the recipe or format."""

from __future__ import annotations

import ast
import io
import re
import tokenize

import pytest

from tests.architecture.source import modules, nodes, text

# Number of modules of the PyTorch side that may name a format: common/formats.py, common/hardware.py (GPU
# capabilities named after it), common/recipe, common/env.py (variables named after it), its files under
# quantize/formats, tensor and tensor/storage, quantization/families.py, its factory for custom recipes, the alias
# with the names that callers of the NVIDIA's engine import, and the group storage, whose public keywords name it,
# the self-test cases, whose report names formats, the list of absent names, and the checkpoint layouts for servers,
# with the page for its public function, and the cuDNN attention backend in it.
MAXIMUM_MODULES = 16
# NVIDIA's public names and configurations that contain a format's name: debug session features, recipe
# factories and reference quantizers, transformer_engine_torch functions, exported operators' schemas.
ORIGINAL_NAMES = (
    "transformer_engine.debug.features",
    "transformer_engine.pytorch.custom_recipes",
    "transformer_engine.pytorch.export",
    "transformer_engine.pytorch.functions.exported",
    "transformer_engine.pytorch.primitives.quantize.exported",
    "transformer_engine_torch",
)
# The same for JAX: its file under quantize/formats, the mode enum, the quantizers, its recipe's row, the public
# names, the alias for NVIDIA's quantizer module, and the enumeration in transformer_engine_jax.
MAXIMUM_JAX_MODULES = 7
# Lists of public names, written out for type checkers.
PUBLIC_NAME_LISTS = {
    "transformer_engine.jax.quantize",
    "transformer_engine.pytorch",
    "transformer_engine.pytorch.constants",
    "transformer_engine.pytorch.distributed",
    "transformer_engine.pytorch.tensor.formats",
    "transformer_engine.pytorch.tensor.storage",
    "transformer_engine_jax.members",
}
PREDICATES = {
    "nvfp4",
    "mxfp8",
    "delayed",
    "float8_current_scaling",
    "float8_per_tensor_scaling",
    "float8_block_scaling",
    "custom",
}


def names_in_code(module: str, word: str) -> list[int]:
    """Lines whose code, without comments and docstrings, contains the word."""
    path = modules()[module]
    if word not in text(path).lower():
        return []
    documented = {
        line
        for node in nodes(path)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text(path)).readline)
    return [
        token.start[0]
        for token in tokens
        if token.type != tokenize.COMMENT
        and token.start[0] not in documented
        and word in token.string.lower()
    ]


@pytest.mark.parametrize("word", ["mxfp8", "nvfp4"])
def test_few_files_name_a_format(word):
    modules_with_name = [
        name
        for name in modules()
        if name not in PUBLIC_NAME_LISTS
        and not name.startswith(ORIGINAL_NAMES)
        and names_in_code(name, word)
    ]
    jax_modules = [
        name
        for name in modules_with_name
        if name.startswith(("transformer_engine.jax", "transformer_engine_jax"))
    ]
    assert len(modules_with_name) - len(jax_modules) <= MAXIMUM_MODULES, modules_with_name
    assert len(jax_modules) <= MAXIMUM_JAX_MODULES, jax_modules


def test_only_recipe_family_rows_check_the_recipe_type():
    for name, path in modules().items():
        for node in nodes(path):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and not node.args
            ):
                owner = ast.unparse(node.func.value)
                asks = node.func.attr in PREDICATES and "recipe" in owner
                assert not asks, (
                    f"{name}:{node.lineno} asks {owner}.{node.func.attr}(); give its family a field"
                )


def test_no_format_name_is_compared():
    comparison = re.compile(r"[!=]= *(FLOAT8|BLOCK_1D|BLOCK_2D|MXFP8|NVFP4)\.name")
    comparisons = {
        name: match.group(0)
        for name, path in modules().items()
        if name.startswith("transformer_engine.pytorch.")
        and (match := comparison.search(text(path)))
    }
    assert not comparisons, f"ask the format's row: {comparisons}"
