"""TogetherPath: whether the groups of a GroupedLinear go together through one call, and that call's arguments.

They go together on a GPU, in bfloat16 or float16, without quantization or with delayed, current or block scaling as
the recipes' defaults have it. Quantized parameters, the other recipes, put-off weight gradients, kept inputs,
recomputation under a recipe and torch.compile take the groups one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...common import env
from ...common.bounded import Bounded
from ..distributed.recompute import is_fp8_activation_recompute_enabled
from ..functions.grouped_quantizer import GroupedQuantizer, grouped
from ..functions.grouped_together import TogetherSpec
from ..primitives.grouped_gemm import Groups, Matrices, groups_of, irregular
from ..primitives.grouped_quantize import GroupedQuantized
from ..quantization.autocast import AutocastState, current
from .base import made_to_keep
from .recipe_state import ModuleRecipe

if TYPE_CHECKING:
    from .grouped_linear import GroupedLinear

_HALVES = (torch.bfloat16, torch.float16)
_WEIGHTS = "all weights"  # their key among the module's cached weights
_KEPT = 64

Planned = tuple[list[Tensor], list[Tensor] | None, Groups, TogetherSpec]
# Of input, weight and output gradient: all of them, or none.
Quantizers = tuple[GroupedQuantizer | None, GroupedQuantizer | None, GroupedQuantizer | None]


class TogetherPath:
    """The decision of one module, with what it need not find out twice."""

    def __init__(self, module: GroupedLinear):
        self._module = module
        count = range(module.num_gemms)
        self._weight_names = [f"weight{i}" for i in count]
        self._bias_names = [f"bias{i}" for i in count] if module.use_bias else []
        self._regular: Bounded[Any, bool] = Bounded(_KEPT)
        self._quantizers: tuple[ModuleRecipe, Quantizers | None] | None = None

    def plan(
        self, x: Tensor, m_splits: Sequence[int] | Tensor, is_first_microbatch: bool | None
    ) -> Planned | None:
        """(weights, biases, groups, spec) of one forward; None where the groups go one by one."""
        module = self._module
        state = current()
        weights = self._parameters_called(self._weight_names)
        if weights is None or not self._takes(x, weights, state):
            return None
        biases = self._parameters_called(self._bias_names)
        if biases is None or not self._are_regular(weights, biases):
            return None
        quantizers: Quantizers | None = (None, None, None)
        module._product_quantizers(state)
        if state.enabled:
            quantizers = self._quantizers_of(module._module_recipe)
        elif weights[0].dtype != x.dtype:
            return None
        if quantizers is None or module.backward_mode(state) != "quantized":
            return None
        groups = self._groups(m_splits, x)
        spec = self._spec(x, weights, biases, quantizers, state, is_first_microbatch)
        return weights, [bias.to(x.dtype) for bias in biases] or None, groups, spec

    def forget_weights(self, is_first_microbatch: bool | None) -> None:
        """The groups go one by one: weights of all of them, quantized in an earlier step, are of no more use."""
        if is_first_microbatch:
            self._module._fp8_workspaces.pop(_WEIGHTS, None)

    def _parameters_called(self, names: list[str]) -> list[Tensor] | None:
        """The parameters; None when one has been replaced by something that is not a plain parameter."""
        held = self._module._parameters
        found = [held.get(name) for name in names]
        kinds = set(map(type, found))
        return found if kinds <= {torch.nn.Parameter} else None  # pyright: ignore[reportReturnType]

    def _takes(self, x: Tensor, weights: list[Tensor], state: AutocastState) -> bool:
        """All conditions but those on the quantizers."""
        module = self._module
        asked = env.get("NVTE_USE_CUTLASS_GROUPED_GEMM")
        if asked is False or not (x.is_cuda or asked):
            return False
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            return False
        if x.dtype not in _HALVES or x.dim() != 2 or x.shape[0] == 0 or x.device != weights[0].device:
            return False
        if x.shape[1] != module.in_features or module.in_features % 16 or module.out_features % 16:
            return False
        if module.wgrad_store is not None or module.save_original_input or module.primary_weights_in_fp8:
            return False
        if state.calibrating or (state.enabled and is_fp8_activation_recompute_enabled()):
            return False
        device = x.device.type
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device) == x.dtype
        return weights[0].dtype == x.dtype

    def _are_regular(self, weights: list[Tensor], biases: list[Tensor]) -> bool:
        """Are all weights alike, all biases too, and the weights contiguous?"""
        key = (
            weights[0].dtype,
            tuple([weight.data_ptr() for weight in weights]),
            tuple([bias.data_ptr() for bias in biases]),
        )
        known = self._regular.get(key)
        if known is None:
            alike = len({(b.dtype, b.device, b.shape) for b in biases}) < 2
            known = self._regular.keep(key, irregular(weights) is None and alike)
        needs = {weight.requires_grad for weight in weights}
        return known and len(needs) == 1 and len({bias.requires_grad for bias in biases}) < 2

    def _quantizers_of(self, active: ModuleRecipe | None) -> Quantizers | None:
        """The quantizers of input, weight and output gradient; None where a role's cannot work together."""
        assert active is not None
        if self._quantizers is None or self._quantizers[0] is not active:
            products = active.products
            made = (
                grouped([product.input for product in products], False),
                grouped([product.weight for product in products], True),
                grouped([product.grad_output for product in products], False),
            )
            self._quantizers = (active, None if None in made else made)
        return self._quantizers[1]

    def _groups(self, m_splits: Sequence[int] | Tensor, x: Tensor) -> Groups:
        if not isinstance(m_splits, Tensor):
            m_splits = tuple(m_splits)
        if len(m_splits) != self._module.num_gemms:
            raise ValueError(
                f"m_splits has {len(m_splits)} numbers for {self._module.num_gemms} groups; give one a group"
            )
        return groups_of(m_splits, x.shape[0], x.device)

    def _spec(
        self,
        x: Tensor,
        weights: list[Tensor],
        biases: list[Tensor],
        quantizers: Quantizers,
        state: AutocastState,
        is_first_microbatch: bool | None,
    ) -> TogetherSpec:
        module = self._module
        grad = torch.is_grad_enabled()
        needs_grad_input = grad and x.requires_grad
        fused = None
        if module.fuse_wgrad_accumulation and grad:
            fused = tuple(module.weight_gradient(name, is_first_microbatch) for name in self._weight_names)
        cached = None
        if is_first_microbatch is not None and quantizers[1] is not None:
            cached = self._cached_weights(weights, quantizers[1], needs_grad_input, is_first_microbatch)
        return TogetherSpec(
            x.dtype,
            *quantizers,
            module.accumulation(state),
            (module.out_features, module.in_features),
            weights[0].dtype,
            needs_grad_input,
            grad and weights[0].requires_grad,
            grad and bool(biases) and biases[0].requires_grad and not module.return_bias,
            fused,
            cached,
            module._scale_update(state, grad),
        )

    def _cached_weights(
        self, weights: list[Tensor], quantizer: GroupedQuantizer, columnwise: bool, is_first_microbatch: bool
    ) -> GroupedQuantized:
        """The weights as quantized for the first microbatch of a step."""
        workspaces: dict[str, Any] = self._module._fp8_workspaces
        cached = workspaces.get(_WEIGHTS)
        if is_first_microbatch or cached is None or (columnwise and cached.codes_t is None):
            cached = made_to_keep(lambda: quantizer.matrices(Matrices.of(weights), True, columnwise))
            workspaces.clear()
            workspaces[_WEIGHTS] = cached
        return cached
