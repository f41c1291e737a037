"""Products by direct cuBLASLt calls: planned once per shape, bias and accumulation in the same call, no copies.

The library is the one that torch calls. A direct call has two advantages: the product itself adds a gradient
to `main_grad` (also for FP8 operands), and a call costs only a few microseconds on the host. FP8 operand and
result rows must be multiples of 16 bytes; the backends after this one pad other shapes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ....common.dispatch import Backend, PlanFailure, Unsupported, requirements
from ....common.formats import BLOCK_1D, BLOCK_2D, FLOAT8, SWIZZLED_NAMES, TensorFormat, round_up
from ....common.hardware import Capability
from ....common.memory import Memory
from ...runtime.device import current_hardware
from ...runtime.self_tested import untested_reason
from ..operand import Operand, plain
from . import cublaslt_library as library
from . import cublaslt_swizzled, tuning
from .cublaslt_plan import CublasPlan, NoAlgorithm, build_plan
from .cublaslt_problem import (
    NO_BIAS,
    NO_SCALE,
    REFERENCE_ROWS,
    VEC16_UE4M3,
    VEC32_UE8M0,
    CublasProblem,
)
from .request import EPILOGUES, Epilogue, GemmRequest, Key, MatrixLayout, described, request_key

_ROWS = 16  # divisor of an extent of an FP8 operand
_BLOCK = 128
_ANY_ROWS_ALIGNMENT = 16  # bytes; matrices at other addresses are copied
_WIDE = (torch.float32, torch.bfloat16, torch.float16)
# cublasLtMatmulMatrixScale_t by the block and the dtype of its scale: SCALAR_32F, VEC128_32F, BLK128x128_32F, ..
_SCALE_MODES = {
    (FLOAT8.block, FLOAT8.scale): 0,
    (BLOCK_1D.block, BLOCK_1D.scale): 4,
    (BLOCK_2D.block, BLOCK_2D.scale): 5,
    ((1, 32), "e8m0"): VEC32_UE8M0,
    ((1, 16), "e4m3"): VEC16_UE4M3,
}
_ALL_LAYOUTS: Capability = "fp8 products in all layouts"
_SWIZZLED = 120_900  # first cuBLASLt version whose swizzled scales need no workaround


def unsupported_reason(request: GemmRequest) -> str | None:
    """Return the reason why the library is not queried for an algorithm, or None."""
    reason = (
        request.unsupported_on_gpu
        or request.hardware.lacks("cublaslt")
        or library.unavailable_reason()
    )
    if reason is not None:
        return reason
    if requirements.batch_invariant:
        request = _with_padded_rows(request)
    if not request.native:
        return "an operand is of a subclass of Tensor, or an active TorchDispatchMode needs torch's operators"
    quantized = request.a_format is not None or request.b_format is not None
    reason = _unsupported_quantized(request) if quantized else _unsupported_plain(request)
    return _unsupported_epilogue(request) if reason is None else reason


def _unsupported_plain(request: GemmRequest) -> str | None:
    if request.a_element != request.b_element:
        return f"the operands' dtypes differ ({request.a_element} and {request.b_element})"
    if request.a_element not in _WIDE:
        return f"it multiplies float32, bfloat16 and float16, the operands are {request.a_element}"
    if (reason := request.hardware.lacks("bf16 products")) is not None:
        return reason
    if request.a_layout.stride == 0 or request.b_layout.stride == 0:
        return "neither axis of an operand is contiguous"
    if request.dtype not in (request.a_element, torch.float32):
        return f"the result of {request.a_element} operands is {request.dtype}; supported: their dtype or float32"
    return None


def _unsupported_quantized(request: GemmRequest) -> str | None:
    """Return why cuBLASLt does not support the quantized operands of a product, or None."""
    formats = (request.a_format, request.b_format)
    if formats[0] is None or formats[1] is None:
        return "one operand is quantized and the other is not"
    if reads_bytes(request):
        return _unsupported_swizzled(request)
    if formats[0] not in (FLOAT8, BLOCK_1D, BLOCK_2D) or formats[1] not in (
        FLOAT8,
        BLOCK_1D,
        BLOCK_2D,
    ):
        return (
            f"{formats[0].name} x {formats[1].name}; "
            f"supported: one scale per tensor, blocks of 128, {SWIZZLED_NAMES}"
        )
    if (formats[0] == FLOAT8) != (formats[1] == FLOAT8):
        return f"{formats[0].name} x {formats[1].name}; a tensor scale and block scales do not mix"
    if request.a_element == request.b_element == torch.float8_e5m2:
        return "cuBLASLt does not multiply two E5M2 operands"
    if formats[0] == formats[1] == BLOCK_2D:
        return "cuBLASLt does not multiply two operands of 128x128 blocks"
    products = "fp8 products" if formats[0] == FLOAT8 else "fp8 block products"
    if (reason := request.hardware.lacks(products)) is not None:
        return reason
    if request.dtype not in _WIDE:
        return f"the result is {request.dtype}; supported: float32, bfloat16 and float16"
    a_format, b_format = formats
    any_axis = a_format == FLOAT8 and request.hardware.has(_ALL_LAYOUTS)
    for name, layout in (("a", request.a_layout), ("b", request.b_layout)):
        if not (layout.row_major or any_axis) or layout.stride == 0 or layout.stride % _ROWS:
            return f"the FP8 operand {name} is not K-contiguous with rows of a multiple of {_ROWS} bytes"
    depth = _ROWS if a_format == FLOAT8 else _BLOCK
    if request.k % depth:
        return f"K={request.k} is not a multiple of {depth}"
    if request.n % (_BLOCK if b_format == BLOCK_2D else _ROWS):
        return f"N={request.n} is not a multiple of {_BLOCK if b_format == BLOCK_2D else _ROWS}"
    if not request.a_layout.row_major and request.m % _ROWS:
        return f"M={request.m} is not a multiple of {_ROWS}, along which a is contiguous"
    if a_format != FLOAT8 and request.m % (_BLOCK if a_format == BLOCK_2D else _ROWS):
        return f"M={request.m} is not a multiple of {_BLOCK if a_format == BLOCK_2D else _ROWS}"
    return None


def reads_bytes(request: GemmRequest) -> bool:
    """Return whether the library reads the scales of both operands as swizzled bytes."""
    return request.swizzled or _uses_exponents(request)


def _uses_exponents(request: GemmRequest) -> bool:
    """Whether 128-element blocks are multiplied by exponents: where no product reads their float32 scales."""
    needs = request.scaled_products if request.power_of_two else None
    hardware = request.hardware
    return needs is not None and not hardware.has("fp8 block products") and hardware.has(needs)


def _unsupported_swizzled(request: GemmRequest) -> str | None:
    """Return the reason why a product with swizzled scales is unsupported, or None."""
    needs = request.scaled_products
    assert needs is not None
    if (reason := request.hardware.lacks(needs)) is not None:
        return reason
    version = library.bindings().get_version()
    if version < _SWIZZLED:
        release = f"{version // 10_000}.{version // 100 % 100}"
        return f"cuBLASLt {release} < 12.9; pip install --upgrade nvidia-cublas"
    if request.a_element == request.b_element == torch.float8_e5m2:
        return "cuBLASLt does not multiply two E5M2 operands"
    for form in (request.a_format, request.b_format):
        if form is not None and form.row_scaled:
            return "a second-level scale per row; cuBLASLt takes one per tensor"
    if request.dtype not in _WIDE:
        return f"the result is {request.dtype}; supported: float32, bfloat16 and float16"
    for name, layout in (("a", request.a_layout), ("b", request.b_layout)):
        if not layout.row_major or layout.stride == 0 or layout.stride % _ROWS:
            return (
                f"the codes of {name} are not K-contiguous with rows of a multiple of {_ROWS} bytes"
            )
    if request.k % 32 or request.n % _ROWS:
        return f"K={request.k} is not a multiple of 32, or N={request.n} not of {_ROWS}"
    return None


def _unsupported_epilogue(request: GemmRequest) -> str | None:
    if not request.out_layout.row_major or request.out_layout.stride == 0:
        return "the rows of `out` are not contiguous"
    if request.bias is None:
        return None
    if request.bias not in _WIDE:
        return f"the bias is {request.bias}; supported: float32, bfloat16 and float16"
    if (
        request.a_format is not None
        and request.dtype == torch.float32
        and request.bias != torch.bfloat16
    ):
        return f"an FP8 product with a float32 result takes a bfloat16 bias, not {request.bias}"
    return None


def reads_all_layouts() -> bool:
    """Return whether products read FP8 codes with one scale along either axis, so that no transposed copy is needed.

    The GPU has these products, and the self-test has passed there with the installed libraries.
    """
    hardware = current_hardware()
    return (
        hardware.has(_ALL_LAYOUTS)
        and library.unavailable_reason() is None
        and untested_reason(_ALL_LAYOUTS) is None
    )


def make_problem(request: GemmRequest) -> CublasProblem:
    """Return the request in cuBLASLt's column-major terms, in which b is the left matrix and a the right one."""
    a, b, out = request.a_layout, request.b_layout, request.out_layout
    bias, exponents = NO_BIAS, _uses_exponents(request)
    # the dtype that the epilogue reads; a bias with another dtype is cast to it
    if request.bias is not None:
        narrow = request.a_format is not None and request.dtype == torch.float32
        bias = library.DATA_TYPES[torch.bfloat16 if narrow else request.dtype]
    any_rows = requirements.batch_invariant
    options = {"any_rows": True, "alignment": _ANY_ROWS_ALIGNMENT} if any_rows else {}
    return CublasProblem(
        device=request.index,
        m=request.n,
        n=request.m,
        k=request.k,
        left=request.b_element,
        right=request.a_element,
        result=request.dtype,
        left_transposed=b.row_major,
        right_transposed=not a.row_major,
        left_leading=b.stride * (1 if request.b_format is None else request.b_format.packing),
        right_leading=a.stride * (1 if request.a_format is None else request.a_format.packing),
        result_leading=out.stride,
        left_scale=VEC32_UE8M0 if exponents else _scale_mode(request.b_format),
        right_scale=VEC32_UE8M0 if exponents else _scale_mode(request.a_format),
        bias=bias,
        accumulate=request.accumulate,
        fast=request.a_format == FLOAT8 and not request.exact,
        tf32=request.tf32,
        **options,
    )


def _scale_mode(form: TensorFormat | None) -> int:
    return NO_SCALE if form is None else _SCALE_MODES[form.block, form.scale]


def find_plan(request: GemmRequest) -> CublasPlan:
    """Return the plan of a supported request; raise NoAlgorithm if the library has none."""
    return build_plan(make_problem(request))


def bind(request: GemmRequest) -> Callable[[Operand, Operand, Epilogue], Tensor] | PlanFailure:
    if requirements.batch_invariant:
        return _bind_any_rows(request)
    try:
        plan = find_plan(request)
    except NoAlgorithm as error:
        return PlanFailure(str(error))
    if plan.problem.swizzled:
        return functools.partial(cublaslt_swizzled.run, plan)
    return tuning.tune_plan(plan) if request.tuned else plan.run


def _bind_any_rows(
    request: GemmRequest,
) -> Callable[[Operand, Operand, Epilogue], Tensor] | PlanFailure:
    """Bind the algorithm that all row counts share; the rows are copied and padded if it requires that.

    Another backend might have other bits, so the choice between backends depends on the algorithm for
    `REFERENCE_ROWS`, which the library always runs for multiples of as many rows.
    """
    padded = _with_padded_rows(request)
    problem = make_problem(padded)
    try:
        build_plan(problem.with_reference_rows)
    except NoAlgorithm as error:
        return PlanFailure(str(error))
    if padded.m == request.m:
        try:
            return _run(build_plan(problem))
        except NoAlgorithm:
            pass  # for these strides
    layout, out = MatrixLayout(True, request.k), MatrixLayout(True, request.n)
    for multiple in (_ROWS, _BLOCK, REFERENCE_ROWS):
        rows = round_up(request.m, multiple)
        copied = dataclasses.replace(request, m=rows, a_layout=layout, out_layout=out)
        try:
            return functools.partial(_run_padded, _run(build_plan(make_problem(copied))), rows)
        except NoAlgorithm as error:
            reason = error
    raise Unsupported(
        f"te.batch_invariant() requires one algorithm for all row counts, and with M={request.m}, N={request.n}, "
        f"K={request.k}: {reason}; contact the developers"
    )


def _with_padded_rows(request: GemmRequest) -> GemmRequest:
    """Return the request for the row count to which a row-major a with scales per row is padded."""
    if request.a_format != BLOCK_1D or not request.a_layout.row_major:
        return request
    return dataclasses.replace(request, m=round_up(request.m, _ROWS))


def _run(plan: CublasPlan) -> Callable[[Operand, Operand, Epilogue], Tensor]:
    return functools.partial(cublaslt_swizzled.run, plan) if plan.problem.swizzled else plan.run


def _run_padded(
    run: Callable[[Operand, Operand, Epilogue], Tensor],
    rows: int,
    a: Operand,
    b: Operand,
    epilogue: Epilogue,
) -> Tensor:
    """Compute a product with a contiguous copy of a that has more rows, all zero."""
    m, out = a.rows, epilogue.out
    codes = a.codes.new_zeros((rows, a.codes.shape[1]))
    codes[:m] = a.codes
    scale = a.scale
    if scale is not None and scale.dim() == 2 and scale.shape[0] == m:
        scale = F.pad(scale, (0, 0, 0, rows - m))
    shape = (rows, b.rows)
    result = torch.zeros(
        shape, dtype=epilogue.dtype if out is None else out.dtype, device=a.codes.device
    )
    if out is not None and epilogue.accumulate:
        result[:m] = out.view(m, b.rows)
    run(a._replace(codes=codes, scale=scale), b, epilogue._replace(out=result))
    return result[:m].clone() if out is None else out.copy_(result[:m].view(out.shape))


def multiply_any_rows(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute a [M, K] @ b [N, K].T of unquantized GPU tensors by the algorithm that all row counts share.

    Raises:
        Unsupported: The library has no such product.
    """
    left, right, epilogue = plain(a), plain(b), Epilogue(dtype)
    return _products[request_key(left, right, epilogue)](left, right, epilogue)


def _bind_product(key: Key) -> Callable[[Operand, Operand, Epilogue], Tensor]:
    request = described(*key)
    reason = unsupported_reason(request)
    bound = PlanFailure(reason) if reason is not None else bind(request)
    if isinstance(bound, PlanFailure):
        raise Unsupported(
            f"te.batch_invariant() requires one algorithm for all row counts, which cuBLASLt does not have for "
            f"N={request.n}, K={request.k} in {request.a_element}: {bound.reason}"
        )
    return bound


_products: Memory[Key, Callable[[Operand, Operand, Epilogue], Tensor]] = Memory(_bind_product, 1024)


def _drop_bias(request: GemmRequest) -> GemmRequest:
    """Return the request for the product alone, in float32."""
    layout = MatrixLayout(True, request.n)
    return dataclasses.replace(
        request, dtype=torch.float32, bias=None, accumulate=False, into=False, out_layout=layout
    )


def _unsupported_before_bias(request: GemmRequest) -> str | None:
    if request.bias is None:
        return "there is no bias"
    return unsupported_reason(_drop_bias(request))


def bind_before_bias(
    request: GemmRequest,
) -> Callable[[Operand, Operand, Epilogue], Tensor] | PlanFailure:
    """Bind the product alone, for problems with a bias that the library has no algorithm for."""
    product = bind(_drop_bias(request))
    if isinstance(product, PlanFailure):
        return product

    def call(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
        return epilogue.finish(product(a, b, Epilogue(torch.float32, exact=epilogue.exact)))

    return call


BACKEND = Backend(
    "cublaslt", takes=EPILOGUES, unsupported_reason=unsupported_reason, bind=bind, opaque=True
)
# The row before it states why it has no algorithm. The float32 result is rounded once, after the bias.
BEFORE_BIAS = Backend(
    "cublaslt_before_bias",
    takes=EPILOGUES,
    unsupported_reason=_unsupported_before_bias,
    bind=bind_before_bias,
    opaque=True,
)
