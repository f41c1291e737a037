"""Linear: y = x @ weight.T + bias under any recipe, alone or as one shard of a tensor-parallel layer.

This file contains the module: its arguments, parameters and settings. The computation is in `functions/linear.py`, the
next file to read. A module call has three steps:

1. `Linear.forward` reads the parameters and converts the call switches.
2. `ProductsModule.spec` (`linear_base.py`) returns the `LinearSpec`, all settings that the computation reads, for the
   `Call` (`specs.py`): configuration, recipe, tensor metadata, switches, autograd and torch.autocast state. For a new
   call, `Linear.build` computes the spec.
3. `linear` (`functions/linear.py`) computes y, as a node in autograd's graph.

**From a recipe to a cast.** `autocast` stores its recipe in the state of the thread. `ProductsModule.spec` reads the
state, and `Numerics.of_call` (`numerics.py`) returns the layer's quantizers as a `ModuleRecipe`; the first call under a
recipe creates them and their scaling states. `Linear.build` stores them in the `LinearSpec`. The functions in
`functions/linear.py` pass each matrix and its quantizer to a function in `functions/linear_operands.py`:

| matrix | quantizer | passed by | to |
| --- | --- | --- | --- |
| x | `spec.input_quantizer` | `quantize_input` | `cast_input` |
| weight | `spec.weight_quantizer` | `quantize_weight` | `weight_operands` |
| dy | `spec.grad_output_quantizer` | `prepare_gradient` | `cast_gradient` |

These functions end in `product_operands`, which calls the quantizer's method `operands` and so launches the kernel
(`primitives/quantize`), unless the matrix is quantized or cached already, or multiplied unquantized. In three cases
the quantizer's `cast` describes the quantization to a kernel instead: the kernel that computes x (`input_cast`), the
kernel that computes or sums dy (`gradient_cast`), and the cast of an operand whose columns are recomputed
(`cast_rows`).

**Settings.** The layer settings are a frozen record, `layer._config`. `@accepts` (`arguments.py`) checks and
converts the constructor's arguments, `_configure_from` (`linear_base.py`) creates the record from them, and
`@configure_class` (`config.py`) defines `layer.return_bias`, `layer.in_features` and so on as properties over it.
Assigning one replaces the record, so that the next call has another spec; the sizes cannot be assigned.

**Monkey-patching.** Other libraries assign functions to `_Linear` and `general_gemm` in this file. `_replaced.names` is
the set of names that a program has assigned. It is usually empty, and `_compute_output` calls `linear`; otherwise it
calls `_linear_by_name`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..compat.argument_orders import declare_call
from ..compat.by_name import LinearByName as _Linear
from ..compat.by_name import call_by_name, check_unquantized, general_gemm
from ..compat.replaceable import watched
from ..constants import ParallelMode
from ..distributed_weight import whole_weights
from ..functions import exported
from ..functions.linear import LINEAR_FUNCTIONS, linear
from ..functions.linear_spec import LinearSpec
from ..primitives.gemm.cublaslt_library import get_workspace
from ..runtime.checks import PLAIN_TENSORS, is_distributed
from ..runtime.device import is_meta
from ..runtime.tracing import export_mode
from .arguments import NO_SWITCHES, CallSwitches, accepts, call_switches, warn_unless_reduced
from .config import configure_class
from .exported import export_products
from .linear_base import SIZES, LinearConfig, ProductsModule, check_ranks
from .local_shards import output_of_shards
from .parameters import InitMethod, create_parameters, mark_parameters, weight_and_bias
from .specs import (
    Call,
    check_call,
    product_spec,
    quantizers_of_call,
    rows_of_shard,
    scale_update,
    with_compiled_passes,
)

# `Linear`, and names from NVIDIA's Transformer Engine that other libraries import or monkey-patch in this file.
__all__ = ["Linear", "_Linear", "general_gemm", "get_workspace"]
_replaced = watched(__name__, {"_Linear": _Linear, "general_gemm": general_gemm})


@configure_class(LinearConfig, fixed=SIZES)
class Linear(ProductsModule):
    """Compute y [.., out_features] = x [.., in_features] @ weight.T + bias, quantized by the `autocast` recipe.

    Args:
        in_features: Size of the last dimension of x, over all ranks if the layer is tensor-parallel.
        out_features: Size of the last dimension of y, over all ranks if the layer is tensor-parallel.
        sequence_parallel: Activations before a column-parallel layer, and after a row-parallel one, are sharded along
            their first dimension.
        fuse_wgrad_accumulation: Accumulate the weight gradient into `weight.main_grad`.
        tp_group: Tensor-parallel process group.
        tp_size: Tensor-parallel group size, if `set_tensor_parallel_group` is called later.
        get_rng_state_tracker: Function that returns the tracker of random states, one of which initializes the weight.
        rng_tracker_name: Name of that random state in the tracker.
        init_method: `init_method(weight)` fills the weight; by default from a normal distribution with standard
            deviation 0.023.
        bias: Add a learned bias [out_features].
        return_bias: Return (y, bias) and leave adding the bias to the caller.
        params_dtype: Parameter dtype, by default `torch.get_default_dtype()`.
        parallel_mode: None, "column" (out_features is sharded) or "row" (in_features is sharded).
        parameters_split: Names, or {name: rows}, for several parameters that make up the weight.
        device: Parameter device. "cuda" falls back to the CPU if there is no GPU; "meta" defers initialization.
        ub_overlap_ag: With sequence parallelism, multiply this rank's rows while copy engines gather rows
            from other ranks: input rows in a column-parallel layer, and output gradient rows in a
            row-parallel one. It requires `initialize_ub` and GPUs that read each other's memory.
        ub_overlap_rs: Reduce-scatter a row-parallel layer's output while its product runs, under the same
            conditions as ub_overlap_ag.
        ub_overlap_rs_dgrad: Reduce-scatter a column-parallel layer's input gradient while its product runs,
            under the same conditions.
        ub_bulk_dgrad: Equivalent to ub_overlap_ag in a column-parallel layer; no effect in a row-parallel
            one.
        ub_bulk_wgrad: Equivalent to ub_overlap_rs_dgrad.
        ub_name: Accepted for compatibility; no effect.
        delay_wgrad_compute: Compute the weight gradient in `backward_dw()` instead of the backward pass.
        symmetric_ar_type: "one_shot" or "two_shot": sum the output of a row-parallel layer over ranks through
            symmetric memory.
        save_original_input: Save the unquantized input for the backward pass; not with delayed scaling.
        name: Layer name in reports and debugging output.

    Attributes:
        in_features: Columns of this rank's weight; `te.ops.Linear` has the size over all ranks instead.
        out_features: Rows of this rank's weight.
        weight: Parameter [out_features, in_features], or several parameters with `parameters_split`.
        bias: Parameter [out_features]; an empty tensor without a bias.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A size is not positive, or a sharded size is not divisible by tp_size.
    """

    _config: LinearConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    # Types for the properties that `@configure_class` defines.
    in_features: int
    out_features: int
    parallel_mode: str | None
    get_rng_state_tracker: Callable[..., Any] | None
    rng_tracker_name: str | None
    weight_names: tuple[str, ...]
    bias_names: tuple[str, ...]
    weight: Tensor
    bias: Tensor

    @accepts()
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: ParallelMode | None = None,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        device: torch.device | str | int = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        arguments = dict(locals())  # nothing else is assigned yet
        super().__init__(name)
        tp_size = check_ranks(parallel_mode, tp_group, tp_size, in_features, out_features)
        warn_unless_reduced(
            symmetric_ar_type, parallel_mode == "row" and tp_size > 1 and not sequence_parallel
        )
        self._configure_from(
            arguments,
            tp_size,
            sharded=parallel_mode is not None,
            in_features=in_features // tp_size if parallel_mode == "row" else in_features,
            out_features=out_features // tp_size if parallel_mode == "column" else out_features,
            # Names for the tensors that `forward` reads in addition to the input, for checks and messages.
            _tensors=("weight", "bias"),
        )
        self.ub_name = ub_name
        create_parameters(self, parameters_split, params_dtype, device, init_method)
        self.reset_parameters(defer_init=is_meta(device))

    def reset_parameters(self, defer_init: bool = False) -> None:
        super().reset_parameters(defer_init=defer_init)
        if not defer_init:
            mark_parameters(self)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Compute y [.., out_features]; with return_bias, return (y, bias) and do not add the bias.

        Args:
            inp: Input [.., in_features].
            is_first_microbatch: True quantizes the weight into a cache, False reads the cache, and None
                quantizes the weight for this call only. An optimizer step or another write to the weight does
                not invalidate the cache: pass True in the first call after it. False quantizes the
                current weight into the cache if the cache is empty (a new layer, a loaded state dict, another
                recipe) or lacks the column-wise codes (the first training call after an evaluation). True
                overwrites the codes of the previous step in memory; it allocates new memory if a backward pass
                that has not run yet needs them, or while torch.compile is tracing. A weight that is a quantized
                tensor is not cached. With fuse_wgrad_accumulation, the first gradient after True overwrites main_grad.
            fp8_output: Return y as a quantized tensor.
            fp8_grad: Return the input gradient as a quantized tensor.

        Raises:
            TypeError: The input dtype is unsupported.
            ValueError: The last input dimension or the input device does not match the weight, or
                save_original_input is set under delayed scaling.
            RuntimeError: A parameter is on the meta device.
            NotImplementedError: The DTensor placements are unsupported.
        """
        switches = NO_SWITCHES
        if not (is_first_microbatch is None and fp8_output is False and fp8_grad is False):
            switches = call_switches(is_first_microbatch, fp8_output, fp8_grad)
        if export_mode.onnx:
            return self.onnx_forward(inp, switches.fp8_output, switches.fp8_grad)
        # The parameters, or several parameters joined (`parameters_split`).
        weight, bias = weight_and_bias(self)
        is_special = type(weight) not in PLAIN_TENSORS or type(inp) is not Tensor
        if is_special or getattr(weight, "is_distributed_weight", False):
            return self._output_of_special_tensors(switches, inp, weight, bias)
        return self._compute_output(switches, inp, weight, bias)

    if TYPE_CHECKING:  # type checkers see the parameters of `forward` in calls of the layer

        @declare_call(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def _output_of_special_tensors(
        self, switches: CallSwitches, inp: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Any:
        """Call `_compute_output` for an input or weight that is a DTensor, a quantized tensor, or a shard to gather."""
        if is_distributed(weight) or is_distributed(inp):
            return output_of_shards(self, switches, inp, weight, bias)
        if not getattr(weight, "is_distributed_weight", False):
            return self._compute_output(switches, inp, weight, bias)
        fused = self._config.fuse_wgrad_accumulation
        with whole_weights(((weight,),), fused, self.wgrad_store) as (full_weight,):
            return self._compute_output(switches, inp, full_weight, bias)

    def _compute_output(
        self, switches: CallSwitches, inp: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Any:
        """Compute `forward` for tensors that are complete on this rank, unquantized or quantized.

        Args:
            switches: Call switches.
            inp: Input [.., in_features].
            weight: Weight [out_features, in_features] on this rank.
            bias: Bias [out_features], or None.
        """
        config = self._config
        is_first_microbatch = switches.is_first_microbatch
        spec = self.spec(inp, (weight, bias), switches)
        if is_first_microbatch is not None:
            if is_first_microbatch:
                self.begin_first_microbatch()  # the next gradient overwrites main_grad
            # The weight is quantized once for all microbatches in a step.
            spec = self.with_cached_weight("weight", weight, spec, is_first_microbatch)
        if bias is not None and bias.dtype != spec.dtype:
            # Autograd casts db back. The product casts the weight, and returns dw in `spec.grad_weight_dtype`.
            bias = bias.to(spec.dtype)
        adds_bias_late = config.adds_bias_late
        product = _linear_by_name if _replaced.names else linear
        y = product(inp, weight, None if adds_bias_late else bias, spec)
        if config.return_bias:
            return y, bias
        # A row-parallel layer adds the bias once, to the sum over ranks.
        return y + bias if bias is not None and adds_bias_late else y

    @staticmethod
    def build(call: Call) -> LinearSpec:
        """Compute the settings for all calls that equal `call`.

        Args:
            call: Layer configuration and recipe, call switches, and tensor metadata: `weight` and
                `bias` below are `Facts`, such as shape and dtype, not tensors.

        Raises:
            TypeError: The input dtype is unsupported.
            ValueError: The tensors do not fit the layer or each other.
        """
        config: LinearConfig = call.config
        weight, bias = call.parameters
        assert weight is not None
        in_features = weight.shape[1]  # the local size, if the parameters are DTensors
        check_call(call, in_features)
        parallel = config.parallel()
        (quantizers,) = quantizers_of_call(call, ((in_features, weight.shape[0]),), parallel)
        # The bias that `_compute_output` passes to the product.
        product_bias = None if config.adds_bias_late else bias
        needs = (
            call.records and call.input.requires_grad,
            call.records and weight.requires_grad,
            call.records and product_bias is not None and product_bias.requires_grad,
        )
        spec = product_spec(
            call,
            quantizers=quantizers,
            parallel=parallel,
            needs=needs,
            update=scale_update(call, any(needs)),
            weight=weight,
            results=(call.switches.fp8_output, call.switches.fp8_grad),
            local_rows=rows_of_shard(call, parallel),
        )
        return with_compiled_passes(call, LINEAR_FUNCTIONS, spec)

    def _input_features(self, tensors: Sequence[Tensor | None]) -> int:
        """Return the number of columns of the weight, or of its shard if the parameters are DTensors."""
        return self.in_features if not tensors or tensors[0] is None else tensors[0].shape[1]

    def onnx_forward(
        self, inp: Tensor, fp8_output: bool | None = False, fp8_grad: bool | None = False
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Compute `forward` in operators that ONNX can express; `forward` calls it within `te.onnx_export`.

        Raises:
            NotImplementedError: The layer is sharded, or ONNX has no operator for the recipe's format.
        """
        weight, bias = weight_and_bias(self)
        shapes = ((self.in_features, weight.shape[0]),)
        switches = call_switches(None, fp8_output, fp8_grad)
        dtype, (quantizers,) = export_products(self, inp, (weight, bias), switches, shapes)
        # The bias is never added late: export rejects sharded layers.
        product_bias = None if self._config.return_bias else bias
        y = exported.linear(inp.to(dtype), weight, product_bias, quantizers)
        if self._config.return_bias:
            return y, None if bias is None else bias.to(dtype)
        return y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"


def _linear_by_name(inp: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
    """Compute `linear` unquantized, with functions that a program has assigned here; see `compat/by_name.py`."""
    check_unquantized(spec, _replaced.names, "Linear")
    records = torch.is_grad_enabled()
    return call_by_name(_Linear, records, weight, inp, bias, spec, sys.modules[__name__])
