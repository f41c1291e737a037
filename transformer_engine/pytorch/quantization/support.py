"""available(format) = the hardware computes it, or emulation is on: the answer always comes with a reason.

Emulation computes a format that the hardware lacks with the reference maths. It is on where there is no GPU,
and elsewhere by `TE_EMULATE=1` or `emulate()`: a GPU never claims a format it lacks unless it was asked to.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...common import env
from ...common.checks import described, switch
from ...common.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe, defaults
from ..device import cuda_version, get_device_compute_capability, has_cuda
from ..tracing import constant_while_tracing

KINDS = ("bf16", "fp8", "mxfp8", "fp8_block_scaling", "nvfp4")


@dataclass(frozen=True)
class Support:
    """Can this machine run a format: on its hardware, by emulation, or not at all (then refusal says why)."""

    kind: str
    native: bool
    emulated: bool
    refusal: str

    @property
    def available(self) -> bool:
        return self.native or self.emulated


class _Switch:
    """The emulation switch: None follows TE_EMULATE, and without it the absence of a GPU."""

    def __init__(self) -> None:
        self.forced: bool | None = None


_switch = _Switch()


class emulate:
    """Switch emulation on (or off) at once; as a context manager it goes back at the end."""

    def __init__(self, enabled: bool = True):
        switch("enabled", enabled)
        self._before = _switch.forced
        _switch.forced = enabled

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        _switch.forced = self._before


@constant_while_tracing
def _emulates_by_default() -> bool:
    asked = env.get("TE_EMULATE")
    return not has_cuda() if asked is None else bool(asked)


def is_emulating() -> bool:
    """Would a format that the hardware lacks be emulated?"""
    return _emulates_by_default() if _switch.forced is None else _switch.forced


@constant_while_tracing
def _hardware_refusal(kind: str) -> str:
    """Empty if the current device computes the format in hardware, else a sentence."""
    if not has_cuda():
        return f"There is no CUDA device for {kind} execution."
    capability = get_device_compute_capability()
    if kind == "bf16":
        return "" if capability >= (8, 0) else _needs("8.0", "BF16")
    if kind == "fp8":
        return "" if capability >= (8, 9) else _needs("8.9", "FP8")
    if kind == "mxfp8":
        if capability >= (12, 0):
            return "MXFP8 execution is not supported on device compute capability 12.0 and higher."
        return "" if capability >= (10, 0) else _needs("10.0", "MXFP8")
    if kind == "fp8_block_scaling":
        if capability < (9, 0):
            return _needs("9.0", "FP8 block scaling")
        return (
            ""
            if cuda_version() >= (12, 9)
            else "CUDA 12.9 or higher required for FP8 block scaling execution."
        )
    if kind == "nvfp4":
        return "" if capability >= (10, 0) else _needs("10.0", "NVFP4")
    raise ValueError(f"there is no format kind {kind!r}; choose one of {', '.join(KINDS)}")


def _needs(capability: str, name: str) -> str:
    return f"Device compute capability {capability} or higher required for {name} execution."


def support_of(kind: str) -> Support:
    """How this machine runs a format of KINDS."""
    refusal = _hardware_refusal(kind)
    native = refusal == ""
    return Support(kind, native, not native and is_emulating(), refusal)


def _check(kind: str) -> tuple[bool, str]:
    refusal = _hardware_refusal(kind)
    if refusal == "" or is_emulating():
        return True, ""
    return False, f"{refusal} Set TE_EMULATE=1 or call te.emulate() to compute it by emulation."


def check_bf16_support() -> tuple[bool, str]:
    """(available, reason)"""
    return _check("bf16")


def check_fp8_support() -> tuple[bool, str]:
    """(available, reason)"""
    return _check("fp8")


def check_mxfp8_support() -> tuple[bool, str]:
    """(available, reason)"""
    return _check("mxfp8")


def check_fp8_block_scaling_support() -> tuple[bool, str]:
    """(available, reason)"""
    return _check("fp8_block_scaling")


def check_nvfp4_support() -> tuple[bool, str]:
    """(available, reason)"""
    return _check("nvfp4")


def check_recipe_support(recipe: Recipe) -> tuple[bool, str]:
    """(available, reason) for every format that the recipe uses; a custom recipe answers for itself."""
    if recipe.mxfp8():
        return check_mxfp8_support()
    if recipe.float8_block_scaling():
        return check_fp8_block_scaling_support()
    if recipe.nvfp4():
        return check_nvfp4_support()
    if recipe.float8_per_tensor_scaling():
        return check_fp8_support()
    return True, ""


def check_block(enabled: bool, recipe: Recipe | None) -> None:
    """What the context managers take: a switch, and a recipe's instance or None."""
    switch("enabled", enabled)
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(
            f"recipe={described(recipe)} is a {type(recipe).__name__}; pass an instance of a class of "
            "transformer_engine.common.recipe, or None"
        )


def _answer(checked: tuple[bool, str], return_reason: bool) -> bool | tuple[bool, str]:
    return checked if return_reason else checked[0]


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Can BF16 be computed here?"""
    return _answer(check_bf16_support(), return_reason)


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Can FP8 with one scale a tensor be computed here?"""
    return _answer(check_fp8_support(), return_reason)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Can MXFP8 be computed here?"""
    return _answer(check_mxfp8_support(), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Can FP8 with a scale for 128 or 128 x 128 elements be computed here?"""
    return _answer(check_fp8_block_scaling_support(), return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Can NVFP4 be computed here?"""
    return _answer(check_nvfp4_support(), return_reason)


# torch.compile cannot trace the construction of a recipe, so the default ones exist beforehand; not where the
# environment's defaults are refused, which is said when one is asked for.
_KINDS = (MXFP8BlockScaling, Float8CurrentScaling, DelayedScaling)
_SHARED: dict[type[Recipe], Recipe] = (
    {kind: kind(backward_override=None) for kind in _KINDS} if defaults.are_readable() else {}
)


@constant_while_tracing
def _is_consumer_blackwell() -> bool:
    return get_device_compute_capability() >= (12, 0)


def default_recipe() -> Recipe:
    """The shared instance of the default recipe, by what the hardware computes without emulation."""
    if not _SHARED:
        defaults.demand_readable()
    if _hardware_refusal("mxfp8") == "":
        return _SHARED[MXFP8BlockScaling]
    return _SHARED[Float8CurrentScaling if _is_consumer_blackwell() else DelayedScaling]


def get_default_recipe() -> Recipe:
    """A fresh default recipe: MXFP8 on hardware that has it, current scaling from 12.0, else delayed."""
    return type(default_recipe())()
