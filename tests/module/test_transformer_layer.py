"""TransformerLayer equals a composition of attention, MLP and residuals in every variant."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch.attention import InferenceParams, RotaryPositionEmbedding
from transformer_engine.pytorch.quantization import autocast
from transformer_engine.pytorch.transformer import DropPath, TransformerLayer

HIDDEN, FFN, HEADS = 24, 40, 4


def sample(device, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def make(device, **options):
    """A layer in evaluation mode with large, random parameters."""
    layer = TransformerLayer(HIDDEN, FFN, HEADS, device=device, fuse_qkv_params=True, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return layer.eval()


def norm(x, layer):
    return layer_norm(x, (HIDDEN,), layer.layer_norm_weight, layer.layer_norm_bias, 1e-5)


def heads(x):
    """[s, b, h * d] as [b, h, s, d]"""
    return x.unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3)


def attention(q, k, v, causal, proj):
    out = scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=causal)
    return linear(out.permute(2, 0, 1, 3).flatten(2), proj.weight, proj.bias)


def self_attention(x, block):
    """For a layer whose weights are interleaved head by head."""
    layer = block.layernorm_qkv or block.qkv
    mixed = linear(x, layer.weight, layer.bias).unflatten(-1, (HEADS, 3, -1))
    return attention(*(part.flatten(-2) for part in mixed.unbind(-2)), True, block.proj)


def cross_attention(x, encoder, block):
    q = linear(x, block.layernorm_query.weight, block.layernorm_query.bias)
    mixed = linear(encoder, block.key_value.weight, block.key_value.bias).unflatten(
        -1, (HEADS, 2, -1)
    )
    return attention(q, *(part.flatten(-2) for part in mixed.unbind(-2)), False, block.proj)


def mlp(x, block):
    inner = gelu(linear(x, block.fc1_weight, block.fc1_bias), approximate="tanh")
    return linear(inner, block.fc2_weight, block.fc2_bias)


def compose_layer(layer, x, encoder=None):
    attend, post = layer.self_attention, layer.apply_residual_connection_post_layernorm
    first = x if layer.output_layernorm else norm(x, attend.layernorm_qkv)
    if layer.parallel_attention_mlp:
        return (
            x
            + self_attention(first, attend)
            + mlp(norm(x, layer.layernorm_mlp), layer.layernorm_mlp)
        )
    h = (first if post else x) + self_attention(first, attend)
    if encoder is not None:
        normed = norm(h, layer.inter_attention.layernorm_query)
        h = (normed if post else h) + cross_attention(normed, encoder, layer.inter_attention)
    normed = norm(h, layer.layernorm_mlp)
    y = (normed if post else h) + mlp(normed, layer.layernorm_mlp)
    if layer.output_layernorm:
        y = layer_norm(y, (HIDDEN,), layer.layernorm.weight, layer.layernorm.bias, 1e-5)
    return y


VARIANTS = {
    "encoder": {},
    "decoder": {"layer_type": "decoder"},
    "parallel": {"parallel_attention_mlp": True},
    "post-norm residual": {"apply_residual_connection_post_layernorm": True},
    "post-norm residual decoder": {
        "apply_residual_connection_post_layernorm": True,
        "layer_type": "decoder",
    },
    "output norm": {"output_layernorm": True},
    "output norm decoder": {"output_layernorm": True, "layer_type": "decoder"},
    "output norm, post-norm residual": {
        "output_layernorm": True,
        "apply_residual_connection_post_layernorm": True,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_equals_its_formula(variant, device):
    layer = make(device, **VARIANTS[variant])
    x = sample(device, 5, 2, HIDDEN).requires_grad_()
    encoder = (
        sample(device, 3, 2, HIDDEN, seed=2).requires_grad_()
        if layer.layer_type == "decoder"
        else None
    )
    got, expected = layer(x, encoder_output=encoder), compose_layer(layer, x, encoder)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    leaves = [x, *layer.parameters()] + ([encoder] if encoder is not None else [])
    grad = sample(device, *got.shape, seed=3)
    for ours, reference in zip(
        torch.autograd.grad(got, leaves, grad),
        torch.autograd.grad(expected, leaves, grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, reference, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("tensor_format", ["bshd", "thd"])
def test_formats_agree_with_sbhd(tensor_format, device):
    x = sample(device, 5, 2, HIDDEN)
    expected = make(device)(x).transpose(0, 1)
    if tensor_format == "bshd":
        got = make(device, attn_input_format="bshd")(x.transpose(0, 1))
    else:
        layer = make(device, attn_input_format="thd", self_attn_mask_type="padding_causal")
        bounds = torch.tensor([0, 5, 10], dtype=torch.int32, device=device)
        got = layer(x.transpose(0, 1).flatten(0, 1), cu_seqlens_q=bounds, max_seqlen_q=5).unflatten(
            0, (2, 5)
        )
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_masks_and_windows_reach_their_attention(device):
    layer = make(device, layer_type="decoder")
    x, encoder = sample(device, 5, 2, HIDDEN), sample(device, 3, 2, HIDDEN, seed=2)
    plain = layer(x, encoder_output=encoder)
    hidden = torch.zeros(2, 1, 5, 5, dtype=torch.bool, device=device)
    causal = hidden | torch.ones(5, 5, dtype=torch.bool, device=device).triu(1)
    same = layer(x, causal, "arbitrary", encoder_output=encoder)
    torch.testing.assert_close(same, plain, atol=1e-5, rtol=1e-5)
    assert (layer(x, hidden, "arbitrary", encoder_output=encoder) - plain).abs().max() > 1e-3
    assert (layer(x, window_size=(1, 0), encoder_output=encoder) - plain).abs().max() > 1e-3
    masks = [torch.zeros(2, 1, 1, n, dtype=torch.bool, device=device) for n in (5, 3)]
    options = {"encoder_output": encoder, "enc_dec_attn_mask_type": "padding"}
    torch.testing.assert_close(
        layer(x, enc_dec_attn_mask=tuple(masks), **options), plain, atol=1e-5, rtol=1e-5
    )
    masks[1][:, ..., 2] = True
    expected = layer(x, encoder_output=encoder[:2])
    torch.testing.assert_close(
        layer(x, enc_dec_attn_mask=tuple(masks), **options), expected, atol=1e-5, rtol=1e-5
    )


def test_dropout_scales_kept_elements_and_leaves_the_residual(device):
    layer = make(device, hidden_dropout=0.5, attention_dropout=0.0, parallel_attention_mlp=True)
    x = sample(device, 5, 2, HIDDEN)
    branch = layer(x) - x
    dropped = layer.train()(x) - x
    saved = dropped.abs() > 1e-6
    assert 0.3 < saved.float().mean() < 0.7
    torch.testing.assert_close(dropped[saved], 2 * branch[saved], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tensor_format, axis", [("sbhd", 1), ("bshd", 0)])
def test_drop_path_drops_whole_samples(tensor_format, axis, device):
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "parallel_attention_mlp": True}
    layer = make(device, drop_path_rate=0.5, attn_input_format=tensor_format, **options)
    x = sample(device, *((3, 64) if axis == 1 else (64, 3)), HIDDEN)
    branch = (layer(x) - x).movedim(axis, 0)
    dropped = (layer.train()(x) - x).movedim(axis, 0)
    saved = dropped.flatten(1).abs().amax(1) > 1e-6
    assert 10 < saved.sum() < 54
    torch.testing.assert_close(dropped[saved], 2 * branch[saved], atol=1e-4, rtol=1e-4)


def test_zero_drop_path_is_the_identity(device):
    x = sample(device, 3, 4)
    assert DropPath(0.0)(x) is x and DropPath(0.5).eval()(x) is x
    assert "drop_prob=0.5" in repr(DropPath(0.5))


def test_parameters_have_the_checkpoint_names(device):
    names = [
        name
        for name, _ in make(device, layer_type="decoder", output_layernorm=True).named_parameters()
    ]
    assert names == [
        "self_attention.qkv.weight",
        "self_attention.qkv.bias",
        "self_attention.proj.weight",
        "self_attention.proj.bias",
        "inter_attention.layernorm_query.layer_norm_weight",
        "inter_attention.layernorm_query.layer_norm_bias",
        "inter_attention.layernorm_query.weight",
        "inter_attention.layernorm_query.bias",
        "inter_attention.key_value.weight",
        "inter_attention.key_value.bias",
        "inter_attention.proj.weight",
        "inter_attention.proj.bias",
        "layernorm_mlp.layer_norm_weight",
        "layernorm_mlp.layer_norm_bias",
        "layernorm_mlp.fc1_weight",
        "layernorm_mlp.fc1_bias",
        "layernorm_mlp.fc2_weight",
        "layernorm_mlp.fc2_bias",
        "layernorm.weight",
        "layernorm.bias",
    ]


def test_a_decoder_stack_with_rmsnorm_swiglu_and_gqa_has_no_biases(device):
    layer = TransformerLayer(
        HIDDEN,
        FFN,
        HEADS,
        num_gqa_groups=2,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        qk_norm_type="RMSNorm",
        device=device,
        name="layer",
    )
    assert not any("bias" in name for name, _ in layer.named_parameters())
    x = sample(device, 5, 2, HIDDEN).requires_grad_()
    y = layer(x, rotary_pos_emb=RotaryPositionEmbedding(HIDDEN // HEADS)(5).to(device))
    y.sum().backward()
    assert y.shape == x.shape and all(p.grad.isfinite().all() for p in (x, *layer.parameters()))
    later = x.detach().clone()
    later[3:] += 1.0
    torch.testing.assert_close(layer(later)[:3], layer(x)[:3])


@torch.no_grad()
def test_decoding_with_a_cache_equals_the_full_forward(device):
    layers = [make(device, layer_number=i + 1) for i in range(2)]
    x = sample(device, 6, 2, HIDDEN)
    angles = RotaryPositionEmbedding(HIDDEN // HEADS)(8).to(device)

    def model(x, **options):
        for layer in layers:
            x = layer(x, rotary_pos_emb=angles, **options)
        return x

    cache = InferenceParams(2, 8, HEADS, HIDDEN // HEADS, dtype=torch.float32)
    outputs = []
    for part in x.split([3, 1, 2]):
        cache.pre_step({"a": len(part), "b": len(part)})
        outputs.append(model(part, inference_params=cache))
    torch.testing.assert_close(torch.cat(outputs), model(x), atol=1e-4, rtol=1e-4)


def test_quantized_training_stays_close_to_high_precision(device, monkeypatch):
    monkeypatch.setenv("TE_EMULATE", "1")
    layer = TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, device=device)
    x = sample(device, 16, 2, 64).requires_grad_()
    plain = layer(x)
    (expected,) = torch.autograd.grad(plain.square().sum(), x)
    with autocast(recipe=Float8CurrentScaling()):
        quantized = layer(x)
    (got,) = torch.autograd.grad(quantized.square().sum(), x)
    assert not torch.equal(quantized, plain)
    assert (quantized - plain).norm() < 0.05 * plain.norm()
    assert (got - expected).norm() < 0.1 * expected.norm()


def test_weights_are_quantized_once_per_step(device, monkeypatch):
    monkeypatch.setenv("TE_EMULATE", "1")
    layer = TransformerLayer(64, 128, 4, fuse_qkv_params=True, device=device).eval()
    x = sample(device, 16, 2, 64)
    with autocast(recipe=Float8CurrentScaling()), torch.no_grad():
        first = layer(x, is_first_microbatch=True)
        for parameter in (layer.self_attention.proj.weight, layer.layernorm_mlp.fc1_weight):
            parameter.zero_()
        torch.testing.assert_close(layer(x, is_first_microbatch=False), first)


# tests/module/test_compiled_layers.py always compiles a layer, and tests/attention/test_compile.py cross attention.
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["decoder", "parallel"])
def test_layers_compile_to_the_same_outputs_and_gradients(variant, device):
    layer = make(device, **VARIANTS[variant])
    inputs = [sample(device, 5, 2, HIDDEN)] + [sample(device, 3, 2, HIDDEN, seed=2)] * (
        variant == "decoder"
    )

    def run(x, encoder=None):
        return layer(x, encoder_output=encoder)

    results = []
    torch._dynamo.reset()
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = function(*leaves)
        results.append((y, *torch.autograd.grad(y.square().sum(), [*leaves, *layer.parameters()])))
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager, atol=1e-5, rtol=1e-5)


def test_setting_a_parallel_group_sets_it_on_every_child_module(device, monkeypatch):
    layer = make(device, layer_type="decoder")
    group = object()
    layer.set_tensor_parallel_group(group)
    assert layer.inter_attention.proj.tp_group is group and layer.layernorm_mlp.tp_group is group
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    layer.set_context_parallel_group(group, [0], None)
    assert layer.self_attention.core_attention.cp_group is group
    assert layer.inter_attention.core_attention.cp_group is group


@pytest.mark.parametrize(
    "options, message",
    [
        ({"layer_type": "both"}, "layer_type='both' does not exist"),
        ({"normalization": "BatchNorm"}, "normalization='BatchNorm' does not exist"),
        ({"attn_input_format": "hsbd"}, "attn_input_format='hsbd' does not exist; choose one of"),
        (
            {"parallel_attention_mlp": True, "layer_type": "decoder"},
            "is for layer_type='encoder' without",
        ),
        (
            {"parallel_attention_mlp": True, "output_layernorm": True},
            "is for layer_type='encoder' without",
        ),
    ],
)
def test_invalid_variants_are_rejected(options, message, device):
    with pytest.raises(ValueError, match=message):
        make(device, **options)


def test_a_decoder_needs_the_encoder(device):
    with pytest.raises(ValueError, match="needs encoder_output"):
        make(device, layer_type="decoder")(sample(device, 5, 2, HIDDEN))
