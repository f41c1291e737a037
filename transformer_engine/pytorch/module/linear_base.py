"""What the modules with one named weight share: its parameters, checks on inputs, and spec fragments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...common import env
from ...common.checks import switch
from ...common.dispatch import undisturbed
from ..backward_thread import keep_backward_here
from ..checks import floating
from ..device import canonical_device
from ..distributed.tensor_parallel import set_tensor_model_parallel_attributes
from ..functions.linear import Accumulation, LinearSpec
from ..functions.scale_update import in_a_backward
from ..functions.sequence import gather_sequence
from ..functions.weight_gradient import WeightGradient
from ..quantization import QuantizerRole
from ..quantization.autocast import AutocastState, here
from ..quantization.family import family_of
from ..quantization.roles import BACKWARD_TENSORS, FORWARD_TENSORS
from ..tensor.storage.quantized_tensor_storage import QuantizedTensorStorage
from .base import TransformerEngineBaseModule
from .parameters import InitMethod, ParameterInit, default_init_method, split_names
from .precision import quantizes
from .recipe_state import UNQUANTIZED, ProductQuantizers, ensure

T = TypeVar("T")

_fp8_auto = env.watch("NVTE_FP8_AUTO")  # the one variable that decides what a spec is


@dataclass(frozen=True)
class OverlapOptions:
    """The original's userbuffers switches; kept for inspection, the collectives run unfused."""

    overlap_all_gather: bool = False
    overlap_reduce_scatter: bool = False
    overlap_reduce_scatter_dgrad: bool = False
    bulk_dgrad: bool = False
    bulk_wgrad: bool = False
    name: str | None = None


def check_parallel_mode(mode: str | None, tp_size: int, in_features: int, out_features: int) -> None:
    """ValueError unless mode is known and tp_size divides the sharded dimension."""
    if mode not in (None, "row", "column"):
        raise ValueError(f'parallel_mode={mode!r} is unknown; choose None, "row" or "column"')
    sharded = {"row": ("in_features", in_features), "column": ("out_features", out_features)}.get(mode or "")
    if sharded and sharded[1] % tp_size:
        padded = -(-sharded[1] // tp_size) * tp_size
        raise ValueError(f"tp_size={tp_size} does not divide {sharded[0]}={sharded[1]}; pad it to {padded}")


def product_refusal(product: ProductQuantizers, m: int, k: int, n: int) -> str | None:
    """Why a format cannot take x [m, k], w [n, k] or dy [m, n]; None when it can take all three."""
    for quantizer, extents in (
        (product.input, (m, k)),
        (product.weight, (n, k)),
        (product.grad_output, (m, n)),
    ):
        reason = quantizer.shape_refusal(extents, True, True)
        if reason is not None:
            return reason
    return None


class QuantizedProductsModule(TransformerEngineBaseModule):
    """A module whose forward is made of linear products: which quantizers they get, and how gradients are formed."""

    quantized_as = "linear"  # module_type of its quantizers' roles
    products_grow = False
    fuse_wgrad_accumulation = False
    save_original_input = False
    return_layernorm_output_gathered = False
    # What the options of `remembered` are called, in their order: all of them are switches.
    option_names: tuple[str, ...] = ("is_first_microbatch",)
    _output_role: QuantizerRole | None = None
    _grad_input_role: QuantizerRole | None = None

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[QuantizerRole | None]:
        """Roles by slot of each product; those at the module's borders may be set, see `output_quantizer_role`."""
        tensors = FORWARD_TENSORS if fwd else BACKWARD_TENSORS
        products = num_quantizers // len(tensors)
        border = self._output_role if fwd else self._grad_input_role
        roles: list[QuantizerRole | None] = []
        for product in range(products):
            name = self._product_name(product)
            roles += [QuantizerRole(self.quantized_as, tensor, name) for tensor in tensors]
            if border is not None and self._is_at_border(product, fwd):
                roles[-1] = border
        return roles

    def _product_name(self, product: int) -> str:
        return self.name or ""

    def _is_at_border(self, product: int, fwd: bool) -> bool:
        """Does a product make the module's output, or the gradient of its input?"""
        return True

    @property
    def output_quantizer_role(self) -> QuantizerRole | None:
        """What a custom recipe's factory is told the output is for, such as an attention's "qkv"."""
        return self._output_role

    @output_quantizer_role.setter
    def output_quantizer_role(self, role: QuantizerRole | None) -> None:
        self._output_role = role
        self._module_recipe = None  # quantizers are asked for anew

    @property
    def grad_input_quantizer_role(self) -> QuantizerRole | None:
        """The same of the input's gradient."""
        return self._grad_input_role

    @grad_input_quantizer_role.setter
    def grad_input_quantizer_role(self, role: QuantizerRole | None) -> None:
        self._grad_input_role = role
        self._module_recipe = None

    def remembered(
        self,
        inp: Tensor,
        parameters: Sequence[Tensor | None],
        options: tuple[Any, ...],
        build: Callable[[], T],
    ) -> T:
        """build(), or what it gave an earlier call that agrees in everything the result may depend on.

        That is the recipe, the input's and the parameters' shape, dtype, device and need of a gradient, torch's
        modes, this module's switches, and options. What else a result depends on must be added to it afterwards.
        """
        if torch.compiler.is_compiling():
            self.check_call(inp, options)
            return build()
        thread = here()
        state, grad, before = thread.state, torch.is_grad_enabled(), self._state_without_gradients
        if not grad or (before is not None and before is not state):
            self.check_repetition(state)
        if state.calibrating or (thread.recomputes and state.enabled):
            self.check_call(inp, options)
            return build()
        if not isinstance(inp, Tensor) or inp.is_meta or not undisturbed():
            self.check_call(inp, options)
            return build()  # somebody wants to see the choices that are made on the way
        if state.enabled:
            active = self._module_recipe
            if active is None or not active.serves(state):
                self.check_call(inp, options)
            ensure(self, state)
            if self._module_recipe.has_state and in_a_backward():  # pyright: ignore[reportOptionalMemberAccess]
                return build()  # whose backward belongs to the pass that is running
        device = inp.device
        accumulates = self.fuse_wgrad_accumulation or self.wgrad_store is not None
        key = (
            options,
            state.enabled,
            _fp8_auto() if state.enabled else None,
            self._module_recipe,
            grad,
            torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None,
            (type(inp), inp.shape, inp.dtype, device, inp.requires_grad),
            (self.tp_group, self.tp_size, self.sequence_parallel),
            (self.fuse_wgrad_accumulation, self.save_original_input, self.wgrad_store),
            *[None if p is None else (p.dtype, p.device, p.requires_grad) for p in parameters],
            # A gradient that is accumulated goes to one parameter, which is held so that its id stays its own.
            tuple([id(p) for p in parameters]) if accumulates else None,
        )
        try:
            known = self._remembered.get(key)
        except TypeError:  # an option that is no key is no switch either
            known = None
        if known is None:
            self.check_call(inp, options)
            result = build()
            if device.type == "cuda":
                keep_backward_here()
            held = tuple(parameters) if accumulates else None
            known = self._remembered.keep(key, (result, held))
        else:
            self.__dict__.update(fp8=state.enabled, fp8_calibration=False)
        return known[0]

    def input_features(self) -> int:
        """The last dimension of the input."""
        raise NotImplementedError

    def check_call(self, inp: Tensor, options: tuple[Any, ...]) -> None:
        """What a forward refuses, before it changes anything: TypeError or ValueError."""
        self.check_input(inp, self.input_features())
        for name, value in zip(self.option_names, options, strict=True):
            switch(name, value)
        if not isinstance(inp, QuantizedTensorStorage):
            self.computing_dtype(inp)

    def check_input(self, inp: Tensor, features: int) -> None:
        """ValueError unless inp is [.., features] on the parameters' device, TypeError unless it is floating point."""
        floating("the input", inp)
        if inp.dim() == 0 or inp.shape[-1] != features:
            raise ValueError(
                f"{type(self).__name__} takes [.., {features}], the input is {list(inp.shape)}; "
                "its last dimension must be the layer's input features"
            )
        for name, param in self._parameters.items():
            if param is not None and param.is_meta:
                raise RuntimeError(f"parameter {name} is on the meta device; call reset_parameters() first")
            if param is not None and param.device != inp.device:
                raise ValueError(
                    f"the input is on {inp.device}, parameter {name} on {param.device}; move one of them with .to()"
                )

    def quantizable_products(
        self, state: AutocastState, inp: Tensor, shapes: Sequence[tuple[int, int]]
    ) -> tuple[ProductQuantizers, ...]:
        """The quantizers of each product, or none of them (with one warning) when a size does not fit the format.

        shapes   (in_features, out_features) of each product's weight
        """
        products = self._product_quantizers(state)
        if not state.enabled:
            return products
        rows = inp.numel() // inp.shape[-1] if inp.shape[-1] else 0
        for product, (k, n) in zip(products, shapes, strict=True):
            reason = product_refusal(product, rows, k, n)
            if reason is not None:
                self._warn_once(
                    f"shape {rows} {k} {n}",
                    f"{type(self).__name__} runs in high precision, not under {type(state.recipe).__name__}: "
                    f"{reason}",
                )
                return (UNQUANTIZED,) * self.num_products
        if self._pays(state, inp, rows, shapes):
            return products
        return (UNQUANTIZED,) * self.num_products

    def _pays(self, state: AutocastState, inp: Tensor, rows: int, shapes: Sequence[tuple[int, int]]) -> bool:
        """Is there no product whose quantization costs too much? A compiled graph has no fixed extents to judge."""
        if not inp.is_cuda or self.primary_weights_in_fp8 or torch.compiler.is_compiling():
            return True
        assert state.recipe is not None
        return all(quantizes(state.recipe, rows, n, k) for k, n in shapes)

    def check_results(
        self, product: ProductQuantizers, quantized_output: bool | None, quantized_grad: bool | None
    ) -> None:
        """ValueError when a quantized result is asked for where nothing is quantized."""
        if (quantized_output and product.output.is_identity) or (
            quantized_grad and product.grad_input.is_identity
        ):
            raise ValueError(
                f"fp8_output={quantized_output}, fp8_grad={quantized_grad}, but this call does not quantize; "
                "enter te.autocast with a delayed or current scaling recipe, or leave them False"
            )

    def accumulation(self, state: AutocastState) -> Accumulation:
        active = self._module_recipe
        return active.accumulation if state.enabled and active is not None else Accumulation()

    def backward_mode(self, state: AutocastState) -> str:
        active = self._module_recipe
        return active.backward if state.enabled and active is not None else "quantized"

    def keeps_input(self, state: AutocastState) -> bool:
        """save_original_input, which delayed scaling cannot serve: its scale has moved on by the backward."""
        if not self.save_original_input or not state.enabled:
            return False
        assert state.recipe is not None
        if family_of(state.recipe).follows_history:
            raise ValueError(
                "save_original_input=True does not work with DelayedScaling, whose scale changes before the backward; "
                "use Float8CurrentScaling or a block scaling recipe, or leave it False"
            )
        return True

    def weight_gradient(self, name: str, is_first_microbatch: bool | None) -> WeightGradient:
        """Where the gradient of the parameter called name goes."""
        if not self.fuse_wgrad_accumulation and self.wgrad_store is None:
            return WeightGradient()
        parameter = self._parameters.get(name)
        deliver = None
        if self.wgrad_store is not None and not self.fuse_wgrad_accumulation:
            deliver = functools.partial(self._accumulate_grad, name)
        return WeightGradient(
            parameter, self.fuse_wgrad_accumulation, bool(is_first_microbatch), self.wgrad_store, deliver
        )

    def returned_norm_output(self, norm_output: Tensor | None) -> Tensor | None:
        """norm(x) as a fused layer returns it: of the whole sequence where asked for, else of this rank's part."""
        if norm_output is None or not (self.return_layernorm_output_gathered and self.sequence_parallel):
            return norm_output
        return gather_sequence(norm_output, self.tp_group)

    def with_cached_weight(
        self, key: str, weight: Tensor, spec: LinearSpec, is_first_microbatch: bool
    ) -> LinearSpec:
        """The spec with the weight as quantized for the first microbatch of the step."""
        cached = self._cached_weight(key, weight, spec.weight, spec.needs_grad_input, is_first_microbatch)
        return spec if cached is None else replace(spec, cached_weight=cached)

    def _accumulate_grad(self, name: str, grad: Tensor) -> None:
        """Add a delayed gradient [N, K] to the .grad of the parameters that make up the weight called name."""
        parameter = getattr(self, name)
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad


class LinearParameters(QuantizedProductsModule):
    """One weight [out_features, in_features] and its bias, whole or in named pieces."""

    in_features: int
    out_features: int
    parallel_mode: str | None
    weight: Tensor
    bias: Tensor
    get_rng_state_tracker = None
    rng_tracker_name: str | None = None

    def create_parameters(
        self,
        bias: bool,
        parameters_split: Sequence[str] | Mapping[str, int] | None,
        dtype: torch.dtype | None,
        device: torch.device | str | int,
        init_method: InitMethod | None,
    ) -> None:
        """Register weight and bias (or {name}_weight, {name}_bias for each piece), unfilled."""
        self.use_bias = bias
        tp_rows = self.tp_size if self.parallel_mode == "column" else 1
        pieces = split_names(parameters_split, self.out_features, tp_rows)
        if len(pieces) > 1 and (self.fuse_wgrad_accumulation or self.primary_weights_in_fp8):
            what = "fuse_wgrad_accumulation" if self.fuse_wgrad_accumulation else "quantized_model_init"
            raise ValueError(
                f"{what} needs one weight parameter, parameters_split makes {len(pieces)}; leave one out"
            )
        self.weight_names = [f"{prefix}weight" for prefix in pieces]
        self.bias_names = [f"{prefix}bias" for prefix in pieces]
        init = ParameterInit(
            init_method or default_init_method,
            self.get_rng_state_tracker,
            self.rng_tracker_name,
            fp8_meta_index=1,
        )
        options = {"dtype": dtype or torch.get_default_dtype(), "device": canonical_device(device)}
        for name, rows in zip(self.weight_names, pieces.values(), strict=True):
            self.register_parameter(
                name, torch.nn.Parameter(torch.empty(rows, self.in_features, **options)), init
            )
        for name, rows in zip(self.bias_names, pieces.values(), strict=True):
            if bias:
                zeros = ParameterInit(torch.nn.init.zeros_)
                self.register_parameter(name, torch.nn.Parameter(torch.empty(rows, **options)), zeros)
            else:
                setattr(self, name, torch.empty(0, **options))

    def reset_parameters(self, defer_init: bool = False) -> None:
        super().reset_parameters(defer_init=defer_init)
        if defer_init:
            return
        sharded = self.tp_size > 1 and self.parallel_mode is not None
        for name in self.weight_names:
            set_tensor_model_parallel_attributes(
                getattr(self, name), sharded, 1 if self.parallel_mode == "row" else 0, 1
            )
        for name in self.bias_names if self.use_bias else ():
            if self.parallel_mode == "row":
                getattr(self, name).sequence_parallel = self.sequence_parallel
            elif self.parallel_mode == "column":
                set_tensor_model_parallel_attributes(getattr(self, name), sharded, 0, 1)

    def input_features(self) -> int:
        return self.in_features

    def weight_tensor(self) -> Tensor:
        """The weight [out_features, in_features], its pieces joined."""
        if len(self.weight_names) == 1:
            return getattr(self, self.weight_names[0])
        return torch.cat([getattr(self, name) for name in self.weight_names])

    def bias_tensor(self) -> Tensor | None:
        """The bias [out_features], its pieces joined; None without one."""
        if not self.use_bias:
            return None
        if len(self.bias_names) == 1:
            return getattr(self, self.bias_names[0])
        return torch.cat([getattr(self, name) for name in self.bias_names])

    def _accumulate_grad(self, name: str, grad: Tensor) -> None:
        pieces = [getattr(self, name) for name in self.weight_names]
        for piece, part in zip(pieces, grad.split([p.shape[0] for p in pieces]), strict=True):
            if piece.requires_grad:
                piece.grad = part if piece.grad is None else piece.grad + part

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"
