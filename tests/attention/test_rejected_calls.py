"""A rejected attention call records nothing: no amax, no scale, no cached key, no random number."""

from __future__ import annotations

import copy

import pytest
import torch

import transformer_engine.pytorch as te
from tests.attention.attention_oracle import cumulative
from transformer_engine.common.recipe import DelayedScaling, NVFP4BlockScaling
from transformer_engine.pytorch import (
    DotProductAttention,
    InferenceParams,
    MultiheadAttention,
    RotaryPositionEmbedding,
    TransformerLayer,
)

HIDDEN, HEADS, SIZE, TOKENS, BATCH = 32, 4, 8, 16, 2


@pytest.fixture(autouse=True)
def _checked_on_every_device(monkeypatch):
    monkeypatch.setenv("TE_EMULATE", "1")
    monkeypatch.setenv("TE_CHECK", "2")


def bounds(device, *lengths):
    return cumulative(lengths, device)


# Calls that every attention layer in sbhd rejects, with the message.
def wrong(device):
    return {
        "mask name": ({"attn_mask_type": "causl"}, "attn_mask_type='causl' does not exist"),
        "mask type": ({"attn_mask_type": 3}, "attn_mask_type=3 does not exist"),
        "window": ({"window_size": (-5, 0)}, r"window_size=\(-5, 0\) has a size below -1"),
        "one number": ({"window_size": 4}, "window_size=4 is not a pair of integers"),
        "window of floats": (
            {"window_size": (1.5, 0)},
            r"window_size=\(1.5, 0\) is not a pair of integers",
        ),
        "no lengths": ({"attn_mask_type": "padding"}, "a padding mask needs cu_seqlens_q"),
        "no mask": ({"attn_mask_type": "arbitrary"}, "'arbitrary' needs attention_mask"),
        "mask dtype": (
            {
                "attn_mask_type": "arbitrary",
                "attention_mask": torch.zeros(BATCH, 1, 1, TOKENS, device=device),
            },
            "attention_mask is torch.float32; give bool tensors",
        ),
        "mask shape": (
            {
                "attn_mask_type": "arbitrary",
                "attention_mask": torch.zeros(3, 1, 1, TOKENS, dtype=torch.bool, device=device),
            },
            r"attention_mask \[3, 1, 1, 16\] does not broadcast",
        ),
        "lengths dtype": (
            {"attn_mask_type": "padding", "cu_seqlens_q": bounds(device, 4, 9).long()},
            "cu_seqlens_q is torch.int64; it must be torch.int32",
        ),
        "lengths list": (
            {"attn_mask_type": "padding", "cu_seqlens_q": [0, 4, 8]},
            "cu_seqlens_q is a list; give an int32 tensor",
        ),
        "too many lengths": (
            {"attn_mask_type": "padding", "cu_seqlens_q": bounds(device, 4, 9, 2)},
            "cu_seqlens_q has 3 sequences, the tensor 2",
        ),
        "too many lengths of whole rows": (
            {"attn_mask_type": "causal", "cu_seqlens_q": bounds(device, 4, 9, 2)},
            "cu_seqlens_q has 3 sequences, the tensor 2; .* qkv_format='thd' with a padding mask",
        ),
        "bias type": (
            {"core_attention_bias_type": "bias"},
            "core_attention_bias_type='bias' does not exist",
        ),
        "no bias": ({"core_attention_bias_type": "post_scale_bias"}, "needs core_attention_bias"),
        "bias shape": (
            {
                "core_attention_bias_type": "post_scale_bias",
                "core_attention_bias": torch.zeros(1, 3, TOKENS, TOKENS, device=device),
            },
            r"core_attention_bias \[1, 3, 16, 16\] does not broadcast",
        ),
        "slopes": (
            {"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(3, device=device)},
            r"alibi_slopes \[3\] does not end in 4 heads",
        ),
    }


NAMES = list(wrong(torch.device("cpu")))
# Not read if a cache holds the sequence lengths.
OF_THE_CACHE = (
    *(
        "no lengths",
        "lengths dtype",
        "too many lengths",
        "too many lengths of whole rows",
        "lengths list",
    ),
    "mask dtype",
)
# Wrong values, which a GPU reports later.
NUMBERS = {
    "falling": ([0, 9, 4], "cu_seqlens_q falls from 9 to 4 at sequence 1"),
    "not from 0": ([1, 9, 12], "cu_seqlens_q begins with 1"),
    "too long": (
        [0, 4, 30],
        "cu_seqlens_q gives sequence 1 26 tokens, more than the 16 that the tensor has",
    ),
}


def state(module, *more):
    """All state that a call may change; fp8_meta's tensors replace extra states, whose pickled bytes vary."""
    tensors = [
        x.clone() for name, x in module.state_dict().items() if not name.endswith("_extra_state")
    ]
    for child in module.modules():
        meta = getattr(child, "fp8_meta", {})
        for key in ("scaling_fwd", "scaling_bwd"):
            if key in meta:
                tensors += [meta[key].scale.clone(), meta[key].amax_history.clone()]
    tensors += [x.clone() for pair in more for x in pair]
    tensors.append(torch.get_rng_state())
    if torch.cuda.is_available():
        tensors.append(torch.cuda.get_rng_state())
    return tensors


def same(before, after):
    return len(before) == len(after) and all(
        torch.equal(a, b) for a, b in zip(before, after, strict=True)
    )


def run_one_step(module, *inputs, **options):
    """Module after one step, with state that a call could change."""
    with te.autocast(recipe=DelayedScaling()):
        out = module(*inputs, **options)
    out.sum().backward()
    return module


def assert_rejected(module, inputs, options, match):
    before = state(module)
    with te.autocast(recipe=DelayedScaling()), pytest.raises(ValueError, match=match):
        module(*inputs, **options)
    assert same(before, state(module))


def hidden(device, *shape):
    shape = shape or (TOKENS, BATCH, HIDDEN)
    return torch.randn(*shape, device=device, requires_grad=True)


@pytest.mark.parametrize("cold", [True, False], ids=["first-call", "after-a-call"])
@pytest.mark.parametrize("name", NAMES)
def test_an_attention_layer_rejects_before_its_projections_record(name, cold, device):
    layer, x = (
        MultiheadAttention(HIDDEN, HEADS, input_layernorm=True, device=device),
        hidden(device),
    )
    if not cold:
        run_one_step(layer, x)
    options, match = wrong(device)[name]
    assert_rejected(layer, (x,), options, match)


@pytest.mark.parametrize("name", NUMBERS)
def test_an_attention_layer_rejects_wrong_lengths_before_its_projections_record(name, device):
    layer, x = (
        MultiheadAttention(HIDDEN, HEADS, input_layernorm=True, device=device),
        hidden(device),
    )
    good = {"attn_mask_type": "padding", "cu_seqlens_q": bounds(device, 9, 12)}
    run_one_step(layer, x, **good)
    lengths, match = NUMBERS[name]
    argument = torch.tensor(lengths, dtype=torch.int32, device=device)
    assert_rejected(layer, (x,), {**good, "cu_seqlens_q": argument}, match)


def test_a_rejected_first_call_does_not_change_the_next(device):
    layer, x = (
        MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0, device=device),
        hidden(device),
    )
    twin = copy.deepcopy(layer)
    for _ in range(3):
        with (
            te.autocast(recipe=DelayedScaling()),
            pytest.raises(ValueError, match="does not exist"),
        ):
            layer(1000.0 * x, attn_mask_type="no such mask")
    for _ in range(2):
        for module in (layer, twin):
            with te.autocast(recipe=DelayedScaling()):
                module(x).sum().backward()
    with te.autocast(recipe=DelayedScaling()):
        assert torch.equal(layer(x), twin(x))


@pytest.mark.parametrize(
    "encoder_output, match",
    [
        (
            lambda device: hidden(device, TOKENS, BATCH, HIDDEN + 1),
            "needs 2 axes that end in hidden_size=32",
        ),
        (lambda device: hidden(device, TOKENS, 3, HIDDEN), "queries have 2 sequences, keys 3"),
        (lambda device: hidden(device).double(), "encoder_output is torch.float64"),
        (lambda device: hidden(device, TOKENS, HIDDEN), r"encoder_output is \[16, 32\]"),
    ],
    ids=["width", "batch", "dtype", "axes"],
)
def test_cross_attention_rejects_an_encoder_output_before_its_query_records(
    encoder_output, match, device
):
    layer = MultiheadAttention(
        HIDDEN,
        HEADS,
        attention_type="cross",
        attn_mask_type="no_mask",
        input_layernorm=True,
        device=device,
    )
    x = hidden(device)
    run_one_step(layer, x, encoder_output=hidden(device))
    match = match.replace("needs 2 axes", "needs 3 axes")
    assert_rejected(layer, (x,), {"encoder_output": encoder_output(device)}, match)


def test_a_decoder_checks_its_cross_attention_before_its_self_attention_records(device):
    layer = TransformerLayer(
        HIDDEN,
        64,
        HEADS,
        layer_type="decoder",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        device=device,
    )
    x, encoder = hidden(device), hidden(device)
    run_one_step(layer, x, encoder_output=encoder)
    for options, match in (
        ({"enc_dec_attn_mask_type": "padded"}, "attn_mask_type='padded' does not exist"),
        ({"enc_dec_window_size": (3, -4)}, r"window_size=\(3, -4\) is not allowed"),
        ({"enc_dec_attn_mask_type": "padding"}, "a padding mask needs cu_seqlens_q"),
    ):
        assert_rejected(layer, (x,), {"encoder_output": encoder, **options}, match)
    assert_rejected(
        layer,
        (x,),
        {"encoder_output": hidden(device, TOKENS, 3, HIDDEN)},
        "queries have 2 sequences, keys 3",
    )


def test_rotary_angles_that_do_not_fit_are_rejected_before_projections_record(device):
    layer, x = (
        MultiheadAttention(HIDDEN, HEADS, input_layernorm=True, device=device),
        hidden(device),
    )
    run_one_step(layer, x, rotary_pos_emb=RotaryPositionEmbedding(SIZE)(TOKENS).to(device))
    for dim, length, match in (
        (SIZE, TOKENS - 1, "sequence length 16 > 15"),
        (2 * SIZE, TOKENS, "rotate 16 features"),
    ):
        angles = RotaryPositionEmbedding(dim)(length).to(device)
        assert_rejected(layer, (x,), {"rotary_pos_emb": angles}, match)


def test_a_missing_backend_or_fp8_attention_raises_before_projections_record(device, monkeypatch):
    layer, x = (
        MultiheadAttention(HIDDEN, HEADS, input_layernorm=True, device=device),
        hidden(device),
    )
    run_one_step(layer, x)
    before = state(layer)
    recipe = NVFP4BlockScaling(fp8_dpa=True)
    with (
        te.autocast(recipe=recipe),
        pytest.raises(ValueError, match="NVFP4BlockScaling has no FP8 attention"),
    ):
        layer(x)
    assert same(before, state(layer))
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.setenv(name, "0")
    assert_rejected(layer, (x,), {}, "No dot product attention backend is available")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OF_THE_CACHE])
def test_an_attention_with_a_cache_writes_nothing_when_rejected(name, device):
    core = DotProductAttention(HEADS, SIZE, layer_number=1, return_max_logit=False)
    cache = InferenceParams(BATCH, TOKENS, HEADS, SIZE, torch.float32, device=device)
    cache.pre_step({"a": 3, "b": 2})
    q, k, v = (torch.randn(3, BATCH, HEADS, SIZE, device=device) for _ in range(3))
    cache.allocate_memory(1)
    before = state(core, cache.cache_manager.cache[1])
    options, match = wrong(device)[name]
    if name in ("no mask", "mask shape"):
        match = "'arbitrary' with inference_params"
    if name == "bias shape":
        match = "does not broadcast"
    with pytest.raises(ValueError, match=match):
        core(q, k, v, inference_params=cache, **options)
    assert same(before, state(core, cache.cache_manager.cache[1]))


def test_dropout_draws_nothing_for_a_rejected_call(device):
    core = DotProductAttention(HEADS, SIZE, attention_dropout=0.5)
    q = torch.randn(TOKENS, BATCH, HEADS, SIZE, device=device)
    for options, match in wrong(device).values():
        before = state(core)
        with pytest.raises(ValueError, match=match):
            core(q, q, q, **options)
        assert same(before, state(core))


def test_the_window_cache_is_bounded(device, monkeypatch):
    core = DotProductAttention(HEADS, SIZE, attn_mask_type="causal")
    monkeypatch.setattr(core._plans, "most", 64)
    q = torch.randn(4, 1, HEADS, SIZE, device=device)
    for left in range(300):
        core(q, q, q, window_size=(left, 0))
    assert len(core._plans) <= 64


def test_lengths_that_the_mask_does_not_read_are_not_checked(device):
    layer, x = (
        MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0, device=device),
        hidden(device),
    )
    expected = layer(x)
    for _ in range(2):
        argument = torch.tensor([0, 40, 20], dtype=torch.int32, device=device)
        torch.testing.assert_close(layer(x, cu_seqlens_q=argument), expected)
