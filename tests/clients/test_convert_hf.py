"""Converted models of transformers compute, train, generate, save and load as the stock ones do, and turn back."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_engine.pytorch as te
from tests.clients import installed
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
)
from transformer_engine.pytorch.integrations.huggingface.convertible import decoder_config
from transformer_engine.pytorch.integrations.huggingface.layer_names import LayerNames
from transformer_engine.pytorch.quantization.autocast import current

pytestmark = [
    *installed.needs("transformers"),
    installed.EMULATED,
    pytest.mark.filterwarnings("ignore"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPES = {
    "high precision": None,
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "blocks": Float8BlockScaling(),
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, biases": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    ),
    "llama, tied, yarn": ("Llama", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "llama, dynamic": ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 16}),
    "mistral": ("Mistral", {"sliding_window": 8, "head_dim": 32}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma": ("Gemma", {"head_dim": 32, "num_key_value_heads": 1}),
}


def stock(family: str = "llama", kind: str = "ForCausalLM", **more: Any) -> Any:
    """A tiny seeded model whose norms and biases differ from their initial values."""
    import transformers

    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    small = {
        "vocab_size": installed.VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**{**small, **settings, **more})
    model = getattr(transformers, f"{name}{kind}")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.to(DEVICE)


def both(family: str = "llama", recipe: Any = None, **more: Any) -> tuple[Any, Any]:
    reference = stock(family, **more)
    return reference, te.convert_hf(copy.deepcopy(reference), recipe=recipe)


def their_gradients(model: Any) -> dict[str, Tensor]:
    """A converted causal model's gradients under the stock model's names."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    names = LayerNames.of(model.config.model_type, decoder_config(model.model))
    for number in range(len(model.model.layers)):
        names.to_theirs(gradients, f"model.layers.{number}.")
    return gradients


def close(ours: Tensor, theirs: Tensor) -> None:
    """Equal to the rounding of float32; a GPU's float32 attention adds up in another order."""
    near = {"rtol": 2e-5, "atol": 2e-6} if DEVICE == "cpu" else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(ours, theirs, **near)


def train(model: Any, steps: int = 4) -> list[float]:
    model.train()
    tokens = installed.tokens(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step() -> Tensor:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return installed.losses(step, steps)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_gradients_match_the_stock_model(family):
    reference, ours = both(family)
    tokens = installed.tokens(DEVICE)
    expected, actual = (
        model(tokens, labels=tokens, output_hidden_states=True) for model in (reference, ours)
    )
    close(actual.logits, expected.logits)
    close(actual.loss, expected.loss)
    for own, other in zip(actual.hidden_states, expected.hidden_states, strict=True):
        close(own, other)
    expected.loss.backward()
    actual.loss.backward()
    gradients = their_gradients(ours)
    assert set(gradients) == {name for name, _ in reference.named_parameters()}
    for name, parameter in reference.named_parameters():
        close(gradients[name], parameter.grad)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_state_dict_has_the_stock_model_s_names_and_values(family):
    reference, ours = both(family)
    state = {
        name: value
        for name, value in ours.state_dict().items()
        if not name.endswith("_extra_state")
    }
    assert set(state) == set(reference.state_dict())
    assert all(torch.equal(state[name], value) for name, value in reference.state_dict().items())
    other = te.convert_hf(stock(family).to(DEVICE))
    nn.init.zeros_(other.model.layers[0].mlp.fc1_weight)
    other.load_state_dict(reference.state_dict(), strict=True)
    tokens = installed.tokens(DEVICE)
    assert torch.equal(other(tokens).logits, ours(tokens).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_restoring_gives_the_stock_model(family):
    reference, ours = both(family)
    te.revert_hf(ours)
    assert [type(module) for module in ours.modules()] == [
        type(module) for module in reference.modules()
    ]
    assert list(ours.state_dict()) == list(reference.state_dict())
    assert ours.config._attn_implementation == reference.config._attn_implementation
    tokens = installed.tokens(DEVICE)
    assert torch.equal(ours(tokens, labels=tokens).loss, reference(tokens, labels=tokens).loss)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", ["dynamic", "static", None])
def test_generation_matches_the_stock_model(family, cache):
    reference, ours = (model.eval() for model in both(family))
    prompt = installed.tokens(DEVICE)[:, :9]
    seen = torch.ones_like(prompt)
    seen[0, :4] = 0  # left padding: the first sequence's positions begin later
    how: dict[str, Any] = {
        "max_new_tokens": 8,
        "do_sample": False,
        "attention_mask": seen,
        "use_cache": cache is not None,
    }
    if cache == "static":
        how["cache_implementation"] = "static"
        how["disable_compile"] = True
    assert torch.equal(ours.generate(prompt, **how), reference.generate(prompt, **how))


def test_padded_batches_and_given_positions():
    reference, ours = both()
    tokens = installed.tokens(DEVICE)
    observed = torch.ones_like(tokens)
    observed[1, 20:] = 0
    places = torch.stack([torch.arange(32), torch.arange(32) + 5]).to(DEVICE)
    for options in ({"attention_mask": observed}, {"position_ids": places}):
        saved = observed.bool() if "attention_mask" in options else torch.ones_like(observed).bool()
        close(ours(tokens, **options).logits[saved], reference(tokens, **options).logits[saved])


@pytest.mark.parametrize("kind", ["Model", "ForSequenceClassification"])
def test_models_with_another_head_are_converted_too(kind):
    reference = stock(kind=kind)
    ours = te.convert_hf(copy.deepcopy(reference))
    tokens = installed.tokens(DEVICE)
    for actual, other in zip(
        ours(tokens).to_tuple()[:1], reference(tokens).to_tuple()[:1], strict=True
    ):
        close(actual, other)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_quantizes_training_and_generation(name):
    recipe = RECIPES[name]
    reference, ours = both(recipe=recipe)
    losses = train(ours)
    installed.assert_falls(losses, least=0.1)
    assert losses[0] == pytest.approx(train(reference)[0], abs=2e-2)
    plain = train(te.convert_hf(stock()))
    assert (losses == plain) == (recipe is None)
    assert not current().enabled
    generated = ours.eval().generate(
        installed.tokens(DEVICE)[:, :16], max_new_tokens=3, do_sample=False
    )
    assert generated.shape == (2, 19)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_recomputed_layers_change_no_bit(name, reentrant):
    model = te.convert_hf(stock(), recipe=RECIPES[name])
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert train(model) == _losses_without_recomputation(name)


@functools.cache
def _losses_without_recomputation(name):
    return train(te.convert_hf(stock(), recipe=RECIPES[name]))


def test_recomputation_that_forgets_the_recipe_is_rejected():
    model = te.convert_hf(stock(), recipe=DelayedScaling()).train()
    model.gradient_checkpointing_enable(offload=True)
    tokens = installed.tokens(DEVICE)
    with pytest.raises(ValueError, match="does not repeat a recipe"):
        model(tokens, labels=tokens)
    assert not current().enabled


def test_a_forward_that_raises_leaves_the_recipe():
    model = te.convert_hf(stock(), recipe=DelayedScaling())

    def stop(*call: Any) -> None:
        assert current().enabled
        raise InterruptedError

    hook = model.model.layers[1].register_forward_hook(stop)
    with pytest.raises(InterruptedError):
        train(model, 1)
    assert not current().enabled
    hook.remove()
    assert len(train(model, 2)) == 2


def test_the_caller_s_recipe_is_followed_where_none_was_given():
    model = te.convert_hf(stock())
    tokens = installed.tokens(DEVICE)
    plain = model(tokens).logits
    with te.autocast(recipe=Float8CurrentScaling()):
        quantized = model(tokens).logits
    assert 0 < (plain - quantized).abs().max() < 0.5


def test_products_are_in_bfloat16_under_torch_autocast():
    reference, ours = both()
    tokens = installed.tokens(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        expected, actual = reference(tokens, labels=tokens).loss, ours(tokens, labels=tokens).loss
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "recipe", [DelayedScaling(), MXFP8BlockScaling()], ids=["delayed", "mxfp8"]
)
def test_converted_weights_can_be_quantized_parameters(recipe, tmp_path):
    reference = stock()
    with te.quantized_model_init(recipe=recipe):
        ours = te.convert_hf(copy.deepcopy(reference), recipe=recipe)
    weight = ours.model.layers[0].mlp.fc1_weight
    assert isinstance(weight, te.QuantizedTensor)
    state = ours.state_dict()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0.07, atol=2e-3)
    other = te.convert_hf(stock())
    other.load_state_dict(state)
    assert not any(isinstance(value, te.QuantizedTensor) for value in state.values())
    ours.save_pretrained(tmp_path)
    saved = type(reference).from_pretrained(tmp_path).state_dict()
    ours.load_state_dict(state)  # values become the same codes again
    te.revert_hf(ours)
    assert {type(parameter) for parameter in ours.parameters()} == {nn.Parameter}
    for name, value in ours.state_dict().items():
        assert torch.equal(value, state[name]) and torch.equal(value, saved[name].to(DEVICE))


@pytest.mark.parametrize("recipe", [None, DelayedScaling()], ids=["high precision", "delayed"])
@pytest.mark.parametrize("family", ["llama", "llama, tied, yarn"])
def test_saved_files_equal_the_stock_model_files(family, recipe, tmp_path):
    reference, ours = both(family, recipe)
    train(ours, 2)
    ours.save_pretrained(tmp_path)
    loaded, about = type(reference).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(about[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.config.architectures == [type(reference).__name__]
    te.revert_hf(ours)
    assert all(
        torch.equal(value.to(DEVICE), ours.state_dict()[name])
        for name, value in loaded.state_dict().items()
    )
    if "tied" in family:
        assert ours.lm_head.weight is ours.model.embed_tokens.weight


def test_a_part_that_a_state_dict_lacks_is_named_and_kept():
    model, reference = te.convert_hf(stock()), stock()
    before, state = model.state_dict(), reference.state_dict()
    name = "model.layers.1.self_attn.q_proj.weight"
    del state[name]
    report = model.load_state_dict(state, strict=False)
    assert report.missing_keys == [name] and not report.unexpected_keys
    after = model.state_dict()
    assert torch.equal(after[name], before[name])
    assert all(torch.equal(after[key], value) for key, value in state.items())
    with pytest.raises(RuntimeError, match=f"Missing key.*{name}"):
        model.load_state_dict(state)
    state[name] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match=f"size mismatch for {name}: its shape is \\[3, 3\\]"):
        model.load_state_dict(state)
    assert torch.equal(model.state_dict()[name], before[name])


@pytest.mark.parametrize("when", ["before", "between"])
def test_attention_outputs_are_recorded_again_after_restoring(when):
    model, tokens = stock(), installed.tokens(DEVICE)
    model.set_attn_implementation("eager")
    if when == "before":
        model(tokens, output_hidden_states=True)
    te.convert_hf(model)
    if when == "between":
        model(tokens, output_hidden_states=True)
    te.revert_hf(model)
    result = model(tokens, output_attentions=True, output_hidden_states=True)
    layers = len(model.model.layers)
    assert len(result.attentions) == layers and len(result.hidden_states) == layers + 1


def test_user_attributes_and_modules_survive_restoring():
    model, tokens = stock().eval(), installed.tokens(DEVICE)
    attention = model.model.layers[0].self_attn
    attention.scaling, attention.is_causal, attention.attention_dropout = 0.9, False, 0.25
    model.model.layers[1].extra = nn.Linear(2, 2)
    expected = model(tokens).logits
    close(te.convert_hf(model)(tokens).logits, expected)
    model.model.layers[0].self_attn.scaling = 0.8
    expected = model(tokens).logits
    close(te.revert_hf(model)(tokens).logits, expected)
    assert model.model.layers[0].self_attn.attention_dropout == 0.25
    assert model.model.layers[1].extra.weight.requires_grad


def test_training_and_evaluation_are_kept():
    for training in (True, False):
        model = stock().train(training)
        te.convert_hf(model)
        assert {module.training for module in model.modules()} == {training}
        te.revert_hf(model)
        assert {module.training for module in model.modules()} == {training}


@pytest.mark.parametrize("recipe", [None, DelayedScaling()], ids=["high precision", "delayed"])
def test_states_of_a_recipe_come_back_with_a_state_dict(recipe):
    model = te.convert_hf(stock(), recipe=recipe)
    train(model, 3)
    other = te.convert_hf(stock(), recipe=recipe)
    other.load_state_dict(model.state_dict())
    tokens = installed.tokens(DEVICE)
    assert torch.equal(other(tokens).logits, model(tokens).logits)


def test_copies_and_pickles_are_independent_models():
    model = te.convert_hf(stock(), recipe=Float8CurrentScaling())
    tokens = installed.tokens(DEVICE)
    expected = model(tokens).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(tokens).logits, expected)
        te.revert_hf(other)
    assert torch.equal(model(tokens).logits, expected)


def test_frozen_weights_stay_frozen_both_ways():
    model = stock()
    for layer in model.model.layers:
        layer.self_attn.requires_grad_(False)
        layer.input_layernorm.requires_grad_(False)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    te.convert_hf(model)
    attention = model.model.layers[0].self_attn
    assert not any(parameter.requires_grad for parameter in attention.parameters())
    assert model.model.layers[0].mlp.fc1_weight.requires_grad
    te.revert_hf(model)
    assert {
        name for name, parameter in model.named_parameters() if not parameter.requires_grad
    } == frozen


@pytest.mark.slow
def test_a_converted_model_compiles_as_one_graph():
    model = te.convert_hf(stock(num_hidden_layers=1), recipe=Float8CurrentScaling())
    tokens = installed.tokens(DEVICE)
    expected = model(tokens, labels=tokens, use_cache=False).loss
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual = compiled(tokens, labels=tokens, use_cache=False).loss
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    actual.backward()
    assert model.model.layers[0].mlp.fc1_weight.grad is not None


def test_an_unsupported_model_or_layer_is_named():
    import transformers

    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=32)
    )
    model = stock()
    exact = stock("gemma", hidden_act="gelu")
    halves, partly, converted = stock(), stock(), te.convert_hf(stock())
    halves.model.layers[1].mlp.half()
    partly.model.layers[1].self_attn.q_proj.requires_grad_(False)
    adapted, dispatched = stock(), stock()
    dispatched.model.layers[0].mlp._hf_hook = object()
    adapted.model.layers[0].self_attn.q_proj = te.Linear(64, 64, bias=False)
    shared, hooked, watched = stock(), stock(), stock()
    shared.model.layers[1].mlp.up_proj.weight = shared.model.layers[0].mlp.up_proj.weight
    hooked.model.layers[1].self_attn.q_proj.register_forward_hook(print)
    watched.model.layers[0].mlp.down_proj.weight.register_hook(print)

    class Doubled(type(model.model.layers[0].mlp)):
        def forward(self, x):
            return 2 * super().forward(x)

    doubled, patched, rounder, last = stock(), stock(), stock("gemma"), stock()
    doubled.model.layers[0].mlp.__class__ = Doubled
    patched.model.layers[1].post_attention_layernorm.forward = torch.sin
    rounder.model.layers[1].input_layernorm.eps = 0.5
    last.model.norm.variance_epsilon = 0.5
    for wrong, sentence in (
        (doubled, "mlp of layer 0 of LlamaModel is a Doubled"),
        (patched, "post_attention_layernorm of layer 1 of LlamaModel has a replaced forward"),
        (rounder, "input_layernorm of layer 1 of GemmaModel has epsilon 0.5"),
        (last, "the last norm of LlamaModel has epsilon 0.5"),
        (shared, "up_proj.weight of layer 1 of LlamaModel is mlp.up_proj.weight of layer 0"),
        (hooked, "self_attn of layer 1 of LlamaModel has a hook on q_proj"),
        (watched, "mlp of layer 0 of LlamaModel has a hook on down_proj.weight"),
        (gpt2, "has no decoder of llama, mistral"),
        (exact, "gelu by tanh"),
        (halves, "differ"),
        (partly, "freeze all or leave all"),
        (converted, "revert_hf"),
        (adapted, "is a Linear, not a torch.nn.Linear"),
        (dispatched, "without device_map"),
    ):
        before = [type(module) for module in wrong.modules()]
        with pytest.raises(ValueError, match=sentence):
            te.convert_hf(wrong)
        assert [type(module) for module in wrong.modules()] == before
    converted.model.norm.register_forward_pre_hook(print)
    with pytest.raises(ValueError, match="the last norm of LlamaModel has a hook and is replaced"):
        te.revert_hf(converted)
    with pytest.raises(ValueError, match="not converted"):
        te.revert_hf(model)
    with pytest.raises(TypeError, match="recipe="):
        te.convert_hf(model, recipe="fp8")
    with pytest.raises(TypeError, match="is not a model of transformers"):
        te.convert_hf(nn.Linear(2, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_bf16_logits_on_a_gpu_are_as_near_to_float32_as_the_stock_model_s(family):
    exact = stock(family, hidden_size=256, intermediate_size=512)
    reference = copy.deepcopy(exact).to(torch.bfloat16)
    ours = te.convert_hf(copy.deepcopy(reference))
    tokens = installed.tokens(DEVICE, length=128)
    with torch.no_grad():
        expected = exact(tokens).logits
        error = {
            name: (model(tokens).logits - expected).norm()
            for name, model in (("theirs", reference), ("ours", ours))
        }
    assert error["ours"] <= 1.1 * error["theirs"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["delayed", "current", "blocks"])
def test_a_bf16_model_trains_in_fp8_on_a_gpu(name):
    model = te.convert_hf(
        stock(hidden_size=256, intermediate_size=512).to(torch.bfloat16), recipe=RECIPES[name]
    )
    installed.assert_falls(train(model, 8), least=0.1)
