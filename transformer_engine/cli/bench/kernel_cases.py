"""One kernel of each family as a program that both frameworks start: what the bridge to XLA costs beside torch's.

common/kernels imports triton, so that programs are made where they run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ...common.formats import E4M3, FLOAT32_MAX

if TYPE_CHECKING:
    from ...common.kernels.launch import Launch
    from ...common.kernels.program import Program

HALF, FLOAT = "bfloat16", "float32"
CONSTANTS = (7.0, 1.702, 1.0)
SCALES = {"power_of_two": False, "epsilon": 0.0, "value_for_inf": FLOAT32_MAX}
Given = tuple[tuple[int, ...], str] | None


class Machine(NamedTuple):
    """Multiprocessors of the GPU, and the bytes of shared memory that one program may have."""

    processors: int
    shared_memory: int


@dataclass(frozen=True)
class Started:
    """A program, and the shapes and dtypes of what it is given; None: nothing in that place."""

    program: Program
    given: tuple[Given, ...]


def _alone(launch: Launch, *given: Given) -> Started:
    from ...common.kernels.program import Program, Step

    names = tuple(None if one is None else f"given {place}" for place, one in enumerate(given))
    made = tuple(None if one is None else f"made {place}" for place, one in enumerate(launch.outputs))
    program = Program(tuple(filter(None, names)), (Step(launch, names, made),), made)
    return Started(program, tuple(one for one in given if one is not None))


def _maximum(rows: int, width: int, machine: Machine) -> Started:
    from ...common.kernels import cast

    return _alone(cast.absolute_maximum(rows * width), ((rows, width), HALF))


def _cast(rows: int, width: int, machine: Machine) -> Started:
    from ...common.kernels import cast

    program = cast.one_scale((rows, width), E4M3, True, True, cast.MEASURED, power_of_two=False, epsilon=0.0)
    return Started(program, (((rows, width), HALF), ((1,), FLOAT)))


def _row_blocks(rows: int, width: int, machine: Machine) -> Started:
    from ...common.kernels import block_cast

    launch = block_cast.row_blocks((rows, width), E4M3, True, True, processors=machine.processors, **SCALES)  # pyright: ignore
    return _alone(launch, ((rows, width), HALF))


def _square_blocks(rows: int, width: int, machine: Machine) -> Started:
    from ...common.kernels import block_cast

    return _alone(block_cast.square_blocks((rows, width), E4M3, True, True, **SCALES), ((rows, width), HALF))  # pyright: ignore


def _rows(rows: int, width: int, machine: Machine) -> Any:
    from ...common.kernels import norm

    return norm.Rows(rows, width, width, HALF, 1e-5, False, False, machine.processors)


def _norm(rows: int, width: int, machine: Machine) -> Started:
    from ...common.kernels import norm

    return _alone(
        norm.forward(_rows(rows, width, machine)), ((rows, width), HALF), ((width,), HALF), *[None] * 3
    )


def _norm_codes(rows: int, width: int, machine: Machine) -> Started:
    from ...common.kernels import norm_codes
    from ...common.kernels.cast import OneScale

    program = norm_codes.one_scale(_rows(rows, width, machine), OneScale(E4M3, True, True, False, False, 0.0))
    return Started(program, (((rows, width), HALF), ((width,), HALF), None, ((1,), FLOAT), None))


def _norm_backward(rows: int, width: int, machine: Machine) -> Started:
    from ...common.kernels import norm

    strides = (width, width, 0)
    program = norm.backward(
        rows, width, strides, HALF, FLOAT, False, False, 4, machine.processors, machine.shared_memory
    )
    matrix = ((rows, width), HALF)
    return Started(program, (matrix, matrix, None, ((width,), HALF), None, ((rows,), FLOAT)))


def _swiglu(rows: int, width: int, machine: Machine) -> Started:
    from ...common.kernels import activation

    launch = activation.forward("swiglu", True, rows, width // 2, width, HALF, CONSTANTS)
    return _alone(launch, ((rows, width), HALF))


def _swiglu_backward(rows: int, width: int, machine: Machine) -> Started:
    from ...common.kernels import activation

    launch = activation.backward("swiglu", True, rows, width // 2, (width // 2, width), HALF, CONSTANTS)
    return _alone(launch, ((rows, width // 2), HALF), ((rows, width), HALF))


def _swiglu_codes(rows: int, width: int, machine: Machine) -> Started:
    from ...common.kernels import activation_codes
    from ...common.kernels.cast import OneScale

    how = OneScale(E4M3, True, True, False, False, 0.0)
    program = activation_codes.forward("swiglu", True, (rows, width // 2), width, HALF, CONSTANTS, how)
    return Started(program, (((rows, width), HALF), ((1,), FLOAT), None))


def _softmax(rows: int, width: int, machine: Machine) -> Started:
    from ...common.kernels import softmax

    shape = (1, max(1, rows * width // (2048 * 2048)), min(rows, 2048), 2048)
    return _alone(softmax.forward(shape, (0, 0, 0, 0), HALF, 1.0, None), (shape, HALF), None)


def _rope(rows: int, width: int, machine: Machine) -> Started:
    from ...common.kernels import rope

    heads = width // 128
    launch = rope.rotate(
        (1, rows, heads, 128), (rows * width, width, 128), (rows, 128), 0, HALF, layout="bshd", interleaved=False,
        transposed=False, context=(1, 0),
    )  # fmt: skip
    return _alone(launch, ((1, rows, heads, 128), HALF), ((rows, 128), FLOAT), None, None)


# By bytes that are moved for one element of x, of two bytes itself.
_BY_BYTES: dict[float, tuple[Callable[[int, int, Machine], Started], ...]] = {
    2: (_maximum,),
    3: (_swiglu, _swiglu_codes),
    4: (_cast, _row_blocks, _square_blocks, _norm, _norm_codes, _softmax, _rope),
    5: (_swiglu_backward,),
    6: (_norm_backward,),
}
KERNELS = {start.__name__.strip("_"): (start, moved) for moved, kinds in _BY_BYTES.items() for start in kinds}
