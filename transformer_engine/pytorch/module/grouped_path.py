"""The specs of a GroupedLinear's calls: of all groups together, where `grouped_way` chooses that, or of each group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ...common import env
from ...common.dispatch import undisturbed
from ..distributed.recompute import is_fp8_activation_recompute_enabled
from ..distributed.tensor_parallel import TensorParallel
from ..functions.grouped_quantizer import GroupedQuantizer, grouped
from ..functions.grouped_together import TogetherSpec
from ..functions.linear import passes_of
from ..functions.linear_spec import LinearSpec, changed
from ..functions.stacks import StackMember
from ..functions.weight_gradient import WeightGradient
from ..primitives.grouped_gemm import Groups, Matrices, groups_of
from ..primitives.grouped_quantize import GroupedQuantized
from ..quantization.autocast import AutocastState
from ..quantization.global_state import FP8GlobalStateManager, is_captured
from ..runtime.device import autocast_dtype
from .grouped_way import (
    CALIBRATION,
    DELAYED_WEIGHT_GRADIENTS,
    FLAGGED_WEIGHTS,
    IRREGULAR,
    KEPT_INPUT,
    OTHER_BACKWARD,
    OTHER_PARAMETERS,
    QUANTIZED_PARAMETERS,
    RECOMPUTATION,
    SINGLE_QUANTIZERS,
    TABLE,
    TOGETHER,
)
from .numerics import made_to_keep
from .parameters import parameter_of
from .products import UNQUANTIZED, ModuleRecipe, ProductQuantizers, unquantized
from .specs import Call, product_spec

_asked_for = env.watch_in_eager_mode("NVTE_USE_CUTLASS_GROUPED_GEMM")
_WEIGHTS = "all weights"  # their key among the module's cached weights

Planned = tuple[list[Tensor], list[Tensor] | None, Groups, TogetherSpec]
# Of input, weight and output gradient: all of them, or none.
Quantizers = tuple[GroupedQuantizer | None, GroupedQuantizer | None, GroupedQuantizer | None]
_NONE: Quantizers = (None, None, None)


def group_specs(call: Call, products: tuple[ProductQuantizers, ...]) -> tuple[LinearSpec, ...]:
    """Return the spec of each group of a call whose groups are multiplied one by one, with these quantizers."""
    config: Any = call.config
    count, parameters = config.num_gemms, call.parameters
    weights, biases = parameters[: len(config.weight_names)], parameters[len(config.weight_names) :]
    weights = weights * count if config.single_grouped_weight else weights
    biases = biases * count if config.single_grouped_bias else biases
    groups = []
    for i, weight in enumerate(weights):
        bias = None if config.return_bias else biases[i]
        needs = (
            call.gradients and call.input.requires_grad,
            call.gradients and weight is not None and weight.requires_grad,
            call.gradients and bias is not None and bias.requires_grad,
        )
        # Communication is the caller's.
        group = product_spec(call, i, products[i], TensorParallel(), needs, None, weight)
        if config.single_grouped_weight and call.holders is not None:
            gradient = group.weight_gradient
            member = StackMember(gradient.parameter, i)
            group = changed(group, weight_gradient=replace(gradient, parameters=(member,)))
        groups.append(changed(group, passes=passes_of(group, config.use_bias and not config.return_bias)))
    return tuple(groups)


def fitting_group_specs(key: tuple[Call, tuple[bool, ...]]) -> tuple[LinearSpec, ...]:
    """Return `group_specs` of a call, in which groups whose sizes do not fit the format are not quantized."""
    call, fits = key
    chosen = zip(call.active.products, fits, strict=True)
    return group_specs(call, tuple([product if fit else UNQUANTIZED for product, fit in chosen]))


class GroupedModule(Protocol):
    """What a TogetherPath asks of its module."""

    use_bias: bool
    numerics: Any
    wgrad_store: Any
    _parameters: Any
    _config: Any
    _product_quantizers: Any
    _scale_update: Any


class TogetherPath:
    """The decision of one module, with what it need not find out twice."""

    def __init__(self, module: GroupedModule):
        self._module = module
        config = module._config
        self._weight_names = list(config.weight_names)
        self._bias_names = list(config.bias_names) if module.use_bias else []
        self._quantizers: tuple[ModuleRecipe, Quantizers] | None = None

    def plan(
        self,
        x: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None,
        state: AutocastState,
    ) -> Planned | None:
        """(weights, biases, groups, spec) of one forward; None where the groups go one by one."""
        module = self._module
        weights = self._parameters_called(self._weight_names)
        biases = self._parameters_called(self._bias_names)
        asked = self._features(state)
        key = self._key(x, asked, state)
        found, quantizers, way, recipe = asked, _NONE, None, None
        if weights is None or biases is None:
            found += (OTHER_PARAMETERS,)
        else:
            way = TABLE.name_of(key)
            if way == TOGETHER:  # else the rest need not be looked at
                if not self._are_regular(weights, biases):
                    found += (IRREGULAR,)
                module._product_quantizers(state)
                if state.enabled:
                    quantizers = self._quantizers_of(module.numerics.active)
                    found += (SINGLE_QUANTIZERS,) if quantizers is _NONE else ()
                recipe = self._recipe(state)
                if recipe.backward != "quantized":
                    found += (OTHER_BACKWARD,)
        if (
            found is not asked or not undisturbed()
        ):  # else the answer is known, and nobody is to be told of it
            way = TABLE.choose((found, *key[1:]))
        if way != TOGETHER:
            return None
        assert weights is not None and biases is not None, "the table does not let such parameters pass"
        groups = self._groups(m_splits, x)
        recipe = self._recipe(state) if recipe is None else recipe
        spec = self._spec(x, weights, biases, quantizers, state, recipe, is_first_microbatch)
        return weights, [bias.to(x.dtype) for bias in biases] or None, groups, spec

    def _features(self, state: AutocastState) -> tuple[str, ...]:
        """What the module and the thread ask for beside products, the parameters apart."""
        module, config = self._module, self._module._config
        features: tuple[str, ...] = ()
        if module.wgrad_store is not None:
            features += (DELAYED_WEIGHT_GRADIENTS,)
        if config.save_original_input:
            features += (KEPT_INPUT,)
        if config.primary_weights_in_fp8:
            features += (QUANTIZED_PARAMETERS,)
        if state.calibrating:
            features += (CALIBRATION,)
        if state.enabled and is_fp8_activation_recompute_enabled():
            features += (RECOMPUTATION,)
        flag = FP8GlobalStateManager.quantization_state.skip_fp8_weight_update_tensor
        if flag is not None and is_captured(state):
            features += (FLAGGED_WEIGHTS,)
        return features

    def _key(self, x: Tensor, features: tuple[str, ...], state: AutocastState) -> tuple[Any, ...]:
        """What `GroupedWay` describes of this forward."""
        module, config, device = self._module, self._module._config, x.device
        weight = parameter_of(module, self._weight_names[0])  # pyright: ignore[reportArgumentType]
        narrowed = autocast_dtype(device.type)
        return (
            features,
            None if _asked_for() is None else env.get("NVTE_USE_CUTLASS_GROUPED_GEMM"),
            type(x) is Tensor or type(x) is torch.nn.Parameter,
            x.shape,
            x.dtype,
            device,
            (config.out_features, config.in_features),
            weight.device,
            narrowed or weight.dtype,
            None if state.enabled else weight.dtype,
        )

    def forget_weights(self, is_first_microbatch: bool | None) -> None:
        """The groups go one by one: weights of all of them, quantized in an earlier step, are of no more use."""
        if is_first_microbatch:
            self._module.numerics.workspaces.pop(_WEIGHTS, None)

    def _parameters_called(self, names: list[str]) -> list[Tensor] | None:
        """The parameters; None when one has been replaced by something that is not a plain parameter."""
        held = self._module._parameters
        found = [held.get(name) for name in names]
        kinds = set(map(type, found))
        return found if kinds <= {torch.nn.Parameter} else None  # pyright: ignore[reportReturnType]

    def _are_regular(self, weights: list[Tensor], biases: list[Tensor]) -> bool:
        """Are all weights alike, all biases too, and the weights contiguous where kernels can read them?"""
        kinds = {
            (w.shape, w.dtype, w.device, w.requires_grad, w.is_contiguous(), w.data_ptr() % 16)
            for w in weights
        }
        if len(kinds) > 1 or len({(b.shape, b.dtype, b.device, b.requires_grad) for b in biases}) > 1:
            return False
        ((*_, contiguous, misplaced),) = kinds
        return contiguous and not misplaced

    def _quantizers_of(self, active: ModuleRecipe | None) -> Quantizers:
        """The quantizers of input, weight and output gradient; none where a role's cannot work together."""
        assert active is not None
        if self._quantizers is None or self._quantizers[0] is not active:
            products = active.products
            made = (
                grouped([product.input for product in products], False),
                grouped([product.weight for product in products], True),
                grouped([product.grad_output for product in products], False),
            )
            self._quantizers = (active, _NONE if None in made else made)
        return self._quantizers[1]

    def _recipe(self, state: AutocastState) -> ModuleRecipe:
        """What the recipe says of products; that of high precision where nothing is quantized."""
        active = self._module.numerics.active
        return active if state.enabled and active is not None else unquantized(self._module._config.num_gemms)

    def _groups(self, m_splits: Sequence[int] | Tensor, x: Tensor) -> Groups:
        if not isinstance(m_splits, Tensor):
            m_splits = tuple(m_splits)
        count = self._module._config.num_gemms
        if len(m_splits) != count:
            raise ValueError(f"m_splits has {len(m_splits)} numbers for {count} groups; give one a group")
        return groups_of(m_splits, x.shape[0], x.device)

    def _spec(
        self,
        x: Tensor,
        weights: list[Tensor],
        biases: list[Tensor],
        quantizers: Quantizers,
        state: AutocastState,
        recipe: ModuleRecipe,
        is_first_microbatch: bool | None,
    ) -> TogetherSpec:
        module, config = self._module, self._module._config
        grad = torch.is_grad_enabled()
        needs_grad_input = grad and x.requires_grad
        stacked = config.single_grouped_weight
        fused = None
        if config.fuse_wgrad_accumulation and grad:
            trained = weights
            if stacked:
                trained = [StackMember(weights[0], i) for i in range(config.num_gemms)]
            fused = tuple(WeightGradient((w,), True, bool(is_first_microbatch)) for w in trained)
        cached = None
        if is_first_microbatch is not None and quantizers[1] is not None:
            cached = self._cached_weights(weights, quantizers[1], needs_grad_input, is_first_microbatch)
        return TogetherSpec(
            x.dtype,
            *quantizers,
            recipe.accumulation,
            (config.out_features, config.in_features),
            weights[0].dtype,
            needs_grad_input,
            grad and weights[0].requires_grad,
            grad and bool(biases) and biases[0].requires_grad and not config.return_bias,
            fused,
            stacked,
            config.single_grouped_bias,
            cached,
            module._scale_update(state, grad),
        )

    def _cached_weights(
        self, weights: list[Tensor], quantizer: GroupedQuantizer, columnwise: bool, is_first_microbatch: bool
    ) -> GroupedQuantized:
        """The weights as quantized for the first microbatch of a step."""
        workspaces: dict[str, Any] = self._module.numerics.workspaces
        cached = workspaces.get(_WEIGHTS)
        if is_first_microbatch or cached is None or (columnwise and cached.codes_t is None):
            stacked = self._module._config.single_grouped_weight
            matrices = Matrices.of(weights[0].unbind(0) if stacked else weights)
            cached = made_to_keep(lambda: quantizer.matrices(matrices, True, columnwise))
            workspaces.clear()
            workspaces[_WEIGHTS] = cached
        return cached
