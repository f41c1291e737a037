"""Token permutation by expert indices, and row-group padding, under the extension's names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from transformer_engine.common.numbers import to_int, to_ints
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.functions.permutation import pad_rows, unpad_rows
from transformer_engine.pytorch.primitives.permutation import (
    INDEX,
    Routes,
    collect,
    rows_of_indices,
    send,
    send_weighted,
)
from transformer_engine.pytorch.runtime.checks import floating, tensor

from .checks import sequence

__all__ = [
    "fused_multi_row_padding",
    "fused_multi_row_unpadding",
    "moe_permute_bwd",
    "moe_permute_fwd",
    "moe_unpermute_bwd",
    "moe_unpermute_fwd",
]


def moe_permute_fwd(
    input: Tensor,
    dtype: DType | int,
    indices: Tensor,
    num_out_tokens: int,
    workspace: Sequence[Tensor],
    max_expanded_token_num: int,
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """Permute tokens [T, H] by the experts [T, k] that they are routed to.

    Args:
        input: Tokens [T, H].
        num_out_tokens: Rows of the result; later routes are dropped, with -1 in the map. With 0 or less none is.
        dtype: Ignored, like max_expanded_token_num.
        workspace: Returned unchanged.

    Returns:
        `(y [num_out_tokens, H], row_id_map int32 [T k], workspace)`.
    """
    _matrix("input", input)
    tensor("indices", indices)
    if indices.dim() != 2 or indices.shape[0] != input.shape[0] or indices.is_floating_point():
        raise ValueError(
            f"indices is {indices.dtype} {list(indices.shape)}; give the experts of each token, int32 "
            f"[{input.shape[0]}, k]"
        )
    wanted = to_int("num_out_tokens", num_out_tokens)
    sequence("workspace", workspace)
    every = indices.numel()
    rows = min(wanted, every) if wanted > 0 else every
    row_id_map = rows_of_indices(indices, rows)
    y, _ = send(input, Routes(row_id_map, INDEX, indices.shape[0], indices.shape[1]), rows)
    return y, row_id_map, workspace


def moe_permute_bwd(
    input: Tensor,
    dtype: DType | int,
    row_id_map: Tensor,
    prob: Tensor | None,
    num_tokens: int,
    topK: int,
) -> Tensor:
    """Compute dx [num_tokens, H] of `moe_permute_fwd`: the gradient sum over each token's rows.

    Args:
        input: Permuted row gradients [rows, H].
    """
    return moe_unpermute_fwd(input, dtype, row_id_map, prob, num_tokens, topK)


def moe_unpermute_fwd(
    input: Tensor,
    dtype: DType | int,
    row_id_map: Tensor,
    prob: Tensor | None,
    num_tokens: int,
    topK: int,
) -> Tensor:
    """Compute x [num_tokens, H], the sum over a token's routes of prob [num_tokens, topK] * input[row], in float32.

    Args:
        input: Permuted rows [rows, H].
    """
    _matrix("input", input)
    routes = _routes(row_id_map, num_tokens, topK)
    return collect(input, routes, _probs(prob, routes))[0]


def moe_unpermute_bwd(
    input_bwd: Tensor,
    input_fwd: Tensor,
    dtype: DType | int,
    row_id_map: Tensor,
    prob: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients for `moe_unpermute_fwd` from its result gradient input_bwd [T, H].

    Args:
        prob: None means one route per token with weight 1; the second result is then empty.

    Returns:
        `(gradient of input_fwd [rows, H], gradient of prob [T, k])`.
    """
    _matrix("input_bwd", input_bwd)
    _matrix("input_fwd", input_fwd)
    routes = _routes(row_id_map, input_bwd.shape[0], 1 if prob is None else prob.shape[-1])
    weights = _probs(prob, routes)
    if weights is None:
        return send(input_bwd, routes, input_fwd.shape[0])[0], input_bwd.new_empty(
            0, dtype=torch.float32
        )
    gradient, of_weights = send_weighted(input_bwd, routes, input_fwd.shape[0], weights, input_fwd)
    assert of_weights is not None
    return gradient, of_weights


def fused_multi_row_padding(
    input: Tensor,
    output: Tensor,
    input_row_list: Sequence[int],
    padded_input_row_list: Sequence[int],
) -> None:
    """Write the groups in input [total rows, K], each followed by zeros, to output [total padded rows, K].

    Args:
        input: All groups' rows, one group after the other.
        output: Receives the padded rows.
        input_row_list: Rows per group.
        padded_input_row_list: Rows per group with padding.
    """
    rows, padded = _checked_rows(input, output, input_row_list, padded_input_row_list)
    output.copy_(pad_rows(input, rows, padded))


def fused_multi_row_unpadding(
    input: Tensor,
    output: Tensor,
    input_row_list: Sequence[int],
    unpadded_input_row_list: Sequence[int],
) -> None:
    """Write each group's first rows in input [total rows, K] to output [total unpadded rows, K].

    Args:
        input: All groups' padded rows.
        output: Receives the rows without padding.
        input_row_list: Rows per group with padding.
        unpadded_input_row_list: Rows per group.
    """
    rows, padded = _checked_rows(output, input, unpadded_input_row_list, input_row_list)
    output.copy_(unpad_rows(input, rows, padded))


def _matrix(name: str, value: Tensor) -> None:
    floating(name, value)
    if value.dim() != 2:
        raise ValueError(f"{name} is {list(value.shape)}; give rows [.., H] as a matrix")


def _routes(row_id_map: Tensor, tokens: int, places: int) -> Routes:
    tensor("row_id_map", row_id_map)
    tokens, places = to_int("num_tokens", tokens, 0), to_int("topK", places, 1)
    if row_id_map.dtype != torch.int32 or row_id_map.numel() != tokens * places:
        raise ValueError(
            f"row_id_map is {row_id_map.dtype} {list(row_id_map.shape)} for {tokens} tokens of {places} experts; "
            "give the int32 map of moe_permute_fwd"
        )
    return Routes(row_id_map.contiguous(), INDEX, tokens, places)


def _probs(prob: Tensor | None, routes: Routes) -> Tensor | None:
    if prob is None or prob.numel() == 0:
        return None
    floating("prob", prob)
    if tuple(prob.shape) != (routes.tokens, routes.columns):
        raise ValueError(f"prob is {list(prob.shape)}; give [{routes.tokens}, {routes.columns}]")
    return prob


def _checked_rows(
    short: Tensor, long: Tensor, given_rows: Sequence[int], given_padded: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]]:
    """Convert the group rows to ints; raise ValueError, before a write, unless they fit the matrices."""
    _matrix("the unpadded matrix", short)
    _matrix("the padded matrix", long)
    rows, padded = (
        to_ints("the rows of the groups", numbers) for numbers in (given_rows, given_padded)
    )
    fits = (sum(rows), sum(padded)) == (short.shape[0], long.shape[0]) and short.shape[
        1
    ] == long.shape[1]
    if (
        len(rows) != len(padded)
        or not fits
        or not all(0 <= r <= p for r, p in zip(rows, padded, strict=False))
    ):
        raise ValueError(
            f"groups of {rows} rows, padded to {padded}, are not those of matrices {list(short.shape)} "
            f"and {list(long.shape)}; give as many of both, that add up to the rows"
        )
    return rows, padded
