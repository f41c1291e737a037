"""Rules for the values of cumulative lengths on the host; see `device_checks.demand`."""

from __future__ import annotations

from itertools import pairwise


def are_bounds(
    bounds: list[int], starts: list[int] | None, name: str, tokens: int | None, longest: int
) -> None:
    """Raise ValueError unless bounds [b + 1] delimit sequences in a tensor.

    Args:
        starts: Sequence starts if there are tokens between them (cu_seqlens_*_padded), else None.
        tokens: Tokens of a packed tensor; None if sequences are padded to `longest` tokens.
        longest: Tokens in the longest sequence of the call.
    """
    _check_growing(bounds, name)
    for index, (begin, end) in enumerate(pairwise(bounds)):
        if end - begin > longest:
            limit = (
                f"the {longest} that the tensor has" if tokens is None else f"max_seqlen={longest}"
            )
            raise ValueError(
                f"{name} gives sequence {index} {end - begin} tokens, more than {limit}; give the length of the "
                f"longest (it ends at {end})"
            )
    if starts is not None:
        _check_growing(starts, f"{name}_padded")
        for index in range(len(bounds) - 1):
            real, extent = bounds[index + 1] - bounds[index], starts[index + 1] - starts[index]
            if real > extent:
                raise ValueError(
                    f"{name}_padded leaves sequence {index} {extent} tokens, {name} gives it {real}; they would "
                    "overlap, leave it room"
                )
    last, what = (bounds[-1], name) if starts is None else (starts[-1], f"{name}_padded")
    if tokens is not None and last > tokens:
        raise ValueError(
            f"{what} ends with {last}, the packed tensor has {tokens} tokens; give its own bounds"
        )


def _check_growing(bounds: list[int], name: str) -> None:
    if bounds[0] != 0:
        raise ValueError(f"{name} begins with {bounds[0]}; its first entry is 0, add it")
    for index, (begin, end) in enumerate(pairwise(bounds)):
        if end < begin:
            raise ValueError(
                f"{name} falls from {begin} to {end} at sequence {index}; cumulative lengths only grow, "
                "give where each sequence ends"
            )


def has_pages(table: list[list[int]], bounds: list[int], pages: int, page_size: int) -> None:
    """Raise ValueError unless every page that holds tokens of a sequence exists; bounds: cumulative lengths."""
    for row, (begin, end) in enumerate(pairwise(bounds)):
        for page in table[row][: -(-(end - begin) // page_size)]:
            if not 0 <= page < pages:
                raise ValueError(
                    f"page_table has page {page} for sequence {row}, outside of 0..{pages - 1}; correct it"
                )
