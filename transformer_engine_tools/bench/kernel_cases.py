"""One kernel from each family as a program that both frameworks start: the XLA bridge's overhead compared with torch.

`common/kernels` imports triton, so programs are built only where they run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from transformer_engine.common.formats import E4M3, FLOAT32_MAX
from transformer_engine.common.kernels.launch import Machine

if TYPE_CHECKING:
    from transformer_engine.common.kernels.launch import Launch
    from transformer_engine.common.kernels.program import Program

HALF, FLOAT = "bfloat16", "float32"
CONSTANTS = (7.0, 1.702, 1.0)
SCALES = {"power_of_two": False, "epsilon": 0.0, "value_for_inf": FLOAT32_MAX}
ShapeAndDtype = tuple[tuple[int, ...], str] | None
# Bytes moved per element of x, which has two bytes itself.
KERNELS: dict[str, float] = {
    "maximum": 2,
    "swiglu": 3,
    "swiglu_codes": 3,
    "cast": 4,
    "row_blocks": 4,
    "square_blocks": 4,
    "norm": 4,
    "norm_codes": 4,
    "softmax": 4,
    "rope": 4,
    "swiglu_backward": 5,
    "norm_backward": 6,
}


class GpuLimits(NamedTuple):
    """Multiprocessors on the GPU, and the shared-memory bytes available to one program."""

    processors: int
    shared_memory: int


@dataclass(frozen=True)
class KernelCall:
    """A program, and the shapes and dtypes of its inputs; None: no input at that position."""

    program: Program
    given: tuple[ShapeAndDtype, ...]


def kernel_call(kernel: str, rows: int, width: int, limits: GpuLimits) -> KernelCall:
    """Build the call to a kernel from KERNELS on x [rows, width]."""
    jax_program = _program(kernel, rows, width, limits)
    if jax_program is not None:
        return jax_program
    from transformer_engine.common.kernels.program import Program, ProgramStep

    launch, operands = _launch(kernel, rows, width, limits)
    names = tuple(
        None if operand is None else f"given {index}" for index, operand in enumerate(operands)
    )
    results = tuple(
        None if operand is None else f"made {index}" for index, operand in enumerate(launch.outputs)
    )
    program = Program(tuple(filter(None, names)), (ProgramStep(launch, names, results),), results)
    return KernelCall(program, tuple(operand for operand in operands if operand is not None))


def _program(kernel: str, rows: int, width: int, limits: GpuLimits) -> KernelCall | None:
    """Build the kernels that consist of several launches."""
    from transformer_engine.common.kernels import activation_codes, cast, norm, norm_codes

    x, weight = ((rows, width), HALF), ((width,), HALF)
    scaling = cast.OneScale(
        E4M3, columnwise=True, given=True, records=False, power_of_two=False, epsilon=0.0
    )
    if kernel == "cast":
        program = cast.one_scale(
            (rows, width),
            E4M3,
            rowwise=True,
            columnwise=True,
            amax=cast.MEASURED,
            power_of_two=False,
            epsilon=0.0,
        )
        return KernelCall(program, (x, ((1,), FLOAT)))
    if kernel == "norm_codes":
        matrix = norm.NormRows(
            rows,
            width,
            width,
            HALF,
            1e-5,
            zero_centered=False,
            centered=False,
            processors=limits.processors,
        )
        return KernelCall(
            norm_codes.one_scale(matrix, scaling), (x, weight, None, ((1,), FLOAT), None)
        )
    if kernel == "norm_backward":
        program = norm.backward(
            rows,
            width,
            (width, width, 0),
            HALF,
            FLOAT,
            zero_centered=False,
            centered=False,
            column_bytes=4,
            processors=limits.processors,
            shared_memory=limits.shared_memory,
        )
        return KernelCall(program, (x, x, None, weight, None, ((rows,), FLOAT)))
    if kernel == "swiglu_codes":
        program = activation_codes.forward(
            "swiglu", True, (rows, width // 2), width, HALF, CONSTANTS, scaling
        )
        return KernelCall(program, (x, ((1,), FLOAT), None))
    return None


def _launch(
    kernel: str, rows: int, width: int, limits: GpuLimits
) -> tuple[Launch, tuple[ShapeAndDtype, ...]]:
    """Build the launch of a kernel, and its inputs."""
    from transformer_engine.common.kernels import activation, block_cast, cast, norm, rope, softmax

    x, half = ((rows, width), HALF), width // 2
    if kernel == "maximum":
        return cast.absolute_maximum(rows * width), (x,)
    if kernel == "row_blocks":
        launch = block_cast.row_blocks(
            (rows, width),
            E4M3,
            True,
            True,
            machine=Machine(limits.processors, limits.shared_memory, 2),
            **SCALES,
        )
        return launch, (x,)
    if kernel == "square_blocks":
        return block_cast.square_blocks((rows, width), E4M3, True, True, **SCALES), (x,)
    if kernel == "norm":
        matrix = norm.NormRows(
            rows,
            width,
            width,
            HALF,
            1e-5,
            zero_centered=False,
            centered=False,
            processors=limits.processors,
        )
        return norm.forward(matrix), (x, ((width,), HALF), None, None, None)
    if kernel == "swiglu":
        return activation.forward("swiglu", True, rows, half, width, HALF, CONSTANTS), (x,)
    if kernel == "swiglu_backward":
        launch = activation.backward("swiglu", True, rows, half, (half, width), HALF, CONSTANTS)
        return launch, (((rows, half), HALF), x)
    if kernel == "softmax":
        shape = (1, max(1, rows * width // (2048 * 2048)), min(rows, 2048), 2048)
        return softmax.forward(shape, (0, 0, 0, 0), HALF, 1.0, None), ((shape, HALF), None)
    assert kernel == "rope"
    heads = (1, rows, width // 128, 128)
    launch = rope.rotate(
        heads,
        (rows * width, width, 128),
        (rows, 128),
        0,
        HALF,
        layout="bshd",
        interleaved=False,
        transposed=False,
        context=(1, 0),
    )
    return launch, ((heads, HALF), ((rows, 128), FLOAT), None, None)
