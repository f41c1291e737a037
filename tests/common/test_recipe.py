import copy
import dataclasses
import inspect
import os
import pickle
import re
import subprocess
import sys
import warnings

import pytest

from transformer_engine.common import recipe as recipes
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)

FAMILIES = [
    DelayedScaling,
    Float8CurrentScaling,
    Float8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
]
PREDICATES = {
    "delayed": {DelayedScaling},
    "float8_current_scaling": {Float8CurrentScaling},
    "float8_per_tensor_scaling": {DelayedScaling, Float8CurrentScaling},
    "float8_block_scaling": {Float8BlockScaling},
    "mxfp8": {MXFP8BlockScaling},
    "nvfp4": {NVFP4BlockScaling},
    "custom": {CustomRecipe},
}


class PositionalDelayedScaling(DelayedScaling):
    """A subclass as training frameworks write them: no dataclass, its own constructor."""

    def __init__(self, length, **extra):
        super().__init__(
            amax_history_len=length, override_linear_precision=(False, False, False), **extra
        )


def make(kind) -> Recipe:
    return CustomRecipe(qfactory=len) if kind is CustomRecipe else kind()


@pytest.mark.parametrize("kind", [*FAMILIES, CustomRecipe])
def test_exactly_the_predicates_of_its_family_hold(kind):
    derived = type("Derived", (kind,), {})
    for instance in (make(kind), derived(qfactory=len) if kind is CustomRecipe else derived()):
        contents = {name for name in PREDICATES if getattr(instance, name)()}
        assert contents == {name for name, kinds in PREDICATES.items() if kind in kinds}


@pytest.mark.parametrize(
    "public", [*FAMILIES, CustomRecipe, Recipe, Format, MMParams, QParams, recipes._FormatHelper]
)
def test_public_classes_report_the_module_that_checkpoints_name(public):
    assert public.__module__ == "transformer_engine.common.recipe"


@pytest.mark.parametrize("kind", [*FAMILIES, CustomRecipe])
def test_recipes_pickle_copy_and_compare_by_value(kind):
    recipe = make(kind)
    for twin in (pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe), make(kind)):
        assert twin == recipe
        assert repr(twin) == repr(recipe)


@pytest.mark.parametrize(
    ("recipe", "beginning"),
    [
        (DelayedScaling(), "recipe_type=DelayedScaling, margin=0, format=HYBRID, "),
        (
            type("Derived", (DelayedScaling,), {})(),
            "recipe_type=Derived, margin=0, format=HYBRID, ",
        ),
        (Float8CurrentScaling(), "recipe_type=Float8CurrentScaling, format=HYBRID, "),
        (Float8BlockScaling(), "recipe_type=Float8BlockScaling, format=E4M3, "),
        (MXFP8BlockScaling(), "recipe_type=MXFP8BlockScaling, margin=0, format=E4M3, "),
        (NVFP4BlockScaling(), "recipe_type=NVFP4BlockScaling, fp4_format=E2M1, fp8_format=E4M3, "),
        (CustomRecipe(qfactory=len), "recipe_type=CustomRecipe, format=HYBRID, "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_repr_begins_as_the_originals(recipe, beginning):
    assert repr(recipe).startswith(beginning)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_repr_shows_every_other_field(kind):
    recipe = kind()
    formats = ("margin", "fp4_format", "fp8_format")
    rest = [f.name for f in dataclasses.fields(recipe) if f.name not in formats]
    assert all(f", {name}={getattr(recipe, name)!r}" in repr(recipe) for name in rest)


def test_the_largest_magnitudes_are_those_of_the_formats():
    assert {f.name: tuple(f.value) for f in Format} == {
        "E2M1": (6, 6),
        "E4M3": (448, 448),
        "E5M2": (57344, 57344),
        "HYBRID": (448, 57344),
    }
    assert pickle.loads(pickle.dumps(Format.HYBRID)) is Format.HYBRID


def test_delayed_scaling_defaults():
    recipe = DelayedScaling()
    assert (recipe.margin, recipe.fp8_format, recipe.amax_history_len) == (0, Format.HYBRID, 1024)
    assert (recipe.amax_compute_algo, recipe.scaling_factor_compute_algo) == ("max", None)
    assert (recipe.reduce_amax, recipe.fp8_dpa, recipe.fp8_mha) == (True, False, False)


def test_current_scaling_defaults():
    recipe = Float8CurrentScaling()
    assert recipe.fp8_format is Format.HYBRID
    assert recipe.fp8_gemm_fprop == MMParams(use_split_accumulator=False)
    assert recipe.fp8_gemm_dgrad == recipe.fp8_gemm_wgrad == MMParams(use_split_accumulator=True)
    assert (
        recipe.fp8_quant_fwd_inp
        == recipe.fp8_quant_fwd_weight
        == recipe.fp8_quant_bwd_grad
        == QParams()
    )


def test_block_scaling_defaults():
    recipe = Float8BlockScaling()
    assert recipe.fp8_format is Format.E4M3
    assert (
        recipe.x_block_scaling_dim,
        recipe.w_block_scaling_dim,
        recipe.grad_block_scaling_dim,
    ) == (
        1,
        2,
        1,
    )
    assert recipe.fp8_quant_fwd_inp == QParams(power_2_scale=True)
    assert Float8BlockScaling(use_f32_scales=True).fp8_quant_bwd_grad == QParams(
        power_2_scale=False
    )


def test_nvfp4_derives_the_settings_of_each_tensor():
    recipe = NVFP4BlockScaling()
    assert recipe.fp4_quant_fwd_inp == QParams(random_hadamard_transform=True)
    assert recipe.fp4_quant_fwd_weight == QParams(fp4_2d_quantization=True)
    assert recipe.fp4_quant_bwd_grad == QParams(
        random_hadamard_transform=True, stochastic_rounding=True
    )
    plain = NVFP4BlockScaling(True, True, True)
    assert (
        plain.fp4_quant_fwd_inp
        == plain.fp4_quant_fwd_weight
        == plain.fp4_quant_bwd_grad
        == QParams()
    )


def test_derived_fields_follow_their_flag_and_stay_assignable():
    recipe = Float8CurrentScaling(use_power_2_scales=True)
    assert recipe.fp8_quant_fwd_weight == QParams(power_2_scale=True)
    recipe.fp8_quant_fwd_weight = QParams(amax_epsilon=1e-3)
    recipe.fp8_gemm_fprop = MMParams(True)
    assert recipe != Float8CurrentScaling(use_power_2_scales=True)
    assert pickle.loads(pickle.dumps(recipe)) == recipe


def test_a_subclass_may_fix_a_derived_field_as_a_class_attribute():
    class Epsilon(Float8CurrentScaling):
        fp8_quant_fwd_inp = QParams(amax_epsilon=0.5)

    assert Epsilon().fp8_quant_fwd_inp == QParams(amax_epsilon=0.5)
    assert Epsilon().fp8_quant_fwd_weight == QParams()


@pytest.mark.parametrize("kind", [MMParams, QParams])
def test_parameters_are_frozen(kind):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(kind(), dataclasses.fields(kind)[0].name, True)


@pytest.mark.parametrize("kind", [*FAMILIES, CustomRecipe])
def test_unknown_keywords_are_dropped_with_one_warning_that_names_them(kind):
    keywords = {"qfactory": len} if kind is CustomRecipe else {}
    with pytest.warns(
        UserWarning, match=r"interval, fp8_formt \(did you mean fp8_format\?\)$"
    ) as caught:
        recipe = kind(**keywords, interval=16, fp8_formt=None, params_dtype=None)
    assert len([w for w in caught if w.category is UserWarning]) == 1
    assert recipe == make(kind)


def test_known_keywords_raise_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DelayedScaling(margin=1, amax_history_len=2)


@pytest.mark.parametrize("kind", FAMILIES)
def test_keywords_of_earlier_releases_warn_only_if_their_value_has_a_meaning(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for silent in (
            {"interval": 1, "override_linear_precision": (False, False, False)},
            {
                "override_linear_precision": [False, False, False],
                "params_dtype": "bfloat16",
                "device": 0,
            },
            {"override_linear_precision": None},
        ):
            assert kind(**silent) == kind()
    for name, value in {
        "interval": 4,
        "override_linear_precision": (False, False, True),
        "marginn": 1,
    }.items():
        meant = (
            r" \(did you mean margin\?\)" if name == "marginn" and hasattr(kind(), "margin") else ""
        )
        with pytest.warns(
            UserWarning, match=f"{kind.__name__} ignores unknown arguments: {name}{meant}$"
        ):
            assert kind(device="cuda", **{name: value}) == kind()


def test_the_constructor_still_shows_its_fields():
    parameters = inspect.signature(DelayedScaling).parameters
    assert list(parameters)[:3] == ["margin", "fp8_format", "amax_history_len"]
    assert parameters["amax_history_len"].default == 1024


def test_a_subclass_with_its_own_constructor_works():
    recipe = PositionalDelayedScaling(7, params_dtype=None, device=0)
    assert recipe.delayed()
    assert recipe.amax_history_len == 7
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert recipe != DelayedScaling(amax_history_len=7)


@pytest.mark.parametrize(
    ("make_recipe", "words"),
    [
        (lambda: DelayedScaling(fp8_format=Format.E5M2), ["fp8_format", "E5M2", "HYBRID"]),
        (lambda: Float8CurrentScaling(fp8_format=Format.E2M1), ["fp8_format", "E2M1"]),
        (lambda: MXFP8BlockScaling(fp8_format=Format.E5M2), ["fp8_format", "E5M2"]),
        (lambda: DelayedScaling(amax_history_len=-1), ["amax_history_len=-1", "below 0"]),
        (lambda: DelayedScaling(amax_compute_algo="mean"), ["mean", "most_recent"]),
        (
            lambda: DelayedScaling(scaling_factor_compute_algo="x"),
            ["scaling_factor_compute_algo", "callable"],
        ),
        (
            lambda: DelayedScaling(backward_override="dequantized"),
            ["backward_override", "NVTE_BACKWARD_OVERRIDE"],
        ),
        (
            lambda: MXFP8BlockScaling(backward_override="low"),
            ["backward_override", "high_precision"],
        ),
        (lambda: Float8BlockScaling(x_block_scaling_dim=3), ["x_block_scaling_dim=3", "1 or 2"]),
        (
            lambda: Float8BlockScaling(x_block_scaling_dim=2),
            ["x_block_scaling_dim and w_block_scaling_dim"],
        ),
        (lambda: Float8BlockScaling(fp8_gemm_dgrad=MMParams(False)), ["fp8_gemm_dgrad", "split"]),
        (lambda: Float8BlockScaling(fp8_dpa=True), ["fp8_dpa", "DelayedScaling"]),
        (lambda: NVFP4BlockScaling(fp4_format=Format.E4M3), ["fp4_format", "E2M1"]),
        (lambda: NVFP4BlockScaling(fp8_format=Format.HYBRID), ["fp8_format", "block scales"]),
        (lambda: NVFP4BlockScaling(nvfp4_4over6="some"), ["nvfp4_4over6", "weights"]),
        (lambda: NVFP4BlockScaling(nvfp4_4over6_err_mode="MAX"), ["MAE", "MSE"]),
        (lambda: CustomRecipe(), ["qfactory=None", "callable"]),
        (
            lambda: CustomRecipe(qfactory=len, quantization_alignment=0),
            ["quantization_alignment=0"],
        ),
    ],
)
def test_impossible_recipes_are_rejected_with_value_and_remedy(make_recipe, words):
    with pytest.raises(ValueError) as raised:
        make_recipe()
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "expression"),
    [
        (
            "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
            "1",
            "Float8CurrentScaling().use_power_2_scales",
        ),
        ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1", "Float8BlockScaling().use_f32_scales"),
        ("NVTE_NVFP4_DISABLE_RHT", "1", "NVFP4BlockScaling().disable_rht"),
        (
            "NVTE_BACKWARD_OVERRIDE",
            "dequantized",
            "MXFP8BlockScaling().backward_override == 'dequantized'",
        ),
    ],
)
def test_environment_variables_are_defaults_from_import_on(name, value, expression):
    program = f"from transformer_engine.common.recipe import *; print(bool({expression}))"
    source = (
        "import sys, types, pathlib; root = pathlib.Path(sys.argv[1]); "
        "package = types.ModuleType('transformer_engine'); package.__path__ = [str(root)]; "
        "sys.modules['transformer_engine'] = package; " + program
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(recipes.__file__)))
    for environment, expected in (({name: value}, "True"), ({}, "False")):
        clean = {k: v for k, v in os.environ.items() if k != name}
        answer = subprocess.run(
            [sys.executable, "-c", source, root],
            env={**clean, **environment},
            capture_output=True,
            text=True,
        )
        assert answer.stdout.strip() == expected, answer.stderr


@pytest.mark.parametrize(
    ("recipe", "switch", "changed"),
    [
        (Float8CurrentScaling, "use_power_2_scales", {"power_2_scale": True}),
        (Float8BlockScaling, "use_f32_scales", {"power_2_scale": False}),
        (NVFP4BlockScaling, "disable_rht", {"random_hadamard_transform": False}),
        (NVFP4BlockScaling, "disable_stochastic_rounding", {"stochastic_rounding": False}),
        (NVFP4BlockScaling, "disable_2d_quantization", {"fp4_2d_quantization": False}),
    ],
)
def test_a_switch_that_is_assigned_counts_as_one_that_was_given(recipe, switch, changed):
    assigned, argument = recipe(), recipe(**{switch: True})
    assert repr(assigned) != repr(argument)
    setattr(assigned, switch, True)
    assert assigned == argument and repr(assigned) == repr(argument)
    setattr(assigned, switch, False)
    assert assigned == recipe()


def test_a_value_assigned_to_a_derived_field_stays():
    recipe = Float8CurrentScaling()
    recipe.fp8_quant_fwd_inp = QParams(amax_epsilon=0.5)
    recipe.use_power_2_scales = True
    assert recipe.fp8_quant_fwd_inp == QParams(power_2_scale=True, amax_epsilon=0.5)


@pytest.mark.parametrize(
    ("recipe", "name", "value", "error", "message"),
    [
        (DelayedScaling, "amax_history_len", -1, ValueError, "amax_history_len=-1"),
        (
            Float8CurrentScaling,
            "use_power_2_scales",
            2,
            TypeError,
            "use_power_2_scales=2 is neither True nor False",
        ),
        (Float8CurrentScaling, "fp8_quant_bwd_grad", 1, TypeError, "give QParams"),
        (
            Float8BlockScaling,
            "x_block_scaling_dim",
            2,
            ValueError,
            "x_block_scaling_dim and w_block_scaling_dim are 2",
        ),
        (NVFP4BlockScaling, "nvfp4_4over6", "some", ValueError, "nvfp4_4over6='some'"),
        (MXFP8BlockScaling, "fp8_format", Format.E5M2, ValueError, "gradients alone may use E5M2"),
    ],
)
def test_an_assignment_that_the_constructor_would_reject_changes_nothing(
    recipe, name, value, error, message
):
    changed = recipe()
    with pytest.raises(error, match=re.escape(message)):
        setattr(changed, name, value)
    assert changed == recipe() and repr(changed) == repr(recipe())


def test_a_margin_of_mxfp8_warns_that_it_has_no_effect():
    with pytest.warns(UserWarning, match="margin=2 has no effect"):
        MXFP8BlockScaling(margin=2)
