"""What fused_attn asks of members of enumerations, and of what says which tokens belong together."""

from __future__ import annotations

from jax import Array

from ..checks import check_mask, check_member
from ..primitives.attention.descriptor import SequenceDescriptor
from ..primitives.attention.enums import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout


def check_kinds(bias: AttnBiasType, mask: AttnMaskType, layout: QKVLayout, softmax: AttnSoftmaxType) -> None:
    """TypeError unless each is a member of its enumeration."""
    check_member("attn_bias_type", bias, AttnBiasType)
    check_member("attn_mask_type", mask, AttnMaskType)
    check_member("qkv_layout", layout, QKVLayout)
    check_member("softmax_type", softmax, AttnSoftmaxType)


def is_mask(descriptor: SequenceDescriptor | Array | None) -> bool:
    """Is it neither absent nor a SequenceDescriptor? Masks may be arrays of numpy too."""
    return descriptor is not None and not isinstance(descriptor, SequenceDescriptor)


def check_descriptor(
    descriptor: SequenceDescriptor | Array | None, mask_type: AttnMaskType, query: Array, key: Array
) -> None:
    """TypeError or ValueError unless it says which tokens belong together, or is a mask of these scores."""
    if is_mask(descriptor) and mask_type.is_padding():
        check_mask(descriptor, (query.shape[0], query.shape[2], query.shape[1], key.shape[1]))
