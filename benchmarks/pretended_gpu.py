"""A simulated GPU without execution: the host's part of a warm call, down to launches and products, on any machine.

Tensors are on the CPU. Tables bind their backends for one compute capability, by default 9.0, launches allocate their
outputs, find their handle and gather their arguments, and cuBLASLt's plans set their pointers. Only the last calls,
into Triton's launcher and into cuBLASLt, do nothing. Measured times therefore lack these two calls, about 2 us each,
and use the CPU's allocator. Torch's own operations run on the CPU, so cases are small.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.hardware import Hardware, nvidia
from transformer_engine.pytorch import fast

HOPPER = (9, 0)
CUBLASLT = 130_600  # with products in all formats
PROCESSORS = 132  # as on an H200
_PACKAGE = "transformer_engine."
_ALIGNMENT = 16
# A C function that accepts any arguments and does nothing, in place of a library's functions.
_nowhere: Any = itertools.chain


def pretend(capability: tuple[int, int] = HOPPER) -> None:
    """Make this process treat the CPU as a GPU, by default an H200; the package computes no results in it then."""
    hardware = nvidia(*capability)
    _module("pytorch")
    everywhere("unsupported_elementwise", _takes_all)
    everywhere("unsupported_casts", _takes_all)
    everywhere("compiles_on", lambda device: fast.ENABLED)
    everywhere("get_device_compute_capability", lambda: capability)
    everywhere("current_hardware", lambda: hardware)
    processors = _module("pytorch.runtime.launching").Processors(PROCESSORS, hardware.shared_memory)
    everywhere("processors", lambda device: processors)
    everywhere("current_stream", lambda device: 0)
    everywhere("is_current_device", lambda index: True)
    _pretend_memory()
    _pretend_launches()
    _pretend_library()
    _pretend_requests(hardware)


def everywhere(name: str, value: Any) -> None:
    """Replace a package name in every module that imported it."""
    for module in [module for key, module in sys.modules.items() if key.startswith(_PACKAGE)]:
        if name in vars(module):  # hasattr() would make each package look for similar names
            setattr(module, name, value)


def _module(name: str) -> Any:
    return importlib.import_module(_PACKAGE + name)


def _takes_all(*_: Any) -> None:
    return None


def _pretend_memory() -> None:
    zeros = _module("pytorch.runtime.zeros")
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.current_device = lambda: None  # pyright: ignore[reportAttributeAccessIssue] # a CPU's index

    def numbers(device: torch.device, zeroed: Sequence[bool]) -> list[Tensor]:
        slots = zeros._find_slots(device)
        return [zeros._pop_slot(slots, device) for _ in zeroed]

    everywhere("numbers", numbers)
    everywhere("zero", lambda device: numbers(device, (True,))[0])
    torch.cuda.device = _Device  # pyright: ignore[reportAttributeAccessIssue]


class _Device:
    """torch.cuda.device, with as many calls as it makes."""

    def __init__(self, device: Any):
        self.device = device

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _pretend_launches() -> None:
    launching = _module("common.kernels.launch")

    def compiled(launch: Any, tensors: Sequence[Tensor | None]) -> Any:
        middle = (0, 0, False, False, None, None, None, None, None, None)
        return launching.Handle(
            _nowhere, launch.grid, lambda device: 0, middle, (*launch.scalars, *launch.constants)
        )

    launching._compile = compiled


class _Library(SimpleNamespace):
    """nvmath.bindings.cublasLt: attribute names are numbers, and every function does nothing."""

    class cuBLASLtError(Exception):
        pass

    class Names(dict):
        def __missing__(self, name: str) -> int:
            return len(name)

        def __getattr__(self, name: str) -> int:
            return len(name)

    MatmulDescAttribute = MatmulPreferenceAttribute = Epilogue = Names()
    matmul = matmul_desc_set_attribute = staticmethod(_nowhere)

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: 1

    def get_version(self) -> int:
        return CUBLASLT

    def matmul_algo_get_heuristic(self, *arguments: Any) -> None:
        """Report one algorithm."""
        ctypes.c_int.from_address(arguments[-1]).value = 1


def _pretend_library() -> None:
    library = _module("pytorch.primitives.gemm.cublaslt_library")
    fake = _Library()
    library.unavailable_reason = library._unavailable_reason = _takes_all
    library.bindings = lambda: fake
    library.get_handle = lambda device: 1
    library.indexed_device = lambda device: torch.device("cpu")
    library.current_device = lambda: 0
    library._workspaces[0, 0] = (0, None)
    products = _module("pytorch.primitives.gemm.cublaslt")
    planned = products.make_problem
    # GPU allocations are multiples of 512 bytes, CPU allocations of 64.
    products.make_problem = lambda request: planned(request)._replace(alignment=_ALIGNMENT)
    _module("pytorch.primitives.gemm.cublaslt_fused").ALIGNMENT = _ALIGNMENT


def _pretend_requests(hardware: Hardware) -> None:
    request = _module("pytorch.primitives.gemm.request").GemmRequest
    result = request.__init__

    def pretend_gpu(self: Any, *fields: Any, **named: Any) -> None:
        result(self, *fields, **named)
        for name, value in {"device": "cuda", "hardware": hardware, "index": 0}.items():
            object.__setattr__(self, name, value)

    request.__init__ = pretend_gpu
    tables = _module("common.dispatch").tables
    for operation, name in (("scale_update", "triton"), ("grouped_gemm", "triton")):
        object.__setattr__(tables[operation].named(name), "unsupported_reason", _takes_all)
