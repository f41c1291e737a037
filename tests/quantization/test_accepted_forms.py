"""Recipes and contexts accept every form that the original accepts, with the results of the plainly written call."""

# The arguments have other types than the signatures declare.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportCallIssue=false

import copy
import enum
import pickle
import statistics
import warnings
from collections import UserDict, UserList
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import transformer_engine.pytorch as te
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
    recipe_class,
)
from transformer_engine.pytorch.quantization import ExtraStateError

WIDTH = 32
SPLIT = MMParams(use_split_accumulator=True)

# recipe class, fields as a configuration gives them, the same fields written plainly
FORMS = [
    (DelayedScaling, {"margin": 1.0}, {"margin": 1}),
    (DelayedScaling, {"margin": "1"}, {"margin": 1}),
    (DelayedScaling, {"margin": True}, {"margin": 1}),
    (DelayedScaling, {"margin": np.int64(1)}, {"margin": 1}),
    (DelayedScaling, {"margin": torch.tensor(1)}, {"margin": 1}),
    (DelayedScaling, {"amax_history_len": 16.0}, {"amax_history_len": 16}),
    (DelayedScaling, {"amax_history_len": "16"}, {"amax_history_len": 16}),
    (DelayedScaling, {"amax_history_len": np.array(16)}, {"amax_history_len": 16}),
    (DelayedScaling, {"reduce_amax": "true"}, {"reduce_amax": True}),
    (DelayedScaling, {"reduce_amax": "off"}, {"reduce_amax": False}),
    (DelayedScaling, {"reduce_amax": 0.0}, {"reduce_amax": False}),
    (DelayedScaling, {"fp8_dpa": "1"}, {"fp8_dpa": True}),
    (DelayedScaling, {"fp8_format": Format.HYBRID.value}, {"fp8_format": Format.HYBRID}),
    (DelayedScaling, {"fp8_format": (448, 57344)}, {"fp8_format": Format.HYBRID}),
    (DelayedScaling, {"fp8_format": [448.0, 448.0]}, {"fp8_format": Format.E4M3}),
    (Float8CurrentScaling, {"use_power_2_scales": "1"}, {"use_power_2_scales": True}),
    (Float8CurrentScaling, {"use_power_2_scales": np.bool_(True)}, {"use_power_2_scales": True}),
    (
        Float8CurrentScaling,
        {"fp8_gemm_fprop": {"use_split_accumulator": True}},
        {"fp8_gemm_fprop": SPLIT},
    ),
    (
        Float8CurrentScaling,
        {"fp8_gemm_fprop": {"use_split_accumulator": "yes"}},
        {"fp8_gemm_fprop": SPLIT},
    ),
    (Float8BlockScaling, {"x_block_scaling_dim": "1", "w_block_scaling_dim": 2.0}, {}),
    (Float8BlockScaling, {"use_f32_scales": "True"}, {"use_f32_scales": True}),
    (
        MXFP8BlockScaling,
        {"margin": "0", "enable_2d_quantization": 1},
        {"enable_2d_quantization": True},
    ),
    (NVFP4BlockScaling, {"disable_rht": "y", "fp4_format": (6, 6)}, {"disable_rht": True}),
    (
        CustomRecipe,
        {"qfactory": len, "quantization_alignment": "32"},
        {"qfactory": len, "quantization_alignment": 32},
    ),
]


def step(recipe, enabled=True):
    """Train a Linear for two steps; return output and gradients."""
    torch.manual_seed(0)
    layer = te.Linear(WIDTH, WIDTH)
    outputs = []
    for _ in range(2):
        x = torch.randn(16, WIDTH, device=layer.weight.device, requires_grad=True)
        with te.autocast(enabled=enabled, recipe=recipe):
            y = layer(x)
        y.square().sum().backward()
        outputs += [y.detach(), x.grad, layer.weight.grad.clone()]
    return outputs


def same(actual, expected):
    return len(actual) == len(expected) and all(map(torch.equal, actual, expected))


@pytest.mark.parametrize(("kind", "options", "plain"), FORMS, ids=repr)
def test_a_recipe_of_configured_values_equals_the_plain_one(kind, options, plain):
    actual, expected = kind(**options), kind(**plain)
    assert actual == expected and repr(actual) == repr(expected)
    for name, value in vars(expected).items():
        assert type(getattr(actual, name)) is type(value), name


@pytest.mark.parametrize(("kind", "argument", "plain"), FORMS, ids=repr)
def test_a_field_that_is_assigned_is_converted_too(kind, argument, plain):
    start = {"qfactory": len} if kind is CustomRecipe else {}
    result = kind(**start)
    for name, value in argument.items():
        setattr(result, name, value)
    assert result == kind(**start | plain) and repr(result) == repr(kind(**start | plain))


@pytest.mark.parametrize(
    ("result", "plain"),
    [
        (QParams(amax_epsilon="1e-4"), QParams(amax_epsilon=1e-4)),
        (
            QParams(power_2_scale="true", stochastic_rounding=1),
            QParams(True, stochastic_rounding=True),
        ),
        (MMParams(use_split_accumulator="no"), MMParams(False)),
    ],
)
def test_parameters_of_a_recipe_are_converted(result, plain):
    assert result == plain and repr(result) == repr(plain)


@pytest.mark.parametrize(
    ("argument", "plain"),
    [
        (
            DelayedScaling("2", (448, 57344), "4", reduce_amax="yes"),
            DelayedScaling(2, Format.HYBRID, 4, reduce_amax=True),
        ),
        (Float8CurrentScaling("1"), Float8CurrentScaling(True)),
        (Float8BlockScaling(w_block_scaling_dim="1"), Float8BlockScaling(w_block_scaling_dim=1)),
    ],
    ids=repr,
)
def test_a_layer_computes_the_same_under_a_recipe_of_configured_values(argument, plain):
    assert same(step(argument), step(plain))


class Algorithm(str, enum.Enum):
    RECENT = "most_recent"


@pytest.mark.parametrize(
    ("argument", "plain"),
    [
        (
            Float8CurrentScaling(
                fp8_gemm_fprop=UserDict(use_split_accumulator=True), fp8_format=UserList((448, 448))
            ),
            Float8CurrentScaling(fp8_gemm_fprop=SPLIT, fp8_format=Format.E4M3),
        ),
        (
            DelayedScaling(amax_compute_algo=Algorithm.RECENT),
            DelayedScaling(amax_compute_algo="most_recent"),
        ),
        (
            DelayedScaling(amax_compute_algo=np.str_("most_recent")),
            DelayedScaling(amax_compute_algo="most_recent"),
        ),
    ],
)
def test_containers_and_strings_of_configuration_libraries_are_accepted(argument, plain):
    assert argument == plain and repr(argument) == repr(plain)
    assert same(step(argument), step(plain))


def test_values_that_pydantic_rejects_are_errors():
    for kind, fields in (
        (DelayedScaling, {"margin": 1.5}),
        (DelayedScaling, {"margin": "much"}),
        (DelayedScaling, {"reduce_amax": 2}),
        (Float8CurrentScaling, {"fp8_gemm_fprop": True}),
    ):
        with pytest.raises(TypeError, match=next(iter(fields))):
            kind(**fields)


def test_unknown_fields_of_matrix_products_are_ignored_with_a_warning():
    with pytest.warns(UserWarning, match="fp8_gemm_fprop ignores unknown fields: fast"):
        recipe = Float8CurrentScaling(fp8_gemm_fprop={"use_split_accumulator": True, "fast": 1})
    assert recipe == Float8CurrentScaling(fp8_gemm_fprop=SPLIT)


def test_a_users_subclass_keeps_its_fields():
    class Named(DelayedScaling):
        steps: int = "many"  # pyright: ignore[reportAssignmentType]

    assert Named(margin="1").margin == 1 and Named().steps == "many"


def test_a_registered_recipe_of_another_module_is_converted_too():
    @recipe_class
    @dataclass(repr=False)
    class Registered(Recipe):
        fp8_format: "Format" = Format.E4M3
        block: "int" = 32

    assert Registered(block="64") == Registered(block=64)
    assert Registered(fp8_format=(448, 448)).fp8_format is Format.E4M3


def test_a_history_without_rows_is_an_error_of_the_first_step():
    recipe = DelayedScaling(amax_history_len=0)
    layer = te.Linear(WIDTH, WIDTH)
    x = torch.randn(16, WIDTH, device=layer.weight.device)
    with (
        te.autocast(recipe=recipe),
        pytest.raises(ValueError, match="amax_history_len=0 leaves no row"),
    ):
        layer(x)
    recipe.amax_history_len = 1
    with te.autocast(recipe=recipe):
        layer(x)


# Pickles.


def pickle_like_original(kind, **fields):
    """Pickle a recipe with only these attributes."""
    recipe = object.__new__(kind)
    recipe.__dict__.update(fields)
    return pickle.dumps(recipe)


@pytest.mark.parametrize(
    ("kind", "fields", "plain"),
    [
        (
            DelayedScaling,
            {"margin": 2, "amax_history_len": 16},
            DelayedScaling(2, amax_history_len=16),
        ),
        (DelayedScaling, {"margin": 2.0, "interval": 1}, DelayedScaling(2)),
        (Float8CurrentScaling, {"use_power_2_scales": True}, Float8CurrentScaling(True)),
        (Float8BlockScaling, {"use_f32_scales": True}, Float8BlockScaling(True)),
        (
            MXFP8BlockScaling,
            {"fp8_format": Format.HYBRID},
            MXFP8BlockScaling(fp8_format=Format.HYBRID),
        ),
        (NVFP4BlockScaling, {"disable_rht": True}, NVFP4BlockScaling(disable_rht=True)),
    ],
)
def test_a_pickle_without_derived_or_later_fields_loads_and_computes(kind, fields, plain):
    result = pickle.loads(pickle_like_original(kind, **fields))
    assert result == plain and repr(result) == repr(plain)
    result.fp8_dpa = False  # an assignment updates the derived fields
    if kind is not NVFP4BlockScaling:
        assert same(step(result), step(plain))


def test_a_pickle_of_ours_holds_plain_values_of_the_fields():
    state: Any = DelayedScaling("1", reduce_amax="no").__reduce_ex__(2)[2]
    assert (state["margin"], state["reduce_amax"]) == (1, False)
    assert {type(value) for value in state.values()} <= {int, bool, str, Format, type(None)}


def test_a_pickle_with_the_description_of_an_earlier_version_loads():
    recipe = DelayedScaling(margin=1)
    recipe.__dict__["_description"] = "DelayedScaling(margin=1)"
    result = pickle.loads(pickle.dumps(recipe))
    assert result.__dict__["_description"] == repr(result)


def test_a_copied_layer_keeps_its_quantizers():
    layer = te.Linear(WIDTH, WIDTH)
    x = torch.randn(16, WIDTH, device=layer.weight.device)
    with te.autocast(recipe=DelayedScaling()):
        layer(x)
    twin = copy.deepcopy(layer)
    before = twin.quantizers["scaling_fwd"][0]
    with te.autocast(recipe=twin.fp8_meta["recipe"]):
        twin(x)
    assert twin.quantizers["scaling_fwd"][0] is before


# Contexts.

ON = [2, 1.0, "yes", torch.tensor(True), np.bool_(True), np.int64(1), [0]]
OFF = ["", 0, None, torch.tensor(False), np.bool_(False), 0.0, []]


@pytest.mark.parametrize("enabled", ON, ids=repr)
def test_autocast_is_enabled_by_every_true_value(enabled):
    recipe = Float8CurrentScaling()
    assert same(step(recipe, enabled), step(recipe, True))
    with te.autocast(enabled=enabled, recipe=recipe):
        assert te.quantization.FP8GlobalStateManager.is_fp8_enabled() is True


@pytest.mark.parametrize("enabled", OFF, ids=repr)
def test_autocast_is_disabled_by_every_false_value(enabled):
    recipe = Float8CurrentScaling()
    assert same(step(recipe, enabled), step(recipe, False))
    with te.autocast(enabled=enabled, calibrating=enabled, recipe=recipe):
        assert te.quantization.FP8GlobalStateManager.is_fp8_enabled() is False
        assert te.quantization.FP8GlobalStateManager.is_fp8_calibration() is False


@pytest.mark.parametrize("enabled", ON[:5], ids=repr)
def test_quantized_parameters_are_made_by_every_true_value(enabled):
    recipe = Float8CurrentScaling()
    with te.quantized_model_init(enabled, recipe, preserve_high_precision_init_val=enabled):
        layer = te.Linear(WIDTH, WIDTH)
    assert isinstance(layer.weight, te.Float8Tensor)
    assert layer.weight.get_high_precision_init_val() is not None
    with te.quantized_model_init(OFF[0], recipe):
        assert not isinstance(te.Linear(WIDTH, WIDTH).weight, te.Float8Tensor)


# Checkpoints from another recipe.


@pytest.mark.parametrize(
    "made_with", [Float8CurrentScaling(), Float8BlockScaling(), DelayedScaling()], ids=repr
)
@pytest.mark.parametrize(
    "saved_under", [DelayedScaling(amax_history_len=4), Float8CurrentScaling()], ids=repr
)
def test_high_precision_weights_load_with_the_extra_states_of_another_recipe(
    made_with, saved_under
):
    torch.manual_seed(0)
    trained = te.LayerNormMLP(WIDTH, 64)
    with te.autocast(recipe=saved_under):
        trained(torch.randn(16, WIDTH, device=trained.fc1_weight.device)).sum().backward()
    full = trained.state_dict()
    weights = {name: value for name, value in full.items() if not name.endswith("_extra_state")}
    x = torch.randn(16, WIDTH, device=trained.fc1_weight.device)
    outputs = []
    for state in (full, weights):
        with te.quantized_model_init(recipe=made_with):
            layer = te.LayerNormMLP(WIDTH, 64)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            layer.load_state_dict(state)
        differ = type(made_with) is not type(saved_under) and state is full
        messages = [str(w.message) for w in caught if "extra state" in str(w.message)]
        assert len(messages) == differ
        assert all(f"saved under {type(saved_under).__name__}" in message for message in messages)
        with te.autocast(recipe=made_with):
            outputs.append(layer(x))
        if type(made_with) is not type(saved_under):
            with (
                te.autocast(recipe=saved_under),
                pytest.raises(RuntimeError, match="Recipe mismatch"),
            ):
                layer(x)
    if type(made_with) is not DelayedScaling or type(saved_under) is not DelayedScaling:
        assert torch.equal(*outputs)


def test_an_extra_state_with_a_users_function_in_its_recipe_is_read_without_the_function():
    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo=statistics.mean)
    state = {
        "recipe": recipe,
        "scale_fwd": torch.full((3,), 5.0),
        "amax_history_fwd": torch.full((4, 3), 6.0),
    }
    data = torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)
    layer = te.Linear(WIDTH, WIDTH)
    with pytest.warns(
        UserWarning, match=r"amax_compute_algo=statistics\.mean, which is not loaded"
    ):
        layer.set_extra_state(data)
    assert layer.fp8_meta["recipe"] == DelayedScaling(amax_history_len=4)
    assert layer.fp8_meta["scaling_fwd"].scale.tolist() == [5.0] * 3
    assert layer.fp8_meta["scaling_fwd"].amax_history.tolist() == [[6.0] * 3] * 4


@pytest.mark.parametrize("position", ["elsewhere", "called"])
def test_a_function_outside_of_a_recipe_stays_an_error(position):
    class Called:
        def __reduce__(self):
            return statistics.mean, ([1.0],)

    content = statistics.mean if position == "elsewhere" else Called()
    state = {"recipe": DelayedScaling(), "extra_fp8_variables": {"x": content}}
    data = torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)
    with pytest.raises(ExtraStateError, match=r"statistics\.mean, which a checkpoint may not load"):
        te.Linear(WIDTH, WIDTH).set_extra_state(data)


@pytest.mark.parametrize("element", list(Format))
def test_a_custom_recipe_leaves_the_elements_to_its_factory(element):
    def factory(role):
        return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)

    recipes = (CustomRecipe(qfactory=factory, fp8_format=element), CustomRecipe(qfactory=factory))
    assert same(*map(step, recipes))
