"""The names that type checkers read in a package are the names that Python binds."""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import transformer_engine.pytorch as te
from tests.architecture.source import modules, text, tree
from transformer_engine.common import formats as table
from transformer_engine.pytorch import constants, quantization, tensor
from transformer_engine.pytorch.quantization import support

JAX = importlib.util.find_spec("flax") is not None
LISTED = [name for name, path in modules().items() if "__all__" in text(path)]
PUBLIC = (
    "transformer_engine",
    "transformer_engine.common",
    "transformer_engine.common.recipe",
    "transformer_engine.pytorch",
    "transformer_engine.pytorch.attention",
    "transformer_engine.pytorch.ops",
    "transformer_engine.pytorch.optimizers",
    "transformer_engine.pytorch.quantization",
    "transformer_engine.pytorch.tensor",
    "transformer_engine_torch",
    *(
        ("transformer_engine.jax", "transformer_engine.jax.flax", "transformer_engine_jax")
        if JAX
        else ()
    ),
)


def assignments(name: str) -> list[ast.stmt]:
    """The statements of a module that assign `__all__` or add to it."""
    return [
        node
        for node in tree(modules()[name]).body
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
        and "__all__"
        in {
            ast.unparse(target)
            for target in getattr(node, "targets", [getattr(node, "target", None)])
        }
    ]


def test_lists_of_exports_are_static():
    assert len(LISTED) > 100
    for name in LISTED:
        for node in assignments(name):
            assert isinstance(node, ast.Assign | ast.AugAssign), name
            if isinstance(node, ast.AugAssign):  # __all__ += module.__all__
                assert isinstance(node.value, ast.Attribute) and node.value.attr == "__all__", name
            else:
                names = ast.literal_eval(node.value)
                assert len(set(names)) == len(names), name


@pytest.mark.parametrize("name", PUBLIC)
def test_exported_names_exist_and_belong_to_the_package(name: str):
    module = importlib.import_module(name)
    for attribute in module.__all__:
        value = getattr(module, attribute)
        if isinstance(value, ModuleType):
            assert value.__name__.startswith("transformer_engine"), attribute


@pytest.mark.parametrize(
    "name", ["transformer_engine", "transformer_engine.pytorch", "transformer_engine.jax"]
)
def test_dir_lists_public_names_only(name: str):
    if name.endswith("jax") and not JAX:
        pytest.skip("flax is not installed; pip install '.[jax]'")
    module = importlib.import_module(name)
    assert set(module.__all__) <= set(dir(module))
    assert not {
        "Any",
        "TYPE_CHECKING",
        "absent",
        "annotations",
        "functools",
        "importlib",
        "sys",
    } & set(dir(module))


def test_no_module_shows_a_getattr_to_type_checkers():
    for name in [name for name, path in modules().items() if "__getattr__" in text(path)]:
        for node in tree(modules()[name]).body:
            assert not (isinstance(node, ast.FunctionDef) and node.name == "__getattr__"), name
            assert not (
                isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__getattr__"
            ), name


def test_every_file_of_a_format_is_listed():
    folder = Path(tensor.__file__).parent
    files = {path.stem for path in folder.glob("*_tensor.py")} - {
        "grouped_tensor",
        "quantized_tensor",
    }
    assert {module.__name__.rpartition(".")[2] for module in tensor.formats.MODULES} == files
    names = {name for module in tensor.formats.MODULES for name in module.__all__}
    assert names == set(tensor.formats.__all__)
    assert names <= set(tensor.__all__) and names <= set(te.__all__)
    storages = {path.stem for path in (folder / "storage").glob("*_tensor_storage.py")}
    assert {
        getattr(tensor.storage, name).__module__.rpartition(".")[2]
        for name in tensor.storage.__all__
    } == storages


def test_every_kind_of_format_has_its_queries():
    kinds = support.kinds()
    checks = {f"check_{kind}_support" for kind in kinds}
    queries = {f"is_{kind}_available" for kind in kinds}
    states = {name for name in quantization.families.__all__ if name.endswith("RecipeState")}
    assert set(quantization.families.__all__) - states == checks | queries
    assert queries <= set(te.__all__)
    for kind in kinds:
        available, reason = getattr(quantization, f"check_{kind}_support")()
        query = getattr(te, f"is_{kind}_available")
        assert query() is available and query(return_reason=True) == (available, reason)
        assert getattr(te.fp8.FP8GlobalStateManager, f"is_{kind}_available")() == (
            available,
            reason,
        )


def test_block_lengths_are_those_of_the_formats():
    lengths = {
        f"{form.name.upper()}_BLOCK_SCALING_SIZE": form.block[1]
        for form in table.TENSOR_FORMATS
        if form.block is not None and form.scale != "float32"
    }
    assert len(lengths) == 2
    assert {name: getattr(constants, name) for name in lengths} == lengths


def test_settings_of_modules_are_declared_with_their_types():
    """Without a declaration, checkers take a setting for a parameter or a child: nn.Module's __getattr__."""
    classes = [
        cls for cls in vars(te).values() if isinstance(cls, type) and hasattr(cls, "_config_class")
    ]
    assert len(classes) >= 9
    for cls in classes:
        declared: dict[str, str] = {}
        for base in reversed(cls.__mro__):
            declared |= base.__dict__.get("__annotations__", {})
        for field in dataclasses.fields(cls._config_class):
            if not field.name.startswith("_"):
                assert field.name in declared, f"{cls.__name__}.{field.name}"
                assert field.type in ("Any", declared[field.name]), f"{cls.__name__}.{field.name}"


@pytest.mark.skipif(not JAX, reason="flax is not installed; pip install '.[jax]'")
def test_members_of_the_enumerations_are_listed():
    import transformer_engine_jax as tex

    members = {}
    for value in vars(tex).values():
        if isinstance(value, type) and issubclass(value, enum.Enum):
            members |= value.__members__
    assert len(members) > 80
    assert {name: getattr(tex, name) for name in tex.members.__all__} == members
