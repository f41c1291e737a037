"""A stand-in for nvmath.bindings.cublasLt that reads the same descriptors and computes in float32 on the CPU.

It takes column-major matrices, operations, scales by mode, bias, beta and pointers as the library documents them, so
what a plan describes can be checked without a GPU. Its algorithms are numbered bytes: any of them is accepted but one.
"""

from __future__ import annotations

import ctypes
import enum
import itertools

import torch

ALGORITHMS = [bytes([i]) * 64 for i in range(1, 5)]
REFUSED = bytes([99]) * 64

_DTYPES = {
    0: torch.float32,
    2: torch.float16,
    14: torch.bfloat16,
    28: torch.float8_e4m3fn,
    29: torch.float8_e5m2,
}


class cuBLASLtError(Exception):
    pass


MatmulDescAttribute = enum.IntEnum(
    "MatmulDescAttribute",
    "TRANSA TRANSB EPILOGUE BIAS_POINTER BIAS_DATA_TYPE FAST_ACCUM A_SCALE_POINTER B_SCALE_POINTER "
    "A_SCALE_MODE B_SCALE_MODE",
)
MatmulPreferenceAttribute = enum.IntEnum(
    "MatmulPreferenceAttribute",
    "MAX_WORKSPACE_BYTES REDUCTION_SCHEME_MASK MIN_ALIGNMENT_A_BYTES MIN_ALIGNMENT_B_BYTES "
    "MIN_ALIGNMENT_C_BYTES MIN_ALIGNMENT_D_BYTES",
)
Epilogue = enum.IntEnum("Epilogue", {"DEFAULT": 1, "BIAS": 4})


class CublasLt:
    """The functions, with every object that has not been destroyed in `alive`."""

    cuBLASLtError = cuBLASLtError
    MatmulDescAttribute = MatmulDescAttribute
    MatmulPreferenceAttribute = MatmulPreferenceAttribute
    Epilogue = Epilogue

    def __init__(self, algorithms: list[bytes] = ALGORITHMS) -> None:
        self.alive: dict[int, dict] = {}
        self.algorithms = algorithms
        self.started: list[bytes] = []
        self._numbers = itertools.count(1)

    def _add(self, thing: dict) -> int:
        number = next(self._numbers)
        self.alive[number] = thing
        return number

    def get_version(self) -> int:
        return 130_100

    def create(self) -> int:
        return 7

    def matrix_layout_create(self, data_type: int, rows: int, columns: int, leading: int) -> int:
        if leading < rows:
            raise cuBLASLtError("the leading dimension is smaller than a column")
        return self._add({"dtype": _DTYPES[data_type], "rows": rows, "columns": columns, "leading": leading})

    def matrix_layout_destroy(self, layout: int) -> None:
        del self.alive[layout]

    def matmul_desc_create(self, compute_type: int, scale_type: int) -> int:
        return self._add({"compute": compute_type})

    def matmul_desc_destroy(self, descriptor: int) -> None:
        del self.alive[descriptor]

    def matmul_desc_set_attribute(self, descriptor: int, attribute: int, buffer: int, size: int) -> None:
        name = MatmulDescAttribute(attribute).name
        value = int.from_bytes(ctypes.string_at(buffer, size), "little", signed=not name.endswith("POINTER"))
        self.alive[descriptor][name] = value

    def matmul_preference_create(self) -> int:
        return self._add({})

    def matmul_preference_destroy(self, preference: int) -> None:
        del self.alive[preference]

    def matmul_preference_set_attribute(
        self, preference: int, attribute: int, buffer: int, size: int
    ) -> None:
        name = MatmulPreferenceAttribute(attribute).name
        self.alive[preference][name] = int.from_bytes(ctypes.string_at(buffer, size), "little")

    def matmul_algo_get_heuristic(
        self, handle, descriptor, a, b, c, d, preference, count, results, found
    ) -> None:
        if self.alive[preference]["MIN_ALIGNMENT_A_BYTES"] < 2:
            raise cuBLASLtError("no algorithm reads odd addresses")
        for i, algorithm in enumerate(self.algorithms[:count]):
            ctypes.memmove(results + 96 * i, algorithm + bytes(32), 96)
        ctypes.c_int.from_address(found).value = min(count, len(self.algorithms))

    def matmul_algo_check(self, handle, descriptor, a, b, c, d, algorithm, result) -> None:
        if ctypes.string_at(algorithm, 64) == REFUSED:
            raise cuBLASLtError("the algorithm does not fit")

    def matmul(
        self, handle, descriptor, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm,
        workspace, workspace_bytes, stream,
    ) -> None:  # fmt: skip
        assert handle == 7 and c == d and c_layout == d_layout
        what, left, right, result = (self.alive[x] for x in (descriptor, a_layout, b_layout, d_layout))
        self.started.append(ctypes.string_at(algorithm, 64))
        a_mk = _scaled(_matrix(a, left), what, "A")
        b_kn = _scaled(_matrix(b, right), what, "B")
        a_mk = a_mk.t() if what["TRANSA"] else a_mk
        b_kn = b_kn.t() if what["TRANSB"] else b_kn
        out = _matrix(d, result)
        product = a_mk @ b_kn * ctypes.c_float.from_address(alpha).value
        if scale := ctypes.c_float.from_address(beta).value:
            product += scale * out.float()
        if what.get("EPILOGUE", 1) == Epilogue.BIAS:
            product += _memory(what["BIAS_POINTER"], product.shape[0], _DTYPES[what["BIAS_DATA_TYPE"]])[
                :, None
            ]
        out.copy_(product)


def _memory(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    size = count * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)


def _matrix(address: int, layout: dict) -> torch.Tensor:
    """The column-major matrix [rows, columns] at an address, as a view of the memory there."""
    rows, columns, leading = layout["rows"], layout["columns"], layout["leading"]
    flat = _memory(address, leading * (columns - 1) + rows, layout["dtype"])
    return flat.as_strided((rows, columns), (1, leading))


def _scaled(codes: torch.Tensor, what: dict, side: str) -> torch.Tensor:
    """codes [K, lines] times their scales: one, one for 128 of a column, or one for 128 x 128."""
    address = what.get(f"{side}_SCALE_POINTER")
    if address is None:
        return codes.float()
    mode = what.get(f"{side}_SCALE_MODE", 0)
    depth, lines = codes.shape
    if mode == 0:
        return codes.float() * _memory(address, 1, torch.float32)
    blocks = depth // 128
    if mode == 4:  # VEC128_32F: the scales of one block of K, for all lines, follow each other
        scale = _memory(address, blocks * lines, torch.float32).view(blocks, lines)
        return codes.float() * scale.repeat_interleave(128, 0)
    padded = -(-blocks // 4) * 4  # BLK128x128_32F: blocks of K follow each other, padded to 4
    scale = (
        _memory(address, padded * (lines // 128), torch.float32).view(lines // 128, padded)[:, :blocks].t()
    )
    return codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
