"""The debug session: in each training step, layers with enabled features use debug quantizers.

A plan (`TensorPlan`) states how a tensor is quantized in a step. `step()` requests the plans of all modules, and
installs on each module with a plan an observer, which replaces the quantizers of the module's recipe. Modules without
a plan keep their recipe and their compiled passes. Plans change between steps only; a module whose features can never
be enabled again is not queried again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from ...pytorch.functions.linear_spec import ProductQuantizers
from ...pytorch.module import GroupedLinear, numerics
from ...pytorch.module.linear_base import ProductsModule
from ...pytorch.module.products import ModuleRecipe
from .debug_quantization import (
    GEMMS,
    STANDARD_QUANTIZE,
    DebugQuantizer,
    Location,
    ResultInspector,
    TensorPlan,
    decision,
    earliest,
    features,
    planned,
)
from .debug_state import TEDebugState

# Tensor names in configuration files by their names in the passes.
_OPERANDS = {"input": "activation", "weight": "weight", "grad_output": "gradient"}
_RESULTS = {"output": "output", "grad_input": "dgrad", "grad_weight": "wgrad"}
_STANDARD = {
    tensor: TensorPlan(columnwise=STANDARD_QUANTIZE if column else None)
    for tensor, (_, column) in GEMMS.items()
}

ProductPlan = tuple[TensorPlan, ...]  # in GEMMS order
Observer = Callable[[ModuleRecipe], ModuleRecipe]


class LayerDebugger:
    """The debug quantizers of one module.

    Args:
        module: The module.
    """

    def __init__(self, module: ProductsModule):
        self.module = weakref.ref(module)
        self.default_name = "" if module.name else f"Layer_{TEDebugState.get_layer_count()}"
        self.plans: tuple[ProductPlan | None, ...] | None = None
        self.next: int | None = 0  # the step in which plans may change
        self._observers: dict[Any, Observer] = {}
        self.observer: Observer | None = None  # the one that the module has now
        self.observe(_Pending(self))

    def names(self, module: ProductsModule) -> list[str]:
        """List the module's product names: the module's name, with a suffix if there may be several."""
        name = module.name or self.default_name
        if isinstance(module, GroupedLinear):
            return [f"{name}.gemm_{i}" for i in range(module.num_products)]
        return [f"{name}.{product}" for product in module.product_names] or [name]

    def observe(self, observer: Observer | None) -> None:
        """Make the module compute by an observer from its next call on; None: by its own recipe.

        Raises:
            RuntimeError: `te.observe` observes the module.
        """
        module = self.module()
        if module is None:
            return
        if module.numerics.observer is not self.observer:
            raise RuntimeError(
                f"{self.names(module)[0]} is observed by te.observe, which excludes a debug session; close the "
                "observation first"
            )
        module.numerics.workspaces.clear()  # weights as quantized under the former plans
        module.numerics.observe(observer, unquantized=observer is not None)
        self.observer = observer

    def renew(self, iteration: int) -> None:
        """Request a step's plans from the features, if they may differ from the previous step's."""
        module = self.module()
        if module is None or (
            self.plans is not None and (self.next is None or iteration < self.next)
        ):
            return
        self.next = iteration  # queried again if a feature raises
        pairs = [_product_plan(name, iteration) for name in self.names(module)]
        plans, following = tuple([plan for plan, _ in pairs]), earliest([step for _, step in pairs])
        if any(plan is not None for plan in plans) and module.wgrad_store is not None:
            raise RuntimeError(
                f"{self.names(module)[0]} has delay_wgrad_compute=True, which hides weight gradients from debug "
                "features; set it to False, or leave the layer out of the configuration file"
            )
        if plans == self.plans:
            self.next = following
            return
        if plans not in self._observers:
            self._observers[plans] = _Observer(self, plans)
        self.observe(self._observers[plans] if any(plans) else None)
        self.plans, self.next = plans, following

    def debug_recipe(
        self, plans: tuple[ProductPlan | None, ...], recipe: ModuleRecipe
    ) -> ModuleRecipe:
        """Build the recipe with the debug quantizers of these plans."""
        module = self.module()
        if module is None or not any(plans):
            return recipe
        groups = {"tp_group": module.tp_group, "tp_size": module.tp_size}
        names = self.names(module)
        both = [
            tuple(
                [
                    _debug_quantizers(*each, groups)
                    for each in zip(names, plans, products, strict=True)
                ]
            )
            for products in (recipe.products, recipe.unquantized_products)
        ]
        return recipe.with_products(*both)


class _Observer:
    """Replaces a recipe's quantizers by the debug quantizers of fixed plans; `LayerDebugger` keeps them."""

    def __init__(self, layer: LayerDebugger, plans: tuple[ProductPlan | None, ...]):
        self.layer, self.plans = layer, plans

    def __call__(self, recipe: ModuleRecipe) -> ModuleRecipe:
        return self.layer.debug_recipe(self.plans, recipe)


class _Pending:
    """A module's observer before its first call in a session: requests the plans for all modules."""

    def __init__(self, layer: LayerDebugger):
        self.layer = layer

    def __call__(self, recipe: ModuleRecipe) -> ModuleRecipe:
        SESSION.step()
        layer = self.layer
        return recipe if layer.plans is None else layer.debug_recipe(layer.plans, recipe)


def _debug_quantizers(
    name: str, plan: ProductPlan | None, product: ProductQuantizers, groups: dict[str, Any]
) -> ProductQuantizers:
    """Build the quantizers of a product as its plan changes them."""
    if plan is None:
        return product
    plans = dict(zip(GEMMS, plan, strict=True))
    operands = {
        role: DebugQuantizer(name, tensor, getattr(product, role), **groups, plan=plans[tensor])
        for role, tensor in _OPERANDS.items()
    }
    results = {
        role: DebugQuantizer(name, tensor, None, **groups, plan=plans[tensor])
        for role, tensor in _RESULTS.items()
        if plans[tensor] != _STANDARD[tensor]
    }
    return ProductQuantizers(
        operands["input"],
        operands["weight"],
        product.output,
        operands["grad_output"],
        product.grad_input,
        inspector=ResultInspector(results),
    )


def _product_plan(name: str, iteration: int) -> tuple[ProductPlan | None, int | None]:
    """Get the features' plan for a product (None if none is enabled), and the next step to query."""
    api, next_iterations = features(), []
    quantized: dict[str, bool] = {}
    for gemm in ("fprop", "dgrad", "wgrad"):
        answer = api.fp8_gemm_enabled(layer_name=name, gemm=gemm, iteration=iteration)
        quantized[gemm], following = decision(answer, iteration)
        next_iterations.append(following)
    plans = []
    for tensor, (row_gemm, _) in GEMMS.items():
        # A result's plan depends on features alone, not on its product's precision.
        requested = quantized if tensor in _OPERANDS.values() else {row_gemm: True}
        plan, following = planned(Location(name, tensor), requested, iteration)
        plans.append(plan)
        next_iterations.append(following)
    TEDebugState.layers_initialized[name] = True
    enabled = any(plan != _STANDARD[tensor] for tensor, plan in zip(GEMMS, plans, strict=True))
    if enabled:
        _log_plans(name, dict(zip(GEMMS, plans, strict=True)))
    return (tuple(plans) if enabled else None), earliest(next_iterations)


def _log_plans(name: str, plans: dict[str, TensorPlan]) -> None:
    import nvdlfw_inspect.api as debug_api

    for tensor, plan in plans.items():
        for gemm, way in zip(GEMMS[tensor], plan[:2], strict=True):
            if gemm is not None and (tensor in _OPERANDS.values() or way != STANDARD_QUANTIZE):
                debug_api.log_message(
                    f"Tensor: {tensor}, gemm {gemm} - {way}",
                    name,
                    extra_cachable_args=(tensor, gemm, way),
                )


class _Session:
    """The modules of this process while there is a session; all functions may be called from any thread.

    Modules that `te.observe` observes when the session begins do not belong to it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._layers: weakref.WeakKeyDictionary[Any, LayerDebugger] = weakref.WeakKeyDictionary()
        self._active = False

    def begin(self) -> None:
        """Attach all modules that exist, and from now on every new one."""
        with self._lock:
            if self._active:
                return
            self._active = True
            for module in numerics.existing_modules():
                self.attach(module)
            numerics.on_creation.append(self.attach)

    def attach(self, module: Any) -> None:
        """Make a module request its plans in its next call."""
        if not isinstance(module, ProductsModule):
            return
        with self._lock:
            if module.numerics.observer is None:
                self._layers[module] = LayerDebugger(module)

    def step(self) -> None:
        """Request the plans of the present step."""
        with self._lock:
            # nvdlfw_inspect.api.initialize() has failed after it loaded features
            if not TEDebugState.initialize():
                self.end()
                return
            iteration = TEDebugState.get_iteration()
            for layer in list(self._layers.values()):
                layer.renew(iteration)

    def end(self) -> None:
        """Detach all modules."""
        with self._lock:
            self._active = False
            if self.attach in numerics.on_creation:
                numerics.on_creation.remove(self.attach)
            for layer in list(self._layers.values()):
                layer.observe(None)
            self._layers.clear()
            TEDebugState._reset()


SESSION = _Session()
