"""What recipes have by default, read from the environment once, when this module is imported.

An import has nobody to answer to (a command could not say it in a sentence), so a value that cannot be read is refused
with the first recipe that is made.
"""

from __future__ import annotations

from typing import Any

from .. import env

_refusals: list[str] = []


def _read(name: str) -> env.Value:
    """The variable's value; the table's default for one that `demand_readable` refuses."""
    try:
        return env.get(name)
    except ValueError as error:
        _refusals.append(str(error))
        return env.variable(name).default


POWER_2_SCALES = bool(_read("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES"))
FLOAT32_BLOCK_SCALES = bool(_read("NVTE_FP8_BLOCK_SCALING_FP32_SCALES"))
DISABLE_RHT = bool(_read("NVTE_NVFP4_DISABLE_RHT"))
DISABLE_STOCHASTIC_ROUNDING = bool(_read("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING"))
DISABLE_2D_QUANTIZATION = bool(_read("NVTE_NVFP4_DISABLE_2D_QUANTIZATION"))
ROW_SCALED_ACTIVATION = bool(_read("NVTE_NVFP4_ROW_SCALED_ACTIVATION"))
FOUR_OVER_SIX = str(_read("NVTE_NVFP4_4OVER6"))
FOUR_OVER_SIX_USE_256 = str(_read("NVTE_NVFP4_4OVER6_E4M3_USE_256"))
FOUR_OVER_SIX_ERROR = str(_read("NVTE_NVFP4_4OVER6_ERR_MODE"))
BACKWARD_OVERRIDE: Any = _read("NVTE_BACKWARD_OVERRIDE")


def are_readable() -> bool:
    """Had every variable a value that it can have when this module was imported?"""
    return not _refusals


def demand_readable() -> None:
    """ValueError for the first variable that had another."""
    if _refusals:
        raise ValueError(_refusals[0])
