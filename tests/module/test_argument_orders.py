"""Positional calls in the argument orders of earlier releases give the module, or the result, of a call by keyword."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common import warning
from transformer_engine.pytorch.module.argument_orders import accepts_older_orders


@pytest.fixture(autouse=True)
def _warnings():
    warning.forget_issued()
    yield
    warning.forget_issued()


def recorded(call):
    """Return the result of a call and its warnings about positional arguments."""
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        result = call()
    return result, [str(each.message) for each in issued if "by position" in str(each.message)]


DEVICE = torch.device("cpu")
MASK, WINDOW = "causal", (4, 0)
CORE = (2, 8, 1, 0.0, "bshd", MASK, WINDOW)
LAYER = (16, 2, 8, 0.0, 1e-5, None, None, 3, MASK, WINDOW)
WHOLE = (16, 32, 2, None, 1e-5, 0.0, 0.0, None, None, 3, 8, MASK, WINDOW)
CORE_ATTRIBUTES = ("softcap", "bottom_right_diagonal", "sequence_parallel", "layer_number", "attention_type")

# Class, leading arguments, the arguments behind the window, the release that is recognized, expected attributes.
CONSTRUCTORS = [
    (
        "DotProductAttention",
        CORE,
        (True, 0.5, False, 1, None, None, 3, "cross"),
        None,
        (0.5, True, False, 3, "cross"),
    ),
    ("DotProductAttention", CORE, (None, 2, False, 1, None, None, 3), None, (2.0, None, False, 3, "self")),
    (
        "DotProductAttention",
        CORE,
        (True, False, 1, None, None, 3, "cross"),
        "2.19",
        (0.0, True, False, 3, "cross"),
    ),
    ("DotProductAttention", CORE, (None, True), "2.19", (0.0, None, True, None, "self")),
    ("DotProductAttention", CORE, (False, 1, None, None, 3, "cross"), "2.11", (0.0, None, False, 3, "cross")),
    # Types cannot tell these from the present order, which wins.
    ("DotProductAttention", CORE, (True,), None, (0.0, True, False, None, "self")),
    ("DotProductAttention", CORE, (True, 2), None, (2.0, True, False, None, "self")),
]


@pytest.mark.parametrize(("kind", "leading", "rest", "release", "attributes"), CONSTRUCTORS, ids=str)
def test_a_core_attention(kind, leading, rest, release, attributes):
    layer, issued = recorded(lambda: getattr(te, kind)(*leading, *rest))
    assert tuple(getattr(layer, name) for name in CORE_ATTRIBUTES) == attributes
    assert type(layer.softcap) is float
    assert len(issued) == (release is not None)
    if release is not None:
        assert f"{kind}.__init__" in issued[0] and f"release {release}" in issued[0]
        assert not recorded(lambda: getattr(te, kind)(*leading, *rest))[1], "one warning per process"


@pytest.mark.parametrize(
    ("rest", "release", "softcap"),
    [
        ((None, 0.5, None, 1, 2, False), None, 0.5),
        ((True, None, 1, 2, False), "2.19", 0.0),
        ((None, 1, 2, False), "2.11", 0.0),
    ],
    ids=str,
)
def test_an_attention_layer(rest, release, softcap):
    layer, issued = recorded(lambda: te.MultiheadAttention(*LAYER, *rest, device=DEVICE))
    assert (layer.softcap, layer.num_gqa_groups, layer.tp_size) == (softcap, 2, 1)
    assert len(issued) == (release is not None) and all(f"release {release}" in text for text in issued)


@pytest.mark.parametrize(
    ("rest", "release", "softcap"),
    [
        ((None, 0.5, "padding", None, (1, 1)), None, 0.5),
        ((None, "padding", None, (1, 1)), "2.19", 0.0),
        (("padding", (1, 1)), "2.11", 0.0),
    ],
    ids=str,
)
def test_a_transformer_layer(rest, release, softcap):
    layer, issued = recorded(lambda: te.TransformerLayer(*WHOLE, *rest, layer_type="decoder", device=DEVICE))
    assert (layer.softcap, layer.enc_dec_attn_mask_type) == (softcap, "padding")
    assert layer.inter_attention.window_size == (1, 1)
    assert len(issued) == (release is not None) and all(f"release {release}" in text for text in issued)


@pytest.mark.parametrize(
    ("rest", "release"),
    [
        ((None, 0.5, False, "no_bias"), None),
        ((None, False, "no_bias"), "2.19"),
        ((False, "no_bias", None, None, True, None, None, False, 1), "2.11"),
    ],
    ids=str,
)
def test_calls_of_a_core_attention(rest, release):
    q = torch.randn(2, 5, 2, 8)
    layer = te.DotProductAttention(2, 8, qkv_format="bshd")
    leading = (q, q, q, None, "bshd", None, None, None, None, None, None, "causal", None)
    got, issued = recorded(lambda: layer(*leading, *rest))
    assert torch.equal(got, layer(q, q, q, softcap=0.5 if release is None else 0.0))
    assert len(issued) == (release is not None) and all(f"release {release}" in text for text in issued)


def test_calls_of_layers_in_the_order_of_2_11():
    x, encoded = torch.randn(5, 1, 16), torch.randn(4, 1, 16)
    attention = te.MultiheadAttention(16, 2, attention_dropout=0.0, device=DEVICE)
    got, issued = recorded(
        lambda: attention(x, None, None, "causal", (2, 0), None, False, None, None, "alibi")
    )
    assert (
        torch.equal(got, attention(x, window_size=(2, 0), core_attention_bias_type="alibi"))
        and len(issued) == 1
    )
    layer = te.TransformerLayer(
        16, 32, 2, layer_type="decoder", hidden_dropout=0.0, attention_dropout=0.0, device=DEVICE
    )
    got, issued = recorded(lambda: layer(x, None, "causal", (2, 0), encoded))
    assert torch.equal(got, layer(x, window_size=(2, 0), encoder_output=encoded)) and len(issued) == 1


def test_a_call_that_fits_no_order_raises_the_error_of_the_present_one():
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
