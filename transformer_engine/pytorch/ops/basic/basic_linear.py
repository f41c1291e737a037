"""BasicLinear: y [.., out] = x [.., in] @ weight [out, in].T, without bias."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....common.numbers import to_bool, to_int
from ...compat.functional_linear import functional_backward, functional_forward
from ...distributed.collectives import world_size
from ...distributed.tensor_parallel import Overlap, TensorParallel, warn_of_unused_overlap
from ...distributed_weight import is_distributed_weight
from ...functions.linear_spec import with_gathering
from ...functions.main_grad import check_main_grad as check_buffer
from ...functions.precision import estimates
from ...functions.weight_gradient import WeightGradient
from ...quantization import QuantizerRole
from ...quantization.model_init import current_model_init
from ...runtime.device import canonical_device, is_meta
from ...tensor.initial_values import keep_initial_values
from ...tensor.quantized_tensor import QuantizedTensorStorage
from ..pass_operation import PassOperation
from ..passes.contract import InputFacts, OperationCall, OperationPasses
from ..passes.linear import LinearPasses, fitting, linear_spec

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def parameter_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """Return the parameter dtype, by default torch's.

    Raises:
        ValueError: Products do not support the dtype.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype} is unsupported; use float32, float16 or bfloat16")
    return dtype


class BasicLinear(PassOperation):
    """y = x @ weight.T over the last dimension of x, under any recipe.

    Args:
        in_features: Last input dimension, over all ranks.
        out_features: Last output dimension, over all ranks.
        device: Weight device, by default the GPU if there is one; "meta" allocates the weight in
            the first forward pass.
        dtype: Weight dtype, by default torch's default dtype.
        tensor_parallel_mode: None, "column" (out_features are sharded) or "row" (in_features are sharded).
        tensor_parallel_group: The tensor-parallel process group, by default the world group.
        sequence_parallel: Activations outside the sharded layer pair are sharded along their first dimension.
        rng_state_tracker_function: Function that returns the tracker under whose state the weight is initialized.
        accumulate_into_main_grad: Accumulate the weight gradient into `weight.main_grad`.
        userbuffers_options: Overlap gathers and sums in sequence parallelism with products, as the
            `ub_*` flags of `Linear` do. The options themselves have no effect.

    Raises:
        ValueError: An unsupported dtype or mode, or a size that the group does not divide.
    """

    _shown = {"in_features": "in_features", "out_features": "out_features"}
    parameter_names = ("weight",)
    weight: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.in_features = to_int("in_features", in_features, 1)
        self.out_features = to_int("out_features", out_features, 1)
        dtype = parameter_dtype(dtype)
        parallel = create_tensor_parallel(
            tensor_parallel_mode,
            tensor_parallel_group,
            to_bool("sequence_parallel", sequence_parallel),
            self.in_features,
            self.out_features,
        )
        self.tensor_parallel_mode, self.tensor_parallel_group = parallel.mode, parallel.group
        self.tensor_parallel_size, self.sequence_parallel = parallel.size, parallel.sequence
        if userbuffers_options is not None and parallel.sequence:
            parallel = replace(parallel, overlap=Overlap(True, True))
        elif userbuffers_options is not None:
            warn_of_unused_overlap("userbuffers_options")
        self._parallel = parallel
        self.local_in_features = self.in_features // (
            parallel.size if parallel.mode == "row" else 1
        )
        self.local_out_features = self.out_features // (
            parallel.size if parallel.mode == "column" else 1
        )
        self._rng_state_tracker_function = rng_state_tracker_function
        self._accumulate_into_main_grad = to_bool(
            "accumulate_into_main_grad", accumulate_into_main_grad
        )
        self._userbuffers_options = userbuffers_options
        model_init = current_model_init()
        self._with_quantized_weight = model_init.enabled
        self._model_init_recipe = model_init.recipe
        self._preserves_initial_values = model_init.preserve_high_precision_init_val
        target_device = torch.device("meta") if is_meta(device) else canonical_device(device)
        weight = torch.empty(
            self.local_out_features, self.local_in_features, dtype=dtype, device="meta"
        )
        self.register_parameter("weight", torch.nn.Parameter(weight))
        self._device = None if target_device.type == "meta" else target_device
        if self._device is not None:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the weight with uniform random values.

        A weight on the meta device is allocated first. Inside `quantized_model_init` the weight is quantized.
        """
        before = self.weight
        target_device = (
            (self._device or canonical_device("cuda")) if before.is_meta else before.device
        )
        values = torch.empty(before.shape, dtype=before.dtype, device=target_device)
        tracker = self._rng_state_tracker_function
        with torch.no_grad(), nullcontext() if tracker is None else tracker().fork():
            torch.nn.init.kaiming_uniform_(values, a=math.sqrt(5))
        result, initial = values, None
        if self._with_quantized_weight:
            self.reset_recipe_state(recipe=self._model_init_recipe)
            result = self.quantize_parameter(values, 1)
            initial = values if self._preserves_initial_values else None
        replace_parameter(self, "weight", result, initial)

    def num_quantizers(self, mode: str) -> int:
        return 2 if mode == "forward" else 1

    def get_quantizer_roles(self, mode: str) -> list[QuantizerRole | None]:
        tensors = ("input", "weight") if mode == "forward" else ("grad_output",)
        return [QuantizerRole("linear", tensor, "") for tensor in tensors]

    def _connect_parameters(self) -> None:
        self.connect_parameter(self.weight, 1)

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Check that the weight has a gradient buffer, if its gradient is accumulated.

        Raises:
            RuntimeError: `weight.main_grad` is missing.
        """
        if self._accumulate_into_main_grad and requires_grad and self.weight.requires_grad:
            check_main_grad("BasicLinear", self.weight)

    def distributed_weight_unsupported_reason(self) -> None:
        return None

    def call_facts(self, extra_inputs: tuple[Tensor, ...]) -> Hashable:
        # Prepared passes refer to the weight whose main_grad they write; another weight needs other passes.
        return id(self.weight) if self._accumulate_into_main_grad else None

    def passes(self, x: InputFacts, call: OperationCall) -> tuple[OperationPasses, InputFacts]:
        weight = self.weight
        check_input("BasicLinear", x, self.local_in_features)
        dtype = call.autocast or weight.dtype
        needs = (call.saves and call.grad_input, call.saves and weight.requires_grad)
        parallel = self._parallel
        leading = list(x.shape[:-1])
        if parallel.sequence and parallel.size > 1 and leading:
            if parallel.mode == "column":
                leading[0] *= parallel.size
            elif parallel.mode == "row":
                leading[0] //= parallel.size
        shape = (*leading, self.local_out_features)
        quantizers = None
        if call.state.enabled or call.state.calibrating:
            forward, backward = self.forward_quantizers(), self._quantizers["backward"]
            rows = math.prod(x.shape[:-1])
            rows *= parallel.size if parallel.gathers_input else 1
            extents = (rows, self.local_in_features, self.local_out_features)
            given = (*forward, *backward)
            estimated = estimates(x.device, call.traced, isinstance(weight, QuantizedTensorStorage))
            recipe = call.state.recipe if estimated else None
            kind = type(self).__name__
            if given and (
                not call.state.enabled or fitting(kind, given, *extents, call.traced, recipe)
            ):
                quantizers = given
        quantized = isinstance(weight, QuantizedTensorStorage)
        gradient = (
            WeightGradient((weight,), True) if self._accumulate_into_main_grad else WeightGradient()
        )
        plain = quantizers is None and not quantized
        spec = linear_spec(call, dtype, quantizers, parallel, gradient, needs, plain, weight.dtype)
        if spec.communicates and parallel.sequence:
            rows = math.prod(x.shape[:-1])
            spec = with_gathering(spec, rows // parallel.size if parallel.mode == "row" else rows)
        return LinearPasses(spec, x.dtype), InputFacts(shape, dtype, x.device)

    _functional_forward = staticmethod(functional_forward)
    _functional_backward = staticmethod(functional_backward)


def replace_parameter(op: Any, name: str, values: Tensor, initial: Tensor | None) -> None:
    """Replace a parameter by one with other values, its attributes and, unless they are None, its initial values."""
    before = op.get_parameter(name)
    parameter = torch.nn.Parameter(values, requires_grad=before.requires_grad)
    for key, value in vars(before).items():
        if not hasattr(parameter, key):
            setattr(parameter, key, value)
    if initial is not None:
        keep_initial_values(parameter, initial)
    op.register_parameter(name, parameter)


def create_tensor_parallel(
    mode: str | None, group: Any, sequence: bool, in_features: int, out_features: int
) -> TensorParallel:
    """Check the arguments and create a `TensorParallel`; for one rank an unsharded one, without a mode and a group.

    Raises:
        ValueError: The mode is unknown, or the group does not divide the sharded size.
    """
    if mode not in (None, "column", "row"):
        raise ValueError(
            f'tensor_parallel_mode={mode!r} is unknown; choose None, "column" or "row"'
        )
    size = 1 if mode is None else world_size(group)
    if size == 1:
        return TensorParallel()
    name, sharded = (
        ("in_features", in_features) if mode == "row" else ("out_features", out_features)
    )
    if sharded % size:
        raise ValueError(
            f"{name}={sharded} is not divisible by the {size} tensor-parallel ranks; pad it"
        )
    group = torch.distributed.group.WORLD if group is None else group
    return TensorParallel(mode, group, size, sequence)


def check_main_grad(kind: str, weight: Any) -> None:
    """Raise an error unless a weight has a buffer that its gradient can be accumulated into."""
    if hasattr(weight, "__fsdp_param__") or is_distributed_weight(weight):
        return
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None:
        check_buffer(weight, main_grad)
        return
    raise RuntimeError(
        f"{kind} accumulates its weight gradient into main_grad, but the weight has none; set weight.main_grad to a "
        "tensor of the weight's shape (float32 recommended), or accumulate_into_main_grad=False"
    )


def check_input(kind: str, x: InputFacts, features: int) -> None:
    """Raise ValueError or TypeError unless a linear product can read an input."""
    if not x.shape or x.shape[-1] != features:
        raise ValueError(
            f"{kind} takes [.., {features}], the input is {list(x.shape)}; its last dimension must be the input "
            "features"
        )
    if not x.dtype.is_floating_point:
        raise TypeError(f"{kind} takes floating-point inputs, not {x.dtype}; convert the input")
