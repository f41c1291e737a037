"""Three hundred bad calls: each raises ValueError or TypeError with a sentence, and no state has changed."""

from __future__ import annotations

import os
import random
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import array
from transformer_engine.common import dispatch, recipe
from transformer_engine.jax import attention, cpp_extensions, quantize, sharding
from transformer_engine.jax.flax.module import Softmax
from transformer_engine.jax.flax.transformer import rotary_pos_emb
from transformer_engine.jax.primitives import launching
from transformer_engine.jax.quantize import ScalingMode

ARRAYS = {
    "text": "x",
    "integers": np.ones((4, 8), np.int32),
    "codes": np.ones((4, 8), jnp.float8_e4m3fn),
    "booleans": np.ones((4, 8), bool),
    "number": 3.0,
    "list": [[1.0] * 8] * 4,
}
SHAPES = {"other extent": np.ones((5, 7), np.float32), "vector": np.ones(3, np.float32)}
NUMBERS = {"text": "x", "none": None, "nan": float("nan"), "infinite": float("inf"), "list": [1]}
COUNTS = {"zero": 0, "negative": -2, "half": 1.5, "text": "x", "none": None, "true": True}
NAMES = {"unknown": "nosuch", "number": 3, "empty": "", "list": ["layernorm"]}
RATES = {"one": 1.0, "above": 1.5, "negative": -0.1, "text": "x", "nan": float("nan")}
RATES_OF_FLAX = {
    kind: rate for kind, rate in RATES.items() if kind != "one"
}  # nn.Dropout(1.0) returns zeros
SWITCHES = {"function": len, "type": float}
NO_FUNCTIONS = {"text": "x", "number": 0.5}
NO_MEMBERS = {"none": None, "number": 1}  # of an enumeration
DEALT = {"strategy": attention.ReorderStrategy.Striped, "cp_size": 4, "seq_dim": 1}


class Held:
    """Stateful quantizers that one test passes to its calls."""

    quantizers: quantize.QuantizerSet


def class_quantizer_set() -> quantize.QuantizerSet:
    return Held.quantizers


def _delayed(dtype):
    state = {"scale": array([3.0], jnp.float32), "amax_history": array(range(4), jnp.float32)}
    return quantize.DelayedScaleQuantizer(q_dtype=jnp.dtype(dtype), **state)


@pytest.fixture(autouse=True)
def _quantizers():
    outputs = [_delayed(dtype) for dtype in (jnp.float8_e4m3fn, jnp.float8_e4m3fn, jnp.float8_e5m2)]
    Held.quantizers = quantize.QuantizerSet(*outputs)


def state(value) -> dict[str, object]:
    """State that outlives a call: contexts, switches, random numbers, quantizers and the call's arguments."""
    arrays = [
        leaf
        for leaf in jax.tree.leaves((class_quantizer_set(), value))
        if isinstance(leaf, (np.ndarray, jax.Array))
    ]
    return {
        "recipe": quantize.get_global_quantize_recipe(),
        "mesh resource": sharding._resource.get(),
        "rules": nn.get_logical_axis_rules(),
        "kernels": dict(launching._switched),
        "experts": te.ep._bootstrap,
        "backends": [
            dispatch.forced_backend(name) for name in ("jax_gemm", "jax_quantize", "jax_norm")
        ],
        "environment": dict(os.environ),
        "settings of jax": dict(jax.config.values),
        "warnings": list(warnings.filters),
        "random": (random.getstate(), np.random.get_state()[1].tobytes()),  # pyright: ignore
        "arrays": [(array.dtype, array.shape, np.asarray(array).tobytes()) for array in arrays],
    }


def ones(*shape):
    return np.ones(shape, np.float32)


def module_call(cls, *inputs, **fields):
    return cls(**fields).init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, *inputs)


def attend(**fields):
    defaults = {
        "qkv": (ones(2, 4, 2, 8),) * 3,
        "bias": None,
        "sequence_descriptor": None,
        "seed": None,
        "attn_bias_type": attention.AttnBiasType.NO_BIAS,
        "attn_mask_type": attention.AttnMaskType.NO_MASK,
        "qkv_layout": attention.QKVLayout.BSHD_BSHD_BSHD,
        "softmax_type": attention.AttnSoftmaxType.VANILLA_SOFTMAX,
        "scaling_factor": 1.0,
        "dropout_probability": 0.0,
        "is_training": True,
    }
    return attention.fused_attn(**(defaults | fields))


def packed_rows():
    """Two rows of four tokens: two sequences in the first, one in the second."""
    lengths = np.asarray([[1, 3], [4, -1]], np.int32)
    offsets = np.asarray([[0, 1, 4], [0, -1, -1]], np.int32)
    return attention.SequenceDescriptor.from_seqlens_and_offsets(lengths, offsets)


def quantizer_call(**arguments):
    return class_quantizer_set().x.quantize(**({"x": ones(4, 8)} | arguments))


def enter_autocast(**arguments):
    with te.autocast(**({"enabled": True} | arguments)):
        pytest.fail("the block was entered")


def grouped(**arguments):
    sizes = np.asarray([1, 3], np.int32)
    return te.dense.grouped_dense(
        **({"x": ones(4, 8), "kernel": ones(2, 8, 3), "group_sizes": sizes} | arguments)
    )


def call_norm(**arguments):
    arrays = {
        "x": ones(4, 8),
        "kernel": ones(8, 3),
        "gamma": ones(8),
        "beta": ones(8),
        "quantizer_set": class_quantizer_set(),
    }
    return te.layernorm_dense.layernorm_dense(**(arrays | arguments))


def call_router(**arguments):
    options = {"logits": ones(5, 4), "topk": 2, "score_function": "sigmoid"}
    return te.router.fused_topk_with_score_function(**(options | arguments))


def tex_gemm(**arguments):
    return cpp_extensions.gemm(**({"lhs": ones(4, 8), "rhs": ones(8, 3)} | arguments))


def tex_act(**arguments):
    return cpp_extensions.act_lu(**({"x": ones(4, 1, 8), "activation_type": ("gelu",)} | arguments))


def tex_norm(**arguments):
    options = {"x": ones(4, 8), "gamma": ones(8), "zero_centered_gamma": False, "epsilon": 1e-6}
    return cpp_extensions.rmsnorm_fwd(**(options | arguments))


def both_directions() -> quantize.ScaledTensor2x:
    quantizer = quantize.QuantizerFactory.create(
        1, ScalingMode.CURRENT_TENSOR_SCALING, jnp.float8_e4m3fn
    )
    return quantizer.quantize(ones(4, 8))


def quantize_groups(**arguments):
    quantizer = quantize.QuantizerFactory.create(
        1, ScalingMode.CURRENT_TENSOR_SCALING, jnp.float8_e4m3fn, n_groups=2
    )
    return quantizer.quantize(
        **({"x": ones(4, 8), "group_sizes": np.asarray([1, 3], np.int32)} | arguments)
    )


LAYER = {"hidden_size": 16, "mlp_hidden_size": 16, "num_attention_heads": 2}
# (function whose argument is replaced, argument name, bad values)
CASES = [
    (
        lambda x: te.dense.dense(x, ones(8, 2), quantizer_set=class_quantizer_set()),
        "dense x",
        ARRAYS | SHAPES,
    ),
    (
        lambda k: te.dense.dense(ones(4, 8), k, quantizer_set=class_quantizer_set()),
        "dense kernel",
        ARRAYS | SHAPES,
    ),
    (
        lambda b: te.dense.dense(ones(4, 8), ones(8, 2), b, quantizer_set=class_quantizer_set()),
        "dense bias",
        SHAPES | {"matrix": ones(2, 2)},
    ),
    (
        lambda d: te.dense.dense(
            ones(4, 8), ones(8, 2), contracting_dims=d, quantizer_set=class_quantizer_set()
        ),
        "dense contracting_dims",
        {
            "none at all": ((), ()),
            "outside": ((2,), (0,)),
            "uneven": ((0, 1), (0,)),
            "all": ((0, 1), (0, 1)),
            "three": ((1,), (0,), (0,)),
            "negative": ((-3,), (0,)),
            "twice": ((1, -1), (0, 0)),
        },
    ),
    (
        lambda a: te.dense.dense(ones(4, 8), ones(8, 2), input_axes=a),
        "dense input_axes",
        {"one": ("a",), "three": ("a", "b", "c")},
    ),
    (
        lambda x: te.layernorm.layernorm(
            x, ones(8), ones(8), "layernorm", quantizer=class_quantizer_set().x
        ),
        "norm x",
        ARRAYS | SHAPES,
    ),
    (
        lambda g: te.layernorm.layernorm(
            ones(4, 8), g, ones(8), "layernorm", quantizer=class_quantizer_set().x
        ),
        "norm gamma",
        SHAPES,
    ),
    (
        lambda b: te.layernorm.layernorm(ones(4, 8), ones(8), b, "layernorm"),
        "norm beta",
        SHAPES | {"none": None},
    ),
    (lambda n: te.layernorm.layernorm(ones(4, 8), ones(8), None, n), "norm type", NAMES),
    (
        lambda e: te.layernorm.layernorm(ones(4, 8), ones(8), None, "rmsnorm", epsilon=e),
        "norm epsilon",
        NUMBERS | {"negative": -1e-6},
    ),
    (
        lambda x: te.activation.activation(x, ("gelu",), class_quantizer_set().x),
        "activation x",
        ARRAYS | SHAPES,
    ),
    (
        lambda n: te.activation.activation(ones(4, 1, 8), n),
        "activation names",
        {
            "unknown": ("swish",),
            "two": ("gelu", "linear"),
            "reversed": ("linear", "gelu"),
            "none at all": (),
        },
    ),
    (
        lambda p: te.activation.activation(ones(4, 1, 8), ("gelu",), act_params=p),
        "activation parameters",
        {"unknown": {"beta": 1.0}, "text": "limit", "nan": {"limit": float("nan")}, "list": [7.0]},
    ),
    (lambda x: te.softmax.softmax(x), "softmax logits", ARRAYS | SHAPES),
    (
        lambda f: module_call(te_flax.DenseGeneral, ones(4, 8), features=f),
        "DenseGeneral features",
        COUNTS | {"pair": (3, 0)},
    ),
    (
        lambda a: module_call(te_flax.DenseGeneral, ones(4, 8), features=3, axis=a),
        "DenseGeneral axis",
        {"outside": 2, "below": -3, "none at all": (), "twice": (0, 0)},
    ),
    (
        lambda a: module_call(te_flax.DenseGeneral, ones(4, 2, 8), features=3, axis=a),
        "DenseGeneral axes",
        {"twice": (1, 1), "twice in two ways": (-1, 2)},
    ),
    (
        lambda d: module_call(te_flax.LayerNorm, ones(4, 8), dtype=d),
        "LayerNorm dtype",
        {"integers": jnp.int32, "booleans": jnp.bool_},
    ),
    (
        lambda d: module_call(
            te_flax.LayerNormDenseGeneral, ones(4, 8), features=3, depth_scaling=d
        ),
        "LayerNormDenseGeneral depth",
        {"zero": 0.0, "nan": float("nan"), "text": "x"},
    ),
    (
        lambda d: te.dense.grouped_dense(
            ones(4, 8), ones(2, 8, 3), np.asarray([1, 3], np.int32), preferred_element_type=d
        ),
        "grouped_dense dtype",
        {"integers": jnp.int32},
    ),
    (
        lambda d: grouped(contracting_dims=d),
        "grouped_dense contracting_dims",
        {
            "outside": ((3,), (1,)),
            "outside of the kernel": ((1,), (4,)),
            "below": ((-3,), (1,)),
            "rows": ((0,), (1,)),
        },
    ),
    (
        lambda a: quantize_groups(flatten_axis=a),
        "flatten_axis of groups",
        {"outside": 5, "all": 0, "half": 0.5, "text": "x"},
    ),
    (
        lambda s: Softmax(scale_factor=s).apply({}, ones(1, 1, 4, 4), bias=ones(1, 1, 4, 4)),
        "Softmax scale",
        NUMBERS,
    ),
    (lambda x: Softmax().apply({}, x), "Softmax inputs", ARRAYS | SHAPES),
    (
        lambda x: quantize.apply_rht(x),
        "apply_rht x",
        ARRAYS | {"no axes": np.float32(3), "odd": ones(4, 15)},
    ),
    (
        lambda i: quantize.apply_rht(ones(2, 16), i),
        "apply_rht inverse",
        SWITCHES | {"array": ones(2)},
    ),
    (
        lambda a: quantize.compute_scale_from_amax(a, jnp.float8_e4m3fn),
        "compute_scale_from_amax amax",
        {
            "text": "x",
            "none": None,
            "empty": (),
            "three": ones(3),
            "list": [1.0],
            "booleans": ARRAYS["booleans"],
        },
    ),
    (
        lambda s: quantize.compute_scale_from_amax(ones(1), jnp.float8_e4m3fn, scale=s),
        "compute_scale_from_amax scale",
        {"text": "x", "empty": (), "three": ones(3)},
    ),
    (
        te_flax.extend_logical_axis_rules,
        "extend_logical_axis_rules",
        {
            "none": None,
            "number": 3,
            "text": "embed",
            "dict": {"embed": None},
            "numbers": [1],
            "names": ["ab"],
        },
    ),
    (
        lambda n: te_flax.wrap_function_in_te_state_module(print, None, n),
        "wrap_function name",
        {"number": 3, "array": ones(3)},
    ),
    (
        lambda w: rotary_pos_emb(ones(2, 4, 2, 8), w, False),
        "rotary windows of numbers",
        {"texts": ("a", "b"), "none": (None, 3.0), "nan": (1.0, float("nan"))},
    ),
    (
        lambda a: quantize_groups(is_rowwise=a, is_colwise=False),
        "directions of groups",
        {"none at all": False},
    ),
    (
        lambda u: both_directions().get_tensor(u),
        "get_tensor usage",
        {"text": "LHS", "number": 0, "none": None},
    ),
    (
        lambda t: quantize.ScaledTensorFactory.create(t, None, quantize.QuantizeLayout.ROWWISE),
        "create rowwise",
        {"none": None},
    ),
    (
        lambda m: quantize.ScaledTensorFactory.create_1x(ones(4, 8), ones(1), scaling_mode=m),
        "create_1x scaling_mode",
        NO_MEMBERS | {"text": "MXFP8_1D_SCALING", "nothing": ScalingMode.NO_SCALING},
    ),
    (
        lambda b: Softmax().apply({}, ones(1, 1, 4, 4), bias=b),
        "Softmax bias",
        {
            "text": "x",
            "more rows": ones(3, 2, 4, 4),
            "three axes": ones(4, 5, 4),
            "integers": ARRAYS["integers"],
        },
    ),
    (lambda x: module_call(te_flax.DenseGeneral, x, features=3), "DenseGeneral inputs", ARRAYS),
    (
        lambda k: module_call(te_flax.DenseGeneral, ones(4, 8), features=3, kernel_axes=k),
        "DenseGeneral kernel_axes",
        {"one": ("a",), "three": ("a", "b", "c")},
    ),
    (
        lambda k: module_call(te_flax.DenseGeneral, ones(4, 8), features=3, bias_axes=k),
        "DenseGeneral bias_axes",
        {"two": ("a", "b")},
    ),
    (
        lambda r: module_call(
            te_flax.DenseGeneral,
            ones(4, 8),
            features=3,
            enable_low_rank_adaptation=True,
            low_rank_adaptation_dim=r,
        ),
        "DenseGeneral rank",
        COUNTS,
    ),
    (lambda x: module_call(te_flax.LayerNorm, x), "LayerNorm x", ARRAYS),
    (
        lambda n: module_call(te_flax.LayerNorm, ones(4, 8), layernorm_type=n),
        "LayerNorm type",
        NAMES,
    ),
    (
        lambda e: module_call(te_flax.LayerNorm, ones(4, 8), epsilon=e),
        "LayerNorm epsilon",
        NUMBERS | {"negative": -1.0},
    ),
    (
        lambda f: module_call(te_flax.LayerNormDenseGeneral, ones(4, 8), features=f),
        "LayerNormDenseGeneral features",
        COUNTS,
    ),
    (
        lambda x: module_call(te_flax.LayerNormDenseGeneral, x, features=3),
        "LayerNormDenseGeneral inputs",
        ARRAYS,
    ),
    (
        lambda n: module_call(
            te_flax.LayerNormDenseGeneral, ones(4, 8), features=3, layernorm_type=n
        ),
        "LayerNormDenseGeneral type",
        NAMES,
    ),
    (
        lambda d: module_call(te_flax.LayerNormMLP, ones(4, 8), intermediate_dim=d),
        "LayerNormMLP dim",
        COUNTS,
    ),
    (
        lambda x: module_call(te_flax.LayerNormMLP, x, intermediate_dim=4),
        "LayerNormMLP inputs",
        ARRAYS,
    ),
    (
        lambda a: module_call(te_flax.LayerNormMLP, ones(4, 8), intermediate_dim=4, activations=a),
        "LayerNormMLP activations",
        {
            "unknown": ("nosuch",),
            "number": (3,),
            "second": ("gelu", "nosuch"),
            "none at all": (),
            "text": "gelu",
        },
    ),
    (
        lambda r: module_call(
            te_flax.LayerNormMLP, ones(4, 8), intermediate_dim=4, intermediate_dropout_rate=r
        ),
        "LayerNormMLP dropout",
        RATES_OF_FLAX,
    ),
    (
        lambda n: module_call(
            te_flax.LayerNormMLP, ones(4, 8), intermediate_dim=4, layernorm_type=n
        ),
        "LayerNormMLP type",
        NAMES,
    ),
    (
        lambda v: module_call(
            te_flax.TransformerLayer, ones(1, 4, 16), **(LAYER | {"hidden_size": v})
        ),
        "TransformerLayer hidden_size",
        COUNTS | {"odd": 17},
    ),
    (
        lambda v: module_call(
            te_flax.TransformerLayer, ones(1, 4, 16), **(LAYER | {"num_attention_heads": v})
        ),
        "TransformerLayer heads",
        COUNTS | {"three": 3},
    ),
    (
        lambda v: module_call(
            te_flax.TransformerLayer, ones(1, 4, 16), **(LAYER | {"mlp_hidden_size": v})
        ),
        "TransformerLayer mlp",
        COUNTS,
    ),
    (
        lambda v: module_call(te_flax.TransformerLayer, ones(1, 4, 16), **LAYER, num_gqa_groups=v),
        "TransformerLayer groups",
        {"zero": 0, "three": 3, "text": "x", "half": 0.5},
    ),
    *(
        (
            lambda v, name=name: module_call(
                te_flax.TransformerLayer, ones(1, 4, 16), **LAYER, **{name: v}
            ),
            f"TransformerLayer {name}",
            RATES if name == "attention_dropout" else RATES_OF_FLAX,
        )
        for name in ("hidden_dropout", "attention_dropout", "drop_path")
    ),
    (
        lambda v: module_call(
            te_flax.TransformerLayer, ones(1, 4, 16), **LAYER, self_attn_mask_type=v
        ),
        "TransformerLayer mask",
        NAMES,
    ),
    (
        lambda v: module_call(te_flax.TransformerLayer, ones(1, 4, 16), **LAYER, softmax_type=v),
        "TransformerLayer softmax",
        NAMES,
    ),
    (
        lambda v: module_call(te_flax.TransformerLayer, ones(1, 4, 16), **LAYER, layer_type=v),
        "TransformerLayer type",
        {"text": "encoder", "none": None, "number": 1},
    ),
    (
        lambda v: module_call(te_flax.TransformerLayer, ones(1, 4, 16), **LAYER, window_size=v),
        "TransformerLayer window",
        {"number": 3, "one": (3,), "below": (-2, 0), "half": (0.5, 0)},
    ),
    (
        lambda x: module_call(te_flax.TransformerLayer, x, **LAYER),
        "TransformerLayer inputs",
        ARRAYS | SHAPES,
    ),
    *(
        (
            lambda v, cls=cls, args=argument, fields=fields, name=name: module_call(
                cls, *args, **{**fields, name: v}
            ),
            f"{cls.__name__} {name}",
            values,
        )
        for cls, argument, fields, bad in (
            (
                te_flax.DenseGeneral,
                (ones(4, 8),),
                {"features": 3},
                {
                    "use_bias": SWITCHES,
                    "kernel_init": NO_FUNCTIONS,
                    "bias_axes": {"text": "ab"},
                    "quantization_checkpoint_name": {"number": 3},
                    "low_rank_adaptation_alpha": {"text": "x", "nan": float("nan")},
                    "dtype": {"number": 3, "unknown": "nosuch", "integers": jnp.int32},
                    "features": {"none at all": ()},
                },
            ),
            (
                te_flax.LayerNorm,
                (ones(4, 8),),
                {},
                {
                    "zero_centered_gamma": SWITCHES,
                    "scale_init": NO_FUNCTIONS,
                    "scale_axes": {"number": 3},
                },
            ),
            (
                te_flax.LayerNormMLP,
                (ones(4, 8),),
                {"intermediate_dim": 4},
                {
                    "return_layernorm_output": SWITCHES,
                    "ln_bias_init": NO_FUNCTIONS,
                    "intermediate_hidden_dropout_dims": {
                        "number": 3,
                        "outside": (2,),
                        "half": (0.5,),
                    },
                    "intermediate_dropout_rng_name": {"number": 3},
                },
            ),
            (
                te_flax.DotProductAttention,
                (ones(2, 4, 2, 8),) * 3,
                {"head_dim": 8, "num_attention_heads": 2},
                {
                    "float32_logits": SWITCHES,
                    "attn_bias_type": NAMES,
                    "context_checkpoint_name": {"number": 3},
                },
            ),
            (
                te_flax.MultiHeadAttention,
                (ones(2, 4, 16),) * 2,
                {"head_dim": 8, "num_attention_heads": 2},
                {
                    "fuse_qkv_params": SWITCHES,
                    "input_layernorm": SWITCHES,
                    "bias_init": NO_FUNCTIONS,
                },
            ),
            (
                te_flax.TransformerLayer,
                (ones(1, 4, 16),),
                LAYER,
                {
                    "enable_sequence_parallel": SWITCHES,
                    "mlp_kernel_init": NO_FUNCTIONS,
                    "relative_embedding": {"number": 3},
                    "hidden_dropout_dims": {"number": 3, "outside": (3,)},
                    "mlp_activations": {"none at all": (), "text": "gelu", "number": 3},
                },
            ),
            (te_flax._MoEBlock, (ones(1, 4, 8),), {"num_experts": 3}, {"use_ffn_bias": SWITCHES}),
        )
        for name, values in bad.items()
    ),
    *(
        (lambda v, name=name, call=call: call(**{name: v}), f"{label} {name}", values)
        for label, call, bad in (
            (
                "grouped_dense",
                grouped,
                {
                    "group_sizes": {
                        "negative": np.asarray([-1, 5]),
                        "beyond": np.asarray([3, 3]),
                        "floats": ones(2),
                    },
                    "contracting_dims": {"number": 1, "one": ((1,),), "text": "ab"},
                    "bias": ARRAYS | SHAPES,
                    "quantizer_set": {"text": "x", "none": None},
                    "preferred_element_type": {"text": "nosuch", "number": 3},
                },
            ),
            (
                "layernorm_dense",
                call_norm,
                {
                    "quantizer_set": {"text": "x", "none": None},
                    "bias": ARRAYS,
                    "gamma": ARRAYS,
                    "beta": ARRAYS,
                    "zero_centered_gamma": SWITCHES,
                    "layernorm_input_axes": {"number": 3, "one": ("a",)},
                },
            ),
            (
                "router",
                call_router,
                {
                    "expert_bias": ARRAYS | SHAPES,
                    "compute_aux_scores": SWITCHES,
                    "score_function": {"true": True},
                    "group_topk": {"text": "x", "half": 0.5},
                },
            ),
            ("gemm", tex_gemm, {"lhs_quantizer": {"text": "x"}, "collective_op": NO_MEMBERS}),
            (
                "act_lu",
                tex_act,
                {"x": ARRAYS | SHAPES, "activation_type": {"unknown": ("swish",), "text": "gelu"}},
            ),
            ("rmsnorm_fwd", tex_norm, {"x": ARRAYS, "gamma": ARRAYS | SHAPES, "epsilon": NUMBERS}),
            (
                "MeshResource",
                lambda **axes: enter_autocast(mesh_resource=te.MeshResource(**axes)),
                {"dp_resource": {"pair": ("a", "b"), "number": 0}},
            ),
            (
                "attention",
                attend,
                {
                    "bias": ARRAYS,
                    "is_training": SWITCHES,
                    "stripe_size": {"zero": 0, "half": 0.5},
                    "sequence_descriptor": {"text": "x", "number": 3},
                    "context_checkpoint_name": {"number": 3},
                },
            ),
        )
        for name, values in bad.items()
    ),
    (
        lambda s: attend(dropout_probability=0.5, seed=s),
        "attention seed",
        {"number": 3, "text": "x", "floats": ones(2)},
    ),
    (
        lambda v: attend(qkv=v),
        "attention qkv",
        {
            "one": (ones(2, 4, 2, 8),),
            "text": "x",
            "axes": (ones(2, 4, 2),) * 3,
            "integers": (np.ones((2, 4, 2, 8), np.int32),) * 3,
            "heads": (ones(2, 4, 2, 8), ones(2, 4, 3, 8), ones(2, 4, 3, 8)),
            "batches": (ones(2, 4, 2, 8), ones(1, 4, 2, 8), ones(1, 4, 2, 8)),
        },
    ),
    (lambda v: attend(dropout_probability=v), "attention dropout", RATES | {"without seed": 0.5}),
    (lambda v: attend(scaling_factor=v), "attention scale", NUMBERS),
    (lambda v: attend(max_segments_per_seq=v), "attention segments", COUNTS),
    (
        lambda v: attend(window_size=v),
        "attention window",
        {"number": 3, "three": (1, 2, 3), "below": (-2, 0), "text": "ab"},
    ),
    (lambda v: attend(bias=v), "attention bias", {"given": ones(1, 2, 4, 4)}),
    *(
        (lambda v, name=name: attend(**{name: v}), f"attention {name}", {"name": text} | NO_MEMBERS)
        for name, text in (
            ("attn_mask_type", "causal"),
            ("attn_bias_type", "no_bias"),
            ("softmax_type", "off_by_one"),
            ("qkv_layout", "bshd_bshd_bshd"),
            ("context_parallel_strategy", "RING"),
        )
    ),
    (
        lambda v: attend(sequence_descriptor=v, attn_mask_type=attention.AttnMaskType.PADDING_MASK),
        "attention mask",
        {"axes": ones(4, 4), "queries": ones(2, 1, 5, 4), "heads": ones(2, 3, 4, 4), "text": "x"},
    ),
    (
        lambda v: te_flax.DotProductAttention(8, 2, **v).apply({}, *(ones(2, 4, 2, 8),) * 3),
        "DotProductAttention",
        {
            "strategy": {"context_parallel_strategy": "nosuch"},
            "transposed": {"transpose_batch_sequence": len},
            "layout": {"qkv_layout": "nosuch"},
        },
    ),
    (
        lambda m: te_flax.DotProductAttention(8, 2, attn_mask_type="padding").apply(
            {},
            *(ones(2, 4, 2, 8),) * 3,
            attention.SequenceDescriptor.from_seqlens(np.full(2, 4, np.int32)),
            mask=m,
        ),
        "DotProductAttention mask",
        {"together with a descriptor": np.zeros((2, 1, 4, 4), bool)},
    ),
    (
        lambda v: attention.reorder_causal_load_balancing(ones(2, 16), **(DEALT | v)),
        "reordering",
        {
            "strategy": {"strategy": "nosuch"},
            "size": {"cp_size": 0},
            "axis": {"seq_dim": 2},
            "half an axis": {"seq_dim": 0.5},
        },
    ),
    (
        lambda k: te.softmax.softmax(ones(1, 1, 4, 4), softmax_fusion_type=k),
        "softmax kind",
        {"name": "scaled_upper_triang_masked"} | NO_MEMBERS,
    ),
    (
        lambda m: te.softmax.softmax(
            ones(1, 2, 4, 4), m, softmax_fusion_type=te.softmax.SoftmaxFusionType.SCALED_MASKED
        ),
        "softmax masked",
        {"axes": ones(4, 4), "heads": ones(1, 3, 4, 4), "text": "x"},
    ),
    (
        lambda t: Softmax(softmax_type=t).apply({}, ones(1, 1, 4, 4)),
        "Softmax type",
        {"name": "vanilla"} | NO_MEMBERS,
    ),
    (
        lambda a: te_flax.RelativePositionBiases(32, 128, 4, embedding_axes=a).init(
            jax.random.key(0), 4, 4
        ),
        "RelativePositionBiases embedding_axes",
        {"one": ("a",), "three": ("a", "b", "c")},
    ),
    (
        lambda v: te.dense.dense(ones(4, 8), ones(8, 2), **v),
        "dense sets",
        {"quantizers": {"quantizer_set": "x"}, "collectives": {"collective_op_set": "x"}},
    ),
    (lambda v: attend(softmax_offset=v), "attention sink", {"given": ones(1, 2, 1, 1)}),
    (attention.canonicalize_attn_mask_type, "mask name", NAMES),
    (attention.AttnSoftmaxType.from_str, "softmax name", NAMES),
    (
        attention.SequenceDescriptor.from_seqlens,
        "seqlens",
        {
            "floats": ones(2),
            "three": (np.ones(2, np.int32),) * 3,
            "text": "x",
            "axes": np.ones((2, 2, 2), np.int32),
        },
    ),
    (
        lambda w: rotary_pos_emb(ones(1, 4, 2, 8), w, False),
        "rotary windows",
        {"zero": (0, 10), "negative": (-1, 10)},
    ),
    (lambda m: rotary_pos_emb(ones(1, 4, 2, 8), (1, 10), False, m), "rotary method", NAMES),
    (
        lambda x: quantizer_call(x=x),
        "quantize x",
        {"integers": np.ones((4, 8), np.int32), "codes": ARRAYS["codes"], "vector": ones(3)},
    ),
    (
        lambda a: quantizer_call(flatten_axis=a),
        "quantize flatten_axis",
        {"zero": 0, "all": 2, "outside": 5, "below": -2},
    ),
    (
        lambda d: quantize.QuantizerFactory.create(
            scaling_mode=ScalingMode.CURRENT_TENSOR_SCALING, q_dtype=d
        ).quantize(ones(4, 8)),
        "q_dtype",
        {"none": None, "wide": jnp.float32, "integer": jnp.int8},
    ),
    (
        lambda most: attend(
            sequence_descriptor=packed_rows(),
            qkv_layout=attention.QKVLayout.THD_THD_THD,
            attn_mask_type=attention.AttnMaskType.PADDING_MASK,
            max_segments_per_seq=most,
        ),
        "max_segments_per_seq",
        {"too few": 1, **COUNTS},
    ),
    (lambda n: quantize.QuantizerFactory.create(n), "n_quantizers", COUNTS),
    (lambda n: quantize.QuantizerFactory.create_set(n), "n_quantizer_sets", COUNTS),
    (
        lambda m: quantize.QuantizerFactory.create(scaling_mode=m, q_dtype=jnp.float8_e4m3fn),
        "scaling_mode",
        {"name": "DELAYED_TENSOR_SCALING", "number": 1},
    ),
    *(
        (
            lambda v, cls=cls, name=name: cls(**{"q_dtype": jnp.float8_e4m3fn, name: v}),
            f"{cls.__name__} {name}",
            values,
        )
        for cls, name, values in (
            (quantize.DelayedScaleQuantizer, "amax_compute_algo", {"name": "max"} | NO_MEMBERS),
            (quantize.DelayedScaleQuantizer, "margin", NUMBERS),
            (quantize.DelayedScaleQuantizer, "q_layout", {"name": "ROWWISE"} | NO_MEMBERS),
            (quantize.CurrentScaleQuantizer, "scaling_mode", {"name": "NO_SCALING"} | NO_MEMBERS),
            (quantize.CurrentScaleQuantizer, "epsilon", NUMBERS | {"negative": -1.0}),
            (quantize.CurrentScaleQuantizer, "data_layout", NAMES),
            (quantize.BlockScaleQuantizer, "power_of_two", SWITCHES),
            (quantize.BlockScaleQuantizer, "q_dtype", NAMES | {"wide": jnp.float32}),
            (quantize.NVFP4Quantizer, "use_rht", SWITCHES),
        )
    ),
    (
        lambda layout: quantize.QuantizerFactory.create(
            scaling_mode=ScalingMode.CURRENT_TENSOR_SCALING,
            q_dtype=jnp.float8_e4m3fn,
            q_layout=layout,
        ),
        "q_layout",
        {"name": "ROWWISE", "number": 1},
    ),
    (
        quantize.is_scaling_mode_supported,
        "is_scaling_mode_supported",
        {"name": "NO_SCALING"} | NO_MEMBERS,
    ),
    (lambda n: quantize.fan_out(quantize.noop_quantizer_set, n), "fan_out", COUNTS),
    (quantize.get_quantization_recipe, "recipe name", NAMES),
    (
        lambda r: enter_autocast(recipe=r),
        "autocast recipe",
        {
            "text": "DelayedScaling",
            "class": recipe.DelayedScaling,
            "number": 3,
            "function": recipe.DelayedScaling(amax_compute_algo=max),
            "unreduced": recipe.DelayedScaling(reduce_amax=False),
        },
    ),
    (lambda e: enter_autocast(enabled=e), "autocast enabled", SWITCHES),
    (
        lambda m: enter_autocast(mesh_resource=m),
        "autocast mesh_resource",
        {"text": "data", "dict": {"dp_resource": "data"}},
    ),
]
CALLS = [
    pytest.param(call, value, id=f"{name}-{kind}")
    for call, name, values in CASES
    for kind, value in values.items()
]


@pytest.mark.parametrize(("call", "value"), CALLS)
def test_a_bad_call_raises_a_sentence_and_changes_nothing(call, value):
    before = state(value)
    with pytest.raises((ValueError, TypeError)) as raised:
        call(value)
    sentence = str(raised.value)
    module = raised.traceback[-1].frame.f_globals.get("__name__", "")
    assert module.startswith("transformer_engine."), f"{module}: {sentence}"
    assert any(word in sentence for word in ("; ", "give ", "must ")), sentence
    after = state(value)
    assert [name for name in before if before[name] != after[name]] == []


def test_there_are_three_hundred_bad_calls():
    assert len(CALLS) >= 300


def test_a_good_call_changes_the_compared_state():
    before = state(None)
    quantizer_call()
    with te.autocast(True, mesh_resource=te.MeshResource(dp_resource="dp")):
        after = state(None)
    assert {name for name in before if before[name] != after[name]} == {
        "recipe",
        "mesh resource",
        "arrays",
    }
