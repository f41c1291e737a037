"""Attention injected into hand-written modules with Hugging Face's layouts, without transformers."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

import transformer_engine.pytorch as te
from tests.support.tolerances import ATTENDED
from transformer_engine.common import recipe
from transformer_engine.pytorch.integrations.huggingface import (
    get_te_attention_stats,
    inject_te_attention,
    inject_te_attention_into_module,
    register_te_attention,
    reset_te_attention_stats,
    sdpa,
)
from transformer_engine.pytorch.integrations.huggingface.interface import te_attention_forward
from transformer_engine.pytorch.integrations.huggingface.layouts import HeadLayout, module_layout

HIDDEN, HEADS, GROUPS, SIZE, LENGTH = 32, 4, 2, 8, 12


class Attention(nn.Module):
    """Llama's layout: three projections, keys and values repeated for the heads of a group."""

    def __init__(self, groups: int = GROUPS, native_groups: bool = False) -> None:
        super().__init__()
        self.head_dim, self.scaling = SIZE, SIZE**-0.5
        self.q_proj = nn.Linear(HIDDEN, HEADS * SIZE)
        self.k_proj = nn.Linear(HIDDEN, groups * SIZE)
        self.v_proj = nn.Linear(HIDDEN, groups * SIZE)
        self.o_proj = nn.Linear(HEADS * SIZE, HIDDEN)
        self.native_groups = native_groups

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, **options) -> torch.Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.native_groups:
            options["enable_gqa"] = True
        else:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        options.setdefault("is_causal", mask is None)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scaling, **options)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Imported(Attention):
    """Calls torch's attention through a name imported into its file."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, SIZE)).transpose(1, 2)
        return scaled_dot_product_attention(q, q, q)


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, **options) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, **options)
        return x


@pytest.fixture(autouse=True)
def counters():
    torch.manual_seed(0)
    reset_te_attention_stats()


def stats_equal(**expected: int) -> bool:
    names = ("te_hits", "fallback_mask", "fallback_scale_mismatch", "fallback_input")
    return get_te_attention_stats() == {name: expected.get(name, 0) for name in names}


def pair(**options) -> tuple[Model, Model]:
    """(stock, injected) models with the same weights."""
    stock = Model(Attention(**options), Attention(**options))
    injected = copy.deepcopy(stock)
    inject_te_attention(injected)
    return stock, injected


def tokens(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, LENGTH, HIDDEN, requires_grad=True)


def causal(padding: tuple[int, ...] = (LENGTH, LENGTH), window: int = LENGTH) -> torch.Tensor:
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    ends = torch.tensor(padding)[:, None, None, None]
    return (j <= i) & (j > i - window) & (j < ends)


def output_and_gradients(model: nn.Module, x: torch.Tensor, **options) -> list[torch.Tensor]:
    """Output, and gradients for the input and all weights."""
    y = model(x, **options)
    return [y, *torch.autograd.grad(y.square().sum(), (x, *model.parameters()))]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for actual, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, right, **ATTENDED)


CALLS = {
    "causal": {},
    "no mask": {"is_causal": False},
    "a causal mask": {"mask": causal()},
    "a window": {"mask": causal(window=4)},
    "an additive mask": {
        "mask": torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(~causal(), -torch.inf)
    },
}


@pytest.mark.sampled(pairs=True)
@pytest.mark.parametrize("native_groups", [False, True])
@pytest.mark.parametrize("groups", [GROUPS, HEADS])
@pytest.mark.parametrize("call", list(CALLS))
def test_injected_model_outputs_and_gradients_match_the_stock_model(call, groups, native_groups):
    stock, injected = pair(groups=groups, native_groups=native_groups)
    x = tokens()
    assert_same(
        output_and_gradients(injected, x, **CALLS[call]),
        output_and_gradients(stock, x, **CALLS[call]),
    )
    assert stats_equal(te_hits=2)


def test_repeated_keys_reach_the_attention_once(monkeypatch):
    _, injected = pair()
    records = []
    core = injected.layers[0].attn_module
    forward = core.forward
    monkeypatch.setattr(
        core,
        "forward",
        lambda q, k, v, **rest: records.append((q.shape, k.shape)) or forward(q, k, v, **rest),
    )
    injected(tokens())
    assert records == [((2, LENGTH, HEADS, SIZE), (2, LENGTH, GROUPS, SIZE))]


def test_padded_batches_match_on_their_real_tokens():
    stock, injected = pair()
    x, mask = tokens(), causal((LENGTH, 5))
    ours, reference = injected(x, mask=mask), stock(x, mask=mask)
    torch.testing.assert_close(ours[0], reference[0], **ATTENDED)
    torch.testing.assert_close(ours[1, :5], reference[1, :5], **ATTENDED)
    assert stats_equal(te_hits=2)


@pytest.mark.parametrize("case", ["mask", "scale", "input"])
def test_unsupported_calls_fall_back_to_torch_and_are_counted(case, caplog):
    stock, injected = pair()
    x = tokens()
    if case == "mask":
        mask = causal()
        mask[..., 5, 2] = False
        assert_same(
            output_and_gradients(injected, x, mask=mask), output_and_gradients(stock, x, mask=mask)
        )
        assert stats_equal(fallback_mask=2)
    elif case == "scale":
        for model in (stock, injected):
            for layer in model.layers:
                layer.scaling = 0.5
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert_same(output_and_gradients(injected, x), output_and_gradients(stock, x))
        assert stats_equal(fallback_scale_mismatch=4)
        # one for each layer
        assert len([r for r in caplog.records if "scale=0.5" in r.message]) == 2
    else:
        stock, injected, x = (
            stock.double(),
            injected.double(),
            tokens().detach().double().requires_grad_(),
        )
        assert_same(output_and_gradients(injected, x), output_and_gradients(stock, x))
        assert stats_equal(fallback_input=2)


def test_injected_attention_uses_the_layers_scale():
    stock = Model(Attention())
    stock.layers[0].scaling = 0.7
    injected = copy.deepcopy(stock)
    inject_te_attention(injected)
    x = tokens()
    assert_same(output_and_gradients(injected, x), output_and_gradients(stock, x))
    assert stats_equal(te_hits=1)


def test_the_window_of_a_layer_holds_where_no_mask_is_given():
    layer = Attention()
    layer.sliding_window = 4
    x = tokens()
    expected = layer(x, mask=causal(window=4))
    assert inject_te_attention_into_module(layer)
    torch.testing.assert_close(layer(x), expected, **ATTENDED)


@pytest.mark.parametrize("said", ["is_sliding", "layer_types"])
def test_a_full_attention_layer_may_have_a_window_size(said):
    """As in Exaone 4: every layer has sliding_window, and every fourth does not slide."""
    stock = Model(Attention(), Attention())
    for index, layer in enumerate(stock.layers):
        layer.sliding_window, layer.layer_idx = 4, index
        if said == "is_sliding":
            layer.is_sliding = index == 0
        else:
            layer.config = SimpleNamespace(layer_types=["sliding_attention", "full_attention"])
    injected = copy.deepcopy(stock)
    inject_te_attention(injected)
    x = tokens()
    sliding = x + stock.layers[0](x, mask=causal(window=4))
    expected = sliding + stock.layers[1](sliding)
    torch.testing.assert_close(injected(x), expected, **ATTENDED)
    assert stats_equal(te_hits=2)


def test_injecting_twice_changes_nothing():
    _, injected = pair()
    before = [(layer.attn_module, layer.forward) for layer in injected.layers]
    assert injected._te_attention_injected
    inject_te_attention(injected)
    assert [(layer.attn_module, layer.forward) for layer in injected.layers] == before
    assert not inject_te_attention_into_module(injected.layers[0])


def test_a_layer_with_its_own_attention_module_is_unchanged():
    layer = Attention()
    layer.attn_module = nn.Identity()
    assert not inject_te_attention_into_module(layer)


def test_a_checkpoint_of_an_injected_model_is_the_stock_one():
    stock, injected = pair()
    assert list(injected.state_dict()) == list(stock.state_dict())
    assert not [name for name, _ in injected.named_modules() if "attn_module" in name]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_computes_with_its_own_weights(copied):
    _, injected = pair()
    x = tokens()
    before = injected(x)
    other = copied(injected)
    with torch.no_grad():
        for weight in injected.parameters():
            weight.zero_()
    torch.testing.assert_close(other(x), before)
    assert stats_equal(te_hits=4)


def test_an_injected_forward_has_the_signature_of_the_stock_one():
    stock, injected = pair()
    ours, reference = (inspect.signature(model.layers[0].forward) for model in (injected, stock))
    assert list(ours.parameters) == list(reference.parameters)


def test_torchs_own_attention_is_untouched_outside():
    _, injected = pair()
    assert F.scaled_dot_product_attention is sdpa.TORCH_SDPA
    injected(tokens())
    assert F.scaled_dot_product_attention is sdpa.TORCH_SDPA

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"), sdpa.replaced(fail):
        F.scaled_dot_product_attention()
    assert F.scaled_dot_product_attention is sdpa.TORCH_SDPA


def test_threads_do_not_see_each_others_attention():
    """A thread without an injected model computes torch's attention while another is inside one."""
    inside, leave, records = threading.Event(), threading.Event(), []

    def other() -> None:
        with sdpa.replaced(lambda: "mine"):
            inside.set()
            assert leave.wait(60)
            records.append(F.scaled_dot_product_attention())

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(60)
    q = torch.randn(1, 1, 3, 8)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), sdpa.TORCH_SDPA(q, q, q))
    with sdpa.replaced(lambda: "here"):
        assert F.scaled_dot_product_attention() == "here"
    leave.set()
    thread.join()
    assert records == ["mine"]
    assert F.scaled_dot_product_attention is sdpa.TORCH_SDPA


def test_a_directly_imported_attention_is_skipped_with_a_warning(caplog):
    layer = Imported()
    with caplog.at_level(logging.WARNING):
        assert not inject_te_attention_into_module(layer)
    assert "Imported is not changed: its file imports scaled_dot_product_attention" in caplog.text


def test_an_argument_other_than_a_model_is_rejected():
    with pytest.raises(TypeError, match="model=None is no"):
        inject_te_attention(None)  # pyright: ignore[reportArgumentType]


def test_a_model_without_a_known_layout_warns(caplog):
    model = nn.Sequential(nn.Linear(4, 4))
    with caplog.at_level(logging.WARNING):
        inject_te_attention(model)
    assert "no attention layer of Sequential was changed" in caplog.text
    assert not hasattr(model, "_te_attention_injected")


def test_a_model_without_torchs_attention_warns(caplog):
    model = Model(Attention())
    model.config = type("Config", (), {"_attn_implementation": "eager"})()
    with caplog.at_level(logging.WARNING):
        inject_te_attention(model)
    assert "'eager'" in caplog.text and 'set_attn_implementation("sdpa")' in caplog.text


class WeightOnly(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, HIDDEN, device="meta"))


class Clipped(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, rows)


class Adapted(nn.Module):
    """As PEFT wraps a projection."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(HIDDEN, rows)


class Conv1D(nn.Module):
    """transformers' GPT-2 projection, whose weight is [in, out]."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.nf = columns
        self.weight = nn.Parameter(torch.empty(HIDDEN, columns))


def module(projections: dict[str, nn.Module], **attributes) -> nn.Module:
    instance = nn.Module()
    for name, projection in projections.items():
        instance.add_module(name, projection)
    for name, value in attributes.items():
        setattr(instance, name, value)
    return instance


def three(kind, groups: int = GROUPS) -> dict[str, nn.Module]:
    rows = (HEADS * SIZE, groups * SIZE, groups * SIZE)
    return {name: kind(n) for name, n in zip(("q_proj", "k_proj", "v_proj"), rows, strict=True)}


def linear(rows: int) -> nn.Linear:
    return nn.Linear(HIDDEN, rows)


EXPECTED = HeadLayout(HEADS, GROUPS, SIZE, SIZE, SIZE**-0.5, None)
CONFIG = type("Config", (), {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS})()
LAYOUTS = {
    "projections and a head size": (module(three(linear), head_dim=SIZE), EXPECTED),
    "a number of heads": (module(three(linear), num_heads=HEADS), EXPECTED),
    "a config": (module(three(linear), config=CONFIG), EXPECTED),
    "weights alone, on meta": (module(three(WeightOnly), head_dim=SIZE), EXPECTED),
    "wrapped projections": (module(three(Clipped), head_dim=SIZE), EXPECTED),
    "projections with adapters": (module(three(Adapted), head_dim=SIZE), EXPECTED),
    "one projection": (
        module({"qkv_proj": linear((HEADS + 2 * GROUPS) * SIZE)}, config=CONFIG),
        EXPECTED,
    ),
    "GPT-2": (
        module({"c_attn": Conv1D(3 * HEADS * SIZE)}, num_heads=HEADS, head_dim=SIZE),
        HeadLayout(HEADS, HEADS, SIZE, SIZE, SIZE**-0.5, None),
    ),
    "a scale and a window": (
        module(three(linear), head_dim=SIZE, scaling=0.3, sliding_window=7),
        HeadLayout(HEADS, GROUPS, SIZE, SIZE, 0.3, 7),
    ),
    "values of another size": (
        module({**three(linear), "v_proj": linear(GROUPS * 2 * SIZE)}, head_dim=SIZE),
        HeadLayout(HEADS, GROUPS, SIZE, 2 * SIZE, SIZE**-0.5, None),
    ),
    "no heads": (module(three(linear)), None),
    "a projection missing": (
        module({"q_proj": linear(8), "k_proj": linear(8)}, head_dim=SIZE),
        None,
    ),
    "sizes that do not divide": (module(three(linear), head_dim=SIZE + 1), None),
    "groups that do not divide the heads": (module(three(linear, groups=3), head_dim=SIZE), None),
    "one projection of another width": (module({"qkv_proj": linear(42)}, config=CONFIG), None),
    "no attention": (nn.Linear(4, 4), None),
}


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_layout_is_read_from_projections(name):
    argument, expected = LAYOUTS[name]
    assert module_layout(argument) == expected


def test_an_injected_model_compiles_as_one_graph():
    stock, injected = pair()
    x = tokens()
    compiled = torch.compile(injected, fullgraph=True, backend="aot_eager")
    assert_same(output_and_gradients(compiled, x), output_and_gradients(stock, x))


def test_fp8_attention_follows_autocast():
    """8-bit codes are used under autocast, for dense and padded batches, and nowhere else."""
    stock, injected = (model.bfloat16() for model in pair())
    x = torch.randn(2, 128, HIDDEN, dtype=torch.bfloat16)
    j = torch.arange(128)
    padded = (j <= j[:, None]) & (j < torch.tensor([128, 64])[:, None, None, None])
    for mask in (None, padded):
        real = (
            padded[:, 0].diagonal(dim1=1, dim2=2) if mask is not None else torch.ones(2, 128).bool()
        )
        exact = stock(x, mask=mask)[real]
        torch.testing.assert_close(injected(x, mask=mask)[real], exact, rtol=2**-6, atol=2**-6)
        with te.autocast(enabled=True, recipe=recipe.Float8CurrentScaling(fp8_dpa=True)):
            coded = injected(x, mask=mask)[real]
        error = (coded - exact).float().norm() / exact.float().norm()
        assert 0 < error < 2**-3


def test_torch_autocast_applies():
    stock, injected = pair()
    x = tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(injected(x), stock(x), rtol=2**-6, atol=2**-6)
    assert stats_equal(te_hits=2)


def test_dropout_uses_the_rate_in_the_call():
    _, injected = pair()
    x = tokens()
    torch.manual_seed(1)
    first = injected(x, dropout_p=0.5)
    assert not torch.equal(first, injected(x, dropout_p=0.5))
    torch.manual_seed(1)
    torch.testing.assert_close(injected(x, dropout_p=0.5), first)
    torch.testing.assert_close(injected(x, dropout_p=0.0), injected(x))


def test_inference_mode_does_not_cache_masks():
    stock, injected = pair()
    x = tokens().detach()
    with torch.inference_mode():
        mask = causal()
        torch.testing.assert_close(injected(x, mask=mask), stock(x, mask=mask), **ATTENDED)
        mask[..., 5, 2] = False
        torch.testing.assert_close(injected(x, mask=mask), stock(x, mask=mask), **ATTENDED)


def test_counters_are_logged_on_request(monkeypatch, caplog):
    monkeypatch.setenv("TE_ATTENTION_LOG_EVERY", "2")
    _, injected = pair()
    with caplog.at_level(logging.INFO):
        injected(tokens())
    assert [r.message for r in caplog.records if "attentions so far" in r.message] == [
        "attentions so far: {'te_hits': 2, 'fallback_mask': 0, 'fallback_scale_mismatch': 0, 'fallback_input': 0}"
    ]


@pytest.mark.parametrize("name", ["s_aux", "position_bias"])
def test_the_interface_rejects_unsupported_arguments(name):
    q = torch.randn(1, HEADS, 4, SIZE)
    with pytest.raises(
        NotImplementedError, match=f'{name} is not computed.*attn_implementation="eager"'
    ):
        te_attention_forward(nn.Module(), q, q, q, None, **{name: 1.0})


@pytest.mark.parametrize("mask", ["causal", "with a hole", "added"])
@pytest.mark.parametrize("softcap", [None, 0.7, 30.0])
def test_the_interface_computes_a_softcap_before_the_mask(softcap, mask):
    """Against float64, with gradients; values that a mask adds are not limited."""
    layer = nn.Module()
    leaves = [torch.randn(2, h, LENGTH, SIZE) for h in (HEADS, GROUPS, GROUPS)]
    leaves = [x.requires_grad_() for x in (2 * leaves[0], *leaves[1:])]
    inputs = torch.randn(2, 1, LENGTH, LENGTH) if mask == "added" else causal()
    if mask == "with a hole":
        inputs[..., 5, 2] = False
    out, weights = te_attention_forward(layer, *leaves, inputs, scaling=0.3, softcap=softcap)
    assert weights is None
    exact = [x.detach().double().requires_grad_() for x in leaves]
    q, k, v = exact[0], *(x.repeat_interleave(HEADS // GROUPS, 1) for x in exact[1:])
    scores = 0.3 * q @ k.mT
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores + inputs if mask == "added" else scores.masked_fill(~inputs, -torch.inf)
    expected = (scores.softmax(-1) @ v).transpose(1, 2)
    torch.testing.assert_close(out.double(), expected, **ATTENDED)
    grad = torch.randn(out.shape)
    actual = torch.autograd.grad(out, leaves, grad)
    for got, right in zip(actual, torch.autograd.grad(expected, exact, grad.double()), strict=True):
        torch.testing.assert_close(got.double(), right, **ATTENDED)


def test_softcaps_of_one_layer_are_separate_calls():
    layer, (q, k, v) = nn.Module(), (torch.randn(1, h, 6, SIZE) for h in (HEADS, GROUPS, GROUPS))
    outputs = [
        te_attention_forward(layer, q, k, v, None, softcap=cap)[0] for cap in (None, 0.5, 1.5, 0.5)
    ]
    assert torch.equal(outputs[1], outputs[3])
    assert len({out.sum().item() for out in outputs}) == 3
    with pytest.raises(ValueError, match="softcap must be finite and non-negative, got"):
        te_attention_forward(layer, q, k, v, None, softcap=-1.0)


def test_the_interface_takes_any_mask():
    """A mask that no mask type describes reaches the attention unchanged: booleans, or values added to the scores."""
    layer, (q, k, v) = (
        nn.Module(),
        (torch.randn(2, h, LENGTH, SIZE) for h in (HEADS, GROUPS, GROUPS)),
    )
    mask = causal()
    mask[..., 5, 2] = False
    for argument in (mask, torch.randn(2, 1, LENGTH, LENGTH)):
        out, _ = te_attention_forward(layer, q, k, v, argument, scaling=0.3)
        expected = F.scaled_dot_product_attention(q, k, v, argument, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(out, expected.transpose(1, 2), **ATTENDED)
    assert stats_equal(te_hits=2)


def test_without_transformers_everything_imports_and_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install transformers"):
        register_te_attention()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("call", list(CALLS))
def test_an_injected_model_is_the_stock_one_on_a_gpu(call, dtype):
    stock, injected = (model.cuda().to(dtype) for model in pair())
    options = {
        name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in CALLS[call].items()
    }
    if isinstance(options.get("mask"), torch.Tensor) and options["mask"].is_floating_point():
        options["mask"] = options["mask"].to(dtype)
    x = tokens().detach().cuda().to(dtype)
    bound = ATTENDED if dtype == torch.float32 else {"rtol": 2**-5, "atol": 2**-5}
    torch.testing.assert_close(injected(x, **options), stock(x, **options), **bound)
    assert stats_equal(te_hits=2)


@pytest.mark.gpu
def test_a_captured_step_leaves_a_mask_it_cannot_read_to_torch():
    stock, injected = (model.cuda() for model in pair())
    x, mask = tokens().detach().cuda(), causal().cuda()
    with torch.no_grad():
        expected = stock(x, mask=mask)
        injected(x, mask=mask)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        reset_te_attention_stats()
        with torch.cuda.graph(graph):
            out = injected(x, mask=mask)
        graph.replay()
    torch.testing.assert_close(out, expected, **ATTENDED)
    assert stats_equal(fallback_mask=2)
