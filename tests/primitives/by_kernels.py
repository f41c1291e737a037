"""An operation's public functions, computed by its Triton backend: on a GPU, or on a CPU by Triton's interpreter."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.support.kernels import INTERPRETED
from transformer_engine.common.dispatch import Table, binding, use_backend
from transformer_engine.pytorch.primitives.activation import DEFAULT_PARAMS
from transformer_engine.pytorch.primitives.activation import triton as activation_triton
from transformer_engine.pytorch.primitives.activation.request import (
    make_request as activation_request,
)
from transformer_engine.pytorch.primitives.norm import triton as norm_triton
from transformer_engine.pytorch.primitives.norm.reference import make_request as norm_request
from transformer_engine.pytorch.primitives.quantize import QuantizeSpec


def activation_fuses(
    name: str, x: Tensor, spec: QuantizeSpec, dbias: torch.dtype | None = None, *, backward: bool
) -> bool:
    """Whether the kernel for an activation, or for its gradient, quantizes its result."""
    gradient = (x.stride(), x.dtype) if backward else None
    facts = (name, x.shape, x.stride(), x.dtype, x.device, DEFAULT_PARAMS.constants)
    request = activation_request(*facts, gradient, spec, False, False, dbias)
    assert request.cast is not None
    return activation_triton.fuses(request, request.cast)


def norm_fuses(x: Tensor, spec: QuantizeSpec, *, centered: bool) -> bool:
    """Whether a norm's kernel quantizes its result."""
    operation = "layernorm_forward" if centered else "rmsnorm_forward"
    (rows, width), (separate, along) = x.shape, x.stride()
    facts = ((rows, width), (separate, along), x.dtype, x.dtype, x.device, False, 1e-5)
    request = norm_request(operation, *facts, spec=spec)
    assert request.cast is not None
    return norm_triton.fuses(request, request.cast)


class Reference:
    """A module's functions, while one operation's reference is forced."""

    def __init__(self, module: ModuleType, operation: str):
        self.module = module
        self.operation = operation

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            with use_backend(**{self.operation: "reference"}):
                return getattr(self.module, name)(*arguments, **keywords)

        return call


class Kernels:
    """A module's functions with one operation's kernels forced; other operations choose freely.

    The backend rejects CPU tensors, but is bound nevertheless; other operations use their reference.
    """

    def __init__(self, module: ModuleType, operation: str):
        self.module = module
        self.operation = operation

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.module, name)

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            with self._forced():
                return function(*arguments, **keywords)

        return call

    def _forced(self) -> AbstractContextManager[None]:
        return binding(self._bind) if INTERPRETED else use_backend(**{self.operation: "triton"})

    def _bind(self, table: Table[Any], request: Any) -> Any:
        backend = table.named("triton") if table.operation == self.operation else table.backends[-1]
        return backend.bind(request)  # pyright: ignore[reportOptionalCall]
