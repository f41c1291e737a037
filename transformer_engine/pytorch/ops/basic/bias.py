"""Bias: y = x + bias [N]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....common.numbers import to_bool, to_int
from ...distributed.collectives import world_size
from ...runtime.device import canonical_device, is_meta
from ..pass_operation import PassOperation
from ..passes.bias import BiasPasses
from ..passes.contract import IdentityPasses, InputFacts, OperationCall, OperationPasses
from .basic_linear import check_input, parameter_dtype


class Bias(PassOperation):
    """y = x + bias over the last dimension of x.

    Args:
        size: Last input dimension, over all ranks.
        device: Bias device, by default the GPU if there is one; "meta" allocates it in the first forward pass.
        dtype: Bias dtype, by default torch's default dtype.
        tensor_parallel: The last dimension is sharded over the tensor-parallel group.
        tensor_parallel_group: The tensor-parallel process group, by default the world group.

    Raises:
        ValueError: An unsupported dtype, or a size that the group does not divide.
    """

    _shown = {"size": "_size"}
    parameter_names = ("bias",)
    bias: Tensor | None

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: Any = None,
    ) -> None:
        super().__init__()
        self._size = to_int("size", size, 1)
        ranks = (
            world_size(tensor_parallel_group) if to_bool("tensor_parallel", tensor_parallel) else 1
        )
        if self._size % ranks:
            raise ValueError(
                f"size={size} is not divisible by the {ranks} tensor-parallel ranks; pad it"
            )
        self.tensor_parallel, self.tensor_parallel_group = ranks > 1, tensor_parallel_group
        self.local_size = self._size // ranks
        target_device = torch.device("meta") if is_meta(device) else canonical_device(device)
        bias = torch.empty(self.local_size, dtype=parameter_dtype(dtype), device=target_device)
        self.register_parameter("bias", torch.nn.Parameter(bias))
        if not is_meta(device):
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Allocate the bias if it is on the meta device, and fill it with zeros."""
        self.allocate_parameters()
        if self.bias is not None:
            with torch.no_grad():
                self.bias.zero_()

    def required_parameters(self) -> tuple[str, ...]:
        """The bias; none in a `Linear`, whose bias may be set to None as in `torch.nn.Linear`."""
        return self.parameter_names if self._owner is None else ()

    def passes(self, x: InputFacts, call: OperationCall) -> tuple[OperationPasses, InputFacts]:
        bias = self.bias
        check_input("Bias", x, self.local_size)
        if bias is None:
            return IdentityPasses(), x
        convert = None if bias.dtype == x.dtype else x.dtype
        grad = call.saves and bias.requires_grad
        return BiasPasses(convert, bias.dtype, grad), x._replace(quantized=False)
