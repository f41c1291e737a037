"""Limits in small public functions: flags of any type, copied buffers, closed blocks, dropped infinities."""

from __future__ import annotations

import warnings

import pytest
import torch

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.pytorch.attention.rope import FusedQKVRoPEFunc, FusedRoPEFunc
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.functions.weight_gradient import WeightGradStore, _Pass
from transformer_engine.pytorch.graphs import automatic
from transformer_engine.pytorch.primitives.attention.dense import _drop_weights
from transformer_engine.pytorch.quantization import global_state
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer
from transformer_engine.pytorch.transformer import DropPath


def test_autocast_blocks_closed_by_their_own_exit_are_removed():
    manager = global_state.FP8GlobalStateManager
    manager.reset()
    for _ in range(5):
        manager.autocast_enter(enabled=False).__exit__(None, None, None)
    assert len(global_state._opened.blocks) == 1
    manager.reset()


def test_grouped_weights_keep_the_mark_of_delayed_gradients():
    layer = te.GroupedLinear(2, 32, 32, device="cpu", delay_wgrad_compute=True)
    layer.make_grouped_weights()
    assert layer.weight.skip_backward_post_hook


def test_a_row_scaling_flag_accepts_any_number():
    assert NVFP4Quantizer(row_scaled_nvfp4=2) == NVFP4Quantizer(row_scaled_nvfp4=True)
    assert NVFP4Quantizer(row_scaled_nvfp4=2).row_scaled_nvfp4 is True


def test_a_copied_quantizer_records_in_its_own_buffers():
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, torch.device("cpu"))
    assert quantizer.amax.item() == 0
    quantizer(torch.full((16, 16), 2.0))
    twin = quantizer.copy()
    assert twin.amax.item() == 2
    twin(torch.full((16, 16), 3.0))
    assert (quantizer.amax.item(), twin.amax.item()) == (2, 3)


def test_fractional_token_counts_are_rejected():
    x, probs, routes = torch.ones(2, 4), torch.ones(2, 1), torch.ones(2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"tokens_per_expert=\[2\.5\] holds fractions"):
        te.moe_permute_and_pad_with_probs(x, probs, routes, torch.tensor([2.5]), 4)


def test_eviction_keeps_failures_and_the_latest_entries(monkeypatch):
    monkeypatch.setattr(automatic, "EAGER_SIGNATURES", 2)
    graph = automatic.AutomaticGraph(lambda x: x, None, 3, 4)
    failed = graph._entry(("failed",))
    failed.failure = "no"
    first = graph._entry(("first",))
    graph._entry(("second",))
    graph._entry(("first",))
    graph._entry(("third",))
    assert list(graph._entries) == [("failed",), ("first",), ("third",)]
    assert graph._entry(("failed",)) is failed and graph._entry(("first",)) is first


def test_rotation_functions_accept_numbers_as_flags():
    x, angles = torch.randn(4, 1, 2, 8), torch.randn(4, 1, 1, 8)
    expected = FusedRoPEFunc.apply(x, angles, None, "sbhd", True)
    assert torch.equal(FusedRoPEFunc.apply(x, angles, None, "sbhd", 2, None, 1.0, 0.0), expected)


def test_a_split_into_other_than_three_parts_is_named():
    qkv, angles = torch.randn(4, 1, 2, 24), torch.randn(4, 1, 1, 8)
    said = (
        r"qkv_split_arg_list=\[8, 16\] holds 2 sizes; give three of them: q_size, k_size and v_size"
    )
    with pytest.raises(ValueError, match=said):
        FusedQKVRoPEFunc.apply(qkv, angles, angles, [8, 16])
    with pytest.raises(ValueError, match=said):
        tex.fused_qkv_rope_forward(qkv, angles, angles, None, [8, 16], "sbhd", False, 1, 0)


def test_buffers_in_one_storage_keep_their_own_names():
    tensor = NVFP4Quantizer()(torch.randn(32, 64))
    expected = tensor.fsdp_buffer_fields()
    parts = [getattr(tensor, name) for name in expected]
    memory = torch.empty(sum(p.numel() for p in parts), dtype=torch.uint8)
    at = 0
    for name, part in zip(expected, parts, strict=True):
        saved = memory[at : at + part.numel()].view(part.shape)
        saved.copy_(part.view(torch.uint8))
        setattr(tensor, name, saved.view(part.dtype))
        at += part.numel()
    assert len(expected) > 1 and tensor.fsdp_buffer_fields() == expected


@pytest.mark.parametrize(
    "drop", [DropPath(1.0), lambda x: _drop_weights(x, 1.0, None)], ids=["path", "attention"]
)
def test_dropping_all_elements_gives_zeros_and_zero_gradients(drop):
    x = torch.tensor([[1.0, float("inf"), float("nan")]]).requires_grad_()
    y = drop(x)
    y.backward(torch.full_like(y, float("inf")))
    assert torch.equal(y, torch.zeros_like(x)) and torch.equal(x.grad, torch.zeros_like(x))


def test_a_failed_passs_entries_are_dropped_at_the_queue_head():
    store = WeightGradStore(True)
    for number, complete in enumerate((True, False, True, False)):
        store.context.append(([number], lambda n: n))
        store._passes.append(_Pass(number, complete))
    with pytest.warns(
        UserWarning, match="1 delayed weight gradients of a backward pass that raised"
    ):
        assert [store.pop()[0] for _ in range(2)] == [0, 2]
    store.assert_empty()


def test_a_negative_amax_epsilon_warns_once_for_all_values():
    from transformer_engine.common.warning import forget_issued

    forget_issued()
    with pytest.warns(UserWarning, match="amax_epsilon=-1.0 has no effect"):
        Float8CurrentScalingQuantizer(DType.kFloat8E4M3, torch.device("cpu"), amax_epsilon=-1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Float8CurrentScalingQuantizer(DType.kFloat8E4M3, torch.device("cpu"), amax_epsilon=-2.0)
