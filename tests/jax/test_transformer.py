"""Attention blocks and layers against plain jnp written from their parameters: values, gradients, trees."""

from __future__ import annotations

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import array, draw_unboxed_variables, normal, ones
from transformer_engine.common import recipe
from transformer_engine.jax.flax.transformer import (
    LoRAScope,
    RelativePositionBiases,
    TransformerLayerType,
    _canonicalize_lora_scope,
    rotary_pos_emb,
)

HIDDEN, HEADS, TOKENS, BATCH = 32, 4, 8, 2
DECODER = {"layer_type": TransformerLayerType.DECODER}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def norm(x, p, kind, centered=False):
    wide = x - x.mean(-1, keepdims=True) if kind == "layernorm" else x
    y = wide / jnp.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * (p["scale"] + centered)
    return y + p.get("ln_bias", 0)


def rotate_by_complex_numbers(x, windows, method):
    """RoPE by complex numbers."""
    half = x.shape[-1] // 2
    scales = windows[0] * (windows[1] / windows[0]) ** (np.arange(half) / half)
    phase = array(np.exp(1j * np.arange(x.shape[1])[:, None] / scales))[None, :, None]
    if method == "alternate":
        z = (x[..., :half] + 1j * x[..., half:]) * phase
        return jnp.concatenate((z.real, z.imag), -1)
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * phase
    return jnp.stack((z.real, z.imag), -1).reshape(x.shape)


def product(x, p):
    y = jnp.tensordot(x, p["kernel"], 1) + p.get("bias", 0)
    if "lora_a_kernel" in p:
        low = jnp.tensordot(x, p["lora_a_kernel"], 1)
        y += jnp.einsum("...r,...rn->...n", low, p["lora_b_kernel"])
    return y


def plain_attention(p, x, source, fields, hidden, bias=None, self_attention=True, normed=True):
    kind = fields.get("layernorm_type", "layernorm")
    first = p["qkv"] if "qkv" in p else p["query"]
    inner = norm(x, first, kind, fields.get("zero_centered_gamma", False)) if normed else x
    source = inner if self_attention else source
    groups = fields.get("num_gqa_groups") or HEADS
    if "qkv" in p:
        q, k, v = jnp.moveaxis(product(inner, p["qkv"]), -2, 0)
    elif "kv" in p:
        q, (k, v) = product(inner, p["query"]), jnp.moveaxis(product(source, p["kv"]), -2, 0)
    else:
        q, k, v = product(inner, p["query"]), product(source, p["key"]), product(source, p["value"])
    d = HIDDEN // HEADS
    q, k, v = (y.reshape(*y.shape[:2], n, d) for y, n in ((q, HEADS), (k, groups), (v, groups)))
    if fields.get("enable_rotary_pos_emb"):
        rotary = (
            fields.get("rotary_pos_emb_windows", (1, 10000)),
            fields.get("rotary_pos_emb_group_method", "consecutive"),
        )
        q, k = rotate_by_complex_numbers(q, *rotary), rotate_by_complex_numbers(k, *rotary)
    k, v = (jnp.repeat(y, HEADS // groups, axis=2) for y in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (
        d**-0.5 if fields.get("scale_attn_logits") else 1
    )
    scores = scores + (0 if bias is None else bias)
    scores = jnp.where(hidden, -jnp.inf, scores)
    sink = {"vanilla": None, "off_by_one": 0.0}.get(
        fields.get("softmax_type", "vanilla"), "learned"
    )
    if sink == "learned":
        sink = p["DotProductAttention_0"][sink_scope()]["softmax_offset"]
    weights = jnp.exp(scores)
    total = weights.sum(-1, keepdims=True) + (0 if sink is None else jnp.exp(sink))
    total = jnp.where(total == 0, 1, total)  # rows that see no key are zero
    out = jnp.einsum("bhqk,bkhd->bqhd", weights / total, v).reshape(*x.shape[:2], HIDDEN)
    return product(out, p["out"]), inner


def plain_mlp(p, x, fields):
    inner = norm(
        x, p, fields.get("layernorm_type", "layernorm"), fields.get("zero_centered_gamma", False)
    )
    hidden = jnp.einsum("bsh,hnf->bsnf", inner, p["wi_kernel"]) + p.get("wi_bias", 0)
    functions = {
        "gelu": lambda y: nn.gelu(y, approximate=True),
        "silu": nn.silu,
        "linear": lambda y: y,
    }
    y = 1
    for index, name in enumerate(fields.get("mlp_activations", ("gelu",))):
        y = y * (functions[name] if isinstance(name, str) else name)(hidden[..., index, :])
    return y @ p["wo_kernel"] + p.get("wo_bias", 0), inner


def plain_layer(params, x, encoded, mask, cross_mask, fields):
    decoder = fields.get("layer_type") is TransformerLayerType.DECODER
    i, j = np.arange(TOKENS)[:, None], np.arange(TOKENS)[None, :]
    kind = fields.get("self_attn_mask_type", "causal")
    hidden = (j > i) if "causal" in kind else np.zeros_like(j > i)
    if "window_size" in fields:
        hidden = hidden | (j < i - fields["window_size"][0])
    # A mask is read by padding, and by a causal mask with a window.
    read = "padding" in kind or ("causal" in kind and "window_size" in fields)
    hidden = hidden[None, None] | (mask if read else False)
    bias = None
    if fields.get("enable_relative_embedding", True):
        bias = relative(params["relpos_bias"]["rel_embedding"], not decoder)
    normed = not fields.get("output_layernorm", False)
    after_norm = fields.get("apply_residual_connection_post_layernorm", False)
    name = "self_attention" if decoder else "attention"
    y, inner = plain_attention(params[name], x, None, fields, hidden, bias, normed=normed)
    x = y + (inner if after_norm else x)
    if decoder:
        if "window_size" in fields:
            i, j = np.arange(TOKENS)[:, None], np.arange(encoded.shape[1])[None, :]
            left, right = fields["window_size"]
            cross_mask = cross_mask | (j < i - left) | ((j > i + right) & (right >= 0))
        y, inner = plain_attention(
            params["encoder_decoder_attention"],
            x,
            encoded,
            fields,
            cross_mask,
            self_attention=False,
        )
        x = y + (inner if after_norm else x)
    y, inner = plain_mlp(params["mlp"], x, fields)
    x = y + (inner if after_norm else x)
    return (
        norm(
            x,
            params["output_layernorm"],
            fields.get("layernorm_type", "layernorm"),
            fields.get("zero_centered_gamma", False),
        )
        if not normed
        else x
    )


def relative(embedding, bidirectional):
    """T5's buckets, one distance at a time."""
    count = 16 if bidirectional else 32

    def bucket(q, k):
        back = q - k
        first = count if bidirectional and back < 0 else 0
        back = abs(back) if bidirectional else max(back, 0)
        if back < count // 2:
            return first + back
        far = count // 2 + int(
            np.log(back / (count // 2)) / np.log(128 / (count // 2)) * (count // 2)
        )
        return first + min(far, count - 1)

    table = [[bucket(q, k) for k in range(TOKENS)] for q in range(TOKENS)]
    return embedding[:, np.asarray(table)][None]


CONFIGURATIONS = {
    "encoder": {},
    "encoder-rms-gated": {"layernorm_type": "rmsnorm", "mlp_activations": ("silu", "linear")},
    "encoder-bias-zero-centred": {"use_bias": True, "zero_centered_gamma": True},
    "encoder-padding": {"self_attn_mask_type": "padding_causal"},
    "encoder-gqa": {"num_gqa_groups": 2},
    "encoder-unfused": {
        "fuse_qkv_params": False,
        "scale_attn_logits": True,
        "scaled_query_init": False,
    },
    "encoder-rope": {"enable_rotary_pos_emb": True, "enable_relative_embedding": False},
    "encoder-rope-halves": {
        "enable_rotary_pos_emb": True,
        "rotary_pos_emb_group_method": "alternate",
        "num_gqa_groups": 1,
    },
    "encoder-residual-of-norms": {"apply_residual_connection_post_layernorm": True},
    "encoder-output-norm": {"output_layernorm": True, "self_attn_mask_type": "no_mask"},
    "encoder-window-sink": {"window_size": (2, 0), "softmax_type": "off_by_one"},
    "encoder-learned-sink-function": {"softmax_type": "learnable", "mlp_activations": (jnp.sin,)},
    "encoder-transposed": {"transpose_batch_sequence": True, "num_gqa_groups": 2},
    "encoder-low-rank": {"low_rank_adaptation_scope": "exclude_mlp", "low_rank_adaptation_dim": 2},
    "decoder": DECODER,
    "decoder-all": DECODER
    | {
        "use_bias": True,
        "apply_residual_connection_post_layernorm": True,
        "fuse_qkv_params": False,
        "num_gqa_groups": 2,
    },
}
GATED, RMS = {"mlp_activations": ("gelu", "linear")}, {"layernorm_type": "rmsnorm"}
ROPE = {"enable_rotary_pos_emb": True, "enable_relative_embedding": False}
HALVES = ROPE | {"rotary_pos_emb_group_method": "alternate"}
UNFUSED, TRANSPOSED = {"fuse_qkv_params": False}, {"transpose_batch_sequence": True}
# With those above, every field meets every other kind of field at least once: forty layers.
PAIRS = {
    "rms-rope-gqa": RMS | ROPE | {"num_gqa_groups": 2},
    "rms-halves-unfused": RMS | HALVES | UNFUSED,
    "rms-padding-window": RMS | {"self_attn_mask_type": "padding_causal", "window_size": (3, 0)},
    "rms-output-norm-bias": RMS | {"output_layernorm": True, "use_bias": True},
    "rms-low-rank": RMS | {"low_rank_adaptation_scope": "qkv_proj", "low_rank_adaptation_dim": 3},
    "rms-sink-transposed": RMS | TRANSPOSED | {"softmax_type": "off_by_one"},
    "gated-bias-rope": GATED | ROPE | {"use_bias": True},
    "gated-zero-centred-unfused": GATED | UNFUSED | {"zero_centered_gamma": True},
    "gated-learned-sink-gqa": GATED | {"softmax_type": "learnable", "num_gqa_groups": 1},
    "gated-residual-of-norms": GATED | {"apply_residual_connection_post_layernorm": True},
    "function-bias": {"mlp_activations": (jnp.tanh,), "use_bias": True},
    "functions-gated": {"mlp_activations": (jnp.cos, "linear"), **RMS},
    "no-mask-scaled": {"self_attn_mask_type": "no_mask", "scale_attn_logits": True},
    "padding-learned-sink": {"self_attn_mask_type": "padding_causal", "softmax_type": "learnable"},
    "padding-gqa-rope": {"self_attn_mask_type": "padding_causal", "num_gqa_groups": 4, **ROPE},
    "window-gqa-halves": {"window_size": (1, 0), "num_gqa_groups": 2, **HALVES},
    "window-zero-centred": {"window_size": (2, 0), "zero_centered_gamma": True},
    "transposed-unfused-rope": TRANSPOSED | UNFUSED | ROPE,
    "transposed-bias-gated": TRANSPOSED | GATED | {"use_bias": True},
    "low-rank-output-unfused": UNFUSED
    | {"low_rank_adaptation_scope": "output_proj", "low_rank_adaptation_dim": 4},
    "float32-logits-unscaled-query": {"float32_attention_logits": True, "scaled_query_init": False},
    "decoder-rms-gated": DECODER | RMS | GATED,
    "decoder-rope-gqa": DECODER | ROPE | {"num_gqa_groups": 2},
    "decoder-zero-centred-low-rank": DECODER
    | {
        "zero_centered_gamma": True,
        "low_rank_adaptation_scope": "exclude_mlp",
        "low_rank_adaptation_dim": 2,
    },
}
QUICK = (
    "encoder-rms-gated",
    "encoder-bias-zero-centred",
    "encoder-rope-halves",
    "encoder-window-sink",
    "decoder-all",
)
LAYERS = [
    pytest.param(fields, id=name, marks=[] if name in QUICK else pytest.mark.slow)
    for name, fields in (CONFIGURATIONS | PAIRS).items()
]


def data(fields):
    keys = jax.random.split(jax.random.key(0), 2)
    x = normal(keys[0], (BATCH, TOKENS, HIDDEN))
    encoded = normal(keys[1], (BATCH, TOKENS + 2, HIDDEN)) if "layer_type" in fields else None
    mask = np.zeros((BATCH, 1, TOKENS, TOKENS), bool)
    mask[0, ..., 6:] = True
    cross = np.zeros((BATCH, 1, TOKENS, TOKENS + 2), bool)
    cross[1, ..., 5:] = True
    return x, encoded, jnp.asarray(mask), jnp.asarray(cross)


def layer(fields):
    return te_flax.TransformerLayer(
        hidden_size=HIDDEN, mlp_hidden_size=48, num_attention_heads=HEADS, **(NO_DROPOUT | fields)
    )


def parameters(model, x, encoded, mask, cross):
    variables = draw_unboxed_variables(model, x, encoded, mask, cross, deterministic=True)
    state, params = flax.core.pop(variables, "params")
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    # Away from zero: biases, second factors of low rank and sinks begin there.
    leaves = [
        np.asarray(leaf) + np.float32(0.02) * np.asarray(normal(key, leaf.shape))
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, leaves), state


@pytest.mark.parametrize("fields", LAYERS)
@pytest.mark.sampled(2)
def test_a_layer_equals_the_reference_layer(fields):
    x, encoded, mask, cross = data(fields)
    swap = (
        (lambda y: jnp.swapaxes(y, 0, 1))
        if fields.get("transpose_batch_sequence")
        else (lambda y: y)
    )
    model = layer(fields)
    params, _ = parameters(model, swap(x), encoded, mask, cross)
    dy = normal(jax.random.key(3), x.shape)

    def ours(params, x):
        return (
            swap(model.apply({"params": params}, swap(x), encoded, mask, cross, deterministic=True))
            * dy
        ).sum()

    def plain(params, x):
        return (plain_layer(params, x, encoded, mask, cross, fields) * dy).sum()

    value, grads = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))(params, x)
    reference, want_grads = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(params, x)
    np.testing.assert_allclose(value, reference, rtol=1e-4, atol=1e-4)
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(want_grads))
    for (path, got), expected in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(want_grads), strict=True
    ):
        # A bias of keys shifts all scores of a query equally: its gradient is zero up to rounding.
        scale = max(float(np.abs(expected).max()), 1e-2 * largest)
        np.testing.assert_allclose(
            np.asarray(got) / scale, np.asarray(expected) / scale, atol=2e-4, err_msg=str(path)
        )


FSDP, TP, JOINED, WHOLE = "nvte_w_fsdp", "nvte_w_tp", "nvte_w_joined", "nvte_w_no_shard"
ONES, ZEROS = 1.0, 0.0


def projection(inputs, features, axes, fields, adapted=False):
    """{name: (shape, axes, initial value)}: a constant or the standard deviation of random values."""
    features = features if isinstance(features, tuple) else (features,)
    bias_axes = axes[1:] if axes[-1] == TP else (WHOLE,)
    outputs = {"kernel": ((inputs, *features), axes, None)}
    if fields.get("use_bias"):
        outputs["bias"] = (features, bias_axes, ZEROS)
    if adapted:
        rank = fields["low_rank_adaptation_dim"]
        outputs["lora_a_kernel"] = (
            (inputs, *features[:-1], rank),
            (None,) * (1 + len(features)),
            None,
        )
        outputs["lora_b_kernel"] = (
            (*features[:-1], rank, features[-1]),
            (None,) * (1 + len(features)),
            ZEROS,
        )
    return outputs


def norm_parameters(fields):
    outputs = {"scale": ((HIDDEN,), (WHOLE,), ZEROS if fields.get("zero_centered_gamma") else ONES)}
    bias = {"ln_bias": ((HIDDEN,), (WHOLE,), ZEROS)}
    return outputs | (bias if fields.get("layernorm_type", "layernorm") == "layernorm" else {})


def attention_parameters(fields, self_attention, normed):
    groups = fields.get("num_gqa_groups") or HEADS
    narrow, scope = HIDDEN // HEADS * groups, fields.get("low_rank_adaptation_scope", "none")
    adapted, out_adapted = (
        scope in ("exclude_mlp", "qkv_proj"),
        scope in ("exclude_mlp", "output_proj"),
    )
    norms = norm_parameters(fields) if normed else {}
    one, several = (FSDP, TP), (FSDP, JOINED, TP)
    outputs = {"out": projection(HIDDEN, HIDDEN, (TP, FSDP), fields, out_adapted)}
    if fields.get("fuse_qkv_params", True) and self_attention and groups == HEADS:
        outputs["qkv"] = projection(HIDDEN, (3, HIDDEN), several, fields, adapted) | norms
    else:
        outputs["query"] = projection(HIDDEN, HIDDEN, one, fields, adapted) | norms
        if fields.get("fuse_qkv_params", True):
            outputs["kv"] = projection(HIDDEN, (2, narrow), several, fields, adapted)
        else:
            outputs |= {
                name: projection(HIDDEN, narrow, one, fields, adapted) for name in ("key", "value")
            }
    if fields.get("softmax_type") == "learnable":
        sink = {"softmax_offset": ((1, HEADS, 1, 1), (None, "nvte_head", None, None), ZEROS)}
        outputs["DotProductAttention_0"] = {sink_scope(): sink}
    return outputs


def sink_scope():
    """Parameter scope for a sink, named after the fused module if a fused kernel exists."""
    return f"_{'Unfused' if jax.default_backend() == 'cpu' else 'Fused'}DotProductAttention_0"


def layer_parameters(fields):
    """Expected parameter tree in a layer's checkpoint."""
    decoder = fields.get("layer_type") is TransformerLayerType.DECODER
    parts = len(fields.get("mlp_activations", ("gelu",)))
    wide = fields.get("output_layernorm", False)
    mlp = norm_parameters(fields) | {
        "wi_kernel": ((HIDDEN, parts, 48), (FSDP, JOINED, TP), None),
        "wo_kernel": ((48, HIDDEN), (TP, FSDP), None),
    }
    if fields.get("use_bias"):
        mlp |= {
            "wi_bias": ((parts, 48), (JOINED, TP), ZEROS),
            "wo_bias": ((HIDDEN,), (WHOLE,), ZEROS),
        }
    outputs = {
        "self_attention" if decoder else "attention": attention_parameters(fields, True, not wide)
    }
    if decoder:
        outputs["encoder_decoder_attention"] = attention_parameters(
            fields, self_attention=False, normed=True
        )
    if fields.get("enable_relative_embedding", True):
        outputs["relpos_bias"] = {"rel_embedding": ((HEADS, 32), ("heads", "relpos_buckets"), None)}
    return outputs | {"mlp": mlp} | ({"output_layernorm": norm_parameters(fields)} if wide else {})


def init_with_boxes(fields):
    x, encoded, mask, cross = data(fields)
    x = jnp.swapaxes(x, 0, 1) if fields.get("transpose_batch_sequence") else x
    model = layer(fields)

    def init(key):
        return model.init(key, x, encoded, mask, cross, deterministic=True)["params"]

    return flax.traverse_util.flatten_dict(jax.eval_shape(init, jax.random.key(1))), init


@pytest.mark.parametrize("fields", (CONFIGURATIONS | PAIRS).values(), ids=CONFIGURATIONS | PAIRS)
@pytest.mark.sampled(len(CONFIGURATIONS))
def test_the_parameters_of_a_layer_have_their_paths_shapes_and_axes(fields):
    boxed, _ = init_with_boxes(fields)
    expected = flax.traverse_util.flatten_dict(layer_parameters(fields))
    assert set(boxed) == set(expected)
    for path, (shape, axes, _) in expected.items():
        assert boxed[path].value.shape == shape, path
        assert boxed[path].names == axes, path
        assert boxed[path].value.dtype == jnp.float32, path


# A window and a sink of 0 add no parameters to a layer.
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(*case.values, id=case.id, marks=pytest.mark.slow)
        if case.id == "encoder-window-sink"
        else case
        for case in LAYERS
    ],
)
def test_the_parameters_of_a_layer_have_their_initial_values(fields):
    _, init = init_with_boxes(fields)
    drawn = flax.traverse_util.flatten_dict(nn.meta.unbox(jax.jit(init)(jax.random.key(1))))
    for path, (shape, _, constant) in flax.traverse_util.flatten_dict(
        layer_parameters(fields)
    ).items():
        if constant is not None:
            np.testing.assert_array_equal(
                drawn[path], np.full(shape, constant, np.float32), err_msg=str(path)
            )
            continue
        inputs = shape[0] if path[-1] != "rel_embedding" else np.mean(shape)
        expected = inputs**-0.5
        kernel = np.asarray(drawn[path])
        if path[-2] in ("qkv", "query") and fields.get("scaled_query_init", True):
            query = kernel[:, 0] if path[-2] == "qkv" else kernel
            kernel = query * (HIDDEN // HEADS) ** 0.5
        assert abs(kernel.std() / expected - 1) < 5 / (2 * kernel.size) ** 0.5, path


@pytest.mark.parametrize(
    ("former", "name", "value"),
    [
        ("num_heads", "num_attention_heads", 2),
        ("dropout_rate", "attention_dropout", 0.25),
        ("output_layernorm", "input_layernorm", False),
        ("fuse_qkv", "fuse_qkv_params", False),
        ("apply_residual_connection_post_layernorm", "return_layernorm_output", True),
    ],
)
def test_a_former_name_of_a_field_is_taken_with_a_warning(former, name, value):
    with pytest.warns(
        DeprecationWarning, match=f"{former} of MultiHeadAttention is deprecated; give {name}"
    ):
        model = te_flax.MultiHeadAttention(8, HEADS, **{former: value})
    assert getattr(model, name) == value
    assert getattr(model.copy(), name) == value  # which warns no more


@pytest.mark.parametrize(
    ("groups", "child", "parts"), [(HEADS, "qkv", "qkv"), (2, "query", "q"), (2, "kv", "kv")]
)
def test_fused_kernels_are_initialized_part_by_part(groups, child, parts):
    """With keys from jax.random.split of the parameter's key; the query's part is divided by sqrt(head_dim)."""
    x, draw = ones((1, 4, HIDDEN)), nn.initializers.normal(1.0)
    fields = {"num_gqa_groups": groups, "input_layernorm": False, "kernel_init": draw}
    model = te_flax.MultiHeadAttention(8, HEADS, **fields)
    variables = jax.jit(lambda key: model.init(key, x, x, deterministic=True))(jax.random.key(0))
    kernel = nn.meta.unbox(variables)["params"][child]["kernel"]

    class Key(nn.Module):
        @nn.compact
        def __call__(self):
            return self.param("kernel", lambda key: key)

    class Outer(nn.Module):
        @nn.compact
        def __call__(self):
            return Key(name=child)()

    key = Outer().init(jax.random.key(0))["params"][child]["kernel"]
    keys = jax.random.split(key, len(parts)) if len(parts) > 1 else [key]
    for index, (part, its_key) in enumerate(zip(parts, keys, strict=True)):
        expected = draw(its_key, (HIDDEN, 8 * (HEADS if part == "q" else groups)), jnp.float32)
        actual = kernel[:, index] if len(parts) > 1 else kernel
        np.testing.assert_allclose(actual, expected / (8**0.5 if part == "q" else 1), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "settings", "tolerance"),
    [
        ("encoder-gqa", recipe.DelayedScaling(amax_history_len=4), 0.2),
        pytest.param(
            *("encoder-rms-gated", recipe.Float8CurrentScaling(), 0.2), marks=pytest.mark.slow
        ),
        pytest.param(*("decoder", recipe.MXFP8BlockScaling(), 0.15), marks=pytest.mark.slow),
        pytest.param(*("encoder", recipe.Float8BlockScaling(), 0.15), marks=pytest.mark.slow),
    ],
)
def test_a_quantized_layer_is_close_to_the_reference_layer(name, settings, tolerance):
    fields = CONFIGURATIONS[name]
    x, encoded, mask, cross = data(fields)
    model = layer(fields)
    with te.autocast(True, settings):
        params, state = parameters(model, x, encoded, mask, cross)

        def ours(params, state, x):
            return (
                model.apply(
                    {"params": params, **state}, x, encoded, mask, cross, deterministic=True
                )
                ** 2
            ).sum()

        grads, state = jax.jit(jax.grad(ours, argnums=(0, 1)))(params, state, x)
    plain = jax.jit(
        jax.grad(lambda p: (plain_layer(p, x, encoded, mask, cross, fields) ** 2).sum())
    )(params)
    flat, expected = (
        jnp.concatenate([g.ravel() for g in jax.tree.leaves(grads)]),
        jax.tree.leaves(plain),
    )
    expected = jnp.concatenate([g.ravel() for g in expected])
    assert float(jnp.linalg.norm(flat - expected) / jnp.linalg.norm(expected)) < tolerance
    if settings.delayed():
        assert all(
            float(s[0]) != 1.0
            for k, s in flax.traverse_util.flatten_dict(state).items()
            if k[-1].endswith("scale")
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "dtype", "tolerance"),
    [
        pytest.param(None, jnp.bfloat16, 0.06, id="bfloat16"),
        pytest.param(recipe.DelayedScaling(amax_history_len=4), jnp.float32, 0.4, id="fp8"),
    ],
)
@pytest.mark.parametrize("fields", (CONFIGURATIONS | PAIRS).values(), ids=CONFIGURATIONS | PAIRS)
def test_low_precision_gradients_are_close_to_the_reference(fields, settings, dtype, tolerance):
    x, encoded, mask, cross = data(fields)
    swap = (
        (lambda y: jnp.swapaxes(y, 0, 1))
        if fields.get("transpose_batch_sequence")
        else (lambda y: y)
    )
    model, dy = layer(fields), normal(jax.random.key(3), x.shape)
    low = jax.tree.map(lambda y: y.astype(dtype), (swap(x), encoded))
    with te.autocast(settings is not None, settings):
        params, state = parameters(model, swap(x), encoded, mask, cross)
        # The first step records amax values; the second uses the scales derived from them.
        ours = jax.jit(
            jax.value_and_grad(
                lambda params, state: (
                    swap(
                        model.apply(
                            {"params": params, **state}, *low, mask, cross, deterministic=True
                        )
                    )
                    * dy
                ).sum(),
                argnums=(0, 1),
            )
        )
        _, (_, state) = ours(params, state)
        value, (grads, _) = ours(params, state)

    def plain(params):
        return (plain_layer(params, x, encoded, mask, cross, fields) * dy).sum()

    want_value, reference = jax.jit(jax.value_and_grad(plain))(params)
    norms = [float(jnp.linalg.norm(leaf)) for leaf in jax.tree.leaves(reference)]
    assert abs(float(value) - float(want_value)) < tolerance * float(jnp.linalg.norm(dy))
    for (path, got), expected, size in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(reference), norms, strict=True
    ):
        # A bias of keys shifts all scores of a query equally: its gradient is zero up to rounding.
        error = float(jnp.linalg.norm(got - expected)) / max(size, 0.05 * max(norms))
        assert error < tolerance, path


def test_dropout_repeats_with_its_key():
    """Which elements are dropped is in test_module_fields.py."""
    x = data({})[0]
    model = te_flax.TransformerLayer(
        hidden_size=HIDDEN, mlp_hidden_size=48, num_attention_heads=HEADS, hidden_dropout=0.5,
        hidden_dropout_dims=(1,), attention_dropout=0.3, intermediate_dropout=0.2, drop_path=0.2,
    )  # fmt: skip
    params = draw_unboxed_variables(model, x)
    draw = jax.jit(lambda key: model.apply(params, x, rngs={"dropout": key}))

    def run(seed):
        return draw(jax.random.key(seed))

    np.testing.assert_array_equal(run(3), run(3))
    assert not np.array_equal(run(3), run(4))


@pytest.mark.parametrize("method", ["consecutive", "alternate"])
def test_rotary_embedding_rotates_pairs(method):
    x = normal(jax.random.key(0), (2, 5, 3, 8))
    got = rotary_pos_emb(x, (1, 100), False, method)
    np.testing.assert_allclose(
        got, rotate_by_complex_numbers(x, (1, 100), method), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_array_equal(
        rotary_pos_emb(x.swapaxes(0, 1), (1, 100), True, method), got.swapaxes(0, 1)
    )


def test_low_rank_scopes_have_names():
    assert _canonicalize_lora_scope(None) == LoRAScope()
    assert _canonicalize_lora_scope("all") == LoRAScope(qkv_proj=True, output_proj=True, mlp=True)
    assert _canonicalize_lora_scope("exclude_mlp") == LoRAScope(
        qkv_proj=True, output_proj=True, mlp=False
    )


def test_axis_rules_are_extended_by_the_mesh_resource():
    with te.sharding.global_shard_guard(te.MeshResource(dp_resource="data", tp_resource="model")):
        rules = te_flax.extend_logical_axis_rules([("embed", None), ("nvte_batch", "data")])
        assert rules[:2] == (("embed", None), ("nvte_batch", "data"))
        assert dict(rules)["nvte_w_tp"] == "model"
        with pytest.raises(ValueError, match="leave the rule out"):
            te_flax.extend_logical_axis_rules([("nvte_batch", "model")])
        with pytest.raises(TypeError, match="give pairs"):
            te_flax.extend_logical_axis_rules([("embed", 3)])


def test_a_layer_takes_the_width_of_its_inputs():
    """hidden_size only determines the head width: 16 / 4 heads here, for any input width."""
    x = normal(jax.random.key(0), (BATCH, TOKENS, HIDDEN))
    model = te_flax.TransformerLayer(
        hidden_size=16, num_attention_heads=HEADS, mlp_hidden_size=48, **NO_DROPOUT
    )
    params = draw_unboxed_variables(model, x, deterministic=True)["params"]
    assert params["attention"]["qkv"]["kernel"].shape == (HIDDEN, 3, 16)

    def plain(p, x):
        rows = product(norm(x, p["attention"]["qkv"], "layernorm"), p["attention"]["qkv"])
        q, k, v = (z.reshape(BATCH, TOKENS, HEADS, 4) for z in jnp.moveaxis(rows, -2, 0))
        bias = relative(p["relpos_bias"]["rel_embedding"], True)
        scores = jnp.where(
            np.tri(TOKENS, dtype=bool), jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias, -jnp.inf
        )
        attended = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(
            BATCH, TOKENS, 16
        )
        x = x + product(attended, p["attention"]["out"])
        return x + plain_mlp(p["mlp"], x, {})[0]

    y = jax.jit(lambda params, x: model.apply({"params": params}, x, deterministic=True))(params, x)
    np.testing.assert_allclose(y, jax.jit(plain)(params, x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "encoded", "sentence"),
    [
        ({"num_attention_heads": 5}, False, "does not divide hidden_size"),
        ({"num_gqa_groups": 3}, False, "does not divide num_attention_heads"),
        (DECODER, False, "give the encoder's output"),
        ({"layer_type": "encoder"}, False, r"give one of TransformerLayerType\.ENCODER"),
        ({"hidden_dropout": 1.5}, False, "outside"),
        ({"self_attn_mask_type": "some"}, False, "choose one of"),
        (
            {"enable_rotary_pos_emb": True, "rotary_pos_emb_group_method": "x"},
            False,
            "'consecutive' or",
        ),
        ({"enable_rotary_pos_emb": True, "rotary_pos_emb_windows": (0, 1)}, False, "both above 0"),
        ({"mlp_hidden_size": 0}, False, "mlp_hidden_size=0"),
    ],
)
def test_a_bad_layer_is_rejected_with_value_limit_and_remedy(fields, encoded, sentence):
    x = ones((1, 4, HIDDEN))
    model = te_flax.TransformerLayer(
        **({"hidden_size": HIDDEN, "num_attention_heads": HEADS} | fields)
    )
    with pytest.raises((ValueError, TypeError), match=sentence):
        model.init(jax.random.key(0), x, x if encoded else None, deterministic=True)


def test_relative_biases_need_two_buckets():
    with pytest.raises(ValueError, match="num_buckets=1"):
        RelativePositionBiases(1, 8, 2).init(jax.random.key(0), 3, 3)


@pytest.mark.parametrize(("fused", "separate"), [(True, 1), (False, 2)])
def test_unquantized_projections_of_the_same_values_stay_separate_products(fused, separate):
    """XLA for GPUs merges products that share an operand, unless all of them except one read it through a barrier."""
    x = ones((1, 8, 32), jnp.bfloat16)
    module = te_flax.MultiHeadAttention(
        head_dim=8,
        num_attention_heads=4,
        num_gqa_groups=2,
        fuse_qkv_params=fused,
        dtype=jnp.bfloat16,
    )

    def barriers(inputs_kv):
        def step(x):
            return module.init_with_output(jax.random.key(0), x, inputs_kv(x), deterministic=True)[
                0
            ][0]

        return str(jax.make_jaxpr(step)(x)).count("optimization_barrier")

    assert barriers(lambda x: x) - barriers(lambda x: x + 1) == separate
    with te.autocast(enabled=True, recipe=recipe.Float8CurrentScaling()):
        assert barriers(lambda x: x) == barriers(lambda x: x + 1), "quantized, they share the codes"
