"""ModuleRecipe: the quantizers that one module uses under one recipe, made once and kept until the recipe changes."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._guards import TracingContext

from ...common.recipe import Recipe, description_of, recipe_described_as
from ..functions.linear import IDENTITY, Accumulation
from ..quantization import FP8GlobalStateManager, RecipeState, delayed_scaling
from ..quantization.autocast import AutocastState
from ..quantization.family import family_of
from ..tensor.quantizer import Calibrating, Quantizer
from ..tracing import constant_while_tracing

if TYPE_CHECKING:
    from .base import TransformerEngineBaseModule

# Slots of a product: the original's order, which checkpoints of delayed scaling rely on.
FORWARD_SLOTS = 3  # input, weight, output
BACKWARD_SLOTS = 2  # grad_output, grad_input


def slots(products: int) -> dict[str, int]:
    """How many quantizers a module with so many products has in each direction, by the suffix of its states' keys."""
    return {"fwd": FORWARD_SLOTS * products, "bwd": BACKWARD_SLOTS * products}


@dataclass(frozen=True)
class ProductQuantizers:
    """The five quantizers of one linear product and its two gradients."""

    input: Quantizer
    weight: Quantizer
    output: Quantizer
    grad_output: Quantizer
    grad_input: Quantizer

    def calibrating(self) -> ProductQuantizers:
        """The same, but only recording statistics: the products stay in high precision."""
        return ProductQuantizers(
            Calibrating(self.input), Calibrating(self.weight), IDENTITY, IDENTITY, IDENTITY
        )

    def replay_states(self) -> tuple[tuple[Tensor, ...], ...]:
        """What the three forward quantizers depend on beside their input."""
        return self.input.replay_state(), self.weight.replay_state(), self.output.replay_state()

    def replaying(self, states: tuple[tuple[Tensor, ...], ...]) -> ProductQuantizers:
        """The same as they were when `replay_states` returned states, recording nothing in the forward."""
        of_input, of_weight, of_output = states
        return ProductQuantizers(
            self.input.replaying(of_input),
            self.weight.replaying(of_weight),
            self.output.replaying(of_output),
            self.grad_output,
            self.grad_input,
        )


UNQUANTIZED = ProductQuantizers(IDENTITY, IDENTITY, IDENTITY, IDENTITY, IDENTITY)


class ModuleRecipe:
    """Recipe, group and quantizers of one module; `product(i)` gives those of its i-th product."""

    def __init__(self, recipe: Recipe, group: Any, forward: list[Quantizer], backward: list[Quantizer]):
        self.recipe = recipe
        self.group = group
        self.products = tuple(
            ProductQuantizers(
                *forward[FORWARD_SLOTS * i : FORWARD_SLOTS * (i + 1)],
                *backward[BACKWARD_SLOTS * i : BACKWARD_SLOTS * (i + 1)],
            )
            for i in range(len(forward) // FORWARD_SLOTS)
        )
        self.has_state = family_of(recipe).stateful
        self.accumulation = accumulation_of(recipe)
        self.backward = getattr(recipe, "backward_override", None) or "quantized"

    def serves(self, state: AutocastState) -> bool:
        return self.recipe is state.recipe and self.group is state.group


def accumulation_of(recipe: Recipe) -> Accumulation:
    """Split accumulation by product: what the recipe says, else the original's defaults (forward fast)."""
    products = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")
    if all(hasattr(recipe, name) for name in products):
        return Accumulation(*(getattr(recipe, name).use_split_accumulator for name in products))
    return Accumulation()


def ensure(module: TransformerEngineBaseModule, state: AutocastState) -> bool:
    """Make the module's quantizers for the active recipe unless it has them; True, so that a tracer keeps the call."""
    if torch.compiler.is_compiling():
        return _ensure_while_tracing(module.tracing_key, description_of(state.recipe), state.group)
    assert state.recipe is not None
    active = module._module_recipe
    if active is None or not active.serves(state):
        active = renew(module, state.recipe, state.group)
    if active.has_state:
        # Again at every forward: FP8GlobalStateManager.reset() forgets who takes part in scale updates.
        FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(module.fp8_meta)
    return True


_modules: weakref.WeakValueDictionary[str, TransformerEngineBaseModule] = weakref.WeakValueDictionary()
_serial = itertools.count()


def new_tracing_key(module: TransformerEngineBaseModule) -> str:
    """A name for the module: a traced function may hand on strings, not objects."""
    key = f"module {next(_serial)}"
    _modules[key] = module
    return key


@constant_while_tracing
def _ensure_while_tracing(module_key: str, recipe: str, group: Any) -> bool:
    """Runs for real while torch.compile traces: state made inside the graph would be lost to the backward's writes."""
    module = _modules[module_key]
    active = module._module_recipe
    if active is None or repr(active.recipe) != recipe or active.group is not group:
        active = renew(module, recipe_described_as(recipe), group)
    if active.has_state:
        FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(module.fp8_meta)
    return True


# The trace in which a module was last called with a backward to come.
_traced: weakref.WeakKeyDictionary[TransformerEngineBaseModule, weakref.ref[Any]] = (
    weakref.WeakKeyDictionary()
)


@constant_while_tracing
def first_call_while_tracing(module_key: str) -> bool:
    """Is this the module's first call, of those that will have a backward, in the graph that is being traced?"""
    module, trace = _modules[module_key], TracingContext.try_get()
    before = _traced.get(module)
    if trace is None or (before is not None and before() is trace):
        return trace is None
    _traced[module] = weakref.ref(trace)
    return True


def renew(module: TransformerEngineBaseModule, recipe: Recipe, group: Any) -> ModuleRecipe:
    """An equal recipe in a new object changes nothing; anything else makes new quantizers."""
    active = module._module_recipe
    if active is not None and active.recipe == recipe and active.group is group:
        active.recipe = recipe
        return active
    return materialize(module, recipe, group)


def materialize(module: TransformerEngineBaseModule, recipe: Recipe, group: Any) -> ModuleRecipe:
    """Create or adapt the recipe states and quantizers of a module; delayed scaling keeps its histories."""
    meta = module.fp8_meta
    products = module.num_products
    _announce_change(module, meta.get("recipe"), recipe)
    for forward in (True, False):
        renew_direction(module, forward, recipe)
    meta.update(recipe=recipe, num_gemms=products, fp8_group=group, fp8_checkpoint=True)
    fp8_format = getattr(recipe, "fp8_format", None)
    if fp8_format is not None:
        meta.update(fp8_max_fwd=fp8_format.value.max_fwd, fp8_max_bwd=fp8_format.value.max_bwd)
    module._fp8_workspaces.clear()
    module.fp8_initialized = True
    made = ModuleRecipe(recipe, group, module.quantizers["scaling_fwd"], module.quantizers["scaling_bwd"])
    module._module_recipe = made
    return made


def _announce_change(module: TransformerEngineBaseModule, before: Recipe | None, recipe: Recipe) -> None:
    """A warning where the kind of quantizer changes: scales, histories and cached weights start anew."""
    if before is None or family_of(before) is family_of(recipe):
        return
    names = type(before).__name__, type(recipe).__name__
    module._warn_once(
        f"recipe {names}",
        f"{type(module).__name__} goes from {names[0]} to {names[1]}: its quantizers and cached weights are made anew",
    )


def renew_direction(module: TransformerEngineBaseModule, forward: bool, recipe: Recipe) -> None:
    """State and quantizers of one direction, for the products that the module has now."""
    key, mode, slots = (
        ("scaling_fwd", "forward", FORWARD_SLOTS) if forward else ("scaling_bwd", "backward", BACKWARD_SLOTS)
    )
    count = slots * module.num_products
    previous = module.fp8_meta.get(key)
    with torch.inference_mode(False):  # later steps write to it, which a tensor of inference mode forbids
        state = RecipeState.renew(
            previous,
            recipe,
            mode=mode,
            num_quantizers=count,
            device=module._state_device(),
            roles=module.get_quantizer_roles(fwd=forward, num_quantizers=count),
        )
    for replaced in () if previous is None or previous is state else previous.delayed_states:
        delayed_scaling.unregister(replaced)
    module.fp8_meta[key] = state
    module.quantizers[key] = state.make_quantizers()
