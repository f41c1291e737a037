"""TransformerEngineBaseModule: parameters, recipe state and checkpoints for every layer with quantizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..distributed.recompute import state_without_gradients
from ..distributed.userbuffers import (
    UserBufferQuantizationMode,
    destroy_ub,
    get_ub,
    get_ub_is_fp8,
    initialize_ub,
    is_ub_initialized,
)
from ..distributed_weight import finalize_delayed_grads
from ..functions.linear_spec import ProductQuantizers
from ..functions.scale_update import ScaleUpdate, update_at_end_of_pass
from ..functions.weight_gradient import WeightGradStore, _dummy_wgrads, dummy_gradient
from ..primitives.gemm.cublaslt_library import _cublas_workspace, get_workspace
from ..quantization import (
    check_extra_state,
    decode_extra_state,
    encode_extra_state,
    load_extra_state,
)
from ..quantization.autocast import AutocastState
from ..quantization.model_init import current_model_init
from ..quantization.resizable_state import ResizableState, check_states, forgive_missing
from ..runtime.device import canonical_device
from ..tensor.initial_values import keep_initial_values
from ..tensor.quantized_tensor import QuantizedTensor, QuantizedTensorStorage
from ..tensor.quantizer import Quantizer
from . import loading
from .config import Config, configure_class
from .forward_protocol import ForwardInterface
from .numerics import Numerics, new_tracing_key, trace_call, traced_update
from .parameters import InitMethod, ParameterInit, default_init_method, empty_like
from .products import BACKWARD_SLOTS, FORWARD_SLOTS
from .repetition import may_be_recomputed, repeatable
from .shared_settings import Entries, public_settings
from .weight_cache import WeightCache

# Original names that other libraries import from here.
__all__ = [
    "TransformerEngineBaseModule",
    "UserBufferQuantizationMode",
    "_cublas_workspace",
    "_dummy_wgrads",
    "destroy_ub",
    "get_dummy_wgrad",
    "get_ub",
    "get_ub_is_fp8",
    "get_workspace",
    "initialize_ub",
    "is_ub_initialized",
]

# Delayed-scaling flags for split accumulation, under the original's names.
_2X_ACC_FPROP = False
_2X_ACC_DGRAD = _2X_ACC_WGRAD = True


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """Return a placeholder for a weight gradient that was added to main_grad; shared by shape and dtype."""
    return dummy_gradient(tuple(shape), dtype, canonical_device("cuda"), zero)


@dataclass(frozen=True, eq=False)
class ModuleConfig(Config):
    """Settings in every layer with quantizers.

    Attributes:
        _kind: Layer name in messages.
        _layer: Settings in the layer that contains this one; see `hand_down_settings`.
    """

    name: str | None = None
    tp_group: Any = None
    tp_group_initialized: bool = False
    tp_size: int = 1
    sequence_parallel: bool = False
    primary_weights_in_fp8: bool = False
    fp8_parameters: bool = False
    preserve_high_precision_init_val: bool = False
    _kind: str = ""
    _layer: Entries = ()

    def shared_settings(self) -> dict[str, object]:
        """Settings that all ranks in the tensor-parallel group must have in common, also in the containing layer."""
        return dict((*public_settings(self, self._kind), *self._layer))


def _forget_roles(module: Any, name: str, value: Any) -> None:
    """Reset the quantizer roles, which contain the module's name."""
    if name == "name" and "numerics" in module.__dict__:
        module.numerics.forget()


@configure_class(ModuleConfig, written=_forget_roles)
class TransformerEngineBaseModule(ForwardInterface):
    """Base class for layers with quantizers.

    A module in another library calls the `ForwardInterface` methods around its forward pass.

    Attributes:
        num_products: Linear product count, which determines the quantizer slot count.
        numerics: Owner of the recipe, states, quantizers and weight copies. Names of the original are views of it:
            `fp8_meta` holds the recipe, states and bookkeeping under the original's keys, and `quantizers` is
            {"scaling_fwd": [input, weight, output] * n, "scaling_bwd": [grad_output, grad_input] * n}.
    """

    num_products = 1
    products_grow = True  # whether `prepare_forward` and checkpoints may add products
    earlier_extra_states: tuple[str, ...] = ()  # extra state names in earlier releases
    activation_dtype: torch.dtype | None = None  # result from `set_activation_dtype`
    _config: ModuleConfig
    _config_class: type[ModuleConfig]
    name: str | None
    tp_group: Any
    tp_group_initialized: bool
    tp_size: int
    sequence_parallel: bool
    primary_weights_in_fp8: bool
    fp8_parameters: bool
    preserve_high_precision_init_val: bool

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        model_init = current_model_init()
        self._config = self._config_class(
            name=name,
            primary_weights_in_fp8=model_init.enabled,
            fp8_parameters=model_init.enabled,
            preserve_high_precision_init_val=model_init.preserve_high_precision_init_val,
            _kind=type(self).__name__,
        )
        self.numerics = Numerics(model_init.recipe)
        self.param_init_meta: dict[str, ParameterInit] = {}
        self.wgrad_store: WeightGradStore | None = None
        self._model_init_recipe = model_init.recipe
        self._wgrad_hooks: list[Any] = []
        self._warned = set()
        self._present_scales = []
        self.tracing_key = new_tracing_key(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.tracing_key = new_tracing_key(self)

    def _configure(self, **settings: Any) -> None:
        """Write several settings at once, for the constructor."""
        self._config = replace(self._config, **settings)

    @property
    def fp8_initialized(self) -> bool:
        """Whether quantizers were ever created. Setting it to False recreates them in the next call."""
        return self.numerics.initialized

    @fp8_initialized.setter
    def fp8_initialized(self, initialized: bool) -> None:
        self.numerics.initialized = initialized
        if not initialized:
            self.numerics.forget()

    @property
    def fp8_meta(self) -> dict[str, Any]:
        return self.numerics.meta

    @fp8_meta.setter
    def fp8_meta(self, meta: dict[str, Any]) -> None:
        self.numerics.replace_meta(meta)

    @property
    def quantizers(self) -> dict[str, Any]:
        return self.numerics.quantizers

    @quantizers.setter
    def quantizers(self, quantizers: dict[str, Sequence[Quantizer]]) -> None:
        self.numerics.replace_quantizers(quantizers)

    @property
    def _fp8_workspaces(self) -> dict[str, QuantizedTensorStorage]:
        return self.numerics.workspaces

    @_fp8_workspaces.setter
    def _fp8_workspaces(self, workspaces: dict[str, Any]) -> None:
        self.numerics.workspaces = WeightCache(workspaces)

    def module_setattr(self, name: str, value: Any) -> None:
        """Set an attribute as nn.Module does, registering parameters and modules."""
        setattr(self, name, value)

    def register_parameter(
        self,
        name: str,
        param: torch.nn.Parameter | None,
        init_fn: InitMethod | ParameterInit | None = None,
        get_rng_state_tracker: Callable | None = None,
        fp8_meta_index: int | None = None,
    ) -> None:
        """Register a parameter and the method with which `reset_parameters` fills it, by default N(0, 0.023).

        Args:
            name: Attribute name.
            param: The parameter, or None.
            init_fn: Method that fills a tensor in place, or a `ParameterInit`.
            get_rng_state_tracker: Returns the tensor-parallel random state tracker.
            fp8_meta_index: Forward quantizer slot that quantizes the parameter under
                quantized_model_init. With None, the parameter stays in high precision.
        """
        super().register_parameter(name, param)
        if isinstance(init_fn, ParameterInit):  # passed by this package's layers
            self.param_init_meta[name] = init_fn
            return
        has_init = init_fn is not None or fp8_meta_index is not None
        if param is not None and (has_init or name not in self.param_init_meta):
            fill = default_init_method if init_fn is None else init_fn
            self.param_init_meta[name] = ParameterInit(
                fill, get_rng_state_tracker, None, fp8_meta_index
            )

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Fill every parameter by its init method; allocate parameters on the meta device; quantize where requested.

        Args:
            defer_init: Do nothing. The parameters keep their (meta) storage until a later call.
        """
        if defer_init:
            return
        for name, init in self.param_init_meta.items():
            param = getattr(self, name)
            values = empty_like(param)
            init.fill(values)
            if isinstance(param, QuantizedTensor) and not param.is_meta:
                # Optimizers and wrappers hold the parameter, so it keeps its identity and receives new codes.
                with torch.no_grad():
                    param.copy_(values)
                if self.preserve_high_precision_init_val:
                    keep_initial_values(param, values)
            elif self.primary_weights_in_fp8 and init.fp8_meta_index is not None:
                # The weight quantizer computes both directions while gradients are recorded.
                recipe = self._model_init_recipe
                assert recipe is not None
                self.numerics.renew(self, recipe, self.fp8_meta["fp8_group"])
                quantizer = init.quantizer_among(self.quantizers["scaling_fwd"])
                quantizer.set_usage(rowwise=True, columnwise=torch.is_grad_enabled())
                quantizer.internal = False
                with torch.no_grad():
                    quantized = torch.nn.Parameter(quantizer.quantize(values))  # pyright: ignore[reportArgumentType]
                if self.preserve_high_precision_init_val:
                    keep_initial_values(quantized, values)
                self._replace_parameter(name, quantized)
            elif param.is_meta or values is not param:
                self._replace_parameter(
                    name, torch.nn.Parameter(values, requires_grad=param.requires_grad)
                )

    def _replace_parameter(self, name: str, new: torch.nn.Parameter) -> None:
        old = self.get_parameter(name)
        new.requires_grad_(old.requires_grad)
        for key, value in vars(old).items():
            if not hasattr(new, key):
                setattr(new, key, value)
        self._parameters[name] = new

    def _product_quantizers(self, state: AutocastState) -> tuple[ProductQuantizers, ...]:
        """Return the quantizers for this forward pass, one set per product; the identity if nothing is quantized."""
        if torch.compiler.is_compiling():
            active = trace_call(self, self.tracing_key, state)
        else:
            self.numerics.state = state
            active = self.numerics.of_call(self, state)
        if state.enabled or state.calibrating:
            self._check_parameter_recipe(state.recipe)
        if active.has_state and may_be_recomputed():
            active = repeatable(type(self).__name__, self.tracing_key, active)
        return active.products

    def check_repetition(self, state: AutocastState) -> None:
        """Raise RuntimeError if another library's checkpoint repeats a call under another autocast state."""
        numerics = self.numerics
        before = numerics.state_without_gradients
        numerics.state_without_gradients = state_without_gradients(
            type(self).__name__, before, state
        )

    def _scale_update(self, state: AutocastState, needs_grad: bool) -> ScaleUpdate | None:
        """Return the delayed-scaling update after this call's backward pass; None without a backward pass.

        In eager mode it updates all scales when the backward pass ends. In a compiled graph it updates the
        module's own scales, after the backward pass of the module's first call, which comes last.
        """
        active = self.numerics.cached.recipe
        if not needs_grad or not state.enabled or active is None or not active.has_state:
            return None
        if not torch.compiler.is_compiling():
            return update_at_end_of_pass()
        return traced_update(self, self.tracing_key, state.group)

    def set_tensor_parallel_group(self, tp_group) -> None:
        """Set the tensor-parallel process group; must precede the first forward when tp_size > 1."""
        self.tp_group = tp_group
        self.tp_group_initialized = True

    def need_backward_dw(self) -> bool:
        """Return whether this module delays its weight gradients until `backward_dw`."""
        return self.wgrad_store is not None

    def backward_dw(self) -> None:
        """Compute the weight gradients that one backward pass delayed (delay_wgrad_compute=True), the oldest first."""
        if self.wgrad_store is None:
            return
        # Products whose weight gets a gradient; the pieces of a split weight share a product.
        members = {
            init.fp8_meta_index: init.members or 1
            for name, init in self.param_init_meta.items()
            if init.fp8_meta_index is not None and getattr(self, name).requires_grad
        }
        trained = sum(members.values())
        if not trained:
            return
        gradients = [self.wgrad_store.pop()[0]]
        gradients += [
            self.wgrad_store.pop()[0] for _ in range(min(trained - 1, len(self.wgrad_store)))
        ]
        if self.wgrad_store.shards:
            finalize_delayed_grads(
                self.wgrad_store.shards, [part for part in gradients if part is not None]
            )
        self._trigger_wgrad_accumulation_and_reduce_hooks()

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable[[], object]
    ) -> None:
        """Call the hook, without arguments, each time `backward_dw` has computed a weight gradient."""
        self._wgrad_hooks.append(wgrad_accumulation_and_reduce_hook)

    def _trigger_wgrad_accumulation_and_reduce_hooks(self) -> None:
        for hook in self._wgrad_hooks:
            hook()

    def get_extra_state(self) -> Tensor:
        """Return recipe and delayed-scaling state as a uint8 CPU tensor; empty if the module has no state."""
        keep = self.fp8_meta.get("fp8_checkpoint") or self.fp8 or self.fp8_calibration
        return ResizableState.of(encode_extra_state(self.fp8_meta if keep else {}))

    def read_extra_state(self, state: Any) -> dict[str, Any] | None:
        """Decode a state and check that it fits the module; nothing is changed. Returns None for an empty state."""
        content = decode_extra_state(state)
        if content is not None:
            # Quantizers in each direction, by state key suffix.
            products = self._count_products(content)
            check_extra_state(
                content, {"fwd": FORWARD_SLOTS * products, "bwd": BACKWARD_SLOTS * products}
            )
        return content

    def _count_products(self, content: dict[str, Any]) -> int:
        """Product count that a state determines: some classes fix it, in others it follows from the scales."""
        stored = content["extra_fp8_variables"].get("num_gemms")
        if self.products_grow and isinstance(stored, int) and "scale_fwd" in content:
            return max(self.num_products, stored)
        return self.num_products

    def set_extra_state(self, state) -> None:
        """Restore the state from `get_extra_state`, in place where tensors exist. It is read through an allow-list.

        A state from another recipe kind than the quantized parameters is dropped with a warning.
        """
        content = self.read_extra_state(state)
        if content is None:
            return
        if loading.quantized_otherwise(self, content["recipe"]):
            loading.drop_state(self, content["recipe"])
            return
        self._extend_to(self._count_products(content))
        self.numerics.renew(self, content["recipe"], self.fp8_meta["fp8_group"])
        load_extra_state(content, self.fp8_meta)
        self.fp8_meta["num_gemms"] = self.num_products

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict, prefix, metadata, strict, missing_keys, *args
    ) -> None:
        check_states(self, state_dict, prefix)
        loading.prepare(self, state_dict, prefix)
        # Quantized parameters are copied with their quantizer's scale, so the scale must be loaded first.
        if self.primary_weights_in_fp8 and prefix + loading.EXTRA_STATE in state_dict:
            self.set_extra_state(state_dict[prefix + loading.EXTRA_STATE])
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing_keys, *args)
        forgive_missing(missing_keys, prefix)
        self._fp8_workspaces.clear()  # computed from the previous weights
