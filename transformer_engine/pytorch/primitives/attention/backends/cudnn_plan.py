"""cuDNN's graphs of o = softmax(scale * q k^T + bias) v and of its gradients, for one request and its strides.

Every tensor is described as [b, heads, s, d] with the strides it has, so that no layout needs a copy. Sequences of
a thd tensor are ragged: where each begins is read on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .....common.formats import round_up
from ..request import AttentionRequest
from .cudnn_graph import Description, Strides, contiguous_strides, library

Shape = tuple[int, int, int, int]


class Strided(NamedTuple):
    """Strides of the tensors of a call as they are given, in their own formats.

    tokens_q, tokens_kv   of packed sequences, rounded up;  pages, columns   of a paged cache and of its table
    """

    q: Strides
    k: Strides
    v: Strides
    grad_output: Strides | None = None
    bias: Strides | None = None
    tokens_q: int = 0
    tokens_kv: int = 0
    pages: int = 0
    columns: int = 0


def as_bhsd(tensor_format: str, strides: Strides, size: int) -> Strides:
    """Strides of [b, h, s, d] from those of a tensor in one of the formats; sequences of thd are ragged."""
    if tensor_format == "sbhd":
        return strides[1], strides[2], strides[0], strides[3]
    if tensor_format == "bshd":
        return strides[0], strides[2], strides[1], strides[3]
    return size * strides[0], strides[1], strides[0], strides[2]


def extents(r: AttentionRequest) -> tuple[int, int]:
    """The sequence lengths that a plan is made for: of packed sequences rounded up, so that plans are shared."""
    size_q = _bucket(r.shape.seqlen_q) if r.shape.q_format == "thd" else r.shape.seqlen_q
    return size_q, _bucket(r.shape.seqlen_kv) if r.shape.kv_format == "thd" else r.shape.seqlen_kv


def _bucket(size: int) -> int:
    """size, rounded up by at most an eighth."""
    return round_up(size, max(64, 1 << max(size.bit_length() - 4, 0)))


def bucketed_tokens(tokens: int) -> int:
    """Tokens of packed sequences for which a plan keeps workspace."""
    return _bucket(max(tokens, 1))


def format_shape(tensor_format: str, batch: int, size: int, heads: int, depth: int, tokens: int) -> Strides:
    """Shape of a tensor in a format."""
    if tensor_format == "sbhd":
        return size, batch, heads, depth
    if tensor_format == "bshd":
        return batch, size, heads, depth
    return tokens, heads, depth


class Tensors:
    """The tensors of a request in a graph."""

    def __init__(
        self,
        r: AttentionRequest,
        strided: Strided,
        description: Description,
        dtype: torch.dtype | None = None,
    ):
        self.r, self.strided, self.description = r, strided, description
        self.dtype = r.shape.dtype if dtype is None else dtype
        self.size_q, self.size_kv = extents(r)

    def given(
        self,
        role: str,
        heads: int,
        depth: int,
        strides: Strides,
        of_queries: bool,
        result: Any = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """q, k, v, their gradients, or what is shaped like them; `result` makes it an output."""
        dtype = self.dtype if dtype is None else dtype
        r, tensor_format = self.r, self.r.shape.q_format if of_queries else self.r.shape.kv_format
        size = self.size_q if of_queries else self.size_kv
        ragged = None
        if tensor_format == "thd":
            ragged = self.description.offset("q" if of_queries else "kv", strides[0], r.shape.batch)
        shape = (r.shape.batch, heads, size, depth)
        placed = as_bhsd(tensor_format, strides, size)
        if result is None:
            return self.description.tensor(role, shape, placed, dtype, ragged)
        return self.description.output(role, result, shape, placed, dtype, ragged)

    def dense(self, role: str, heads: int, depth: int, of_queries: bool, *result: Any, **dtype: Any) -> Any:
        """The same for a contiguous tensor of our own."""
        tensor_format = self.r.shape.q_format if of_queries else self.r.shape.kv_format
        size = self.r.shape.seqlen_q if of_queries else self.r.shape.seqlen_kv
        shape = format_shape(tensor_format, self.r.shape.batch, size, heads, depth, 1)
        return self.given(role, heads, depth, contiguous_strides(shape), of_queries, *result, **dtype)

    def paged(self, role: str, depth: int, strides: Strides) -> Any:
        """Keys or values of a paged cache [pages, page_size, g, d]."""
        shape = (self.strided.pages, self.r.shape.groups, self.r.shape.page_size, depth)
        return self.description.tensor(role, shape, as_bhsd("bshd", strides, 0), self.r.shape.dtype)

    def row_statistics(self) -> tuple[Shape, Strides, Any]:
        """Shape, strides and raggedness of float32 numbers a row: [b, h, s], of thd [t, h]."""
        r = self.r
        shape = (r.shape.batch, r.shape.heads, self.size_q, 1)
        if r.shape.q_format != "thd":
            return shape, contiguous_strides(shape), None
        ragged = self.description.offset("q", r.shape.heads, r.shape.batch)
        return shape, (self.size_q * r.shape.heads, 1, r.shape.heads, 1), ragged

    def options(self) -> dict[str, Any]:
        """Arguments that forward and backward share: scale, masks, lengths, dropout."""
        r, description = self.r, self.description
        options: dict[str, Any] = {"attn_scale": r.options.scale}
        left, right = r.options.mask.window
        alignment = library().diagonal_alignment
        options["diagonal_alignment"] = alignment.BOTTOM_RIGHT if bottom_right(r) else alignment.TOP_LEFT
        if left >= 0:
            options["diagonal_band_left_bound"] = left + 1
        if right >= 0:
            options["diagonal_band_right_bound"] = right
        if r.options.mask.padding:
            options["use_padding_mask"] = True
            options["seq_len_q"] = description.tensor(
                "lengths_q", (r.shape.batch, 1, 1, 1), dtype=torch.int32
            )
            options["seq_len_kv"] = description.tensor(
                "lengths_kv", (r.shape.batch, 1, 1, 1), dtype=torch.int32
            )
        if r.options.bias == "alibi":
            options["use_alibi_mask"] = True
        if r.options.dropout > 0.0:
            seed, offset = (description.scalar(role, torch.int64) for role in ("seed", "offset"))
            options["dropout"] = (r.options.dropout, seed, offset)
        return options

    def sink(self) -> Any:
        return self.description.tensor("sink", (1, self.r.shape.heads, 1, 1))

    def bias(self) -> Any:
        assert self.r.shape.bias_shape is not None
        return self.description.tensor("bias", self.r.shape.bias_shape, self.strided.bias, self.r.shape.dtype)


def bottom_right(r: AttentionRequest) -> bool:
    """Does the diagonal end in the last query and key, where that is another place than top left?"""
    return (
        r.options.mask.bottom_right
        and r.options.mask.banded
        and (r.options.mask.padding or r.shape.seqlen_q != r.shape.seqlen_kv)
    )


def has_dense_bias(r: AttentionRequest) -> bool:
    return r.options.bias in ("pre_scale_bias", "post_scale_bias")


def has_sink_gradient(r: AttentionRequest) -> bool:
    """Does the library compute the sink's gradient? It sums it in no fixed order."""
    return r.options.softmax == "learnable" and not r.device.deterministic


def describe_forward(r: AttentionRequest, strided: Strided, **where: Any) -> Description:
    """q, k, v -> output, and stats: float32 log of the softmax's denominator (or its two parts, for max_logit)."""
    description = Description(r.shape.dtype, **where)
    tensors = Tensors(r, strided, description)
    q = tensors.given("q", r.shape.heads, r.shape.head_dim_qk, strided.q, True)
    options = tensors.options()
    if r.shape.page_size:
        k = tensors.paged("k", r.shape.head_dim_qk, strided.k)
        v = tensors.paged("v", r.shape.head_dim_v, strided.v)
        table = (r.shape.batch, 1, -(-r.shape.seqlen_kv // r.shape.page_size), 1)
        strides = (strided.columns, strided.columns, 1, 1)
        for name, role in (("k", "page_table"), ("v", "page_table_v")):
            options[f"paged_attention_{name}_table"] = description.tensor(role, table, strides, torch.int32)
        options["paged_attention_max_seq_len_kv"] = r.shape.seqlen_kv
    else:
        k = tensors.given("k", r.shape.groups, r.shape.head_dim_qk, strided.k, False)
        v = tensors.given("v", r.shape.groups, r.shape.head_dim_v, strided.v, False)
    if has_dense_bias(r):
        options["bias"] = tensors.bias()
    if r.options.softmax != "vanilla":
        options["sink_token"] = tensors.sink()
    if r.options.max_logit:
        shape, strides, ragged = tensors.row_statistics()
        for option, role in (("score_max", "score_max"), ("score_sum_exp", "score_sum")):
            options[option] = description.tensor(role, shape, strides, ragged=ragged).set_output(True)
    keeps_stats = r.options.needs_gradient and not r.options.max_logit
    output, stats = description.graph.sdpa(q=q, k=k, v=v, generate_stats=keeps_stats, **options)
    tensors.dense("output", r.shape.heads, r.shape.head_dim_v, True, output)
    if keeps_stats:
        shape, strides, ragged = tensors.row_statistics()
        description.output("stats", stats, shape, strides, ragged=ragged)
    return description


def describe_backward(r: AttentionRequest, strided: Strided, **where: Any) -> Description:
    """q, k, v, output, grad_output, stats -> grad_q, grad_k, grad_v, and the bias's and the sink's gradients."""
    description = Description(r.shape.dtype, **where)
    tensors = Tensors(r, strided, description)
    q = tensors.given("q", r.shape.heads, r.shape.head_dim_qk, strided.q, True)
    k = tensors.given("k", r.shape.groups, r.shape.head_dim_qk, strided.k, False)
    v = tensors.given("v", r.shape.groups, r.shape.head_dim_v, strided.v, False)
    output = tensors.dense("output", r.shape.heads, r.shape.head_dim_v, True)
    assert strided.grad_output is not None
    grad_output = tensors.given("grad_output", r.shape.heads, r.shape.head_dim_v, strided.grad_output, True)
    shape, strides, ragged = tensors.row_statistics()
    stats = description.tensor("stats", shape, strides, ragged=ragged)
    options = tensors.options()
    if has_dense_bias(r):
        # Without dBias the library leaves the bias out of the probabilities too.
        assert r.shape.bias_shape is not None
        options["bias"] = tensors.bias()
        options["dBias"] = description.tensor(
            "grad_bias", r.shape.bias_shape, dtype=r.shape.dtype
        ).set_output(True)
    if has_sink_gradient(r):
        # For nothing else: the statistics have the sink in them.
        options["sink_token"] = tensors.sink()
        options["dSink_token"] = description.tensor("grad_sink", (1, r.shape.heads, 1, 1)).set_output(True)
    if r.shape.q_format == "thd":
        options["max_total_seq_len_q"] = strided.tokens_q
    if r.shape.kv_format == "thd":
        options["max_total_seq_len_kv"] = strided.tokens_kv
    grad_q, grad_k, grad_v = description.graph.sdpa_backward(
        q=q,
        k=k,
        v=v,
        o=output,
        dO=grad_output,
        stats=stats,
        use_deterministic_algorithm=r.device.deterministic,
        **options,
    )
    tensors.dense("grad_q", r.shape.heads, r.shape.head_dim_qk, True, grad_q)
    tensors.dense("grad_k", r.shape.groups, r.shape.head_dim_qk, False, grad_k)
    tensors.dense("grad_v", r.shape.groups, r.shape.head_dim_v, False, grad_v)
    return description
