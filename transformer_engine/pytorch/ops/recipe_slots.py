"""RecipeSlots: the quantizers of a basic operation under the active recipe, and their state in checkpoints."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from ...common.recipe import Recipe, is_unchanged, recipe_revision
from ..distributed.recompute import is_fp8_activation_recompute_enabled
from ..quantization import FP8GlobalStateManager, QuantizerRole, RecipeState
from ..quantization.autocast import AutocastState
from ..quantization.extra_state import (
    check_extra_state,
    decode_extra_state,
    encode_extra_state,
    load_extra_state,
    validate_state,
)
from ..quantization.family import find_family
from ..quantization.recompute_states import replay_quantizers
from ..quantization.resizable_state import ResizableState
from ..runtime.device import canonical_device
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.quantizer import Quantizer

MODES = ("forward", "backward")
KEYS = {"forward": "scaling_fwd", "backward": "scaling_bwd"}
_SUFFIX = {"forward": "fwd", "backward": "bwd"}
# Attributes of `RecipeSlots` that are no settings of the operation: `_revision` does not count writes to them.
RECIPE_ATTRIBUTES = frozenset({"_quantizers", "_applied", "_quantizers_version", "_suspended"})
_serial = itertools.count()
_versions = itertools.count(1)
operations_by_name: weakref.WeakValueDictionary[str, RecipeSlots] = weakref.WeakValueDictionary()


class _Suspended(NamedTuple):
    """Quantizers of the last recipe, while no recipe is active.

    Attributes:
        applied, quantizers, version: Former values of `_applied`, `_quantizers` and `_quantizers_version`.
        revision: `_revision` of the operation; another one may need other quantizers.
    """

    applied: tuple[Recipe, Any, Any]
    quantizers: dict[str, list[Quantizer]]
    version: int
    revision: int


class RecipeSlots:
    """The quantizers of one operation; a mixin of `torch.nn.Module`.

    Calls without a recipe, such as an evaluation between training steps, suspend the quantizers. The next call under
    the same recipe resumes them, so that the passes that were prepared with them stay valid.

    Attributes:
        _fp8_metas: Recipe, group and recipe state per mode, "forward" and "backward"; None before the first recipe.
        _quantizers: Quantizers per mode; empty while no recipe is active.
        _applied: The recipe of the quantizers, its revision, and the group; None while no recipe is active.
        _quantizers_version: Number of these quantizers, as a part of keys (`call_key.py`); 0 while no recipe is active.
        _suspended: Quantizers of the last recipe, while no recipe is active.
    """

    _revision: int
    _fp8_metas: dict[str, dict[str, Any] | None]
    _quantizers: dict[str, list[Quantizer]]
    _applied: tuple[Recipe, Any, Any] | None = None
    _quantizers_version: int = 0
    _suspended: _Suspended | None = None
    _traced_name: str

    def _create_recipe_slots(self) -> None:
        self._fp8_metas = dict.fromkeys(MODES)
        self._quantizers = {mode: [] for mode in MODES}
        self._applied = None
        self._register_name()

    def _register_name(self) -> None:
        """Give the operation a name, by which traced functions and repeated calls find it."""
        self._traced_name = f"operation {next(_serial)}"
        operations_by_name[self._traced_name] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy under a new name."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        # In the class that `parametrize` derives, `__getstate__` raises an error.
        original: Any = parametrize.type_before_parametrizations(self)  # pyright: ignore[reportArgumentType]
        state: dict[str, Any] = original.__getstate__(self)
        copied.__dict__.update(copy.deepcopy(state, memo))
        copied._register_name()
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # pyright: ignore[reportAttributeAccessIssue]
        self._register_name()
        if self._applied is not None:  # the number in the pickle belongs to another process
            self._quantizers_version = next(_versions)
        self._suspended = None

    def num_quantizers(self, mode: str) -> int:
        """Return how many tensors the operation quantizes in a mode, "forward" or "backward"."""
        return 0

    def get_quantizer(self, mode: str, index: int) -> Quantizer | None:
        """Return a quantizer for the active recipe; None without a recipe.

        Args:
            mode: "forward" or "backward".
            index: Quantizer index, less than `num_quantizers(mode)`.

        Raises:
            ValueError: The quantizer does not exist.
        """
        count = self.num_quantizers(mode)
        if not 0 <= index < count:
            raise ValueError(
                f"quantizer {index} does not exist: {type(self).__name__} has {count} in {mode} mode"
            )
        quantizers = self._quantizers[mode]
        return quantizers[index] if quantizers else None

    def get_quantizer_roles(self, mode: str) -> Sequence[QuantizerRole | None] | None:
        """Return the role of each quantizer, which the factory of a custom recipe receives; None if unknown."""
        return [None] * self.num_quantizers(mode)

    def reset_recipe_state(self, *, recipe: Recipe | None = None) -> None:
        """Create the quantizers for a recipe; delayed-scaling scales and histories continue.

        Args:
            recipe: The recipe; None removes the quantizers.
        """
        self._set_recipe(recipe, None)

    def apply_recipe(self, state: AutocastState) -> None:
        """Use the recipe of an autocast state from now on."""
        recipe = state.recipe if state.enabled or state.calibrating else None
        if recipe is None:
            if self._applied is not None:
                self._suspend(self._applied)
            return
        if not _is_same(self._applied, recipe, state.group) and not self._resume(
            recipe, state.group
        ):
            self._set_recipe(recipe, state.group)
        if find_family(recipe).stateful:
            self.register_for_updates()

    def _suspend(self, applied: tuple[Recipe, Any, Any]) -> None:
        """Set the quantizers aside for calls without a recipe."""
        suspended = _Suspended(applied, self._quantizers, self._quantizers_version, self._revision)
        self._set_recipe(None, None)
        self._suspended = suspended

    def _resume(self, recipe: Recipe, group: Any) -> bool:
        """Take suspended quantizers back if they fit a recipe. Returns whether they do."""
        suspended = self._suspended
        if (
            suspended is None
            or suspended.revision != self._revision
            or not _is_same(suspended.applied, recipe, group)
            or any(
                meta[KEYS[mode]].device != self._state_device()
                for mode, meta in self._fp8_metas.items()
                if meta is not None
            )
        ):
            return False
        self._applied, self._quantizers = suspended.applied, suspended.quantizers
        self._quantizers_version, self._suspended = suspended.version, None
        self._connect_parameters()
        return True

    def _set_recipe(self, recipe: Recipe | None, group: Any) -> None:
        """Create the quantizers for a recipe, or remove them."""
        self._suspended = None
        if recipe is None:
            self._quantizers = {mode: [] for mode in MODES}
            self._applied, self._quantizers_version = None, 0
            return
        for mode in MODES:
            self._create_quantizers(mode, recipe, group)
        self._applied, self._quantizers_version = (
            (recipe, recipe_revision(recipe), group),
            next(_versions),
        )
        self._connect_parameters()

    def _connect_parameters(self) -> None:
        """Connect quantized parameters to the current quantizers; see `connect_parameter`."""

    def _create_quantizers(self, mode: str, recipe: Recipe, group: Any) -> None:
        count = self.num_quantizers(mode)
        if not count:
            return
        meta = self._fp8_metas[mode]
        previous = None if meta is None else meta.get(KEYS[mode])
        state = RecipeState.renew(
            previous,
            recipe,
            mode=mode,
            num_quantizers=count,
            device=self._state_device(),
            roles=self.get_quantizer_roles(mode),
        )
        self._fp8_metas[mode] = {"recipe": recipe, "fp8_group": group, KEYS[mode]: state}
        self._quantizers[mode] = state.make_quantizers()

    def quantize_parameter(self, values: Tensor, index: int) -> Tensor:
        """Quantize the initial values of a parameter, as `quantized_model_init` requests."""
        quantizer = self.get_quantizer("forward", index)
        assert quantizer is not None
        quantizer = quantizer.copy()
        quantizer.set_usage(rowwise=True, columnwise=torch.is_grad_enabled())
        quantizer.internal = False
        with torch.no_grad():
            return quantizer.quantize(values)  # pyright: ignore[reportReturnType]

    def connect_parameter(self, parameter: Any, index: int) -> None:
        """Connect a quantized parameter to the state of a forward-pass quantizer, whose scale updates then reach it."""
        quantizer = self.get_quantizer("forward", index)
        if (
            not isinstance(parameter, QuantizedTensor)
            or quantizer is None
            or parameter._quantizer is None
        ):
            return
        current: Any = parameter._quantizer
        if (current.stateful or quantizer.stateful) and type(current) is type(quantizer):
            quantizer = quantizer.copy()
            quantizer.set_usage(**current.get_usages())
            quantizer.internal = False
            parameter.update_quantizer(quantizer)

    def register_for_updates(self) -> None:
        """Include delayed-scaling states in scale updates; a repeated call costs next to nothing."""
        for meta in self._fp8_metas.values():
            if meta is not None:
                FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(meta)

    def forward_quantizers(self) -> list[Quantizer]:
        """Return the forward-pass quantizers, for one call.

        In the second run of a checkpointed function they repeat the scales of the first run.

        Raises:
            RuntimeError: The function did not call the operation as often in its first run.
        """
        quantizers = self._quantizers["forward"]
        if not (is_fp8_activation_recompute_enabled() and self.has_scaling_state()):
            return quantizers
        (repeated,) = replay_quantizers(type(self).__name__, self._traced_name, (quantizers,))
        return list(repeated)

    def has_scaling_state(self) -> bool:
        """Return whether an active quantizer has scales that change between calls."""
        return self._applied is not None and any(self.delayed_states(mode) for mode in MODES)

    def delayed_states(self, mode: str) -> tuple[Any, ...]:
        """Return the delayed-scaling states in a mode."""
        meta = self._fp8_metas[mode]
        return () if meta is None else meta[KEYS[mode]].delayed_states

    def _state_device(self) -> torch.device:
        for parameter in self.parameters(recurse=False):  # pyright: ignore[reportAttributeAccessIssue]
            return canonical_device("cuda") if parameter.is_meta else parameter.device
        return canonical_device("cuda")

    def _save_fp8_metas(self) -> dict[str, Any]:
        """Copy delayed-scaling scales and histories by mode; see `_load_fp8_metas`."""
        return {
            mode: [
                (state.scale.clone(), state.amax_history.clone())
                for state in self.delayed_states(mode)
            ]
            for mode in MODES
        }

    def _load_fp8_metas(self, saved: dict[str, Any] | None) -> None:
        """Restore what `_save_fp8_metas` returned, in place."""
        for mode, states in (saved or {}).items():
            for state, (scale, history) in zip(self.delayed_states(mode), states, strict=True):
                state.scale.copy_(scale)
                state.amax_history.copy_(history)

    def get_extra_state(self) -> Tensor:
        """Return recipe and scaling states as a uint8 tensor on the CPU; empty without delayed scaling."""
        content: dict[str, Any] = {}
        for mode, meta in self._fp8_metas.items():
            if meta is not None and find_family(meta["recipe"]).stateful:
                content[mode] = decode_extra_state(encode_extra_state(meta))
        if not any(content.values()):
            return ResizableState.of(torch.empty(0, dtype=torch.uint8, device="cpu"))
        return ResizableState.of(
            torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)
        )

    def read_extra_state(
        self, state: Tensor | io.BytesIO | None
    ) -> dict[str, dict[str, Any]] | None:
        """Decode a state and check that it fits the operation; nothing is changed. Returns a state per mode.

        Raises:
            ExtraStateError: The state is damaged, names something that may not be loaded, or does not fit.
        """
        content = decode_extra_state(state)
        if content is None:
            return None
        saved = {mode: validate_state(content[mode]) for mode in MODES if content.get(mode)}
        for mode, part in saved.items():
            check_extra_state(part, {_SUFFIX[mode]: self.num_quantizers(mode)})
        return saved

    def set_extra_state(self, state: Tensor | io.BytesIO | None) -> None:
        """Restore the state that `get_extra_state` returned, read through an allow-list.

        Raises:
            ExtraStateError: The state is damaged, names something that may not be loaded, or does not fit.
        """
        saved = self.read_extra_state(state)
        if saved is None:
            return
        for mode, part in saved.items():
            self._create_quantizers(mode, part["recipe"], None)
            meta = self._fp8_metas[mode]
            if meta is not None:
                load_extra_state(part, meta)
        self._set_recipe(None, None)  # the next call creates quantizers for the restored states


def _is_same(applied: tuple[Recipe, Any, Any] | None, recipe: Recipe, group: Any) -> bool:
    """Whether quantizers with this value of `_applied` belong to a recipe and a group."""
    return (
        applied is not None and is_unchanged(applied[0], applied[1], recipe) and applied[2] is group
    )
