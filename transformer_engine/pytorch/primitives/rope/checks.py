"""Rotation argument checks: layout, head, ranks, and an angle table for all positions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from ....common.numbers import to_int
from ...runtime.device_checks import demand
from .reference import Positions, RopeSpec

FORMATS = ("sbhd", "bshd", "thd")


def check_rotation(
    x: Tensor, angles: Tensor, positions: Positions, spec: RopeSpec, size: int
) -> None:
    """Raise ValueError unless angles [positions, .., rotated] fit x, whose heads have `size` features.

    Positions depend on shapes, and on numbers in tensors, which `demand` checks if TE_CHECK allows.
    """
    if spec.tensor_format not in FORMATS:
        raise ValueError(
            f"tensor_format={spec.tensor_format!r}; choose one of {', '.join(FORMATS)}"
        )
    if x.ndim != len(spec.tensor_format):
        raise ValueError(
            f"{spec.tensor_format!r} needs {len(spec.tensor_format)} axes, the tensor has {x.ndim}"
        )
    if angles.shape[-1] > size:
        raise ValueError(
            f"freqs rotate {angles.shape[-1]} features, the head has {size}; use RotaryPositionEmbedding with a dim "
            f"of at most {size}"
        )
    if angles.numel() != angles.shape[0] * angles.shape[-1]:
        raise ValueError(
            f"freqs are {list(angles.shape)}; give [positions, 1, 1, d], the same of every sequence"
        )
    if angles.shape[-1] % 2:
        raise ValueError(
            f"freqs rotate {angles.shape[-1]} features, which come in pairs; give an even number"
        )
    if not 0 <= spec.cp_rank < spec.cp_size:
        raise ValueError(
            f"cp_rank={spec.cp_rank} is outside 0..{spec.cp_size - 1}; give a rank of the group"
        )
    if spec.tensor_format == "thd":
        if positions.cu_seqlens is None:
            raise ValueError(
                "tensor_format='thd' needs cu_seqlens, the bounds of the packed sequences"
            )
        sequences = positions.cu_seqlens.shape[0] - 1 if positions.cu_seqlens.ndim == 1 else -1
        if sequences < 0:
            raise ValueError(
                f"cu_seqlens is {list(positions.cu_seqlens.shape)}; give [b + 1], 0 and where each sequence ends"
            )
        if positions.start is not None:
            _check_starts(positions.start, sequences)
        if not spec.clamps:
            demand(
                reaches_packed,
                (positions.cu_seqlens, positions.start),
                x.shape[0],
                angles.shape[0],
                spec.cp_size,
            )
    else:
        sequence = 0 if spec.tensor_format == "sbhd" else 1
        length = x.shape[sequence]
        table = angles.shape[0]
        if spec.cp_size > 1 and length % 2:
            raise ValueError(
                f"a context-parallel rank holds two equal chunks, its length {length} is odd; pad it"
            )
        required = length * spec.cp_size
        if required > table and not spec.clamps:
            raise ValueError(
                f"sequence length {required} > {table} positions of freqs; "
                f"pass the angles of at least {required} positions"
            )
        if positions.start is not None:
            _check_starts(positions.start, x.shape[1 - sequence])
            if not spec.clamps:
                demand(reaches_starts, (positions.start,), required, table)


def _check_starts(start: Tensor, sequences: int) -> None:
    if start.ndim != 1 or start.shape[0] != sequences or start.is_floating_point():
        raise ValueError(
            f"start_positions is {start.dtype} {list(start.shape)}; give integers [{sequences}], one per sequence"
        )


def reaches_starts(starts: list[int], length: int, table: int) -> None:
    """Raise ValueError unless sequences that long from these positions on fit a table with that many positions."""
    if starts and min(starts) < 0:
        raise ValueError(f"start_positions has {min(starts)}; positions count from 0")
    required = max(starts, default=0) + length
    if required > table:
        raise ValueError(
            f"start_positions up to {max(starts, default=0)} and {length} tokens need {required} positions, freqs has "
            f"{table}; make it longer"
        )


def reaches_packed(
    bounds: list[int], starts: list[int] | None, tokens: int, table: int, cp_size: int
) -> None:
    """Raise ValueError unless bounds delimit whole sequences that `cp_size` ranks share, and the table fits."""
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens begins with {bounds[0]}; make its first entry 0")
    if starts is not None and starts and min(starts) < 0:
        raise ValueError(f"start_positions has {min(starts)}; positions count from 0")
    for index, (begin, end) in enumerate(pairwise(bounds)):
        if end < begin:
            raise ValueError(
                f"cu_seqlens falls from {begin} to {end} at sequence {index}; it may only grow"
            )
        if cp_size > 1 and (end - begin) % (2 * cp_size):
            raise ValueError(
                f"sequence {index} of {end - begin} tokens is not a multiple of 2 * cp_size = {2 * cp_size}; pad it"
            )
        required = end - begin + (0 if starts is None else starts[index])
        if required > table:
            raise ValueError(
                f"sequence {index} needs {required} positions, freqs has {table}; make it longer, or correct "
                f"cu_seqlens={list(bounds)}"
            )
    if bounds[-1] > tokens * cp_size:
        raise ValueError(
            f"cu_seqlens ends with {bounds[-1]}, the tensor has {tokens * cp_size} tokens; give its own bounds"
        )


def reaches_lengths(bounds: list[int] | None, table: int) -> None:
    """Raise ValueError unless a table has as many positions as the longest sequence between bounds has tokens."""
    lengths = [] if bounds is None else [end - begin for begin, end in pairwise(bounds)]
    longest = max(lengths, default=0)
    if longest > table:
        raise ValueError(
            f"sequence {lengths.index(longest)} has {longest} tokens > {table} positions of freqs; "
            f"pass the angles of at least {longest} positions"
        )


def three_sizes(sizes: Sequence[int]) -> tuple[int, int, int]:
    """Return (q_size, k_size, v_size) for one packed projection group as integers; ValueError for another count."""
    split = [to_int("qkv_split_arg_list", size) for size in sizes]
    if len(split) != 3:
        raise ValueError(
            f"qkv_split_arg_list={split} holds {len(split)} sizes; give three of them: q_size, k_size and v_size"
        )
    return split[0], split[1], split[2]
