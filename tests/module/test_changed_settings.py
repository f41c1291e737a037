"""After a setting changes between two calls, the second call equals a module constructed with it."""

from __future__ import annotations

import copy

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import RECIPES, same, step
from transformer_engine.common import env
from transformer_engine.pytorch.attention import DotProductAttention, MultiheadAttention
from transformer_engine.pytorch.functions import precision
from transformer_engine.pytorch.module import specs
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, autocast

HIDDEN, FFN, HEADS, TOKENS, BATCH = 64, 96, 2, 16, 4


def make_layer(kind, **options):
    torch.manual_seed(0)
    match kind:
        case "Linear" | "LayerNormLinear":
            return getattr(te, kind)(HIDDEN, FFN, **options)
        case "GroupedLinear":
            return te.GroupedLinear(2, HIDDEN, FFN, **options)
        case "LayerNormMLP":
            return te.LayerNormMLP(HIDDEN, FFN, **options)
        case "LayerNorm" | "RMSNorm":
            return getattr(te, kind)(HIDDEN, **options)
        case "DotProductAttention":
            return DotProductAttention(HEADS, HIDDEN // HEADS, **options)
        case "MultiheadAttention":
            return MultiheadAttention(HIDDEN, HEADS, **({"attention_dropout": 0.0} | options))
        case _:
            plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
            return te.TransformerLayer(HIDDEN, FFN, HEADS, **(plain | options))


def results(layer, recipe, device=None):
    """Outputs and gradients from one call; `device` is the input's device if the layer has no parameters."""
    torch.manual_seed(1)
    packed = isinstance(layer, DotProductAttention)
    shape = (TOKENS, BATCH, 3, HEADS, HIDDEN // HEADS) if packed else (TOKENS, BATCH, HIDDEN)
    x = torch.randn(
        shape,
        device=next(layer.parameters(), torch.empty(0, device=device)).device,
        requires_grad=True,
    )
    layer.zero_grad(set_to_none=True)
    with autocast(enabled=recipe is not None, recipe=recipe):
        if packed:
            y = layer(qkv_layer=x)
        else:
            y = layer(x, [32, 32]) if isinstance(layer, te.GroupedLinear) else layer(x)
    ys = [part for part in (y if isinstance(y, tuple) else (y,)) if isinstance(part, torch.Tensor)]
    sum((part.float() * (1 + i)).sin().sum() for i, part in enumerate(ys)).backward()
    grads = [p.grad for p in (x, *layer.parameters()) if p.grad is not None]
    return [part.detach().clone() for part in ys] + [grad.clone() for grad in grads]


# Kind, attribute, options before, value after, and the option's name if it differs from the attribute.
NORM = [("eps", {}, 0.5), ("zero_centered_gamma", {}, True)]
FUSED = [
    *NORM,
    ("return_bias", {}, True),
    ("return_layernorm_output", {}, True),
    ("use_bias", {}, False, "bias"),
]
CHANGES = [
    *[("LayerNorm", *change) for change in NORM],
    *[("RMSNorm", *change) for change in NORM],
    ("Linear", "return_bias", {}, True),
    ("Linear", "use_bias", {}, False, "bias"),
    ("Linear", "save_original_input", {}, True),
    ("GroupedLinear", "return_bias", {}, True),
    ("GroupedLinear", "use_bias", {}, False, "bias"),
    ("GroupedLinear", "save_original_input", {}, True),
    *[("LayerNormLinear", *change) for change in FUSED],
    ("LayerNormLinear", "normalization", {}, "RMSNorm"),
    *[("LayerNormMLP", *change) for change in FUSED],
    ("LayerNormMLP", "normalization", {}, "RMSNorm"),
    ("LayerNormMLP", "activation", {}, "silu"),
    ("LayerNormMLP", "activation", {"activation": "swiglu"}, "clamped_swiglu"),
    ("LayerNormMLP", "activation_params", {"activation": "clamped_swiglu"}, {"limit": 0.05}),
    ("LayerNormMLP", "checkpoint", {}, True),
    ("DotProductAttention", "attn_mask_type", {}, "no_mask"),
    ("DotProductAttention", "window_size", {}, (2, 0)),
    ("DotProductAttention", "softmax_scale", {}, 0.5),
    ("DotProductAttention", "softmax_type", {}, "off-by-one"),
    ("DotProductAttention", "attention_dropout", {}, 0.5),
    ("DotProductAttention", "qkv_format", {}, "bshd"),
    ("DotProductAttention", "return_max_logit", {}, True),
    (
        "DotProductAttention",
        "bottom_right_diagonal",
        {"attn_mask_type": "no_mask", "window_size": (2, 1)},
        False,
    ),
    ("DotProductAttention", "softcap", {}, 0.5),
    ("MultiheadAttention", "softcap", {}, 0.5),
    ("TransformerLayer", "softcap", {}, 0.5),
    ("MultiheadAttention", "attn_mask_type", {}, "no_mask"),
    ("MultiheadAttention", "window_size", {}, (2, 0)),
    ("MultiheadAttention", "qkv_format", {}, "bshd"),
    ("MultiheadAttention", "return_bias", {}, True),
    ("MultiheadAttention", "return_layernorm_output", {"input_layernorm": True}, True),
    ("TransformerLayer", "self_attn_mask_type", {}, "no_mask"),
    ("TransformerLayer", "attn_input_format", {}, "bshd"),
    ("TransformerLayer", "hidden_dropout", {}, 0.5),
]


@pytest.mark.parametrize("recipe", ["none", "current"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: f"{c[0]}-{c[1]}")
@pytest.mark.sampled
def test_a_changed_attribute_takes_effect_in_the_next_call(change, recipe, device):
    kind, name, options, value, *option = change
    layer = make_layer(kind, **options).to(device)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.3)
    made_with = make_layer(kind, **(options | {(option or [name])[0]: value})).to(device)
    recognized = layer.state_dict()
    made_with.load_state_dict({key: recognized[key] for key in made_with.state_dict()})
    before = results(layer, RECIPES[recipe])
    setattr(layer, name, value)
    after, expected = results(layer, RECIPES[recipe]), results(made_with, RECIPES[recipe])
    if name != "use_bias":
        assert same(after, expected)
    else:  # the bias is still there, without a gradient
        assert same(after[: len(expected)], expected)
    if name not in ("save_original_input", "checkpoint", "bottom_right_diagonal"):
        assert not same(before, after)


@pytest.mark.parametrize(
    "kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "TransformerLayer"]
)
def test_a_changed_recipe_takes_effect_in_the_next_call(kind, device):
    layer = make_layer(kind).to(device)
    for name in ("none", "current", "block", "nvfp4", "delayed", "none", "mxfp8"):
        FP8GlobalStateManager.reset()
        fresh = make_layer(kind).to(device)
        fresh.load_state_dict(
            {k: v for k, v in layer.state_dict().items() if not k.endswith("_extra_state")},
            strict=False,
        )
        assert same(results(layer, RECIPES[name]), results(fresh, RECIPES[name]))


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_changed_fp8_auto_takes_effect_in_the_next_call(kind, device, monkeypatch):
    """The variable depends on times measured on a GPU; other machines replace the measurement."""
    monkeypatch.setattr(precision, "reason_against_fp8", lambda *request: "it never pays")
    layer = make_layer(kind).to(device)
    monkeypatch.setattr(specs, "estimates", lambda device, traced, quantized_weight: not traced)
    unquantized, quantized = results(layer, None), results(layer, RECIPES["current"])
    assert not same(unquantized, quantized)
    monkeypatch.setenv("NVTE_FP8_AUTO", "1")
    assert same(results(layer, RECIPES["current"]), unquantized)
    monkeypatch.delenv("NVTE_FP8_AUTO")
    assert same(results(layer, RECIPES["current"]), quantized)


ATTENTION_VARIABLES = {
    "NVTE_FLASH_ATTN": "0",
    "NVTE_FUSED_ATTN": "0",
    "NVTE_FLASH_ATTN_V2": "0",
    "NVTE_FLASH_ATTN_V3": "0",
    "NVTE_FLASH_ATTN_V4": "0",
    "NVTE_FUSED_ATTN_BACKEND": "1",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NVTE_DPA_FP8_RECIPE": "Float8CurrentScaling",
    "NVTE_FP8_DPA_BWD": "1",
    "NVTE_USE_CUTLASS_GROUPED_GEMM": "1",
}


@pytest.mark.parametrize("name", ATTENTION_VARIABLES)
@pytest.mark.parametrize("kind", ["DotProductAttention", "GroupedLinear"])
def test_a_changed_environment_variable_takes_effect_in_the_next_call(
    kind, name, device, monkeypatch
):
    if name == "NVTE_DPA_FP8_RECIPE":
        monkeypatch.setenv("NVTE_DPA_FP8_RECIPE_DPA", "1")
    layer, fresh = make_layer(kind).to(device), make_layer(kind).to(device)
    recipe = RECIPES["current"]
    results(layer, recipe)
    monkeypatch.setenv(name, ATTENTION_VARIABLES[name])
    assert same(results(layer, recipe), results(fresh, recipe))
    monkeypatch.delenv(name)
    assert same(results(layer, recipe), results(make_layer(kind).to(device), recipe))


def test_a_warm_attention_raises_once_all_backends_are_off(monkeypatch):
    layer = make_layer("DotProductAttention")
    results(layer, None)
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(ValueError, match="No dot product attention backend"):
        results(layer, None)


def test_a_watched_variable_returns_its_current_value(monkeypatch):
    watched = env.watch("NVTE_FP8_AUTO")
    monkeypatch.delenv("NVTE_FP8_AUTO", raising=False)
    unset = watched()
    monkeypatch.setenv("NVTE_FP8_AUTO", "1")
    assert unset is None and watched() in ("1", b"1")  # as os.environ stores it


def test_attributes_of_callers_do_not_invalidate_the_cache(device, monkeypatch):
    """Callers set their own attributes on our modules in every step, some before our constructor runs."""

    class Theirs(te.Linear):
        def __init__(self):
            self.is_first_microbatch = True
            self.notes = {}
            super().__init__(HIDDEN, FFN, device=device)

        def forward(self, x):
            y = super().forward(x)
            self.is_first_microbatch = not self.is_first_microbatch
            return y

    layer = Theirs()
    x = torch.randn(TOKENS, HIDDEN, device=device)
    layer(x)
    assert len(layer._specs) == 1
    layer.eps = 0.1  # which a Linear does not have
    layer(x)
    layer.return_bias = False  # as it was
    layer(x)
    assert len(layer._specs) == 1
    layer.return_bias = True
    layer(x)
    assert len(layer._specs) == 2


def test_a_compiled_subclass_can_write_its_own_attributes(device):
    class Theirs(te.Linear):
        def forward(self, x):
            self.is_first_microbatch = False
            return super().forward(x)

    layer = Theirs(HIDDEN, FFN, device=device)
    torch._dynamo.reset()
    x = torch.randn(TOKENS, HIDDEN, device=device)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(x), layer(x))
    assert layer.is_first_microbatch is False


def test_a_compiled_norm_follows_a_changed_eps(device):
    layer = te.LayerNorm(HIDDEN, device=device)
    torch._dynamo.reset()
    x = torch.randn(TOKENS, HIDDEN, device=device)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    compiled(x)
    layer.eps = 0.5
    assert torch.equal(compiled(x), te.LayerNorm(HIDDEN, eps=0.5, device=device)(x))


def test_structural_settings_are_fixed_after_construction(device):
    layer = make_layer("TransformerLayer").to(device)
    made_fused = te.MultiheadAttention(16, 2, fuse_qkv_params=True, device=device)
    for module, name, value in (
        (layer, "parallel_attention_mlp", True),
        (layer, "output_layernorm", True),
        (layer, "layer_type", "decoder"),
        (layer.self_attention, "input_layernorm", False),
        (layer.self_attention, "num_gqa_groups", 1),
        (made_fused, "qkv_weight_interleaved", False),
    ):
        with pytest.raises(AttributeError, match=f"{name}=.* make another one"):
            setattr(module, name, value)
        setattr(module, name, getattr(module, name))


# Kind, attribute, invalid value, expected error and message.
INVALID = [
    (
        "Linear",
        "return_bias",
        len,
        TypeError,
        "return_bias=.* is neither True nor False; give a bool",
    ),
    ("LayerNorm", "eps", "small", TypeError, "eps='small' must be a number"),
    ("LayerNormLinear", "eps", None, TypeError, "eps=None must be a number"),
    ("LayerNormMLP", "activation", "selu", ValueError, "activation='selu' does not exist; choose"),
    (
        "LayerNormMLP",
        "normalization",
        "BatchNorm",
        ValueError,
        "normalization='BatchNorm' does not exist",
    ),
    ("DotProductAttention", "attention_dropout", 2, ValueError, "attention_dropout=2"),
    (
        "DotProductAttention",
        "qkv_format",
        "bhsd",
        ValueError,
        "qkv_format='bhsd' does not exist; choose",
    ),
    (
        "MultiheadAttention",
        "qkv_format",
        None,
        ValueError,
        "qkv_format=None does not exist; choose",
    ),
    ("MultiheadAttention", "window_size", 3, TypeError, "window_size=3 must be two numbers"),
    ("TransformerLayer", "hidden_dropout", None, TypeError, "hidden_dropout=None"),
    (
        "TransformerLayer",
        "attn_input_format",
        "hsb",
        ValueError,
        "attn_input_format='hsb' does not exist",
    ),
]


@pytest.mark.parametrize("change", INVALID, ids=lambda c: f"{c[0]}-{c[1]}")
def test_writing_an_invalid_value_raises_and_changes_nothing(change, device):
    kind, name, value, error, sentence = change
    layer = make_layer(kind).to(device)
    recognized, before = layer._config, results(layer, None, device)
    with pytest.raises(error, match=sentence):
        setattr(layer, name, value)
    assert layer._config is recognized
    assert same(results(layer, None, device), before)


@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP"])
def test_return_layernorm_output_of_none_means_false(kind, device):
    layer = make_layer(kind).to(device)
    before = results(layer, None)
    layer.return_layernorm_output = None
    assert same(results(layer, None), before)


def test_an_attention_without_a_sink_cannot_learn_one_later(device):
    layer = make_layer("DotProductAttention").to(device)
    layer.softmax_type = "learnable"
    with pytest.raises(ValueError, match="softmax_offset"):
        results(layer, None)
    learnt = make_layer("DotProductAttention", softmax_type="learnable").to(device)
    torch.nn.init.constant_(learnt.softmax_offset, 2.0)
    learnt.softmax_type = "vanilla"
    assert same(
        results(learnt, None)[:1], results(make_layer("DotProductAttention"), None, device)[:1]
    )


def test_copies_have_independent_settings(device):
    layer = make_layer("LayerNormLinear").to(device)
    x = torch.randn(TOKENS, HIDDEN, device=device, requires_grad=True)
    plain = step(layer, x)
    other = copy.deepcopy(layer)
    other.eps = 0.5
    assert not same(step(other, x), plain)
    assert same(step(layer, x), plain)
