"""Numerics: the single owner of a module's recipe, scaling states, quantizers and weight copies.

The original's names on a module (`fp8_meta`, `quantizers`, `fp8`, `_fp8_workspaces`, ..) are views
of this record. A write to a view, also to one slot in a list, takes effect in the next call.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...common.recipe import Recipe, recipe_described_as, recipe_description, recipe_revision
from ..functions.scale_update import ScaleUpdate, is_first_call_in_trace
from ..quantization import FP8GlobalStateManager, QuantizerRole, RecipeState, delayed_scaling
from ..quantization.autocast import OUTSIDE, AutocastState
from ..quantization.family import find_family
from ..quantization.global_state import is_captured
from ..runtime.tracing import constant_while_tracing
from ..tensor.quantized_tensor import QuantizedTensor, QuantizedTensorStorage
from ..tensor.quantizer import Quantizer
from .parameters import ParameterInit
from .products import BACKWARD_SLOTS, FORWARD_SLOTS, ModuleRecipe, unquantized
from .watched import Active, Slots, WatchedDict
from .weight_cache import WeightCache, compute_to_keep


class Owner(Protocol):
    """Module attributes and methods that `Numerics` uses."""

    numerics: Numerics
    param_init_meta: dict[str, ParameterInit]
    _parameters: dict[str, torch.nn.Parameter | None]

    @property
    def num_products(self) -> int: ...

    def get_quantizer_roles(
        self, *, fwd: bool, num_quantizers: int
    ) -> Sequence[QuantizerRole | None] | None: ...

    def _state_device(self) -> torch.device: ...

    def _warn_once(self, key: str, message: str) -> None: ...


class Numerics:
    """The recipe, scaling states, quantizers and cached weights in one module.

    Attributes:
        meta: `fp8_meta`: recipe, group and states under the original's keys, and caller entries.
        quantizers: {"scaling_fwd": [input, weight, output] * n, "scaling_bwd": [grad_output, grad_input] * n}.
        workspaces: {name: weight as quantized for the first microbatch of a step}.
        state: Autocast state in the last call.
        cached: The quantizers of the last recipe by product, valid until a container that they depend on is written.
        initialized: Whether quantizers were ever created.
        observer: Function that replaces the recipe of each call by another one, as debug sessions do; or
            None.
        observes_unquantized: Whether the observer also receives calls outside autocast.
    """

    def __init__(self, recipe: Recipe | None = None) -> None:
        """Create empty numerics.

        Args:
            recipe: Recipe in quantized_model_init, which callers read before the first call and on the meta device.
        """
        self.cached = Active()
        self.meta = WatchedDict(self.cached, {"fp8_checkpoint": False, "fp8_group": None})
        if recipe is not None:
            self.meta["recipe"] = recipe
        self.quantizers: dict[str, Slots] = {
            "scaling_fwd": Slots(self.cached),
            "scaling_bwd": Slots(self.cached),
        }
        self.workspaces = WeightCache()
        self.state: AutocastState = OUTSIDE
        self.state_without_gradients: AutocastState | None = None
        self.initialized = False
        self.observer: Callable[[ModuleRecipe], ModuleRecipe] | None = None
        self.observes_unquantized = False
        # {observer: (slot quantizers, recipe that was assembled from them)}
        self._slot_recipes: dict[Any, tuple[tuple[Quantizer, ...], ModuleRecipe | None]] = {}
        self._unquantized: tuple[Any, ModuleRecipe] | None = (
            None  # the observer, and its recipe outside autocast
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, which belongs to no autocast context and has no observer."""
        called = AutocastState(self.state.enabled, self.state.calibrating)
        overrides = {
            "state": called,
            "state_without_gradients": None,
            "observer": None,
            "_slot_recipes": {},
        }
        return self.__dict__ | overrides | {"observes_unquantized": False, "_unquantized": None}

    def observe(
        self, observer: Callable[[ModuleRecipe], ModuleRecipe] | None, unquantized: bool = False
    ) -> None:
        """Use observer(recipe) instead of the recipe from the next call on; None removes the observer.

        Args:
            observer: Returns a recipe with other quantizers.
            unquantized: Whether calls outside autocast are observed too.
        """
        self.observer, self.observes_unquantized = observer, unquantized
        self.cached.regroup()

    def unquantized(self, products: int) -> ModuleRecipe:
        """Return the settings for a call outside autocast."""
        observer = self.observer
        if observer is None or not self.observes_unquantized:
            return unquantized(products)
        if self._unquantized is None or self._unquantized[0] is not observer:
            self._unquantized = (observer, observer(unquantized(products)))
        return self._unquantized[1]

    def forget(self) -> None:
        """Recreate the quantizers in the next call; states that match its recipe are kept."""
        self.cached.forget()

    def replace_quantizers(self, quantizers: dict[str, Sequence[Quantizer]]) -> None:
        """Replace the quantizers in both directions."""
        slots = {key: Slots(self.cached, quantizers[key]) for key in self.quantizers}
        self.quantizers = slots
        self.cached.regroup()

    def replace_meta(self, meta: dict[str, Any]) -> None:
        self.meta = WatchedDict(self.cached, meta)
        self.cached.forget()

    def of_call(
        self, owner: Owner, state: AutocastState, arguments: tuple[Any, ...] = ()
    ) -> ModuleRecipe:
        """Return the quantizers for a call under an autocast state, whose scales are registered for updates.

        The quantizers of the last call are reused until the recipe or a slot changes. `renew` then creates
        others: the recipe's family (`quantization/families.py`) has one per slot, and `ModuleRecipe.of`
        groups them by product.

        Args:
            owner: The module.
            state: Settings of the innermost `autocast` block.
            arguments: Arguments to `ProductsModule.check_call_under`, so that a rejected call creates no quantizers.
        """
        if not (state.enabled or state.calibrating):
            return (self.unquantized if self.observes_unquantized else unquantized)(
                owner.num_products
            )
        recipe, active = state.recipe, self.cached.recipe
        assert recipe is not None
        unchanged = active is not None and active.recipe is recipe and active.group is state.group
        if active is None or not unchanged or active.revision is not recipe_revision(recipe):
            if arguments:
                owner.check_call_under(recipe, *arguments)  # pyright: ignore[reportAttributeAccessIssue]
            active = self.renew(owner, recipe, state.group)
        # Register again if FP8GlobalStateManager.reset() has cleared the participants in scale updates.
        if active.has_state and active.pools is not delayed_scaling.registry.pools:
            FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.meta)
            active.pools = delayed_scaling.registry.pools
        return active if state.enabled else active.calibrating  # pyright: ignore[reportReturnType]

    def renew(self, owner: Owner, recipe: Recipe, group: Any) -> ModuleRecipe:
        """Return quantizers for a recipe: the active ones if the recipes are equal, otherwise new ones."""
        active = self.cached.recipe
        if active is not None and active.matches_recipe(recipe, group):
            active.replace_recipe(recipe)
            return active
        before = self.cached.before
        if before is None or not before.matches_recipe(recipe, group):
            self._make(owner, recipe, group)
        result = self._slot_recipe(recipe, group)
        self.cached.recipe, self.cached.before = result, None
        return result

    def _slot_recipe(self, recipe: Recipe, group: Any) -> ModuleRecipe:
        """Return the recipe with the slot quantizers, after the observer if there is one.

        The object is assembled once for each observer, because calls cache their decisions on it.
        """
        forward, backward = self.quantizers["scaling_fwd"], self.quantizers["scaling_bwd"]
        quantizers = (*forward, *backward)
        before, result = self._slot_recipes.pop(self.observer, ((), None))
        same = len(quantizers) == len(before) and all(map(operator.is_, quantizers, before))
        if result is not None and same and result.matches_recipe(recipe, group):
            result.replace_recipe(recipe)
        else:
            result = ModuleRecipe.of(recipe, group, forward, backward)
            if self.observer is not None:
                result = self.observer(result)
        others = [*self._slot_recipes.items()][-1:]  # only the last other observer may return
        self._slot_recipes = {**dict(others), self.observer: (quantizers, result)}
        return result

    def _make(self, owner: Owner, recipe: Recipe, group: Any) -> None:
        """Create or adapt recipe states and quantizers; delayed scaling keeps its histories."""
        before = self.meta.get("recipe")
        if before is not None and find_family(before) is not find_family(recipe):
            # Scales, histories and cached weights are reset.
            names = type(before).__name__, type(recipe).__name__
            owner._warn_once(
                f"recipe {names}",
                f"Recipe type changed from {names[0]} to {names[1]}. This may affect model behavior: "
                f"{type(owner).__name__} creates new quantizers and quantizes its weights again.",
            )
        for forward in (True, False):
            self.renew_direction(owner, forward, recipe)
        self.meta.update(
            recipe=recipe, num_gemms=owner.num_products, fp8_group=group, fp8_checkpoint=True
        )
        fp8_format = getattr(recipe, "fp8_format", None)
        if fp8_format is not None:
            self.meta.update(
                fp8_max_fwd=fp8_format.value.max_fwd, fp8_max_bwd=fp8_format.value.max_bwd
            )
        self.workspaces.clear()
        self.initialized = True

    def renew_direction(self, owner: Owner, forward: bool, recipe: Recipe) -> None:
        """Create state and quantizers for one direction and the current product count."""
        key, mode, slots = (
            ("scaling_fwd", "forward", FORWARD_SLOTS)
            if forward
            else ("scaling_bwd", "backward", BACKWARD_SLOTS)
        )
        count = slots * owner.num_products
        previous = self.meta.get(key)
        before = () if previous is None else previous.delayed_states
        state = RecipeState.renew(
            previous,
            recipe,
            mode=mode,
            num_quantizers=count,
            device=owner._state_device(),
            roles=owner.get_quantizer_roles(fwd=forward, num_quantizers=count),
        )
        self.meta[key] = state
        quantizers = state.make_quantizers()
        self.quantizers[key] = Slots(self.cached, quantizers)
        states = state.delayed_states
        if forward and any(all(old is not new for new in states) for old in before):
            # Quantized parameters get the new quantizers for their slots, so that later scale updates reach them.
            for name, init in owner.param_init_meta.items():
                param = owner._parameters.get(name)
                if (
                    init.fp8_meta_index is None
                    or not isinstance(param, QuantizedTensor)
                    or param._quantizer is None
                ):
                    continue
                current: Any = param._quantizer
                quantizer = init.quantizer_among(quantizers)
                if not current.stateful and not quantizer.stateful:
                    continue
                quantizer.set_usage(**current.get_usages())
                param.update_quantizer(quantizer)

    def delayed_states(self, key: str) -> tuple[Any, ...]:
        """Return the delayed-scaling states in a direction, "scaling_fwd" or "scaling_bwd"."""
        scaling = self.meta.get(key)
        return () if scaling is None else scaling.delayed_states

    def cached_weight(
        self, key: str, weight: Tensor, quantizer: Quantizer, columnwise: bool, first: bool
    ) -> QuantizedTensorStorage | None:
        """Return the weight as quantized for the first microbatch of a step, or None if it is not cached.

        In a captured graph the same kernels run for every microbatch, so a flag on the device marks the first one.
        """
        if isinstance(weight, QuantizedTensorStorage) or quantizer.is_identity:
            return None
        if torch.compiler.is_compiling():
            return self._traced_cached_weight(key, weight, quantizer, columnwise, first)
        # A client that captures without this package, such as Megatron-core, sets the flag itself.
        flag = FP8GlobalStateManager.quantization_state.skip_fp8_weight_update_tensor
        skip = flag if flag is not None and is_captured(self.state) else None
        if skip is not None and (cached := self.workspaces.find(key, columnwise)) is not None:
            # There is one flag, on the GPU if the machine has one; a layer on the CPU reads a copy.
            quantizer.update_quantized(weight, cached, noop_flag=skip.to(weight.device))
            return cached
        return self.workspaces.get_or_quantize(
            key,
            (weight,),
            lambda columns: quantizer.encode(weight, True, columns),
            columnwise,
            first,
        )

    def _traced_cached_weight(
        self, key: str, weight: Tensor, quantizer: Quantizer, columnwise: bool, first: bool
    ) -> QuantizedTensorStorage:
        """Return `cached_weight` in a compiled graph, which allocates new memory in every first microbatch."""
        cached = self.workspaces.get(key)
        if first or cached is None or (columnwise and not cached.get_usages()["columnwise"]):
            cached = compute_to_keep(lambda: quantizer.encode(weight, True, columnwise))
            self.workspaces[key] = cached
        return cached


def state_flag(flag: str, what: str) -> Any:
    """Return a module property that reads and writes a flag in `numerics.state`."""

    def read(self: Any) -> bool:
        return getattr(self.numerics.state, flag)

    def write(self: Any, value: bool) -> None:
        self.numerics.state = self.numerics.state._replace(**{flag: value})

    return property(read, write, doc=what)


# A compiler calls the functions below while it traces. They take only strings, so every module has a string key.

_modules: weakref.WeakValueDictionary[str, Owner] = weakref.WeakValueDictionary()
_serial = itertools.count()


def new_tracing_key(module: Owner) -> str:
    """Return a new string key for the module, because a traced function can pass strings but not objects."""
    key = f"module {next(_serial)}"
    _modules[key] = module
    for call in on_creation:
        call(module)
    return key


# Called for every new module.
on_creation: list[Callable[[Owner], None]] = []


def module_of_key(tracing_key: str) -> Any:
    """Return the module with a key from `new_tracing_key`."""
    return _modules[tracing_key]


def existing_modules() -> list[Owner]:
    """Return the modules with numerics in this process, in creation order."""
    return list(_modules.values())


def trace_call(owner: Owner, tracing_key: str, state: AutocastState) -> ModuleRecipe:
    """Return `Numerics.of_call` for a graph; states are created outside of it, where the backward can write to them."""
    if owner.numerics.observes_unquantized:
        raise RuntimeError(
            f"{type(owner).__name__} belongs to a debug session, and a compiled graph shows no tensors; run it in "
            "eager mode, or end the session"
        )
    if not (state.enabled or state.calibrating):
        return unquantized(owner.num_products)
    _serve_while_tracing(tracing_key, recipe_description(state.recipe), state.group)
    active = owner.numerics.cached.recipe
    assert active is not None
    if state.enabled:
        return active
    assert active.calibrating is not None
    return active.calibrating


@constant_while_tracing
def _serve_while_tracing(tracing_key: str, recipe: str, group: Any) -> bool:
    module = _modules[tracing_key]
    active = module.numerics.cached.recipe
    if (
        active is None
        or (active.revision or repr(active.recipe)) != recipe
        or active.group is not group
    ):
        active = module.numerics.renew(module, recipe_described_as(recipe), group)
    if active.has_state:
        FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(module.numerics.meta)
    return True


@constant_while_tracing
def _first_call_while_tracing(tracing_key: str) -> bool:
    """Return whether this is the module's first call with gradients in the graph that is being traced."""
    return is_first_call_in_trace(_modules[tracing_key])


def traced_update(owner: Owner, tracing_key: str, group: Any) -> ScaleUpdate | None:
    """Return the scale update for a call in a graph: the module's own scales, after the backward of its first call."""
    if not _first_call_while_tracing(tracing_key):
        return None
    return ScaleUpdate(owner.numerics.delayed_states("scaling_bwd"), group)
