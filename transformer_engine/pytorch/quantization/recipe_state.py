"""RecipeState: the tensors that the quantizers of one module and direction share, if there are any."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...common.numbers import with_article
from ...common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Format,
    Recipe,
    is_unchanged,
    recipe_revision,
)
from ..constants import DType
from ..runtime.device import canonical_device
from ..runtime.tracing import export_mode
from ..tensor.float8_tensor import Float8Quantizer
from ..tensor.identity_tensor import IdentityQuantizer
from ..tensor.quantizer import Quantizer
from .delayed_scaling import unregister
from .family import find_family
from .roles import (
    MODES,
    DelayedScalingRequest,
    QuantizerRequest,
    QuantizerRole,
    factory_roles,
    tensor_types,
)
from .scale_snapshot import compiled_scale


def get_fp8_te_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> DType:
    """Return E4M3, except E5M2 for the backward pass of HYBRID."""
    format = fp8_recipe.fp8_format
    is_e4m3 = format is Format.E4M3 or (format is Format.HYBRID and fprop_tensor)
    return DType.kFloat8E4M3 if is_e4m3 else DType.kFloat8E5M2


def get_fp8_torch_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> torch.dtype:
    """Return the dtype of `get_fp8_te_dtype` as a torch dtype."""
    is_e4m3 = get_fp8_te_dtype(fp8_recipe, fprop_tensor) is DType.kFloat8E4M3
    return torch.float8_e4m3fn if is_e4m3 else torch.float8_e5m2


def get_fp4_te_dtype(fp4_recipe: Recipe) -> DType:
    """Return E2M1, the only 4-bit element type."""
    return DType.kFloat4E2M1


def get_fp8_max(fp8_recipe: Recipe, fprop_tensor: bool = True) -> float:
    """Return 448 for E4M3, 57344 for E5M2."""
    largest = fp8_recipe.fp8_format.value
    return largest.max_fwd if fprop_tensor else largest.max_bwd


class RecipeState:
    """Recipe, direction and number of quantizers of a module; subclasses add tensors."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: torch.device | str | int | None = None,
        roles: Sequence[QuantizerRole | None] | None = None,
    ):
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}; it must be 'forward' or 'backward'")
        if num_quantizers < 0:
            raise ValueError(f"num_quantizers={num_quantizers} < 0; give the number of slots")
        self.recipe = recipe
        self.revision = recipe_revision(recipe)
        self.mode = mode
        self.num_quantizers = num_quantizers
        self.device = canonical_device(device)
        self.roles = roles

    @staticmethod
    def create(
        recipe: Recipe,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: torch.device | str | int | None = None,
        roles: Sequence[QuantizerRole | None] | None = None,
    ) -> RecipeState:
        """Return a state in the recipe's family."""
        state = find_family(recipe).state
        return state(recipe, mode=mode, num_quantizers=num_quantizers, device=device, roles=roles)

    @staticmethod
    def renew(
        previous: RecipeState | None,
        recipe: Recipe,
        *,
        num_quantizers: int = 1,
        roles: Sequence[QuantizerRole | None] | None = None,
        **place: Any,
    ) -> RecipeState:
        """Return previous if recipe and device are the same, else a state that continues its scales and histories.

        The previous state then takes part in no scale update any more.

        place: mode and device, as in `create`.
        """
        as_many = previous is not None and previous.num_quantizers == num_quantizers
        if (
            previous is not None
            and as_many
            and previous.device == canonical_device(place.get("device"))
            and is_unchanged(previous.recipe, previous.revision, recipe)
        ):
            previous.roles = roles
            return previous
        with torch.inference_mode(
            False
        ):  # later steps write to the state; inference tensors are read-only
            state = RecipeState.create(recipe, num_quantizers=num_quantizers, roles=roles, **place)
            if previous is not None and as_many:
                state.inherit(previous)
        for replaced in () if previous is None else previous.delayed_states:
            unregister(replaced)
        return state

    @property
    def delayed_states(self) -> tuple[DelayedScalingRecipeState, ...]:
        """The delayed-scaling states inside, which each take part in scale updates."""
        return ()

    def inherit(self, previous: RecipeState) -> None:
        """Copy scales and histories from a state with equally many quantizers; this class has none."""

    def make_quantizers(self) -> list[Quantizer]:
        """Return one quantizer per slot, built by the recipe's family."""
        make = find_family(self.recipe).quantizer
        if make is None:
            raise TypeError(
                f"{type(self).__name__} has to make its quantizers itself; its family does not"
            )
        tensors = tensor_types(self.mode, self.num_quantizers, self._roles_of_slots())
        return [make(self.recipe, self.mode, tensor, self.device) for tensor in tensors]

    def _slot_role(self, slot: int) -> QuantizerRole | None:
        """Return the role that the module gave for a slot; None if it gave none."""
        roles = self._roles_of_slots()
        return None if roles is None else roles[slot]

    def _roles_of_slots(self) -> Sequence[QuantizerRole | None] | None:
        if self.roles is not None and len(self.roles) != self.num_quantizers:
            raise ValueError(
                f"{len(self.roles)} roles for {self.num_quantizers} quantizers; "
                "give one a slot, None for those unknown"
            )
        return self.roles


class StatelessRecipeState(RecipeState):
    """No tensors: scales are computed from the quantized tensor."""

    @property
    def dtype(self) -> DType:
        """The element of this direction."""
        return get_fp8_te_dtype(self.recipe, self.mode == "forward")


_numbers = itertools.count()


class DelayedScalingRecipeState(RecipeState):
    """scale float32 [n], 1 at first; amax_history float32 [length, n], 0 at first, row 0 the running step."""

    scale_in_place: Tensor
    amax_history: Tensor
    dtype: DType

    def __init__(self, recipe: DelayedScaling, **arguments: Any):
        super().__init__(recipe, **arguments)
        if recipe.amax_history_len < 1:
            raise ValueError(
                f"amax_history_len={recipe.amax_history_len} leaves no row for the running step's maximum; "
                "set it to at least 1"
            )
        self.recipe: DelayedScaling = recipe
        self.dtype = get_fp8_te_dtype(recipe, self.mode == "forward")
        self.scale_in_place = torch.ones(
            self.num_quantizers, dtype=torch.float32, device=self.device
        )
        self.amax_history = torch.zeros(
            recipe.amax_history_len, self.num_quantizers, dtype=torch.float32, device=self.device
        )
        self.registration: Any = None
        self.key = f"state {next(_numbers)}"

    @property
    def scale(self) -> Tensor:
        """The scale tensor; while compiling, a copy that later updates leave alone."""
        if not torch.compiler.is_compiling() or export_mode.onnx:
            return self.scale_in_place
        return compiled_scale(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, which must be registered for updates separately."""
        return {**self.__dict__, "registration": None}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        """Restore the attributes of a copy; the copy has its own key."""
        self.__dict__.update(attributes, key=f"state {next(_numbers)}")

    @property
    def delayed_states(self) -> tuple[DelayedScalingRecipeState, ...]:
        return (self,)

    def make_quantizers(self) -> list[Quantizer]:
        slots = range(self.num_quantizers)
        return [Float8Quantizer.from_state(self, slot, self.dtype) for slot in slots]

    def inherit(self, previous: RecipeState) -> None:
        for state in previous.delayed_states:
            if state.num_quantizers == self.num_quantizers:
                self.scale.copy_(state.scale)
                self.load_history(state.amax_history)

    def forget(self) -> None:
        """Reset scales and histories in place."""
        self.scale_in_place.fill_(1.0)
        self.amax_history.zero_()

    def load_history(self, history: Tensor) -> None:
        """Copy a history with any length: its first rows, and zeros where it is shorter."""
        rows = min(history.shape[0], self.amax_history.shape[0])
        self.amax_history.zero_()
        self.amax_history[:rows].copy_(history[:rows])

    def resize_history(self, length: int) -> None:
        """Keep `length` rows: older positions are dropped, missing ones are zero."""
        rows = self.amax_history.shape[0]
        if length == rows:
            return
        if length < rows:
            self.amax_history = self.amax_history[:length].clone()
        else:
            self.amax_history = torch.nn.functional.pad(self.amax_history, (0, 0, 0, length - rows))


class CustomRecipeState(RecipeState):
    """The state that a custom recipe's factory requested: one delayed-scaling state for each distinct request."""

    def __init__(self, recipe: CustomRecipe, **arguments: Any):
        super().__init__(recipe, **arguments)
        self.recipe: CustomRecipe = recipe
        self._delayed: dict[
            DelayedScalingRequest, tuple[tuple[int, ...], DelayedScalingRecipeState]
        ] = {}

    @property
    def delayed_states(self) -> tuple[DelayedScalingRecipeState, ...]:
        return tuple(state for _, state in self._delayed.values())

    @property
    def scale(self) -> Tensor:
        """The scales for slots with a delayed-scaling request, if all requests are equal."""
        return self._one_delayed("scale").scale

    @property
    def amax_history(self) -> Tensor:
        """The histories of the same slots."""
        return self._one_delayed("amax_history").amax_history

    def _one_delayed(self, attribute: str) -> DelayedScalingRecipeState:
        if len(self._delayed) != 1:
            raise AttributeError(
                f"{attribute} of {len(self._delayed)} delayed-scaling states; read delayed_states instead"
            )
        return next(iter(self.delayed_states))

    def inherit(self, previous: RecipeState) -> None:
        """Inherit nothing: another factory may assign the slots differently."""

    def make_quantizers(self) -> list[Quantizer]:
        factory_of_role = self.recipe.qfactory
        assert factory_of_role is not None, "CustomRecipe validates it"
        roles = factory_roles(self.mode, self.num_quantizers, self._roles_of_slots())
        answers = [factory_of_role(role) for role in roles]
        slots: dict[DelayedScalingRequest, tuple[int, ...]] = {}
        for slot, answer in enumerate(answers):
            if isinstance(answer, DelayedScalingRequest):
                slots[answer] = (*slots.get(answer, ()), slot)
            elif isinstance(answer, QuantizerRequest):
                raise TypeError(
                    f"no state for {type(answer).__name__}; return a DelayedScalingRequest or a quantizer"
                )
            elif answer is None:
                answers[slot] = IdentityQuantizer()  # leave the tensor in high precision
            elif not isinstance(answer, Quantizer):
                quantizers = (
                    f"the class {answer.__name__}"
                    if isinstance(answer, type)
                    else with_article(type(answer))
                )
                raise TypeError(
                    f"the qfactory of CustomRecipe returned {quantizers} for {roles[slot]!r}; return a "
                    "quantizer object, a DelayedScalingRequest, or None for high precision"
                )
        before = self._delayed
        self._delayed = {
            request: self._find_state(request, members) for request, members in slots.items()
        }
        for request, (_, state) in before.items():
            if request not in self._delayed or self._delayed[request][1] is not state:
                unregister(state)
        for members, state in self._delayed.values():
            for column, slot in enumerate(members):
                answers[slot] = Float8Quantizer.from_state(state, column, state.dtype)
        return answers

    def _find_state(
        self, request: DelayedScalingRequest, slots: tuple[int, ...]
    ) -> tuple[tuple[int, ...], DelayedScalingRecipeState]:
        """Return the slots of a request with their state; slots that had the request before keep their columns."""
        cached = self._delayed.get(request)
        if cached is not None and cached[0] == slots:
            return cached
        state = DelayedScalingRecipeState(
            request.recipe(), mode=self.mode, num_quantizers=len(slots), device=self.device
        )
        if cached is not None:
            for column, slot in enumerate(slots):
                if slot in cached[0]:
                    source = cached[0].index(slot)
                    state.scale_in_place[column].copy_(cached[1].scale_in_place[source])
                    state.amax_history[:, column].copy_(cached[1].amax_history[:, source])
        return slots, state


def make_quantizers(
    recipe: Recipe,
    mode: str,
    count: int,
    device: torch.device,
    state: RecipeState | None,
    roles: Sequence[QuantizerRole | None] | None = None,
) -> list[Quantizer]:
    """Return one quantizer per slot; state belongs to the same arguments, None creates a new one."""
    find_family(recipe)
    if state is None:
        state = RecipeState.create(
            recipe, mode=mode, num_quantizers=count, device=device, roles=roles
        )
    return state.make_quantizers()


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """Return the multiple to which rows of a group are padded before quantization."""
    return find_family(recipe).alignment(recipe)
