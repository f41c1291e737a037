"""LayerNormMLP: y = act(norm(x) @ fc1_weight.T + fc1_bias) @ fc2_weight.T + fc2_bias."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..device import canonical_device, is_meta
from ..distributed.tensor_parallel import TensorParallel, set_tensor_model_parallel_attributes
from ..functions.linear import LinearSpec
from ..functions.norm_mlp import NormMLPSpec, NormMLPTensors, norm_mlp
from ..functions.normalization import Norm
from ..functions.scale_update import ScaleUpdate
from ..functions.weight_gradient import WeightGradientStore
from ..primitives.activation import ACTIVATIONS, ActivationParams
from ..quantization.autocast import AutocastState, current
from .linear_base import OverlapOptions, QuantizedProductsModule
from .norm_parameters import check_normalization, mark_norm_parameters, register_norm_parameters
from .parameters import InitMethod, ParameterInit, default_init_method
from .recipe_state import ProductQuantizers


class LayerNormMLP(QuantizedProductsModule):
    """y [.., hidden_size] = act(norm(x) @ fc1_weight.T + fc1_bias) @ fc2_weight.T + fc2_bias

    hidden_size, ffn_hidden_size   of x and of the activation's output; gated activations double fc1
    activation            gelu, geglu, glu, qgelu, qgeglu, relu, reglu, srelu, sreglu, silu, swiglu, clamped_swiglu
    activation_params     for clamped_swiglu: {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}
    init_method, output_layer_init_method   fill fc1_weight and fc2_weight; default N(0, 0.023)
    return_bias           do not add fc2's bias, return it
    return_layernorm_output(_gathered)      also return norm(x)
    set_parallel_mode     fc1 column-parallel, fc2 row-parallel over tp_group
    checkpoint            keep only x, and compute norm, fc1 and activation again in the backward
    seq_length, micro_batch_size            accepted; there is nothing to warm up
    Other parameters as in Linear.
    """

    num_products = 2
    layer_norm_weight: Tensor
    layer_norm_bias: Tensor | None
    fc1_weight: Tensor
    fc1_bias: Tensor
    fc2_weight: Tensor
    fc2_bias: Tensor

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
        normalization: str = "LayerNorm",
        activation: str = "gelu",
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
        name: str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
    ) -> None:
        super().__init__(name)
        check_normalization(normalization)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r} is unknown; choose one of {', '.join(ACTIVATIONS)}")
        shards = tp_size if set_parallel_mode else 1
        if ffn_hidden_size % shards:
            raise ValueError(f"tp_size={tp_size} does not divide ffn_hidden_size={ffn_hidden_size}; pad it")
        self.hidden_size, self.ffn_shard = hidden_size, ffn_hidden_size // shards
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.activation = activation
        self.activation_params = ActivationParams.from_mapping(activation_params)
        self.use_bias, self.return_bias = bias, return_bias
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.checkpoint = checkpoint
        self.set_parallel_mode, self.tp_size = set_parallel_mode, tp_size
        self.sequence_parallel = sequence_parallel and tp_size > 1
        if tp_group is not None:
            self.set_tensor_parallel_group(tp_group)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.symmetric_ar_type = symmetric_ar_type
        self.overlap = OverlapOptions(
            ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad
        )
        if delay_wgrad_compute:
            self.wgrad_store = WeightGradientStore()
        dtype, on = params_dtype or torch.get_default_dtype(), canonical_device(device)
        register_norm_parameters(self, hidden_size, normalization, zero_centered_gamma, dtype, on)
        self._create_weights(
            init_method, output_layer_init_method or default_init_method, get_rng_state_tracker, dtype, on
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

    def _product_name(self, product: int) -> str:
        return ".".join(part for part in (self.name, ("fc1", "fc2")[product]) if part)

    def _is_at_border(self, product: int, fwd: bool) -> bool:
        return product == (1 if fwd else 0)

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

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor | tuple[Tensor, ...]:
        """y, or `(y[, fc2_bias][, norm(x)])` as return_bias and return_layernorm_output say."""
        spec = self.remembered(
            inp,
            tuple(self._parameters.values()),
            (is_first_microbatch, self.return_bias, self.return_layernorm_output, self.checkpoint),
            lambda: self._spec(inp, is_first_microbatch),
        )
        if is_first_microbatch is not None:
            spec = self._with_cached_weights(spec, is_first_microbatch)
        dtype = spec.fc1.dtype
        fc2_bias = self.fc2_bias.to(dtype) if self.use_bias else None
        late_bias = self.return_bias or (self.set_parallel_mode and self.tp_size > 1)
        tensors = NormMLPTensors(
            inp.to(dtype),
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.fc1_weight,
            self.fc1_bias.to(dtype) if self.use_bias else None,
            self.fc2_weight,
            None if late_bias else fc2_bias,
        )
        y, norm_output = norm_mlp(tensors, spec)
        if late_bias and not self.return_bias and fc2_bias is not None:
            y = y + fc2_bias
        outputs: tuple[Any, ...] = (y,)
        if self.return_bias:
            outputs += (fc2_bias,)
        if self.return_layernorm_output:
            outputs += (self.returned_norm_output(norm_output),)
        return outputs if len(outputs) > 1 else y

    def _with_cached_weights(self, spec: NormMLPSpec, is_first_microbatch: bool) -> NormMLPSpec:
        fc1, fc2 = (
            self.with_cached_weight(f"{name}_weight", weight, linear, is_first_microbatch)
            for name, weight, linear in (
                ("fc1", self.fc1_weight, spec.fc1),
                ("fc2", self.fc2_weight, spec.fc2),
            )
        )
        return replace(spec, fc1=fc1, fc2=fc2)

    def _spec(self, inp: Tensor, is_first_microbatch: bool | None) -> NormMLPSpec:
        self.check_input(inp, self.hidden_size)
        dtype = self.computing_dtype(inp)
        state = current()
        fc1_rows = self.fc1_weight.shape[0]
        shapes = ((self.hidden_size, fc1_rows), (self.ffn_shard, self.hidden_size))
        products = self.quantizable_products(state, inp, shapes)
        upstream = inp.requires_grad or any(p.requires_grad for p in self.parameters(recurse=False))
        needs_grad = torch.is_grad_enabled() and upstream
        scale_update = self._scale_update(state, needs_grad)
        fc1 = self._linear_spec(
            "fc1", products[0], state, dtype, needs_grad, is_first_microbatch, scale_update
        )
        fc2 = self._linear_spec(
            "fc2", products[1], state, dtype, needs_grad, is_first_microbatch, scale_update
        )
        return NormMLPSpec(
            Norm(self.normalization, self.eps, self.zero_centered_gamma),
            fc1,
            fc2,
            self.activation,
            ActivationParams.of(self.activation_params),
            self.return_layernorm_output,
            self.checkpoint and needs_grad,
            needs_grad,
        )

    def _linear_spec(
        self,
        layer: str,
        quantizers: ProductQuantizers,
        state: AutocastState,
        dtype: torch.dtype,
        needs_grad: bool,
        is_first_microbatch: bool | None,
        scale_update: ScaleUpdate | None,
    ) -> LinearSpec:
        weight, bias = getattr(self, f"{layer}_weight"), getattr(self, f"{layer}_bias")
        mode = {"fc1": "column", "fc2": "row"}[layer] if self.set_parallel_mode else None
        key = f"{layer}_weight"
        late_bias = layer == "fc2" and (self.return_bias or (self.set_parallel_mode and self.tp_size > 1))
        return LinearSpec(
            dtype=dtype,
            input=quantizers.input,
            weight=quantizers.weight,
            grad_output=quantizers.grad_output,
            accumulation=self.accumulation(state),
            parallel=TensorParallel(mode, self.tp_group, self.tp_size, self.sequence_parallel),
            weight_gradient=self.weight_gradient(key, is_first_microbatch),
            backward=self.backward_mode(state),
            needs_grad_input=needs_grad,
            needs_grad_weight=needs_grad and weight.requires_grad,
            needs_grad_bias=needs_grad and self.use_bias and bias.requires_grad and not late_bias,
            scale_update=scale_update,
        )
