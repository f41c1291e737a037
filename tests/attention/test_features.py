"""An attention backend supports only the features that it declares, and does not depend on autograd."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.dispatch import interventions
from transformer_engine.common.hardware import nvidia
from transformer_engine.pytorch.attention.dot_product_attention.utils import AttentionParams
from transformer_engine.pytorch.functions.attention import fp8
from transformer_engine.pytorch.primitives import attention
from transformer_engine.pytorch.primitives.attention.backends import cudnn
from transformer_engine.pytorch.primitives.attention.call import AttentionCall, Feature
from transformer_engine.pytorch.primitives.attention.choose import TABLE
from transformer_engine.pytorch.primitives.attention.passes import Differentiable, Passes

FOLDER = Path(attention.__file__).parent


def request(**changes):
    return replace(
        AttentionParams(qkv_layout="bshd_bshd_bshd").request(), device_type="cpu", **changes
    )


ASKED = {
    Feature.EMPTY: {"batch": 0},
    Feature.FP8: {"fp8": "current"},
    Feature.SCORE_MOD: {"score_mod": max},
    Feature.PRE_SCALE_BIAS: {"bias": "pre_scale_bias"},
    Feature.POST_SCALE_BIAS: {"bias": "post_scale_bias"},
    Feature.ALIBI: {"bias": "alibi"},
    Feature.OFF_BY_ONE: {"softmax": "off-by-one"},
    Feature.LEARNABLE: {"softmax": "learnable"},
    Feature.MAX_LOGIT: {"max_logit": True},
    Feature.DROPOUT: {"dropout": 0.5},
    Feature.PADDING_TENSORS: {"padding_tensors": True},
    Feature.PACKED: {"q_format": "thd", "kv_format": "thd"},
    Feature.PADDED_BETWEEN: {"padded_between": True},
    Feature.GROUPS: {"groups": 4},
    Feature.TWO_SIZES: {"head_dim_v": 32},
    Feature.CACHED: {"cached": True},
    Feature.PAGED: {"page_size": 16},
    Feature.DETERMINISTIC: {"deterministic": True},
}


@pytest.mark.parametrize("feature", ASKED, ids=[feature.name for feature in ASKED])
def test_a_backend_names_the_feature_that_it_does_not_support(feature):
    requested = request(**ASKED[feature])
    assert requested.features == (feature,)
    for backend in TABLE.backends:
        if feature not in backend.takes:
            assert backend.rejection_reason(requested) == f"it does not support {feature.value}", (
                backend.name
            )


def test_a_plain_request_needs_no_feature():
    assert request().features == ()


@pytest.mark.parametrize(
    "table", [TABLE, fp8.FORWARD, fp8.BACKWARD], ids=lambda table: table.operation
)
def test_an_unknown_feature_is_rejected_by_all(table, monkeypatch):
    monkeypatch.setattr(AttentionCall, "features", ("an attention of tomorrow",))
    requested = (
        request() if table is not fp8.BACKWARD else fp8.BackwardRequest(request(), "cudnn", None)
    )
    for verdict in table.explain(requested):
        assert verdict.reason == "it does not support an attention of tomorrow", verdict.backend


def test_a_request_hashes_and_compares_by_its_fields():
    one, same, other = request(), request(), request(heads=4)
    assert one == same and hash(one) == hash(same)
    assert one != other and len({one, same, other}) == 2
    with pytest.raises(TypeError, match="unexpected keyword argument 'headz'"):
        replace(one, headz=3)


def test_every_backend_is_bound_to_two_passes_or_to_a_differentiable_attention(monkeypatch):
    monkeypatch.setattr(cudnn, "has_cuda", lambda: False)  # nothing is planned
    for backend in TABLE.backends:
        bound = backend.bind(request())
        assert isinstance(bound, (Passes, Differentiable)) and bound.name == backend.name


def test_explaining_plans_nothing(monkeypatch):
    planned = []
    monkeypatch.setattr(cudnn, "unavailable_reason", lambda: None)
    monkeypatch.setattr(cudnn, "has_cuda", lambda: True)
    monkeypatch.setattr(cudnn, "_planning_failure", lambda r: planned.append(r) or "not today")
    requested = replace(
        request(), device_type="cuda", hardware=nvidia(9, 0), seqlen_q=4096, seqlen_kv=4096
    )
    verdicts = {verdict.backend: verdict for verdict in TABLE.explain(requested)}
    assert verdicts["cudnn"].reason is None and not planned
    assert TABLE.bind(requested).name != "cudnn" and planned == [requested]
    assert {verdict.backend: verdict.reason for verdict in TABLE.explain(requested)}[
        "cudnn"
    ] == "not today"


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.stem)
def test_the_primitive_defines_no_autograd_and_no_module(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base) for base in node.bases}
            assert not bases & {"torch.autograd.Function", "torch.nn.Module", "nn.Module"}, (
                node.name
            )


CHANGES = {
    "window_size": (2, 0),
    "attn_mask_type": "no_mask",
    "softmax_scale": 2.0,
    "qkv_format": "bshd",
    "softmax_type": "off-by-one",
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_changes_between_two_plain_calls_takes_effect(name, device):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(5, 5, 2, 8, generator=generator).to(device) for _ in range(3))
    layer = te.DotProductAttention(2, 8)
    before = layer(q, k, v)
    setattr(layer, name, CHANGES[name])
    fresh = te.DotProductAttention(2, 8, **{"attn_mask_type": "causal", name: CHANGES[name]})
    after = layer(q, k, v)
    torch.testing.assert_close(after, fresh(q, k, v), rtol=0, atol=0)
    assert not torch.equal(after, before) and not interventions


@pytest.mark.parametrize("wrong", [1.5, "1"])
def test_a_setting_of_the_wrong_type_is_rejected_though_equal_to_a_valid_one(wrong, device):
    layer = te.DotProductAttention(2, 8)
    q = torch.randn(5, 1, 2, 8, device=device)
    layer(q, q, q)
    with pytest.raises((TypeError, ValueError), match="num_splits"):
        layer(q, q, q, num_splits=wrong)


def test_a_layer_rejects_a_wrong_input_also_after_a_similar_valid_one(device):
    layer = te.MultiheadAttention(16, 2, attention_dropout=0.0, device=device)
    x = torch.randn(4, 1, 16, device=device)
    layer(x)
    with pytest.raises(ValueError, match="hidden_size=16"):
        layer(torch.randn(4, 1, 8, device=device))
    with pytest.raises((TypeError, ValueError), match="hidden_states"):
        layer(x.int())
    layer.qkv_format = "thd"
    with pytest.raises(ValueError, match="needs 2 axes"):
        layer(x)


EQUAL_FORMS = {"max_seqlen_q": (1, True), "window_size": ((2, 0), (2.0, 0))}


@pytest.mark.parametrize("argument", EQUAL_FORMS)
@pytest.mark.parametrize("kind", ["DotProductAttention", "MultiheadAttention"])
def test_equal_numbers_of_different_types_give_one_result(kind, argument, device):
    if kind == "DotProductAttention":
        layer, inputs = te.DotProductAttention(2, 8), (torch.randn(1, 1, 2, 8, device=device),) * 3
    else:
        layer = te.MultiheadAttention(16, 2, attention_dropout=0.0, device=device)
        inputs = (torch.randn(1, 1, 16, device=device),)
    first, other = EQUAL_FORMS[argument]
    expected = [layer(*inputs, **{argument: first}) for _ in range(2)][-1]
    torch.testing.assert_close(layer(*inputs, **{argument: other}), expected, rtol=0, atol=0)


def test_equal_calls_are_planned_once(device, monkeypatch):
    layer = te.DotProductAttention(2, 8, qkv_format="thd", attn_mask_type="padding_causal")
    x = torch.randn(6, 2, 8, device=device)
    built = []
    build = layer._plans.build
    monkeypatch.setattr(layer._plans, "build", lambda key: built.append(key) or build(key))

    def call(*ends: int, longest: int | None = None) -> torch.Tensor:
        bounds = torch.tensor([0, *ends], dtype=torch.int32, device=device)
        return layer(
            x,
            x,
            x,
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )

    first, second = call(2, 6, longest=4), call(3, 6, longest=4)
    assert len(built) == 1 and not torch.equal(first, second)
    torch.testing.assert_close(call(2, 6), first)
    assert len(built) == 2
