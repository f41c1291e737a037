"""x_bhsd = x as [b, h, s, d], whichever of sbhd, bshd and thd it comes in; and back; names of layouts."""

from __future__ import annotations

import torch
from torch import Tensor

from .request import AttentionInputs, AttentionRequest


def dense_qkv(request: AttentionRequest, inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """q_bhsd, k_bgsd, v_bgsd: views of sbhd and bshd tensors, padded copies of thd tensors."""
    q = _to_bhsd(inputs.q, request.q_format, request.seqlen_q, inputs.starts_q, inputs.lengths_q)
    keys = (request.kv_format, request.seqlen_kv, inputs.starts_kv, inputs.lengths_kv)
    return q, _to_bhsd(inputs.k, *keys), _to_bhsd(inputs.v, *keys)


def flat_output(request: AttentionRequest, inputs: AttentionInputs, out_bhsd: Tensor) -> Tensor:
    """[.., h * d_v] in request.q_format; thd tokens of no sequence are zero."""
    if request.q_format == "sbhd":
        return out_bhsd.permute(2, 0, 1, 3).flatten(2)
    out_bshd = out_bhsd.transpose(1, 2)
    if request.q_format == "thd":
        assert inputs.starts_q is not None and inputs.lengths_q is not None
        out_bshd = bshd_to_thd(out_bshd, inputs.starts_q, inputs.lengths_q, inputs.q.shape[0])
    return out_bshd.flatten(-2)


def _to_bhsd(
    x: Tensor, tensor_format: str, size: int, starts: Tensor | None, lengths: Tensor | None
) -> Tensor:
    if tensor_format == "sbhd":
        return x.permute(1, 2, 0, 3)
    if tensor_format == "thd":
        assert starts is not None and lengths is not None
        x = thd_to_bshd(x, starts, lengths, size)
    return x.transpose(1, 2)


def thd_to_bshd(x: Tensor, starts: Tensor, lengths: Tensor, size: int) -> Tensor:
    """[b, size, h, d] of packed tokens [t, h, d]: x[starts[i] : starts[i] + lengths[i]], then zeros."""
    place = torch.arange(size, device=x.device)
    real = place < lengths[:, None]
    if x.shape[0] == 0:
        return x.new_zeros(lengths.shape[0], size, *x.shape[1:])
    token = (starts[:-1, None].long() + place).clamp(max=x.shape[0] - 1)
    return torch.where(real[..., None, None], x[token], 0)


def bshd_to_thd(x: Tensor, starts: Tensor, lengths: Tensor, tokens: int) -> Tensor:
    """Packed tokens [t, h, d] of [b, s, h, d], the inverse of thd_to_bshd; tokens of no sequence are zero."""
    token = torch.arange(tokens, device=x.device)
    starts = starts.long()
    sequence = (torch.searchsorted(starts, token, right=True) - 1).clamp(max=lengths.shape[0] - 1)
    place = token - starts[sequence]
    real = place < lengths[sequence]
    return torch.where(real[:, None, None], x[sequence, place.clamp(max=x.shape[1] - 1)], 0)


# How q, k and v of one buffer are interleaved -> the axis, counted from the end, at which "3" or "2" stands.
_PACKED_AXIS = {"{n}hd": -3, "h{n}d": -2}


def get_qkv_layout(
    q: Tensor, k: Tensor, v: Tensor, qkv_format: str = "sbhd", inference_params: object | None = None
) -> tuple[str, Tensor, Tensor, Tensor, str, str]:
    """(layout, q, k, v, q_format, kv_format): how the three lie in memory, for example "bs3hd" or "thd_t2hd".

    Tensors that follow no known layout come back contiguous, as "sbhd_sbhd_sbhd" and the like. With a cache
    (inference_params), keys and values are bshd: "thd_2bshd".
    """
    if inference_params is not None:
        layout = "bshd_bshd_bshd" if qkv_format == "bshd" else f"{qkv_format}_2bshd"
        return layout, q.contiguous(), k, v, qkv_format, "bshd"
    prefix = qkv_format[:-2]
    for pattern in _PACKED_AXIS:
        if _share_buffer((q, k, v), pattern):
            return prefix + pattern.format(n=3), q, k, v, qkv_format, qkv_format
        if _share_buffer((k, v), pattern):
            layout = f"{qkv_format}_{prefix}{pattern.format(n=2)}"
            return layout, q.contiguous(), k, v, qkv_format, qkv_format
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return "_".join((qkv_format,) * 3), q, k, v, qkv_format, qkv_format


def _share_buffer(parts: tuple[Tensor, ...], pattern: str) -> bool:
    """Do the tensors interleave in one contiguous buffer, the way the pattern says?"""
    first = parts[0]
    if any(part.shape != first.shape or part.stride() != first.stride() for part in parts):
        return False
    if any(part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() for part in parts):
        return False
    shape = list(first.shape)
    shape.insert(len(shape) + _PACKED_AXIS[pattern] + 1, len(parts))
    strides = torch.empty(shape, device="meta").select(_PACKED_AXIS[pattern], 0).stride()
    step = first.shape[-1] * (first.shape[-2] if pattern == "{n}hd" else 1)
    offsets = [first.storage_offset() + index * step for index in range(len(parts))]
    return first.stride() == strides and [part.storage_offset() for part in parts] == offsets
