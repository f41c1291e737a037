"""check_arguments(arguments of a constructor): the public keywords by name, and what each of them can be.

The layers share one vocabulary, so one table says it once. What several arguments must fulfil together (a size that
tp_size divides) is checked where they meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from ...common import checks
from ...common.checks import described
from ..distributed.collectives import SYMMETRIC_ALL_REDUCES
from ..functions.normalization import NORMALIZATIONS
from ..primitives.activation import ACTIVATIONS, ActivationParams
from ..runtime import checks as torch_checks

Rule = Callable[[str, Any], object]


def window(name: str, value: Any) -> None:
    """None, or two whole numbers; which ones, the mask says."""
    if value is None:
        return
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name}={described(value)} must be two numbers; give (left, right), -1 for no limit")
    for side in value:
        if isinstance(side, bool) or not isinstance(side, int):
            raise TypeError(
                f"{name}={described(value)} holds {described(side)}; give two whole numbers, -1 for no limit"
            )


def head_sizes(name: str, value: Any) -> None:
    """A head's features, or (of queries and keys, of values)."""
    if not isinstance(value, (tuple, list)):
        checks.whole(name, value)
        return
    if len(value) != 2:
        raise ValueError(
            f"{name}={described(value)} must be one or two sizes; give (of queries and keys, of values)"
        )
    for size in value:
        checks.whole(name, size)


def shape_or_none(name: str, value: Any) -> None:
    """None, one size, or several."""
    if value is None:
        return
    if isinstance(value, str) or not isinstance(value, Iterable):
        checks.whole(name, value)
        return
    sizes = tuple(value)
    if not sizes:
        raise ValueError(f"{name}={described(value)} holds no size; give one or more positive sizes")
    for size in sizes:
        checks.whole(name, size)


_SWITCHES = (
    "apply_residual_connection_post_layernorm",
    "bias",
    "bottom_right_diagonal",
    "checkpoint",
    "delay_wgrad_compute",
    "enc_dec_bottom_right_diagonal",
    "fuse_qkv_params",
    "fuse_wgrad_accumulation",
    "input_layernorm",
    "output_layernorm",
    "parallel_attention_mlp",
    "qk_norm_before_rope",
    "qkv_weight_interleaved",
    "return_bias",
    "return_layernorm_output",
    "return_layernorm_output_gathered",
    "return_max_logit",
    "rotary_pos_interleaved",
    "save_original_input",
    "sequence_parallel",
    "set_parallel_mode",
    "ub_bulk_dgrad",
    "ub_bulk_wgrad",
    "ub_overlap_ag",
    "ub_overlap_rs",
    "ub_overlap_rs_dgrad",
    "ub_tp_comm_overlap",
    "zero_centered_gamma",
)
_SIZES = (
    "in_features",
    "out_features",
    "hidden_size",
    "ffn_hidden_size",
    "num_gemms",
    "num_attention_heads",
    "tp_size",
)
_OPTIONAL_SIZES = ("kv_channels", "layer_number", "micro_batch_size", "num_gqa_groups", "seq_length")
_FUNCTIONS = ("get_rng_state_tracker", "init_method", "output_layer_init_method", "score_mod")
_NAMES = ("name", "rng_tracker_name", "ub_name")

RULES: dict[str, Rule] = {
    **dict.fromkeys(_SWITCHES, checks.switch),
    **dict.fromkeys(_SIZES, checks.whole),
    **dict.fromkeys(_OPTIONAL_SIZES, checks.whole_or_none),
    **dict.fromkeys(_FUNCTIONS, checks.function_or_none),
    **dict.fromkeys(_NAMES, checks.text_or_none),
    **dict.fromkeys(("eps", "layernorm_epsilon", "qk_norm_eps"), checks.epsilon),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "drop_path_rate"), checks.drop_rate),
    **dict.fromkeys(("window_size", "enc_dec_window_size"), window),
    **dict.fromkeys(("params_dtype", "dtype"), torch_checks.parameter_dtype),
    "activation": partial(checks.one_of, allowed=ACTIVATIONS),
    "activation_params": lambda name, value: ActivationParams.from_mapping(value),
    "cp_group": torch_checks.groups_or_none,
    "device": torch_checks.device,
    "normalization": partial(checks.one_of, allowed=NORMALIZATIONS),
    "softmax_scale": checks.number_or_none,
    "symmetric_ar_type": partial(checks.one_of, allowed=SYMMETRIC_ALL_REDUCES),
    "tp_group": torch_checks.group_or_none,
}


def check_arguments(arguments: Mapping[str, Any], **rules: Rule) -> None:
    """TypeError or ValueError for the first of a constructor's arguments that it cannot be made with.

    arguments   by name: locals(), as the first thing that the constructor does
    rules       of arguments that mean something else here than in the table
    """
    for name, value in arguments.items():
        rule = rules.get(name) or RULES.get(name)
        if rule is not None:
            rule(name, value)
