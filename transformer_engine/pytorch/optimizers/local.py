"""What a rank holds of a distributed tensor, and distributed tensors made of what ranks hold."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)
_MODULE = "torch.distributed.tensor"


def local_of(tensor: Tensor) -> Tensor:
    """The rank's shard of a DTensor; any other tensor itself."""
    return tensor._local_tensor if _is_distributed(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """A tensor that is distributed as the parameter is, of what this rank holds of it."""
    if not _is_distributed(parameter):
        return local
    placed: Any = parameter
    where = {"run_check": False, "shape": placed.shape, "stride": placed.stride()}
    return sys.modules[_MODULE].DTensor.from_local(local, placed.device_mesh, placed.placements, **where)


def _is_distributed(tensor: Tensor) -> bool:
    """Nobody has a DTensor before their module is imported, which takes half a second."""
    if type(tensor) in _PLAIN or _MODULE not in sys.modules:
        return False
    return isinstance(tensor, sys.modules[_MODULE].DTensor)
