"""When saved tensors leave the device and return, and which tensors move, on a link that logs its copies."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tests.support.link import RecordedLink
from transformer_engine.pytorch.cpu_offload import (
    DefaultOffloadSynchronizer,
    ManualOffloadSynchronizer,
    OffloadableLayerState,
    get_cpu_offload_context,
    is_cpu_offload_enabled,
    mark_activation_offload,
    mark_not_offload,
    start_offload,
)
from transformer_engine.pytorch.offload import marks
from transformer_engine.pytorch.offload.hooks import OffloadContext
from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer

LARGE = (64, 64)


@pytest.fixture(autouse=True)
def _every_size_moves(monkeypatch):
    monkeypatch.setattr(marks, "SMALLEST", 1024)


@pytest.fixture
def link():
    return RecordedLink()


def _state(link, **options):
    return OffloadableLayerState(None, link=link, **options)


def _there_and_back(state):
    state.start_offload()
    state.release_activation_forward_gpu_memory()
    state.start_reload()


def _stages(synchronizer):
    return [synchronizer.layer_states[i].state for i in range(synchronizer.num_layers)]


# One layer.


def test_a_tensor_returns_from_the_host_unchanged(link):
    state, x = _state(link), torch.randn(LARGE)
    expected = x.clone()
    pushed = state.push_tensor(x)
    assert isinstance(pushed, int)
    state.start_offload()
    assert state.get_offloaded_total_size_mb() == x.nbytes / 2**20
    state.release_activation_forward_gpu_memory()
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None
    state.start_reload()
    assert torch.equal(state.pop_tensor(pushed), expected)
    state.release_all_memory()
    assert state.state == "not_offloaded"
    assert link.log == ["buffer", "out", "wait", "back", "wait"]


def test_unread_memory_is_freed_after_its_copy(link):
    state = _state(link)
    state.push_tensor(torch.randn(LARGE))
    _there_and_back(state)
    state.release_all_memory()
    assert link.log == ["buffer", "out", "wait", "back", "wait"]


def test_a_tensor_and_its_views_are_copied_once(link):
    state, x = _state(link), torch.randn(LARGE)
    pushed = [
        state.push_tensor(x),
        state.push_tensor(x),
        state.push_tensor(x.t()),
        state.push_tensor(x.view(-1)),
    ]
    _there_and_back(state)
    first, second, transposed, flat = (state.pop_tensor(p) for p in pushed)
    assert link.copied == x.nbytes
    assert first.data_ptr() == second.data_ptr() == transposed.data_ptr()
    assert torch.equal(transposed, x.t())
    assert transposed.stride() == (1, 64)
    assert torch.equal(flat, x.view(-1))


def test_parts_of_one_tensor_share_a_copy_where_their_maker_asks_for_it(link):
    context = OffloadContext(ManualOffloadSynchronizer(1, link=link))
    qkv = torch.randn(3, 64, 64)
    parts = qkv.unbind(0)
    with context:
        start_offload(*parts, offload_base_tensor=True)
        state = context.offload_synchronizer.layer_states[0]
        pushed = [state.push_tensor(part) for part in parts]
    _there_and_back(state)
    assert link.copied == qkv.nbytes
    assert all(
        torch.equal(state.pop_tensor(p), part) for p, part in zip(pushed, parts, strict=True)
    )


def test_a_view_with_gaps_moves_its_base(link):
    state, qkv = _state(link), torch.randn(64, 3, 64)
    parts = qkv.unbind(1)
    pushed = [state.push_tensor(part) for part in parts]
    _there_and_back(state)
    assert link.copied == qkv.nbytes
    assert all(
        torch.equal(state.pop_tensor(p), part) for p, part in zip(pushed, parts, strict=True)
    )


def test_values_in_another_order_come_back_in_it(link):
    state = _state(link)
    x = torch.empty_strided((4, 2, 16, 32), (64, 32, 256, 1)).normal_()
    pushed = state.push_tensor(x)
    _there_and_back(state)
    repeated = state.pop_tensor(pushed)
    assert torch.equal(repeated, x)
    assert repeated.stride() == x.stride()


def test_a_tensor_whose_memory_has_gaps_stays_and_the_reason_is_reported(link):
    x = torch.empty_strided((64, 64), (128, 1)).normal_()
    with pytest.warns(UserWarning, match="its memory has gaps"):
        assert _state(link).push_tensor(x) is x


@pytest.mark.parametrize("saved", ["parameter", "view of a parameter", "marked", "small"])
def test_a_tensor_that_stays_is_returned_itself(saved, link):
    state, weight = _state(link), torch.nn.Parameter(torch.randn(LARGE))
    x = torch.randn(LARGE)
    mark_not_offload(x)
    tensor = {
        "parameter": weight,
        "view of a parameter": weight.t(),
        "marked": x,
        "small": torch.randn(8),
    }[saved]
    assert state.push_tensor(tensor) is tensor


def test_a_weight_is_marked_by_the_first_forms_call(link):
    x = torch.randn(LARGE)
    mark_activation_offload(x)
    assert isinstance(_state(link).push_tensor(x), int)
    mark_activation_offload(x, offload=False)
    assert _state(link).push_tensor(x) is x


def test_the_parts_of_a_quantized_tensor_move_and_make_it_again(link):
    quantizer = Float8CurrentScalingQuantizer(torch.float8_e4m3fn, device="cpu")
    x = quantizer(torch.randn(LARGE))
    state = _state(link)
    pushed = state.push_tensor(x)
    _there_and_back(state)
    repeated = state.pop_tensor(pushed)
    assert type(repeated) is type(x)
    assert torch.equal(repeated.dequantize(), x.dequantize())
    assert 0 < link.copied <= 2 * x.numel()


def test_a_tensor_is_copied_after_the_moment_its_maker_names(link):
    context = OffloadContext(ManualOffloadSynchronizer(1, link=link))
    x = torch.randn(LARGE)
    with context:
        start_offload(x)
    ready = x.start_reload_event
    for _ in range(5):
        link.mark()
    records = []
    link.to_host = lambda values, buffer, after: records.append(after)
    state = _state(link)
    state.push_tensor(x)
    state.start_offload()
    assert records == [ready]


@pytest.mark.parametrize(
    "steps",
    [
        ["release_activation_forward_gpu_memory"],
        ["start_reload"],
        ["start_offload", "start_offload"],
        ["start_offload", "start_reload"],
        ["start_offload", "release_activation_forward_gpu_memory", "start_offload"],
    ],
)
def test_a_step_out_of_order_is_rejected(steps, link):
    state = _state(link)
    state.push_tensor(torch.randn(LARGE))
    for step in steps[:-1]:
        getattr(state, step)()
    with pytest.raises(RuntimeError, match="Invalid state"):
        getattr(state, steps[-1])()


def test_retained_buffers_are_used_again_and_fit_one_shape(link):
    state = _state(link, retain_pinned_cpu_buffers=True)
    for _ in range(3):
        state.push_tensor(torch.randn(LARGE))
        state.start_offload()
        state.release_activation_forward_gpu_memory()
        state.start_reload()
        state.release_all_memory()
    assert link.log.count("buffer") == 1
    state.push_tensor(torch.randn(128, 64))
    with pytest.raises(ValueError, match=r"saved 4096 .* now saves 8192"):
        state.start_offload()


# Several layers.


def test_four_layers_of_which_two_are_offloaded_follow_the_drawing(link):
    synchronizer = DefaultOffloadSynchronizer(4, 2, link=link)
    at_home, out, gone, back = (
        "not_offloaded",
        "offload_started",
        "offload_finished",
        "reload_started",
    )
    stages = []
    pushed = []
    for _ in range(4):
        synchronizer.fwd_step()
        pushed.append(synchronizer.push_tensor(torch.randn(LARGE)))
        stages.append(_stages(synchronizer)[:2])
    assert stages == [[at_home, at_home], [out, at_home], [gone, out], [gone, gone]]
    stages = []
    for layer in (3, 2, 1, 0):
        synchronizer.bwd_step(layer)
        synchronizer.pop_tensor(pushed[layer])
        stages.append(_stages(synchronizer)[:2])
    assert stages == [[gone, gone], [gone, back], [back, back], [back, at_home]]
    synchronizer.finish_part_of_bwd()
    assert _stages(synchronizer) == [at_home] * 4


@pytest.mark.parametrize(("layers", "offloaded"), [(4, 2), (8, 6), (8, 7), (5, 1), (3, 0)])
def test_at_no_time_are_more_layers_on_the_device_than_are_not_offloaded(layers, offloaded, link):
    synchronizer = DefaultOffloadSynchronizer(layers, offloaded, link=link)

    def run_on_device():
        groups = [
            state.fwd_gpu_tensor_group.tensor_list + state.bwd_gpu_tensor_group.tensor_list
            for state in synchronizer.layer_states.values()
        ]
        return sum(len(group) > 0 for group in groups)

    contents: dict[int, torch.Tensor] = {}
    peak = 0
    for layer in range(layers):
        synchronizer.fwd_step()
        pushed = synchronizer.push_tensor(torch.randn(LARGE))
        if isinstance(pushed, torch.Tensor):
            contents[layer] = pushed
        peak = max(peak, run_on_device() + len(contents))
    for layer in reversed(range(layers)):
        contents.pop(layer + 1, None)
        synchronizer.bwd_step(layer)
        peak = max(peak, run_on_device() + len(contents))
    assert peak == layers - offloaded


def test_a_step_without_a_backward_leaves_nothing_to_the_next(link):
    synchronizer = DefaultOffloadSynchronizer(3, 1, link=link)
    for _ in range(3):
        synchronizer.fwd_step()
        old = synchronizer.push_tensor(torch.randn(LARGE))
    first = None
    for i in range(3):
        synchronizer.fwd_step()
        if i == 0:
            first = synchronizer.push_tensor(torch.ones(LARGE))
    synchronizer.bwd_step(1)
    assert torch.equal(synchronizer.pop_tensor(first), torch.ones(LARGE))
    assert isinstance(old, torch.Tensor)


def test_a_backward_after_a_later_forward_names_the_freed_tensors(link):
    synchronizer = DefaultOffloadSynchronizer(2, 1, link=link)
    synchronizer.fwd_step()
    pushed = synchronizer.push_tensor(torch.randn(LARGE))
    synchronizer.fwd_step()
    synchronizer.fwd_step()
    with pytest.raises(RuntimeError, match="the saved tensors of layer 0 are gone"):
        synchronizer.pop_tensor(pushed)


def test_a_manual_layer_moves_on_request_only(link):
    synchronizer = ManualOffloadSynchronizer(2, link=link)
    saved = []
    for _ in range(2):
        synchronizer.fwd_step()
        saved.append(synchronizer.push_tensor(torch.full(LARGE, float(len(saved)))))
    synchronizer.start_offload_layer(0)
    assert _stages(synchronizer) == ["offload_started", "not_offloaded"]
    synchronizer.release_activation_forward_gpu_memory(0)
    synchronizer.start_reload_layer(0)
    assert [float(synchronizer.pop_tensor(p)[0, 0]) for p in saved] == [0.0, 1.0]
    with pytest.raises(RuntimeError, match="finds the layer not_offloaded, not offload_started"):
        synchronizer.release_activation_forward_gpu_memory(1)
    with pytest.raises(ValueError, match="layers 0 to 1"):
        synchronizer.start_offload_layer(2)


# The context.


def test_a_disabled_context_is_one_that_can_be_entered_again():
    context, synchronize = get_cpu_offload_context()
    x = torch.ones(2)
    for _ in range(2):
        with context:
            assert not is_cpu_offload_enabled()
    assert synchronize(x) is x
    assert len(get_cpu_offload_context(manual_synchronization=True)) == 3
    assert get_cpu_offload_context(manual_synchronization=True)[2] is None


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"offload_activations": False}, "neither activations nor weights"),
        ({"num_layers": 4, "model_layers": 4}, "offload fewer layers"),
        ({"offload_stream": object(), "model_layers": 3}, "manual_synchronization=True"),
    ],
)
def test_an_invalid_call_is_rejected(keywords, message):
    with pytest.raises(ValueError, match=message):
        get_cpu_offload_context(enabled=True, **keywords)


def test_weights_are_deprecated_and_the_last_layer_but_one_hides_no_copy():
    with pytest.warns(DeprecationWarning, match="weights stay"):
        assert (
            len(
                get_cpu_offload_context(
                    enabled=True, offload_activations=False, offload_weights=True
                )
            )
            == 2
        )
    with pytest.warns(UserWarning, match="offload one layer fewer"):
        get_cpu_offload_context(enabled=True, num_layers=2, model_layers=3)


def test_the_context_reports_its_position(link):
    context = OffloadContext(DefaultOffloadSynchronizer(2, 1, link=link))
    with pytest.raises(RuntimeError, match="before any layer"):
        context.synchronize(torch.ones(2, requires_grad=True) * 2)
    with context:
        assert is_cpu_offload_enabled()
        assert context.inside_context
        with pytest.raises(RuntimeError, match="open already"):
            context.__enter__()
        with pytest.raises(RuntimeError, match="inside of the context"):
            context.synchronize(torch.ones(2, requires_grad=True) * 2)
    assert not is_cpu_offload_enabled()
    with pytest.raises(ValueError, match="has no backward"):
        context.synchronize(torch.ones(2, requires_grad=True))


def test_a_step_that_raises_begins_again_with_the_first_layer(link):
    context = OffloadContext(DefaultOffloadSynchronizer(3, 1, link=link))
    with context:
        pass
    with pytest.raises(KeyError), context:
        raise KeyError
    with context:
        assert context.current_layer == 0
