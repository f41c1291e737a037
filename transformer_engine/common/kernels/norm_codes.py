"""Programs that compute codes from a norm's output: in the norm's kernel, or with a transpose or cast after it."""

from __future__ import annotations

from .block_cast import Blocks
from .cast import OneScale
from .launch import Launch, codes_dtype
from .norm import NormRows, forward
from .program import Program, ProgramStep, step
from .transpose import transpose

_GIVEN = ("x", "gamma", "beta", "multiplier", "record")
_MADE = ("codes", "scale", "y", "mean", "rstdev")
_STATISTICS = ("mean", "rstdev")


def one_scale(x: NormRows, how: OneScale) -> Program:
    """Program (x, gamma, beta | None, multiplier | None, record | None) -> codes, scale, codes_t, ...

    The last results are amax, mean and rstdev. The codes, with a quarter of y's bytes, are transposed in a separate
    kernel. This holds also for small x, for which the launch costs more: the norm's kernel would store single codes,
    see `tile`. Without a given scale, y is stored and cast.
    """
    element = how.element if how.given else None
    launch = forward(x, element, measures=not how.records, zero_is_one=how.zero_is_one)
    if how.records:
        first = step(launch, _GIVEN, _MADE)
    else:
        first = step(launch, _GIVEN[:4], ("amax", *_MADE))
    steps: list[ProgramStep] = [first]
    if not how.given:
        steps.append(how.after("y", (x.rows, x.width)))
    elif how.columnwise:
        turn: Launch = transpose((x.rows, x.width), codes_dtype(how.element))
        steps.append(ProgramStep(turn, ("codes",), ("codes_t",)))
    return Program(
        _GIVEN, tuple(steps), (*how.results, *(_STATISTICS if x.centered else (None, "rstdev")))
    )


def row_blocks(x: NormRows, blocks: Blocks) -> Program:
    """Program (x, gamma, beta | None) -> codes, scale, None, None, None, mean, rstdev.

    The kernel that computes y holds whole rows, and therefore all their 1 x 128 blocks.
    """
    first = step(forward(x, None, blocks), (*_GIVEN[:3], None, None), _MADE)
    results = (
        "codes",
        "scale",
        None,
        None,
        None,
        *(_STATISTICS if x.centered else (None, "rstdev")),
    )
    return Program(_GIVEN[:3], (first,), results)
