import copy
import math
import pickle

import pytest
import torch
import torch.distributed

import transformer_engine.pytorch as te
from tests.distributed.ranks import run_on_ranks
from transformer_engine.common.formats import FLOAT32_MAX
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format, Recipe
from transformer_engine.pytorch import quantization as q
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager
from transformer_engine.pytorch.quantization import delayed_scaling


def reference_step(history, scale, algorithm, fp8_max, margin, keep_idle):
    """One column by plain Python floats, step by step as the update is defined."""
    latest = history[0]
    if keep_idle and latest == 0:
        return history, scale
    amax = max(history) if algorithm == "max" else latest
    if amax > 0 and math.isfinite(amax):
        scale = fp8_max / amax / 2**margin
        scale = FLOAT32_MAX if scale > FLOAT32_MAX else scale
    rolled = history[1:] + history[:1]
    return [0.0, *rolled[1:]], scale


def meta(recipe, device="cpu", slots=3, group=None):
    state = {
        "recipe": recipe,
        "fp8_group": group,
        "scaling_fwd": q.RecipeState.create(
            recipe, mode="forward", num_quantizers=slots, device=device
        ),
        "scaling_bwd": q.RecipeState.create(
            recipe, mode="backward", num_quantizers=slots, device=device
        ),
    }
    Manager.add_fp8_tensors_to_global_buffer(state)
    return state


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("unfused", ["0", "1"])
def test_updates_follow_the_definition(monkeypatch, device, algorithm, margin, length, unfused):
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", unfused)
    recipe = DelayedScaling(margin=margin, amax_history_len=length, amax_compute_algo=algorithm)
    module = meta(recipe, device, slots=4)
    for key, fp8_max in (("scaling_fwd", 448.0), ("scaling_bwd", 57344.0)):
        state = module[key]
        columns = [([0.0] * length, 1.0) for _ in range(4)]
        for step in range(7):
            amax = torch.tensor([2.0**step, 0.0 if step % 2 else 3.0, 0.0, 1.0 / (step + 1)])
            state.amax_history[0].copy_(amax)
            columns = [([a.item(), *h[1:]], s) for a, (h, s) in zip(amax, columns, strict=True)]
            Manager.reduce_and_update_fp8_tensors(forward=key == "scaling_fwd")
            columns = [
                reference_step(h, s, algorithm, fp8_max, margin, unfused == "0") for h, s in columns
            ]
            torch.testing.assert_close(
                state.amax_history.cpu(), torch.tensor([h for h, _ in columns]).T, rtol=0, atol=0
            )
            torch.testing.assert_close(
                state.scale.cpu(), torch.tensor([s for _, s in columns]), rtol=1e-7, atol=0
            )


def test_the_value_just_used_lands_in_the_last_row(device):
    state = meta(DelayedScaling(amax_history_len=3), device, slots=1)["scaling_fwd"]
    for amax in (1.0, 2.0, 4.0):
        state.amax_history[0].fill_(amax)
        Manager.reduce_and_update_fp8_tensors(forward=True)
    assert state.amax_history.flatten().tolist() == [0.0, 2.0, 4.0]
    assert state.scale.tolist() == [448.0 / 4.0]


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        (0.0, 5.0),
        (math.inf, 5.0),
        (math.nan, 5.0),
        (-1.0, 5.0),
        (448.0, 1.0),
        (1e-38, FLOAT32_MAX),
        (896.0, 0.5),
    ],
)
def test_a_scale_is_kept_without_a_usable_amax_and_never_overflows(device, amax, scale):
    new = q._default_sf_compute(
        torch.tensor([amax], device=device), torch.tensor([5.0], device=device), 448.0, 0
    )
    assert new.tolist() == [torch.tensor(scale).item()]


def test_an_idle_tensor_keeps_history_and_scale_unless_unfused(monkeypatch, device):
    for unfused, expected in (("0", [0.0, 0.0, 8.0]), ("1", [0.0, 8.0, 0.0])):
        monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", unfused)
        Manager.reset()
        state = meta(DelayedScaling(amax_history_len=3), device, slots=1)["scaling_fwd"]
        state.amax_history[0].fill_(8.0)
        Manager.reduce_and_update_fp8_tensors()
        Manager.reduce_and_update_fp8_tensors()
        assert state.amax_history.flatten().tolist() == expected
        assert state.scale.tolist() == [56.0]


def test_the_literal_update_works_on_one_state_in_place(device):
    history = torch.tensor([[4.0, 0.0], [1.0, 2.0], [8.0, 0.0]], device=device)
    scale = torch.ones(2, device=device)
    addresses = history.data_ptr(), scale.data_ptr()
    q._amax_and_scale_update(history, scale, 448.0, DelayedScaling(amax_history_len=3))
    assert history.tolist() == [[0.0, 0.0], [8.0, 0.0], [4.0, 0.0]]
    assert scale.tolist() == [56.0, 224.0]
    assert addresses == (history.data_ptr(), scale.data_ptr())


def test_callables_decide_amax_and_scale(device):
    recipe = DelayedScaling(
        amax_history_len=2,
        amax_compute_algo=lambda history: history.sum(dim=0),
        scaling_factor_compute_algo=lambda amax, old, fp8_max, recipe: old + fp8_max / amax,
    )
    state = meta(recipe, device, slots=1)["scaling_fwd"]
    for step in (1, 2):
        state.amax_history[0].fill_(4.0)
        Manager.reduce_and_update_fp8_tensors()
        assert state.scale.tolist() == [{1: 113.0, 2: 169.0}[step]]


def test_a_callable_amax_alone_still_uses_the_standard_scale(device):
    recipe = DelayedScaling(amax_history_len=2, amax_compute_algo=lambda history: 2 * history[0])
    state = meta(recipe, device, slots=1)["scaling_fwd"]
    state.amax_history[0].fill_(4.0)
    Manager.reduce_and_update_fp8_tensors()
    assert state.scale.tolist() == [56.0]


def test_states_of_different_history_length_share_an_update(device):
    scales = [torch.ones(n, device=device) for n in (2, 1)]
    histories = [torch.zeros(3, 2, device=device), torch.zeros(5, 1, device=device)]
    for history in histories:
        history[0] = 7.0
    q.update_scales(histories, scales, 448.0, DelayedScaling())
    assert [s.tolist() for s in scales] == [[64.0, 64.0], [64.0]]
    assert [h[-1, 0].item() for h in histories] == [7.0, 7.0]


def test_leaving_the_outermost_enabled_block_updates_forward_scales_only(device):
    recipe = DelayedScaling(amax_history_len=2)
    module = meta(recipe, device)
    for key in ("scaling_fwd", "scaling_bwd"):
        module[key].amax_history[0].fill_(7.0)
    with q.autocast(enabled=False), q.autocast(recipe=recipe):
        with q.autocast(recipe=recipe):
            pass
        assert module["scaling_fwd"].scale.tolist() == [1.0] * 3
    assert module["scaling_fwd"].scale.tolist() == [64.0] * 3
    assert module["scaling_bwd"].scale.tolist() == [1.0] * 3
    Manager.reduce_and_update_fp8_tensors(forward=False)
    assert module["scaling_bwd"].scale.tolist() == [57344.0 / 7] * 3


@pytest.mark.parametrize("case", ["no_grad", "graph", "disabled", "exception"])
def test_no_update_without_gradients_in_a_graph_when_disabled_or_after_an_exception(case):
    recipe = DelayedScaling()
    module = meta(recipe)
    module["scaling_fwd"].amax_history[0].fill_(7.0)
    block = q.autocast(enabled=case != "disabled", recipe=recipe, _graph=case == "graph")
    with torch.set_grad_enabled(case != "no_grad"):
        if case == "exception":
            with pytest.raises(KeyError), block:
                raise KeyError
        else:
            with block:
                pass
    assert module["scaling_fwd"].scale.tolist() == [1.0] * 3


def test_a_pool_belongs_to_a_direction_a_recipe_and_a_group():
    a, b = DelayedScaling(margin=1), DelayedScaling(margin=2)
    keys = {
        Manager.get_key_in_buffer(forward, recipe, None)
        for forward in (True, False)
        for recipe in (a, b)
    }
    assert len(keys) == 4
    assert Manager.get_key_in_buffer(True, a, None) == Manager.get_key_in_buffer(
        True, DelayedScaling(margin=1), None
    )
    for forward in (True, False):
        key = Manager.get_key_in_buffer(forward, a, None)
        assert Manager.split_key_in_buffer(key) == (
            forward,
            Manager.get_unique_autocast_key(a, None),
        )
    assert Manager.get_buffer_info() == "buffer_index_and_autocast_key"
    assert (Manager.get_meta_tensor_key(True), Manager.get_meta_tensor_key(False)) == (
        "scaling_fwd",
        "scaling_bwd",
    )
    assert (Manager.get_fwd_bwd_key(True), Manager.get_fwd_bwd_key(False)) == (
        "forward",
        "backward",
    )


def test_registering_again_changes_nothing_and_another_group_moves_the_state():
    recipe = DelayedScaling()
    module = meta(recipe)
    Manager.add_fp8_tensors_to_global_buffer(module)
    assert [len(pool.states) for pool in delayed_scaling.registry.pools.values()] == [1, 1]
    module["fp8_group"] = object()
    Manager.add_fp8_tensors_to_global_buffer(module)
    assert [len(pool.states) for pool in delayed_scaling.registry.pools.values()] == [1, 1]
    delayed_scaling.unregister(module["scaling_fwd"])
    assert sum(len(pool.states) for pool in delayed_scaling.registry.pools.values()) == 1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copied_module_registers_itself_and_is_updated_separately(duplicate):
    original = meta(DelayedScaling(amax_history_len=2))
    twin = duplicate(original)
    Manager.add_fp8_tensors_to_global_buffer(twin)
    twin["scaling_fwd"].amax_history[0].fill_(7.0)
    Manager.reduce_and_update_fp8_tensors()
    assert twin["scaling_fwd"].scale.tolist() == [64.0] * 3
    assert original["scaling_fwd"].scale.tolist() == [1.0] * 3


def test_after_a_reset_a_module_registers_again():
    module = meta(DelayedScaling(amax_history_len=2))
    Manager.reset()
    Manager.add_fp8_tensors_to_global_buffer(module)
    module["scaling_fwd"].amax_history[0].fill_(7.0)
    Manager.reduce_and_update_fp8_tensors()
    assert module["scaling_fwd"].scale.tolist() == [64.0] * 3


def test_recomputation_sees_the_values_of_its_first_forward_pass_and_leaves_the_later_ones(device):
    module = meta(DelayedScaling(amax_history_len=2), device)
    state = module["scaling_fwd"]
    addresses = state.scale.data_ptr(), state.amax_history.data_ptr()
    for scale in (2.0, 3.0):
        state.scale.fill_(scale)
        state.amax_history.fill_(scale)
        Manager.copy_forward_fp8_meta_tensors_for_recompute(module)
    state.scale.fill_(9.0)
    state.amax_history.fill_(9.0)
    for scale in (2.0, 3.0):
        Manager.get_old_fp8_meta_tensors_for_recompute(module)
        assert module["scaling_fwd"] is state
        assert state.scale.tolist() == [scale] * 3
        assert state.amax_history[1].tolist() == [scale] * 3
        state.amax_history[0].fill_(100.0)
        Manager.restore_fp8_meta_tensors(module)
        assert state.scale.tolist() == [9.0] * 3
        assert state.amax_history.unique().tolist() == [9.0]
    assert addresses == (state.scale.data_ptr(), state.amax_history.data_ptr())
    with pytest.raises(RuntimeError, match="no forward values"):
        Manager.get_old_fp8_meta_tensors_for_recompute(module)


def _reduce_amaxes(device) -> list[list[list[float]]]:
    group = torch.distributed.group.WORLD
    rank = torch.distributed.get_rank()
    outcome = []
    for reduce_amax, algorithm in (
        (True, "max"),
        (False, "max"),
        (True, lambda history: history[0]),
    ):
        Manager.reset()
        recipe = DelayedScaling(
            amax_history_len=2, reduce_amax=reduce_amax, amax_compute_algo=algorithm
        )
        modules = [meta(recipe, device, group=group, slots=n) for n in (1, 2)]
        for i, module in enumerate(modules):
            module["scaling_fwd"].amax_history[0].fill_(7.0 * (rank + 1) * (i + 1))
        with q.autocast(recipe=recipe, amax_reduction_group=group):
            pass
        outcome.append([module["scaling_fwd"].scale.tolist() for module in modules])
    return outcome


def test_amaxes_are_reduced_over_the_group_when_the_recipe_says_so(tmp_path):
    results = run_on_ranks(_reduce_amaxes, 2, tmp_path)
    reduced, alone = [[32.0], [16.0, 16.0]], [[64.0], [32.0, 32.0]]
    assert results[0] == [reduced, alone, reduced]
    assert results[1] == [reduced, reduced, reduced]


def test_e4m3_has_one_maximum_for_both_directions(device):
    module = meta(DelayedScaling(fp8_format=Format.E4M3, amax_history_len=2), device)
    module["scaling_bwd"].amax_history[0].fill_(7.0)
    Manager.reduce_and_update_fp8_tensors(forward=False)
    assert module["scaling_bwd"].scale.tolist() == [64.0] * 3


def attention_step(layer: te.DotProductAttention, used: Recipe, device: str) -> torch.Tensor:
    """Output and query gradient from one training step."""
    q, k, v = (
        torch.randn(16, 2, 4, 32, generator=torch.Generator().manual_seed(i)).to(device)
        for i in range(3)
    )
    q.requires_grad_()
    with te.autocast(recipe=used):
        output = layer(q, k, v)
    output.square().sum().backward()
    return torch.cat([output.flatten().cpu(), q.grad.flatten().cpu()])


@pytest.mark.gpu
@pytest.mark.parametrize("used", [DelayedScaling(fp8_dpa=True), Float8CurrentScaling(fp8_dpa=True)])
def test_scales_are_on_the_device_of_the_input(used: Recipe):
    """On a machine with a GPU, an attention without parameters takes inputs of the CPU, the GPU and the CPU again."""
    followed, alone = te.DotProductAttention(4, 32), te.DotProductAttention(4, 32)
    for device in ("cpu", "cuda", "cpu"):
        result = attention_step(followed, used, device)
        if device == "cuda":
            attention_step(alone, used, "cpu")  # as many scale updates
        else:
            assert torch.equal(result, attention_step(alone, used, "cpu"))
        state = followed.fp8_meta["scaling_fwd"]
        assert state.device.type == device
        assert all(scaling.scale.device.type == device for scaling in state.delayed_states)


def test_scales_move_with_their_values_to_another_device():
    """A device without a GPU: the meta device, and back with the scales of a new state."""
    layer, used = te.DotProductAttention(4, 32), DelayedScaling(fp8_dpa=True)
    attention_step(layer, used, "cpu")
    scale = layer.fp8_meta["scaling_fwd"].scale
    assert float(scale.max()) > 1
    layer.follow_device(torch.device("cpu"))
    layer.numerics.renew(layer, used, None)
    assert layer.fp8_meta["scaling_fwd"].scale is scale
    layer.follow_device(torch.device("meta"))
    layer.numerics.renew(layer, used, None)
    assert layer.fp8_meta["scaling_fwd"].scale.is_meta
    assert layer.fp8_meta["scaling_bwd"].amax_history.is_meta
