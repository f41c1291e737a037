"""Every field of the Flax modules against layers in plain Flax with the same keys: first values, values, gradients.

The layers have the same modules under the same names, so that parameters and dropped elements are drawn alike.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import normal
from tests.jax.plain_layers import PLAIN, Buckets
from tests.jax.test_transformer import BATCH, DECODER, HEADS, HIDDEN, TOKENS, data

gaussian, uniform = nn.initializers.normal, nn.initializers.uniform
CLAMPED = ("clamped_silu", "clamped_linear")
ADAPTED = {"low_rank_adaptation_scope": "all", "low_rank_adaptation_dim": 5}
# For each field, values other than its default, with the fields that they need to have an effect.
OF_A_LAYER: dict[str, tuple[dict[str, Any], ...]] = {
    "num_gqa_groups": ({"num_gqa_groups": 2}, {"num_gqa_groups": 1}),
    "layernorm_type": ({"layernorm_type": "rmsnorm"},),
    "layernorm_epsilon": ({"layernorm_epsilon": 0.1},),
    "zero_centered_gamma": ({"zero_centered_gamma": True},),
    "hidden_dropout": ({"hidden_dropout": 0.3}, {"hidden_dropout": 0.0}),
    "hidden_dropout_dims": ({"hidden_dropout_dims": (1,)}, {"hidden_dropout_dims": (0, 2)}),
    "attention_dropout": ({"attention_dropout": 0.3}, {"attention_dropout": 0.0}),
    "intermediate_dropout": ({"intermediate_dropout": 0.25},),
    "intermediate_dropout_dims": (
        {"intermediate_dropout_dims": (1,), "intermediate_dropout": 0.25},
        {"intermediate_dropout_dims": (0, 2), "intermediate_dropout": 0.5},
    ),
    "dropout_rng_name": ({"dropout_rng_name": "noise"},),
    "mha_kernel_init": ({"mha_kernel_init": uniform(0.3)}, {"mha_kernel_init": gaussian(0.3)}),
    "mlp_kernel_init": ({"mlp_kernel_init": uniform(0.3)}, {"mlp_kernel_init": gaussian(0.3)}),
    "mlp_activations": (
        {"mlp_activations": ("silu", "linear")},
        {"mlp_activations": ("relu", jnp.cos)},
    ),
    "mlp_activation_params": (
        {"mlp_activation_params": {"limit": 0.7, "alpha": 1.5}, "mlp_activations": CLAMPED},
    ),
    "use_bias": ({"use_bias": True},),
    "bias_init": ({"bias_init": gaussian(0.2), "use_bias": True},),
    "apply_residual_connection_post_layernorm": (
        {"apply_residual_connection_post_layernorm": True},
    ),
    "output_layernorm": ({"output_layernorm": True},),
    "float32_attention_logits": ({"float32_attention_logits": True},),
    "layer_type": (DECODER,),
    "self_attn_mask_type": (
        {"self_attn_mask_type": "padding_causal"},
        {"self_attn_mask_type": "no_mask"},
    ),
    "self_attn_bias_type": (
        {"self_attn_bias_type": "pre_scale_bias"},
        {"self_attn_bias_type": "post_scale_bias"},
    ),
    "enable_relative_embedding": ({"enable_relative_embedding": False},),
    "relative_embedding": ({"relative_embedding": te_flax.RelativePositionBiases(32, 128, HEADS)},),
    "enable_rotary_pos_emb": ({"enable_rotary_pos_emb": True},),
    "rotary_pos_emb_windows": ({"rotary_pos_emb_windows": (2, 50), "enable_rotary_pos_emb": True},),
    "rotary_pos_emb_group_method": (
        {"rotary_pos_emb_group_method": "alternate", "enable_rotary_pos_emb": True},
    ),
    "low_rank_adaptation_scope": (ADAPTED, ADAPTED | {"low_rank_adaptation_scope": "mlp"}),
    "low_rank_adaptation_dim": (ADAPTED | {"low_rank_adaptation_dim": 3},),
    "low_rank_adaptation_alpha": (ADAPTED | {"low_rank_adaptation_alpha": 2.0},),
    "drop_path": ({"drop_path": 0.4},),
    "fuse_qkv_params": ({"fuse_qkv_params": False},),
    "transpose_batch_sequence": ({"transpose_batch_sequence": True},),
    "enable_sequence_parallel": ({"enable_sequence_parallel": True},),
    "scale_attn_logits": ({"scale_attn_logits": True},),
    "scaled_query_init": ({"scaled_query_init": False},),
    "window_size": ({"window_size": (2, 0)}, {"window_size": (3, 1)}),
    "softmax_type": ({"softmax_type": "learnable"}, {"softmax_type": "off_by_one"}),
}
LOW_RANK = {"enable_low_rank_adaptation": True, "low_rank_adaptation_dim": 4}
MADE_BY: dict[str, tuple[dict[str, Any], ...]] = {
    "kernel_init": ({"kernel_init": gaussian(0.2)}, {"kernel_init": uniform(0.3)}),
    "enable_low_rank_adaptation": (LOW_RANK,),
    "low_rank_adaptation_dim": (LOW_RANK | {"low_rank_adaptation_dim": 3},),
    "low_rank_adaptation_alpha": (LOW_RANK | {"low_rank_adaptation_alpha": 3.0},),
    "transpose_batch_sequence": ({"transpose_batch_sequence": True},),
    "quantization_checkpoint_name": ({"quantization_checkpoint_name": "codes"},),
}
SCALED_BY: dict[str, tuple[dict[str, Any], ...]] = {
    "epsilon": ({"epsilon": 0.2},),
    "layernorm_type": ({"layernorm_type": "rmsnorm"},),
    "zero_centered_gamma": ({"zero_centered_gamma": True},),
    "scale_init": ({"scale_init": gaussian(1.0)}, {"scale_init": uniform(1.0)}),
    "scale_axes": ({"scale_axes": ("a",)}, {"scale_axes": (None,)}),
}
NORMED_BY = (
    MADE_BY
    | SCALED_BY
    | {
        "enable_layernorm": ({"enable_layernorm": False},),
        "ln_bias_init": ({"ln_bias_init": gaussian(0.5)}, {"ln_bias_init": uniform(0.5)}),
        "ln_bias_axes": ({"ln_bias_axes": ("a",)}, {"ln_bias_axes": (None,)}),
        "return_layernorm_output": ({"return_layernorm_output": True},),
        "layernorm_input_axes": ({"layernorm_input_axes": (None,) * 3},),
    }
)
KERNEL_AXES = {
    "kernel_axes": ({"kernel_axes": ("a", "b")}, {"kernel_axes": (None, "b")}),
    "bias_axes": ({"bias_axes": ("b",)}, {"bias_axes": (None,)}),
}
BIASED_BY = {
    "use_bias": ({"use_bias": True},),
    "bias_init": (
        {"use_bias": True, "bias_init": gaussian(0.3)},
        {"use_bias": True, "bias_init": uniform(0.3)},
    ),
}
DROPPED_BY = {
    "attention_dropout": ({"attention_dropout": 0.3},),
    "dropout_rng_name": ({"dropout_rng_name": "noise", "attention_dropout": 0.2},),
    "attn_bias_type": ({"attn_bias_type": "pre_scale_bias"}, {"attn_bias_type": "post_scale_bias"}),
    "float32_logits": ({"float32_logits": True},),
    "transpose_batch_sequence": ({"transpose_batch_sequence": True},),
}
BIASED_BY_EXPERT = {
    "use_ffn_bias": ({"use_ffn_bias": True},),
    "bias_init": (
        {"use_ffn_bias": True, "bias_init": gaussian(0.3)},
        {"use_ffn_bias": True, "bias_init": uniform(0.3)},
    ),
}
# The own fields of the other modules; OF_A_LAYER has the fields that a layer passes to them.
FIELDS: dict[type[nn.Module], dict[str, tuple[dict[str, Any], ...]]] = {
    te_flax.TransformerLayer: OF_A_LAYER,
    te_flax.DenseGeneral: MADE_BY
    | KERNEL_AXES
    | {
        "use_bias": ({"use_bias": False},),
        "bias_init": ({"bias_init": gaussian(0.3)}, {"bias_init": uniform(0.3)}),
        "input_axes": ({"input_axes": (None,) * 3},),
    },
    te_flax.LayerNorm: SCALED_BY
    | {
        "bias_init": ({"bias_init": gaussian(0.5)}, {"bias_init": uniform(0.5)}),
        "bias_axes": ({"bias_axes": ("a",)}, {"bias_axes": (None,)}),
    },
    te_flax.LayerNormDenseGeneral: NORMED_BY
    | KERNEL_AXES
    | BIASED_BY
    | {
        "dot_input_axes": ({"dot_input_axes": (None,) * 3},),
        "depth_scaling": ({"depth_scaling": 3.0}, {"depth_scaling": 0.5}),
    },
    te_flax.LayerNormMLP: NORMED_BY
    | BIASED_BY
    | {
        "kernel_axes_1": ({"kernel_axes_1": ("a", None, "b")}, {"kernel_axes_1": (None,) * 3}),
        "kernel_axes_2": ({"kernel_axes_2": ("b", "a")}, {"kernel_axes_2": (None,) * 2}),
        "bias_axes_1": ({"bias_axes_1": (None, "b")}, {"bias_axes_1": ("a", None)}),
        "bias_axes_2": ({"bias_axes_2": ("a",)}, {"bias_axes_2": (None,)}),
        "activations": ({"activations": ("silu", "linear")}, {"activations": ("relu", jnp.cos)}),
        "activation_params": (
            {"activation_params": {"limit": 0.5, "alpha": 1.2}, "activations": CLAMPED},
            {"activation_params": {"glu_linear_offset": 0.3}, "activations": CLAMPED},
        ),
        "intermediate_dropout_rate": ({"intermediate_dropout_rate": 0.4},),
        "intermediate_dropout_rng_name": (
            {"intermediate_dropout_rng_name": "noise", "intermediate_dropout_rate": 0.3},
        ),
        "intermediate_hidden_dropout_dims": (
            {"intermediate_hidden_dropout_dims": (1,), "intermediate_dropout_rate": 0.5},
            {"intermediate_hidden_dropout_dims": (0,), "intermediate_dropout_rate": 0.5},
        ),
        "dot_1_input_axes": ({"dot_1_input_axes": (None,) * 3},),
        "dot_2_input_axes": ({"dot_2_input_axes": (None,) * 3},),
        "ffn1_ckpt_name": ({"ffn1_ckpt_name": "one"},),
        "ffn2_ckpt_name": ({"ffn2_ckpt_name": "two"},),
    },
    te_flax.DotProductAttention: DROPPED_BY
    | {
        "num_gqa_groups": ({"num_gqa_groups": 2}, {"num_gqa_groups": 1}),
        "attn_mask_type": ({"attn_mask_type": "padding"}, {"attn_mask_type": "no_mask"}),
        "scale_factor": ({"scale_factor": 0.7}, {"scale_factor": 0.2}),
        "window_size": ({"window_size": (2, 0)}, {"window_size": (3, 1)}),
        "softmax_type": ({"softmax_type": "learnable"}, {"softmax_type": "off_by_one"}),
        "max_segments_per_seq": ({"max_segments_per_seq": 2},),
        "context_checkpoint_name": ({"context_checkpoint_name": "core"},),
    },
    te_flax.MultiHeadAttention: DROPPED_BY
    | {
        "input_layernorm": ({"input_layernorm": False},),
        "layernorm_epsilon": ({"layernorm_epsilon": 0.3},),
        "return_layernorm_output": ({"return_layernorm_output": True},),
        "kernel_init": ({"kernel_init": gaussian(0.3)}, {"kernel_init": uniform(0.3)}),
        "attn_mask_type": ({"attn_mask_type": "padding"}, {"attn_mask_type": "no_mask"}),
        "fuse_qkv_params": ({"fuse_qkv_params": False},),
        "low_rank_adaptation_scope": (
            {"low_rank_adaptation_scope": "exclude_output_proj", "low_rank_adaptation_dim": 4},
            {"low_rank_adaptation_scope": "exclude_qkv_proj", "low_rank_adaptation_dim": 4},
        ),
    },
    te_flax._MoEBlock: BIASED_BY_EXPERT
    | {
        "num_experts_per_tok": ({"num_experts_per_tok": 4},),
        "activation_type": ({"activation_type": "gelu"}, {"activation_type": "relu"}),
        "score_function": ({"score_function": "sigmoid"},),
        "use_pre_softmax": ({"use_pre_softmax": True},),
        "num_groups": ({"num_groups": 4, "group_topk": 2},),
        "group_topk": ({"num_groups": 2, "group_topk": 1},),
        "scaling_factor": ({"scaling_factor": 1.5},),
        "use_expert_routing_bias": (
            {"use_expert_routing_bias": True, "score_function": "sigmoid"},
        ),
        "aux_loss_coeff": ({"aux_loss_coeff": 0.5},),
        "apply_topk_weights_early": ({"apply_topk_weights_early": True},),
        "kernel_init": ({"kernel_init": gaussian(0.3)}, {"kernel_init": uniform(0.3)}),
        "input_axes": ({"input_axes": (None,) * 3},),
        "gate_kernel_axes": ({"gate_kernel_axes": ("a", "b")},),
        "wi_kernel_axes": ({"wi_kernel_axes": ("a", None, "b")}, {"wi_kernel_axes": (None,) * 3}),
        "wo_kernel_axes": ({"wo_kernel_axes": ("a", "b", None)}, {"wo_kernel_axes": (None,) * 3}),
        "quantization_checkpoint_name": ({"quantization_checkpoint_name": "codes"},),
    },
}
EXCLUDED = [
    {"layernorm_type", "zero_centered_gamma"},  # a scale about zero belongs to LayerNorm
    {"enable_relative_embedding", "self_attn_bias_type"},
    {"enable_relative_embedding", "relative_embedding"},
]
SIZES = {"hidden_size": HIDDEN, "mlp_hidden_size": 48, "num_attention_heads": HEADS}


Meeting = tuple[str, bool, str, bool]


def meetings(argument: Any, fields: Any) -> set[Meeting]:
    """For every pair of fields, whether each is set."""
    states = [(name, name in argument) for name in sorted(fields)]
    return {(*first, *second) for first, second in itertools.combinations(states, 2)}


def possible(fields: Any) -> set[Meeting]:
    both = itertools.product((False, True), repeat=2)
    every = {(a, i, b, j) for i, j in both for a, b in itertools.combinations(sorted(fields), 2)}
    return {(a, i, b, j) for a, i, b, j in every if not (i and j and {a, b} in EXCLUDED)}


def covering(fields: dict[str, tuple[dict[str, Any], ...]]) -> list[dict[str, Any]]:
    """Modules that cover, for every pair of fields: both given, neither given, and each given alone."""
    draw, missing, chosen = random.Random(0), possible(fields), []
    while missing:
        candidates = []
        for _ in range(60):
            names = [name for name in fields if draw.random() < 0.5]
            for excluded in EXCLUDED:
                if excluded <= set(names):
                    names.remove(draw.choice(sorted(excluded)))
            candidates.append(names)
        chosen.append(max(candidates, key=lambda names: len(meetings(names, fields) & missing)))
        missing -= meetings(chosen[-1], fields)
    records: Counter[str] = Counter()
    modules = []
    for names in chosen:
        # Field values alternate.
        values = [fields[name][records[name] % len(fields[name])] for name in names]
        records.update(names)
        modules.append({name: value for argument in values for name, value in argument.items()})
    return modules


# Modules that every run compares. test_random_layers.py and test_transformer.py compare layers in every run, which
# contain the other modules except _MoEBlock (test_moe.py).
QUICK = (te_flax.DenseGeneral, te_flax.LayerNorm, te_flax.LayerNormMLP)
CASES = [
    pytest.param(
        cls,
        fields,
        id=f"{cls.__name__}-{index}",
        marks=[] if cls in QUICK and index == 0 else [pytest.mark.slow],
    )
    for cls, of_module in FIELDS.items()
    for index, fields in enumerate(covering(of_module))
]
# Fields with separate tests: a score_mod excludes most other fields.
ELSEWHERE = {"return_max_logit", "score_mod", "score_mod_bprop", "dtype"}
PASSED_ON = {
    # A layer passes these to its attention; the layers above vary them.
    te_flax.MultiHeadAttention: set(OF_A_LAYER)
    | {"head_dim", "num_attention_heads", "window_size"}
    # Former names: test_transformer.py.
    | {
        "num_heads",
        "dropout_rate",
        "output_layernorm",
        "apply_residual_connection_post_layernorm",
        "fuse_qkv",
    },
    # Layouts are in test_attention.py, devices in test_sharding.py, and dtype is deprecated.
    te_flax.DotProductAttention: {"head_dim", "num_attention_heads", "qkv_layout"}
    | {f"context_parallel_{name}" for name in ("causal_load_balanced", "axis", "strategy")},
    te_flax.DenseGeneral: {"features", "axis"},  # test_dense.py
    te_flax.LayerNormDenseGeneral: {"features", "axis"},
    te_flax.LayerNormMLP: {"intermediate_dim", "axis"},
    te_flax.LayerNorm: set(),
    te_flax.TransformerLayer: set(SIZES),
    # Devices are in test_sharding.py.
    # Recipes and devices: test_moe.py and test_experts_over_devices.py.
    te_flax._MoEBlock: {
        "num_experts",
        "intermediate_size",
        "ep_axis",
        "data_parallelism_axes",
        "recv_capacity_per_rank",
        "quantization_recipe",
    },
}
NEEDED: dict[type[nn.Module], dict[str, Any]] = {
    te_flax.DenseGeneral: {"features": 12},
    te_flax.LayerNormDenseGeneral: {"features": 12},
    te_flax.LayerNormMLP: {"intermediate_dim": 24},
    te_flax.TransformerLayer: SIZES,
    te_flax.LayerNorm: {},
    te_flax.DotProductAttention: {"head_dim": HIDDEN // HEADS, "num_attention_heads": HEADS},
    te_flax.MultiHeadAttention: {"head_dim": HIDDEN // HEADS, "num_attention_heads": HEADS},
    te_flax._MoEBlock: {"num_experts": 8, "intermediate_size": 12},
}


@pytest.mark.parametrize("cls", FIELDS, ids=lambda cls: cls.__name__)
def test_every_field_of_a_module_has_cases_with_and_without_every_other(cls):
    names = {field.name for field in dataclasses.fields(cls)} - {"parent", "name"}
    assert names - PASSED_ON[cls] - ELSEWHERE <= set(FIELDS[cls]) <= names
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    results = set()
    for case in (parameters.values[1] for parameters in CASES if parameters.values[0] is cls):
        results |= meetings({name for name in case if case[name] != defaults[name]}, FIELDS[cls])
    implied = {
        name
        for values in FIELDS[cls].values()
        for argument in values
        for name in argument
        if len(argument) > 1
    }
    assert {
        meeting for meeting in possible(FIELDS[cls]) - results if not implied & set(meeting)
    } == set()


def module_arguments(
    cls: type[nn.Module], fields: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arrays to call a module with these fields; the first has a gradient."""
    x, encoded, mask, cross = data(fields)
    transposed = fields.get("transpose_batch_sequence")
    turn = (lambda y: None if y is None else jnp.swapaxes(y, 0, 1)) if transposed else (lambda y: y)
    x, encoded = turn(x), turn(encoded)
    biased = fields.get("attn_bias_type") is not None
    bias = normal(jax.random.key(7), (1, HEADS, TOKENS, TOKENS)) if biased else None
    if cls is te_flax.TransformerLayer:
        return (x, encoded, mask, cross), {"deterministic": False}
    if cls is te_flax.MultiHeadAttention:
        return (x, mask, bias), {"deterministic": False}
    if cls is te_flax.DotProductAttention:
        keys = jax.random.split(jax.random.key(8), 3)
        heads = (HEADS, *[fields.get("num_gqa_groups", HEADS)] * 2)
        shapes = ((BATCH, TOKENS, count, HIDDEN // HEADS) for count in heads)
        qkv = (turn(normal(key, shape)) for key, shape in zip(keys, shapes, strict=True))
        return (*qkv, mask, bias), {"deterministic": False}
    return (x,), {"deterministic": False} if cls is te_flax.LayerNormMLP else {}


def call_module(cls: type[nn.Module], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pass the same array twice for self-attention; a traced function must do so from one argument."""
    return (arguments[0], *arguments) if cls is te_flax.MultiHeadAttention else arguments


STREAMS = {"params": jax.random.key, "dropout": jax.random.key, "noise": jax.random.key}


def keys(first: int) -> dict[str, Any]:
    return {name: make(first + index) for index, (name, make) in enumerate(STREAMS.items())}


def first_values(cls, model, arguments, options) -> Any:
    init = jax.jit(lambda keys, *args: model.init(keys, *call_module(cls, args), **options))
    return nn.meta.unbox(init(keys(1), *arguments)).get("params", {})


def differentiable(arrays: Any) -> Iterator[int]:
    for index, array in enumerate(arrays):
        if array is not None and jnp.issubdtype(array.dtype, jnp.floating):
            yield index


def agree(cls: type[nn.Module], fields: dict[str, Any]) -> None:
    """First values, the output, and all gradients, with dropout by the same keys."""
    fields = NEEDED[cls] | fields
    arguments, options = module_arguments(cls, fields)
    model = cls(**fields)
    of_plain = fields | (
        {"relative_embedding": Buckets(HEADS)} if "relative_embedding" in fields else {}
    )
    plain = PLAIN[cls](**of_plain)
    params, expected = (first_values(cls, one, arguments, options) for one in (model, plain))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=0), params, expected)
    leaves, tree = jax.tree.flatten(params)
    moved = zip(leaves, jax.random.split(jax.random.key(2), len(leaves) + 1), strict=False)
    # Nonzero values, because second low-rank factors and sinks are initialized to zero.
    params = jax.tree.unflatten(
        tree,
        [
            np.asarray(leaf) + np.float32(0.02) * np.asarray(normal(key, leaf.shape))
            for leaf, key in moved
        ],
    )
    places = tuple(differentiable(arguments))

    def unwrapped_values(one, params, argument):
        output = one.apply({"params": params}, *call_module(cls, argument), rngs=keys(4), **options)
        return [
            leaf for leaf in jax.tree.leaves(output) if jnp.issubdtype(leaf.dtype, jnp.floating)
        ]

    # The plain module returns as many results, with a norm's output if it is requested.
    results = jax.eval_shape(lambda *args: unwrapped_values(model, params, args), *arguments)

    def loss_value(one):
        def loss(params, *args):
            output = unwrapped_values(one, params, args)[: len(results)]
            return sum(
                (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum() for y in output
            ), output

        return jax.jit(
            jax.value_and_grad(loss, argnums=(0, *(1 + p for p in places)), has_aux=True)
        )

    (_, result), actual = loss_value(model)(params, *arguments)
    (_, reference), expected_value = loss_value(plain)(params, *arguments)
    for index, (one, other) in enumerate(zip(result, reference, strict=True)):
        near(one, other, 0.0, f"result {index}")
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected_value))
    for (path, got), expected in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected_value), strict=True
    ):
        near(got, expected, 1e-2 * largest, str(path))


def near(got: Any, expected: Any, least: float, name: str) -> None:
    # A key bias shifts all scores for a query equally, so its gradient is zero up to rounding.
    scale = max(float(np.abs(expected).max()), least)
    got, expected = np.asarray(got), np.asarray(expected)
    np.testing.assert_allclose(got / scale, expected / scale, atol=2e-4, rtol=0, err_msg=name)


@pytest.mark.parametrize(("cls", "fields"), CASES)
def test_a_module_with_many_fields_equals_the_reference_module(cls, fields):
    agree(cls, fields)
