"""Names of the extension that depend on NVSHMEM, cuSolverMp or NCCL's device API: each call raises.

The message names the functions of `transformer_engine.pytorch` that do the same by other means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

_NVSHMEM = (
    "NVSHMEM is not part of this package; send and receive with torch.distributed, or allocate a symmetric buffer with "
    "torch.distributed._symmetric_memory"
)
_EP = (
    "the communicator of the original's expert parallelism is not part of this package; call the functions of "
    "transformer_engine.pytorch.ep"
)
_CUSOLVERMP = "cuSolverMp is not part of this package; call te.newton_schulz with te.CusolverMpCtx(group)"
_UNREAD = "Args:\n    args: Are not read.\n    kwargs: Are not read."

# Reason and replacement of each function.
FUNCTIONS = {
    **dict.fromkeys(
        (
            "init_nvshmem_backend",
            "create_nvshmem_tensor",
            "nvshmem_send_on_current_stream",
            "nvshmem_wait_on_current_stream",
            "nvshmem_finalize",
        ),
        _NVSHMEM,
    ),
    **dict.fromkeys(("cusolvermp_ctx_create", "cusolvermp_ctx_destroy", "newton_schulz"), _CUSOLVERMP),
    **dict.fromkeys(
        (
            "ep_initialize",
            "ep_finalize",
            "ep_get_zero_copy",
            "ep_zero_copy_supported",
            "ep_handle_mem_size",
            "ep_prepare",
            "ep_prepare_and_dispatch",
            "ep_dispatch",
            "ep_combine",
            "ep_dispatch_bwd",
            "ep_combine_bwd",
        ),
        _EP,
    ),
}


def _raising(name: str, reason: str) -> Callable[..., NoReturn]:
    """Return a function that raises NotImplementedError with the reason."""

    def unavailable(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name}: {reason}")

    unavailable.__name__ = unavailable.__qualname__ = name
    unavailable.__doc__ = f"Raise NotImplementedError: {reason}.\n\n{_UNREAD}"
    return unavailable


globals().update({name: _raising(name, reason) for name, reason in FUNCTIONS.items()})
__all__ = list(FUNCTIONS)
