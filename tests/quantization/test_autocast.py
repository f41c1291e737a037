import inspect

import pytest
import torch

from transformer_engine.common.hardware import nvidia
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling
from transformer_engine.pytorch import quantization as q
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager
from transformer_engine.pytorch.quantization import support


def test_outside_of_blocks_nothing_is_enabled():
    assert q.current() == q.AutocastState(
        enabled=False, calibrating=False, recipe=None, group=None, graph=False
    )
    assert not Manager.is_fp8_enabled()
    assert not Manager.is_fp8_calibration()
    assert Manager.get_fp8_group() is None
    assert not Manager.fp8_graph_capturing()


def test_a_block_exposes_its_settings_until_it_ends():
    recipe = Float8CurrentScaling()
    with q.autocast(
        enabled=True, calibrating=True, recipe=recipe, amax_reduction_group=None, _graph=True
    ):
        assert q.current() == q.AutocastState(
            enabled=True, calibrating=True, recipe=recipe, group=None, graph=True
        )
        assert Manager.get_fp8_recipe() is recipe
        assert Manager.is_fp8_enabled()
        assert Manager.is_fp8_calibration()
        assert Manager.fp8_graph_capturing()
    assert q.current() == q.AutocastState()


def test_the_record_is_immutable():
    with q.autocast(), pytest.raises(AttributeError):
        q.current().enabled = False


def test_blocks_nest_and_a_disabled_one_means_high_precision():
    outer, inner = DelayedScaling(), Float8CurrentScaling()
    with q.autocast(recipe=outer):
        with q.autocast(enabled=False):
            assert not Manager.is_fp8_enabled()
            with q.autocast(recipe=inner):
                assert Manager.get_fp8_recipe() is inner
        assert Manager.is_fp8_enabled()
        assert Manager.get_fp8_recipe() is outer


def test_an_exception_restores_every_level():
    with (
        pytest.raises(KeyError),
        q.autocast(),
        q.autocast(enabled=False),
        q.autocast(calibrating=True),
    ):
        raise KeyError
    assert q.current() == q.AutocastState()
    with q.autocast():
        assert Manager.is_first_fp8_module()


def test_an_active_block_cannot_be_entered_again_but_a_finished_one_can():
    block = q.autocast()
    with block:
        with pytest.raises(RuntimeError, match="active already"):
            block.__enter__()
        assert Manager.is_fp8_enabled()
    with block:
        assert Manager.is_fp8_enabled()
    assert not Manager.is_fp8_enabled()


def test_as_a_decorator_every_call_has_its_own_block():
    @q.autocast(recipe=DelayedScaling())
    def depth(n):
        assert Manager.is_fp8_enabled()
        return 0 if n == 0 else 1 + depth(n - 1)

    assert depth(2) == 2
    assert not Manager.is_fp8_enabled()


def test_without_a_recipe_the_default_applies():
    with q.autocast():
        assert q.current().recipe == q.get_default_recipe()
    with q.autocast(enabled=False):
        assert q.current().recipe is None


def test_an_unsupported_recipe_is_rejected_before_anything_changes(monkeypatch):
    monkeypatch.delenv("TE_EMULATE", raising=False)
    monkeypatch.setattr(support, "has_cuda", lambda: True)
    monkeypatch.setattr(support, "current_hardware", lambda: nvidia(9, 0))
    with q.autocast(enabled=False):
        before = Manager.get_autocast_state()
        with pytest.raises(
            RuntimeError, match=r"MXFP8BlockScaling cannot run here: .*10\.0 or higher.*TE_EMULATE"
        ):
            q.autocast(recipe=MXFP8BlockScaling()).__enter__()
        assert Manager.get_autocast_state() == before
        with q.autocast(enabled=False, recipe=MXFP8BlockScaling()):
            assert not Manager.is_fp8_enabled()
    with (
        pytest.raises(RuntimeError, match="cannot run here"),
        q.quantized_model_init(recipe=MXFP8BlockScaling()),
    ):
        pass


@pytest.mark.parametrize("block", [q.autocast, q.quantized_model_init])
def test_a_recipe_of_another_type_is_rejected(block):
    with pytest.raises(TypeError, match="str"):
        block(recipe="fp8")


def test_only_the_first_module_of_an_outermost_enabled_block_is_first():
    assert not Manager.is_first_fp8_module()
    with q.autocast(enabled=False):
        assert not Manager.is_first_fp8_module()
        for _ in range(2):
            with q.autocast():
                assert Manager.is_first_fp8_module()
                assert not Manager.is_first_fp8_module()
                with q.autocast():
                    assert not Manager.is_first_fp8_module()


def test_an_autocast_state_can_be_restored_for_recomputation():
    recipe = DelayedScaling()
    with q.autocast(recipe=recipe):
        moment = Manager.get_autocast_state()
    outer = Manager.get_autocast_state()
    Manager.set_autocast_state(moment)
    assert Manager.get_fp8_recipe() is recipe
    assert Manager.is_first_fp8_module()
    Manager.set_autocast_state(outer)
    assert not Manager.is_fp8_enabled()


def test_earlier_names_are_deprecated_and_mean_the_same():
    recipe = DelayedScaling()
    with pytest.warns(DeprecationWarning, match="autocast"):
        block = q.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=None)
    with block:
        assert q.current() == q.AutocastState(enabled=True, calibrating=False, recipe=recipe)
    with pytest.warns(DeprecationWarning, match="quantized_model_init"):
        init = q.fp8_model_init(enabled=True, recipe=recipe, preserve_high_precision_init_val=True)
    with init:
        assert q.current_model_init() == q.ModelInitState(True, recipe, True)
    assert list(inspect.signature(q.fp8_model_init).parameters) == list(
        inspect.signature(q.quantized_model_init).parameters
    )


def test_blocks_can_be_opened_through_the_state_manager():
    recipe = DelayedScaling()
    block = Manager.autocast_enter(enabled=True, fp8_recipe=recipe)
    assert q.current().recipe is recipe
    block.__exit__(None, None, None)
    assert not Manager.is_fp8_enabled()


def test_model_init_blocks_nest_and_end_with_an_exception():
    assert not Manager.with_fp8_parameters()
    with pytest.raises(KeyError), q.quantized_model_init(preserve_high_precision_init_val=True):
        assert Manager.with_fp8_parameters()
        assert Manager.with_high_precision_init_val()
        assert q.current_model_init().recipe == q.get_default_recipe()
        with q.quantized_model_init(enabled=False):
            assert not Manager.with_fp8_parameters()
        assert Manager.with_fp8_parameters()
        raise KeyError
    assert not Manager.with_fp8_parameters()
    block = q.quantized_model_init()
    with block, pytest.raises(RuntimeError, match="active already"):
        block.__enter__()


def test_reset_closes_open_blocks():
    q.autocast().__enter__()
    q.quantized_model_init().__enter__()
    Manager.set_skip_fp8_weight_update_tensor(True)
    Manager.reset()
    assert not Manager.is_fp8_enabled()
    assert not Manager.with_fp8_parameters()
    assert Manager.get_skip_fp8_weight_update_tensor() is None


def test_the_skip_flag_is_one_device_tensor_written_in_place(device):
    Manager.set_skip_fp8_weight_update_tensor(True)
    flag = Manager.get_skip_fp8_weight_update_tensor()
    assert flag is Manager.quantization_state.skip_fp8_weight_update_tensor
    assert flag.device.type == device.type
    assert flag.tolist() == [1.0]
    Manager.set_skip_fp8_weight_update_tensor(False)
    assert flag.tolist() == [0.0]
    Manager.set_skip_fp8_weight_update_tensor(torch.ones(1, device=flag.device))
    assert flag.tolist() == [1.0]


@pytest.mark.parametrize(
    ("block", "argument", "remedy"),
    [
        (q.autocast, "fp8_recipe", "use recipe="),
        (q.autocast, "fp8_group", "use amax_reduction_group="),
        (q.autocast, "recipes", r"did you mean recipe=\?"),
        (q.autocast, "enable", r"did you mean enabled=\?"),
        (q.autocast, "zzz", "leave it out"),
        (q.fp8_autocast, "recipe", "use fp8_recipe="),
    ],
)
def test_a_keyword_of_the_other_name_raises_with_the_right_keyword(block, argument, remedy):
    with pytest.raises(TypeError, match=rf"{block.__name__}\(\) takes no {argument}=; {remedy}"):
        block(**{argument: None})
    assert q.current() == q.AutocastState()
