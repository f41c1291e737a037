"""Calls shown in the original's and its clients' documentation are accepted, with the right results."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.accepted_attention import all_attention_pairs
from tests.support.accepted_forms import (
    HEADS,
    HIDDEN,
    OFF,
    Pair,
    all_pairs,
    hidden,
    sample,
    sample_heads,
)
from tests.support.documented_calls import DOCUMENTED, Documented
from transformer_engine.common import warning
from transformer_engine.pytorch.module.drop_path import DropPath

PAIRS = [*all_pairs(), *all_attention_pairs()]


@pytest.fixture
def unwarned(monkeypatch):
    """A process that has issued no warning yet."""
    monkeypatch.setattr(warning, "_issued", set())


def assert_same(argument: Any, plain: Any) -> None:
    """Assert that two results are bitwise equal, in every tensor and number."""
    if isinstance(argument, (tuple, list)):
        assert len(argument) == len(plain)
        for one, other in zip(argument, plain, strict=True):
            assert_same(one, other)
    elif isinstance(argument, torch.Tensor):
        torch.testing.assert_close(argument, plain, rtol=0, atol=0)
    else:
        assert argument == plain


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pair", PAIRS, ids=[pair.name for pair in PAIRS])
def test_arguments_in_another_form_give_the_same_result(pair: Pair):
    assert_same(pair.given(), pair.plain())


@pytest.mark.parametrize("call", DOCUMENTED, ids=[call.name for call in DOCUMENTED])
def test_documented_calls_equal_plain_pytorch(call: Documented):
    torch.testing.assert_close(call.given(), call.oracle(), rtol=1e-4, atol=1e-5)


def test_there_are_at_least_sixty_documented_and_accepted_calls():
    assert len(DOCUMENTED) + len(PAIRS) >= 60
    assert len({call.name for call in (*DOCUMENTED, *PAIRS)}) == len(DOCUMENTED) + len(PAIRS)


def test_a_layer_that_drops_everything_in_training_passes_its_input_on():
    x = hidden()
    dropped: list[dict[str, Any]] = [
        {"drop_path_rate": 1.0},
        {"hidden_dropout": 1.0},
        {"hidden_dropout": 1.0, "drop_path_rate": 1, "bias": False},
    ]
    for options in dropped:
        layer = te.TransformerLayer(HIDDEN, 96, HEADS, **{**OFF, **options})
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        torch.testing.assert_close(y, x, rtol=0, atol=0)
        y.sum().backward()
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, torch.ones_like(x), rtol=0, atol=0)
    assert torch.equal(DropPath(1.0)(x), torch.zeros_like(x))


@pytest.mark.parametrize(
    "options", [{}, {"core_attention_bias_type": "alibi"}, {"checkpoint_core_attention": True}]
)
def test_attention_that_drops_every_probability_gives_zero(options):
    q, k, v = (x.requires_grad_() for x in sample_heads())
    layer = te.DotProductAttention(HEADS, 16, attention_dropout=1.0)
    out = layer(q, k, v, **options)
    assert torch.equal(out, torch.zeros_like(out))
    out.backward(torch.ones_like(out))
    for x in (q, k, v):
        assert x.grad is not None and torch.equal(x.grad, torch.zeros_like(x))


def test_packed_sequences_drop_single_tokens_on_their_path():
    layer = te.TransformerLayer(
        HIDDEN,
        96,
        HEADS,
        attn_input_format="thd",
        self_attn_mask_type="padding_causal",
        drop_path_rate=1.0,
        **OFF,
    )
    x, bounds = sample(12, HIDDEN), torch.tensor([0, 5, 12], dtype=torch.int32)
    assert torch.equal(
        layer(x, cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=7, max_seqlen_kv=7), x
    )


NO_EFFECT = {
    "ub_overlap_ag": lambda: te.Linear(16, 16, ub_overlap_ag=True, ub_name="qkv", device="cpu"),
    "ub_bulk_wgrad": lambda: te.LayerNormLinear(16, 16, ub_bulk_wgrad=True, device="cpu"),
    "ub_overlap_rs": lambda: te.LayerNormMLP(16, 16, ub_overlap_rs=True, device="cpu"),
    "ub_tp_comm_overlap": lambda: te.TransformerLayer(
        64, 64, 4, ub_tp_comm_overlap=True, device="cpu"
    ),
    "symmetric_ar_type": lambda: te.Linear(16, 16, symmetric_ar_type="two_shot", device="cpu"),
    "sm_margin": lambda: te.RMSNorm(16, sm_margin=4, device="cpu"),
    "cp_stream": lambda: te.DotProductAttention(4, 16, cp_stream=object()),
    "fp8_output": lambda: te.Linear(16, 16, device="cpu")(sample(4, 16), fp8_output=True),
    "fp8_grad": lambda: te.Linear(16, 16, device="cpu")(sample(4, 16), fp8_grad=True),
    "core_attention_bias": lambda: te.DotProductAttention(4, 16)(
        *sample_heads(), core_attention_bias=sample(1, 4, 8, 8)
    ),
    "alibi_slopes": lambda: te.DotProductAttention(4, 16)(
        *sample_heads(), alibi_slopes=torch.ones(4)
    ),
    "attention_mask": lambda: te.DotProductAttention(4, 16)(
        *sample_heads(), torch.zeros(2, 1, 1, 8)
    ),
    "encoder_output": lambda: te.TransformerLayer(64, 64, 4, device="cpu")(
        hidden(), encoder_output=hidden()
    ),
    "return_layernorm_output": lambda: te.MultiheadAttention(
        64, 4, return_layernorm_output=True, device="cpu"
    ),
    "rotary_percent": lambda: te.RotaryPositionEmbedding(16, rotary_percent=2.0),
}


@pytest.mark.parametrize("argument", NO_EFFECT)
def test_an_argument_without_effect_is_warned_about_once(argument, unwarned):
    with pytest.warns(UserWarning, match=rf"{argument}.*(no effect|as 1\.0 does)"):
        NO_EFFECT[argument]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NO_EFFECT[argument]()


def test_clients_defaults_do_not_warn(unwarned):
    overlap = dict.fromkeys(
        ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"),
        False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        te.Linear(16, 16, **overlap, ub_name="proj", symmetric_ar_type=None, device="cpu")(
            sample(4, 16), is_first_microbatch=None, fp8_output=False
        )
        te.RMSNorm(16, sm_margin={"forward": 0, "backward": 0, "inference": 0}, device="cpu")(
            sample(4, 16)
        )
        layer = te.TransformerLayer(
            64, 64, 4, **{**overlap, "ub_overlap_ag": True}, ub_tp_comm_overlap=False, **OFF
        )
        layer(hidden(), attention_mask=torch.zeros(2, 1, 8, 8, dtype=torch.bool))
        layer.set_context_parallel_group(None, None, None, "p2p")
        te.LayerNormMLP(16, 32, set_parallel_mode=True, device="cpu")(sample(4, 16))
        te.destroy_ub()


def test_a_process_group_with_a_wrong_type_is_named():
    with pytest.raises(TypeError, match="is not a process group; give a torch"):
        te.DotProductAttention(4, 16).set_context_parallel_group(object(), [0], None)


def test_more_groups_than_can_be_allocated_are_rejected_at_once():
    for kind in (lambda n: te.GroupedLinear(n, 16, 16, device="cpu"), te.Fp8Padding):
        with pytest.raises(ValueError, match="is above 1048576; give the number of groups"):
            kind(10**30)


def test_sparse_rows_are_named():
    x = sample(8, 16).to_sparse()
    for call in (te.GroupedLinear(2, 16, 32, device="cpu"), te.Fp8Padding(2), te.Fp8Unpadding(2)):
        with pytest.raises(TypeError, match=r"layout torch\.sparse_coo; give a dense tensor"):
            call(x, [4, 4])
