"""GroupedLinear: y_g = x_g @ weight_g.T + bias_g for consecutive row groups, the experts in a layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, MutableMapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ....common.numbers import to_bool, to_int, to_ints
from ....common.recipe import Recipe
from ...distributed.tensor_parallel import TensorParallel
from ...functions.grouped_call import GroupedQuantizers, GroupedSpec, StackMember
from ...functions.grouped_request import (
    CALIBRATION,
    DELAYED_WEIGHT_GRADIENTS,
    OTHER_BACKWARD,
    OTHER_PARAMETERS,
    QUANTIZED_PARAMETERS,
    SCALED_BIAS,
    SINGLE_QUANTIZERS,
    TABLE,
    TOGETHER,
    GroupedRequest,
    environment_request,
)
from ...functions.linear_spec import LinearSpec, replace_fields
from ...functions.weight_gradient import WeightGradient, WeightGradStore
from ...quantization import QuantizerRole
from ...quantization.family import find_family
from ...quantization.model_init import current_model_init
from ...runtime.device import canonical_device, is_meta
from ...tensor.grouped_checkpoints import convert_state
from ...tensor.grouped_tensor import GroupedTensor, group_memory, plain_stack
from ...tensor.quantized_tensor import QuantizedTensorStorage
from ..pass_operation import PassOperation
from ..passes.contract import InputFacts, OperationCall, OperationPasses
from ..passes.grouped import (
    GRAD_INPUT_BUFFER_KEY,
    OUTPUT_BUFFER_KEY,
    GroupedPasses,
    accept_buffers,
)
from ..passes.linear import linear_spec
from .basic_linear import check_input, check_main_grad, parameter_dtype, replace_parameter
from .grouped_operator import is_op_fuser_grouped_tensor_path_supported, traced_passes

# Beside the layer, original names that other libraries import from here.
__all__ = [
    "GRAD_INPUT_BUFFER_KEY",
    "OUTPUT_BUFFER_KEY",
    "GroupedLinear",
    "is_op_fuser_grouped_tensor_path_supported",
]


_SCALES_OF_STATE = (
    "single_grouped_weight=True cannot hold weights of delayed scaling, whose scales belong to the recipe state; leave "
    "it False inside of quantized_model_init, or use another recipe"
)


class GroupedLinear(PassOperation):
    """y_g = x_g @ weight_g.T + bias_g for consecutive row groups.

    The first extra input holds the split sizes, the rows per group: a tensor with any integer dtype on any device,
    or a whole-number sequence. The second one, with `scale_bias`, is a scale per row that multiplies the bias. Rows
    that belong to no group give zeros. On a GPU all groups are computed in one launch per step where the table
    "grouped_linear" allows it, and the host does not wait for split sizes on the GPU; otherwise the host reads them
    and computes group by group. NVTE_USE_CUTLASS_GROUPED_GEMM=0 always computes group by group.

    Args:
        num_groups: Group count.
        in_features: Last input dimension.
        out_features: Last output dimension.
        bias: Add a bias per group.
        device: Parameter device, by default the GPU if there is one; "meta" allocates them in the
            first forward pass.
        dtype: Parameter dtype, by default torch's default dtype.
        rng_state_tracker_function: Function that returns the tracker under whose state weights are initialized.
        accumulate_into_main_grad: Accumulate weight gradients into `main_grad` per weight.
        single_grouped_weight: Keep all weights as one parameter `weight` [num_groups, out_features, in_features].
        single_grouped_bias: Keep all biases as one parameter `bias` [num_groups, out_features].
        delay_wgrad_compute: Compute weight gradients in `backward_dw()` instead of the backward pass.
        scale_bias: Multiply biases by scales; no effect without `bias`.

    Raises:
        ValueError: An unsupported dtype or size.
        RuntimeError: `single_grouped_weight` inside `quantized_model_init` with DelayedScaling.
    """

    _shown = {name: name for name in ("num_groups", "in_features", "out_features")} | {
        "bias": "has_bias"
    }
    option_names = frozenset({OUTPUT_BUFFER_KEY, GRAD_INPUT_BUFFER_KEY})

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
    ) -> None:
        self.has_bias = to_bool("bias", bias)
        self._scale_bias = to_bool("scale_bias", scale_bias) and self.has_bias
        self.num_extra_inputs = 2 if self._scale_bias else 1
        self.num_groups = to_int("num_groups", num_groups, 1)
        super().__init__()
        self.in_features = to_int("in_features", in_features, 1)
        self.out_features = to_int("out_features", out_features, 1)
        self.single_grouped_weight = to_bool("single_grouped_weight", single_grouped_weight)
        self.single_grouped_bias = (
            to_bool("single_grouped_bias", single_grouped_bias) and self.has_bias
        )
        self._rng_state_tracker_function = rng_state_tracker_function
        self._accumulate_into_main_grad = to_bool(
            "accumulate_into_main_grad", accumulate_into_main_grad
        )
        self.wgrad_store = WeightGradStore(to_bool("delay_wgrad_compute", delay_wgrad_compute))
        self._wgrad_hooks: list[Callable[[], object]] = []
        model_init = current_model_init()
        self._model_init_recipe: Recipe | None = model_init.recipe if model_init.enabled else None
        self._preserves_initial_values = model_init.preserve_high_precision_init_val
        family = None if self._model_init_recipe is None else find_family(self._model_init_recipe)
        if family is not None and family.follows_history and self.single_grouped_weight:
            raise RuntimeError(_SCALES_OF_STATE)
        target_device = torch.device("meta") if is_meta(device) else canonical_device(device)
        self._device = None if target_device.type == "meta" else target_device
        self._register_parameters(parameter_dtype(dtype))
        if self._device is not None:
            self.reset_parameters()
        self.register_load_state_dict_pre_hook(_load_other_form)

    def _register_parameters(self, dtype: torch.dtype) -> None:
        """Register parameters on the meta device: weight0, bias0, weight1, .., or stacks."""
        weight, bias = (self.out_features, self.in_features), (self.out_features,)
        shapes: dict[str, tuple[int, ...]] = {}
        if self.single_grouped_weight:
            shapes["weight"] = (self.num_groups, *weight)
        for i in range(self.num_groups):
            if not self.single_grouped_weight:
                shapes[f"weight{i}"] = weight
            if self.has_bias and not self.single_grouped_bias:
                shapes[f"bias{i}"] = bias
        if self.single_grouped_bias:
            shapes["bias"] = (self.num_groups, *bias)
        for name, shape in shapes.items():
            values = torch.empty(shape, dtype=dtype, device="meta")
            self.register_parameter(name, torch.nn.Parameter(values))
            if name.startswith("weight") and self.wgrad_store.delay_wgrad_compute():
                self.get_parameter(name).skip_backward_post_hook = True  # pyright: ignore
        self.parameter_names = tuple(shapes)

    def pass_parameters(self) -> list[Tensor]:
        return [plain_stack(parameter) for parameter in self.own_tensors()]

    def reset_parameters(self) -> None:
        """Allocate parameters on the meta device; fill weights with uniform random values and biases with zeros."""
        tracker = self._rng_state_tracker_function
        for name in self.parameter_names:
            before = self.get_parameter(name)
            target_device = (
                (self._device or canonical_device("cuda")) if before.is_meta else before.device
            )
            values = torch.empty(before.shape, dtype=before.dtype, device=target_device)
            with torch.no_grad(), nullcontext() if tracker is None else tracker().fork():
                if name.startswith("bias"):
                    values.zero_()
                else:
                    for member in values if values.dim() == 3 else [values]:
                        torch.nn.init.kaiming_uniform_(member, a=math.sqrt(5))
            result: Any = values
            quantized = self._model_init_recipe is not None and name.startswith("weight")
            stacked = name in ("weight", "bias")
            if quantized and stacked:
                result = GroupedTensor.of_members(
                    [self._quantized(member, group) for group, member in enumerate(values)]
                )
            elif quantized:
                result = self._quantized(values, int(name[6:]))
            elif stacked:
                result = GroupedTensor.from_stack(values)
            replace_parameter(
                self, name, result, values if quantized and self._preserves_initial_values else None
            )

    def _quantized(self, values: Tensor, group: int) -> Tensor:
        if self._applied is None:
            self.reset_recipe_state(recipe=self._model_init_recipe)
        quantizer = self.get_quantizer("forward", 2 * group + 1)
        if self.single_grouped_weight and quantizer is not None and quantizer.stateful:
            raise RuntimeError(_SCALES_OF_STATE)
        return self.quantize_parameter(values, 2 * group + 1)

    def _connect_parameters(self) -> None:
        for i in range(self.num_groups):
            self.connect_parameter(getattr(self, f"weight{i}", None), 2 * i + 1)

    def num_quantizers(self, mode: str) -> int:
        return 2 * self.num_groups if mode == "forward" else self.num_groups

    def get_quantizer_roles(self, mode: str) -> list[QuantizerRole | None]:
        tensors = ("input", "weight") if mode == "forward" else ("grad_output",)
        return [
            QuantizerRole("grouped_linear", tensor, "")
            for _ in range(self.num_groups)
            for tensor in tensors
        ]

    def _weights(self) -> list[Any]:
        """Return the tensors that receive the per-group weight gradients."""
        if self.single_grouped_weight:
            return [StackMember(self.weight, i) for i in range(self.num_groups)]
        return self._weight_parameters()

    def _weight_parameters(self) -> list[Tensor]:
        """Return the parameters that are weights: one per group, or the stack."""
        return [
            group_memory(getattr(self, name))
            for name in self.parameter_names
            if name.startswith("weight")
        ]

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Check the parameters.

        Raises:
            RuntimeError: Weights or biases differ in dtype, device, type or requires_grad, or
                `main_grad` is missing.
        """
        for kind in ("weight", "bias"):
            parameters = [
                getattr(self, name) for name in self.parameter_names if name.startswith(kind)
            ]
            facts = {(p.dtype, p.device, p.requires_grad, type(p)) for p in parameters}
            if len(facts) > 1:
                raise RuntimeError(
                    f"the {kind} parameters of GroupedLinear differ in dtype, device, requires_grad or type: "
                    f"{sorted(map(str, facts))}; make them alike"
                )
            accumulates = self._accumulate_into_main_grad and requires_grad and kind == "weight"
            for parameter in parameters if accumulates else ():
                if parameter.requires_grad:
                    check_main_grad("GroupedLinear", parameter)

    def distributed_weight_unsupported_reason(self) -> str | None:
        stack, delayed = self.single_grouped_weight, self.wgrad_store.delay_wgrad_compute()
        named = "single_grouped_weight" if stack else "delay_wgrad_compute"
        return f"leave {named} False, or use te.GroupedLinear" if stack or delayed else None

    def call_facts(self, extra_inputs: tuple[Tensor, ...]) -> Hashable:
        # Prepared passes hold weights whose gradients are delayed, accumulated or parts of a stack.
        delayed = self.wgrad_store.delay_wgrad_compute()
        needs_identity = delayed or self._accumulate_into_main_grad or self.single_grouped_weight
        return delayed, tuple(
            [id(getattr(self, name)) for name in self.parameter_names]
        ) if needs_identity else None

    def accept_extra_input(self, index: int, value: Any) -> Any:
        """Convert split sizes given as a whole-number sequence to a tensor."""
        rows = None if index else to_ints("split sizes", value)
        return value if rows is None else torch.tensor(rows, dtype=torch.int64, device="cpu")

    def passes(self, x: InputFacts, call: OperationCall) -> tuple[OperationPasses, InputFacts]:
        check_input("GroupedLinear", x, self.in_features)
        if math.prod(call.extra[0].shape) != self.num_groups:
            raise ValueError(
                f"GroupedLinear has {self.num_groups} groups, but got split sizes {list(call.extra[0].shape)}; give "
                "one number per group"
            )
        if call.extra[0].dtype.is_floating_point:
            raise ValueError(f"split sizes are {call.extra[0].dtype}; give integers")
        rows = math.prod(x.shape[:-1])
        if self._scale_bias and math.prod(call.extra[1].shape) != rows:
            raise ValueError(
                f"GroupedLinear takes one scale of the bias per row, but got {list(call.extra[1].shape)} for {rows} "
                "rows"
            )
        first = getattr(self, self.parameter_names[0])
        bias = (
            getattr(self, "bias" if self.single_grouped_bias else "bias0")
            if self.has_bias
            else None
        )
        dtype = call.autocast or first.dtype
        grad_bias = call.saves and bias is not None and bias.requires_grad
        if call.traced:
            return traced_passes(self, x, call)
        bias_dtype = None if bias is None else bias.dtype
        of_bias = {
            "needs_grad_bias": grad_bias and not self._scale_bias,
            "grad_bias_dtype": bias_dtype,
        }
        spec = self._spec(call, x, dtype, of_bias)
        result = GroupedPasses(
            spec,
            x,
            self.parameter_names,
            self._weight_parameters,
            bias_dtype,
            self._scale_bias,
            grad_bias,
            accept_buffers(x, self.out_features, call.options, dtype),
        )
        return result, InputFacts((*x.shape[:-1], self.out_features), dtype, x.device)

    def _spec(
        self, call: OperationCall, x: InputFacts, dtype: torch.dtype, of_bias: dict[str, Any]
    ) -> GroupedSpec:
        """Return the settings for a call kind."""
        weights, first = self._weights(), getattr(self, self.parameter_names[0])
        needs = (call.saves and call.grad_input, call.saves and first.requires_grad)
        enabled = call.state.enabled
        forward = self.forward_quantizers() if enabled or call.state.calibrating else []
        backward = self._quantizers["backward"]
        plain = not isinstance(group_memory(first), QuantizedTensorStorage)
        store = self.wgrad_store if self.wgrad_store.delay_wgrad_compute() else None
        groups: list[LinearSpec] = []
        unquantized: list[LinearSpec] = []
        for i, weight in enumerate(weights):
            given = (*forward[2 * i : 2 * i + 2], backward[i]) if forward else None
            gradient = WeightGradient((weight,), self._accumulate_into_main_grad, False, store)
            product = (TensorParallel(), gradient, needs)
            spec = linear_spec(call, dtype, given, *product, given is None and plain, first.dtype)
            groups.append(replace_fields(spec, **of_bias))
            if given is not None and enabled:
                spec = linear_spec(call, dtype, None, *product, plain, first.dtype)
                unquantized.append(
                    replace_fields(spec, **of_bias, backward_operands=groups[-1].backward_operands)
                )
        quantizers, features = GroupedQuantizers(), self._features(call, groups[0])
        if enabled and forward and not call.traced:
            quantizers = GroupedQuantizers.merged(forward[::2], forward[1::2], backward)
            features += (SINGLE_QUANTIZERS,) * (quantizers.input is None)
        extents = (self.out_features, self.in_features)
        request = GroupedRequest(
            features,
            requested=environment_request(),
            plain=not x.subclass,
            has_rows=True,
            width=self.in_features,
            dtype=dtype,
            device=x.device,
            extents=extents,
            weight_device=first.device,
            compute_dtype=dtype,
            weight_read_dtype=None if forward and enabled else first.dtype,
            multiple=quantizers.multiple,
        )
        return GroupedSpec(
            groups=tuple(groups),
            unquantized=tuple(unquantized),
            layer=groups[0],
            extents=extents,
            stacked_weight=self.single_grouped_weight,
            stacked_bias=self.single_grouped_bias,
            together=not call.traced and TABLE.name_of(request) == TOGETHER,
            request=None if call.traced else request,
            quantizers=quantizers,
            needs_grad=call.saves
            and any([call.grad_input, *[p.requires_grad for p in self.parameters()]]),
            scale_update=None,
        )

    def _features(self, call: OperationCall, group: LinearSpec) -> tuple[str, ...]:
        """Return the features in every call of a kind that one launch per step does not support."""
        stacked = self.single_grouped_weight or self.single_grouped_bias
        kinds = {type(group_memory(getattr(self, name))) for name in self.parameter_names}
        found = {
            DELAYED_WEIGHT_GRADIENTS: self.wgrad_store.delay_wgrad_compute(),
            QUANTIZED_PARAMETERS: any(issubclass(kind, QuantizedTensorStorage) for kind in kinds),
            OTHER_PARAMETERS: not kinds <= {torch.nn.Parameter, *[torch.Tensor] * stacked},
            CALIBRATION: call.state.calibrating and not call.state.enabled,
            OTHER_BACKWARD: group.backward_operands != "quantized",
            SCALED_BIAS: self._scale_bias,
        }
        return tuple([feature for feature, used in found.items() if used])

    def need_backward_dw(self) -> bool:
        """Return whether weight gradients are delayed until `backward_dw`."""
        return self.wgrad_store.delay_wgrad_compute()

    def backward_dw(self) -> None:
        """Compute the weight gradients that one backward pass delayed, the oldest first."""
        if not self.need_backward_dw() or not getattr(self, self.parameter_names[0]).requires_grad:
            return
        for i in range(self.num_groups):
            if i and not len(self.wgrad_store):
                break
            self.wgrad_store.pop()
        self._trigger_wgrad_accumulation_and_reduce_hooks()

    def _trigger_wgrad_accumulation_and_reduce_hooks(self) -> None:
        for hook in self._wgrad_hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], object]) -> None:
        """Call a function without arguments whenever `backward_dw` has finished."""
        self._wgrad_hooks.append(hook)


def _load_other_form(op: Any, state_dict: MutableMapping[str, Any], prefix: str, *_: Any) -> None:
    single = {"weight": op.single_grouped_weight} | (
        {"bias": op.single_grouped_bias} if op.has_bias else {}
    )
    convert_state(state_dict, prefix, single, op.num_groups)
