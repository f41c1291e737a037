"""Limits that the FlashAttention libraries share."""

from __future__ import annotations

from ..call import AttentionCall, Feature

# Masks of bands and sequences packed without gaps, with diagonals that end at the last query and key.
FLASH = frozenset(
    {Feature.PACKED, Feature.WINDOW, Feature.BOTTOM_RIGHT, Feature.GROUPS, Feature.DETERMINISTIC}
)

WITHOUT_DETERMINISM = (
    "its gradients are only deterministic under torch.use_deterministic_algorithms(True) without warn_only"
)


def unsupported_by_cudnn(call: AttentionCall, other_kind: str) -> str | None:
    """Return the reason why switches or the device exclude a kernel of cuDNN; None if they do not.

    Args:
        call: The call.
        other_kind: Value of NVTE_FUSED_ATTN_BACKEND that selects kernels of the other precision: "1" selects 16-bit
            kernels, "2" FP8 kernels.
    """
    if not call.switches.fused:
        return "NVTE_FUSED_ATTN=0"
    if call.switches.fused_kind == other_kind:
        return f"NVTE_FUSED_ATTN_BACKEND={other_kind} asks for {'16 bit' if other_kind == '1' else 'FP8'}"
    if call.device_type != "cuda":
        return f"it needs a CUDA device, the tensors are on {call.device_type}"
    return None


def unsupported_beyond_flash(call: AttentionCall, largest_head: int, multiple: int = 8) -> str | None:
    """Return the reason why a 16-bit kernel on CUDA does not support the call's tensors; None if it does."""
    if call.device_type != "cuda":
        return f"it needs a CUDA device, the tensors are on {call.device_type}"
    if str(call.dtype) not in ("torch.float16", "torch.bfloat16"):
        return f"the tensors are {call.dtype}; it takes float16 and bfloat16"
    for name, size in (("queries and keys", call.head_dim_qk), ("values", call.head_dim_v)):
        if size > largest_head or size % multiple:
            return f"heads of {name} have size {size}; it takes multiples of {multiple} up to {largest_head}"
    return None
