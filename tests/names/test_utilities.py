"""Functions of pytorch.utils, numerics_debug, distributed_weight and _extra_state compute their documented values."""

from __future__ import annotations

import contextlib
import pickle

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch import _extra_state, distributed_weight, numerics_debug, utils
from transformer_engine.pytorch.runtime import profiler_ranges

E4M3 = te.DType.kFloat8E4M3


def current(x: torch.Tensor) -> te.Float8Tensor:
    return te.Float8CurrentScalingQuantizer(E4M3, "cpu")(x)


def test_gradients_sizes_and_constants():
    leaf = torch.ones(2, requires_grad=True)
    assert utils.requires_grad(None, torch.ones(1), leaf) and not utils.requires_grad(
        None, torch.ones(1)
    )
    assert utils.ceil_div(7, 2) == 4 and utils.ceil_div(6, 2) == 3
    utils.ensure_divisibility(6, 3)
    with pytest.raises(ValueError, match="4 does not divide 6"):
        utils.ensure_divisibility(6, 4)
    assert torch.equal(utils.init_method_constant(2.5)(torch.empty(3)), torch.full((3,), 2.5))
    ones = utils.get_cached_ones_tensor(4, torch.float32, torch.device("cpu"))
    assert torch.equal(ones, torch.ones(4))
    assert utils.get_cached_ones_tensor(4, torch.float32, torch.device("cpu")) is ones
    assert utils.is_bf16_compatible() == te.is_bf16_available() == utils.is_bf16_available()
    assert (utils.get_sm_count() > 0) == torch.cuda.is_available()


def test_clear_tensor_data_frees_unmarked_tensors():
    plain, saved, quantized = torch.ones(4), torch.ones(4), current(torch.ones(16, 16))
    saved._do_not_clear = True
    utils.clear_tensor_data(plain, None, saved, quantized)
    assert plain.numel() == 0 and saved.numel() == 4 and quantized._data.numel() == 0
    marked = current(torch.ones(16, 16))
    marked._data._do_not_clear = True
    utils.clear_tensor_data(marked)
    assert marked._data.numel() == 256


@pytest.mark.parametrize("dim", [0, 2, -1, -3])
def test_combine_tensors_is_a_view_of_the_packed_tensor(dim):
    packed = torch.randn(4, 5, 6)
    parts = packed.unbind(dim)
    combined = utils.combine_tensors(parts, dim)
    assert torch.equal(combined, packed) and combined.stride() == packed.stride()
    assert combined.data_ptr() == packed.data_ptr()
    with pytest.raises(ValueError, match=r"torch\.stack"):
        utils.combine_tensors([parts[0], parts[1].clone()], dim)


def test_validation_of_contexts_and_trackers():
    utils.validate_ctx_manager(contextlib.nullcontext())
    with pytest.raises(ValueError, match="context manager"):
        utils.validate_ctx_manager(3)
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7)
    utils.validate_rng_states_func(lambda: tracker)
    with pytest.raises(TypeError, match="not callable"):
        utils.validate_rng_states_func(tracker)
    with pytest.raises(RuntimeError, match="get_states"):
        utils.validate_rng_states_func(object)


def test_views_are_rejected_and_stay_unchanged():
    full = torch.arange(4.0)
    assert utils.assert_viewless_tensor(full) is full
    view = full[1:]
    with pytest.raises(RuntimeError, match="view"):
        utils.safely_set_viewless_tensor_data(view, torch.zeros(9))
    assert torch.equal(view, torch.tensor([1.0, 2.0, 3.0]))
    with pytest.raises(RuntimeError, match="mine"):
        utils.assert_viewless_tensor([full, view], "mine")
    utils.safely_set_viewless_tensor_data(full, torch.zeros(2))
    assert torch.equal(full, torch.zeros(2))


def test_canonical_forms():
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert (
        utils.canonicalize_device(None).type == expected == utils.canonicalize_device("cuda").type
    )
    assert utils.canonicalize_dtype(None) is torch.get_default_dtype()
    assert utils.canonicalize_dtype(torch.bfloat16) is torch.bfloat16
    with pytest.raises(TypeError, match="dtype"):
        utils.canonicalize_dtype(torch.int32)
    assert utils.devices_match(torch.device("cpu"), torch.device("cpu"))
    assert not utils.devices_match(torch.device("cpu"), torch.device("meta"))
    group = object()
    assert utils.canonicalize_process_group(group) is group
    with pytest.raises(RuntimeError, match="init_process_group"):
        utils.canonicalize_process_group(None)


def test_needs_quantized_gemm_follows_the_direction():
    x = torch.randn(32, 32)
    hybrid = te.HybridQuantizer(te.IdentityQuantizer(), te.MXFP8Quantizer(E4M3))
    for subject in (hybrid, hybrid(x)):
        assert not utils.needs_quantized_gemm(subject) and utils.needs_quantized_gemm(
            subject, rowwise=False
        )
    assert utils.needs_quantized_gemm(current(x)) and utils.needs_quantized_gemm(
        te.MXFP8Quantizer(E4M3)
    )
    for plain in (x, None, te.IdentityQuantizer(), te.IdentityQuantizer()(x)):
        assert not utils.needs_quantized_gemm(plain)


def test_single_parameters_need_their_variable(monkeypatch):
    with pytest.warns(UserWarning, match="SINGLE_PARAM"):
        assert utils.resolve_grouped_linear_single_param_flags(True, False) == (False, False)
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    assert utils.resolve_grouped_linear_single_param_flags(True, False) == (True, False)


def test_profiler_ranges_are_marked_by_the_variable(monkeypatch):
    marks = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", marks.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: marks.append(None))
    utils.nvtx_range_push("off")
    utils.nvtx_range_pop("off")
    assert marks == []
    monkeypatch.setenv("NVTE_NVTX_ENABLED", "1")
    with pytest.raises(KeyError), utils.get_nvtx_range_context("outer"):
        utils.nvtx_range_push("inner")
        with pytest.raises(ValueError, match="innermost"):
            utils.nvtx_range_pop("outer")
        utils.nvtx_range_pop()
        raise KeyError
    assert marks == ["outer", "inner", None, None] and profiler_ranges._ranges == []
    with pytest.raises(RuntimeError, match="no profiler range"):
        utils.nvtx_range_pop()


def test_comparisons_print_the_largest_difference(capsys):
    a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.5, 3.0])
    assert not utils.all_close(a, b) and utils.all_close(a, a)
    utils.compare_tensors(a, b)
    utils.print_rank_0("first")
    assert capsys.readouterr().out == "largest difference 0.5 at flat index 1: 2 and 2.5\nfirst\n"


@pytest.mark.parametrize(("name", "largest"), [("E4M3", 448.0), ("E5M2", 57344.0)])
def test_statistics_count_zeros_and_saturated_codes(name, largest, capsys):
    dtype = torch.float8_e4m3fn if name == "E4M3" else torch.float8_e5m2
    codes = torch.tensor([0.0, -0.0, largest, -largest, largest, 1.0]).to(dtype)
    assert numerics_debug.fp8_tensor_statistics(codes.view(torch.uint8), name) == (2, 3)
    assert numerics_debug.fp8_tensor_statistics(codes, name) == (2, 3)
    numerics_debug.debug()
    numerics_debug.fp8_tensor_statistics(codes, name)
    numerics_debug.debug(enabled=False)
    assert "2 zeros, 3 at the maximum" in capsys.readouterr().out
    with pytest.raises(TypeError, match="FP8 codes"):
        numerics_debug.fp8_tensor_statistics(torch.ones(3), name)


class Sharded(torch.nn.Parameter):
    """A shard that gathers by doubling and reduces by halving."""

    is_distributed_weight = True
    group: list

    def materialize_group_for_forward(self):
        return [torch.cat((weight.detach(),) * 2) for weight in self.group]

    materialize_group_for_backward = materialize_group_for_forward

    def finalize_group_grads(self, wgrads):
        single = isinstance(wgrads, torch.Tensor)
        halves = [grad.chunk(2)[0] for grad in ([wgrads] if single else wgrads)]
        return halves[0] if single else halves

    def grad_buffer(self):
        return torch.zeros(2 * self.shape[0])


@pytest.mark.parametrize("count", [1, 2])
def test_distributed_weights_are_gathered_and_reduced_by_their_group(count):
    group = [Sharded(torch.full((2,), float(i))) for i in range(count)]
    for weight in group:
        weight.group = group
    assert isinstance(group[0], distributed_weight.DistributedWeight)
    assert distributed_weight.is_distributed_weight(group[0])
    for full in (
        distributed_weight.materialize_weight_for_forward(group),
        distributed_weight.materialize_weight_for_backward(group),
    ):
        assert [tuple(w.shape) for w in full] == [(4,)] * count
    grads = distributed_weight.finalize_weight_grads(group, [torch.arange(4.0)] * count)
    assert [g.tolist() for g in grads] == [[0.0, 1.0]] * count


def test_plain_weights_pass_through():
    weights, grads = [torch.ones(2)], [torch.zeros(2)]
    assert distributed_weight.materialize_weight_for_forward(weights)[0] is weights[0]
    assert distributed_weight.finalize_weight_grads(weights, grads)[0] is grads[0]
    with pytest.raises(ValueError, match="one for each"):
        distributed_weight.finalize_weight_grads(weights, [])
    flagged = type("Flagged", (), {"is_distributed_weight": True})()
    with pytest.raises(TypeError, match="the shard"):
        distributed_weight.is_distributed_weight(flagged)


def state_bytes(recipe) -> bytes:
    layer = te.Linear(16, 16, device="cpu")
    with te.autocast(recipe=recipe):
        layer(torch.randn(16, 16))
    return bytes(layer.get_extra_state().numpy())


def test_only_delayed_scaling_has_state_to_load():
    assert _extra_state.is_stateless_recipe(Float8CurrentScaling())
    assert not _extra_state.is_stateless_recipe(DelayedScaling())
    assert not _extra_state.is_stateless_recipe(CustomRecipe(qfactory=lambda role: None))
    assert _extra_state.should_load_extra_state_pickle(state_bytes(DelayedScaling()))
    stateless = pickle.dumps({"recipe": Float8CurrentScaling(), "extra_fp8_variables": {}})
    assert not _extra_state.should_load_extra_state_pickle(stateless)
    assert not _extra_state.should_load_extra_state_pickle(b"")


class Malicious:
    def __reduce__(self):
        return (print, ("executed",))


def test_code_in_extra_state_is_rejected_and_does_not_run(capsys):
    with pytest.raises(RuntimeError, match=r"mlp\.fc1.*NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"):
        _extra_state.should_load_extra_state_pickle(
            pickle.dumps({"recipe": Malicious()}), "mlp.fc1"
        )
    assert capsys.readouterr().out == ""
