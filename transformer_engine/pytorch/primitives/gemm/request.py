"""A product's epilogue and request, from which a backend is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common import env
from ....common.dispatch import interventions, requirements
from ....common.formats import EXPONENT_PRODUCTS, TensorFormat
from ....common.hardware import NO_GPU, Capability, Hardware
from ...runtime.determinism import is_demanded
from ...runtime.device import current_hardware
from ..operand import Operand
from ..quantize import FORMATS


class Switch:
    """The number of open `autotune` contexts in all threads: the backward pass runs in another thread."""

    depth = 0


_NAME = "NVTE_AUTOTUNE"
asked = env.watch(_NAME)  # the value of the variable; None if it is not set
asked_in_eager_mode = env.watch_in_eager_mode(_NAME)


def requests_tuning() -> bool:
    """Return whether an `autotune` context or NVTE_AUTOTUNE asks for tuning; False in deterministic mode."""
    if is_demanded():
        return False
    return Switch.depth > 0 or (asked() is not None and env.flag(_NAME))


is_compiling = torch.compiler.is_compiling
# the TorchDispatchModes that see every torch operator
dispatch_modes = torch._C._len_torch_dispatch_stack


class Epilogue(NamedTuple):
    """The operations on a @ b.T [M, N] that follow the product.

    Attributes:
        dtype: Result dtype if `out` is None.
        bias: Bias [N], added in float32.
        out: Result buffer [M, N].
        accumulate: Add to `out`.
        exact: Promote partial sums to float32 (NVIDIA's "split accumulator"). False allows
            the faster accumulation in Hopper's FP8 tensor cores, which keeps about 14 bits.
    """

    dtype: torch.dtype
    bias: Tensor | None = None
    out: Tensor | None = None
    accumulate: bool = False
    exact: bool = True

    def finish(self, product: Tensor) -> Tensor:
        """Apply bias, accumulation and cast to a product that no library call has fused."""
        if self.bias is not None:
            # An FP8 product with a float32 result reads its bias in bfloat16, as in cuBLASLt.
            product = product.float() + self.bias.float()
        return self.store(product)

    def store(self, product: Tensor) -> Tensor:
        """Accumulate into `out`, or cast."""
        if self.out is None:
            return product.to(self.dtype)
        if self.accumulate:
            return self.out.add_(product)
        return self.out.copy_(product)


def as_matrix(tensor: Tensor) -> Tensor:
    """Return [.., K] as [M, K]; with contiguous rows if the bits of a product must not depend on M.

    A single row has no layout, and products may have other bits for transposed matrices.
    """
    matrix = tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])
    if requirements.batch_invariant and matrix.stride(1) != 1:
        return matrix.contiguous()
    return matrix


def products_depend_on_operands_alone() -> bool:
    """Return whether a product depends on its operands alone: no backend is forced, observed or tuned."""
    return not (
        interventions or dispatch_modes() or Switch.depth or asked_in_eager_mode() is not None
    )


# Request features, which a backend declares.
BIAS, ACCUMULATION = "a bias", "accumulation"
EPILOGUES = frozenset({BIAS, ACCUMULATION})


class MatrixLayout(NamedTuple):
    """The layout of a matrix: whether its last axis (row_major) or its first is contiguous, and the other stride.

    Stride 0 means that neither axis is contiguous.
    """

    row_major: bool
    stride: int

    @classmethod
    def of(cls, shape: Sequence[int], strides: Sequence[int]) -> MatrixLayout:
        """Return the layout of a matrix; a single row or column counts as contiguous."""
        rows, columns = shape
        down, along = strides
        if along == 1 and (down >= columns or rows == 1):
            return cls(True, columns if rows == 1 else down)
        if down == 1 and (along >= rows or columns == 1):
            return cls(False, rows if columns == 1 else along)
        return cls(row_major=True, stride=0)


@dataclass(frozen=True)
class GemmRequest:
    """The properties by which a backend is chosen: formats, element types, shapes, layouts and the device.

    Attributes:
        dtype: Result dtype.
        device: Device type, such as "cuda" or "cpu".
        index: Device index; -1 for a device without an index.
        bias: Bias dtype; None without a bias.
        native: Whether the operands are plain tensors, not of a subclass, and no TorchDispatchMode
            (for example a flop counter) observes the operators of torch.
        tf32: Whether torch allows float32 products to round their operands to TF32.
        tuned: Whether autotuning is on.
        into: Whether the result is written to epilogue.out.
        power_of_two: Whether the float32 block scales of both operands are powers of two.
    """

    a_format: TensorFormat | None
    b_format: TensorFormat | None
    a_element: torch.dtype
    b_element: torch.dtype
    m: int
    n: int
    k: int
    dtype: torch.dtype
    device: str
    hardware: Hardware
    index: int
    a_layout: MatrixLayout
    b_layout: MatrixLayout
    out_layout: MatrixLayout
    bias: torch.dtype | None
    accumulate: bool
    exact: bool
    native: bool
    tf32: bool
    tuned: bool = False
    into: bool = False
    power_of_two: bool = False

    @classmethod
    def of(cls, a: Operand, b: Operand, epilogue: Epilogue) -> GemmRequest:
        """Return the request for this product."""
        return described(*request_key(a, b, epilogue))

    @property
    def features(self) -> tuple[str, ...]:
        return (BIAS,) * (self.bias is not None) + (ACCUMULATION,) * self.accumulate

    @property
    def empty(self) -> bool:
        """Whether a dimension is 0."""
        return self.m == 0 or self.n == 0 or self.k == 0

    @property
    def block_products(self) -> Capability | None:
        """Capability that multiplies these block-scaled operands; None for operands that do not multiply by blocks."""
        a, b = self.a_format, self.b_format
        if a is None or b is None or a.block_products != b.block_products:
            return None
        return a.block_products

    @property
    def swizzled(self) -> bool:
        """Whether matrix instructions read the scales of both operands."""
        return (
            self.block_products is not None and self.a_format is not None and self.a_format.swizzled
        )

    @property
    def scaled_products(self) -> Capability | None:
        """Capability whose matrix instructions read the scales of both operands; None if no instruction reads them.

        They read MXFP8 and NVFP4 scales, and the exponents of 128-element blocks' power-of-two scales.
        """
        if self.swizzled:
            return self.block_products
        return EXPONENT_PRODUCTS if self.power_of_two else None

    @property
    def unsupported_on_gpu(self) -> str | None:
        """The reason why no GPU kernel computes this product, or None."""
        if self.device != "cuda":
            return f"it needs a CUDA device, the operands are on {self.device}"
        return "there is nothing to multiply" if self.empty else None


Key = tuple[Any, ...]
OUT = 14  # index of the properties of `out` in a key


def request_key(a: Operand, b: Operand, epilogue: Epilogue) -> Key:
    """Return the arguments of `described`, without building the request."""
    return key_in_eager_mode(a, b, epilogue, is_compiling())


def key_in_eager_mode(a: Operand, b: Operand, epilogue: Epilogue, traced: bool = False) -> Key:
    """Return `request_key` for a caller that knows that no compiler is tracing."""
    dtype, bias, out, accumulate, exact = epilogue
    # torch.compile is not a dispatch mode, and cannot trace queries for process-wide settings.
    return (
        *_operand_key(a),
        *_operand_key(b),
        dtype,
        None if bias is None else (bias.dtype, bias.shape, bias.device),
        None if out is None else (out.dtype, out.shape, out.stride(), out.device),
        accumulate,
        exact,
        not traced and dispatch_modes() > 0,
        a.codes.dtype is torch.float32 and not traced and _rounds_to_tf32(a.codes),
        not traced
        and (Switch.depth > 0 or asked_in_eager_mode() is not None)
        and requests_tuning(),
    )


def _operand_key(operand: Operand) -> tuple[Any, ...]:
    codes, _, form, _, _ = operand
    name = None if form is None else form.name
    return codes.shape, codes.stride(), codes.dtype, type(codes), codes.device, name


def _rounds_to_tf32(values: Tensor) -> bool:
    """Whether torch may round the operands of a float32 product to TF32."""
    return values.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"


def described(
    a_shape: Sequence[int],
    a_strides: Sequence[int],
    a_element: torch.dtype,
    a_type: type,
    a_device: torch.device,
    a_format: str | None,
    b_shape: Sequence[int],
    b_strides: Sequence[int],
    b_element: torch.dtype,
    b_type: type,
    b_device: torch.device,
    b_format: str | None,
    dtype: torch.dtype,
    bias: tuple[torch.dtype, Sequence[int], torch.device] | None,
    out: tuple[torch.dtype, Sequence[int], Sequence[int], torch.device] | None,
    accumulate: bool,
    exact: bool,
    watched: bool,
    tf32: bool,
    tuned: bool,
) -> GemmRequest:
    """Return the request for a key; raise ValueError if operand, bias and out sizes or devices differ."""
    a_form, b_form = format_named(a_format), format_named(b_format)
    a_general, b_general = (None if form is None else form.general for form in (a_form, b_form))
    power_of_two = all(form is not None and form.power_of_two for form in (a_form, b_form))
    a_form, b_form = a_general or a_form, b_general or b_form
    a_depth = a_shape[1] * (1 if a_form is None else a_form.packing)
    b_depth = b_shape[1] * (1 if b_form is None else b_form.packing)
    m, n = a_shape[0], b_shape[0]
    if a_depth != b_depth:
        raise ValueError(
            f"the operands contract {a_depth} and {b_depth} elements; both must end in the same K"
        )
    for name, device in (
        ("b", b_device),
        ("bias", None if bias is None else bias[-1]),
        ("out", None if out is None else out[-1]),
    ):
        if device is not None and device != a_device:
            raise ValueError(f"{name} is on {device} and a on {a_device}; move one of them")
    if bias is not None and tuple(bias[1]) != (n,):
        raise ValueError(f"the bias has shape {tuple(bias[1])}; it must be ({n},)")
    if out is not None and tuple(out[1]) != (m, n):
        raise ValueError(f"out has shape {tuple(out[1])}; it must be ({m}, {n})")
    on_gpu = a_device.type == "cuda"
    return GemmRequest(
        a_form,
        b_form,
        a_element,
        b_element,
        m,
        n,
        a_depth,
        dtype if out is None else out[0],
        a_device.type,
        current_hardware() if on_gpu else NO_GPU,
        a_device.index if on_gpu else -1,
        MatrixLayout.of(a_shape, a_strides),
        MatrixLayout.of(b_shape, b_strides),
        MatrixLayout(True, n) if out is None else MatrixLayout.of(out[1], out[2]),
        None if bias is None else bias[0],
        accumulate and out is not None,
        exact,
        a_type in _NATIVE and b_type in _NATIVE and not watched,
        tf32,
        tuned,
        out is not None,
        power_of_two,
    )


_NATIVE = (Tensor, torch.nn.Parameter)


def format_named(name: str | None) -> TensorFormat | None:
    """Return the format with this name, as in a key or an operator."""
    if name is None:
        return None
    row = FORMATS.get(name)
    if row is None:
        raise ValueError(f"unknown product format {name!r}; choose one of {', '.join(FORMATS)}")
    return row.format
