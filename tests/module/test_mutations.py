"""No layer uses a stale cache: after any change between two calls, the second call equals a new layer's call.

The tests discover and change all public attributes of public layers, all recipe fields and all
environment variables that the package reads. A write may also raise an error that names the attribute.
"""

from __future__ import annotations

import copy
import sys
from types import ModuleType

import pytest

from tests.support.layers import KINDS, NAMES, RECIPES, make_layer
from tests.support.memories import forget
from tests.support.mutations import (
    NOT_CHANGED,
    agree,
    attributes,
    constructor_argument,
    copy_shared_state,
    other_values,
    outcome,
    recipe_changes,
    variables,
    write_attribute,
)
from transformer_engine.common.memory import Memory
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

ATTENTION_TOO = {
    "delayed": DelayedScaling(amax_history_len=4, fp8_dpa=True),
    "current": Float8CurrentScaling(fp8_dpa=True),
}
EVERY_RECIPE = {
    **{name: recipe for name, recipe in RECIPES.items() if recipe is not None},
    **ATTENTION_TOO,
}

# Sizes, and variants with other parameters, whose write neither raises nor takes effect. Names may only be removed.
WRITTEN_IN_VAIN: set[str] = set()

WITHOUT_ANOTHER_VALUE = {
    "load_balancing_strategy",
    "num_gqa_groups",
    "return_layernorm_output",
    "rng_tracker_name",
    "symmetric_ar_type",
    "ub_name",
}

# warnings that a layer changes the kind of its recipe
pytestmark = pytest.mark.filterwarnings("ignore")


# for each attribute
@pytest.mark.parametrize("values", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", [None, *ATTENTION_TOO], ids=str)
@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.sampled(10)
def test_no_changed_attribute_leaves_a_stale_cache(kind: str, recipe: str | None, values: int):
    stale = [
        f"{attribute}={value!r}: {fault}"
        for attribute in attributes(kind)
        if attribute not in WRITTEN_IN_VAIN
        for value in other_values(kind, attribute, most=values)
        if (fault := attribute_fault(kind, attribute, value, ATTENTION_TOO.get(recipe or "")))
    ]
    assert not stale, "\n".join([f"{kind}:", *stale])


def attribute_fault(kind: str, attribute: str, value: object, recipe: Recipe | None) -> str | None:
    """Describe how the call after a write differs from a layer constructed or first called with the value."""
    forget()
    layer = make_layer(kind)
    outcome(layer, recipe)
    rejection = write_attribute(layer, attribute, value)
    if rejection is not None:
        return None if attribute in rejection else f"the error does not name it: {rejection}"
    argument = constructor_argument(kind, attribute)
    fresh = make_layer(kind, **({} if argument is None else {argument: value}))
    if argument is None and write_attribute(fresh, attribute, value) is not None:
        return "a write before the first call raises, a write after it does not"
    try:
        copy_shared_state(layer, fresh)
    except RuntimeError:  # the attribute determines the set of parameters
        after = outcome(layer, recipe)
        return (
            None
            if isinstance(after, str) and attribute in after
            else "the parameters stay, and no error is raised"
        )
    after = outcome(layer, recipe)
    forget()
    return (
        None if agree(after, outcome(fresh, recipe)) else "the next call is not that of a new layer"
    )


def test_every_attribute_is_listed_as_fixed_or_has_another_value():
    without = {
        a for kind in NAMES for a in attributes(kind) if not list(other_values(kind, a, most=1))
    }
    # On these layers: no norm to return, no tracker, no other group count that divides the heads, names that
    # other layers' constructors take, and no ranks that share a sequence.
    assert without <= WITHOUT_ANOTHER_VALUE, without
    contents = {key for kind in NAMES for key in (*vars(make_layer(kind)), *dir(NAMES[kind]))}
    assert set(NOT_CHANGED) - contents == set()


@pytest.mark.parametrize(
    ("recipe", "every_child"),
    [
        ("current", False),
        *[pytest.param(recipe, True, marks=pytest.mark.slow) for recipe in (None, "current")],
    ],
)
def test_no_changed_child_attribute_leaves_a_stale_cache(recipe: str | None, every_child: bool):
    """The cached calls of a layer depend on its children's attributes.

    Children share most attributes. The fast case writes each attribute on one child, and some attributes on
    each child.
    """
    under = ATTENTION_TOO.get(recipe or "")
    values: dict[str, dict[str, object]] = {}  # {attribute: {child path: another value}}
    for path, child in make_layer("TransformerLayer").named_modules():
        if path and type(child) in KINDS:
            kind = type(child).__name__
            for attribute in sorted(set(attributes(kind)) - WRITTEN_IN_VAIN):
                for value in other_values(kind, attribute, most=1):
                    values.setdefault(attribute, {})[path] = value
    writes = [
        (path, attribute, value)
        for number, (attribute, of_children) in enumerate(values.items())
        for index, (path, value) in enumerate(of_children.items())
        if every_child or index == number % len(of_children)
    ]
    assert len({path for path, _, _ in writes}) == 5
    stale = [
        f"{path}.{attribute}={value!r}"
        for path, attribute, value in writes
        if child_is_stale(path, attribute, value, under)
    ]
    assert not stale, "\n".join(stale)


def child_is_stale(path: str, attribute: str, value: object, recipe: Recipe | None) -> bool:
    forget()
    layer, fresh = make_layer("TransformerLayer"), make_layer("TransformerLayer")
    outcome(layer, recipe)
    if write_attribute(layer.get_submodule(path), attribute, value) is not None:
        return False
    if write_attribute(fresh.get_submodule(path), attribute, value) is not None:
        return True
    copy_shared_state(layer, fresh)
    after = outcome(layer, recipe)
    forget()
    return not agree(after, outcome(fresh, recipe))


@pytest.mark.parametrize("in_place", [False, True], ids=["another", "in place"])
@pytest.mark.parametrize("name", EVERY_RECIPE)
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP", "GroupedLinear", "MultiheadAttention"])
@pytest.mark.sampled(15)
def test_no_changed_recipe_field_leaves_a_stale_cache(kind: str, name: str, in_place: bool):
    recipe = EVERY_RECIPE[name]
    changes = list(recipe_changes(recipe))
    assert {field for field, _ in changes} >= {"fp8_dpa", "backward_override"} - REQUIRED.get(
        name, set()
    )
    for field, changed in changes:
        FP8GlobalStateManager.reset()
        forget()
        actual, layer, fresh = copy.deepcopy(recipe), make_layer(kind), make_layer(kind)
        outcome(layer, actual)
        copy_shared_state(layer, fresh)
        if in_place:
            setattr(actual, field, getattr(changed, field))
            changed = copy.deepcopy(actual)
        else:
            actual = changed
        after = outcome(layer, actual)
        forget()
        assert agree(after, outcome(fresh, changed)), f"{field}={getattr(changed, field)!r}"


# Defaults of absent constructor keywords: a layer keeps the value that it read at construction.
DEFAULTS = {"NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM"}

# Fields for which a recipe accepts one value only.
REQUIRED = {"block": {"fp8_dpa"}, "delayed": {"backward_override"}}


@pytest.mark.parametrize("recipe", [None, *ATTENTION_TOO], ids=str)
# A TransformerLayer reads the variables that its projections and its attention read.
@pytest.mark.parametrize(
    "kind",
    [
        "Linear",
        "GroupedLinear",
        "LayerNormMLP",
        "DotProductAttention",
        pytest.param("TransformerLayer", marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(5)
def test_no_changed_environment_variable_leaves_a_stale_cache(
    kind: str, recipe: str | None, monkeypatch
):
    under = ATTENTION_TOO.get(recipe or "")
    layer = make_layer(kind)
    for name, text in variables():
        if name in DEFAULTS:
            continue
        FP8GlobalStateManager.reset()
        forget()
        outcome(layer, under)
        with monkeypatch.context() as patch:
            patch.setenv(name, text)
            fresh = make_layer(kind)
            copy_shared_state(layer, fresh)
            after = outcome(layer, under)
            forget()
            assert agree(after, outcome(fresh, under)), f"{name}={text}"


def test_the_oracle_detects_a_stale_result():
    layer, made_with = make_layer("LayerNorm"), make_layer("LayerNorm", eps=0.5)
    copy_shared_state(layer, made_with)
    assert not agree(outcome(layer, None), outcome(made_with, None))
    vars(layer).update(vars(made_with))
    assert agree(outcome(layer, None), outcome(made_with, None))


def double(key: int) -> int:
    return 2 * key


def test_caches_in_later_imports_are_cleared_too(monkeypatch):
    """The modules imported at the first forget() depend on the tests that the process ran before."""
    forget()
    later = Memory(double, 8)
    monkeypatch.setitem(
        sys.modules, "transformer_engine.imported_later", ModuleType("imported_later")
    )
    assert later[1] == 2
    forget()
    assert not later


def test_generated_changes_cover_fields_attributes_and_variables():
    assert [field for field, _ in recipe_changes(DelayedScaling())].count("margin") == 2
    assert set(other_values("LayerNormMLP", "normalization")) == {"RMSNorm"}
    assert {"0", "1"} == {text for name, text in variables() if name == "NVTE_FP8_DPA_BWD"}
