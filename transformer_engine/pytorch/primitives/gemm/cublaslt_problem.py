"""D [N, M] = epilogue(left [N, K] @ right [K, M]) as data, and the cuBLASLt descriptor of its operation.

A row-major result [M, N] = a [M, K] @ b [N, K].T is, read in column-major order, b @ a.T: b is cuBLASLt's left matrix
and a its right matrix.
"""

from __future__ import annotations

import ctypes
from array import array
from types import ModuleType
from typing import NamedTuple

import torch

from . import cublaslt_library as library

ALIGNMENT = 256  # bytes; the largest alignment that an algorithm requires
SCALAR = 0  # cublasLtMatmulMatrixScale_t SCALAR_32F
VEC16_UE4M3, VEC32_UE8M0 = 1, 2  # swizzled one-byte scales, for 16 and for 32 elements
NO_SCALE = -1
# Row count whose algorithm every row count shares if results must not depend on it: a training step on one GPU.
REFERENCE_ROWS = 8192
NO_BIAS = -1

# The address attributes of an operation, in the order of `Descriptor.pointers`.
POINTERS = (
    "A_SCALE_POINTER",
    "B_SCALE_POINTER",
    "BIAS_POINTER",
    "EPILOGUE_AUX_POINTER",
    "D_SCALE_POINTER",
    "AMAX_D_POINTER",
)


class CublasProblem(NamedTuple):
    """One product in cuBLASLt's terms; equal problems share a plan.

    The fields that end in `_transposed` state that the matrix is the transposed column-major matrix in
    memory. Fields that end in `_leading` are the elements between its columns in memory. Fields that end in
    `_scale` are cublasLtMatmulMatrixScale_t values, or NO_SCALE for an unquantized matrix.

    Attributes:
        bias: cudaDataType_t of the bias, or NO_BIAS.
        alignment: Bytes, a power of two up to 256; every matrix pointer is a multiple of it.
        activation: "GELU", "GELU_AUX" or "DGELU" from cublasLtEpilogue_t; "": none.
        aux_leading: Elements between the activation input's columns; 0 if it is not in memory.
        addend: Dtype of C, which has no values, if the result is FP8.
        amax: Also write the absolute maximum of the unscaled result.
        any_rows: Use the algorithm that all row counts of a share; see `CublasPlan`.
    """

    device: int
    m: int
    n: int
    k: int
    left: torch.dtype
    right: torch.dtype
    result: torch.dtype
    left_transposed: bool
    right_transposed: bool
    left_leading: int
    right_leading: int
    result_leading: int
    left_scale: int
    right_scale: int
    bias: int
    accumulate: bool
    fast: bool
    tf32: bool
    alignment: int = ALIGNMENT
    activation: str = ""
    aux_leading: int = 0
    addend: torch.dtype | None = None
    amax: bool = False
    any_rows: bool = False

    @property
    def key(self) -> str:
        """The problem without the device, as text: the key for a stored algorithm."""
        plain = self[-5:] == ("", 0, None, False, False)
        fields: tuple[torch.dtype | int | str | None, ...] = self[1:-5] if plain else self[1:-1]
        return ",".join(
            f"{x:d}" if isinstance(x, int) else str(x).removeprefix("torch.") for x in fields
        )

    @property
    def with_reference_rows(self) -> CublasProblem:
        """The problem with `REFERENCE_ROWS` rows and contiguous matrices, whose algorithm all row counts share."""
        return self._replace(
            n=REFERENCE_ROWS,
            right_leading=REFERENCE_ROWS if self.right_transposed else self.k,
            result_leading=self.m,
        )

    @property
    def reads(self) -> tuple[bool, ...]:
        """Whether the operation uses each POINTERS entry."""
        return (
            self.left_scale != NO_SCALE,
            self.right_scale != NO_SCALE,
            self.bias != NO_BIAS,
            self.aux_leading != 0,
            self.addend is not None,
            self.amax,
        )

    @property
    def swizzled(self) -> bool:
        """Whether the scales of both matrices are one byte each, in swizzled order."""
        return self.left_scale in (VEC16_UE4M3, VEC32_UE8M0)

    @property
    def device_scalars(self) -> bool:
        """Whether alpha, the product of the second-level scales of NVFP4, and beta are in device memory."""
        return self.left_scale == VEC16_UE4M3

    @property
    def epilogue(self) -> str:
        """The name in cublasLtEpilogue_t."""
        if self.bias == NO_BIAS:
            return self.activation or "DEFAULT"
        return f"{self.activation}_BIAS" if self.activation else "BIAS"


class Descriptor(NamedTuple):
    """A cublasLtMatmulDesc_t, and host memory for its addresses, in the order of POINTERS."""

    handle: int
    pointers: array[int]
    address: int


def make_descriptor(
    lib: ModuleType, problem: CublasProblem, attributes: tuple[int, ...]
) -> Descriptor:
    """Return the operation of a problem; attributes are the numbers of POINTERS."""
    p, names = problem, lib.MatmulDescAttribute
    compute = library.COMPUTE_TF32 if p.tf32 else library.COMPUTE_FLOAT32
    operation = lib.matmul_desc_create(compute, library.DATA_TYPES[torch.float32])
    settings: dict[int, ctypes._SimpleCData] = {
        names.TRANSA: ctypes.c_int32(p.left_transposed),
        names.TRANSB: ctypes.c_int32(p.right_transposed),
    }
    if p.device_scalars:
        settings[names.POINTER_MODE] = ctypes.c_int32(1)  # CUBLASLT_POINTER_MODE_DEVICE
    if p.fast:
        settings[names.FAST_ACCUM] = ctypes.c_int8(1)
    if p.epilogue != "DEFAULT":
        settings[names.EPILOGUE] = ctypes.c_uint32(int(lib.Epilogue[p.epilogue]))
    if p.bias != NO_BIAS:
        settings[names.BIAS_DATA_TYPE] = ctypes.c_int32(p.bias)
    if p.aux_leading:
        settings[names.EPILOGUE_AUX_LD] = ctypes.c_int64(p.aux_leading)
    if p.left_scale > SCALAR or p.right_scale > SCALAR:
        settings[names.A_SCALE_MODE] = ctypes.c_int32(p.left_scale)
        settings[names.B_SCALE_MODE] = ctypes.c_int32(p.right_scale)
    for attribute, value in settings.items():
        lib.matmul_desc_set_attribute(
            operation, int(attribute), ctypes.addressof(value), ctypes.sizeof(value)
        )
    # the heuristic only checks that the address is not zero
    pointers = array("Q", [ALIGNMENT] * len(POINTERS))
    address = pointers.buffer_info()[0]
    for i, used in enumerate(p.reads):
        if used:
            lib.matmul_desc_set_attribute(operation, attributes[i], address + 8 * i, 8)
    return Descriptor(operation, pointers, address)
