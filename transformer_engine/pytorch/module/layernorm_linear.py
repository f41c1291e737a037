"""LayerNormLinear: y = norm(x) @ weight.T + bias.

The file contains the module, as `linear.py` does for `Linear`. `functions/norm_linear.py` contains the computation, and
explains when the kernel of the norm also quantizes norm(x).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..compat.argument_orders import declare_call
from ..compat.by_name import LayerNormLinearByName as _LayerNormLinear  # other libraries patch it
from ..compat.by_name import (
    NormByName,
    call_by_name,
    check_unquantized,
    general_gemm,
)
from ..compat.replaceable import watched
from ..constants import NormalizationName, ParallelMode
from ..distributed_weight import whole_weights
from ..functions import exported
from ..functions.linear_spec import LinearSpec, replace_fields
from ..functions.norm_linear import (
    NORM_LINEAR_FUNCTIONS,
    NormLinearSpec,
    norm_linear,
)
from ..functions.normalization import Norm
from ..runtime.checks import PLAIN_TENSORS, is_distributed
from ..runtime.device import canonical_device, is_meta
from ..runtime.tracing import export_mode
from ..runtime.warn_once import warn_once
from . import _common
from ._common import apply_normalization
from .arguments import NO_SWITCHES, CallSwitches, accepts, call_switches, warn_unless_reduced
from .config import configure_class, early
from .exported import export_products
from .linear_base import SIZES, LinearConfig, ProductsModule, Tensors, check_ranks
from .local_shards import output_of_shards
from .normalization import mark_norm_parameters, register_norm_parameters
from .parameters import (
    InitMethod,
    create_parameters,
    get_parameter_values,
    mark_parameters,
    weight_and_bias,
)
from .specs import (
    Call,
    check_call,
    product_spec,
    quantizers_of_call,
    scale_update,
    with_compiled_passes,
)

# Besides the layer: names from NVIDIA's Transformer Engine that other libraries import or monkey-patch here.
__all__ = ["LayerNormLinear", "_LayerNormLinear", "apply_normalization", "general_gemm"]
# Names in this file that programs monkey-patch; see `linear.py`.
_replaced = watched(
    __name__,
    {
        "_LayerNormLinear": _LayerNormLinear,
        "general_gemm": general_gemm,
        "apply_normalization": apply_normalization,
    },
)


_NORM_PARAMETERS = ("layer_norm_weight", "layer_norm_bias")


@dataclass(frozen=True, eq=False)
class NormLinearConfig(LinearConfig):
    eps: float = 1e-5
    normalization: str = "LayerNorm"
    zero_centered_gamma: bool = False


@configure_class(NormLinearConfig, fixed=SIZES)
class LayerNormLinear(ProductsModule):
    """Compute y [.., out_features] = norm(x [.., in_features]) @ weight.T + bias.

    Args:
        eps: Added to the variance before the square root.
        normalization: "LayerNorm" or "RMSNorm".
        zero_centered_gamma: Initialize gamma to zero and multiply by 1 + gamma.
        return_layernorm_output: Return (y, norm(x)).
        return_layernorm_output_gathered: Gather the returned norm(x) over the sequence-parallel group.
        parallel_mode: None or "column" (out_features is sharded).
        symmetric_ar_type: Has no effect, because no output is summed over ranks. A warning says so.

    The other arguments are as in `Linear`.
    """

    _config: NormLinearConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    in_features: int
    out_features: int
    parallel_mode: str | None
    get_rng_state_tracker: Callable[..., Any] | None
    rng_tracker_name: str | None
    weight_names: tuple[str, ...]
    bias_names: tuple[str, ...]
    eps: float
    normalization: str
    zero_centered_gamma: bool
    weight: Tensor
    bias: Tensor
    layer_norm_weight: Tensor
    layer_norm_bias: Tensor | None

    @accepts()
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: NormalizationName = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: ParallelMode | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | int = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        arguments = dict(locals())  # nothing else is assigned yet
        # Subclasses in other libraries choose the tracker's name by setting it before they call this.
        rng_tracker_name = early(self, "rng_tracker_name")
        super().__init__(name)
        if parallel_mode == "row":
            raise NotImplementedError(
                'parallel_mode="row" would normalize a shard of the features; use LayerNorm followed by Linear'
            )
        tp_size = check_ranks(parallel_mode, tp_group, tp_size, in_features, out_features)
        warn_unless_reduced(symmetric_ar_type, False)
        self._configure_from(
            arguments,
            tp_size,
            sharded=parallel_mode is not None,
            rng_tracker_name=rng_tracker_name,
            out_features=out_features // tp_size if parallel_mode == "column" else out_features,
            _tensors=("weight", "bias", "layer_norm_weight", "layer_norm_bias"),
        )
        self.ub_name = ub_name
        dtype = params_dtype or torch.get_default_dtype()
        register_norm_parameters(
            self, in_features, normalization, zero_centered_gamma, dtype, canonical_device(device)
        )
        create_parameters(self, parameters_split, params_dtype, device, init_method)
        self.reset_parameters(defer_init=is_meta(device))

    def reset_parameters(self, defer_init: bool = False) -> None:
        super().reset_parameters(defer_init=defer_init)
        if not defer_init:
            mark_parameters(self)
        mark_norm_parameters(self)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Tensor | tuple[Tensor | None, ...]:
        """Compute y; return `(y[, bias][, norm(x)])` with return_bias or return_layernorm_output.

        The arguments are as in `Linear.forward`.
        """
        return self.forward_with_residual(
            inp, is_first_microbatch, fp8_output, fp8_grad, uses_residual=False
        )[0]

    if TYPE_CHECKING:

        @declare_call(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    _layer_forward = forward

    def forward_with_residual(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
        uses_residual: bool = True,
    ) -> tuple[Any, Any]:
        """Return the outputs of `forward`, and inp, which the caller uses as the residual.

        The norm's backward kernel adds the gradient of the returned inp to the input gradient, so that autograd
        launches no kernel for the sum, unless `residual_unsupported_reason` has a reason. A caller that calls this
        method instead of the module checks `is_unintercepted` (`compat/replaceable.py`).
        """
        switches = NO_SWITCHES
        if not (is_first_microbatch is None and fp8_output is False and fp8_grad is False):
            switches = call_switches(is_first_microbatch, fp8_output, fp8_grad)
            _warn_of_fp8_grad(switches.fp8_grad)
        if export_mode.onnx:
            return self.onnx_forward(inp, switches.fp8_output), inp
        weight, bias = weight_and_bias(self)
        gamma, beta = get_parameter_values(self, _NORM_PARAMETERS)
        plain = type(weight) in PLAIN_TENSORS and type(inp) is Tensor
        if not plain and (is_distributed(weight) or is_distributed(inp)):
            norm = {"layer_norm_weight": gamma, "layer_norm_bias": beta}
            return output_of_shards(self, switches, inp, weight, bias, norm=norm), inp
        if not getattr(weight, "is_distributed_weight", False):
            return self._compute_outputs(switches, inp, (weight, bias, gamma, beta), uses_residual)
        fused = self._config.fuse_wgrad_accumulation
        with whole_weights(((weight,),), fused, self.wgrad_store) as (full_weight,):
            return self._compute_outputs(
                switches, inp, (full_weight, bias, gamma, beta), uses_residual
            )

    def _compute_output(self, switches: CallSwitches, inp: Tensor, *tensors: Tensor | None) -> Any:
        """Outputs of `forward` for local tensors, as `output_of_shards` calls it."""
        return self._compute_outputs(switches, inp, tensors, uses_residual=False)[0]

    def _compute_outputs(
        self, switches: CallSwitches, inp: Tensor, tensors: Tensors, uses_residual: bool
    ) -> tuple[Any, Any]:
        """Compute `forward_with_residual` for tensors that are complete on this rank.

        Args:
            switches: Call switches.
            inp: Input [.., in_features].
            tensors: (weight, bias, gamma, beta).
            uses_residual: The caller uses the returned input as the residual.
        """
        config = self._config
        is_first_microbatch = switches.is_first_microbatch
        weight, bias, gamma, beta = tensors
        assert weight is not None and gamma is not None
        spec: NormLinearSpec = self.spec(inp, tensors, switches)
        if is_first_microbatch is not None:
            if is_first_microbatch:
                self.begin_first_microbatch()  # the next gradient overwrites main_grad
            linear = self.with_cached_weight("weight", weight, spec.linear, is_first_microbatch)
            spec = replace_fields(spec, linear=linear, cached_tensors=linear.cached_tensors)
        dtype = spec.linear.dtype
        if bias is not None and bias.dtype != dtype:
            # Autograd casts db back. The product casts the weight.
            bias = bias.to(dtype)
        product_bias = None if config.return_bias else bias
        x = inp if inp.dtype == dtype else inp.to(dtype)
        is_patched = bool(_replaced.names or _common._replaced.names)
        returns_residual = uses_residual and not residual_unsupported_reason(
            spec.linear, x, inp, spec.returns_norm_output, is_patched
        )
        if is_patched:
            y, h, residual = _run_by_name(x, gamma, beta, weight, product_bias, spec)
        else:
            y, h, residual = norm_linear(
                x, gamma, beta, weight, product_bias, spec, returns_residual
            )
        if config.return_bias or config.return_layernorm_output:
            y = self.pack_outputs(y, bias, h)
        return y, inp if residual is None else residual

    @staticmethod
    def build(call: Call) -> NormLinearSpec:
        """Compute the settings for all calls that equal `call`; see `Linear.build`."""
        config: NormLinearConfig = call.config
        check_call(call, config.in_features)
        weight, bias, *of_norm = call.parameters
        assert weight is not None
        parallel = config.parallel()
        (quantizers,) = quantizers_of_call(call, ((config.in_features, weight.shape[0]),), parallel)
        before = (call.input, *of_norm)
        needs = (
            call.records and any(facts is not None and facts.requires_grad for facts in before),
            call.records and weight.requires_grad,
            call.records and bias is not None and bias.requires_grad and not config.return_bias,
        )
        update = scale_update(call, any(needs))
        linear = product_spec(
            call,
            quantizers=quantizers,
            parallel=parallel,
            needs=needs,
            update=update,
            weight=weight,
            results=(
                call.switches.fp8_output,
                False,
            ),  # the norm's gradient is returned in high precision
            local_rows=call.rows,
        )
        spec = NormLinearSpec(  # torch 2.11 traces this constructor with keywords only
            norm=Norm(config.normalization, config.eps, config.zero_centered_gamma),
            linear=linear,
            returns_norm_output=bool(config.return_layernorm_output),
            scale_update=update,
            needs_grad=any(needs),
        ).with_modes()
        return with_compiled_passes(call, NORM_LINEAR_FUNCTIONS, spec)

    def onnx_forward(
        self, inp: Tensor, fp8_output: bool | None = False
    ) -> Tensor | tuple[Any, ...]:
        """Compute `forward` in operators that ONNX can express; see `Linear.onnx_forward`."""
        config = self._config
        weight, bias = weight_and_bias(self)
        gamma, beta = get_parameter_values(self, _NORM_PARAMETERS)
        shapes = ((self.in_features, weight.shape[0]),)
        switches = call_switches(None, fp8_output, False)
        dtype, (quantizers,) = export_products(
            self, inp, (weight, bias, gamma, beta), switches, shapes
        )
        norm = Norm(config.normalization, config.eps, config.zero_centered_gamma)
        normalized = exported.normalize(inp.to(dtype), gamma, beta, norm)
        y = exported.linear(normalized, weight, None if config.return_bias else bias, quantizers)
        return self.pack_outputs(y, None if bias is None else bias.to(dtype), normalized)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"


def residual_unsupported_reason(
    linear: LinearSpec,
    norm_input: Tensor,
    layer_input: Tensor,
    returns_norm_output: bool,
    is_patched: bool,
) -> str | None:
    """Reason why the norm's backward kernel cannot add the gradient of the residual; None if it can.

    Args:
        linear: The linear layer that reads norm(x).
        norm_input: x, the layer's input in the dtype of the layer.
        layer_input: Input of the layer, which is the residual.
        returns_norm_output: The layer returns norm(x), which the caller may use as the residual instead.
        is_patched: A program has monkey-patched functions of the layer (`compat/by_name.py`).
    """
    if returns_norm_output:
        return "the layer returns norm(x), whose gradient the node receives instead"
    if norm_input is not layer_input:
        return "the layer converts its input to another dtype"
    if type(layer_input) is not Tensor:
        return f"the input is a {type(layer_input).__name__}, and autograd wraps subclasses that are returned"
    if not (linear.needs_grad_input and layer_input.requires_grad):
        return "the input needs no gradient"
    if linear.traced:
        return "a compiler traces the call, and fuses the sum itself"
    return "a program has replaced functions of the layer" if is_patched else None


def _warn_of_fp8_grad(fp8_grad: Any) -> None:
    """Warn once that the input gradient is not quantized."""
    if fp8_grad:
        warn_once(
            "fp8_grad of a norm",
            f"fp8_grad={fp8_grad!r} has no effect on LayerNormLinear: the norm's gradient is returned in high "
            "precision. Leave it False",
        )


def _run_by_name(
    inp: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    spec: NormLinearSpec,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute `norm_linear` with the functions that a program has assigned in this file.

    If only `apply_normalization` is replaced, the product may still be quantized.
    """
    file = sys.modules[__name__]
    names = _replaced.names | _common._replaced.names
    if names == {"apply_normalization"}:
        return norm_linear(
            inp, gamma, beta, weight, bias, spec.with_patched_norm(NormByName(spec.norm, file))
        )
    check_unquantized(spec.linear, names, "LayerNormLinear")
    records = torch.is_grad_enabled()
    y = call_by_name(_LayerNormLinear, records, inp, gamma, beta, weight, bias, spec, file)
    return (*y, None) if spec.returns_norm_output else (y, None, None)
