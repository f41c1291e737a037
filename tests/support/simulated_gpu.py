"""A process that treats the CPU as a GPU from the hardware table: our code runs, our kernels do not.

`simulate(row)` changes the whole process, so that only programs call it. Tensors are in the CPU's memory, but report
the device cuda:0. Tables choose and bind backends as on that GPU. Launches are recorded instead of started; cuBLASLt,
torch's products and the attention libraries allocate their results, which mean nothing.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from transformer_engine.common import optional
from transformer_engine.common.dispatch import tables
from transformer_engine.common.hardware import Hardware
from transformer_engine.common.kernels import launch as launches

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
CUDNN = (9, 28, 1)
CUBLASLT = 130_600  # the first version with all MXFP8 layouts on 12.x
FLASH_4 = "4.0.0b36"
MULTIPROCESSORS = {
    "8.0": 108,
    "8.6": 82,
    "8.9": 128,
    "9.0": 132,
    "10.0": 148,
    "10.3": 148,
    "11.0": 20,
    "12.0": 170,
}
_GETTERS = {Tensor.device.__get__: GPU, Tensor.is_cuda.__get__: True, Tensor.get_device: 0}  # type: ignore[attr-defined]
# Operations whose results are in the host's memory.
_TO_HOST = {Tensor.cpu, Tensor.numpy}


class RecordedLaunch(NamedTuple):
    """A kernel call: the record, and the dtype of each tensor with whether it is aligned to 16 bytes."""

    launch: launches.Launch
    kinds: tuple[tuple[torch.dtype, bool] | None, ...]


class OnGpu(TorchFunctionMode):
    """Make tensors report cuda:0, except when created without a device, on the CPU, or from such tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        if func in _GETTERS:
            return (
                func(*args, **kwargs) if _is_on_host(args[0]) or args[0].is_meta else _GETTERS[func]
            )
        if func in (Tensor.pin_memory, Tensor.record_stream):
            return args[0]
        to_gpu = func is Tensor.cuda or any(_is_gpu(value) for value in (*args, *kwargs.values()))
        to_host = func in _TO_HOST or any(
            value == HOST or value == "cpu"
            for value in (*args, *kwargs.values())
            if isinstance(value, (str, torch.device))
        )
        tensors = [value for value in _flat((*args, *kwargs.values())) if isinstance(value, Tensor)]
        args = tuple(HOST if _is_gpu(value) else value for value in args)
        kwargs = {name: HOST if _is_gpu(value) else value for name, value in kwargs.items()}
        result = args[0].view_as(args[0]) if func is Tensor.cuda else func(*args, **kwargs)
        if not to_gpu and (to_host or all(_is_on_host(tensor) for tensor in tensors)):
            _mark(result, tensors)
        elif to_gpu and isinstance(result, Tensor) and _is_on_host(result):
            result = result.clone()  # without the mark
        return result


def _is_gpu(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _is_on_host(tensor: Tensor) -> bool:
    return getattr(tensor, "_simulated_host", False)


def _mark(result: Any, tensors: list[Tensor]) -> None:
    """Mark new tensors as the host's."""
    for value in _flat(result if isinstance(result, (list, tuple)) else (result,)):
        if isinstance(value, Tensor) and not any(value is argument for argument in tensors):
            value._simulated_host = True  # pyright: ignore[reportAttributeAccessIssue]


class CublasLt(SimpleNamespace):
    """nvmath.bindings.cublasLt: attribute names are numbers, and functions do nothing."""

    class cuBLASLtError(Exception):
        pass

    class Names(dict):
        def __missing__(self, name: str) -> int:
            return len(name)

        def __getattr__(self, name: str) -> int:
            return len(name)

    MatmulDescAttribute = MatmulPreferenceAttribute = Epilogue = Names()

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: 1

    def get_version(self) -> int:
        return CUBLASLT

    def matmul_algo_get_heuristic(self, *arguments: Any) -> None:
        """Report one algorithm."""
        ctypes.c_int.from_address(arguments[-1]).value = 1


class Simulation:
    """The simulated GPU and its recorded launches.

    Attributes:
        hardware: The GPU's row.
        launches: Launches, keyed by the properties on which compiled kernels depend.
    """

    def __init__(self, hardware: Hardware):
        self.hardware = hardware
        self.launches: dict[tuple[Any, ...], RecordedLaunch] = {}

    def record(self, launch: launches.Launch, tensors: Any) -> Callable[..., None]:
        """Replacement for launch._compile: record a launch, and return a starter that does nothing."""
        launches._check(launch, tensors)
        kinds = tuple(
            None if x is None else (x.dtype, x.data_ptr() % launches.ALIGNMENT == 0)
            for x in tensors
        )
        # Triton specializes on integers of 1, on multiples of 16 and on the width of others.
        numbers = [
            "float" if isinstance(x, float) else (x == 1, x % 16 == 0, abs(x) >= 1 << 31)
            for x in launch.scalars
        ]
        options = launch.warps, launch.registers, launch.fuses, launch.dependent
        key = launch.kernel, tuple(numbers), launch.constants, options, kinds
        self.launches.setdefault(key, RecordedLaunch(launch, kinds))
        return launches.Handle(
            itertools.chain,
            launch.grid,
            lambda device: 0,
            (0,) * 3,
            (*launch.scalars, *launch.constants),
        )


def simulate(
    hardware: Hardware, libraries: bool = True, cudnn: tuple[int, int, int] = CUDNN
) -> Simulation:
    """Make this process run on a simulated GPU, from now on.

    Args:
        hardware: The GPU's row in the hardware table.
        libraries: Whether nvmath-python, cudnn-frontend and flash-attn-4 are installed; otherwise torch and Triton are.
        cudnn: cuDNN version.
    """
    simulation = Simulation(hardware)
    _simulate_torch(hardware, cudnn)
    _simulate_launches(simulation)
    _simulate_products(libraries)
    _simulate_attention(libraries)
    _simulate_backward()
    OnGpu().__enter__()
    return simulation


def _simulate_backward() -> None:
    """Run backward passes in the mode, which torch leaves while it calls `backward`."""
    engine: Any = torch.autograd
    run = engine._engine_run_backward

    def run_on_gpu(*args: Any, **kwargs: Any) -> Any:
        with OnGpu():
            return run(*args, **kwargs)

    engine._engine_run_backward = run_on_gpu


@contextmanager
def _nothing(*_: Any) -> Iterator[None]:
    yield


def _simulate_torch(hardware: Hardware, cudnn: tuple[int, int, int]) -> None:
    from transformer_engine.common.hardware import capability_number

    major, minor = divmod(capability_number(hardware), 10)
    properties = SimpleNamespace(
        name=hardware.gpus[0] if hardware.gpus else hardware.title,
        multi_processor_count=MULTIPROCESSORS.get(hardware.architecture, 48),
        shared_memory_per_block_optin=hardware.shared_memory,
        total_memory=64 << 30,
        major=major,
        minor=minor,
        gcnArchName=hardware.architecture,
    )
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_name = lambda index=None: properties.name
    cuda.get_device_capability = lambda index=None: (major, minor)
    cuda.get_device_properties = lambda index=None: properties
    cuda.is_current_stream_capturing = lambda: False
    cuda.device = _nothing
    raw: Any = torch._C
    raw._cuda_getDevice = lambda: 0
    raw._cuda_getCurrentRawStream = lambda index: 0
    torch.version.cuda = "13.3" if hardware.vendor == "nvidia" else None
    torch.version.hip = None if hardware.vendor == "nvidia" else "7.0"
    numbers = 10_000 * cudnn[0] + 100 * cudnn[1] + cudnn[2]
    torch.backends.cudnn.version = lambda: numbers  # pyright: ignore[reportAttributeAccessIssue]
    from transformer_engine.pytorch.runtime import device, launching

    for module in (device, launching):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


def _simulate_launches(simulation: Simulation) -> None:
    from transformer_engine.pytorch.runtime import zeros

    launches.unavailable_reason = lambda hardware: None
    # read by modules that imported `unavailable_reason`
    optional.triton_problem = lambda hardware, release: None
    launches._compile = simulation.record
    launches.current_stream = zeros.current_stream = lambda device: 0
    # Modules that imported the function before.
    from transformer_engine.pytorch.runtime import launching

    launching.unavailable_reason = launches.unavailable_reason


def _empty_product(request: Any) -> Callable[..., Tensor]:
    """Bind a product backend that allocates its result."""

    def call(a: Any, b: Any, epilogue: Any) -> Tensor:
        if epilogue.out is not None:
            return epilogue.out
        return a.codes.new_empty((a.rows, b.rows), dtype=epilogue.dtype)

    return call


def _bind(backend: Any, bind: Callable[..., Any]) -> None:
    object.__setattr__(backend, "bind", bind)


def _simulate_products(libraries: bool) -> None:
    from transformer_engine.pytorch.primitives.gemm import cublaslt_library as library

    fake = CublasLt()
    reason = None if libraries else "nvmath-python is not installed"
    library.unavailable_reason = lambda: reason
    library.bindings = lambda: fake
    library.get_handle = lambda device: 1
    for backend in tables["gemm"].backends:
        if not backend.name.startswith(("cublaslt", "triton")):
            _bind(backend, _empty_product)
    for backend in tables["grouped_gemm"].backends:
        if not backend.name.startswith("triton"):
            _bind(backend, lambda request: lambda product: None)


def _simulate_attention(libraries: bool) -> None:
    from transformer_engine.pytorch.primitives.attention.backends import (
        cudnn,
        cudnn_blocks,
        cudnn_fp8,
        flash4,
    )
    from transformer_engine.pytorch.primitives.attention.call import Attended, Gradients
    from transformer_engine.pytorch.primitives.attention.passes import Passes

    def forward(call: Any, inputs: Any) -> Attended:
        output = inputs.q.new_empty((*inputs.q.shape[:-1], call.head_dim_v))
        rows = (
            (inputs.q.shape[0], call.heads)[::-1]
            if call.packed
            else (call.batch, call.heads, call.seqlen_q)
        )
        return Attended(output, inputs.q.new_empty(rows, dtype=torch.float32))

    def backward(call: Any, inputs: Any, attended: Any, grad_output: Any) -> Gradients:
        return Gradients(*[x.new_empty(x.shape) for x in inputs[:3]])

    def forward_fp8(
        call: Any, codes: Any, inputs: Any, scalars: Any, output_code: torch.dtype
    ) -> Any:
        q = codes[0]
        lse = q.new_empty((call.batch, call.heads, call.seqlen_q), dtype=torch.float32)
        output = q.new_empty((*q.shape[:-1], call.head_dim_v), dtype=output_code)
        return cudnn_fp8.CudnnFP8Output(output, lse, q.new_empty(2, dtype=torch.float32))

    def backward_fp8(call: Any, codes: Any, *rest: Any) -> Any:
        grads = [x.new_empty(x.shape, dtype=rest[-1]) for x in codes]
        return cudnn_fp8.CudnnFP8Gradients(*grads, codes[0].new_empty(4, dtype=torch.float32))

    def forward_blocks(call: Any, q: Any, k: Any, v: Any) -> Any:
        lse = q.codes.new_empty((call.batch, call.heads, call.seqlen_q), dtype=torch.float32)
        return q.codes.new_empty((*q.codes.shape[:-1], call.head_dim_v), dtype=call.dtype), lse

    reason = None if libraries else "nvidia-cudnn-frontend is not installed"
    cudnn.unavailable_reason = cudnn_fp8.unavailable_reason = cudnn_blocks._unsupported_library = (
        lambda: reason
    )
    cudnn_fp8.forward, cudnn_fp8.backward = forward_fp8, backward_fp8
    cudnn_blocks.forward = forward_blocks
    flash4.VERSION = FLASH_4 if libraries else None
    failure = optional.failure
    optional.failure = lambda module, *names: (
        None if module.startswith("flash_attn") else failure(module, *names)
    )
    for backend in tables["attention"].backends:
        if backend.name != "triton":
            passes = Passes(backend.name, forward, backward)
            _bind(backend, lambda call, passes=passes: passes)
    cudnn.bind = lambda call: Passes("cudnn", forward, backward)
