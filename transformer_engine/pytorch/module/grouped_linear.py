"""GroupedLinear: y_i = x_i @ weight_i.T + bias_i, the experts of a mixture-of-experts layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..device import canonical_device, is_meta
from ..distributed.tensor_parallel import TensorParallel, set_tensor_model_parallel_attributes
from ..functions.caller_buffers import CallerBuffers, checked
from ..functions.grouped_linear import GroupedLinearSpec, grouped_linear
from ..functions.grouped_together import grouped_linear_together
from ..functions.linear import LinearSpec
from ..functions.scale_update import ScaleUpdate
from ..functions.weight_gradient import WeightGradientStore
from ..quantization.autocast import AutocastState, current
from .grouped_path import TogetherPath
from .linear_base import QuantizedProductsModule, check_parallel_mode, product_refusal
from .parameters import InitMethod, ParameterInit, default_init_method
from .recipe_state import UNQUANTIZED, ProductQuantizers


class GroupedLinear(QuantizedProductsModule):
    """y [sum m_i, out_features]: rows of x in num_gemms consecutive groups, each with a weight and bias of its own.

    num_gemms             number of groups; parameters weight0 .. and bias0 ..
    parallel_mode, tp_size, tp_group   decide the shapes of the parameters; communication is the caller's
    save_original_input   keep the unquantized input for the backward; not with delayed scaling
    single_grouped_weight, single_grouped_bias, use_grouped_tensor   one parameter for all groups: not implemented
    Other parameters as in Linear. Every group is quantized as a Linear would, bit for bit. On a GPU all groups are
    quantized and multiplied together where `grouped_path` allows it; NVTE_USE_CUTLASS_GROUPED_GEMM=0 multiplies
    group by group, which gives the bits of a loop of Linear layers.
    """

    quantized_as = "grouped_linear"

    def __init__(
        self,
        num_gemms: int,
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
        device: torch.device | str | int = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        super().__init__(name)
        check_parallel_mode(parallel_mode, tp_size, in_features, out_features)
        if num_gemms < 1:
            raise ValueError(f"num_gemms={num_gemms} < 1; give the number of groups")
        if ub_overlap_rs or ub_overlap_ag:
            raise ValueError(
                "GroupedLinear has no communication to overlap; leave ub_overlap_rs and ub_overlap_ag False"
            )
        if bias and not return_bias and parallel_mode == "row" and tp_size > 1:
            raise ValueError(
                f"bias=True with tp_size={tp_size} and parallel_mode='row' would be added {tp_size} times; "
                "set return_bias=True or bias=False"
            )
        if single_grouped_weight or single_grouped_bias or use_grouped_tensor:
            raise NotImplementedError(
                "one parameter for all groups is not implemented; leave single_grouped_* False"
            )
        self.num_gemms = self.num_products = num_gemms
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self.parallel_mode, self.tp_size = parallel_mode, tp_size
        self.sequence_parallel = sequence_parallel and tp_size > 1
        if tp_group is not None:
            self.set_tensor_parallel_group(tp_group)
        self.fuse_wgrad_accumulation, self.save_original_input = fuse_wgrad_accumulation, save_original_input
        self.use_bias, self.return_bias = bias, return_bias
        self.ub_name = ub_name
        if delay_wgrad_compute:
            self.wgrad_store = WeightGradientStore()
        options = {"dtype": params_dtype or torch.get_default_dtype(), "device": canonical_device(device)}
        self._create_parameters(
            init_method or default_init_method, get_rng_state_tracker, rng_tracker_name, options
        )
        self._together = TogetherPath(self)
        self.reset_parameters(defer_init=is_meta(device))

    def _create_parameters(self, init_method, rng_tracker, rng_tracker_name, options: dict[str, Any]) -> None:
        """weight0 [N, K], bias0 [N], weight1, bias1, ..: optimizers go by position (without biases: empty tensors)."""
        for i in range(self.num_gemms):
            weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, **options))
            init = ParameterInit(init_method, rng_tracker, rng_tracker_name, fp8_meta_index=3 * i + 1)
            self.register_parameter(f"weight{i}", weight, init)
            if self.use_bias:
                bias = torch.nn.Parameter(torch.empty(self.out_features, **options))
                self.register_parameter(f"bias{i}", bias, ParameterInit(torch.nn.init.zeros_))
            else:
                setattr(self, f"bias{i}", torch.empty(0, **options))

    def reset_parameters(self, defer_init: bool = False) -> None:
        super().reset_parameters(defer_init=defer_init)
        if defer_init:
            return
        sharded = self.tp_size > 1 and self.parallel_mode is not None
        for i in range(self.num_gemms):
            axis = 1 if self.parallel_mode == "row" else 0
            set_tensor_model_parallel_attributes(getattr(self, f"weight{i}"), sharded, axis, 1)
            if self.use_bias and self.parallel_mode == "column":
                set_tensor_model_parallel_attributes(getattr(self, f"bias{i}"), sharded, 0, 1)

    def forward(
        self,
        inp: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """y [.., out_features], or (y, [bias of each group]) with return_bias.

        m_splits   rows of each group, in order; zeros are allowed, the sum is the number of rows. A tensor on a
                   GPU stays there where the groups go together: nobody checks its sum, and rows past it get
                   undefined results. Where the groups go one by one the host reads it, and waits
        out        buffer of the output's shape and dtype: the output is written there, and what is returned shares it
        dgrad_out  the same for the input's gradient, which the backward pass writes there
        """
        buffers = None if out is None and dgrad_out is None else self._caller_buffers(inp, out, dgrad_out)
        flat = inp.reshape(-1, self.in_features) if inp.shape[-1:] == (self.in_features,) else inp
        if not torch.compiler.is_compiling():
            self.check_repetition(current())
            planned = self._together.plan(flat, m_splits, is_first_microbatch)
            if planned is not None:
                weights, biases, groups, spec = planned
                spec = spec if buffers is None else spec._replace(buffers=buffers)
                y = grouped_linear_together(flat, weights, None if self.return_bias else biases, groups, spec)
                y = y.view(*inp.shape[:-1], self.out_features)
                return (y, biases or []) if self.return_bias else y
        return self._one_by_one(inp, m_splits, is_first_microbatch, buffers)

    def _caller_buffers(self, inp: Tensor, out: Tensor | None, dgrad_out: Tensor | None) -> CallerBuffers:
        """The caller's buffers as matrices; ValueError where one does not fit its result."""
        if torch.compiler.is_compiling():
            raise NotImplementedError("out and dgrad_out need eager mode; leave them None in compiled code")
        self.check_input(inp, self.in_features)
        made = torch.empty(0, dtype=self.computing_dtype(inp), device=inp.device)
        shape = torch.Size((*inp.shape[:-1], self.out_features))
        return CallerBuffers(
            checked("out", out, shape, made), checked("dgrad_out", dgrad_out, inp.shape, inp)
        )

    def _one_by_one(
        self,
        inp: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None,
        buffers: CallerBuffers | None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        self.check_input(inp, self.in_features)
        rows = tuple(m_splits.tolist()) if isinstance(m_splits, Tensor) else tuple(m_splits)
        flat = inp.reshape(-1, self.in_features)
        if len(rows) != self.num_gemms or sum(rows) != flat.shape[0] or min(rows) < 0:
            raise ValueError(
                f"m_splits={list(rows)} must be {self.num_gemms} numbers >= 0 that add up to the {flat.shape[0]} rows"
            )
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        spec = self._spec(inp, rows, is_first_microbatch)
        if buffers is not None:
            spec = replace(spec, buffers=buffers)
        biases = self._biases(spec.groups[0].dtype)
        y = grouped_linear(flat, weights, [None] * len(rows) if self.return_bias else biases, spec)
        y = y.view(*inp.shape[:-1], self.out_features)
        return (y, [bias for bias in biases if bias is not None]) if self.return_bias else y

    def _biases(self, dtype: torch.dtype) -> list[Tensor | None]:
        if not self.use_bias:
            return [None] * self.num_gemms
        return [getattr(self, f"bias{i}").to(dtype) for i in range(self.num_gemms)]

    def _spec(
        self, inp: Tensor, rows: tuple[int, ...], is_first_microbatch: bool | None
    ) -> GroupedLinearSpec:
        state = current()
        self._together.forget_weights(is_first_microbatch)
        products = self._quantizable_groups(state, rows)
        trained = any(p.requires_grad for p in self.parameters(recurse=False))
        needs_grad = torch.is_grad_enabled() and (inp.requires_grad or trained)
        scale_update = self._scale_update(state, needs_grad)
        dtype = self.computing_dtype(inp)
        groups = tuple(
            self._group_spec(i, product, state, dtype, inp.requires_grad, is_first_microbatch, scale_update)
            for i, product in enumerate(products)
        )
        return GroupedLinearSpec(rows, groups, needs_grad)

    def _quantizable_groups(
        self, state: AutocastState, rows: tuple[int, ...]
    ) -> tuple[ProductQuantizers, ...]:
        """Each group's quantizers; none of them, with one warning, for a group whose size the format cannot take."""
        products = self._product_quantizers(state)
        if not state.enabled:
            return products
        chosen = []
        for product, m in zip(products, rows, strict=True):
            reason = product_refusal(product, m, self.in_features, self.out_features)
            if reason is not None:
                self._warn_once(
                    "group", f"GroupedLinear runs groups in high precision: {reason}; pad their rows"
                )
            chosen.append(product if reason is None else UNQUANTIZED)
        return tuple(chosen)

    def _group_spec(
        self,
        i: int,
        quantizers: ProductQuantizers,
        state: AutocastState,
        dtype: torch.dtype,
        input_requires_grad: bool,
        is_first_microbatch: bool | None,
        scale_update: ScaleUpdate | None,
    ) -> LinearSpec:
        weight, bias = getattr(self, f"weight{i}"), getattr(self, f"bias{i}")
        grad = torch.is_grad_enabled()
        needs_grad_input = grad and input_requires_grad
        key = f"weight{i}"
        return LinearSpec(
            dtype=dtype,
            input=quantizers.input,
            weight=quantizers.weight,
            grad_output=quantizers.grad_output,
            accumulation=self.accumulation(state),
            parallel=TensorParallel(),
            weight_gradient=self.weight_gradient(key, is_first_microbatch),
            cached_weight=self._cached_weight(
                key, weight, quantizers.weight, needs_grad_input, is_first_microbatch
            ),
            backward=self.backward_mode(state),
            keep_input=self.keeps_input(state),
            needs_grad_input=needs_grad_input,
            needs_grad_weight=grad and weight.requires_grad,
            needs_grad_bias=grad and self.use_bias and bias.requires_grad and not self.return_bias,
            scale_update=scale_update,
        )

    def extra_repr(self) -> str:
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.use_bias}"
        )
