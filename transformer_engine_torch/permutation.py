"""Tokens to experts by index and back, and groups of rows padded and unpadded, by the extension's names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from transformer_engine.common.checks import whole, whole_numbers
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.functions.row_padding import pad_rows, unpad_rows
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


def moe_permute_fwd(
    input: Tensor,
    dtype: DType | int,
    indices: Tensor,
    num_out_tokens: int,
    workspace: Sequence[Tensor],
    max_expanded_token_num: int,
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """(y [num_out_tokens, H], row_id_map int32 [T k], workspace): tokens by the experts [T, k] that take them.

    num_out_tokens   rows beyond are dropped, -1 in the map; 0 or less: none is
    dtype, max_expanded_token_num   kept for their callers: the input says its dtype, and nothing is allocated ahead
    workspace        comes back as it is given
    """
    _matrix("input", input)
    tensor("indices", indices)
    if indices.dim() != 2 or indices.shape[0] != input.shape[0] or indices.is_floating_point():
        raise ValueError(
            f"indices is {indices.dtype} {list(indices.shape)}; give the experts of each token, int32 "
            f"[{input.shape[0]}, k]"
        )
    whole("num_out_tokens", num_out_tokens, -1)
    sequence("workspace", workspace)
    every = indices.numel()
    rows = min(num_out_tokens, every) if num_out_tokens > 0 else every
    row_id_map = rows_of_indices(indices, rows)
    y, _ = send(input, Routes(row_id_map, INDEX, indices.shape[0], indices.shape[1]), rows, every_row=True)
    return y, row_id_map, workspace


def moe_permute_bwd(
    input: Tensor, dtype: DType | int, row_id_map: Tensor, prob: Tensor | None, num_tokens: int, topK: int
) -> Tensor:
    """dx [num_tokens, H] = sum over a token's routes of its rows' gradients, of moe_permute_fwd; moe_unpermute_fwd."""
    return moe_unpermute_fwd(input, dtype, row_id_map, prob, num_tokens, topK)


def moe_unpermute_fwd(
    input: Tensor, dtype: DType | int, row_id_map: Tensor, prob: Tensor | None, num_tokens: int, topK: int
) -> Tensor:
    """x [num_tokens, H] = sum over a token's routes of prob [num_tokens, topK] * input[row], in float32."""
    _matrix("input", input)
    routes = _routes(row_id_map, num_tokens, topK)
    return collect(input, routes, _probs(prob, routes))[0]


def moe_unpermute_bwd(
    input_bwd: Tensor, input_fwd: Tensor, dtype: DType | int, row_id_map: Tensor, prob: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(gradient of input_fwd [rows, H], gradient of prob [T, k]) of the gradient input_bwd [T, H] of its result.

    prob   None: one route a token, with the weight 1; the second result is empty
    """
    _matrix("input_bwd", input_bwd)
    _matrix("input_fwd", input_fwd)
    routes = _routes(row_id_map, input_bwd.shape[0], 1 if prob is None else prob.shape[-1])
    weights = _probs(prob, routes)
    if weights is None:
        return send(input_bwd, routes, input_fwd.shape[0])[0], input_bwd.new_empty(0, dtype=torch.float32)
    gradient, of_weights = send_weighted(input_bwd, routes, input_fwd.shape[0], weights, input_fwd)
    assert of_weights is not None
    return gradient, of_weights


def fused_multi_row_padding(
    input: Tensor, output: Tensor, input_row_list: Sequence[int], padded_input_row_list: Sequence[int]
) -> None:
    """output [sum of padded rows, K] = the groups of input [sum of rows, K], zeros behind each; in place."""
    _check_rows(input, output, input_row_list, padded_input_row_list)
    output.copy_(pad_rows(input, input_row_list, padded_input_row_list))


def fused_multi_row_unpadding(
    input: Tensor, output: Tensor, input_row_list: Sequence[int], unpadded_input_row_list: Sequence[int]
) -> None:
    """output [sum of unpadded rows, K] = the first rows of each group of input [sum of rows, K]; in place."""
    _check_rows(output, input, unpadded_input_row_list, input_row_list)
    output.copy_(unpad_rows(input, unpadded_input_row_list, input_row_list))


def _matrix(name: str, value: Tensor) -> None:
    floating(name, value)
    if value.dim() != 2:
        raise ValueError(f"{name} is {list(value.shape)}; give rows [.., H] as a matrix")


def _routes(row_id_map: Tensor, tokens: int, places: int) -> Routes:
    tensor("row_id_map", row_id_map)
    whole("num_tokens", tokens, 0)
    whole("topK", places)
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


def _check_rows(short: Tensor, long: Tensor, rows: Sequence[int], padded: Sequence[int]) -> None:
    """ValueError unless the groups fit the matrices, before anything is written."""
    _matrix("the unpadded matrix", short)
    _matrix("the padded matrix", long)
    for numbers in (rows, padded):
        whole_numbers("the rows of the groups", numbers)
    fits = (sum(rows), sum(padded)) == (short.shape[0], long.shape[0]) and short.shape[1] == long.shape[1]
    if (
        len(rows) != len(padded)
        or not fits
        or not all(0 <= r <= p for r, p in zip(rows, padded, strict=False))
    ):
        raise ValueError(
            f"groups of {list(rows)} rows, padded to {list(padded)}, are not those of matrices {list(short.shape)} "
            f"and {list(long.shape)}; give as many of both, that add up to the rows"
        )
