"""LayerNormMLP: y = act(norm(x) @ fc1_weight.T + fc1_bias) @ fc2_weight.T + fc2_bias.

Its forward and backward pass are the plain functions in `functions/norm_mlp.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...common.checks import switch
from ...common.numbers import to_bool
from ..compat.argument_orders import declare_call
from ..compat.by_name import NormByName
from ..compat.replaceable import watched
from ..constants import ActivationName, NormalizationName
from ..distributed.tensor_parallel import (
    TensorParallel,
    set_tensor_model_parallel_attributes,
    tensor_parallel_size,
)
from ..distributed_weight import whole_weights
from ..functions import exported
from ..functions.linear_spec import LinearSpec, replace_fields
from ..functions.norm_mlp import (
    NORM_MLP_FUNCTIONS,
    NormMLPSpec,
    norm_mlp,
)
from ..functions.normalization import Norm
from ..primitives.activation import ACTIVATIONS, ActivationParams
from ..runtime.device import canonical_device, is_meta
from ..runtime.tracing import export_mode
from . import _common
from ._common import apply_normalization
from .arguments import FLAG_TYPES, NO_SWITCHES, CallSwitches, accepts, warn_unless_reduced
from .config import configure_class
from .exported import export_products
from .layernorm_linear import residual_unsupported_reason
from .linear_base import ProductsConfig, ProductsModule
from .normalization import mark_norm_parameters, register_norm_parameters
from .parameters import InitMethod, ParameterInit, default_init_method, get_parameter_values
from .specs import (
    Call,
    Facts,
    check_call,
    product_spec,
    quantizers_of_call,
    scale_update,
    with_compiled_passes,
)

# Beside the layer, original names that other libraries import from here.
__all__ = ["LayerNormMLP", "apply_normalization"]
# Names in this file that programs monkey-patch; see `linear.py`.
_replaced = watched(__name__, {"apply_normalization": apply_normalization})


@dataclass(frozen=True, eq=False)
class NormMLPConfig(ProductsConfig):
    hidden_size: int = 0
    ffn_shard: int = 0
    eps: float = 1e-5
    normalization: str = "LayerNorm"
    zero_centered_gamma: bool = False
    activation: str = "gelu"
    activation_params: Any = None
    checkpoint: bool = False
    cache_quantized_activation_input: bool = False
    set_parallel_mode: bool = False

    def input_features(self) -> int:
        return self.hidden_size

    @property
    def is_sharded(self) -> bool:
        return self.set_parallel_mode and self.tp_size > 1

    def parallel(self, mode: str) -> TensorParallel:
        """Return the boundary for fc1 ("column") or fc2 ("row")."""
        return self.boundary(mode if self.set_parallel_mode else None)

    @property
    def adds_bias_late(self) -> bool:
        """Whether the fc2 bias is returned to the caller, or added after the sum over ranks."""
        return self.return_bias or (self.set_parallel_mode and self.tp_size > 1)


_TENSORS_WITHOUT_BIAS = ("fc1_weight", "fc2_weight", "layer_norm_weight", "layer_norm_bias")


def _check_rows(config: NormMLPConfig, rows: int) -> None:
    """Raise ValueError if the activation was changed from a gated one to another, or back."""
    needed = config.ffn_shard * (2 if ACTIVATIONS[config.activation].gated else 1)
    if rows != needed:
        raise ValueError(
            f"activation={config.activation!r} takes {needed} features from fc1, whose weight has {rows} rows, made "
            f"for another one; make another {config._kind} with activation={config.activation!r}"
        )


@configure_class(NormMLPConfig, fixed=frozenset({"hidden_size", "ffn_shard"}))
class LayerNormMLP(ProductsModule):
    """Compute y [.., hidden_size] = act(norm(x) @ fc1_weight.T + fc1_bias) @ fc2_weight.T + fc2_bias.

    Args:
        hidden_size: Last dimension of x and y.
        ffn_hidden_size: Activation output size. Gated activations double the rows of fc1_weight.
        return_bias: Return (y, fc2_bias) and leave adding the bias to the caller.
        init_method: Fills fc1_weight; by default with N(0, 0.023).
        output_layer_init_method: Fills fc2_weight; by default with N(0, 0.023).
        bias: Add learned biases.
        activation: gelu, geglu, glu, qgelu, qgeglu, relu, reglu, srelu, sreglu, silu, swiglu or clamped_swiglu.
        activation_params: For clamped_swiglu `{"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}`.
        set_parallel_mode: Shard fc1 by columns and fc2 by rows over tp_group.
        checkpoint: Save x, the parameters and, under delayed scaling, scale copies, and recompute
            the norm, fc1 and the activation in the backward pass.
        cache_quantized_activation_input: Save fc1's output for the backward pass as E4M3 codes in
            blocks of 1 x 128, half its bytes. y is unchanged; the gradients of fc1's output and
            fc2_weight are computed from the rounded values. Has an effect under delayed and current
            scaling, where `te.explain` shows mlp_input=quantized.
        seq_length: No effect, since kernels need no warm-up.
        micro_batch_size: No effect, like seq_length.

    The other arguments are as in `LayerNormLinear`.
    """

    _config: NormMLPConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    num_products = 2
    product_names = ("fc1", "fc2")
    activation: str
    activation_params: Any
    checkpoint: bool
    cache_quantized_activation_input: bool
    ffn_shard: int
    hidden_size: int
    set_parallel_mode: bool
    eps: float
    normalization: str
    zero_centered_gamma: bool
    layer_norm_weight: Tensor
    layer_norm_bias: Tensor | None
    fc1_weight: Tensor
    fc1_bias: Tensor
    fc2_weight: Tensor
    fc2_bias: Tensor

    @accepts()
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: NormalizationName = "LayerNorm",
        activation: ActivationName = "gelu",
        activation_params: dict[str, float] | None = None,
        output_layer_init_method: InitMethod | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | int = "cuda",
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
        cache_quantized_activation_input: bool = False,
    ) -> None:
        arguments = dict(locals())  # nothing else is assigned yet
        super().__init__(name)
        tp_size = tensor_parallel_size(tp_group, tp_size)
        warn_unless_reduced(
            symmetric_ar_type, set_parallel_mode and tp_size > 1 and not sequence_parallel
        )
        shards = tp_size if set_parallel_mode else 1
        if ffn_hidden_size % shards:
            raise ValueError(
                f"tp_size={tp_size} does not divide ffn_hidden_size={ffn_hidden_size}; pad it"
            )
        self._configure_from(
            arguments,
            tp_size,
            sharded=set_parallel_mode,
            ffn_shard=ffn_hidden_size // shards,
            activation_params=ActivationParams.from_mapping(activation_params),
            _tensors=(
                "fc1_weight",
                "fc1_bias",
                "fc2_weight",
                "fc2_bias",
                "layer_norm_weight",
                "layer_norm_bias",
            ),
            _weights=(("fc1_weight",), ("fc2_weight",)),
        )
        dtype, on = params_dtype or torch.get_default_dtype(), canonical_device(device)
        register_norm_parameters(self, hidden_size, normalization, zero_centered_gamma, dtype, on)
        self._create_weights(
            init_method,
            output_layer_init_method or default_init_method,
            get_rng_state_tracker,
            dtype,
            on,
        )
        self.reset_parameters(defer_init=is_meta(device))

    def _create_weights(
        self, fc1_init, fc2_init, rng_tracker, dtype: torch.dtype, device: torch.device
    ) -> None:
        """fc1_weight [F or 2F, H], fc2_weight [H, F] and their biases."""
        fc1_rows = self.ffn_shard * (2 if ACTIVATIONS[self.activation].gated else 1)
        shapes = {"fc1": (fc1_rows, self.hidden_size), "fc2": (self.hidden_size, self.ffn_shard)}
        inits = {"fc1": fc1_init or default_init_method, "fc2": fc2_init}
        for index, (layer, (rows, columns)) in enumerate(shapes.items()):
            weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=dtype, device=device))
            init = ParameterInit(inits[layer], rng_tracker, fp8_meta_index=3 * index + 1)
            self.register_parameter(f"{layer}_weight", weight, init)
            if self.use_bias:
                bias = torch.nn.Parameter(torch.empty(rows, dtype=dtype, device=device))
                self.register_parameter(f"{layer}_bias", bias, ParameterInit(torch.nn.init.zeros_))
            else:
                setattr(self, f"{layer}_bias", torch.empty(0, dtype=dtype, device=device))

    def reset_parameters(self, defer_init: bool = False) -> None:
        super().reset_parameters(defer_init=defer_init)
        if defer_init:
            return
        mark_norm_parameters(self)
        sharded = self.set_parallel_mode and self.tp_size > 1
        set_tensor_model_parallel_attributes(self.fc1_weight, sharded, 0, 1)
        set_tensor_model_parallel_attributes(self.fc2_weight, sharded, 1, 1)
        if self.use_bias:
            set_tensor_model_parallel_attributes(self.fc1_bias, sharded, 0, 1)
            self.fc2_bias.sequence_parallel = self.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor | None, ...]:
        """Return y, or `(y[, fc2_bias][, norm(x)])` with return_bias or return_layernorm_output.

        Args:
            inp: Input [.., hidden_size].
            is_first_microbatch: See `Linear.forward`.
        """
        return self.forward_with_residual(inp, is_first_microbatch, uses_residual=False)[0]

    if TYPE_CHECKING:

        @declare_call(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    _layer_forward = forward

    def forward_with_residual(
        self, inp: Tensor, is_first_microbatch: bool | None = None, uses_residual: bool = True
    ) -> tuple[Any, Any]:
        """Return the outputs of `forward`, and the residual inp; see `LayerNormLinear.forward_with_residual`."""
        if type(is_first_microbatch) not in FLAG_TYPES:
            is_first_microbatch = to_bool("is_first_microbatch", is_first_microbatch)
        if export_mode.onnx:
            return self.onnx_forward(inp), inp
        tensors = self._read_tensors()
        fc1_weight, fc1_bias, fc2_weight, *others = tensors
        is_distributed_weight = getattr(fc1_weight, "is_distributed_weight", False)
        if not (is_distributed_weight or getattr(fc2_weight, "is_distributed_weight", False)):
            return self._compute_outputs(inp, is_first_microbatch, tensors, uses_residual)
        fused, groups = self._config.fuse_wgrad_accumulation, ((fc1_weight,), (fc2_weight,))
        with whole_weights(groups, fused, self.wgrad_store) as (full_fc1, full_fc2):
            full_tensors = (full_fc1, fc1_bias, full_fc2, *others)
            return self._compute_outputs(inp, is_first_microbatch, full_tensors, uses_residual)

    def _read_tensors(self) -> tuple[Any, ...]:
        """Return the tensors that `config._tensors` names; None for absent biases."""
        if self._config.use_bias:
            return (*get_parameter_values(self, self._config._tensors),)
        fc1_weight, fc2_weight, *norm = get_parameter_values(self, _TENSORS_WITHOUT_BIAS)
        return (fc1_weight, None, fc2_weight, None, *norm)

    def _compute_outputs(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None,
        tensors: tuple[Any, ...],
        uses_residual: bool,
    ) -> tuple[Any, Any]:
        """Compute `forward_with_residual` for tensors that are complete on this rank.

        Args:
            inp: Input [.., hidden_size].
            is_first_microbatch: See `Linear.forward`.
            tensors: (fc1_weight, fc1_bias, fc2_weight, fc2_bias, gamma, beta).
            uses_residual: The caller uses the returned input as the residual.
        """
        config = self._config
        fc1_weight, fc1_bias, fc2_weight, fc2_bias, gamma, beta = tensors
        spec: NormMLPSpec = self.spec(inp, tensors, CallSwitches(is_first_microbatch))
        if is_first_microbatch is not None:
            if is_first_microbatch:
                self.begin_first_microbatch()  # the next gradients overwrite main_grad
            fc1 = self.with_cached_weight("fc1_weight", fc1_weight, spec.fc1, is_first_microbatch)
            fc2 = self.with_cached_weight("fc2_weight", fc2_weight, spec.fc2, is_first_microbatch)
            spec = replace_fields(
                spec, fc1=fc1, fc2=fc2, cached_tensors=fc1.cached_tensors + fc2.cached_tensors
            )
        is_patched = bool(_replaced.names or _common._replaced.names)
        if is_patched:
            # The norm is this module's apply_normalization, which another library has replaced.
            spec = spec.with_patched_norm(NormByName(spec.norm, sys.modules[__name__]))
        dtype = spec.fc1.dtype
        if fc1_bias is not None and fc2_bias is not None:
            # Autograd casts their gradients back. The products cast the weights.
            fc1_bias, fc2_bias = fc1_bias.to(dtype), fc2_bias.to(dtype)
        product_bias = None if config.adds_bias_late else fc2_bias
        x = inp if inp.dtype == dtype else inp.to(dtype)
        returns_residual = uses_residual and not residual_unsupported_reason(
            spec.fc1, x, inp, spec.returns_norm_output, is_patched
        )
        inputs = (x, gamma, beta, fc1_weight, fc1_bias, fc2_weight, product_bias)
        y, h, residual = norm_mlp(inputs, spec, returns_residual)
        if product_bias is None and fc2_bias is not None and not config.return_bias:
            y = y + fc2_bias
        if config.return_bias or config.return_layernorm_output:
            y = self.pack_outputs(y, fc2_bias, h)
        return y, inp if residual is None else residual

    @staticmethod
    def build(call: Call) -> NormMLPSpec:
        """Compute the settings for all calls that equal `call`; see `Linear.build`."""
        config: NormMLPConfig = call.config
        check_call(call, config.hidden_size)
        switch("checkpoint", config.checkpoint)
        switch("cache_quantized_activation_input", config.cache_quantized_activation_input)
        fc1_weight, fc1_bias, fc2_weight, fc2_bias, *_ = call.parameters
        assert fc1_weight is not None and fc2_weight is not None
        _check_rows(config, fc1_weight.shape[0])
        shapes = ((config.hidden_size, fc1_weight.shape[0]), (config.ffn_shard, config.hidden_size))
        products = quantizers_of_call(call, shapes, config.parallel("column"))
        needs_grad = call.needs_grad
        checkpoint = config.checkpoint and needs_grad
        update = scale_update(call, needs_grad)

        def spec(number: int, mode: str, weight: Facts, bias: Facts | None) -> LinearSpec:
            needs = (
                needs_grad,
                needs_grad and weight.requires_grad,
                needs_grad and bias is not None and bias.requires_grad,
            )
            parallel = config.parallel(mode)
            result = product_spec(
                call,
                number=number,
                quantizers=products[number],
                parallel=parallel,
                needs=needs,
                update=update,
                weight=weight,
                local_rows=call.rows,
            )
            return replace_fields(result, may_run_again=True) if checkpoint else result

        product_bias = None if config.adds_bias_late else fc2_bias
        result = NormMLPSpec(  # torch 2.11 traces this constructor with keywords only
            norm=Norm(config.normalization, config.eps, config.zero_centered_gamma),
            fc1=spec(0, mode="column", weight=fc1_weight, bias=fc1_bias),
            fc2=spec(1, mode="row", weight=fc2_weight, bias=product_bias),
            activation=config.activation,
            activation_params=ActivationParams.of(config.activation_params),
            width=config.ffn_shard,
            returns_norm_output=bool(config.return_layernorm_output),
            caches_quantized_input=bool(config.cache_quantized_activation_input),
            checkpoint=checkpoint,
            scale_update=update,
            needs_grad=needs_grad,
        ).with_modes()
        return result if checkpoint else with_compiled_passes(call, NORM_MLP_FUNCTIONS, result)

    def onnx_forward(self, inp: Tensor) -> Tensor | tuple[Any, ...]:
        """Compute `forward` in operators that ONNX can express; see `Linear.onnx_forward`."""
        config = self._config
        tensors = self._read_tensors()
        fc1_weight, fc1_bias, fc2_weight, fc2_bias, gamma, beta = tensors
        _check_rows(config, fc1_weight.shape[0])
        shapes = ((config.hidden_size, fc1_weight.shape[0]), (config.ffn_shard, config.hidden_size))
        dtype, (fc1, fc2) = export_products(self, inp, tensors, NO_SWITCHES, shapes)
        norm = Norm(config.normalization, config.eps, config.zero_centered_gamma)
        normalized = exported.normalize(inp.to(dtype), gamma, beta, norm)
        hidden = exported.linear(normalized, fc1_weight, fc1_bias, fc1)
        hidden = exported.activate(
            config.activation, hidden, ActivationParams.of(config.activation_params)
        )
        y = exported.linear(hidden, fc2_weight, None if config.return_bias else fc2_bias, fc2)
        return self.pack_outputs(y, None if fc2_bias is None else fc2_bias.to(dtype), normalized)
