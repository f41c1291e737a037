"""The life of a debug session: steps, micro-batches, failures, copies, ranks, threads, and the end."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType

import nvdlfw_inspect.api as debug_api
import pytest
import torch
from nvdlfw_inspect.registry import Registry

import transformer_engine.debug
import transformer_engine.pytorch as te
from tests.debug.sessions import TENSORS, quantize_float8, session
from tests.distributed.ranks import run_on_ranks
from tests.support.layers import RECIPES
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.debug.features import next_enabled_iter
from transformer_engine.debug.features.api import TEConfigAPIMapper
from transformer_engine.debug.features.utils.stats_computation import MOMENTS, Fields, moments
from transformer_engine.debug.pytorch.debug_quantization import (
    HIGH_PRECISION,
    STANDARD_QUANTIZE,
    DebugQuantizer,
)
from transformer_engine.debug.pytorch.debug_state import TEDebugState
from transformer_engine.pytorch.module import numerics
from transformer_engine.pytorch.quantization.autocast import OUTSIDE

MAXIMA = {"LogTensorStats": {"tensors": ["activation"], "stats": ["max"]}}


def maxima(**settings: object) -> dict[str, dict[str, object]]:
    return {"LogTensorStats": MAXIMA["LogTensorStats"] | settings}


@pytest.mark.parametrize(
    "settings",
    [
        {"freq": 7, "start_step": 3, "end_step": 150},
        {"start_end_list": [[5, 6], [40, 41], [199, 300]]},
        {"freq": 20, "start_end_list": [[0, 19], [40, 100]]},
    ],
)
def test_two_hundred_steps_log_the_steps_of_the_configuration(settings: dict, tmp_path: Path):
    layer = te.Linear(16, 16, device="cpu", name="layer")
    x = torch.randn(16, 16)
    plain = layer(x)
    with session(tmp_path, maxima(**settings)) as log:
        for step in range(200):
            y = layer(x + step)
            observed = layer.numerics.observer is not None
            assert observed == next_enabled_iter(settings, step)[0]
            assert torch.equal(y, layer(x + step))
            debug_api.step()
    spans = settings.get("start_end_list") or [[settings["start_step"], settings["end_step"]]]
    expected = [
        step
        for step in range(200)
        if step % settings.get("freq", 1) == 0 and any(start <= step <= end for start, end in spans)
    ]
    assert log.iterations("layer_activation_max") == expected
    for step in expected:
        assert log.values["layer_activation_max", step] == pytest.approx((x + step).max().item())
    assert torch.equal(layer(x), plain) and layer.numerics.observer is None


def test_a_session_may_begin_after_the_layers_and_end_before_them(tmp_path: Path):
    layer = te.LayerNormMLP(64, 96, device="cpu")
    x = torch.randn(32, 64)
    with te.autocast(recipe=RECIPES["current"]):
        quantized = layer(x)
    for pattern in ("fc1$", "nothing"):
        with session(tmp_path, {"DisableQuantizationLayer": {}}, pattern):
            with te.autocast(recipe=RECIPES["current"]):
                y = layer(x)
            assert torch.equal(y, quantized) == (pattern == "nothing")
            assert TEDebugState.debug_enabled
        with te.autocast(recipe=RECIPES["current"]):
            assert torch.equal(layer(x), quantized)
        assert not TEDebugState.initialize()


def python_calls(layer: torch.nn.Module, x: torch.Tensor) -> list[tuple[str, str]]:
    """Return file and name of every Python function that a warm forward and backward pass calls, in order."""
    calls: list[tuple[str, str]] = []

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls.append((frame.f_code.co_filename, frame.f_code.co_name))

    def step() -> None:
        with te.autocast(recipe=RECIPES["current"]):
            y = layer(x)
        y.sum().backward()

    for _ in range(4):
        step()
    gc.disable()  # finalizers are Python calls too
    sys.setprofile(count)  # a backward pass on a CPU runs in the calling thread
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@pytest.mark.parametrize("make", [te.Linear, te.LayerNormMLP])
def test_warm_passes_make_the_same_calls_before_and_after_a_session(make: type, tmp_path: Path):
    layer, x = make(64, 96, device="cpu"), torch.randn(32, 64, requires_grad=True)
    before = python_calls(layer, x)
    with session(tmp_path, MAXIMA):
        during = python_calls(layer, x)
    assert python_calls(layer, x) == before
    hooks = [
        path for path, _ in before if re.search("transformer_engine/debug/|nvdlfw_inspect", path)
    ]
    assert not hooks and len(during) > len(before) > 10


def test_names_of_layers(tmp_path: Path):
    with session(tmp_path, MAXIMA) as log:
        model = te.TransformerLayer(64, 96, 4, name="block", device="cpu")
        experts = te.GroupedLinear(2, 64, 64, device="cpu", name="experts")
        unnamed = te.Linear(64, 64, device="cpu")
        x = torch.randn(8, 2, 64)
        model(x), experts(x, [4, 12]), unnamed(x)
        debug_api.step()
    names = {name.removesuffix("_activation_max") for name, _ in log.values}
    # The numbering of unnamed layers includes layers that other tests of the process keep alive.
    names = {re.sub(r"^Layer_\d+$", "Layer_N", name) for name in names}
    assert names == {
        "block.self_attention.layernorm_qkv",
        "block.self_attention.proj",
        "block.layernorm_mlp.fc1",
        "block.layernorm_mlp.fc2",
        "experts.gemm_0",
        "experts.gemm_1",
        "Layer_N",
    }


def test_cached_weights_follow_the_plan(tmp_path: Path):
    layer = te.Linear(64, 96, device="cpu", name="layer", bias=False)
    x = torch.randn(32, 64, requires_grad=True)
    expected = x @ layer.weight.t()
    features = {
        "DisableQuantizationGEMM": {"gemms": ["fprop"]},
        "LogFp8TensorStats": {"tensors": ["weight"], "stats": ["mse_columnwise"]},
    }
    with session(tmp_path, features) as log:
        for first in (True, False):
            with te.autocast(recipe=RECIPES["mxfp8"]):
                y = layer(x, is_first_microbatch=first)
            assert torch.equal(y, expected)
            y.sum().backward()
        debug_api.step()
    assert log.values["layer_weight_mse_columnwise", 0] == pytest.approx(
        (layer.weight.t() - quantize_float8(layer.weight.detach().t().contiguous(), 32)[0])
        .square()
        .mean()
        .item(),
        rel=1e-5,
    )


def test_recomputed_tensors_count_once_and_are_replaced_both_times(tmp_path: Path):
    layer = te.Linear(64, 96, device="cpu", name="layer")
    x = torch.randn(32, 64, requires_grad=True)
    features = {"LogTensorStats": {"tensors": TENSORS, "stats": ["l1_norm"]}}
    with session(tmp_path, features) as log:
        with te.autocast(recipe=Float8CurrentScaling()):
            y = te.checkpoint(layer, x)
        y.sum().backward()
        debug_api.step()
    assert log.values["layer_activation_l1_norm", 0] == pytest.approx(
        x.abs().sum().item(), rel=1e-6
    )
    assert log.values["layer_output_l1_norm", 0] == pytest.approx(y.abs().sum().item(), rel=1e-6)


def test_weight_gradients_that_are_accumulated_are_inspected_alone(tmp_path: Path):
    layer = te.Linear(64, 96, device="cpu", name="layer", fuse_wgrad_accumulation=True, bias=False)
    layer.weight.main_grad = torch.full((96, 64), 3.0)
    x, dy = torch.randn(32, 64), torch.randn(32, 96)
    with session(tmp_path, {"LogTensorStats": {"tensors": ["wgrad"], "stats": ["l1_norm"]}}) as log:
        layer(x).backward(dy)
        debug_api.step()
    gradient = dy.t() @ x
    torch.testing.assert_close(layer.weight.main_grad, 3.0 + gradient)
    assert log.values["layer_wgrad_l1_norm", 0] == pytest.approx(
        gradient.abs().sum().item(), rel=1e-5
    )


def test_delayed_weight_gradients_are_rejected(tmp_path: Path):
    layer = te.Linear(64, 96, device="cpu", name="layer", delay_wgrad_compute=True)
    with (
        session(tmp_path, MAXIMA),
        pytest.raises(RuntimeError, match="layer has delay_wgrad_compute"),
    ):
        layer(torch.randn(8, 64))
    layer(torch.randn(8, 64))


def test_quantized_parameters_are_inspected_and_decoded(tmp_path: Path):
    with te.quantized_model_init(recipe=RECIPES["mxfp8"]):
        layer = te.Linear(64, 96, device="cpu", name="layer", bias=False)
    x = torch.randn(32, 64)
    features = {
        "DisableQuantizationGEMM": {"gemms": ["fprop"]},
        "LogTensorStats": {"tensors": ["weight"], "stats": ["max"]},
    }
    with session(tmp_path, features) as log:
        with te.autocast(recipe=RECIPES["mxfp8"]):
            y = layer(x)
        debug_api.step()
    weight = layer.weight.dequantize()
    assert torch.equal(y, x @ weight.t())
    assert log.values["layer_weight_max", 0] == weight.max().item()


def test_copies_of_debugged_layers_have_the_quantizers_of_the_recipe(tmp_path: Path):
    layer = te.Linear(64, 96, device="cpu", name="layer")
    x = torch.randn(32, 64)
    with te.autocast(recipe=RECIPES["current"]):
        expected = layer(x)
    with session(tmp_path, {"DisableQuantizationLayer": {}}):
        with te.autocast(recipe=RECIPES["current"]):
            layer(x)
        copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    for result in copies:
        with te.autocast(recipe=RECIPES["current"]):
            assert torch.equal(result(x), expected)


def test_observed_layers_are_rejected_and_keep_their_observation(tmp_path: Path):
    layer = te.Linear(64, 96, device="cpu", name="layer")
    with te.observe(layer, every=1) as observation, session(tmp_path, MAXIMA):
        with te.autocast(recipe=RECIPES["current"]):
            layer(torch.randn(32, 64))
        assert observation.step() is not None
    with session(tmp_path, MAXIMA):
        layer(torch.randn(32, 64))
        with pytest.raises(ValueError, match="observed already"):
            te.observe(layer)


@pytest.mark.parametrize(
    ("features", "error", "message"),
    [
        (
            {"DisableQuantizationGEMM": {}},
            ValueError,
            "DisableQuantizationGEMM, layer .*, gemm fprop.*names no pr",
        ),
        (
            {"DisableQuantizationGEMM": {"gemms": ["fprob"]}},
            AssertionError,
            "gemm 'fprob' is unknown",
        ),
        (
            {"DisableQuantizationGEMM": {"gemms": ["fprop"], "a": 1}},
            ValueError,
            "a: unknown settings",
        ),
        (
            {"LogTensorStats": {"tensors": ["weight"], "stats": ["mox"]}},
            AssertionError,
            "tensor_name weight.*'mox'",
        ),
        (
            {"LogTensorStats": {"tensors": ["weight"]}},
            ValueError,
            "tensor_name weight.*add `stats:",
        ),
        (
            {"LogFp8TensorStats": {"tensors": ["weight"]}},
            ValueError,
            "tensor_name weight.*add `stats:",
        ),
        ({"DumpTensors": {"tensors": ["weight"], "freq": 0}}, ValueError, "freq=0 is below 1"),
        (
            {"DumpTensors": {"tensors": ["weight"], "freq": "two"}},
            TypeError,
            "freq='two' must be a whole number",
        ),
        (
            {"DumpTensors": {"tensors": ["weight"], "start_end_list": [1, 3]}},
            ValueError,
            "give pairs of a first",
        ),
        (
            {"DumpTensors": {"tensors": ["weight"], "end_step": [3]}},
            TypeError,
            "end_step=.*must be a whole number",
        ),
        (
            {"LogFp8TensorStats": {"tensors": ["weight"], "stats": ["nvfp4_mse"]}},
            ValueError,
            "'nvfp4_mse' is unknown",
        ),
        (
            {"LogFp8TensorStats": {"tensors": ["weight"], "stats": ["overflows%"]}},
            ValueError,
            "delayed scaling only",
        ),
        (
            {"LogNvfp4TensorStats": {"tensors": ["weight"], "stats": ["mse"]}},
            ValueError,
            "use LogFp8TensorStats",
        ),
        (
            {"PerTensorScaling": {"gemms": ["fprop"], "tensors": ["weight"]}},
            AssertionError,
            "use the recipe Delayed",
        ),
        (
            {"FakeQuant": {"gemms": ["fprop"], "tensors": ["weight"]}},
            ValueError,
            "quant_format=None",
        ),
    ],
)
def test_an_error_names_feature_layer_and_tensor(
    features: dict, error: type[Exception], message: str, tmp_path: Path
):
    layer = te.Linear(64, 96, device="cpu", name="layer")
    x = torch.randn(32, 64)
    with te.autocast(recipe=RECIPES["current"]):
        expected = layer(x)
    # A session plans all layers of the process, so the error may name a layer that another test keeps alive.
    with session(tmp_path, features), te.autocast(recipe=RECIPES["current"]):
        for _ in range(2):  # a failed call changes nothing
            with pytest.raises(error, match=f"debug feature .*layer .*{message}|{message}"):
                layer(x)
    with te.autocast(recipe=RECIPES["current"]):
        assert torch.equal(layer(x), expected)


FEATURE = """
from nvdlfw_inspect.registry import Registry, api_method
from transformer_engine.debug.features.api import TEConfigAPIMapper

@Registry.register_feature(namespace="transformer_engine")
class Doubling(TEConfigAPIMapper):
    @api_method
    def modify_tensor_enabled(self, config, layer_name, tensor_name, gemm, iteration):
        return tensor_name == "output", None

    @api_method
    def modify_tensor(self, config, layer_name, gemm, tensor_name, tensor, default_quantizer, iteration, out):
        return tensor * config["factor"]

    @api_method
    def inspect_tensor_enabled(self, config, layer_name, tensor_name, iteration):
        return tensor_name == "gradient"

    @api_method
    def inspect_tensor(self, config, layer_name, tensor_name, tensor, iteration, tp_group):
        raise IndexError("of the feature")
"""


def test_a_feature_of_the_user_modifies_and_fails(tmp_path: Path):
    folder = tmp_path / "features"
    folder.mkdir()
    (folder / "doubling.py").write_text(FEATURE)
    layer = te.Linear(64, 96, device="cpu", name="layer")
    x = torch.randn(32, 64)
    settings = {"gemms": ["fprop"], "tensors": ["output", "gradient"], "factor": 3.0}
    with session(tmp_path, {"Doubling": settings}, ".*", folder):
        y = layer(x)
        with pytest.raises(
            RuntimeError, match="Doubling, layer layer, tensor_name gradient: IndexError: of the f"
        ):
            y.sum().backward()
    torch.testing.assert_close(y, 3.0 * layer(x), rtol=0, atol=0)


def test_threads_share_a_session(tmp_path: Path):
    layers = [te.Linear(64, 96, device="cpu", name=f"layer{i}") for i in range(4)]
    x = torch.randn(32, 64)
    with session(
        tmp_path, {"LogTensorStats": {"tensors": ["activation"], "stats": ["l1_norm"]}}
    ) as log:

        def work(i: int) -> None:
            for _ in range(5):
                layers[i]((i + 1) * x)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        debug_api.step()
    for i in range(4):
        expected = 5 * (i + 1) * x.abs().sum().item()
        assert log.values[f"layer{i}_activation_l1_norm", 0] == pytest.approx(expected, rel=1e-6)


def test_a_traced_call_of_a_debugged_layer_raises(tmp_path: Path):
    layer = te.Linear(64, 96, device="cpu", name="layer")
    with session(tmp_path, MAXIMA), pytest.raises(RuntimeError, match="belongs to a debug session"):
        numerics.trace_call(layer, layer.tracing_key, OUTSIDE)


@pytest.mark.slow
def test_a_compiled_call_of_a_debugged_layer_raises(tmp_path: Path):
    layer = te.Linear(64, 96, device="cpu", name="layer")
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with session(tmp_path, MAXIMA), pytest.raises(Exception, match="debug session"):
        compiled(torch.randn(32, 64))


def test_a_debug_quantizer_returns_both_directions(tmp_path: Path):
    with session(tmp_path, {"DisableQuantizationGEMM": {"gemms": ["wgrad"]}}):
        quantizer = DebugQuantizer(
            "layer", "activation", te.MXFP8Quantizer(te.DType.kFloat8E4M3), None, 1
        )
    assert (quantizer.plan.rowwise, quantizer.plan.columnwise) == (
        STANDARD_QUANTIZE,
        HIGH_PRECISION,
    )
    assert quantizer.any_feature_enabled() and quantizer.get_next_debug_iter() is None
    x = torch.randn(32, 64)
    result = quantizer(x)
    assert torch.equal(
        result.get_tensor(False).dequantize(), quantizer.parent_quantizer(x).dequantize()
    )
    assert torch.equal(result.get_tensor(True), x)


def test_features_are_registered_by_sessions_only():
    assert issubclass(Doubled, TEConfigAPIMapper) and "transformer_engine" not in Registry.data
    transformer_engine.debug.set_weight_tensor_tp_group_reduce(False)
    assert TEDebugState.weight_tensor_tp_group_reduce is False
    TEDebugState._reset()


class Doubled(TEConfigAPIMapper):
    """A feature that no session loads."""


def statistics_of_two_ranks(device: torch.device) -> dict[str, float]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    x = torch.randn(16 + 16 * rank, 64)
    torch.manual_seed(5)
    replica = torch.nn.parallel.DistributedDataParallel(
        te.Linear(64, 96, device="cpu", name="layer")
    )
    unused = te.Linear(64, 96, device="cpu", name="unused")
    features = {
        "LogTensorStats": {"tensors": ["activation", "weight"], "stats": ["mean", "std", "max"]}
    }
    with tempfile.TemporaryDirectory() as folder, session(Path(folder), features) as log:
        replica(x).sum().backward()
        if rank == 1:
            unused(x)
        debug_api.step()
    return {name: value for (name, _), value in log.values.items()}


def test_merged_fields_are_those_of_the_concatenated_tensors():
    fields = Fields.of(MOMENTS)
    parts = [torch.randn(rows, 8) + rows for rows in (1, 5, 9)]
    merged = fields.merged(
        torch.stack([moments(parts[0]), fields.neutral(), *map(moments, parts[1:])])
    )
    torch.testing.assert_close(merged, moments(torch.cat(parts)), rtol=1e-6, atol=0)


@pytest.mark.slow
def test_statistics_are_reduced_over_ranks(tmp_path: Path):
    result = run_on_ranks(statistics_of_two_ranks, 2, tmp_path)
    parts = [
        torch.randn(16 + 16 * rank, 64, generator=torch.manual_seed(rank)) for rank in range(2)
    ]
    full = torch.cat(parts).double()
    for values in result:
        assert values["layer_activation_mean"] == pytest.approx(full.mean().item(), rel=1e-6)
        assert values["layer_activation_std"] == pytest.approx(full.std().item(), rel=1e-6)
        assert values["layer_activation_max"] == full.max().item()
        assert values["unused_activation_std"] == pytest.approx(
            parts[1].double().std().item(), rel=1e-6
        )
    assert result[0]["layer_weight_std"] == result[1]["layer_weight_std"]
    assert "unused_weight_std" in result[1] and "unused_weight_std" not in result[0]
