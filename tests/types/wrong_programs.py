"""Programs with one error each, at the line that ends in `# wrong`. Checkers must report this line and no other."""

from __future__ import annotations

MARK = "# wrong"

IN_TORCH = """\
import torch

import transformer_engine.pytorch as te
from transformer_engine.common import recipe

x = torch.ones(32, 64)
print(recipe.Format.HYBRID, te.__name__)
"""

IN_JAX = """\
import jax.numpy as jnp

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from transformer_engine.common import recipe

print(jnp.__name__, recipe.Format.HYBRID, te.__name__, te_flax.__name__)
"""

# Misspelt and absent names.
NAMES = {
    "misspelt_layer": "layer = te.Linaer(64, 64)  # wrong",
    "absent_function": "te.no_such_thing(1)  # wrong",
    "absent_module": "import transformer_engine.paddle  # wrong",
    "absent_import": "from transformer_engine.pytorch import LayerNormLinaer  # wrong",
    "name_of_python": "print(te.functools)  # wrong",
    "misspelt_in_attention": "rope = te.attention.RotaryPositionEmbeding(64)  # wrong",
    "misspelt_operation": "model = te.ops.Sequental()  # wrong",
    "misspelt_optimizer": "optimizer = te.optimizers.FusedAdm([x])  # wrong",
    "misspelt_container": "print(te.MXFP8Tenosr)  # wrong",
    "misspelt_availability": "print(te.is_mxfp4_available())  # wrong",
    "misspelt_check": "print(te.quantization.check_mxfp4_support())  # wrong",
    "misspelt_state": "print(te.fp8.FP8GlobalStateManager.is_fp8_enable())  # wrong",
    "misspelt_extension": "import transformer_engine_torch as tex\n\nprint(tex.gelo)  # wrong",
    "misspelt_member": "import transformer_engine_torch as tex\n\nprint(tex.DType.kFloat8E4M4)  # wrong",
    "misspelt_recipe": "scaling = recipe.DelayedScalling()  # wrong",
    "misspelt_format": "scaling = recipe.DelayedScaling(fp8_format=recipe.Format.HYBIRD)  # wrong",
}

# Wrong recipes.
RECIPES = {
    "string_as_format": 'scaling = recipe.DelayedScaling(fp8_format="HYBRID")  # wrong',
    "unknown_field": "scaling = recipe.DelayedScaling(history=16)  # wrong",
    "unknown_attribute": "print(recipe.MXFP8BlockScaling().amax_history_len)  # wrong",
    "class_as_recipe": "with te.autocast(recipe=recipe.MXFP8BlockScaling):  # wrong\n    pass",
    "string_as_recipe": 'with te.autocast(enabled=True, recipe="mxfp8"):  # wrong\n    pass',
    "text_as_history": 'scaling = recipe.DelayedScaling(amax_history_len="16")  # wrong',
    "dtype_as_format": "scaling = recipe.DelayedScaling(fp8_format=torch.float8_e4m3fn)  # wrong",
    "swapped_arguments_of_autocast": "with te.autocast(recipe.DelayedScaling(), True):  # wrong\n    pass",
    "text_as_switch": 'with te.autocast(enabled=True, calibrating="no"):  # wrong\n    pass',
    "misspelt_keyword_of_autocast": "with te.autocast(enabld=True):  # wrong\n    pass",
    "former_keyword_of_autocast": "with te.autocast(fp8_recipe=recipe.DelayedScaling()):  # wrong\n    pass",
    "switch_as_recipe": "with te.quantized_model_init(recipe=True):  # wrong\n    pass",
    "string_for_a_plan": 'plan = te.memory_plan(te.Linear(64, 64), "mxfp8", 32)  # wrong',
}

# Wrong arguments.
ARGUMENTS = {
    "string_as_size": 'layer = te.Linear("64", 64)  # wrong',
    "missing_size": "layer = te.Linear(64)  # wrong",
    "misspelt_keyword": "layer = te.Linear(64, 64, bais=False)  # wrong",
    "number_as_input": "y = te.Linear(64, 64)(3)  # wrong",
    "keyword_of_a_call": "y = te.Linear(64, 64)(x, first_microbatch=True)  # wrong",
    "missing_splits": "y = te.GroupedLinear(2, 64, 64)(x)  # wrong",
    "string_as_positions": 'angles = te.RotaryPositionEmbedding(64)("128")  # wrong',
    "mask_as_string": 'y = te.TransformerLayer(64, 128, 4)(x, attention_mask="causal")  # wrong',
    "string_as_dtype": 'layer = te.LayerNormMLP(64, 128, params_dtype="bfloat16")  # wrong',
    "list_as_target": "loss = te.parallel_cross_entropy(x, [1, 2])  # wrong",
    "misspelt_activation": 'layer = te.LayerNormMLP(64, 128, activation="gleu")  # wrong',
    "misspelt_mode": 'layer = te.Linear(64, 64, parallel_mode="rows")  # wrong',
    "misspelt_layout": 'layer = te.TransformerLayer(64, 128, 4, attn_input_format="sbdh")  # wrong',
    "misspelt_norm": 'layer = te.LayerNormLinear(64, 64, normalization="BatchNorm")  # wrong',
    "text_as_norm_size": 'norm = te.RMSNorm("64")  # wrong',
    "text_as_eps": 'norm = te.LayerNorm(64, eps="1e-5")  # wrong',
    "text_as_heads": 'layer = te.TransformerLayer(64, 128, "4")  # wrong',
    "text_as_dropout": 'layer = te.TransformerLayer(64, 128, 4, hidden_dropout="0.1")  # wrong',
    "number_as_mask_type": "y = te.DotProductAttention(4, 16)(x, x, x, attn_mask_type=3)  # wrong",
    "misspelt_qkv_format": 'layer = te.DotProductAttention(4, 16, qkv_format="bhsd2")  # wrong',
    "misspelt_softmax": 'layer = te.DotProductAttention(4, 16, softmax_type="offbyone")  # wrong',
    "text_as_splits": 'y = te.GroupedLinear(2, 64, 64)(x, "16")  # wrong',
    "text_as_learning_rate": 'optimizer = te.optimizers.FusedAdam([x], lr="1e-3")  # wrong',
    "misspelt_optimizer_keyword": "optimizer = te.optimizers.FusedAdam([x], master_weight=True)  # wrong",
    "checkpoint_of_nothing": "y = te.checkpoint()  # wrong",
    "text_as_rotary_size": 'rope = te.RotaryPositionEmbedding("64")  # wrong',
    "misspelt_permutation_keyword": "rows, order = te.moe_permute(x, x, num_out_token=3)  # wrong",
    "missing_row_map": "y = te.moe_unpermute(x)  # wrong",
    "misspelt_operation_keyword": "layer = te.ops.Linear(64, 64, bais=True)  # wrong",
    "number_as_operation": "model = te.ops.Sequential([te.ops.GELU()], 3)  # wrong",
    "explanation_of_nothing": "te.explain()  # wrong",
    "text_written_to_a_size": 'layer = te.Linear(64, 64)\nlayer.in_features = "many"  # wrong',
    "size_used_as_tensor": "layer = te.Linear(64, 64)\nprint(layer.in_features.shape)  # wrong",
    "written_group_setting": "def read(group: te.GroupedTensor) -> None:\n    group.row_scaled_nvfp4 = True  # wrong",
    "written_support": "te.fp8.FP8GlobalStateManager.fp8_available = True  # wrong",
    "number_as_backend": "with te.use_backend(gemm=3):  # wrong\n    pass",
    "text_as_smoothing": 'loss = te.parallel_cross_entropy(x, torch.zeros(32), label_smoothing="0.1")  # wrong',
    "number_as_activation": "layer = te.LayerNormMLP(64, 128, activation=3)  # wrong",
}

# Results that are used wrongly.
RESULTS = {
    "reason_without_request": "available, reason = te.is_mxfp8_available()  # wrong",
    "explanation_as_number": "print(te.explain(te.Linear(64, 64), x) + 1)  # wrong",
    "misspelt_peak": "print(te.memory_plan(te.Linear(64, 64), None, 32).peek)  # wrong",
    "three_of_two_results": "rows, order, more = te.moe_permute(x, x)  # wrong",
    "recipe_as_text": "name: str = te.get_default_recipe()  # wrong",
    "misspelt_method_of_a_result": "print(te.Linear(64, 64)(x).smu())  # wrong",
    "result_as_text": "name: str = te.TransformerLayer(64, 128, 4)(x)  # wrong",
    "result_of_operations_as_text": "name: str = te.ops.Sequential(te.ops.GELU())(x)  # wrong",
    "result_of_attention_as_text": "name: str = te.MultiheadAttention(64, 4)(x)  # wrong",
    "tuple_or_tensor": "print(te.Linear(64, 64).forward(x).shape)  # wrong",
    "optional_recipe": "print(te.fp8.FP8GlobalStateManager.FP8_RECIPE.fp8_format)  # wrong",
}

JAX = {
    "jax_misspelt_module": "model = te_flax.DenseGenral(features=64)  # wrong",
    "jax_misspelt_field": "model = te_flax.DenseGeneral(feature=64)  # wrong",
    "jax_misspelt_keyword_of_autocast": "with te.autocast(enabld=True):  # wrong\n    pass",
    "jax_absent_function": "te.no_such_thing(1)  # wrong",
    "jax_string_as_recipe": 'with te.autocast(enabled=True, recipe="mxfp8"):  # wrong\n    pass',
    "jax_misspelt_quantizer": "factory = te.quantize.QuantizerFactry  # wrong",
    "jax_text_as_features": 'model = te_flax.DenseGeneral(features="64")  # wrong',
    "jax_text_as_size": 'layer = te_flax.TransformerLayer(hidden_size="64")  # wrong',
    "jax_missing_features": "model = te_flax.DenseGeneral()  # wrong",
    "jax_text_as_switch": 'with te.autocast(enabled="yes"):  # wrong\n    pass',
    "jax_string_as_array": 'y = te.softmax.softmax("1", 1.0)  # wrong',
    "jax_misspelt_enumeration": "import transformer_engine_jax as tex\n\nprint(tex.NVTE_NO_BAIS)  # wrong",
}


def wrong_programs() -> dict[str, str]:
    """{name: text} of all programs."""
    in_torch = NAMES | RECIPES | ARGUMENTS | RESULTS
    return {f"wrong_{name}": f"{IN_TORCH}\n{text}\n" for name, text in in_torch.items()} | {
        f"wrong_{name}": f"{IN_JAX}\n{text}\n" for name, text in JAX.items()
    }


def wrong_line(text: str) -> int:
    """Number of the marked line, from 1 on."""
    (line,) = (number for number, line in enumerate(text.splitlines(), 1) if line.endswith(MARK))
    return line
