"""plan.run(pointers): a cuDNN graph that is planned once for its shapes and strides, and then run on addresses.

A graph is described tensor by tensor under the `ROLES` names. A warm call makes one library call
with a list of integers, without tensor objects and attribute accesses.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .....common import env, optional
from ....runtime.device import get_cudnn_version, is_current_device
from ....runtime.device_tables import keep_if_captured
from . import cudnn_store

# A graph's unique tensor ids are numbers from a fixed role table, which therefore has an end.
MOST_SCORE_MOD_TENSORS = 64

ROLES = (
    *("q", "k", "v", "output", "stats", "score_max", "score_sum", "bias", "sink", "seed", "offset"),
    *("lengths_q", "lengths_kv", "page_table", "page_table_v"),
    *("grad_output", "grad_q", "grad_k", "grad_v", "grad_bias", "grad_sink"),
    *("descale_q", "descale_k", "descale_v", "descale_s", "descale_output", "descale_grad_output"),
    *(
        "descale_dp",
        "scale_s",
        "scale_output",
        "scale_grad_q",
        "scale_grad_k",
        "scale_grad_v",
        "scale_dp",
    ),
    *("amax_s", "amax_output", "amax_grad_q", "amax_grad_k", "amax_grad_v", "amax_dp"),
    *(f"score_mod_{index}" for index in range(MOST_SCORE_MOD_TENSORS)),
    # MXFP8 codes with blocks along the sequence, and of the output gradient in 16 bits.
    *("q_t", "k_t", "grad_output_codes", "grad_output_t"),
    *("descale_q_t", "descale_k_t", "descale_grad_output_t"),
)
_UID = {role: uid for uid, role in enumerate(ROLES, start=1)}
_FIRST_OFFSET = 1000

REMEDY = "pip install 'nvidia-cudnn-frontend>=1.23,<2'"

# Plans in a process before all are dropped. A dropped plan unloads its kernels, which captured CUDA
# graphs still use: the limit is for lengths that occur only once, not for the shapes of a model.
MOST_PLANS = 4096

Strides = tuple[int, ...]
Offset = tuple[str, int]


@functools.cache
def unavailable_reason() -> str | None:
    """Return the reason why the library is unavailable, or None."""
    if not optional.installed("cudnn"):
        return f"nvidia-cudnn-frontend is not installed; {REMEDY}"
    try:
        version = importlib.metadata.version("nvidia-cudnn-frontend")
    except importlib.metadata.PackageNotFoundError as error:
        return optional.import_failure("cudnn", error)
    problem = optional.cudnn_versions_problem(version, get_cudnn_version()) or optional.failure(
        "cudnn"
    )
    if problem is not None:
        return problem
    lacking = missing_name(library())
    return (
        None if lacking is None else f"nvidia-cudnn-frontend {version} has no {lacking}; {REMEDY}"
    )


@functools.cache
def library() -> Any:
    """Return the module `cudnn`."""
    return importlib.import_module("cudnn")


class Bindings(NamedTuple):
    """The library's compiled functions, which versions export under different names.

    From 1.27 on, `cudnn.pygraph` is a Python class that starts more slowly and describes a graph that it compiles
    later; `cudnn.create_handle` returns an object from 1.28 on. The compiled graph and handles, which are integers,
    stay in the module `cudnn._pybind_module`.
    """

    graph: Callable[..., Any]
    create_handle: Callable[[], int]
    set_stream: Callable[[int, int], None]


@functools.cache
def load_bindings(module: Any) -> Bindings:
    """Return the compiled functions of the module `cudnn`."""
    compiled = getattr(module, "_pybind_module", module)
    graph = compiled.backend_graph if hasattr(compiled, "backend_graph") else compiled.pygraph
    set_stream = (
        compiled._raw_set_stream if hasattr(compiled, "_raw_set_stream") else compiled.set_stream
    )
    return Bindings(graph, compiled.create_handle, set_stream)


_GRAPH_METHODS = (
    "_execute_with_raw_ptrs",
    "_get_variant_pack_uids_sorted",
    "_prepare_variant_pack_template",
)


def missing_name(module: Any) -> str | None:
    """Return the first name that is read from the module `cudnn` and that it lacks, or None."""
    compiled = getattr(module, "_pybind_module", module)
    if not hasattr(compiled, "backend_graph") and not hasattr(compiled, "pygraph"):
        return "compiled graph"
    if not hasattr(compiled, "_raw_set_stream") and not hasattr(compiled, "set_stream"):
        return "set_stream"
    if not hasattr(compiled, "create_handle"):
        return "create_handle"
    graph = load_bindings(module).graph
    return next((name for name in _GRAPH_METHODS if not hasattr(graph, name)), None)


@functools.cache
def data_type(dtype: torch.dtype) -> Any:
    """Return cuDNN's name for a dtype."""
    names = {
        torch.bfloat16: "BFLOAT16",
        torch.float16: "HALF",
        torch.float32: "FLOAT",
        torch.int32: "INT32",
        torch.int64: "INT64",
        torch.float8_e4m3fn: "FP8_E4M3",
        torch.float8_e5m2: "FP8_E5M2",
        torch.float8_e8m0fnu: "FP8_E8M0",
    }
    return getattr(library().data_type, names[dtype])


class _Handles(threading.local):
    """This thread's library handle per device, and the handle's present stream."""

    def __init__(self) -> None:
        self.of_device: dict[int, tuple[int, int]] = {}

    def current(self, device: int) -> int:
        """Return the handle of a device, set to torch's current stream."""
        stream = torch._C._cuda_getCurrentRawStream(device)
        cached = self.of_device.get(device)
        if cached is not None and cached[1] == stream:
            return cached[0]
        if cached is None:
            with torch.cuda.device(device):
                handle = load_bindings(library()).create_handle()
        else:
            handle = cached[0]
        load_bindings(library()).set_stream(handle, stream)
        self.of_device[device] = handle, stream
        return handle


handles = _Handles()


class Description:
    """A graph that is being described."""

    def __init__(self, dtype: torch.dtype, **where: Any):
        self.graph = load_bindings(library()).graph(
            io_data_type=data_type(dtype),
            intermediate_data_type=library().data_type.FLOAT,
            compute_data_type=library().data_type.FLOAT,
            **where,
        )
        self.roles: list[str] = []
        self.offsets: dict[Offset, Any] = {}

    def tensor(
        self,
        role: str,
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        ragged: Any = None,
        on_host: bool = False,
        swizzled: bool = False,
    ) -> Any:
        """Add an input with a role; contiguous by default.

        Args:
            on_host: A number whose host address is passed.
            swizzled: Block scales in matrix-instruction order, tiles of 128 x 4.
        """
        self.roles.append(role)
        order = {"reordering_type": library().tensor_reordering.F8_128x4} if swizzled else {}
        result = self.graph.tensor(
            dim=list(shape),
            stride=list(contiguous_strides(shape) if strides is None else strides),
            data_type=data_type(dtype),
            is_pass_by_value=on_host,
            uid=_UID[role],
            name=role,
            **order,
        )
        return result if ragged is None else result.set_ragged_offset(ragged)

    def scalar(self, role: str, dtype: torch.dtype = torch.float32) -> Any:
        """Add a number in device memory."""
        return self.tensor(role, (1, 1, 1, 1), dtype=dtype)

    def output(
        self,
        role: str,
        tensor: Any,
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        ragged: Any = None,
    ) -> None:
        """Make the result of an operation an output with a role."""
        self.roles.append(role)
        tensor.set_output(True).set_uid(_UID[role]).set_dim(list(shape))
        tensor.set_stride(list(contiguous_strides(shape) if strides is None else strides))
        tensor.set_data_type(data_type(dtype))
        if ragged is not None:
            tensor.set_ragged_offset(ragged)

    def offset(self, side: str, step: int, batch: int) -> Any:
        """Return sequence starts in elements: a side's starts ("q" or "kv") x the elements per token."""
        cached = self.offsets.get((side, step))
        if cached is None:
            cached = self.graph.tensor(
                dim=[batch + 1, 1, 1, 1],
                stride=[1, 1, 1, 1],
                data_type=library().data_type.INT64,
                uid=_FIRST_OFFSET + len(self.offsets),
                name=f"offset_{side}_{step}",
            )
            self.offsets[side, step] = cached
        return cached

    def supported(self) -> None:
        """Choose an engine; raise the library's cudnnGraphNotSupportedError with its reason if there is none."""
        modes = library().heur_mode
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([modes.A, modes.FALLBACK])
        self.graph.check_support()


class CudnnPlan:
    """A graph with its kernels, built from its description or read from disk.

    Attributes:
        roles: Roles whose addresses `run` needs, in the library's order.
        offsets: (side, step) of the ragged tensors, whose addresses follow.
    """

    __slots__ = ("graph", "offsets", "roles", "steps", "workspace")

    def __init__(self, described: Description, graph: Any):
        graph._prepare_variant_pack_template()
        uids = set(graph._get_variant_pack_uids_sorted())
        unused = [role for role in described.roles if _UID[role] not in uids]
        if unused:
            raise RuntimeError(
                f"cuDNN leaves out {', '.join(unused)}; set NVTE_FUSED_ATTN=0 for another backend"
            )
        self.graph = graph
        self.roles = tuple(sorted(described.roles, key=_UID.__getitem__))
        self.offsets = tuple(described.offsets)
        self.steps = tuple(step for _, step in self.offsets)
        self.workspace = graph.get_workspace_size()

    def run(
        self, pointers: Mapping[str, int], device: torch.device, offsets: Sequence[int] = ()
    ) -> None:
        """Run the graph on the current stream; pointers by role, offsets in the order of `self.offsets`."""
        index = device.index
        if not is_current_device(index):
            with torch.cuda.device(index):
                self.run(pointers, device, offsets)
            return
        # the library may unload the kernels of a plan that no cache holds
        keep_if_captured(self, device)
        # Allocated by torch for each call: ordered by the stream, and in a captured CUDA graph's pool.
        space = (
            torch.empty(self.workspace, dtype=torch.uint8, device=device)
            if self.workspace
            else None
        )
        addresses = [pointers[role] for role in self.roles]
        addresses += offsets
        handle = handles.current(index)
        table = array("Q", addresses)
        workspace = 0 if space is None else space.data_ptr()
        self.graph._execute_with_raw_ptrs(table.buffer_info()[0], len(table), workspace, handle)


def planned(describe: Callable[..., Description], device: int, *arguments: Any) -> CudnnPlan:
    """Return the plan for describe(*arguments) on a device, from disk if stored there, unless TE_CUDNN_PLAN_CACHE=0.

    Raises:
        RuntimeError: The library has no engine for the graph; the message contains its reason.
    """
    with torch.cuda.device(device):
        description = describe(*arguments, handle=handles.current(device))
        if not env.flag("TE_CUDNN_PLAN_CACHE"):
            return _built(description)
        described_by = f"{describe.__module__}.{describe.__qualname__}"
        properties = torch.cuda.get_device_properties(device)
        path = cudnn_store.locate(
            library().backend_version(),
            importlib.metadata.version("nvidia-cudnn-frontend"),
            torch.version.cuda,
            properties.name,
            (properties.major, properties.minor, properties.multi_processor_count),
            described_by,
            arguments,
        )
        plan = None if path is None else _restore_plan(path, description, device)
        if plan is None:
            plan = _built(description)
            if path is not None:
                _store(path, plan)
        return plan


def _built(description: Description) -> CudnnPlan:
    try:
        description.supported()
        description.graph.build_plans()
        return CudnnPlan(description, description.graph)
    except library().cudnnGraphNotSupportedError as error:
        raise RuntimeError(
            f"cuDNN has no engine for this attention ({error}); set NVTE_FUSED_ATTN=0 for another backend"
        ) from error


def _library_errors() -> tuple[type[Exception], ...]:
    """Return the library's own error class, and those into which its bindings convert C++ exceptions."""
    return library().cudnnGraphNotSupportedError, RuntimeError, ValueError, IndexError


def _restore_plan(path: Path, description: Description, device: int) -> CudnnPlan | None:
    """Return the plan in a file if its tensors match the description; otherwise None."""
    stored = cudnn_store.read(path)
    if stored is None:
        return None
    handle = handles.current(device)
    try:
        graph = load_bindings(library()).graph(handle=handle)
        graph.deserialize(handle, list(stored.serialized))  # the bindings reject bytes
        graph._prepare_variant_pack_template()
        described = sorted(_UID[role] for role in description.roles)
        described += range(_FIRST_OFFSET, _FIRST_OFFSET + len(description.offsets))
        uids = list(graph._get_variant_pack_uids_sorted())
        workspace = graph.get_workspace_size()
        if uids != described:
            reason = f"its tensors are {uids}, where {described} are described"
        elif workspace != stored.workspace:
            reason = f"it asks for {workspace} bytes of workspace, and for {stored.workspace} when it was built"
        else:
            return CudnnPlan(description, graph)
    except _library_errors() as error:
        reason = f"the library rejects it ({error})"
    finally:
        # The library warms up a plan on an internal stream, and keeps that stream if the warm-up fails.
        load_bindings(library()).set_stream(*handles.of_device[device])
    cudnn_store.STORE.discard(path, reason)
    return None


def _store(path: Path, plan: CudnnPlan) -> None:
    """Write a plan to a file; log the reason if the library cannot serialize it."""
    try:
        serialized = bytes(plan.graph.serialize())
    except _library_errors() as error:
        cudnn_store.STORE.warn(
            f"cuDNN cannot serialize a plan, which is therefore not kept on disk: {error}"
        )
        return
    cudnn_store.write(path, cudnn_store.StoredPlan(plan.workspace, serialized))


@functools.cache  # without eviction, because captured graphs read the few tensors of one or two numbers
def _steps(device: torch.device, steps: tuple[int, ...]) -> Tensor:
    return torch.tensor(steps, dtype=torch.int64, device=device)[:, None]


def make_ragged_offsets(
    plan: CudnnPlan, starts_q: Tensor | None, starts_kv: Tensor | None
) -> tuple[list[int], list[Tensor]]:
    """Return addresses of starts x step for each plan offset, and the tensors that own them."""
    if not plan.offsets:
        return [], []
    if starts_q is not None and starts_q is starts_kv:
        table = starts_q * _steps(starts_q.device, plan.steps)
        row = table.stride(0) * table.element_size()
        return list(range(table.data_ptr(), table.data_ptr() + row * len(plan.steps), row)), [table]
    addresses: list[int] = []
    tables: list[Tensor] = []
    for side, step in plan.offsets:
        starts = starts_q if side == "q" else starts_kv
        assert starts is not None
        tables.append(starts * _steps(starts.device, (step,)))
        addresses.append(tables[-1].data_ptr())
    return addresses, tables


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """Return contiguous strides."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)
