"""Extension names that depend on NVSHMEM, cuSolverMp or NCCL's device API: each call raises.

The message names the functions in `transformer_engine.pytorch` that do the same by other means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__all__ = [
    "create_nvshmem_tensor",
    "cusolvermp_ctx_create",
    "cusolvermp_ctx_destroy",
    "ep_combine",
    "ep_combine_bwd",
    "ep_dispatch",
    "ep_dispatch_bwd",
    "ep_finalize",
    "ep_get_zero_copy",
    "ep_handle_mem_size",
    "ep_initialize",
    "ep_prepare",
    "ep_prepare_and_dispatch",
    "ep_zero_copy_supported",
    "init_nvshmem_backend",
    "newton_schulz",
    "nvshmem_finalize",
    "nvshmem_send_on_current_stream",
    "nvshmem_wait_on_current_stream",
]

_NVSHMEM = (
    "NVSHMEM is not part of this package; send and receive with torch.distributed, or allocate a symmetric buffer with "
    "torch.distributed._symmetric_memory"
)
_EP = (
    "the communicator of the original's expert parallelism is not part of this package; call the functions of "
    "transformer_engine.pytorch.ep"
)
_CUSOLVERMP = (
    "cuSolverMp is not part of this package; call te.newton_schulz with te.CusolverMpCtx(group)"
)
_UNREAD = "Args:\n    args: Are not read.\n    kwargs: Are not read."


def _raising(name: str, reason: str) -> Callable[..., NoReturn]:
    """Return a function that raises NotImplementedError with the reason."""

    def unavailable(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name}: {reason}")

    unavailable.__name__ = unavailable.__qualname__ = name
    unavailable.__doc__ = f"Raise NotImplementedError: {reason}.\n\n{_UNREAD}"
    return unavailable


init_nvshmem_backend = _raising("init_nvshmem_backend", _NVSHMEM)
create_nvshmem_tensor = _raising("create_nvshmem_tensor", _NVSHMEM)
nvshmem_send_on_current_stream = _raising("nvshmem_send_on_current_stream", _NVSHMEM)
nvshmem_wait_on_current_stream = _raising("nvshmem_wait_on_current_stream", _NVSHMEM)
nvshmem_finalize = _raising("nvshmem_finalize", _NVSHMEM)
cusolvermp_ctx_create = _raising("cusolvermp_ctx_create", _CUSOLVERMP)
cusolvermp_ctx_destroy = _raising("cusolvermp_ctx_destroy", _CUSOLVERMP)
newton_schulz = _raising("newton_schulz", _CUSOLVERMP)
ep_initialize = _raising("ep_initialize", _EP)
ep_finalize = _raising("ep_finalize", _EP)
ep_get_zero_copy = _raising("ep_get_zero_copy", _EP)
ep_zero_copy_supported = _raising("ep_zero_copy_supported", _EP)
ep_handle_mem_size = _raising("ep_handle_mem_size", _EP)
ep_prepare = _raising("ep_prepare", _EP)
ep_prepare_and_dispatch = _raising("ep_prepare_and_dispatch", _EP)
ep_dispatch = _raising("ep_dispatch", _EP)
ep_combine = _raising("ep_combine", _EP)
ep_dispatch_bwd = _raising("ep_dispatch_bwd", _EP)
ep_combine_bwd = _raising("ep_combine_bwd", _EP)
