"""Conversions between sbhd, bshd, thd and [b, h, s, d]; layout names."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from .call import AttentionCall, AttentionInputs
from .packed import bshd_to_thd, thd_to_bshd


def dense_qkv(call: AttentionCall, inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return q_bhsd, k_bgsd, v_bgsd: views for sbhd and bshd tensors, padded copies for thd tensors and pages."""
    k, v = inputs.k, inputs.v
    if call.page_size:
        assert inputs.page_table is not None
        # page_table[i, j // page size] holds token j of row i.
        k, v = (x[inputs.page_table.long()].flatten(1, 2)[:, : call.seqlen_kv] for x in (k, v))
    keys = (call.kv_format, call.seqlen_kv, inputs.starts_kv, inputs.lengths_kv)
    return queries_to_bhsd(call, inputs, inputs.q), _to_bhsd(k, *keys), _to_bhsd(v, *keys)


def batch_first(tensor_format: str, x: Tensor) -> Tensor:
    """View an sbhd tensor as [b, s, ..], or [b, s, ..] as sbhd; other formats are unchanged."""
    return x.transpose(0, 1) if tensor_format == "sbhd" else x


def heads_first(tensor_format: str, x: Tensor) -> Tensor:
    """View an unpacked tensor as [b, h, s, d]."""
    return x.permute(1, 2, 0, 3) if tensor_format == "sbhd" else x.transpose(1, 2)


def heads_last(tensor_format: str, x_bhsd: Tensor) -> Tensor:
    """View [b, h, s, d] in an unpacked format."""
    return x_bhsd.permute(2, 0, 1, 3) if tensor_format == "sbhd" else x_bhsd.transpose(1, 2)


def queries_to_bhsd(call: AttentionCall, inputs: AttentionInputs, x: Tensor) -> Tensor:
    """Return x [.., h, d] in call.q_format as [b, h, s_q, d]."""
    return _to_bhsd(x, call.q_format, call.seqlen_q, inputs.starts_q, inputs.lengths_q)


def from_bhsd(call: AttentionCall, inputs: AttentionInputs, x_bhsd: Tensor) -> Tensor:
    """Return [.., h, d] in call.q_format, contiguous; thd tokens outside the sequences are zero."""
    tokens = inputs.q.shape[0]
    return _from_bhsd(x_bhsd, call.q_format, inputs.starts_q, inputs.lengths_q, tokens)


def keys_from_bhsd(call: AttentionCall, inputs: AttentionInputs, x_bgsd: Tensor) -> Tensor:
    """Return [.., g, d] in call.kv_format, contiguous; thd tokens outside the sequences are zero."""
    tokens = inputs.k.shape[0]
    return _from_bhsd(x_bgsd, call.kv_format, inputs.starts_kv, inputs.lengths_kv, tokens)


def pack_rows(call: AttentionCall, inputs: AttentionInputs, rows_bhs: Tensor) -> Tensor:
    """Return [b, h, s_q] unchanged, or as [h, t] for packed queries."""
    if not call.packed:
        return rows_bhs
    return from_bhsd(call, inputs, rows_bhs[..., None])[..., 0].t()


def dense_rows(call: AttentionCall, inputs: AttentionInputs, rows: Tensor) -> Tensor:
    """Invert `pack_rows`; rows that are not tokens are -inf, which for probabilities means that no key is visible."""
    if not call.packed:
        return rows
    dense = queries_to_bhsd(call, inputs, rows.t()[..., None])[..., 0]
    assert inputs.lengths_q is not None
    position = torch.arange(call.seqlen_q, device=rows.device)
    return torch.where((position < inputs.lengths_q[:, None])[:, None], dense, -torch.inf)


def _to_bhsd(
    x: Tensor, tensor_format: str, size: int, starts: Tensor | None, lengths: Tensor | None
) -> Tensor:
    if tensor_format == "sbhd":
        return x.permute(1, 2, 0, 3)
    if tensor_format == "thd":
        assert starts is not None and lengths is not None
        x = thd_to_bshd(x, starts, lengths, size)
    return x.transpose(1, 2)


def _from_bhsd(
    x: Tensor, tensor_format: str, starts: Tensor | None, lengths: Tensor | None, tokens: int
) -> Tensor:
    # Copies even where the view is contiguous: for an output that is a view, torch.compile of torch 2.11 gives
    # zero gradients.
    if tensor_format == "sbhd":
        return x.permute(2, 0, 1, 3).clone(memory_format=torch.contiguous_format)
    x = x.transpose(1, 2)
    if tensor_format == "thd":
        assert starts is not None and lengths is not None
        return bshd_to_thd(x, starts, lengths, tokens)
    return x.clone(memory_format=torch.contiguous_format)


# How q, k and v in one buffer are interleaved -> the axis, counted from the end, at which "3" or "2" stands.
_PACKED_AXIS = {"{n}hd": -3, "h{n}d": -2}


def get_qkv_layout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qkv_format: str = "sbhd",
    inference_params: object | None = None,
) -> tuple[str, Tensor, Tensor, Tensor, str, str]:
    """Return (layout, q, k, v, q_format, kv_format), with a layout such as "bs3hd" or "thd_t2hd".

    Tensors in no known layout are returned contiguous, as "sbhd_sbhd_sbhd" for example. With a cache
    (inference_params), keys and values are bshd: "thd_2bshd". A packed buffer that is recognized by its memory is a
    DeprecationWarning, as in NVIDIA's engine: `DotProductAttention` takes it as qkv_layer or kv_layer.
    """
    if inference_params is not None:
        layout = "bshd_bshd_bshd" if qkv_format == "bshd" else f"{qkv_format}_2bshd"
        return layout, q.contiguous(), k, v, qkv_format, "bshd"
    prefix = qkv_format[:-2]
    for pattern in _PACKED_AXIS:
        if _share_buffer((q, k, v), pattern):
            _warn_of_views("qkv_layer")
            return prefix + pattern.format(n=3), q, k, v, qkv_format, qkv_format
        if _share_buffer((k, v), pattern):
            _warn_of_views("kv_layer")
            layout = f"{qkv_format}_{prefix}{pattern.format(n=2)}"
            return layout, q.contiguous(), k, v, qkv_format, qkv_format
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return "_".join((qkv_format,) * 3), q, k, v, qkv_format, qkv_format


def _warn_of_views(argument: str) -> None:
    warnings.warn(
        f"views of a packed buffer are recognized by their memory, which is deprecated; pass the buffer as {argument}",
        DeprecationWarning,
        stacklevel=3,
    )


def _share_buffer(parts: tuple[Tensor, ...], pattern: str) -> bool:
    """Return whether the tensors interleave in one contiguous buffer as in the pattern."""
    first = parts[0]
    if any(part.shape != first.shape or part.stride() != first.stride() for part in parts):
        return False
    if any(
        part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() for part in parts
    ):
        return False
    shape = list(first.shape)
    shape.insert(len(shape) + _PACKED_AXIS[pattern] + 1, len(parts))
    strides = torch.empty(shape, device="meta").select(_PACKED_AXIS[pattern], 0).stride()
    step = first.shape[-1] * (first.shape[-2] if pattern == "{n}hd" else 1)
    offsets = [first.storage_offset() + index * step for index in range(len(parts))]
    return first.stride() == strides and [part.storage_offset() for part in parts] == offsets
