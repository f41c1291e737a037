"""LayerNormLinear: y = norm(x) @ weight.T + bias."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..device import canonical_device, is_meta
from ..distributed.tensor_parallel import TensorParallel
from ..functions.linear import LinearSpec
from ..functions.norm_linear import NormLinearSpec, norm_linear
from ..functions.normalization import Norm
from ..functions.weight_gradient import WeightGradientStore
from ..quantization.autocast import current
from .linear_base import LinearParameters, OverlapOptions, check_parallel_mode
from .norm_parameters import check_normalization, mark_norm_parameters, register_norm_parameters
from .parameters import InitMethod


class LayerNormLinear(LinearParameters):
    """y [.., out_features] = norm(x [.., in_features]) @ weight.T + bias

    eps, normalization    "LayerNorm" or "RMSNorm" and its epsilon
    zero_centered_gamma   gamma starts at zero and 1 + gamma multiplies
    return_layernorm_output           also return norm(x)
    return_layernorm_output_gathered  return it gathered over the sequence-parallel group
    Other parameters as in Linear; parallel_mode is None or "column".
    """

    layer_norm_weight: Tensor
    layer_norm_bias: Tensor | None

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
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
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
        # Subclasses of other libraries choose the tracker's name by setting it before they call this.
        rng_tracker_name = self.__dict__.get("rng_tracker_name")
        super().__init__(name)
        if parallel_mode == "row":
            raise NotImplementedError(
                'parallel_mode="row" would normalize a shard of the features; use LayerNorm followed by Linear'
            )
        check_parallel_mode(parallel_mode, tp_size, in_features, out_features)
        check_normalization(normalization)
        self.in_features = in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.parallel_mode, self.tp_size = parallel_mode, tp_size
        self.sequence_parallel = sequence_parallel and tp_size > 1
        if tp_group is not None:
            self.set_tensor_parallel_group(tp_group)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.symmetric_ar_type = symmetric_ar_type
        self.overlap = OverlapOptions(
            ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad, ub_name
        )
        self.ub_name = ub_name
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        if delay_wgrad_compute:
            self.wgrad_store = WeightGradientStore()
        dtype = params_dtype or torch.get_default_dtype()
        register_norm_parameters(
            self, in_features, normalization, zero_centered_gamma, dtype, canonical_device(device)
        )
        self.create_parameters(bias, parameters_split, params_dtype, device, init_method)
        self.reset_parameters(defer_init=is_meta(device))

    def reset_parameters(self, defer_init: bool = False) -> None:
        super().reset_parameters(defer_init=defer_init)
        mark_norm_parameters(self)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """y, or `(y[, bias][, norm(x)])` as return_bias and return_layernorm_output say.

        Arguments and errors as in Linear.forward.
        """
        if fp8_grad:
            raise ValueError(
                "fp8_grad=True: the input's gradient leaves the norm unquantized; use Linear, or fp8_grad=False"
            )
        weight, bias = self.weight_tensor(), self.bias_tensor()
        gamma, beta = self.layer_norm_weight, self.layer_norm_bias
        spec = self.remembered(
            inp,
            tuple(self._parameters.values()),
            (is_first_microbatch, bool(fp8_output), self.return_bias, self.return_layernorm_output),
            lambda: self._spec(inp, weight, bias, is_first_microbatch, bool(fp8_output)),
        )
        if is_first_microbatch is not None:
            linear = self.with_cached_weight("weight", weight, spec.linear, is_first_microbatch)
            spec = replace(spec, linear=linear)
        dtype = spec.linear.dtype
        bias = None if bias is None else bias.to(dtype)
        y, norm_output = norm_linear(
            inp.to(dtype),
            gamma,
            beta,
            weight,
            None if self.return_bias else bias,
            spec,
        )
        outputs: tuple[Any, ...] = (y,)
        if self.return_bias:
            outputs += (bias,)
        if self.return_layernorm_output:
            outputs += (self.returned_norm_output(norm_output),)
        return outputs if len(outputs) > 1 else y

    def _spec(
        self,
        inp: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        is_first_microbatch: bool | None,
        fp8_output: bool,
    ) -> NormLinearSpec:
        self.check_input(inp, self.in_features)
        state = current()
        quantizers = self.quantizable_products(state, inp, ((self.in_features, self.out_features),))[0]
        self.check_results(quantizers, fp8_output, False)
        grad = torch.is_grad_enabled()
        before = (inp, self.layer_norm_weight, self.layer_norm_bias)
        needs_grad_input = grad and any(tensor is not None and tensor.requires_grad for tensor in before)
        needs_grad_weight = grad and weight.requires_grad
        needs_grad_bias = grad and bias is not None and bias.requires_grad and not self.return_bias
        needs_grad = needs_grad_input or needs_grad_weight or needs_grad_bias
        linear = LinearSpec(
            dtype=self.computing_dtype(inp),
            input=quantizers.input,
            weight=quantizers.weight,
            grad_output=quantizers.grad_output,
            output=quantizers.output if fp8_output else None,
            accumulation=self.accumulation(state),
            parallel=TensorParallel(self.parallel_mode, self.tp_group, self.tp_size, self.sequence_parallel),
            weight_gradient=self.weight_gradient("weight", is_first_microbatch),
            backward=self.backward_mode(state),
            needs_grad_input=needs_grad_input,
            needs_grad_weight=needs_grad_weight,
            needs_grad_bias=needs_grad_bias,
            scale_update=self._scale_update(state, needs_grad),
        )
        return NormLinearSpec(
            Norm(self.normalization, self.eps, self.zero_centered_gamma),
            linear,
            self.return_layernorm_output,
            needs_grad,
        )
