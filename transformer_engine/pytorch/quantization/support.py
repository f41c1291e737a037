"""available(format) = the hardware computes it, or emulation is on; every check also returns a reason.

Emulation computes a format that the hardware lacks with the reference maths. It is on where there is no GPU,
and elsewhere by `TE_EMULATE=1` or `emulate()`: no GPU claims a format that it lacks without either.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, overload

from ...common import env
from ...common.checks import described, suggests_keywords
from ...common.hardware import Hardware, capability_limits, is_older
from ...common.numbers import to_bool, with_article
from ...common.recipe import Recipe, reject_recipe_as_enabled
from ...common.recipe.field_checks import defaults_are_readable, demand_readable_defaults
from ..primitives.gemm import multiplies_natively
from ..runtime.device import cuda_version, current_hardware, has_cuda
from ..runtime.tracing import constant_while_tracing
from .family import Family, Requirement, all_families, find_family

_BF16 = Requirement("BF16", "bf16 recipe")


@dataclass(frozen=True)
class Support:
    """Whether this machine runs a format: on its hardware, by emulation, or not at all, for the reason `reason`.

    Attributes:
        kind: Name of the format.
        native: Whether the hardware computes the format.
        emulated: Whether the format is emulated.
        reason: Reason why the format is not native; empty if it is.
    """

    kind: str
    native: bool
    emulated: bool
    reason: str

    @property
    def available(self) -> bool:
        return self.native or self.emulated


@dataclass
class _Switch:
    """The emulation switch: None follows TE_EMULATE, and without it the absence of a GPU."""

    forced: bool | None = None


_switch = _Switch()
_requested = env.watch("TE_EMULATE")


class emulate:
    """Enable emulation for formats that the hardware lacks, at once; a `with` block restores the previous state.

    Args:
        enabled: False disables emulation.
    """

    @suggests_keywords
    def __init__(self, enabled: bool = True):
        if type(enabled) is not bool:
            enabled = to_bool("enabled", enabled)
        self._before = _switch.forced
        _switch.forced = enabled

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        _switch.forced = self._before


@constant_while_tracing
def _emulates_by_default() -> bool:
    requested = None if _requested() is None else env.get("TE_EMULATE")
    return not has_cuda() if requested is None else bool(requested)


def is_emulating() -> bool:
    """Return whether formats that the hardware does not support are emulated."""
    return _emulates_by_default() if _switch.forced is None else _switch.forced


@constant_while_tracing
def _hardware_reason(kind: str) -> str:
    """Return an empty text if the current device computes the format in hardware, otherwise a sentence."""
    if not has_cuda():
        return f"There is no CUDA device for {kind} execution."
    return _device_reason(kind, current_hardware(), cuda_version())


@functools.cache
def _device_reason(kind: str, hardware: Hardware, cuda: tuple[int, int]) -> str:
    """Return the reason for a device; cached, because every autocast block reads it."""
    requirement = _requirement(kind)
    if not hardware.has(requirement.capability):
        least, below = capability_limits(requirement.capability)
        if hardware.vendor == "nvidia" and not is_older(hardware, least):
            assert below is not None
            limit = below.architecture
            return f"{requirement.title} execution is not supported on device compute capability {limit} and higher."
        if hardware.vendor == "nvidia":
            limit = least.architecture
            return f"Device compute capability {limit} or higher required for {requirement.title} execution."
        remark = f": {hardware.remark}" if hardware.remark else ""
        return f"{hardware.title} has no {requirement.title} execution{remark}."
    if cuda < requirement.cuda:
        return f"CUDA {requirement.cuda[0]}.{requirement.cuda[1]} or higher required for {requirement.title} execution."
    return ""


def kinds() -> tuple[str, ...]:
    """Return the format kinds: bfloat16, and the kinds in all families."""
    return (
        "bf16",
        *dict.fromkeys(family.kind for family in all_families() if family.kind is not None),
    )


def _requirement(kind: str) -> Requirement:
    if kind == "bf16":
        return _BF16
    for family in all_families():
        if family.kind == kind and family.requirement is not None:
            return family.requirement
    raise ValueError(f"unknown format kind {kind!r}; choose one of {', '.join(kinds())}")


def format_support(kind: str) -> Support:
    """Return the support on this machine for a format in `kinds()`."""
    reason = _hardware_reason(kind)
    native = reason == ""
    return Support(kind, native, not native and is_emulating(), reason)


def _check(kind: str) -> tuple[bool, str]:
    reason = _hardware_reason(kind)
    if reason == "" or is_emulating():
        return True, ""
    return False, f"{reason} Set TE_EMULATE=1 or call te.emulate() to compute it by emulation."


def check_recipe_support(recipe: Recipe) -> tuple[bool, str]:
    """Return (available, reason) for the formats of a recipe; a custom recipe is always available.

    A recipe that NVIDIA's engine does not offer on this GPU is available, with a warning, if a backend
    multiplies all its formats natively: MXFP8 on compute capability 12.x, 1x128 and 128x128 blocks on 8.9.
    """
    kind = find_family(recipe).kind
    if kind is None or _switch.forced:
        return True, ""
    available, reason = _check(kind)
    return (available, reason) if available or not _multiplies_natively(kind) else (True, "")


def check_batch_invariance(recipe: Recipe) -> None:
    """Raise RuntimeError if the recipe's scales depend on the batch."""
    reason = find_family(recipe).batch_dependence(recipe)
    if reason is not None:
        raise RuntimeError(
            f"{type(recipe).__name__} is unsupported under te.batch_invariant(): {reason}"
        )


@constant_while_tracing
def _multiplies_natively(kind: str) -> bool:
    """Return whether a backend multiplies every format in a kind natively on the current GPU; warn once if so."""
    if not has_cuda():
        return False
    formats = [
        sample.format
        for family in all_families()
        if family.kind == kind
        for sample in family.samples
    ]
    native = all(multiplies_natively(form, current_hardware()) for form in formats)
    if native:
        _warn_of_native_products(kind, _hardware_reason(kind))
    return native


@functools.cache
def _warn_of_native_products(kind: str, reason: str) -> None:
    """Warn once per process."""
    warnings.warn(
        f"{reason} The products of this recipe run natively here all the same, by backends that were compiled for this "
        f"GPU and not run on it; is_{kind}_available() stays False, as in the original.",
        stacklevel=5,
    )


def check_block(enabled: Any, recipe: Recipe | None) -> bool:
    """Check the arguments of a context manager, and return `enabled` as a bool.

    Raises:
        TypeError: `enabled` has no truth value, or `recipe` is neither a recipe instance nor None.
    """
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(
            f"recipe={described(recipe)} is {with_article(type(recipe))}; pass an instance of a class of "
            "transformer_engine.common.recipe, or None"
        )
    if type(enabled) is bool:
        return enabled
    reject_recipe_as_enabled(enabled)
    return to_bool("enabled", enabled)


_AVAILABILITY = """Return whether {} can be computed here, natively or by emulation.

Args:
    return_reason: Return (available, reason); the reason is empty if it is available.
"""

Check = Callable[[], "tuple[bool, str]"]


class IsAvailable(Protocol):
    """The type of `is_<kind>_available`."""

    @overload
    def __call__(self, return_reason: Literal[False] = False) -> bool: ...
    @overload
    def __call__(self, return_reason: Literal[True]) -> tuple[bool, str]: ...
    @overload
    def __call__(self, return_reason: bool) -> bool | tuple[bool, str]: ...


@functools.cache
def check(kind: str) -> Check:
    """The function check_<kind>_support() -> (available, reason) for one of `kinds()`."""

    def check() -> tuple[bool, str]:
        return _check(kind)

    return _name_function(check, f"check_{kind}_support", "(available, reason)")


@functools.cache
def availability(kind: str) -> IsAvailable:
    """The function is_<kind>_available(return_reason=False) -> available, or (available, reason), for a kind."""

    def is_available(return_reason: bool = False) -> bool | tuple[bool, str]:
        checked = _check(kind)
        return checked if return_reason else checked[0]

    return _name_function(
        is_available, f"is_{kind}_available", _AVAILABILITY.format(_requirement(kind).title)
    )


def _name_function(function: Any, name: str, documentation: str) -> Any:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = documentation
    function.__module__ = __package__  # where callers and pickles find it
    return function


# torch.compile cannot trace recipe construction, so that the default recipes are built in advance. If the
# environment's defaults are invalid, they are not built, and the first request for one raises an error.
_DEFAULTS: dict[str, Recipe] = {}


def prepare_default(family: Family) -> None:
    """Build the shared instance for a family that may be the default."""
    if defaults_are_readable():
        _DEFAULTS[family.name] = family.recipe(backward_override=None)  # pyright: ignore[reportCallIssue]


@constant_while_tracing
def _default_name() -> str:
    return [family.name for family in all_families() if family.fits is not None and family.fits()][
        -1
    ]


def default_recipe() -> Recipe:
    """Return the shared instance of the default recipe for the hardware formats, without emulation."""
    if not _DEFAULTS:
        demand_readable_defaults()
    return _DEFAULTS[_default_name()]


def get_default_recipe() -> Recipe:
    """Return a new default recipe instance: the latest family that the hardware computes natively."""
    return type(default_recipe())()
