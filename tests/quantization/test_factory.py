import copy
import pickle

import pytest
import torch

from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)
from transformer_engine.pytorch import quantization as q
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
)
from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
QUANTIZERS = {
    DelayedScaling: Float8Quantizer,
    Float8CurrentScaling: Float8CurrentScalingQuantizer,
    Float8BlockScaling: Float8BlockQuantizer,
    MXFP8BlockScaling: MXFP8Quantizer,
    NVFP4BlockScaling: NVFP4Quantizer,
}


def both_directions(recipe, device, products=1):
    states = [
        q.RecipeState.create(recipe, mode=mode, num_quantizers=slots * products, device=device)
        for mode, slots in (("forward", 3), ("backward", 2))
    ]
    return [state.make_quantizers() for state in states]


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_every_slot_has_a_quantizer_of_the_family_that_works(device, kind):
    x = torch.randn(128, 128, device=device, dtype=torch.bfloat16)
    for quantizers, slots in zip(both_directions(kind(), device, products=2), (6, 4), strict=True):
        assert [type(quantizer) for quantizer in quantizers] == [QUANTIZERS[kind]] * slots
        for quantizer in quantizers[: slots // 2]:
            restored = quantizer(x).dequantize(dtype=torch.float32)
            assert (restored - x).norm() < 0.2 * x.float().norm()


@pytest.mark.parametrize(
    "kind", [DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling]
)
@pytest.mark.parametrize("format", [Format.E4M3, Format.HYBRID])
def test_only_the_backward_pass_of_hybrid_is_e5m2(device, kind, format):
    recipe = kind(fp8_format=format)
    forward, backward = both_directions(recipe, device)
    gradient = E5M2 if format is Format.HYBRID else E4M3
    assert {quantizer.dtype for quantizer in forward} == {E4M3}
    assert {quantizer.dtype for quantizer in backward} == {gradient}
    assert (q.get_fp8_te_dtype(recipe), q.get_fp8_te_dtype(recipe, False)) == (E4M3, gradient)
    assert q.get_fp8_torch_dtype(recipe, True) is torch.float8_e4m3fn
    assert (
        q.get_fp8_torch_dtype(recipe, False)
        is {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}[gradient]
    )
    assert (q.get_fp8_max(recipe), q.get_fp8_max(recipe, False)) == (
        448,
        {E4M3: 448, E5M2: 57344}[gradient],
    )


def test_current_scaling_gives_each_kind_of_tensor_its_parameters(device):
    recipe = Float8CurrentScaling()
    recipe.fp8_quant_fwd_weight = QParams(power_2_scale=True)
    recipe.fp8_quant_bwd_grad = QParams(amax_epsilon=0.25)
    forward, backward = both_directions(recipe, device, products=2)
    assert [quantizer.force_pow_2_scales for quantizer in forward] == [False, True, False] * 2
    assert [quantizer.amax_epsilon for quantizer in backward] == [0.25] * 4


def test_block_scaling_gives_each_kind_of_tensor_its_dimension(device):
    forward, backward = both_directions(Float8BlockScaling(), device)
    assert [quantizer.block_scaling_dim for quantizer in forward + backward] == [1, 2, 1, 1, 1]
    assert all(quantizer.force_pow_2_scales for quantizer in forward + backward)
    recipe = Float8BlockScaling(True, Format.HYBRID, 1, 1, 2)
    forward, backward = both_directions(recipe, device)
    assert [quantizer.block_scaling_dim for quantizer in forward + backward] == [1, 1, 1, 2, 2]
    assert not any(quantizer.force_pow_2_scales for quantizer in forward + backward)


def test_mxfp8_makes_square_tiles_for_weights_alone_when_asked(device):
    for enabled in (False, True):
        forward, backward = both_directions(
            MXFP8BlockScaling(enable_2d_quantization=enabled), device
        )
        squares = [quantizer.with_2d_quantization for quantizer in forward + backward]
        assert squares == [False, enabled, False, False, False]


def test_nvfp4_transforms_activations_and_gradients_and_tiles_weights(device):
    forward, backward = both_directions(NVFP4BlockScaling(), device)
    assert [quantizer.with_rht for quantizer in forward + backward] == [
        True,
        False,
        True,
        True,
        True,
    ]
    assert [quantizer.with_2d_quantization for quantizer in forward + backward] == [False, True] + [
        False
    ] * 3
    assert [quantizer.stochastic_rounding for quantizer in forward + backward] == [False] * 3 + [
        True
    ] * 2
    forward, backward = both_directions(NVFP4BlockScaling(True, True, True), device)
    for quantizer in forward + backward:
        assert not quantizer.with_rht
        assert not quantizer.with_2d_quantization
        assert not quantizer.stochastic_rounding
    assert q.get_fp4_te_dtype(NVFP4BlockScaling()) is DType.kFloat4E2M1


@pytest.mark.parametrize("variant", [{"row_scaled_activation": True}, {"nvfp4_4over6": "all"}])
def test_nvfp4_variants_of_activations_need_the_transform_switched_off(device, variant):
    with pytest.raises(ValueError, match=r"excludes with_rht=True; .*disable_rht=True"):
        both_directions(NVFP4BlockScaling(**variant), device)


def test_row_scaled_activations_concern_forward_slots_but_weights(device):
    recipe = NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True)
    forward, backward = both_directions(recipe, device)
    assert [quantizer.row_scaled_nvfp4 for quantizer in forward + backward] == [
        True,
        False,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("scope", "chosen"),
    [
        ("none", (False, False)),
        ("weights", (False, True)),
        ("activations", (True, False)),
        ("all", (True, True)),
    ],
)
@pytest.mark.parametrize(
    ("to_256", "narrow"),
    [
        ("none", (False, False)),
        ("weights", (False, True)),
        ("activations", (True, False)),
        ("all", (True, True)),
    ],
)
def test_scopes_of_4over6_choose_forward_slots_and_never_gradients(
    device, scope, chosen, to_256, narrow
):
    recipe = NVFP4BlockScaling(
        disable_rht=True,
        nvfp4_4over6=scope,
        nvfp4_4over6_e4m3_use_256=to_256,
        nvfp4_4over6_err_mode="MSE",
    )
    forward, backward = both_directions(recipe, device)
    for quantizer, uses, limited in zip(
        forward, (*chosen, chosen[0]), (*narrow, narrow[0]), strict=True
    ):
        assert quantizer.nvfp4_use_4over6 is uses
        assert quantizer.nvfp4_e4m3_max == (256 if uses and limited else 448)
        assert quantizer.nvfp4_4over6_err_mode == ("MSE" if uses else "MAE")
    assert not any(
        quantizer.nvfp4_use_4over6 or quantizer.row_scaled_nvfp4 for quantizer in backward
    )
    assert {quantizer.nvfp4_e4m3_max for quantizer in backward} == {448}


def test_weights_use_4over6_while_activations_are_transformed(device):
    forward, _ = both_directions(NVFP4BlockScaling(nvfp4_4over6="weights"), device)
    assert [quantizer.nvfp4_use_4over6 for quantizer in forward] == [False, True, False]
    assert forward[1].with_2d_quantization


def test_delayed_scaling_quantizers_read_and_record_in_their_column(device):
    state = q.RecipeState.create(
        DelayedScaling(amax_history_len=4), mode="forward", num_quantizers=3, device=device
    )
    assert state.scale.tolist() == [1.0] * 3
    assert state.amax_history.shape == (4, 3)
    assert state.dtype is E4M3
    quantizers = state.make_quantizers()
    state.scale[1] = 0.5
    weight = quantizers[1](torch.full((16, 16), -3.0, device=device))
    assert weight._scale_inv.tolist() == [2.0]
    assert state.amax_history[0].tolist() == [0.0, 3.0, 0.0]


@pytest.mark.parametrize(
    ("recipe", "rows"),
    [
        (MXFP8BlockScaling(), 32),
        (NVFP4BlockScaling(), 128),
        (DelayedScaling(), 16),
        (Float8BlockScaling(), 16),
        (CustomRecipe(qfactory=len, quantization_alignment=48), 48),
    ],
)
def test_padding_follows_the_recipe(recipe, rows):
    assert q.get_align_size_for_quantization(recipe) == rows


def test_a_custom_factory_is_called_with_a_string_once_per_slot(device):
    queries = []

    def factory(role):
        queries.append(role)
        if role == "linear_weight":
            return MXFP8Quantizer(E4M3)
        return (
            None
            if role in ("linear_output", "linear_grad_input")
            else Float8CurrentScalingQuantizer(E4M3, device)
        )

    forward, backward = both_directions(CustomRecipe(qfactory=factory), device)
    assert queries == [
        "linear_input",
        "linear_weight",
        "linear_output",
        "linear_grad_output",
        "linear_grad_input",
    ]
    assert [type(quantizer) for quantizer in forward + backward] == [
        Float8CurrentScalingQuantizer,
        MXFP8Quantizer,
        IdentityQuantizer,
        Float8CurrentScalingQuantizer,
        IdentityQuantizer,
    ]


def test_a_custom_factory_sees_the_roles_that_the_module_gives(device):
    queries = []
    recipe = CustomRecipe(qfactory=queries.append)
    roles = [q.QuantizerRole("dpa", "qkv", "layer.0"), None]
    q.RecipeState.create(
        recipe, mode="backward", num_quantizers=2, device=device, roles=roles
    ).make_quantizers()
    assert queries == roles
    assert (queries[0].module_type, queries[0].tensor_type, queries[0].name) == (
        "dpa",
        "qkv",
        "layer.0",
    )
    with pytest.raises(ValueError, match="2 roles for 3"):
        q.RecipeState.create(
            recipe, mode="forward", num_quantizers=3, device=device, roles=roles
        ).make_quantizers()


def test_roles_compare_with_strings_by_tensor_and_with_each_other_by_all_fields():
    role = q.QuantizerRole("linear", "weight", "fc1")
    assert role == "linear_weight"
    assert role in ("linear_input", "linear_weight")
    assert role != "linear_input"
    assert role == q.QuantizerRole("linear", "weight", "fc1")
    assert role != q.QuantizerRole("linear", "weight", "fc2")
    assert {"linear_weight": 1}[q.QuantizerRole("linear", "weight")] == 1
    assert role != 3
    for twin in (pickle.loads(pickle.dumps(role)), copy.deepcopy(role), eval(repr(role), vars(q))):
        assert (twin, twin.name) == (role, "fc1")


def test_equal_requests_of_a_custom_factory_share_a_state_that_is_updated(device):
    long = q.DelayedScalingRequest(amax_history_len=3)
    short = q.DelayedScalingRequest(amax_history_len=1, margin=1)
    recipe = CustomRecipe(qfactory=lambda role: short if role == "linear_weight" else long)
    state = q.RecipeState.create(recipe, mode="forward", num_quantizers=3, device=device)
    quantizers = state.make_quantizers()
    first, second = state.delayed_states
    assert (first.scale.shape, second.scale.shape) == ((2,), (1,))
    Manager.add_fp8_tensors_to_global_buffer({"scaling_fwd": state})
    for quantizer in quantizers:
        quantizer(torch.full((16, 16), 7.0, device=device))
    Manager.reduce_and_update_fp8_tensors()
    assert [quantizer.scale.item() for quantizer in quantizers] == [64.0, 32.0, 64.0]
    state.make_quantizers()
    assert state.delayed_states == (first, second)


def test_an_unknown_request_is_rejected(device):
    recipe = CustomRecipe(qfactory=lambda role: q.QuantizerRequest())
    with pytest.raises(TypeError, match="DelayedScalingRequest"):
        both_directions(recipe, device)


def test_a_recipe_outside_the_families_is_rejected(device):
    class Strange(Recipe):
        pass

    with pytest.raises(ValueError, match="Strange is not one of"):
        q.RecipeState.create(Strange(), mode="forward", device=device)
    with pytest.raises(ValueError, match="Strange"):
        q.make_quantizers(Strange(), "forward", 1, device, None)


@pytest.mark.parametrize(
    ("keywords", "words"), [({"mode": "sideways"}, "sideways"), ({"num_quantizers": -1}, "-1")]
)
def test_impossible_states_are_rejected(keywords, words):
    with pytest.raises(ValueError, match=words):
        q.RecipeState.create(DelayedScaling(), **{"mode": "forward", **keywords})


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (DelayedScaling, "DelayedScalingRecipeState"),
        (Float8CurrentScaling, "Float8CurrentScalingRecipeState"),
        (Float8BlockScaling, "Float8BlockScalingRecipeState"),
        (MXFP8BlockScaling, "MXFP8BlockScalingRecipeState"),
        (NVFP4BlockScaling, "NVFP4BlockScalingRecipeState"),
    ],
)
def test_subclasses_of_a_recipe_get_the_state_of_its_family(device, kind, name):
    derived = type("Derived", (kind,), {})
    state = q.RecipeState.create(derived(), mode="backward", num_quantizers=2, device=device)
    assert type(state) is getattr(q, name)
    assert state.dtype is (
        DType.kFloat4E2M1 if kind is NVFP4BlockScaling else q.get_fp8_te_dtype(kind(), False)
    )


def test_a_state_serves_equal_recipes_and_continues_into_a_changed_one(device):
    def renew(previous, recipe, slots=2):
        return q.RecipeState.renew(
            previous, recipe, mode="forward", num_quantizers=slots, device=device
        )

    state = renew(None, DelayedScaling(amax_history_len=3))
    assert renew(state, DelayedScaling(amax_history_len=3)) is state
    state.scale.fill_(2.0)
    state.amax_history.copy_(torch.arange(6.0).view(3, 2))
    longer = renew(state, DelayedScaling(amax_history_len=4))
    assert longer.scale.tolist() == [2.0, 2.0]
    assert longer.amax_history.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [0.0, 0.0]]
    assert renew(longer, DelayedScaling(amax_history_len=1)).amax_history.tolist() == [[0.0, 1.0]]
    assert renew(state, DelayedScaling(amax_history_len=3), slots=3).scale.tolist() == [1.0] * 3
    assert type(renew(state, MXFP8BlockScaling())) is q.MXFP8BlockScalingRecipeState
    custom = renew(state, CustomRecipe(qfactory=lambda role: None))
    assert custom.delayed_states == ()


@pytest.mark.parametrize(
    ("length", "expected"), [(1, [1.0]), (2, [1.0, 2.0]), (4, [1.0, 2.0, 0.0, 0.0])]
)
def test_a_history_is_truncated_or_padded_with_zeros(device, length, expected):
    state = q.RecipeState.create(DelayedScaling(amax_history_len=2), mode="forward", device=device)
    state.amax_history.copy_(torch.tensor([[1.0], [2.0]]))
    state.resize_history(length)
    assert state.amax_history.flatten().tolist() == expected
