"""Programs that compute the codes for f(x), dx, or dy itself, and the column sums.

If the scale is known, one kernel computes the values and their codes. If the scale depends on the maximum of the
values, a first kernel stores the values and finds their maximum, and a cast follows.
"""

from __future__ import annotations

from . import activation_cast, block_fused
from .block_cast import Blocks
from .cast import OneScale
from .column_sums import sum_strips
from .launch import Launch
from .program import Program, ProgramStep, step

_MADE = ("codes", "codes_t", "scale", "values")
_BLOCKS = ("codes", "scale", "codes_t", "scale_t")


def forward(
    name: str,
    gated: bool,
    shape: tuple[int, int],
    x_stride: int,
    dtype: str,
    constants: tuple[float, float, float],
    how: OneScale,
) -> Program:
    """Program (x, multiplier | None, record | None) -> codes, scale, codes_t, scale_t, amax of f(x)."""
    codes = (how.element, how.columnwise) if how.given else (None, False)
    plain = (name, gated, shape, x_stride, dtype, constants, *codes)
    launch = activation_cast.forward(*plain, measures=not how.records, zero_is_one=how.zero_is_one)
    inputs = ("x", "multiplier", "record")
    return Program(inputs, _code_steps(launch, inputs, shape, how, ()), how.results)


def backward(
    name: str,
    gated: bool,
    shape: tuple[int, int],
    strides: tuple[int, int],
    dtype: str,
    constants: tuple[float, float, float],
    how: OneScale,
    sums: str | None,
) -> Program:
    """Program (dy, x, multiplier | None, record | None) -> codes, scale, codes_t, scale_t, amax of dx.

    N is 2 * width if gated. "identity": x is None, dx is dy. If `sums` is a dtype, the column sums [N] follow.
    """
    codes = (how.element, how.columnwise) if how.given else (None, False)
    plain = (name, gated, shape, strides, dtype, constants, *codes, sums is not None)
    launch = activation_cast.backward(*plain, measures=not how.records, zero_is_one=how.zero_is_one)
    inputs = ("dy", "x", "multiplier", "record")
    full_shape = (shape[0], 2 * shape[1] if gated else shape[1])
    steps = _code_steps(launch, inputs, full_shape, how, ("partials",))
    return _with_sums(inputs, steps, how.results, launch, sums)


def forward_blocks(
    name: str,
    gated: bool,
    shape: tuple[int, int],
    x_stride: int,
    constants: tuple[float, float, float],
    blocks: Blocks,
    machine: block_fused.Machine,
) -> Program:
    """Program (x) -> codes, scale, codes_t, scale_t of f(x) [M, width]."""
    launch = block_fused.forward(name, gated, shape, x_stride, constants, blocks, machine)
    first = step(launch, ("x",), _BLOCKS)
    return Program(("x",), (first,), first.outputs)


def backward_blocks(
    name: str,
    gated: bool,
    shape: tuple[int, int],
    strides: tuple[int, int],
    constants: tuple[float, float, float],
    blocks: Blocks,
    sums: str | None,
    machine: block_fused.Machine,
) -> Program:
    """Program (dy, x) -> codes, scale, codes_t, scale_t, None, and the column sums as in `backward`."""
    launch = block_fused.backward(
        name, gated, shape, strides, constants, blocks, sums is not None, machine
    )
    first = step(launch, ("dy", "x"), (*_BLOCKS, "partials"))
    return _with_sums(("dy", "x"), (first,), (*first.outputs[:4], None), launch, sums)


def _code_steps(
    launch: Launch,
    inputs: tuple[str, ...],
    shape: tuple[int, int],
    how: OneScale,
    rest: tuple[str, ...],
) -> tuple[ProgramStep, ...]:
    """The kernel's step, and a cast of the stored values if the scale depends on their maximum."""
    if how.records:
        return (step(launch, inputs, (*_MADE, *rest)),)
    first = step(launch, inputs[:-1], ("amax", *_MADE, *rest))
    return (first,) if how.given else (first, how.after("values", shape))


def _with_sums(
    inputs: tuple[str, ...],
    steps: tuple[ProgramStep, ...],
    results: tuple[str | None, ...],
    launch: Launch,
    sums: str | None,
) -> Program:
    if sums is None:
        return Program(inputs, steps, (*results, None))
    return Program(inputs, (*steps, sum_strips(launch.outputs[-1], sums)), (*results, "sums"))
