"""GroupedLinear parameters: weight0 [N, K], bias0 [N], weight1, .., or one weight [n, N, K] and one bias [n, N].

A checkpoint in either form loads into the other. The keywords that choose the form, and one tensor
for the row counts, are read here.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...common import env
from ...common.numbers import to_bool, with_article
from ...common.recipe import Recipe
from ..distributed.tensor_parallel import set_tensor_model_parallel_attributes
from ..tensor.grouped_checkpoints import convert_state, join_members
from ..tensor.grouped_tensor import GroupedTensor
from ..tensor.initial_values import find_initial_values, keep_initial_values
from ..tensor.quantized_tensor import QuantizedTensor
from .linear_base import ProductsModule
from .parameters import InitMethod, ParameterInit

_SINGLE = "NVTE_GROUPED_LINEAR_SINGLE_PARAM"
_FUSED = "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM"


def single_parameters(**asked: bool) -> dict[str, bool]:
    """Return single_grouped_weight and single_grouped_bias; without their variable they are False, with a warning."""
    names = [name for name, enabled in asked.items() if enabled]
    if not names or env.get(_SINGLE):
        return asked
    warnings.warn(
        f"{names[0]}=True has no effect without {_SINGLE}=1; the layer has one parameter per group",
        UserWarning,
        stacklevel=3,
    )
    return dict.fromkeys(asked, False)


def uses_grouped_tensor(value: Any) -> bool:
    """Return use_grouped_tensor as a bool; None follows the deprecated variable, which warns."""
    if value is None:
        if env.get(_FUSED):
            warnings.warn(
                f"{_FUSED} is deprecated; give use_grouped_tensor=True", FutureWarning, stacklevel=3
            )
        return bool(env.get(_FUSED))
    return to_bool("use_grouped_tensor", value)


def is_module_grouped_tensor_path_supported(recipe: Recipe | None, dtype: torch.dtype) -> bool:
    """Return whether the original's path for `GroupedTensor` operands is available; it never is here.

    `GroupedLinear` computes the same results without it, also with `use_grouped_tensor=True`.
    """
    return False


def check_device_splits(m_splits: Sequence[int] | Tensor, device: torch.device) -> None:
    """Raise ValueError if a layer that must not wait for the GPU gets row counts that are not on the GPU."""
    if device.type != "cuda":
        return
    if not isinstance(m_splits, Tensor) or not m_splits.is_cuda or m_splits.dtype != torch.int64:
        found = (
            f"{m_splits.dtype} on {m_splits.device}"
            if isinstance(m_splits, Tensor)
            else with_article(type(m_splits))
        )
        raise ValueError(
            f"m_splits is {found}; with use_grouped_tensor=True give int64 on the GPU, or leave the keyword False"
        )


def parameter_names(kind: str, count: int, single: bool) -> tuple[str, ...]:
    """Return the parameter names for a kind, "weight" or "bias"."""
    return (kind,) if single else tuple(f"{kind}{i}" for i in range(count))


def create_parameters(module: ProductsModule, init: ParameterInit, options: dict[str, Any]) -> None:
    """Register the parameters, unfilled: optimizers go by their order (without biases: empty tensors)."""
    config: Any = module._config
    weight, bias = (config.out_features, config.in_features), (config.out_features,)
    shapes = {name: _shape(config, "weight", weight) for name in config.weight_names}
    biases = {name: _shape(config, "bias", bias) for name in config.bias_names}
    if len(shapes) == len(biases):
        order = [name for pair in zip(shapes, biases, strict=True) for name in pair]
    else:
        order = [*shapes, *biases]
    for name in order:
        if name in biases and not config.use_bias:
            setattr(module, name, torch.empty(0, **options))
            continue
        parameter = torch.nn.Parameter(torch.empty((shapes | biases)[name], **options))
        if name in biases:
            fill = ParameterInit(torch.nn.init.zeros_)
        elif config.single_grouped_weight:
            fill = _init_members(init, config.num_gemms)
        else:
            fill = ParameterInit(
                init.init, init.rng_tracker, init.rng_tracker_name, 3 * int(name[6:]) + 1
            )
        module.register_parameter(name, parameter, fill)


def _shape(config: Any, kind: str, member: tuple[int, ...]) -> tuple[int, ...]:
    single = config.single_grouped_weight if kind == "weight" else config.single_grouped_bias
    return (config.num_gemms, *member) if single else member


def _init_members(init: ParameterInit, count: int) -> ParameterInit:
    """Initialize each matrix like a separate parameter, in order."""
    each = functools.partial(_fill_members, init.init)
    return ParameterInit(
        each, init.rng_tracker, init.rng_tracker_name, fp8_meta_index=1, members=count
    )


def _fill_members(init_method: InitMethod, stack: Tensor) -> None:
    for member in stack.unbind(0):
        init_method(member)


def group_single_parameters(module: Any) -> None:
    """Replace plain stacks over all groups by GroupedTensors on the same memory."""
    config: Any = module._config
    kinds = ["weight"] * config.single_grouped_weight
    kinds += ["bias"] * (config.single_grouped_bias and config.use_bias)
    for kind in kinds:
        parameter = module.get_parameter(kind)
        if not isinstance(parameter, QuantizedTensor) and not parameter.is_meta:
            module._replace_parameter(kind, torch.nn.Parameter(GroupedTensor.from_stack(parameter)))


def mark_parameters(module: ProductsModule) -> None:
    """Mark how weights and biases are sharded over ranks; again whenever they are reset."""
    config: Any = module._config
    sharded = config.tp_size > 1 and config.parallel_mode is not None
    axis = int(config.parallel_mode == "row") + int(config.single_grouped_weight)
    for name in config.weight_names:
        set_tensor_model_parallel_attributes(getattr(module, name), sharded, axis, 1)
    if config.use_bias and config.parallel_mode == "column":
        for name in config.bias_names:
            axis = int(config.single_grouped_bias)
            set_tensor_model_parallel_attributes(getattr(module, name), sharded, axis, 1)


def group_weights(module: ProductsModule) -> None:
    """Replace the group weights by one parameter [n, N, K] with the same values, or the same codes.

    The new parameter replaces the first weight. Attributes that users have set on a weight are not
    carried over, and an optimizer that holds the old parameters does not see the new one.
    """
    config: Any = module._config
    members = [module.get_parameter(name) for name in config.weight_names]
    with torch.no_grad():
        stack = torch.nn.Parameter(
            join_members([m.detach() for m in members]), members[0].requires_grad
        )
    initial = [
        initial_value
        for initial_value in map(find_initial_values, members)
        if initial_value is not None
    ]
    if len(initial) == len(members):
        keep_initial_values(stack, torch.stack(initial))
    fills = [module.param_init_meta.pop(name) for name in config.weight_names]
    remaining = {
        name: parameter
        for name, parameter in module._parameters.items()
        if name not in config.weight_names
    }
    module._parameters.clear()
    module.register_parameter("weight", stack, _init_members(fills[0], config.num_gemms))
    module._parameters.update(remaining)
    module._configure(
        single_grouped_weight=True,
        weight_names=("weight",),
        _tensors=("weight", *config.bias_names),
        _weights=tuple([("weight",)] * config.num_gemms),
    )
    mark_parameters(module)
    module._mark_delayed_gradients()


def load_other_form(
    module: Any, state_dict: MutableMapping[str, Any], prefix: str, *_: Any
) -> None:
    """Convert, before loading, parameters that were saved in the other form: one per group or one for all groups."""
    single = {"weight": module.single_grouped_weight}
    if module._config.use_bias:
        single["bias"] = module.single_grouped_bias
    convert_state(state_dict, prefix, single, module.num_gemms)
