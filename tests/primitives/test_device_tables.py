"""Device tables: one per stream, the oldest evicted first, and those read by a captured graph kept alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.functions import weight_gradient
from transformer_engine.pytorch.primitives.attention.backends import cudnn_graph
from transformer_engine.pytorch.primitives.grouped_gemm import groups
from transformer_engine.pytorch.primitives.multi_tensor import addresses
from transformer_engine.pytorch.primitives.scale_update import triton as scale_update
from transformer_engine.pytorch.runtime import device_tables
from transformer_engine.pytorch.runtime.device_tables import DeviceTables
from transformer_engine.pytorch.utils import get_cached_ones_tensor

CPU = torch.device("cpu")


@pytest.fixture
def capturing(monkeypatch):
    """A list; while it contains an element, tables behave as during graph capture."""
    flag = []
    for module in (device_tables, addresses):
        monkeypatch.setattr(module, "is_capturing", lambda device: bool(flag))
    return flag


@pytest.fixture
def stream(monkeypatch):
    """A list whose element is the current stream's handle."""
    handle = [1]
    for module in (device_tables, addresses):
        monkeypatch.setattr(module, "stream_handle", lambda device: handle[0])
    return handle


def build(key):
    return torch.full((2,), float(key))


def test_the_oldest_value_is_evicted_first():
    tables = DeviceTables(build, 3)
    first = [tables.get(key, CPU) for key in range(3)]
    tables.get(3, CPU)
    assert len(tables) == 3
    assert tables.get(1, CPU) is first[1] and tables.get(2, CPU) is first[2]
    assert tables.get(0, CPU) is not first[0]


def test_every_stream_has_its_own_value(stream):
    tables = DeviceTables(build, 8)
    on_first = tables.get(5, CPU)
    stream[0] = 2
    on_second = tables.get(5, CPU)
    assert on_first is not on_second and torch.equal(on_first, on_second)
    stream[0] = 1
    assert tables.get(5, CPU) is on_first


def test_a_capture_reads_any_streams_value_and_builds_none(stream, capturing):
    tables = DeviceTables(build, 8)
    value = tables.get(5, CPU)
    capturing.append(True)
    stream[0] = 2
    assert tables.get(5, CPU) is value
    assert tables.get(6, CPU) is None


def test_a_captured_value_is_kept_after_many_others(capturing):
    tables = DeviceTables(build, 4)
    value = weakref.ref(tables.get(0, CPU))
    capturing.append(True)
    tables.get(0, CPU)
    capturing.clear()
    for key in range(1, 20):
        tables.get(key, CPU)
    gc.collect()
    assert value() is not None and len(tables) == 4
    capturing.append(True)
    assert tables.get(0, CPU) is value()


def _group_table():
    return groups.cached_on_device((1, 2, 3), torch.int32, CPU)


def _address_table():
    x = [torch.ones(16)]
    table = addresses.chunk_table([x], addresses.Extents([16]), 8)
    return table.table, x


def _history_table():
    histories, scales = [torch.zeros(4, 3)], [torch.ones(3)]
    return scale_update._cached_table(histories, scales), histories, scales


TABLES = {
    "group layouts": (groups, 1024, _group_table),
    "addresses of chunks": (addresses, 64, _address_table),
    "addresses of histories": (scale_update, 64, _history_table),
}


@pytest.mark.parametrize("name", TABLES)
def test_captured_tables_outlive_eviction_from_their_cache(name, capturing, monkeypatch):
    module, most, make = TABLES[name]
    fresh = DeviceTables(module._tables._build, most)
    monkeypatch.setattr(module, "_tables", fresh)
    result = make()
    key = next(iter(fresh._values))[0]
    table = fresh._values[key, 0]
    alive = weakref.ref(table if isinstance(table, torch.Tensor) else table.table)
    capturing.append(True)
    assert fresh.get(key, CPU) is table
    capturing.clear()
    del table, result
    monkeypatch.setattr(fresh, "_build", build)
    for number in range(most + 100):
        fresh.get(number, CPU)
    gc.collect()
    assert alive() is not None and len(fresh) == most


def test_captured_dummy_gradients_and_ones_are_kept(capturing):
    dummy = weakref.ref(weight_gradient._dummy_wgrads[(3, 5), torch.float32, CPU])
    ones = weakref.ref(get_cached_ones_tensor(11, torch.float32, CPU))
    capturing.append(True)
    weight_gradient.dummy_gradient((3, 5), torch.float32, CPU)
    get_cached_ones_tensor(11, torch.float32, CPU)
    capturing.clear()
    for width in range(1, 100):
        weight_gradient.dummy_gradient((width, 8), torch.float32, CPU)
        get_cached_ones_tensor(width + 20, torch.float32, CPU)
    gc.collect()
    assert dummy() is not None and ones() is not None


def test_ones_created_in_inference_mode_can_be_saved_for_backward():
    with torch.inference_mode():
        get_cached_ones_tensor(13, torch.float32, CPU)
    x = torch.randn(13, requires_grad=True)
    (x * get_cached_ones_tensor(13, torch.float32, CPU)).sum().backward()
    assert torch.equal(x.grad, torch.ones(13))


def test_ones_created_in_a_capture_are_not_reused_in_later_calls(capturing):
    capturing.append(True)
    of_graph = get_cached_ones_tensor(17, torch.float32, CPU)
    capturing.clear()
    ones = get_cached_ones_tensor(17, torch.float32, CPU)
    assert ones is not of_graph and ones is get_cached_ones_tensor(17, torch.float32, CPU)


def test_step_tables_for_ragged_offsets_are_never_evicted():
    first = cudnn_graph._steps(CPU, (64,))
    for step in range(1000):
        cudnn_graph._steps(CPU, (step, 1))
    assert cudnn_graph._steps(CPU, (64,)) is first


@pytest.mark.gpu
def test_a_recorded_grouped_layer_replays_after_its_tables_have_left_the_cache(device):
    layer = te.GroupedLinear(4, 256, 256, params_dtype=torch.bfloat16, device=device)
    for i in range(4):
        weight = getattr(layer, f"weight{i}")
        weight.main_grad = torch.zeros(256, 256, device=device)
    layer.fuse_wgrad_accumulation = True
    x = torch.randn(512, 256, dtype=torch.bfloat16, device=device, requires_grad=True)
    splits = [128, 64, 192, 128]
    layer(x, splits).sum().backward()
    expected = [getattr(layer, f"weight{i}").main_grad.clone() for i in range(4)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            x.grad = None
            layer(x, splits).sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x, splits).sum().backward()
    for number in range(1100):
        groups.cached_on_device((number, 1, 2, 3), torch.int32, device)
    churn = [torch.full((64,), -1, dtype=torch.int64, device=device) for _ in range(4096)]
    for i in range(4):
        getattr(layer, f"weight{i}").main_grad.zero_()
    graph.replay()
    for i in range(4):
        assert torch.equal(getattr(layer, f"weight{i}").main_grad, expected[i])
    del churn
