"""transformers' models with attention of this engine: logits, gradients, training and greedy tokens of the stock ones.

Small random models of ten families. Two ways: injected layers, and attn_implementation="transformer_engine". Weights
are large enough for attention to matter: a wrong mask changes these logits by more than 1.
"""

from __future__ import annotations

import copy
import importlib.util
import pickle
import re
from pathlib import Path

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.tolerances import ATTENDED
from transformer_engine.common import recipe
from transformer_engine.pytorch.integrations.huggingface import (
    get_te_attention_stats,
    inject_te_attention,
    register_te_attention,
    reset_te_attention_stats,
)

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None,
        reason="transformers is not installed; `make test-clients` installs it",
    ),
]

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "huggingface.md").read_text()
EXAMPLES = re.findall(r"```python-attention\n(.*?)```", PAGE, re.DOTALL)
LAYERS, LENGTH, VOCABULARY = 2, 12, 64
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0}
# name: (config class, its arguments)
FAMILIES = {
    "llama": ("LlamaConfig", GROUPED),
    "qwen2": (
        "Qwen2Config",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {**GROUPED, "head_dim": 16}),
    "mistral": ("MistralConfig", {**GROUPED, "sliding_window": 4}),
    "gemma2": (
        "Gemma2Config",
        {
            **GROUPED,
            "head_dim": 8,
            "sliding_window": 4,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": None,
        },
    ),
    "phi3": ("Phi3Config", {**GROUPED, "sliding_window": 5}),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": LAYERS,
            "n_head": 4,
            "n_positions": 64,
            "initializer_range": 0.3,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", SMALL),
    "granite": ("GraniteConfig", {**GROUPED, "attention_multiplier": 0.3}),
    "bert": (
        "BertConfig",
        {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
}
DECODERS = [name for name in FAMILIES if name != "bert"]
WAYS = ("injected", "attn_implementation")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PADDING = {"none": (LENGTH,) * 3, "right": (LENGTH, 8, 3), "left": (LENGTH, 8, 3)}


def stock(family: str, **changed):
    import transformers

    torch.manual_seed(0)
    kind, arguments = FAMILIES[family]
    config = getattr(transformers, kind)(**{**arguments, **changed})
    auto = (
        transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM
    )
    return auto.from_config(config, attn_implementation="sdpa").eval()


def engine(model, way: str):
    """The same model with engine attention, and the counters at 0."""
    ours = copy.deepcopy(model)
    if way == "injected":
        inject_te_attention(ours)
    else:
        register_te_attention()
        ours.set_attn_implementation("transformer_engine")
    reset_te_attention_stats()
    return ours


def tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))


def attention_mask(side: str) -> torch.Tensor | None:
    """Padding mask [3, LENGTH] as in transformers, 1 = token."""
    if side == "none":
        return None
    right = (torch.arange(LENGTH) < torch.tensor(PADDING[side])[:, None]).long()
    return right if side == "right" else right.flip(1)


def real(side: str) -> torch.Tensor:
    mask = attention_mask(side)
    return torch.ones(3, LENGTH, dtype=torch.bool) if mask is None else mask.bool()


def all_computed(calls: int) -> bool:
    counts = get_te_attention_stats()
    return counts["te_hits"] == calls and sum(counts.values()) == calls


def logits_and_gradients(model, side: str, device: str = "cpu") -> list[torch.Tensor]:
    """Logits for the real tokens, and gradients for all weights."""
    mask = attention_mask(side)
    mask = None if mask is None else mask.to(device)
    logits = model(tokens().to(device), attention_mask=mask).logits[real(side).to(device)]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    loss = logits.float().square().mean()
    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    return [logits, *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("side", list(PADDING))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.sampled(pairs=True)
def test_logits_and_gradients_match_stock_attention(family, way, side):
    model = stock(family)
    ours = engine(model, way)
    for actual, right in zip(
        logits_and_gradients(ours, side), logits_and_gradients(model, side), strict=True
    ):
        torch.testing.assert_close(actual, right, **ATTENDED)
    assert all_computed(LAYERS)


@pytest.mark.parametrize("side", list(PADDING))
def test_full_attention_layers_ignore_the_window(side):
    """Exaone 4 passes the model's sliding_window to every layer, and a mask only to sliding layers."""
    import transformers

    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Exaone4Config(**GROUPED, sliding_window=4, layer_types=kinds)
    model = transformers.Exaone4ForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    for actual, right in zip(
        logits_and_gradients(engine(model, "injected"), side),
        logits_and_gradients(model, side),
        strict=True,
    ):
        torch.testing.assert_close(actual, right, **ATTENDED)
    assert all_computed(LAYERS)


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_window_changes_the_logits(way):
    """The comparison above can fail: the same weights with another window are another model."""
    model, other = stock("mistral"), stock("mistral", sliding_window=5)
    difference = engine(other, way)(tokens()).logits - model(tokens()).logits
    assert difference.abs().max() > 0.5


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_training_follows_the_stock_losses(family, way):
    """Four AdamW steps on a padded batch, with recomputed layers."""
    losses = []
    model = stock(family)
    for trained in (model, engine(model, way)):
        trained = copy.deepcopy(trained).train()
        trained.gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
        labels = tokens().masked_fill(~real("right"), -100)
        for _ in range(4):
            loss = trained(
                tokens(), attention_mask=attention_mask("right"), labels=labels, use_cache=False
            ).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[4:] == pytest.approx(losses[:4], rel=1e-4)
    assert losses[3] < losses[0]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.sampled(pairs=True)
def test_greedy_tokens_match_stock_attention(family, way, side, cache):
    model = stock(family)
    ours = engine(model, way)
    options = {
        "attention_mask": real(side).long(),
        "max_new_tokens": 8,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        "cache_implementation": None if cache == "dynamic" else "static",
        "disable_compile": True,
    }
    assert torch.equal(ours.generate(tokens(), **options), model.generate(tokens(), **options))
    assert all_computed(8 * LAYERS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_several_tokens_after_a_cache_equal_one_full_pass(family, way):
    import transformers

    model = stock(family)
    ours, full = engine(model, way), model(tokens()).logits
    cache = transformers.DynamicCache(config=model.config)
    parts = [
        ours(part, past_key_values=cache, use_cache=True).logits
        for part in tokens().split([5, 4, 3], dim=1)
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), full, **ATTENDED)
    assert all_computed(3 * LAYERS)


def create_softcap_model(attention: str = "eager"):
    """A Gemma 2 whose softcap changes the logits by more than 1."""
    model = stock("gemma2", attn_logit_softcapping=0.5)
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize("side", list(PADDING))
def test_a_softcap_is_computed_as_in_eager_attention(side):
    model = create_softcap_model()
    for actual, right in zip(
        logits_and_gradients(engine(model, "attn_implementation"), side),
        logits_and_gradients(model, side),
        strict=True,
    ):
        torch.testing.assert_close(actual, right, **ATTENDED)
    assert all_computed(LAYERS)
    assert (model(tokens()).logits - create_softcap_model("sdpa")(tokens()).logits).abs().max() > 1


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
def test_greedy_tokens_with_a_softcap_are_those_of_eager_attention(side, cache):
    model = create_softcap_model()
    options = {
        "attention_mask": real(side).long(),
        "max_new_tokens": 8,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        "cache_implementation": None if cache == "dynamic" else "static",
        "disable_compile": True,
    }
    expected = model.generate(tokens(), **options)
    assert torch.equal(engine(model, "attn_implementation").generate(tokens(), **options), expected)


def test_training_with_a_softcap_follows_eager_losses():
    model, losses = create_softcap_model(), []
    for trained in (model, engine(model, "attn_implementation")):
        trained = copy.deepcopy(trained).train()
        trained.gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
        labels = tokens().masked_fill(~real("right"), -100)
        for _ in range(4):
            options = {
                "attention_mask": attention_mask("right"),
                "labels": labels,
                "use_cache": False,
            }
            loss = trained(tokens(), **options).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[4:] == pytest.approx(losses[:4], rel=1e-4)


def test_a_compiled_model_with_a_softcap_is_one_graph():
    torch.compiler.reset()
    model = create_softcap_model()
    ours = torch.compile(engine(model, "attn_implementation"), fullgraph=True, backend="aot_eager")
    result = ours(tokens(), use_cache=False).logits
    torch.testing.assert_close(result, model(tokens(), use_cache=False).logits, **ATTENDED)


def test_an_injected_layer_ignores_a_softcap_as_sdpa_does():
    model = create_softcap_model("sdpa")
    torch.testing.assert_close(
        engine(model, "injected")(tokens()).logits, model(tokens()).logits, **ATTENDED
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_pickled_model_is_the_same(way):
    ours = engine(stock("llama"), way)
    before = ours(tokens()).logits
    torch.testing.assert_close(pickle.loads(pickle.dumps(ours))(tokens()).logits, before)


@pytest.mark.parametrize("way", WAYS)
def test_packed_sequences_do_not_see_each_other(way):
    model = stock("llama")
    positions = torch.cat((torch.arange(5), torch.arange(LENGTH - 5))).expand(3, -1)
    ours = engine(model, way)(tokens(), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(
        ours, model(tokens(), position_ids=positions, use_cache=False).logits, **ATTENDED
    )
    assert all_computed(LAYERS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way, side", [("injected", "right"), ("attn_implementation", "none")])
def test_a_compiled_model_is_one_graph(way, side):
    torch.compiler.reset()  # graphs that other tests made of the same code count towards dynamo's limit
    model = stock("llama")
    ours = torch.compile(engine(model, way), fullgraph=True, backend="aot_eager")
    mask = attention_mask(side)
    result = ours(tokens(), attention_mask=mask, use_cache=False).logits[real(side)]
    torch.testing.assert_close(
        result, model(tokens(), attention_mask=mask, use_cache=False).logits[real(side)], **ATTENDED
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "scaling", [recipe.DelayedScaling(fp8_dpa=True), recipe.Float8CurrentScaling(fp8_dpa=True)]
)
def test_fp8_attention_trains_under_autocast(way, scaling):
    """The loss falls, and the logits differ from bfloat16 logits because codes have 8 bits."""
    model = engine(stock("llama", initializer_range=0.1).bfloat16().to(DEVICE), way)
    ids, observed, mask = (
        tokens().to(DEVICE),
        real("right").to(DEVICE),
        attention_mask("right").to(DEVICE),
    )
    labels = ids.masked_fill(~observed, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(4):
        with te.autocast(enabled=True, recipe=scaling):
            result = model(ids, attention_mask=mask, labels=labels, use_cache=False)
        result.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.loss.item())
    assert losses[-1] < losses[0]
    with te.autocast(enabled=True, recipe=scaling), torch.no_grad():
        coded = model(ids, attention_mask=mask).logits[observed].float()
    plain = model(ids, attention_mask=mask).logits[observed].float()
    assert 0 < (coded - plain).norm() / plain.norm() < 2**-3


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_the_page_runs(example):
    exec(compile(example, "docs/huggingface.md", "exec"), {})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", list(PADDING))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_logits_and_gradients_on_a_gpu(family, way, side, dtype):
    """bfloat16: as near to float32 as the stock model is, twice."""
    model = stock(family, initializer_range=0.1)
    exact = logits_and_gradients(model, side)
    model = model.cuda().to(dtype)
    reference = logits_and_gradients(model, side, "cuda")
    ours = logits_and_gradients(engine(model, way), side, "cuda")
    assert all_computed(LAYERS)
    # Key bias gradients are 0 up to rounding: errors are relative to the largest gradient.
    least = 0.01 * max(right.norm() for right in exact)
    for actual, stocks, right in zip(ours, reference, exact, strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(actual.cpu(), right, rtol=1e-3, atol=1e-4)
            continue
        errors = [
            (x.float().cpu() - right).norm() / max(right.norm(), least) for x in (actual, stocks)
        ]
        assert errors[0] <= 2 * errors[1] + 2**-7


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_greedy_tokens_on_a_gpu(family, way, side, cache):
    """float32, also where transformers compiles static-cache steps."""
    model = stock(family).cuda()
    options = {
        "attention_mask": real(side).long().cuda(),
        "max_new_tokens": 8,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        "cache_implementation": None if cache == "dynamic" else "static",
    }
    expected = model.generate(tokens().cuda(), **options)
    assert torch.equal(engine(model, way).generate(tokens().cuda(), **options), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_fp8_attention_trains_on_a_gpu(way):
    model = engine(stock("llama", initializer_range=0.1, head_dim=64).bfloat16().cuda(), way)
    labels = tokens().repeat(1, 16).cuda()[:, :64]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(4):
        with te.autocast(enabled=True, recipe=recipe.DelayedScaling(fp8_dpa=True)):
            loss = model(labels, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
