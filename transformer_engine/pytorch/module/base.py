"""TransformerEngineBaseModule: what every layer with quantizers shares: parameters, recipe state, checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...common.bounded import Bounded
from ...common.recipe import Recipe
from ..device import canonical_device
from ..functions.scale_update import ScaleUpdate, in_a_backward, of_the_pass
from ..functions.weight_gradient import WeightGradientStore, dummy_gradient
from ..quantization import check_extra_state, decode_extra_state, encode_extra_state, load_extra_state
from ..quantization.autocast import AutocastState
from ..quantization.family import family_of
from ..quantization.model_init import current_model_init
from ..tensor.quantized_tensor import QuantizedTensor, QuantizedTensorStorage
from ..tensor.quantizer import Quantizer
from .forward_protocol import ForwardProtocol
from .parameters import InitMethod, ParameterInit, default_init_method
from .recipe_state import (
    UNQUANTIZED,
    ModuleRecipe,
    ProductQuantizers,
    ensure,
    first_call_while_tracing,
    new_tracing_key,
    renew,
    slots,
)
from .repetition import may_be_repeated, refuse_other_repetition, repeatable
from .settings import names_read

T = TypeVar("T")

# The accumulation flags of the original for delayed scaling, under the names that its users read.
_2X_ACC_FPROP = False
_2X_ACC_DGRAD = True
_2X_ACC_WGRAD = True


_REMEMBERED = 64  # what a module keeps of calls that it may meet again


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """A tensor that stands for a weight gradient which went to main_grad; shared by shape and dtype."""
    return dummy_gradient(tuple(shape), dtype, canonical_device("cuda"), zero)


def made_to_keep(make: Callable[[], T]) -> T:
    """make() without gradients, as tensors that a later call can train with although this one is in inference mode."""
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return make()
    with torch.no_grad():
        return make()


class TransformerEngineBaseModule(ForwardProtocol):
    """A layer with quantizers.

    num_products   how many linear products it has, hence how many quantizer slots
    fp8_meta       recipe, states and bookkeeping under the original's keys
    quantizers     {"scaling_fwd": [input, weight, output] * n, "scaling_bwd": [grad_output, grad_input] * n}
    """

    num_products = 1
    # What a call may depend on: attributes that the classes of this package read. Callers have others of their own,
    # some of them written in every step.
    _settings: frozenset[str] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        ours = cls.__module__.partition(".")[0] == __name__.partition(".")[0]
        cls._settings |= names_read(cls) if ours else frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._settings and self.__dict__.get(name, self) is not value:
            remembered = self.__dict__.get("_remembered")
            if remembered:
                remembered.clear()
        super().__setattr__(name, value)

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.fp8_initialized = False
        self.fp8 = False
        self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        self.quantizers: dict[str, list[Quantizer]] = {"scaling_fwd": [], "scaling_bwd": []}
        self.tp_group = None
        self.tp_group_initialized = False
        self.tp_size = 1
        self.sequence_parallel = False
        self.param_init_meta: dict[str, ParameterInit] = {}
        self.wgrad_store: WeightGradientStore | None = None
        model_init = current_model_init()
        self.primary_weights_in_fp8 = self.fp8_parameters = model_init.enabled
        self.preserve_high_precision_init_val = model_init.preserve_high_precision_init_val
        self._model_init_recipe = model_init.recipe
        self._fp8_workspaces: dict[str, QuantizedTensorStorage] = {}
        self._module_recipe: ModuleRecipe | None = None
        self._remembered: Bounded[Any, Any] = Bounded(_REMEMBERED)
        self._state_without_gradients: AutocastState | None = None
        self._wgrad_hooks: list[Any] = []
        self._warned: set[str] = set()
        self.tracing_key = new_tracing_key(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._remembered = Bounded(_REMEMBERED)
        self.tracing_key = new_tracing_key(self)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_remembered": {}, "_state_without_gradients": None}

    def fast_setattr(self, name: str, value: Any) -> None:
        """Set a plain attribute without nn.Module's search for parameters and modules."""
        if name in self._settings:
            self._remembered.clear()
        self.__dict__[name] = value

    def module_setattr(self, name: str, value: Any) -> None:
        """Set an attribute as nn.Module does, registering parameters and modules."""
        setattr(self, name, value)

    def register_parameter(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        name: str,
        param: torch.nn.Parameter | None,
        init_fn: InitMethod | ParameterInit | None = None,
        get_rng_state_tracker: Callable | None = None,
        fp8_meta_index: int | None = None,
    ) -> None:
        """Register a parameter and remember how `reset_parameters` fills it: default N(0, 0.023).

        fp8_meta_index   which of the forward quantizers holds it under quantized_model_init; None: it stays plain
        """
        super().register_parameter(name, param)
        if isinstance(init_fn, ParameterInit):  # how the layers of this package say it
            self.param_init_meta[name] = init_fn
            return
        given = init_fn is not None or fp8_meta_index is not None
        if param is not None and (given or name not in self.param_init_meta):
            fill = default_init_method if init_fn is None else init_fn
            self.param_init_meta[name] = ParameterInit(fill, get_rng_state_tracker, None, fp8_meta_index)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Fill every parameter by its init method, allocate those on the meta device, quantize those to be quantized.

        defer_init=True does nothing: the parameters keep their (meta) storage until a later call.
        """
        if defer_init:
            return
        for name, init in self.param_init_meta.items():
            param = getattr(self, name)
            values = _empty_like_parameter(param)
            init.fill(values)
            if isinstance(param, QuantizedTensor) and not param.is_meta:
                self._fill_again(param, values)
            elif self.primary_weights_in_fp8 and init.fp8_meta_index is not None:
                self._replace_parameter(name, self._quantized_parameter(values, init.fp8_meta_index))
            elif param.is_meta or values is not param:
                self._replace_parameter(name, torch.nn.Parameter(values, requires_grad=param.requires_grad))

    def _fill_again(self, param: QuantizedTensor, values: Tensor) -> None:
        """New values for a quantized parameter that optimizers and wrappers hold, in its own codes."""
        with torch.no_grad():
            param.copy_(values)
        if self.preserve_high_precision_init_val:
            _keep_initial_values(param, values)  # pyright: ignore[reportArgumentType]

    def _replace_parameter(self, name: str, new: torch.nn.Parameter) -> None:
        old = self._parameters[name]
        assert old is not None
        new.requires_grad_(old.requires_grad)
        for key, value in vars(old).items():
            if not hasattr(new, key):
                setattr(new, key, value)
        self._parameters[name] = new

    def _quantized_parameter(self, values: Tensor, index: int) -> torch.nn.Parameter:
        """The parameter as its weight quantizer holds it; both directions while gradients are wanted."""
        recipe = self._model_init_recipe
        assert recipe is not None
        renew(self, recipe, self.fp8_meta["fp8_group"])
        quantizer = self.quantizers["scaling_fwd"][index].copy()
        quantizer.set_usage(rowwise=True, columnwise=torch.is_grad_enabled())
        quantizer.internal = False
        with torch.no_grad():
            param = torch.nn.Parameter(quantizer.quantize(values))  # pyright: ignore[reportArgumentType]
        if self.preserve_high_precision_init_val:
            _keep_initial_values(param, values)
        return param

    def _state_device(self) -> torch.device:
        """Where scales and histories live: with the parameters, once those are allocated."""
        for param in self.parameters(recurse=False):
            return canonical_device("cuda") if param.is_meta else param.device
        return canonical_device("cuda")

    def _product_quantizers(self, state: AutocastState) -> tuple[ProductQuantizers, ...]:
        """The quantizers of this forward, one set a product; all-identity outside of quantized regions."""
        if not torch.compiler.is_compiling():
            self.__dict__["fp8"] = state.enabled
            self.__dict__["fp8_calibration"] = state.calibrating
        if not (state.enabled or state.calibrating):
            return (UNQUANTIZED,) * self.num_products
        ensure(self, state)
        active = self._module_recipe
        assert active is not None
        if self.primary_weights_in_fp8:
            self._check_parameter_recipe(state.recipe)
        if not state.enabled:
            return tuple(product.calibrating() for product in active.products)
        if active.has_state and may_be_repeated():
            return repeatable(self, active.products)
        return active.products

    def check_repetition(self, state: AutocastState) -> None:
        """RuntimeError where another library's checkpoint runs the module again outside of its first run's autocast.

        Such a checkpoint runs its function without gradients first, and again in its backward, under whatever autocast
        is there; torch.utils.checkpoint does with use_reentrant=True.
        """
        before = self._state_without_gradients
        if not torch.is_grad_enabled() and not in_a_backward():
            self.__dict__["_state_without_gradients"] = state
        elif before is not None and before is not state and in_a_backward():
            refuse_other_repetition(self, before, state)

    def _check_parameter_recipe(self, recipe: Recipe | None) -> None:
        """RuntimeError under another kind of recipe than quantized parameters were made with, if there are any."""
        made_with = self._model_init_recipe
        if made_with is None or recipe is None or family_of(made_with) is family_of(recipe):
            return
        if any(isinstance(param, QuantizedTensorStorage) for param in self._parameters.values()):
            raise RuntimeError(
                f"Recipe mismatch for {type(self).__name__}: its parameters were quantized with "
                f"{type(made_with).__name__}, the active recipe is {type(recipe).__name__}; "
                "use the same recipe class in quantized_model_init and autocast"
            )

    def _scale_update(self, state: AutocastState, needs_grad: bool) -> ScaleUpdate | None:
        """What this call's backward, if it will have one, updates under delayed scaling.

        That is all scales, at the end of the pass. In a compiled graph it is the module's own: the backward of its
        first call there comes last and does it.
        """
        active = self._module_recipe
        if not needs_grad or not state.enabled or active is None or not active.has_state:
            return None
        if not torch.compiler.is_compiling():
            return of_the_pass()
        if not first_call_while_tracing(self.tracing_key):
            return None
        return ScaleUpdate(self.fp8_meta["scaling_bwd"].delayed_states, state.group)

    def _cached_weight(
        self,
        key: str,
        weight: Tensor,
        quantizer: Quantizer,
        columnwise: bool,
        is_first_microbatch: bool | None,
    ) -> QuantizedTensorStorage | None:
        """The weight as quantized for the first microbatch of a step; None when nothing is to be cached."""
        if is_first_microbatch is None or isinstance(weight, QuantizedTensorStorage) or quantizer.is_identity:
            return None
        cached = self._fp8_workspaces.get(key)
        stale = cached is None or (columnwise and not cached.get_usages()["columnwise"])
        if is_first_microbatch or stale:
            cached = made_to_keep(lambda: quantizer.encode(weight, True, columnwise))
            self._fp8_workspaces[key] = cached
        return cached

    def set_tensor_parallel_group(self, tp_group) -> None:
        """Set the tensor-parallel process group; must precede the first forward when tp_size > 1."""
        self.tp_group = tp_group
        self.tp_group_initialized = True

    def need_backward_dw(self) -> bool:
        """Does this module put its weight gradients off until `backward_dw`?"""
        return self.wgrad_store is not None

    def backward_dw(self) -> None:
        """Compute the weight gradients that one backward put off (delay_wgrad_compute=True), the oldest first."""
        if self.wgrad_store is None:
            return
        trained = self._trained_products()
        if not trained:
            return
        self.wgrad_store.run_next()
        for _ in range(min(trained - 1, len(self.wgrad_store))):
            self.wgrad_store.run_next()
        self._trigger_wgrad_accumulation_and_reduce_hooks()

    def _trained_products(self) -> int:
        """How many products have a weight that gets a gradient; the pieces of a split weight share a product."""
        slots = {
            init.fp8_meta_index
            for name, init in self.param_init_meta.items()
            if init.fp8_meta_index is not None and getattr(self, name).requires_grad
        }
        return len(slots)

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable[[], object]
    ) -> None:
        """Call the hook, without arguments, whenever `backward_dw` has finished a weight gradient."""
        self._wgrad_hooks.append(wgrad_accumulation_and_reduce_hook)

    def _trigger_wgrad_accumulation_and_reduce_hooks(self) -> None:
        for hook in self._wgrad_hooks:
            hook()

    def get_extra_state(self) -> Tensor:
        """Recipe and delayed-scaling state as a uint8 CPU tensor; empty when there is none to keep."""
        keep = self.fp8_meta.get("fp8_checkpoint") or self.fp8 or self.fp8_calibration
        if not keep or "recipe" not in self.fp8_meta:
            return torch.empty(0, dtype=torch.uint8)
        return encode_extra_state(self.fp8_meta)

    def set_extra_state(self, state) -> None:
        """Restore what `get_extra_state` kept; read through an allow-list, in place where tensors exist."""
        content = decode_extra_state(state)
        if content is None:
            return
        products = self._products_of(content)
        check_extra_state(content, slots(products))
        self._check_parameter_recipe(content["recipe"])
        self._grow_to(products)
        renew(self, content["recipe"], self.fp8_meta["fp8_group"])
        load_extra_state(content, self.fp8_meta)
        self.fp8_meta["num_gemms"] = self.num_products

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs) -> None:
        # Quantized parameters copy with their quantizer's scale, so the scale has to be there first.
        extra = prefix + torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX
        if self.primary_weights_in_fp8 and extra in state_dict:
            self.set_extra_state(state_dict[extra])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._fp8_workspaces.clear()  # made of the weights that were here before

    def computing_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype a layer computes in: torch.autocast's when active, else the input's.

        Raises TypeError when the input's dtype is not the parameters'.
        """
        device = x.device.type
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        for name, param in self._parameters.items():
            if param is not None and param.dtype != x.dtype:
                raise TypeError(
                    f"the input is {x.dtype}, parameter {name} is {param.dtype}; convert one of them, "
                    "or run under torch.autocast"
                )
        return x.dtype

    def _warn_once(self, key: str, message: str) -> None:
        if torch.compiler.is_compiling() or key in self._warned:
            return
        self._warned.add(key)
        warnings.warn(message, stacklevel=3)


TransformerEngineBaseModule._settings = names_read(TransformerEngineBaseModule)


def _empty_like_parameter(param: Tensor) -> Tensor:
    """Where init methods write: the parameter's own storage, or a fresh high-precision tensor."""
    if isinstance(param, QuantizedTensor):
        return torch.empty(param.shape, dtype=param.dtype, device=param.device)
    if param.is_meta:
        return torch.empty_like(param, device=canonical_device("cuda"), requires_grad=False)
    return param


def _keep_initial_values(param: torch.nn.Parameter, values: Tensor) -> None:
    """Attach accessors of the high-precision initial values, kept on the CPU for an optimizer's master weights."""
    param._high_precision_init_val = values.detach().cpu().clone()  # pyright: ignore[reportAttributeAccessIssue]
    param.get_high_precision_init_val = MethodType(_initial_values, param)  # pyright: ignore
    param.clear_high_precision_init_val = MethodType(_forget_initial_values, param)  # pyright: ignore


def _initial_values(param: Tensor) -> Tensor | None:
    return getattr(param, "_high_precision_init_val", None)


def _forget_initial_values(param: Tensor) -> None:
    vars(param).pop("_high_precision_init_val", None)
