"""Rules for layer arguments, and the decorator that applies them to a constructor.

The layers share one keyword vocabulary, so one table has a rule per keyword. A rule checks one argument and returns it
as the type that the annotation promises: a size given as 16.0, `np.int64(16)` or `torch.tensor(16)` becomes the int
16. Conditions on several arguments (a size that must be divisible by tp_size) are checked by the constructors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ...common import checks
from ...common.checks import described
from ...common.numbers import to_bool, to_float, to_int
from ..distributed.symmetric_memory import SYMMETRIC_ALL_REDUCES
from ..distributed.tensor_parallel import NO_FLAGS, OverlapFlags, warn_of_unused_overlap
from ..functions.normalization import NORMALIZATIONS
from ..primitives.activation import ACTIVATIONS, ActivationParams
from ..runtime import checks as torch_checks
from ..runtime.warn_once import warn_once

Rule = Callable[[str, Any], Any]
Constructor = TypeVar("Constructor", bound=Callable[..., None])

# Limit that rejects unusable counts before their parameters are named.
MAX_GROUPS = 1 << 20


def switch(name: str, value: Any) -> bool | None:
    """Return a flag as a bool; None, which several flags read as "not given", stays None."""
    return None if value is None else to_bool(name, value)


class CallSwitches(NamedTuple):
    """Switches in a linear layer call; see `Linear.forward`."""

    is_first_microbatch: bool | None = None
    fp8_output: bool = False
    fp8_grad: bool = False


NO_SWITCHES = CallSwitches()
FLAG_TYPES = (bool, type(None))  # of an is_first_microbatch that needs no conversion


def call_switches(is_first_microbatch: Any, fp8_output: Any, fp8_grad: Any) -> CallSwitches:
    """Return call switches; 1, for example, becomes True.

    Raises:
        TypeError: A switch is neither True, False, None nor a number 0 or 1.
    """
    if fp8_output is False and fp8_grad is False and type(is_first_microbatch) in FLAG_TYPES:
        return CallSwitches(is_first_microbatch)
    return CallSwitches(
        switch("is_first_microbatch", is_first_microbatch),
        to_bool("fp8_output", fp8_output),
        to_bool("fp8_grad", fp8_grad),
    )


def size(name: str, value: Any) -> int:
    """Return a positive integer."""
    return to_int(name, value, 1)


def size_or_none(name: str, value: Any, least: int = 1) -> int | None:
    """Return None, or an integer that is at least `least`."""
    return None if value is None else to_int(name, value, least)


def whole_or_none(name: str, value: Any) -> int | None:
    """Return None, or any whole number."""
    return None if value is None else to_int(name, value)


def finite_or_none(name: str, value: Any) -> float | None:
    """Return None, or a finite number; a bool is not a scale."""
    if value is None:
        return None
    if isinstance(value, bool):
        checks.number(name, value)
    found = to_float(name, value)
    checks.number(name, found)
    return found


def epsilon(name: str, value: Any) -> float:
    """Return a finite nonnegative number."""
    found = to_float(name, value)
    checks.epsilon(name, found)
    return found


def limit(name: str, value: Any) -> float:
    """Return a finite nonnegative limit, where 0 is no limit; a bool is not a limit."""
    if isinstance(value, bool):
        checks.number(name, value)
    found = 0.0 if value is None else to_float(name, value)
    if not 0.0 <= found < math.inf:
        raise ValueError(
            f"{name} must be finite and non-negative, got {found}; give 0.0 for no {name}"
        )
    return found


def drop_rate(name: str, value: Any) -> float:
    """Return a probability in [0, 1]; at 1 everything is dropped and the result is zero."""
    found = to_float(name, value)
    if not 0.0 <= found <= 1.0:
        raise ValueError(f"{name}={found} is outside [0, 1]; give the share of elements to drop")
    return found


def group_count(name: str, value: Any) -> int:
    """Return a group count in 1..MAX_GROUPS."""
    count = to_int(name, value, 1)
    if count > MAX_GROUPS:
        raise ValueError(
            f"{name}={described(count)} is above {MAX_GROUPS}; give the number of groups (experts)"
        )
    return count


def window(name: str, value: Any) -> tuple[int, int] | None:
    """Return None, or two whole numbers (left, right); the mask decides which numbers are valid."""
    if value is None:
        return None
    sides = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise TypeError(
            f"{name}={described(value)} must be two numbers; give (left, right), -1 for no limit"
        )
    left, right = (to_int(f"{name}[{i}]", side) for i, side in enumerate(sides))
    return left, right


def head_sizes(name: str, value: Any) -> int | tuple[int, int]:
    """Return the head size, or a pair (queries and keys, values); a bool is not a size."""
    if isinstance(value, bool):
        checks.whole(name, value)
    if not isinstance(value, (tuple, list)):
        return size(name, value)
    if len(value) != 2:
        raise ValueError(
            f"{name}={described(value)} must be one or two sizes; give (of queries and keys, of values)"
        )
    return size(name, value[0]), size(name, value[1])


def shape_or_none(name: str, value: Any) -> tuple[int, ...] | None:
    """Return None, or a shape with at least one size; one size may be given by itself."""
    if value is None:
        return None
    if hasattr(value, "tolist"):  # arrays and tensors with any number of axes
        value = value.tolist()
    if isinstance(value, str) or not isinstance(value, Iterable):
        return (size(name, value),)
    sizes = tuple(value)
    if not sizes:
        raise ValueError(
            f"{name}={described(sizes)} holds no size; give one or more positive sizes"
        )
    return tuple(size(name, item) for item in sizes)


def text_or_none(name: str, value: Any) -> str | None:
    """Return None, or the name as text; any object may name a layer."""
    return None if value is None else str(value)


def overlap_flags(applies: bool, *flags: bool) -> OverlapFlags:
    """Return the `ub_*` flags for a layer; warn once if they are set and have no effect.

    Args:
        applies: The layer is sharded over several ranks, with sequence parallelism.
        flags: `OverlapFlags` fields.
    """
    if applies or not any(flags):
        return OverlapFlags(*flags)
    names = ", ".join(
        [name for name, flag in zip(OverlapFlags._fields, flags, strict=False) if flag]
    )
    warn_of_unused_overlap(f"{names}=True", stacklevel=7)
    return NO_FLAGS


def warn_unless_reduced(symmetric_ar_type: str | None, is_reduced: bool) -> None:
    """Warn once that an all-reduce algorithm has no effect on a layer without that all-reduce."""
    if symmetric_ar_type is not None and not is_reduced:
        warn_once(
            "symmetric_ar_type of a layer without an all-reduce",
            f"symmetric_ar_type={symmetric_ar_type!r} has no effect: only the outputs of row-parallel layers over "
            "several ranks without sequence parallelism are all-reduced. Leave it None",
            stacklevel=4,
        )


def checked(check: Callable[[str, Any], object]) -> Rule:
    """Return the rule that only checks: the argument stays as given."""

    def rule(name: str, value: Any) -> Any:
        check(name, value)
        return value

    return rule


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
    "single_grouped_bias",
    "single_grouped_weight",
    "zero_centered_gamma",
)
_SIZES = (
    "in_features",
    "out_features",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "tp_size",
)
_FUNCTIONS = ("get_rng_state_tracker", "init_method", "output_layer_init_method", "score_mod")

RULES: dict[str, Rule] = {
    **dict.fromkeys(_SWITCHES, switch),
    **dict.fromkeys((*OverlapFlags._fields, "ub_tp_comm_overlap"), switch),
    **dict.fromkeys(_SIZES, size),
    **dict.fromkeys(("kv_channels", "num_gqa_groups"), size_or_none),
    **dict.fromkeys(("micro_batch_size", "seq_length"), partial(size_or_none, least=0)),
    **dict.fromkeys(_FUNCTIONS, checked(checks.function_or_none)),
    **dict.fromkeys(("name", "ub_name"), text_or_none),
    **dict.fromkeys(("eps", "layernorm_epsilon", "qk_norm_eps"), epsilon),
    **dict.fromkeys(
        ("attention_dropout", "hidden_dropout", "drop_path_rate", "drop_prob"), drop_rate
    ),
    **dict.fromkeys(("window_size", "enc_dec_window_size"), window),
    **dict.fromkeys(("params_dtype", "dtype"), checked(torch_checks.parameter_dtype)),
    "activation": checked(partial(checks.check_option, allowed=ACTIVATIONS)),
    "activation_params": checked(lambda _, value: ActivationParams.from_mapping(value)),
    "cp_group": checked(torch_checks.groups_or_none),
    "device": checked(torch_checks.device),
    "layer_number": whole_or_none,
    "normalization": checked(partial(checks.check_option, allowed=NORMALIZATIONS)),
    "num_gemms": group_count,
    "rng_tracker_name": checked(checks.text_or_none),
    "softcap": limit,
    "softmax_scale": finite_or_none,
    "symmetric_ar_type": checked(partial(checks.check_option, allowed=SYMMETRIC_ALL_REDUCES)),
    "tp_group": checked(torch_checks.group_or_none),
}


def accepts(**rules: Rule) -> Callable[[Constructor], Constructor]:
    """Decorate a constructor: check its arguments before its body runs, and convert them to their annotated types.

    Args:
        rules: Rules for arguments that mean something else here than in `RULES`, or that only this
            constructor has. Arguments without a rule are passed on unchanged, and so are defaults.

    Raises:
        TypeError: The decorated constructor got an unknown keyword, or an argument with a type that cannot be used.
        ValueError: The decorated constructor got an argument outside its limits.
    """
    all_rules = {**RULES, **rules}

    def decorate(constructor: Constructor) -> Constructor:
        code = constructor.__code__
        names = code.co_varnames[1 : code.co_argcount]
        keywords = checks.keyword_names(constructor)

        @functools.wraps(constructor)
        def converted(self: Any, *args: Any, **kwargs: Any) -> None:
            positional = [
                all_rules[name](name, value) if name in all_rules else value
                for name, value in zip(names, args, strict=False)
            ]
            if keywords is not None:
                unknown = [name for name in kwargs if name not in keywords]
                checks.reject_keywords(type(self).__name__, unknown, {}, keywords)
            named = {
                name: all_rules[name](name, value) if name in all_rules else value
                for name, value in kwargs.items()
            }
            constructor(self, *positional, *args[len(names) :], **named)

        return converted  # pyright: ignore[reportReturnType]

    return decorate
