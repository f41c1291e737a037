"""Linear: y = x @ weight.T + bias under any recipe, alone or as one shard of a tensor-parallel layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..device import is_meta
from ..distributed.tensor_parallel import TensorParallel
from ..functions.linear import LinearSpec, linear
from ..functions.weight_gradient import WeightGradientStore
from ..quantization.autocast import current
from ..tensor.quantized_tensor import QuantizedTensorStorage
from .linear_base import LinearParameters, OverlapOptions, check_parallel_mode
from .parameters import InitMethod


class Linear(LinearParameters):
    """y [.., out_features] = x [.., in_features] @ weight.T + bias

    in_features, out_features   of the whole layer; a shard holds one of them divided by tp_size
    bias                  learn an additive bias
    return_bias           do not add the bias, return (y, bias)
    init_method           fills the weight; default N(0, 0.023)
    get_rng_state_tracker, rng_tracker_name   the random state under which the weight is initialised
    parameters_split      names (or {name: rows}) of several parameters that make up the weight
    params_dtype          default torch.get_default_dtype()
    parallel_mode         None, "column" (out_features sharded) or "row" (in_features sharded)
    tp_group, tp_size     the tensor-parallel group, or its size until set_tensor_parallel_group
    sequence_parallel     activations outside of the layer are sharded along their first dimension
    fuse_wgrad_accumulation   accumulate the weight gradient into weight.main_grad
    delay_wgrad_compute   compute the weight gradient in backward_dw() instead of the backward pass
    save_original_input   keep the unquantized input for the backward; not with delayed scaling
    device                "cuda" means the GPU where there is one, else the CPU; "meta" defers initialisation
    ub_*, symmetric_ar_type   communication overlap: accepted; the collectives run unfused, with the same result
    """

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
        parallel_mode: str | None = None,
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
        super().__init__(name)
        check_parallel_mode(parallel_mode, tp_size, in_features, out_features)
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self.parallel_mode = parallel_mode
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self.tp_size = tp_size
        if tp_group is not None:
            self.set_tensor_parallel_group(tp_group)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.return_bias = return_bias
        self.save_original_input = save_original_input
        self.symmetric_ar_type = symmetric_ar_type
        self.overlap = OverlapOptions(
            ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad, ub_name
        )
        self.ub_name = ub_name
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        if delay_wgrad_compute:
            self.wgrad_store = WeightGradientStore()
        self.create_parameters(bias, parameters_split, params_dtype, device, init_method)
        self.reset_parameters(defer_init=is_meta(device))

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """y [.., out_features], or (y, bias) with return_bias.

        is_first_microbatch   True quantizes the weight and keeps it, False reuses it, None neither
        fp8_output, fp8_grad  return y, or the input's gradient, as a quantized tensor
        Raises ValueError or TypeError for an input whose last dimension, dtype or device does not fit.
        """
        weight, bias = self.weight_tensor(), self.bias_tensor()
        results = (bool(fp8_output), bool(fp8_grad))
        spec = self.remembered(
            inp,
            tuple(self._parameters.values()),
            (is_first_microbatch, *results, self.return_bias),
            lambda: self._spec(inp, weight, bias, is_first_microbatch, *results),
        )
        if is_first_microbatch is not None:
            spec = self.with_cached_weight("weight", weight, spec, is_first_microbatch)
        bias = None if bias is None else bias.to(spec.dtype)
        y = linear(inp, weight, self._fused_bias(bias), spec)
        if self.return_bias:
            return y, bias
        if self._adds_bias_late() and bias is not None:
            y = y + bias
        return y

    def _adds_bias_late(self) -> bool:
        """A row-parallel shard holds a partial sum; the bias belongs to the reduced one."""
        return self.parallel_mode == "row" and self.tp_size > 1

    def _fused_bias(self, bias: Tensor | None) -> Tensor | None:
        return None if self.return_bias or self._adds_bias_late() else bias

    def _spec(
        self,
        inp: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        is_first_microbatch: bool | None,
        fp8_output: bool,
        fp8_grad: bool,
    ) -> LinearSpec:
        self.check_input(inp, self.in_features)
        state = current()
        dtype = inp.dtype if isinstance(inp, QuantizedTensorStorage) else self.computing_dtype(inp)
        quantizers = self.quantizable_products(state, inp, ((self.in_features, self.out_features),))[0]
        self.check_results(quantizers, fp8_output, fp8_grad)
        grad = torch.is_grad_enabled()
        needs_grad_input, needs_grad_weight = grad and inp.requires_grad, grad and weight.requires_grad
        fused_bias = self._fused_bias(bias)
        needs_grad_bias = grad and fused_bias is not None and fused_bias.requires_grad
        return LinearSpec(
            dtype=dtype,
            input=quantizers.input,
            weight=quantizers.weight,
            grad_output=quantizers.grad_output,
            output=quantizers.output if fp8_output else None,
            grad_input=quantizers.grad_input if fp8_grad else None,
            accumulation=self.accumulation(state),
            parallel=TensorParallel(self.parallel_mode, self.tp_group, self.tp_size, self.sequence_parallel),
            weight_gradient=self.weight_gradient("weight", is_first_microbatch),
            backward=self.backward_mode(state),
            keep_input=self.keeps_input(state),
            needs_grad_input=needs_grad_input,
            needs_grad_weight=needs_grad_weight,
            needs_grad_bias=needs_grad_bias,
            scale_update=self._scale_update(state, needs_grad_input or needs_grad_weight or needs_grad_bias),
        )
