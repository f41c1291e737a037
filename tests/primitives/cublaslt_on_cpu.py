"""A stand-in for nvmath.bindings.cublasLt that reads the same descriptors and computes in float32 on the CPU.

It takes column-major matrices, operations, scales by mode, bias, beta, GELU and its gradient, FP8 results and pointers
as the library documents them, so a plan's description can be checked without a GPU. Its algorithms are
numbered bytes, and it accepts all but one.
"""

from __future__ import annotations

import ctypes
import enum
import itertools

import pytest
import torch

from transformer_engine.common.memory import Memory
from transformer_engine.pytorch.primitives.gemm import cublaslt_library, cublaslt_plan

ALGORITHMS = [bytes([i]) * 64 for i in range(1, 5)]
REJECTED = bytes([99]) * 64

_DTYPES = {
    0: torch.float32,
    2: torch.float16,
    14: torch.bfloat16,
    28: torch.float8_e4m3fn,
    29: torch.float8_e5m2,
    33: torch.uint8,  # two E2M1 codes
}
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class cuBLASLtError(Exception):
    pass


MatmulDescAttribute = enum.IntEnum(
    "MatmulDescAttribute",
    "TRANSA TRANSB EPILOGUE BIAS_POINTER BIAS_DATA_TYPE FAST_ACCUM A_SCALE_POINTER B_SCALE_POINTER "
    "A_SCALE_MODE B_SCALE_MODE EPILOGUE_AUX_POINTER EPILOGUE_AUX_LD D_SCALE_POINTER AMAX_D_POINTER POINTER_MODE",
)
MatmulPreferenceAttribute = enum.IntEnum(
    "MatmulPreferenceAttribute",
    "MAX_WORKSPACE_BYTES REDUCTION_SCHEME_MASK MIN_ALIGNMENT_A_BYTES MIN_ALIGNMENT_B_BYTES "
    "MIN_ALIGNMENT_C_BYTES MIN_ALIGNMENT_D_BYTES",
)
Epilogue = enum.IntEnum(
    "Epilogue",
    {
        "DEFAULT": 1,
        "BIAS": 4,
        "GELU": 32,
        "GELU_BIAS": 36,
        "GELU_AUX": 160,
        "GELU_AUX_BIAS": 164,
        "DGELU": 192,
    },
)


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
        return self._add(
            {"dtype": _DTYPES[data_type], "rows": rows, "columns": columns, "leading": leading}
        )

    def matrix_layout_destroy(self, layout: int) -> None:
        del self.alive[layout]

    def matmul_desc_create(self, compute_type: int, scale_type: int) -> int:
        return self._add({"compute": compute_type})

    def matmul_desc_destroy(self, descriptor: int) -> None:
        del self.alive[descriptor]

    def matmul_desc_set_attribute(
        self, descriptor: int, attribute: int, buffer: int, size: int
    ) -> None:
        name = MatmulDescAttribute(attribute).name
        value = int.from_bytes(
            ctypes.string_at(buffer, size), "little", signed=not name.endswith("POINTER")
        )
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
        self, handle, descriptor, a, b, c, d, preference, count, results, result
    ) -> None:
        if self.alive[preference]["MIN_ALIGNMENT_A_BYTES"] < 2:
            raise cuBLASLtError("no algorithm reads odd addresses")
        for i, algorithm in enumerate(self.algorithms[:count]):
            ctypes.memmove(results + 96 * i, algorithm + bytes(32), 96)
        ctypes.c_int.from_address(result).value = min(count, len(self.algorithms))

    def matmul_algo_check(self, handle, descriptor, a, b, c, d, algorithm, result) -> None:
        if ctypes.string_at(algorithm, 64) == REJECTED:
            raise cuBLASLtError("the algorithm does not fit")

    def matmul(
        self,
        handle,
        descriptor,
        alpha,
        a,
        a_layout,
        b,
        b_layout,
        beta,
        c,
        c_layout,
        d,
        d_layout,
        algorithm,
        workspace,
        workspace_bytes,
        stream,
    ) -> None:
        what, left, right, result = (
            self.alive[x] for x in (descriptor, a_layout, b_layout, d_layout)
        )
        narrow = result["dtype"].itemsize == 1
        assert handle == 7 and (c == 0 if narrow else (c == d and c_layout == d_layout))
        assert not narrow or self.alive[c_layout]["dtype"] in (torch.bfloat16, torch.float16)
        self.started.append(ctypes.string_at(algorithm, 64))
        a_mk = _scaled(_matrix(a, left), what, "A")
        b_kn = _scaled(_matrix(b, right), what, "B")
        a_mk = a_mk.t() if what["TRANSA"] else a_mk
        b_kn = b_kn.t() if what["TRANSB"] else b_kn
        out = _matrix(d, result)
        product = a_mk @ b_kn * ctypes.c_float.from_address(alpha).value
        if scale := ctypes.c_float.from_address(beta).value:
            product += scale * out.float()
        product = _epilogue(product, what, result["dtype"])
        if "AMAX_D_POINTER" in what:
            _memory(what["AMAX_D_POINTER"], 1, torch.float32).copy_(product.abs().max())
        if narrow:
            limit = torch.finfo(result["dtype"]).max
            scale = _memory(what["D_SCALE_POINTER"], 1, torch.float32)
            product = (product * scale).clamp(-limit, limit)
        out.copy_(product)


def install(monkeypatch: pytest.MonkeyPatch) -> CublasLt:
    """Install the stand-in instead of the library, on a machine that otherwise looks as if it had an H200."""
    stand_in = CublasLt()
    monkeypatch.setattr(cublaslt_library, "unavailable_reason", lambda: None)
    monkeypatch.setattr(cublaslt_library, "bindings", lambda: stand_in)
    monkeypatch.setattr(cublaslt_library, "get_handle", lambda device: 7)
    monkeypatch.setattr(cublaslt_library, "workspace_address", lambda device, stream: 0)
    monkeypatch.setattr(cublaslt_library, "indexed_device", lambda device: torch.device("cpu"))
    monkeypatch.setattr(cublaslt_library, "current_stream", lambda device: 0)
    monkeypatch.setattr(cublaslt_library, "current_device", lambda: 0)
    monkeypatch.setattr(cublaslt_plan, "_plans", Memory(cublaslt_plan._find_plan, 4096))
    return stand_in


def _epilogue(product: torch.Tensor, what: dict, dtype: torch.dtype) -> torch.Tensor:
    """Product [N, M] after its bias and its activation; aux is written on the way."""
    name = Epilogue(what.get("EPILOGUE", 1)).name
    rows, columns = product.shape
    if "BIAS" in name:
        bias = _memory(what["BIAS_POINTER"], rows, _DTYPES[what["BIAS_DATA_TYPE"]])
        product = product + bias[:, None]
    aux = None
    if "AUX" in name or name.startswith("DGELU"):
        layout = {
            "rows": rows,
            "columns": columns,
            "leading": what["EPILOGUE_AUX_LD"],
            "dtype": dtype,
        }
        assert layout["leading"] % 8 == 0 and layout["leading"] >= rows
        aux = _matrix(what["EPILOGUE_AUX_POINTER"], layout)
    if name.startswith("GELU"):
        if aux is not None:
            aux.copy_(product)
        return torch.nn.functional.gelu(product, approximate="tanh")
    if name.startswith("DGELU"):
        return torch.ops.aten.gelu_backward(product, aux.float(), approximate="tanh")
    return product


def _memory(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    size = count * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)


def _matrix(address: int, layout: dict) -> torch.Tensor:
    """Column-major matrix [rows, columns] at an address, as a view into the memory there."""
    rows, columns, leading = layout["rows"], layout["columns"], layout["leading"]
    if layout["dtype"] == torch.uint8:
        assert leading % 32 == rows % 2 == 0
        flat = _memory(address, (leading * (columns - 1) + rows) // 2, torch.uint8)
        codes = flat.as_strided((rows // 2, columns), (1, leading // 2))
        return torch.stack((codes & 15, codes >> 4), 1).flatten(0, 1)
    flat = _memory(address, leading * (columns - 1) + rows, layout["dtype"])
    return flat.as_strided((rows, columns), (1, leading))


def _scaled(codes: torch.Tensor, what: dict, side: str) -> torch.Tensor:
    """codes [K, lines] times their scales: one, one per 128 in a column, or one per 128 x 128."""
    address = what.get(f"{side}_SCALE_POINTER")
    if address is None:
        return codes.float()
    mode = what.get(f"{side}_SCALE_MODE", 0)
    depth, lines = codes.shape
    if mode == 0:
        return codes.float() * _memory(address, 1, torch.float32)
    if mode in (1, 2):  # VEC16_UE4M3, VEC32_UE8M0
        values = _E2M1[codes.int()] if codes.dtype == torch.uint8 else codes.float()
        return values * _read_swizzled_factors(address, depth, lines, 16 if mode == 1 else 32)
    blocks = depth // 128
    if mode == 4:  # VEC128_32F: the scales for one block along K, for all lines, follow each other
        scale = _memory(address, blocks * lines, torch.float32).view(blocks, lines)
        return codes.float() * scale.repeat_interleave(128, 0)
    padded = -(-blocks // 4) * 4  # BLK128x128_32F: blocks along K follow each other, padded to 4
    scale = (
        _memory(address, padded * (lines // 128), torch.float32)
        .view(lines // 128, padded)[:, :blocks]
        .t()
    )
    return codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)


def _read_swizzled_factors(address: int, depth: int, lines: int, length: int) -> torch.Tensor:
    """Factors [K, lines] from one-byte scales for `length` elements each, in the library's order."""
    assert address % 16 == 0
    columns = -(-depth // length)
    tiles = -(-columns // 4)
    line, column = torch.arange(lines)[None, :], torch.arange(columns)[:, None]
    places = (
        (line // 128 * tiles + column // 4) * 512
        + line % 32 * 16
        + line % 128 // 32 * 4
        + column % 4
    )
    result = _memory(address, -(-lines // 128) * tiles * 512, torch.uint8)[places]
    factors = (
        result.view(torch.float8_e4m3fn).float()
        if length == 16
        else torch.exp2(result.float() - 127)
    )
    return factors.repeat_interleave(length, 0)[:depth]
