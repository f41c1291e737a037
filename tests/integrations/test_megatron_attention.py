"""Attention layers with Megatron's calls, without Megatron: gradients, generation, clipping, rejected calls."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch.integrations.megatron import (
    AttnMaskType,
    CrossAttention,
    PackedSequences,
    PagedContext,
    SelfAttention,
    StaticContext,
    TransformerConfig,
    attention,
    cross_attention_submodules,
    self_attention_submodules,
)

HIDDEN, HEADS, SIZE, LENGTH = 32, 4, 8, 10
CONFIG = TransformerConfig(
    HIDDEN, HEADS, num_query_groups=2, rotary_interleaved=False, device="cpu"
)


def angles(length: int = LENGTH, size: int = SIZE) -> torch.Tensor:
    frequencies = 1.0 / 100 ** (torch.arange(0, size, 2) / size)
    half = torch.arange(length)[:, None] * frequencies
    return torch.cat((half, half), dim=-1)[:, None, None]


def self_attention(config: TransformerConfig = CONFIG, **keywords) -> SelfAttention:
    torch.manual_seed(0)
    return SelfAttention(
        config, self_attention_submodules(config), 1, AttnMaskType.causal, **keywords
    )


def hidden(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randn(length, batch, HIDDEN, generator=torch.Generator().manual_seed(1))


def rotate_by_angles(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * freqs.cos() + torch.cat((-second, first), dim=-1) * freqs.sin()


def plain(layer: SelfAttention, x: torch.Tensor, freqs: torch.Tensor | None = None) -> torch.Tensor:
    """The same attention in torch, from the layer's own weights."""
    config = layer.config
    each = config.num_attention_heads // config.num_query_groups
    gates = config.attention_output_gate
    mixed = F.linear(x, layer.linear_qkv.weight, layer.linear_qkv.bias)
    mixed = mixed.view(*x.shape[:2], config.num_query_groups, -1, SIZE)
    q = mixed[..., :each, :].flatten(2, 3)
    k, v = mixed[..., -2, :], mixed[..., -1, :]
    if freqs is not None:
        q, k = rotate_by_angles(q, freqs), rotate_by_angles(k, freqs)
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out = out.permute(2, 0, 1, 3).flatten(2)
    if gates:
        out = out * mixed[..., each : 2 * each, :].reshape(out.shape).sigmoid()
    return F.linear(out, layer.linear_proj.weight)


@pytest.mark.parametrize("gates", [False, True])
def test_self_attention_and_gradients_match_torch(gates):
    layer = self_attention(replace(CONFIG, attention_output_gate=gates))
    x, freqs = hidden().requires_grad_(), angles()
    y, bias = layer(x, None, rotary_pos_emb=freqs)
    expected = plain(layer, x, freqs)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    assert bias.shape == (HIDDEN,)
    parameters = [x, layer.linear_qkv.weight, layer.linear_proj.weight]
    for ours, reference in zip(
        torch.autograd.grad(y.square().sum(), parameters),
        torch.autograd.grad(expected.square().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotating_the_unsplit_projection_equals_rotating_its_parts(interleaved):
    split = self_attention(replace(CONFIG, rotary_interleaved=interleaved))
    full = self_attention(
        replace(CONFIG, rotary_interleaved=interleaved, fused_single_qkv_rope=True)
    )
    x, freqs = hidden(), angles()
    torch.testing.assert_close(
        full(x, None, rotary_pos_emb=freqs)[0], split(x, None, rotary_pos_emb=(freqs, freqs))[0]
    )


def test_a_recomputed_core_gives_the_same_gradients():
    saved = self_attention()
    recomputed = self_attention(replace(CONFIG, recompute_granularity="selective"))
    assert recomputed.checkpoint_core_attention
    grads = []
    for layer in (saved, recomputed):
        x = hidden().requires_grad_()
        layer(x, None)[0].square().sum().backward()
        grads += [x.grad, layer.linear_qkv.weight.grad]
    torch.testing.assert_close(grads[0], grads[2])
    torch.testing.assert_close(grads[1], grads[3])


def test_packed_sequences_equal_separate_calls():
    layer, lengths = self_attention(), (3, 7)
    x, freqs = hidden(1), angles()
    ends = torch.tensor([0, 3, 10], dtype=torch.int32)
    y, _ = layer(
        x,
        None,
        rotary_pos_emb=freqs,
        packed_seq_params=PackedSequences(ends, ends, max(lengths), max(lengths)),
    )
    parts = [layer(part, None, rotary_pos_emb=freqs[: len(part)])[0] for part in x.split(lengths)]
    torch.testing.assert_close(y, torch.cat(parts), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steps", [(6, 1, 1, 2), (1, 9), (10,)])
def test_generation_with_a_static_context_equals_the_full_pass(steps):
    layer = self_attention().eval()
    x, freqs = hidden(), angles()
    with torch.no_grad():
        expected, _ = layer(x, None, rotary_pos_emb=freqs)
        context, parts = StaticContext(2, LENGTH), []
        for part in x.split(steps):
            parts.append(layer(part, None, inference_context=context, rotary_pos_emb=freqs)[0])
            context.sequence_len_offset += len(part)
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_flash_decode_equals_the_full_pass(interleaved):
    config = replace(CONFIG, flash_decode=True, rotary_interleaved=interleaved)
    layer = self_attention(config).eval()
    whole = self_attention(replace(config, flash_decode=False)).eval()
    half = angles()[:, 0, 0, : SIZE // 2]
    freqs = half.repeat_interleave(2, dim=-1) if interleaved else torch.cat((half, half), dim=-1)
    x, context, parts = hidden(), StaticContext(2, LENGTH), []
    with torch.no_grad():
        expected, _ = whole(x, None, rotary_pos_emb=freqs[:, None, None])
        for part in x.split((6, 1, 1, 2)):
            offset = torch.full((2,), context.sequence_len_offset, dtype=torch.int32)
            parts.append(
                layer(
                    part,
                    None,
                    inference_context=context,
                    rotary_pos_cos=half.cos(),
                    rotary_pos_sin=half.sin(),
                    sequence_len_offset=offset,
                )[0]
            )
            context.sequence_len_offset += len(part)
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by_table", [False, True])
@pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
def test_generation_with_pages_equals_the_full_pass(by_table, softmax_type):
    """Three requests in flight: prompts of 5, 2 and 1 tokens, steps that mix prompts and single tokens."""
    config = replace(CONFIG, softmax_type=softmax_type)
    layer = self_attention(config).eval()
    if softmax_type == "learnable":
        layer.core_attention.softmax_offset.data.uniform_(-1, 1)
    x, freqs = hidden(3), angles()
    half = freqs[:, 0, 0, : SIZE // 2]
    rotary = {"rotary_pos_emb": freqs}
    context = PagedContext(3, 1, pages=12, page_size=2, groups=2, size=SIZE)
    if by_table:
        context.use_flashinfer_fused_rope = True
        rotary = {"rotary_pos_cos_sin": torch.cat((half.cos(), half.sin()), dim=-1)}
    done, seen = [0, 0, 0], [[], [], []]
    with torch.no_grad():
        expected, _ = layer(x, None, rotary_pos_emb=freqs)
        for counts in ([5, 2, 0], [1, 1, 1], [1, 1, 1], [1, 3, 2]):
            context.begin_step(counts)
            new = [x[at : at + n, i] for i, (at, n) in enumerate(zip(done, counts, strict=True))]
            y, _ = layer(torch.cat(new).unsqueeze(1), None, inference_context=context, **rotary)
            for i, part in enumerate(y.squeeze(1).split(counts)):
                seen[i].append(part)
                done[i] += counts[i]
    for i, parts in enumerate(seen):
        torch.testing.assert_close(torch.cat(parts), expected[: done[i], i], rtol=1e-5, atol=1e-5)


def test_a_t5_like_encoder_and_decoder_match_torch():
    config = replace(CONFIG, num_query_groups=HEADS)
    torch.manual_seed(0)
    encoder = SelfAttention(config, self_attention_submodules(config), 1, AttnMaskType.no_mask)
    decoder = SelfAttention(config, self_attention_submodules(config), 1, AttnMaskType.causal)
    cross = CrossAttention(config, cross_attention_submodules(config), 1, AttnMaskType.no_mask)
    source, target = hidden(length=7), hidden(length=4).requires_grad_()

    def sum_values(result: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return result[0] + result[1]

    memory = source + sum_values(encoder(source, None))
    state = target + sum_values(decoder(target, None))
    y = state + sum_values(cross(state, None, key_value_states=memory))
    q = F.linear(state, cross.linear_q.weight, cross.linear_q.bias).unflatten(-1, (HEADS, SIZE))
    kv = F.linear(memory, cross.linear_kv.weight, cross.linear_kv.bias).unflatten(
        -1, (HEADS, 2 * SIZE)
    )
    k, v = kv.chunk(2, dim=-1)
    out = F.scaled_dot_product_attention(*(t.permute(1, 2, 0, 3) for t in (q, k, v)))
    out = out.permute(2, 0, 1, 3).flatten(2)
    expected = state + F.linear(out, cross.linear_proj.weight, cross.linear_proj.bias)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    ours, reference = (
        torch.autograd.grad(result.square().sum(), target, retain_graph=True)[0]
        for result in (y, expected)
    )
    torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)


def test_cross_attention_leaves_the_caches_of_self_attention_alone():
    """A decoder layer passes one context to both: each step attends to the whole other sequence, without duplicates."""
    config = replace(CONFIG, num_query_groups=HEADS)
    torch.manual_seed(0)
    own = SelfAttention(config, self_attention_submodules(config), 1, AttnMaskType.causal).eval()
    cross = CrossAttention(
        config, cross_attention_submodules(config), 1, AttnMaskType.no_mask
    ).eval()
    memory, target, context = hidden(length=7), hidden(length=4), StaticContext(2, 16)
    given = {"key_value_states": memory}
    parts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    with torch.no_grad():
        expected = own(target, None)[0], cross(target, None, **given)[0]
        for part in target.split((2, 1, 1)):
            parts[0].append(own(part, None, inference_context=context)[0])
            parts[1].append(cross(part, None, inference_context=context, **given)[0])
            context.sequence_len_offset += len(part)
        pages = PagedContext(2, 1, pages=8, page_size=4, groups=HEADS, size=SIZE)
        pages.begin_step([2, 2])
        with pytest.raises(ValueError, match="cross-attention with a paged context"):
            cross(target[:, :1], None, inference_context=pages, **given)
    for actual, whole in zip(parts, expected, strict=True):
        torch.testing.assert_close(torch.cat(actual), whole, rtol=1e-5, atol=1e-5)


def test_projections_take_the_documented_order_of_arguments():
    """(hidden_states, key_value_states, split_qkv)"""
    layer = self_attention()
    mixed, sizes = layer.get_query_key_value_tensors(hidden(), None, False)
    parts = layer.get_query_key_value_tensors(hidden(), None, True)
    for full, part in zip(mixed.split(sizes, dim=-1), parts, strict=True):
        assert torch.equal(full.reshape(part.shape), part)


@pytest.mark.parametrize("groups", [HEADS, 2])
def test_clipped_projections_keep_logits_below_the_threshold(groups):
    config = replace(
        CONFIG, num_query_groups=groups, add_bias_linear=False, qk_clip=True, qk_clip_threshold=0.5
    )
    layer, x = self_attention(config), hidden()
    layer.linear_qkv.weight.data.mul_(40)
    layer(x, None)
    before = layer.core_attention.current_max_attn_logits
    values = layer.linear_qkv.weight.detach().clone().view(groups, -1, SIZE, HIDDEN)[:, -1]
    assert (before > 0.5).any()
    layer.clip_qk()
    assert layer.core_attention.current_max_attn_logits is None
    layer(x, None)
    after = layer.core_attention.current_max_attn_logits
    assert (after <= 0.5 + 1e-4).all()
    assert torch.equal(layer.linear_qkv.weight.view(groups, -1, SIZE, HIDDEN)[:, -1], values)
    with pytest.raises(ValueError, match="qk_clip=False"):
        self_attention().clip_qk()


@pytest.mark.parametrize("greatest", [-2.0, 0.0, -math.inf])
def test_logits_that_are_not_positive_clip_nothing(greatest):
    """A head whose queries and keys are opposed has a negative greatest logit, a head that sees no key -inf."""
    layer = self_attention(replace(CONFIG, qk_clip=True, qk_clip_threshold=0.5))
    before = layer.linear_qkv.weight.detach().clone()
    layer.core_attention.current_max_attn_logits = torch.tensor([greatest] * HEADS)
    layer.clip_qk()
    assert torch.equal(layer.linear_qkv.weight, before)
    layer.core_attention.current_max_attn_logits = torch.tensor([greatest, greatest, 2.0, 1.0])
    layer.clip_qk()
    first, second = layer.linear_qkv.weight.view(2, -1, HIDDEN)
    expected = before.view(2, -1, HIDDEN)
    assert torch.equal(first, expected[0])
    torch.testing.assert_close(second[: 3 * SIZE], expected[1, : 3 * SIZE] / 2)  # (0.5 / 2.0)^0.5


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("scaling", [recipe.Float8CurrentScaling(), recipe.MXFP8BlockScaling()])
def test_weights_of_codes_are_clipped(scaling):
    wide = TransformerConfig(
        64, 4, num_query_groups=2, add_bias_linear=False, qk_clip=True, device="cpu"
    )
    config = replace(wide, qk_clip_threshold=0.5, params_dtype=torch.bfloat16)
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=scaling):
        layer = SelfAttention(config, self_attention_submodules(config), 1, AttnMaskType.causal)
    layer.linear_qkv.weight.data.copy_(0.5 * torch.randn(layer.linear_qkv.weight.shape))
    x = torch.randn(32, 2, 64).bfloat16()
    greatest = []
    for _ in range(2):
        with te.autocast(recipe=scaling):
            layer(x, None)
        greatest.append(layer.core_attention.current_max_attn_logits.max())
        layer.clip_qk()
    assert isinstance(layer.linear_qkv.weight, te.QuantizedTensor)
    assert greatest[0] > 5
    assert greatest[1] == pytest.approx(0.5, rel=0.1)  # two roundings to 8 bits apart


@pytest.mark.parametrize("norm", ["qk_layernorm", "qk_l2_norm"])
def test_queries_and_keys_are_normalized(norm):
    layer = self_attention(replace(CONFIG, **{norm: True}))
    query, key, _ = layer.get_query_key_value_tensors(hidden())
    for x in (query, key):
        torch.testing.assert_close(
            x.square().mean(-1), torch.ones(x.shape[:-1]), rtol=1e-2, atol=5e-2
        )


@pytest.mark.usefixtures("emulated")
def test_attention_trains_under_a_recipe_and_delays_weight_gradients():
    config = replace(CONFIG, delay_wgrad_compute=True, params_dtype=torch.bfloat16)
    torch.manual_seed(0)
    layer = SelfAttention(
        config, self_attention_submodules(config, input_norm=True), 1, AttnMaskType.causal
    )
    x = hidden(4, 16).bfloat16()
    with te.autocast(recipe=recipe.MXFP8BlockScaling()):
        y, _ = layer(x, None)
    y.float().square().sum().backward()
    assert layer.linear_qkv.weight.grad is None
    layer.backward_dw()
    assert layer.linear_qkv.weight.grad.isfinite().all()
    assert layer.linear_proj.weight.grad.abs().sum() > 0


def test_unsupported_calls_are_rejected_with_a_reason():
    with pytest.raises(ValueError, match="cross-attention has no groups"):
        CrossAttention(CONFIG, cross_attention_submodules(CONFIG), 1)
    config = replace(CONFIG, num_query_groups=HEADS)
    cross = CrossAttention(config, cross_attention_submodules(config), 1)
    with pytest.raises(ValueError, match="key_value_states is None"):
        cross(hidden(), None)
    with pytest.raises(NotImplementedError, match="use SelfAttention"):
        cross.clip_qk()
    layer = self_attention().eval()
    context = StaticContext(1, 4)
    with pytest.raises(ValueError, match="make the context larger"):
        layer(hidden(1), None, inference_context=context)
    with pytest.raises(ValueError, match="more pages are needed"):
        PagedContext(1, 1, 1, 2, 2, SIZE).begin_step([5])
    with pytest.raises(ValueError, match="turn it off"):
        self_attention(replace(CONFIG, fused_single_qkv_rope=True))(hidden(), None)


def test_offloading_that_only_megatron_s_layer_does_is_rejected():
    config = replace(CONFIG)
    settings = {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["core_attn", "moe_act"],
    }
    vars(config).update(settings)  # Megatron's config has them
    with pytest.raises(ValueError, match=r"offload_modules=\['core_attn'\].*leave them out"):
        self_attention(config)
    vars(config)["offload_modules"] = ["moe_act"]
    self_attention(config)


def test_the_input_of_the_projection_is_kept_where_a_norm_is_computed_again():
    layer = self_attention()
    layer.set_for_recompute_input_layernorm()
    assert layer.linear_qkv.save_original_input
    layer.run_realtime_tests()  # one rank agrees with itself


@pytest.mark.parametrize("kind, group", [("tensor", "tp"), ("data", "dp")])
def test_ranks_whose_norms_differ_are_named(kind, group, monkeypatch):
    groups = SimpleNamespace(tp=None, cp=None, dp=None)
    layer = self_attention(replace(CONFIG, qk_layernorm=True), pg_collection=groups)
    setattr(groups, group, "two ranks")
    wrong = [0.0]

    def all_gather(theirs: list[torch.Tensor], mine: torch.Tensor, group: object) -> None:
        assert group == "two ranks"
        for rank, other in enumerate(theirs):
            other.copy_(mine)
            other[-1, 3] += wrong[0] * rank  # the last parameter is the key norm's bias

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    layer.run_realtime_tests()
    wrong[0] = 1e-3
    with pytest.raises(
        RuntimeError, match=f"k_layernorm.bias of {kind}-parallel rank 1 differ from this rank's"
    ):
        layer.run_realtime_tests()


def run_in_steps(
    layer: SelfAttention, x: torch.Tensor, context: StaticContext, **rotary
) -> torch.Tensor:
    """Run a layer on a prompt of 4 tokens, then on one token at a time."""
    parts = []
    with torch.no_grad():
        for part in x.split((4, *[1] * (len(x) - 4))):
            parts.append(layer(part, None, inference_context=context, **rotary)[0])
            context.sequence_len_offset += len(part)
    return torch.cat(parts)


def tables(freqs: torch.Tensor) -> dict[str, torch.Tensor]:
    half = freqs[:, 0, 0, : SIZE // 2]
    return {"rotary_pos_cos": half.cos(), "rotary_pos_sin": half.sin()}


@pytest.mark.parametrize(
    "case", ["sequences further on", "a logit of the denominator", "no rotation", "both forms"]
)
def test_flash_decode_keeps_to_the_layer_and_its_context(case):
    changes = {
        "a logit of the denominator": {"softmax_type": "learnable"},
        "no rotation": {"no_rope_freq": [1]},
    }
    config = replace(CONFIG, **changes.get(case, {}))
    layer, whole = (
        self_attention(replace(config, flash_decode=True)).eval(),
        self_attention(config).eval(),
    )
    if case == "a logit of the denominator":
        for each in (layer, whole):
            each.core_attention.softmax_offset.data.copy_(torch.linspace(-1, 1, HEADS))
    x, freqs, context = hidden(), angles(), StaticContext(5, LENGTH)
    if case == "sequences further on":
        context.batch_size_offset = 3
    both = {"rotary_pos_emb": freqs} if case == "both forms" else {}
    expected, _ = whole(x, None, rotary_pos_emb=freqs)
    torch.testing.assert_close(
        run_in_steps(layer, x, context, **tables(freqs), **both), expected, rtol=1e-5, atol=1e-5
    )


def test_rotations_that_nothing_would_compute_are_rejected():
    x, freqs, static = hidden(), angles(), StaticContext(2, LENGTH)
    flash = self_attention(replace(CONFIG, flash_decode=True)).eval()
    pages = PagedContext(2, 1, pages=8, page_size=4, groups=2, size=SIZE)
    pages.begin_step([5, 5])
    for layer, rotary, said in (
        (
            flash,
            {"rotary_pos_emb": freqs, "inference_context": static},
            "in the place of rotary_pos_emb",
        ),
        (flash, {"inference_context": pages}, "give a static context"),
        (
            flash,
            {**tables(freqs[:3]), "inference_context": static},
            "rotary_pos_cos has 3 positions, 10",
        ),
        (flash, {"rotary_pos_cos": freqs, "inference_context": static}, "give both"),
        (self_attention(), tables(freqs), "rotary_pos_cos is given"),
        (self_attention(), {"rotary_pos_cos_sin": freqs}, "rotary_pos_cos_sin is given"),
        (self_attention(), {"rotary_pos_emb": (freqs,) * 3}, "rotary_pos_emb has 3 tensors"),
        (self_attention(), {"rotary_pos_emb": freqs[..., :7]}, "7 features, which come in pairs"),
        (
            self_attention(),
            {"rotary_pos_emb": freqs.repeat(1, 3, 1, 1)},
            r"give angles \[10, 1 or 2, 1, d\]",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            layer(x, None, **rotary)
    with pytest.raises(ValueError, match="tokens 10:11 of sequences 0:2 do not fit"):
        run_in_steps(flash, hidden(length=LENGTH + 1), static, **tables(angles(LENGTH + 1)))


@pytest.mark.parametrize("norm", ["qk_layernorm", "qk_l2_norm"])
def test_a_fused_rotation_with_norms_of_heads_is_rejected(norm):
    layer = self_attention(replace(CONFIG, fused_single_qkv_rope=True, **{norm: True}))
    with pytest.raises(ValueError, match="norms of them"):
        layer(hidden(), None, rotary_pos_emb=angles())
    with pytest.raises(ValueError, match="of queries and of keys"):
        self_attention(replace(CONFIG, fused_single_qkv_rope=True))(
            hidden(), None, rotary_pos_emb=(angles(), None)
        )


def test_each_sequence_may_have_different_angles():
    layer, x = self_attention(), hidden()
    freqs = torch.cat((angles(), 0.3 * angles().roll(1, 0)), dim=1)
    y, _ = layer(x, None, rotary_pos_emb=freqs)
    each = [layer(x[:, i : i + 1], None, rotary_pos_emb=freqs[:, i : i + 1])[0] for i in range(2)]
    torch.testing.assert_close(y, torch.cat(each, dim=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rotates", ["queries", "keys"])
def test_pages_take_angles_of_one_side_alone(rotates):
    layer, x, freqs = self_attention().eval(), hidden(1), angles()
    pair = (freqs, None) if rotates == "queries" else (None, freqs)
    context = PagedContext(1, 1, pages=8, page_size=4, groups=2, size=SIZE)
    context.begin_step([LENGTH])
    with torch.no_grad():
        y, _ = layer(x, None, inference_context=context, rotary_pos_emb=pair)
        expected, _ = layer(x, None, rotary_pos_emb=pair)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_the_factor_of_yarn_multiplies_rotated_tensors():
    config = replace(CONFIG)
    # Megatron's config has it, ours where a caller sets it.
    vars(config)["yarn_rotary_scaling_factor"] = 32.0
    layer, x, freqs = self_attention(config).eval(), hidden(), angles()
    factor = 0.1 * math.log(32.0) + 1.0
    stronger = self_attention(replace(CONFIG, softmax_scale=factor**2 * SIZE**-0.5)).eval()
    expected, _ = stronger(x, None, rotary_pos_emb=freqs)
    torch.testing.assert_close(
        layer(x, None, rotary_pos_emb=freqs)[0], expected, rtol=1e-5, atol=1e-5
    )
    context = PagedContext(2, 1, pages=8, page_size=4, groups=2, size=SIZE)
    context.begin_step([LENGTH, LENGTH])
    with torch.no_grad():
        y, _ = layer(
            x.transpose(0, 1).reshape(-1, 1, HIDDEN),
            None,
            inference_context=context,
            rotary_pos_emb=freqs,
        )
    torch.testing.assert_close(
        y.view(2, LENGTH, HIDDEN).transpose(0, 1), expected, rtol=1e-5, atol=1e-5
    )
    vars(config).update(yarn_mscale=0.7, yarn_mscale_all_dim=0.7)  # their quotient is 1
    expected, _ = self_attention()(x, None, rotary_pos_emb=freqs)
    torch.testing.assert_close(
        layer(x, None, rotary_pos_emb=freqs)[0], expected, rtol=1e-5, atol=1e-5
    )


def test_a_cache_has_the_causal_mask_in_training_mode_too():
    layer, x, freqs = self_attention().train(), hidden(), angles()
    expected, _ = layer(x, None, rotary_pos_emb=freqs)
    context = StaticContext(2, LENGTH)
    y = run_in_steps(layer, x, context, rotary_pos_emb=freqs)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_contexts_reject_unsupported_sizes():
    with pytest.raises(ValueError, match="max_batch_size=0"):
        StaticContext(0, 4)
    with pytest.raises(TypeError, match=r"max_sequence_length=2\.5"):
        StaticContext(1, 2.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="pages=0"):
        PagedContext(1, 1, 0, 2, 2, SIZE)
    layer, context = self_attention().eval(), PagedContext(1, 1, 8, 2, 2, SIZE)
    with pytest.raises(ValueError, match="pass begin_step"):
        layer(hidden(1), None, inference_context=context)
    narrow = PagedContext(1, 1, 8, 2, 4, SIZE)
    narrow.begin_step([LENGTH])
    with pytest.raises(ValueError, match="the layer's groups and size"):
        layer(hidden(1), None, inference_context=narrow)


def test_a_context_parallel_rank_turns_its_tokens_by_their_own_angles(monkeypatch):
    layer, local = self_attention(), angles()[LENGTH // 2 :]
    query, key, _ = layer.get_query_key_value_tensors(hidden(length=LENGTH // 2))
    expected = layer._rotated(query, key, (local, local), None, None)
    monkeypatch.setattr(attention, "count_ranks", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)
    for ours, reference in zip(
        layer._rotated(query, key, (local, local), None, None), expected, strict=True
    ):
        assert torch.equal(ours, reference)
