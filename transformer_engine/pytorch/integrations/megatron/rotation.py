"""Rotary embeddings in Megatron-core's forms: angles [s, 1 | b, 1, d], or cosine and sine tables."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.rope import apply_rotary_pos_emb


class Forms(NamedTuple):
    """Embeddings in a call: angles (for queries, for keys); cosines, sines [positions, d / 2]; one table with both."""

    angles: Any
    tables: tuple[Tensor | None, Tensor | None]
    cos_sin: Tensor | None


def unpack_embeddings(forms: Forms, context: Any, flash_decode: bool) -> Any:
    """Return query and key angles, None if tables are used; raise ValueError for an unused form.

    Caches of flash_decode contain rotated keys and use the tables; contexts that rotate themselves use one table.
    """
    pair, tables, cos_sin = forms
    if pair is not None and len(pair) != 2:
        raise ValueError(
            f"rotary_pos_emb has {len(pair)} tensors; give one, or one of queries and one of keys"
        )
    if (tables[0] is None) != (tables[1] is None):
        raise ValueError("one of rotary_pos_cos and rotary_pos_sin is None; give both")
    static = context is not None and context.is_static_batching()
    if flash_decode and context is not None and not static:
        raise ValueError(
            "flash_decode=True with a context of pages; give a static context, or turn it off"
        )
    if flash_decode and static:
        if pair is not None and tables[0] is None:
            raise ValueError(
                "flash_decode=True with a context turns by rotary_pos_cos and rotary_pos_sin, which are None; give "
                "them in the place of rotary_pos_emb"
            )
        return None
    if (
        context is not None
        and not static
        and context.use_flashinfer_fused_rope
        and cos_sin is not None
    ):
        return None
    for name, form in (("rotary_pos_cos", tables[0]), ("rotary_pos_cos_sin", cos_sin)):
        if form is not None and pair is None:
            raise ValueError(
                f"{name} is given, which only a cache reads (flash_decode=True with a static context, or a context "
                "with use_flashinfer_fused_rope), but the call has no cache; give rotary_pos_emb"
            )
    return pair


def concentration(config: Any) -> float:
    """Return YaRN's factor for rotated features from Megatron's config; 1 without such settings.

    It is (0.1 ln(factor) + 1), or one such number divided by another, as in
    https://arxiv.org/abs/2309.00071 and DeepSeek-V2.
    """
    factor = getattr(config, "yarn_rotary_scaling_factor", None)
    if factor is None or factor <= 1:
        return 1.0
    above, below = (
        getattr(config, "yarn_mscale", None),
        getattr(config, "yarn_mscale_all_dim", None),
    )
    if above is None or below is None:
        above, below = 1.0, 0.0
    return (0.1 * above * math.log(factor) + 1.0) / (0.1 * below * math.log(factor) + 1.0)


def check_reach(tables: tuple[Tensor | None, Tensor | None], end: int) -> None:
    """Raise ValueError unless cosine and sine tables have positions 0 .. end - 1."""
    for name, table in zip(("rotary_pos_cos", "rotary_pos_sin"), tables, strict=True):
        if table is not None and table.shape[0] < end:
            raise ValueError(
                f"{name} has {table.shape[0]} positions, {end} are needed; make it longer"
            )


def rotate(
    x: Tensor,
    freqs: Tensor,
    interleaved: bool,
    mscale: float = 1.0,
    cu_seqlens: Tensor | None = None,
    cp: tuple[int, int] = (1, 0),
) -> Tensor:
    """Return x [s, b, h, d], or [t, h, d] with cu_seqlens, rotated by freqs [s, 1, 1, d], and multiplied by mscale.

    Args:
        x: Queries or keys.
        freqs: Angles; [s, b, 1, d] if the positions of sequences differ (multimodal positions), without cu_seqlens.
        interleaved: Features are paired (0, 1), (2, 3), ... instead of (i, i + d/2).
        mscale: Result factor.
        cu_seqlens: Packed sequence bounds, or None.
        cp: (number, index) for the context-parallel ranks; x holds this rank's part, freqs the whole sequences.
    """
    if cu_seqlens is None and freqs.ndim == 4 and freqs.shape[1] > 1:
        if freqs.shape[0] < x.shape[0] or freqs.shape[1] != x.shape[1]:
            raise ValueError(
                f"freqs are {list(freqs.shape)}, queries or keys {list(x.shape)}; give angles [{x.shape[0]}, 1 or "
                f"{x.shape[1]}, 1, d]"
            )
        # One sequence with all tokens, whose positions are token indices.
        tokens, table = x.flatten(0, 1).unsqueeze(1), freqs[: x.shape[0]].flatten(0, 1).unsqueeze(1)
        return rotate(tokens, table, interleaved, mscale).view(x.shape)
    result = apply_rotary_pos_emb(
        x,
        freqs,
        tensor_format="sbhd" if cu_seqlens is None else "thd",
        interleaved=interleaved,
        cu_seqlens=cu_seqlens,
        cp_size=cp[0],
        cp_rank=cp[1],
    )
    if mscale == 1.0:
        return result
    head, rest = result[..., : freqs.shape[-1]] * mscale, result[..., freqs.shape[-1] :]
    return torch.cat((head, rest), dim=-1) if rest.shape[-1] else head


def rotate_by_tables(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return x [.., d], rotated by cos and sin [.., r / 2], one column per feature pair; the rest is copied."""
    size = 2 * cos.shape[-1]
    rotary_part, rest = x[..., :size].float(), x[..., size:]
    first, second = (
        (rotary_part[..., ::2], rotary_part[..., 1::2])
        if interleaved
        else rotary_part.chunk(2, dim=-1)
    )
    cos, sin = cos.float(), sin.float()
    pair = first * cos - second * sin, second * cos + first * sin
    result = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((result.to(x.dtype), rest), dim=-1)
