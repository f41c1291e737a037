"""Limits that the FlashAttention libraries share, and limits of cuDNN by GPU and version."""

from __future__ import annotations

from .....common.hardware import Capability
from ..call import AttentionCall, Feature

# Band masks and sequences packed without gaps, with diagonals that end at the last query and key.
FLASH = frozenset(
    {Feature.PACKED, Feature.WINDOW, Feature.BOTTOM_RIGHT, Feature.GROUPS, Feature.DETERMINISTIC}
)

UPGRADE_CUDNN = "pip install --upgrade nvidia-cudnn-cu13 (or -cu12, as torch's build)"
WITHOUT_DETERMINISM = (
    "its gradients are only deterministic under torch.use_deterministic_algorithms(True) "
    "without warn_only"
)


def unsupported_by_environment(
    call: AttentionCall, capability: Capability, other_kind: str
) -> str | None:
    """Return the reason why switches, device or hardware exclude a cuDNN kernel; None if they do not.

    Args:
        call: The call.
        capability: Capability that the kernel needs.
        other_kind: Value of NVTE_FUSED_ATTN_BACKEND that selects kernels of the other precision:
            "1" selects 16-bit kernels, "2" FP8 kernels.
    """
    if not call.switches.fused:
        return "NVTE_FUSED_ATTN=0"
    if call.switches.fused_kind == other_kind:
        return f"NVTE_FUSED_ATTN_BACKEND={other_kind} asks for {'16 bit' if other_kind == '1' else 'FP8'}"
    if call.device_type != "cuda":
        return f"it needs a CUDA device, the tensors are on {call.device_type}"
    return call.hardware.lacks(capability)


def unsupported_beyond_flash(
    call: AttentionCall, largest_head: int, multiple: int = 8
) -> str | None:
    """Return the reason why a 16-bit kernel on CUDA does not support the call's tensors; None if it does."""
    if call.device_type != "cuda":
        return f"it needs a CUDA device, the tensors are on {call.device_type}"
    if str(call.dtype) not in ("torch.float16", "torch.bfloat16"):
        return f"the tensors are {call.dtype}; supported: float16 and bfloat16"
    for name, size in (("queries and keys", call.head_dim_qk), ("values", call.head_dim_v)):
        if size > largest_head or size % multiple:
            return f"heads of {name} have size {size}; supported: multiples of {multiple} up to {largest_head}"
    return None


def unsupported_by_cudnn(call: AttentionCall, version: tuple[int, int, int]) -> str | None:
    """Return the reason why a cuDNN version has no 16-bit attention for a call on its GPU, or None."""
    hardware = call.hardware
    if version < hardware.cudnn:
        release, first = (".".join(map(str, each)) for each in (version, hardware.cudnn))
        return f"cuDNN {release} has no attention for {hardware.title}, {first} and higher have; {UPGRADE_CUDNN}"
    if call.cached and (reason := hardware.lacks("cudnn cached attention")) is not None:
        return reason
    if not call.needs_gradient:
        return None
    if (
        call.deterministic
        and (reason := hardware.lacks("cudnn deterministic attention")) is not None
    ):
        return reason
    packed = "thd" in (call.q_format, call.kv_format)
    if packed and (reason := hardware.lacks("cudnn ragged statistics")) is not None:
        return reason
    sizes = call.head_dim_qk, call.head_dim_v
    largest, limit = max(sizes), hardware.backward_head
    if largest > limit:
        return f"head size {largest} > {limit} in the backward pass on {hardware.title}"
    if largest > 128 and sizes[0] != sizes[1] and sizes != (192, 128):
        return f"head sizes {sizes[0]} and {sizes[1]}; supported above 128: equal sizes and 192/128"
    if 128 < largest < limit and sizes[0] == sizes[1]:
        reason = hardware.lacks("cudnn gradients of equal wide heads")
        return (
            reason
            and f"head size {largest} in the backward pass: {reason}; supported: {limit} and 192/128"
        )
    return None
