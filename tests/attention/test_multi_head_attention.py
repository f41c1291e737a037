"""MultiheadAttention equals projections, norms, rotation and attention written out, in every layout."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.functional import layer_norm, linear

from tests.attention.attention_oracle import attend, cumulative, visibility
from tests.support.tolerances import ATTENDED
from transformer_engine.pytorch.attention import (
    FusedMLAQUpProjRopeQuant,
    MultiheadAttention,
    RotaryPositionEmbedding,
    apply_rotary_pos_emb,
)

HIDDEN, HEADS, WIDTH = 24, 4, 6


def sample(device, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def make(device, **options):
    """A layer with large, random parameters, so that nothing is hidden by zeros."""
    options = {"attention_dropout": 0.0, "device": device, **options}
    module = MultiheadAttention(HIDDEN, HEADS, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module


def projections(module, groups, fused, interleaved):
    """[(weight, bias)] for queries, keys and values in head order, for every parameter layout."""
    layer = module.layernorm_qkv if module.input_layernorm else module.qkv
    if not fused:
        return [
            (getattr(layer, f"{n}_weight"), getattr(layer, f"{n}_bias"))
            for n in ("query", "key", "value")
        ]
    each = HEADS // groups
    parts = []
    for tensor in (layer.weight, layer.bias):
        rows = list(tensor.split(WIDTH))
        if interleaved:
            order = [[g * (each + 2) + i for g in range(groups) for i in range(each)]]
            order += [[g * (each + 2) + each + extra for g in range(groups)] for extra in (0, 1)]
        else:
            order = [
                range(HEADS),
                range(HEADS, HEADS + groups),
                range(HEADS + groups, HEADS + 2 * groups),
            ]
        parts.append([torch.cat([rows[i] for i in chosen]) for chosen in order])
    return list(zip(*parts, strict=True))


def attention(q, k, v, mask="causal"):
    """Flat outputs [b, s, h * d] from q [b, s, h, d] and k, v with fewer heads, by the float64 loops."""
    cpu = [x.double().cpu() for x in (q, k, v)]
    return attend(*cpu, visibility(mask, q.shape[1], k.shape[1]))[0].to(q)


@pytest.mark.parametrize("input_layernorm", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("fused, interleaved", [(False, True), (True, True), (True, False)])
def test_every_parameter_layout_means_the_same_attention(
    fused, interleaved, groups, input_layernorm, device
):
    module = make(
        device,
        num_gqa_groups=groups,
        fuse_qkv_params=fused,
        qkv_weight_interleaved=interleaved,
        input_layernorm=input_layernorm,
        qkv_format="bshd",
    )
    x = sample(device, 2, 5, HIDDEN).requires_grad_()
    normed = x
    if input_layernorm:
        layer = module.layernorm_qkv
        normed = layer_norm(x, (HIDDEN,), layer.layer_norm_weight, layer.layer_norm_bias, 1e-5)
    q, k, v = (
        linear(normed, weight, bias).unflatten(-1, (-1, WIDTH))
        for weight, bias in projections(module, groups, fused, interleaved)
    )
    expected = linear(attention(q, k, v), module.proj.weight, module.proj.bias)
    got = module(x)
    torch.testing.assert_close(got, expected, **ATTENDED)
    grad = sample(device, *got.shape, seed=2)
    leaves = [x, *module.parameters()]
    for ours, reference in zip(
        torch.autograd.grad(got, leaves, grad),
        torch.autograd.grad(expected, leaves, grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, reference, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("input_layernorm", [False, True])
@pytest.mark.parametrize("fused, interleaved", [(False, True), (True, True), (True, False)])
def test_cross_attention_reads_keys_and_values_from_the_encoder(
    fused, interleaved, input_layernorm, device
):
    module = make(
        device,
        attention_type="cross",
        attn_mask_type="no_mask",
        fuse_qkv_params=fused,
        qkv_weight_interleaved=interleaved,
        input_layernorm=input_layernorm,
        qkv_format="bshd",
    )
    x, encoder = sample(device, 2, 5, HIDDEN), sample(device, 2, 3, HIDDEN, seed=3)
    layer, normed = module.query_layer, x
    if input_layernorm:
        layer = module.layernorm_query
        normed = layer_norm(x, (HIDDEN,), layer.layer_norm_weight, layer.layer_norm_bias, 1e-5)
    q = (
        linear(normed, layer.weight, layer.bias)
        if fused
        else linear(normed, layer.query_weight, layer.query_bias)
    )
    if fused:
        mixed = linear(encoder, module.key_value.weight, module.key_value.bias).unflatten(
            -1, (-1, WIDTH)
        )
        k, v = (mixed[..., 0::2, :], mixed[..., 1::2, :]) if interleaved else mixed.chunk(2, dim=-2)
    else:
        k = linear(encoder, module.key_value.key_weight, module.key_value.key_bias).unflatten(
            -1, (-1, WIDTH)
        )
        v = linear(encoder, module.key_value.value_weight, module.key_value.value_bias).unflatten(
            -1, (-1, WIDTH)
        )
    context = attention(q.unflatten(-1, (-1, WIDTH)), k, v, "no_mask")
    expected = linear(context, module.proj.weight, module.proj.bias)
    torch.testing.assert_close(module(x, encoder_output=encoder), expected, **ATTENDED)


def normalized(module, x, kind):
    if kind == "L2Normalization":
        return x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    if kind == "RMSNorm":
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6) * module.weight
    return layer_norm(x, (WIDTH,), module.weight, module.bias, 1e-6)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", ["L2Normalization", "RMSNorm", "LayerNorm"])
def test_query_and_key_norms_run_before_or_after_the_rotation_as_set(kind, before, device):
    module = make(device, qk_norm_type=kind, qk_norm_before_rope=before, qkv_format="bshd")
    x = sample(device, 2, 5, HIDDEN)
    angles = RotaryPositionEmbedding(WIDTH)(5).to(device)
    q, k, v = (
        linear(x, w, b).unflatten(-1, (-1, WIDTH))
        for w, b in projections(module, HEADS, fused=False, interleaved=False)
    )
    parts = []
    for part, norm in ((q, module.q_norm), (k, module.k_norm)):
        if before:
            part = apply_rotary_pos_emb(normalized(norm, part, kind), angles, "bshd")
        else:
            part = normalized(norm, apply_rotary_pos_emb(part, angles, "bshd"), kind)
        parts.append(part)
    expected = linear(attention(*parts, v), module.proj.weight, module.proj.bias)
    torch.testing.assert_close(module(x, rotary_pos_emb=(angles, angles)), expected, **ATTENDED)


def test_the_three_formats_agree(device):
    modules = [
        make(device, qkv_format=f, attn_mask_type="padding_causal") for f in ("bshd", "sbhd", "thd")
    ]
    x = sample(device, 2, 5, HIDDEN)
    angles = RotaryPositionEmbedding(WIDTH)(5).to(device)
    where = {"cu_seqlens_q": cumulative([5, 5], device), "rotary_pos_emb": angles}
    bshd = modules[0](x, **where)
    sbhd = modules[1](x.transpose(0, 1).contiguous(), **where)
    thd = modules[2](x.flatten(0, 1), max_seqlen_q=5, max_seqlen_kv=5, **where)
    torch.testing.assert_close(sbhd.transpose(0, 1), bshd, **ATTENDED)
    torch.testing.assert_close(thd.unflatten(0, (2, 5)), bshd, **ATTENDED)


def test_bias_and_normalized_input_are_returned_in_that_order(device):
    module = make(device, return_bias=True, input_layernorm=True, return_layernorm_output=True)
    x = sample(device, 5, 2, HIDDEN)
    out, bias, normed = module(x)
    layer = module.layernorm_qkv
    torch.testing.assert_close(bias, module.proj.bias)
    torch.testing.assert_close(
        normed,
        layer_norm(x, (HIDDEN,), layer.layer_norm_weight, layer.layer_norm_bias, 1e-5),
        **ATTENDED,
    )
    module.proj.return_bias = module.return_bias = module.return_layernorm_output = False
    layer.return_layernorm_output = False
    torch.testing.assert_close(module(x), out + bias, **ATTENDED)


PROJ = ["proj.weight", "proj.bias"]
NORM = ["layer_norm_weight", "layer_norm_bias"]


@pytest.mark.parametrize(
    "options, names",
    [
        ({}, [f"qkv.{n}_{k}" for k in ("weight", "bias") for n in ("query", "key", "value")]),
        ({"fuse_qkv_params": True}, ["qkv.weight", "qkv.bias"]),
        (
            {"fuse_qkv_params": True, "input_layernorm": True},
            [f"layernorm_qkv.{n}" for n in (*NORM, "weight", "bias")],
        ),
        (
            {"fuse_qkv_params": True, "attention_type": "cross"},
            ["query_layer.weight", "query_layer.bias", "key_value.weight", "key_value.bias"],
        ),
        (
            {"attention_type": "cross", "input_layernorm": True},
            [f"layernorm_query.{n}" for n in (*NORM, "query_weight", "query_bias")]
            + [f"key_value.{n}_{k}" for k in ("weight", "bias") for n in ("key", "value")],
        ),
        (
            {"fuse_qkv_params": True, "qk_norm_type": "RMSNorm"},
            ["q_norm.weight", "k_norm.weight", "qkv.weight", "qkv.bias"],
        ),
        ({"fuse_qkv_params": True, "qk_norm_type": "L2Normalization"}, ["qkv.weight", "qkv.bias"]),
        (
            {"fuse_qkv_params": True, "softmax_type": "learnable"},
            ["qkv.weight", "qkv.bias", "core_attention.softmax_offset"],
        ),
    ],
)
def test_parameters_have_the_checkpoint_names(options, names, device):
    module = make(device, **options)
    assert [name for name, _ in module.named_parameters()] == names + PROJ
    assert "core_attention._extra_state" in module.state_dict()


def test_setting_a_parallel_group_sets_it_on_every_child_module(device, monkeypatch):
    module = make(device, attention_type="cross")
    group = object()
    module.set_tensor_parallel_group(group)
    for child in (module.query_layer, module.key_value, module.core_attention, module.proj):
        assert child.tp_group is group
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    module.set_context_parallel_group(group, [0], None)
    assert module.core_attention.cp_group is group


def test_sharded_heads_have_sharded_projections(device):
    module = make(device, tp_size=2, num_gqa_groups=2, set_parallel_mode=True, fuse_qkv_params=True)
    assert module.qkv.weight.shape == ((2 + 2) * WIDTH, HIDDEN)
    assert module.proj.weight.shape == (HIDDEN, 2 * WIDTH)
    assert (module.core_attention.heads, module.core_attention.num_gqa_groups_per_partition) == (
        2,
        1,
    )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"attention_type": "both"}, "attention_type='both' does not exist"),
        ({"tp_size": 0}, "tp_size=0 is below 1"),
        ({"fuse_wgrad_accumulation": True}, "set fuse_qkv_params=True"),
        ({"qk_norm_type": "BatchNorm"}, "qk_norm_type='BatchNorm' does not exist"),
    ],
)
def test_wrong_construction_is_rejected(options, message, device):
    with pytest.raises(ValueError, match=message):
        make(device, **options)
    with pytest.raises(ValueError, match="num_attention_heads=25 is above hidden_size=24"):
        MultiheadAttention(24, 25)


def test_cross_attention_needs_the_encoder_output(device):
    x = sample(device, 5, 2, HIDDEN)
    with pytest.raises(ValueError, match="'cross' needs encoder_output"):
        make(device, attention_type="cross")(x)


def test_the_fused_latent_projection_is_unsupported():
    assert FusedMLAQUpProjRopeQuant.is_supported() is False
    with pytest.raises(
        NotImplementedError, match="use Linear, apply_rotary_pos_emb and a quantizer"
    ):
        FusedMLAQUpProjRopeQuant(128, 8)


def test_heads_that_do_not_divide_the_hidden_size_warn_with_their_features():
    words = "num_attention_heads=3 does not divide hidden_size=64.*21 features.*kv_channels=21"
    with pytest.warns(UserWarning, match=words):
        module = MultiheadAttention(64, 3, device="cpu")
    assert module(torch.randn(4, 2, 64)).shape == (4, 2, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MultiheadAttention(64, 3, kv_channels=21, device="cpu")
