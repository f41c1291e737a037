"""Positional calls in earlier releases' argument orders equal the call by keyword."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Literal

import pytest
import torch

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common import warning
from transformer_engine.pytorch.attention.dot_product_attention.utils import AttentionParams
from transformer_engine.pytorch.compat.argument_orders import accepts_older_orders
from transformer_engine.pytorch.cpp_extensions import fused_attn


@pytest.fixture(autouse=True)
def _warnings():
    warning.forget_issued()
    yield
    warning.forget_issued()


def call_with_warnings(call):
    """A call's result and its warnings about positional arguments."""
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        result = call()
    return result, [str(each.message) for each in issued if "by position" in str(each.message)]


DEVICE = torch.device("cpu")
MASK, WINDOW = "causal", (4, 0)
CORE = (2, 8, 1, 0.0, "bshd", MASK, WINDOW)
LAYER = (16, 2, 8, 0.0, 1e-5, None, None, 3, MASK, WINDOW)
WHOLE = (16, 32, 2, None, 1e-5, 0.0, 0.0, None, None, 3, 8, MASK, WINDOW)
CORE_ATTRIBUTES = (
    "softcap",
    "bottom_right_diagonal",
    "sequence_parallel",
    "layer_number",
    "attention_type",
)

# Class, leading arguments, the arguments behind the window, the release that is recognized, expected attributes.
CONSTRUCTORS = [
    (
        "DotProductAttention",
        CORE,
        (True, 0.5, False, 1, None, None, 3, "cross"),
        None,
        (0.5, True, False, 3, "cross"),
    ),
    (
        "DotProductAttention",
        CORE,
        (None, 2, False, 1, None, None, 3),
        None,
        (2.0, None, False, 3, "self"),
    ),
    (
        "DotProductAttention",
        CORE,
        (True, False, 1, None, None, 3, "cross"),
        "2.19",
        (0.0, True, False, 3, "cross"),
    ),
    ("DotProductAttention", CORE, (None, True), "2.19", (0.0, None, True, None, "self")),
    (
        "DotProductAttention",
        CORE,
        (False, 1, None, None, 3, "cross"),
        "2.11",
        (0.0, None, False, 3, "cross"),
    ),
    # Types cannot tell these from the present order, which wins.
    ("DotProductAttention", CORE, (True,), None, (0.0, True, False, None, "self")),
    ("DotProductAttention", CORE, (True, 2), None, (2.0, True, False, None, "self")),
]


@pytest.mark.parametrize(
    ("kind", "leading", "rest", "release", "attributes"), CONSTRUCTORS, ids=str
)
def test_core_attention_accepts_older_argument_orders(kind, leading, rest, release, attributes):
    layer, issued = call_with_warnings(lambda: getattr(te, kind)(*leading, *rest))
    assert tuple(getattr(layer, name) for name in CORE_ATTRIBUTES) == attributes
    assert type(layer.softcap) is float
    assert len(issued) == (release is not None)
    if release is not None:
        assert f"{kind}.__init__" in issued[0] and f"release {release}" in issued[0]
        assert not call_with_warnings(lambda: getattr(te, kind)(*leading, *rest))[1], (
            "one warning per process"
        )


@pytest.mark.parametrize(
    ("rest", "release", "softcap"),
    [
        ((None, 0.5, None, 1, 2, False), None, 0.5),
        ((True, None, 1, 2, False), "2.19", 0.0),
        ((None, 1, 2, False), "2.11", 0.0),
    ],
    ids=str,
)
def test_attention_layers_accept_older_argument_orders(rest, release, softcap):
    layer, issued = call_with_warnings(lambda: te.MultiheadAttention(*LAYER, *rest, device=DEVICE))
    assert (layer.softcap, layer.num_gqa_groups, layer.tp_size) == (softcap, 2, 1)
    assert len(issued) == (release is not None) and all(
        f"release {release}" in text for text in issued
    )


@pytest.mark.parametrize(
    ("rest", "release", "softcap"),
    [
        ((None, 0.5, "padding", None, (1, 1)), None, 0.5),
        ((None, "padding", None, (1, 1)), "2.19", 0.0),
        (("padding", (1, 1)), "2.11", 0.0),
    ],
    ids=str,
)
def test_transformer_layers_accept_older_argument_orders(rest, release, softcap):
    layer, issued = call_with_warnings(
        lambda: te.TransformerLayer(*WHOLE, *rest, layer_type="decoder", device=DEVICE)
    )
    assert (layer.softcap, layer.enc_dec_attn_mask_type) == (softcap, "padding")
    assert layer.inter_attention.window_size == (1, 1)
    assert len(issued) == (release is not None) and all(
        f"release {release}" in text for text in issued
    )


@pytest.mark.parametrize(
    ("rest", "release"),
    [
        ((None, 0.5, False, "no_bias"), None),
        ((None, False, "no_bias"), "2.19"),
        ((False, "no_bias", None, None, True, None, None, False, 1), "2.11"),
    ],
    ids=str,
)
def test_core_attention_calls_accept_older_argument_orders(rest, release):
    q = torch.randn(2, 5, 2, 8)
    layer = te.DotProductAttention(2, 8, qkv_format="bshd")
    leading = (q, q, q, None, "bshd", None, None, None, None, None, None, "causal", None)
    got, issued = call_with_warnings(lambda: layer(*leading, *rest))
    assert torch.equal(got, layer(q, q, q, softcap=0.5 if release is None else 0.0))
    assert len(issued) == (release is not None) and all(
        f"release {release}" in text for text in issued
    )


def test_layer_calls_accept_the_argument_order_of_2_11():
    x, encoded = torch.randn(5, 1, 16), torch.randn(4, 1, 16)
    attention = te.MultiheadAttention(16, 2, attention_dropout=0.0, device=DEVICE)
    got, issued = call_with_warnings(
        lambda: attention(x, None, None, "causal", (2, 0), None, False, None, None, "alibi")
    )
    assert (
        torch.equal(got, attention(x, window_size=(2, 0), core_attention_bias_type="alibi"))
        and len(issued) == 1
    )
    layer = te.TransformerLayer(
        16, 32, 2, layer_type="decoder", hidden_dropout=0.0, attention_dropout=0.0, device=DEVICE
    )
    got, issued = call_with_warnings(lambda: layer(x, None, "causal", (2, 0), encoded))
    assert (
        torch.equal(got, layer(x, window_size=(2, 0), encoder_output=encoded)) and len(issued) == 1
    )


def test_a_call_that_fits_no_order_raises_the_current_orders_error():
    with pytest.raises((TypeError, ValueError), match="softcap"):
        te.DotProductAttention(*CORE, None, "text")
    with pytest.raises(TypeError, match="multiple values"):
        te.DotProductAttention(*CORE, None, 0.5, softcap=0.5)


def test_an_older_order_does_not_repeat_a_keyword():
    class Module:
        @accepts_older_orders(v1=("b",))
        def call(self, a: int, b: float = 0.0, c: bool = False, d: int = 1):
            return a, b, c, d

    assert Module().call(1, True, 2) == (1, 0.0, True, 2)
    assert Module().call(1, True, d=2) == (1, 0.0, True, 2)
    assert Module().call(1, True, 2, d=2) == (1, True, 2, 2), "the order without b has d twice"
    assert list(inspect.signature(Module.call).parameters) == ["self", "a", "b", "c", "d"]


def test_functions_accept_moved_arguments():
    @accepts_older_orders(v2=(("kind", 1), "order"))
    def call(
        a: int,
        b: Sequence[int],
        order: Literal["x", "y"] = "x",
        c: str = "c",
        kind: int | None = None,
    ):
        return a, b, order, c, kind

    results = [
        call_with_warnings(lambda args=args: call(*args))
        for args in ((1, [2]), (1, [2], "y", "z"), (1, 7, [2]), (1, 7, [2], "z"), (1, [2], "z"))
    ]
    assert [result for result, _ in results] == [
        (1, [2], "x", "c", None), (1, [2], "y", "z", None), (1, [2], "x", "c", 7), (1, [2], "x", "z", 7),
        (1, [2], "z", "c", None),  # fits no order: passed on unchanged
    ]  # fmt: skip
    assert [len(issued) for _, issued in results] == [0, 0, 1, 0, 0], "one warning per order"


def test_fused_attention_accepts_both_argument_orders():
    q, k, v, grad = (torch.randn(2, 6, 4, 8) for _ in range(4))
    bounds, layout, kinds = (
        torch.tensor([0, 6, 12]),
        "bshd_bshd_bshd",
        ("no_bias", "causal", "vanilla", (2, 0)),
    )
    backend = fused_attn.FusedAttnBackend["F16_arbitrary_seqlen"]
    head = (
        True,
        6,
        6,
        bounds,
        bounds,
        q,
        k,
        v,
        torch.float32,
        backend,
        *[None] * 7,
        0.5,
        0.0,
        True,
        layout,
    )
    (expected, aux), issued = call_with_warnings(
        lambda: fused_attn.fused_attn_fwd(*head, "bshd", None, *kinds)
    )
    assert not issued
    (out, _), issued = call_with_warnings(lambda: fused_attn.fused_attn_fwd(*head, *kinds))
    assert torch.equal(out, expected) and len(issued) == 1 and "release 2.11" in issued[0]
    (transposed, _), _ = call_with_warnings(
        lambda: fused_attn.fused_attn_fwd(*head, "sbhd", None, *kinds)
    )
    assert torch.equal(transposed.transpose(0, 1), expected)

    head = (6, 6, bounds, bounds, q, k, v, expected, grad, torch.float32)
    tail = (backend, *[None] * 5, 0.5, 0.0, True, layout)
    orders = ("bshd", "bshd", layout)
    exact, issued = call_with_warnings(
        lambda: fused_attn.fused_attn_bwd(*head, aux, *tail, *orders, *kinds)
    )
    assert not issued
    for dtype in (torch.float32, tex.DType.kFloat32):
        actual, issued = call_with_warnings(
            lambda dtype=dtype: fused_attn.fused_attn_bwd(*head, dtype, aux, *tail, *kinds)
        )
        assert all(torch.equal(x, y) for x, y in zip(actual[:3], exact[:3], strict=True))
        assert len(issued) == (dtype is torch.float32)
    halves = fused_attn.fused_attn_bwd(*head, aux, *tail, *orders, *kinds, dqkv_dtype=torch.float16)
    assert [x.dtype for x in halves[:3]] == [torch.float16] * 3
    # By default, all tensors have the queries' axis order.
    assert torch.equal(
        fused_attn.fused_attn_bwd(*head, aux, *tail)[0],
        fused_attn.fused_attn_bwd(*head, aux, *tail, *orders)[0],
    )


def test_attention_params_accept_both_argument_orders():
    present, issued = call_with_warnings(
        lambda: AttentionParams(torch.Tensor, torch.float16, torch.float32, "bs3hd", 3)
    )
    assert (present.nominal_dtype, present.qkv_layout, present.batch_size, len(issued)) == (
        torch.float32,
        "bs3hd",
        3,
        0,
    )
    former, issued = call_with_warnings(
        lambda: AttentionParams(torch.Tensor, torch.float16, "bs3hd", 3)
    )
    assert (former.qkv_layout, former.batch_size, len(issued)) == ("bs3hd", 3, 1)
