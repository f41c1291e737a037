"""D [N, M] = left [N, K] @ right [K, M] in cuBLASLt's column-major terms, planned once and then only launched.

A plan holds the descriptors, the algorithm and the host scalars for one `CublasProblem`. A call
sets the pointers that differ between calls (scales, bias) and makes one library call. Interfaces
that query an algorithm and build descriptors in every call cost 15-35 us on the host.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common.memory import Memory
from ..operand import Operand
from . import cublaslt_library as library
from .block_scales import SCALE_ALIGNMENT, align_scale, block_scale_memory
from .cublaslt_problem import (
    NO_BIAS,
    NO_SCALE,
    POINTERS,
    SCALAR,
    CublasProblem,
    Descriptor,
    make_descriptor,
)
from .request import Epilogue

# cublasLtReductionScheme_t; only COMPUTE_TYPE adds split sums in float32 instead of the narrower result.
_SIXTEEN_BIT_REDUCTIONS = 2
_ALL_REDUCTIONS = 7
_NO_REDUCTION = 0
_BIAS_DTYPES = {NO_BIAS: None, **{number: dtype for dtype, number in library.DATA_TYPES.items()}}
_FP8_ALIGNMENT = 16  # bytes; cuBLASLt has no FP8 product for smaller alignments
_SCALE_MASK = SCALE_ALIGNMENT - 1


class NoAlgorithm(RuntimeError):
    """cuBLASLt has no algorithm for a problem."""


class Attached(NamedTuple):
    """The tensors that an epilogue reads or writes in addition to the result [M, N].

    Attributes:
        bias: Bias [N].
        aux: Activation input [M, N], written by GELU_AUX and read by DGELU.
        scale: float32 [1], multiplies the result before the cast to FP8.
        amax: float32 [1], receives the absolute maximum of the result before scaling.
    """

    bias: Tensor | None = None
    aux: Tensor | None = None
    scale: Tensor | None = None
    amax: Tensor | None = None


class LibraryCall(NamedTuple):
    """The arguments of a library call except addresses, for `fast/generated_pass.py`.

    Attributes:
        idle: Idle descriptors.
        describe: Creates a descriptor if the list is empty.
        set_attribute: Library function that sets a descriptor attribute.
        matmul: Library function that computes the product.
        attributes: The numbers of POINTERS.
        scalars: The library handle, and the addresses of alpha and beta.
        layouts: Handles of the left, right and result layouts, and the address of the algorithm.
        alignment: Required pointer alignment, in bytes.
        current_stream: Returns the stream of a device.
        workspace: Returns a workspace address.
        workspace_bytes: Workspace size.
    """

    idle: list[Descriptor]
    describe: Callable[[], Descriptor]
    set_attribute: Callable[..., Any]
    matmul: Callable[..., Any]
    attributes: tuple[int, ...]
    scalars: tuple[int, int, int]
    layouts: tuple[int, int, int, int]
    alignment: int
    current_stream: Callable[[int], int]
    workspace: Callable[[int, int], int]
    workspace_bytes: int


class CublasPlan:
    """A problem's descriptors and algorithm. The constructor raises NoAlgorithm if the library has none.

    The heuristic's algorithm depends on the row count: tiles and splits of the contracted axis determine the order of a
    sum. With `any_rows`, the algorithm is the heuristic's first for `REFERENCE_ROWS` rows without split sums, so that
    the bits of a row are the same in products with any number of rows.
    """

    def __init__(self, problem: CublasProblem):
        self.problem = problem
        self.tuned = False
        lib = self._lib = library.bindings()
        self._handle = library.get_handle(problem.device)
        self._alpha = ctypes.c_float(1.0)
        self._beta = ctypes.c_float(1.0 if problem.accumulate else 0.0)
        self._attributes = tuple(int(lib.MatmulDescAttribute[name]) for name in POINTERS)
        self._idle: list[Descriptor] = []  # a thread that runs the plan removes one during the call
        self._algorithm: ctypes.Array[ctypes.c_char] | None = None
        try:
            # C shares D's layout unless the result is FP8.
            p, create, types = self.problem, self._lib.matrix_layout_create, library.DATA_TYPES
            left = (p.k, p.m) if p.left_transposed else (p.m, p.k)
            right = (p.n, p.k) if p.right_transposed else (p.k, p.n)
            result = create(types[p.result], p.m, p.n, p.result_leading)
            self._layouts = (
                create(types[p.left], *left, p.left_leading),
                create(types[p.right], *right, p.right_leading),
                result,
                result if p.addend is None else create(types[p.addend], p.m, p.n, p.result_leading),
            )
            # The interpreter may have unloaded the library at exit; then nothing is destroyed.
            weakref.finalize(self, _destroy, lib, self._idle, self._layouts).atexit = False
            reference = problem.with_reference_rows
            shared = problem.any_rows and problem != reference
            algorithms = [build_plan(reference).algorithm] if shared else self.candidates(1)
        except lib.cuBLASLtError as error:
            raise NoAlgorithm(f"cuBLASLt rejects the problem: {error}") from None
        if not algorithms:
            raise NoAlgorithm("cuBLASLt has no algorithm for the problem")
        if shared and not self._accepts(algorithms[0]):
            raise NoAlgorithm(
                f"cuBLASLt rejects the algorithm for {reference.n} rows with {problem.n} rows"
            )
        self._use(ctypes.create_string_buffer(algorithms[0], library.ALGORITHM_BYTES))

    def _use(self, algorithm: ctypes.Array[ctypes.c_char]) -> None:
        """Set the constants of a run as one tuple: accessing them one by one takes as long as the library call."""
        p = self.problem
        if self._algorithm is None:
            self._algorithm = algorithm
        else:  # a generated pass holds the address: replace the algorithm in place
            ctypes.memmove(self._algorithm, algorithm, library.ALGORITHM_BYTES)
            return
        self._constants = (
            (p.n, p.m),
            (p.m, 1),
            p.result,
            library.indexed_device(p.device),
            p.device,
            p.alignment - 1,
            _BIAS_DTYPES[p.bias],
            p.left_scale != NO_SCALE,
            p.left_scale == p.right_scale == SCALAR,
            self._attributes[:3],
            self._lib.matmul_desc_set_attribute,
            self._lib.matmul,
            (self._handle, ctypes.addressof(self._alpha), ctypes.addressof(self._beta)),
            (*self._layouts[:3], ctypes.addressof(algorithm)),
        )

    def run(self, a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
        """Compute a [M, K] @ b [N, K].T with its epilogue; allocate the result unless epilogue.out is given."""
        (
            shape,
            strides,
            dtype,
            device,
            index,
            alignment_mask,
            bias_dtype,
            quantized,
            tensor_scales,
            (left_scale_pointer, right_scale_pointer, bias_pointer),
            set_attribute,
            matmul,
            (handle, alpha, beta),
            (left_layout, right_layout, layout, algorithm),
        ) = self._constants
        if library.current_device() != index:
            with torch.cuda.device(index):
                return self.run(a, b, epilogue)
        _, bias, out, _, _ = epilogue
        if out is None:
            out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        left, right, result = b[0].data_ptr(), a[0].data_ptr(), out.data_ptr()
        joined = left | right | result
        if bias is not None:
            bias = bias if bias.dtype is bias_dtype else bias.to(bias_dtype)
            joined |= bias.data_ptr()
        if joined & alignment_mask:
            return self._run_unaligned(a, b, Epilogue(dtype, bias, out), joined & -joined)
        try:
            descriptor = self._idle.pop()
        except IndexError:
            descriptor = self._make_descriptor()
        operation, pointers, address = descriptor
        left_scale = right_scale = None
        if quantized:
            # Converted block scales must live until the product is queued; the stream keeps the order after it.
            left_scale = b[1] if tensor_scales else block_scale_memory(b, b[0].shape)
            right_scale = a[1] if tensor_scales else block_scale_memory(a, a[0].shape)
            left_address = left_scale.data_ptr()  # pyright: ignore[reportOptionalMemberAccess]
            right_address = right_scale.data_ptr()  # pyright: ignore[reportOptionalMemberAccess]
            if (left_address | right_address) & _SCALE_MASK:
                left_scale, right_scale = align_scale(left_scale), align_scale(right_scale)  # pyright: ignore
                left_address, right_address = left_scale.data_ptr(), right_scale.data_ptr()
            pointers[0], pointers[1] = left_address, right_address
            set_attribute(operation, left_scale_pointer, address, 8)
            set_attribute(operation, right_scale_pointer, address + 8, 8)
        if bias is not None:
            pointers[2] = bias.data_ptr()
            set_attribute(operation, bias_pointer, address + 16, 8)
        stream = library.current_stream(index)
        matmul(
            handle,
            operation,
            alpha,
            left,
            left_layout,
            right,
            right_layout,
            beta,
            result,
            layout,
            result,
            layout,
            algorithm,
            library.workspace_address(index, stream),
            library.WORKSPACE_BYTES,
            stream,
        )
        self._idle.append(descriptor)
        return out

    def library_call(self) -> LibraryCall:
        """Return the arguments of a library call except addresses."""
        *_, set_attribute, matmul, scalars, layouts = self._constants
        return LibraryCall(
            self._idle,
            self._make_descriptor,
            set_attribute,
            matmul,
            self._attributes,
            scalars,
            layouts,
            self.problem.alignment,
            library.current_stream,
            library.workspace_address,
            library.WORKSPACE_BYTES,
        )

    def run_attached(
        self, a: Operand, b: Operand, out: Tensor, attached: Attached, scalars: Tensor | None = None
    ) -> None:
        """Write epilogue(a [M, K] @ b [N, K].T) to out [M, N], for problems with an activation or an FP8 result.

        Scales are tensor scales or swizzled; the matrices, including aux, have the problem's
        alignment. `scalars` are alpha and beta, float32 [2], for problems with `device_scalars`.
        """
        index = self.problem.device
        if library.current_device() != index:
            with torch.cuda.device(index):
                return self.run_attached(a, b, out, attached, scalars)
        try:
            descriptor = self._idle.pop()
        except IndexError:
            descriptor = self._make_descriptor()
        operation, pointers, address = descriptor
        set_attribute, attributes = self._lib.matmul_desc_set_attribute, self._attributes
        scales = [scale if scale is None else align_scale(scale) for scale in (b.scale, a.scale)]
        for i, tensor in enumerate((*scales, *attached)):
            if tensor is not None:
                pointers[i] = tensor.data_ptr()
                set_attribute(operation, attributes[i], address + 8 * i, 8)
        handle, alpha, beta = self._constants[-2]
        if scalars is not None:
            alpha, beta = scalars.data_ptr(), scalars.data_ptr() + scalars.element_size()
        left, right, layout, addend = self._layouts
        result, stream = out.data_ptr(), library.current_stream(index)
        self._lib.matmul(
            handle,
            operation,
            alpha,
            b.codes.data_ptr(),
            left,
            a.codes.data_ptr(),
            right,
            beta,
            result if addend == layout else 0,
            addend,
            result,
            layout,
            self._constants[-1][-1],
            library.workspace_address(index, stream),
            library.WORKSPACE_BYTES,
            stream,
        )
        self._idle.append(descriptor)

    def _run_unaligned(self, a: Operand, b: Operand, epilogue: Epilogue, alignment: int) -> Tensor:
        """Compute `run` for pointers with a smaller alignment than the plan's; epilogue.out is never None."""
        problem = self.problem
        assert epilogue.out is not None
        if problem.any_rows:
            return self._run_copies(a, b, epilogue)
        if problem.left_scale == NO_SCALE or alignment >= _FP8_ALIGNMENT:
            return build_plan(problem._replace(alignment=alignment)).run(a, b, epilogue)
        bias = None if epilogue.bias is None else epilogue.bias.clone()
        a, b = a._replace(codes=a.codes.clone()), b._replace(codes=b.codes.clone())
        compact = problem._replace(accumulate=False, result_leading=problem.m)
        product = build_plan(compact).run(a, b, Epilogue(problem.result, bias))
        # a repeated product's result may have more dimensions
        product = product.view(epilogue.out.shape)
        return epilogue._replace(bias=None, accumulate=problem.accumulate).store(product)

    def _run_copies(self, a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
        """Compute `run` on aligned copies, so that the algorithm does not depend on the addresses."""
        problem, out, bias = self.problem, epilogue.out, epilogue.bias
        assert out is not None
        result = torch.empty((problem.n, problem.m), dtype=problem.result, device=out.device)
        if problem.accumulate:
            result.copy_(out.view(result.shape))
        a, b = a._replace(codes=a.codes.clone()), b._replace(codes=b.codes.clone())
        bias = None if bias is None else bias.clone()
        build_plan(problem._replace(result_leading=problem.m)).run(
            a, b, Epilogue(problem.result, bias, result)
        )
        return out.copy_(result.view(out.shape))

    def candidates(self, count: int) -> list[bytes]:
        """Return the heuristic's first algorithms, the best first."""
        lib, problem = self._lib, self.problem
        results = ctypes.create_string_buffer(library.HEURISTIC_BYTES * count)
        returned_count = ctypes.c_int(0)
        descriptor = self._make_descriptor()
        preference = lib.matmul_preference_create()
        try:
            reductions = (
                _ALL_REDUCTIONS if problem.result == torch.float32 else _SIXTEEN_BIT_REDUCTIONS
            )
            if problem.any_rows:
                reductions = _NO_REDUCTION
            preferences: dict[str, ctypes._SimpleCData] = {
                "MAX_WORKSPACE_BYTES": ctypes.c_uint64(library.WORKSPACE_BYTES),
                "REDUCTION_SCHEME_MASK": ctypes.c_uint32(reductions),
            }
            for matrix in "ABCD":
                preferences[f"MIN_ALIGNMENT_{matrix}_BYTES"] = ctypes.c_uint32(problem.alignment)
            for name, value in preferences.items():
                number = int(lib.MatmulPreferenceAttribute[name])
                address, size = ctypes.addressof(value), ctypes.sizeof(value)
                lib.matmul_preference_set_attribute(preference, number, address, size)
            left, right, result, addend = self._layouts
            lib.matmul_algo_get_heuristic(
                self._handle,
                descriptor.handle,
                left,
                right,
                addend,
                result,
                preference,
                count,
                ctypes.addressof(results),
                ctypes.addressof(returned_count),
            )
        finally:
            lib.matmul_preference_destroy(preference)
            lib.matmul_desc_destroy(descriptor.handle)
        starts = range(0, returned_count.value * library.HEURISTIC_BYTES, library.HEURISTIC_BYTES)
        return [
            results.raw[start : start + library.ALGORITHM_BYTES]
            for start in starts
            if struct.unpack_from("i", results, start + library.ALGORITHM_BYTES + 8)[0]
            == 0  # its own status
        ]

    def bias_dtype(self) -> torch.dtype | None:
        """Return the dtype that the epilogue reads a bias in; None for a problem without one."""
        return _BIAS_DTYPES[self.problem.bias]

    @property
    def algorithm(self) -> bytes:
        assert self._algorithm is not None
        return self._algorithm.raw

    def adopt(self, algorithm: bytes) -> bool:
        """Use this algorithm from now on, if the library accepts it for the problem."""
        if len(algorithm) != library.ALGORITHM_BYTES or not self._accepts(algorithm):
            return False
        self._use(ctypes.create_string_buffer(algorithm, library.ALGORITHM_BYTES))
        return True

    def _accepts(self, algorithm: bytes) -> bool:
        """Return whether the library runs this algorithm for the problem."""
        buffer = ctypes.create_string_buffer(algorithm, library.ALGORITHM_BYTES)
        verdict = ctypes.create_string_buffer(library.HEURISTIC_BYTES)
        left, right, result, addend = self._layouts
        descriptor = self._make_descriptor()
        try:
            self._lib.matmul_algo_check(
                self._handle,
                descriptor.handle,
                left,
                right,
                addend,
                result,
                ctypes.addressof(buffer),
                ctypes.addressof(verdict),
            )
        except self._lib.cuBLASLtError:
            return False
        finally:
            self._lib.matmul_desc_destroy(descriptor.handle)
        workspace_bytes, status = struct.unpack_from("Ni", verdict, library.ALGORITHM_BYTES)
        return status == 0 and workspace_bytes <= library.WORKSPACE_BYTES

    def _make_descriptor(self) -> Descriptor:
        return make_descriptor(self._lib, self.problem, self._attributes)


def _destroy(lib: ModuleType, idle: list[Descriptor], layouts: tuple[int, ...]) -> None:
    for descriptor in idle:
        lib.matmul_desc_destroy(descriptor.handle)
    for layout in set(layouts):
        lib.matrix_layout_destroy(layout)


def _find_plan(problem: CublasProblem) -> CublasPlan | NoAlgorithm:
    """Return the plan of a problem, or the cached NoAlgorithm."""
    try:
        return CublasPlan(problem)
    except NoAlgorithm as error:
        return NoAlgorithm(*error.args)


_plans: Memory[CublasProblem, CublasPlan | NoAlgorithm] = Memory(_find_plan, 4096)


def build_plan(problem: CublasProblem) -> CublasPlan:
    """Return the plan of a problem, built once; raise NoAlgorithm if the library has none."""
    plan = _plans[problem]
    if isinstance(plan, NoAlgorithm):
        # A new exception: a raised one keeps the frames of its traceback, and their tensors.
        raise NoAlgorithm(*plan.args)
    return plan
