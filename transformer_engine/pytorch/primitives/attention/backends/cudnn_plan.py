"""cuDNN's graphs for o = softmax(scale * q k^T + bias) v and its gradients, for one call and its strides.

Every tensor is described as [b, heads, s, d] with the strides it has, so that no layout needs a
copy. thd sequences are ragged: where each begins is read on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .....common.formats import round_up
from ..call import AttentionCall
from .cudnn_graph import Description, Strides, contiguous_strides, library
from .cudnn_score_mod import Modifier

Shape = tuple[int, int, int, int]


class Strided(NamedTuple):
    """Strides of the tensors of a call in their own formats.

    Attributes:
        tokens_q, tokens_kv: Packed token counts, rounded up.
        pages, columns: Extents of a paged cache and its table.
        modifier: score_mod graph with its tensor metadata.
        gradients: Strides of the gradients of q, k and v; None if they are contiguous.
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
    modifier: Modifier | None = None
    gradients: tuple[Strides, Strides, Strides] | None = None


def as_bhsd(tensor_format: str, strides: Strides, size: int) -> Strides:
    """Return [b, h, s, d] strides for a tensor in one of the formats; thd sequences are ragged."""
    if tensor_format == "sbhd":
        return strides[1], strides[2], strides[0], strides[3]
    if tensor_format == "bshd":
        return strides[0], strides[2], strides[1], strides[3]
    return size * strides[0], strides[1], strides[0], strides[2]


def extents(call: AttentionCall) -> tuple[int, int]:
    """Return the sequence lengths of a plan; packed lengths are rounded up, so that plans are shared."""
    size_q = _bucket(call.seqlen_q) if call.q_format == "thd" else call.seqlen_q
    return size_q, _bucket(call.seqlen_kv) if call.kv_format == "thd" else call.seqlen_kv


def _bucket(size: int) -> int:
    """Return size, rounded up by at most an eighth."""
    return round_up(size, max(64, 1 << max(size.bit_length() - 4, 0)))


def bucket_tokens(tokens: int) -> int:
    """Return the packed token count for which a plan has workspace."""
    return _bucket(max(tokens, 1))


def format_shape(
    tensor_format: str, batch: int, size: int, heads: int, depth: int, tokens: int
) -> Strides:
    """Return the shape of a tensor in a format."""
    if tensor_format == "sbhd":
        return size, batch, heads, depth
    if tensor_format == "bshd":
        return batch, size, heads, depth
    return tokens, heads, depth


class Tensors:
    """The tensors of a call in a graph."""

    def __init__(
        self,
        call: AttentionCall,
        strided: Strided,
        description: Description,
        dtype: torch.dtype | None = None,
    ):
        self.call, self.strided, self.description = call, strided, description
        self.dtype = call.dtype if dtype is None else dtype
        self.size_q, self.size_kv = extents(call)

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
        """Describe q, k, v, a gradient or another tensor with such a shape; with `result`, as an output."""
        dtype = self.dtype if dtype is None else dtype
        call, tensor_format = self.call, self.call.q_format if of_queries else self.call.kv_format
        size = self.size_q if of_queries else self.size_kv
        ragged = None
        if tensor_format == "thd":
            ragged = self.description.offset("q" if of_queries else "kv", strides[0], call.batch)
        shape = (call.batch, heads, size, depth)
        placed = as_bhsd(tensor_format, strides, size)
        if result is None:
            return self.description.tensor(role, shape, placed, dtype, ragged)
        return self.description.output(role, result, shape, placed, dtype, ragged)

    def dense(
        self, role: str, heads: int, depth: int, of_queries: bool, *result: Any, **dtype: Any
    ) -> Any:
        """Describe a contiguous tensor with such a shape."""
        tensor_format = self.call.q_format if of_queries else self.call.kv_format
        size = self.call.seqlen_q if of_queries else self.call.seqlen_kv
        shape = format_shape(tensor_format, self.call.batch, size, heads, depth, 1)
        return self.given(
            role, heads, depth, contiguous_strides(shape), of_queries, *result, **dtype
        )

    def paged(self, role: str, depth: int, strides: Strides) -> Any:
        """Describe the paged keys or values [pages, page_size, g, d]."""
        shape = (self.strided.pages, self.call.groups, self.call.page_size, depth)
        return self.description.tensor(role, shape, as_bhsd("bshd", strides, 0), self.call.dtype)

    def row_statistics(self) -> tuple[Shape, Strides, Any]:
        """Shape, strides and raggedness for one float32 number per row: [b, h, s], for thd [t, h]."""
        call = self.call
        shape = (call.batch, call.heads, self.size_q, 1)
        if call.q_format != "thd":
            return shape, contiguous_strides(shape), None
        ragged = self.description.offset("q", call.heads, call.batch)
        return shape, (self.size_q * call.heads, 1, call.heads, 1), ragged

    def options(self) -> dict[str, Any]:
        """Return the arguments that forward and backward share: scale, masks, lengths, dropout."""
        call, description = self.call, self.description
        options: dict[str, Any] = {"attn_scale": call.scale}
        left, right = call.mask.window
        alignment = library().diagonal_alignment
        options["diagonal_alignment"] = (
            alignment.BOTTOM_RIGHT if bottom_right(call) else alignment.TOP_LEFT
        )
        if left >= 0:
            options["diagonal_band_left_bound"] = left + 1
        if right >= 0:
            options["diagonal_band_right_bound"] = right
        if call.mask.padding:
            options["use_padding_mask"] = True
            options["seq_len_q"] = description.tensor(
                "lengths_q", (call.batch, 1, 1, 1), dtype=torch.int32
            )
            options["seq_len_kv"] = description.tensor(
                "lengths_kv", (call.batch, 1, 1, 1), dtype=torch.int32
            )
        if call.bias == "alibi":
            options["use_alibi_mask"] = True
        if call.dropout > 0.0:
            seed, offset = (description.scalar(role, torch.int64) for role in ("seed", "offset"))
            options["dropout"] = (call.dropout, seed, offset)
        return options

    def sink(self) -> Any:
        return self.description.tensor("sink", (1, self.call.heads, 1, 1))

    def bias(self) -> Any:
        assert self.call.bias_shape is not None
        return self.description.tensor(
            "bias", self.call.bias_shape, self.strided.bias, self.call.dtype
        )


def bottom_right(call: AttentionCall) -> bool:
    """Return whether the diagonal ends at the last query and key, and that differs from the top-left diagonal."""
    return (
        call.mask.bottom_right
        and call.mask.banded
        and (call.mask.padding or call.seqlen_q != call.seqlen_kv)
    )


def has_dense_bias(call: AttentionCall) -> bool:
    return call.bias in ("pre_scale_bias", "post_scale_bias")


def has_sink_gradient(call: AttentionCall) -> bool:
    """Return whether the library computes the sink's gradient, which it sums in no fixed order."""
    return call.softmax == "learnable" and not call.deterministic


def describe_forward(call: AttentionCall, strided: Strided, **where: Any) -> Description:
    """Describe the graph from q, k, v to the output and stats.

    stats are the float32 log of the softmax denominator, or its two parts for max_logit.
    """
    description = Description(call.dtype, **where)
    tensors = Tensors(call, strided, description)
    q = tensors.given("q", call.heads, call.head_dim_qk, strided.q, True)
    options = tensors.options()
    if call.page_size:
        k = tensors.paged("k", call.head_dim_qk, strided.k)
        v = tensors.paged("v", call.head_dim_v, strided.v)
        table = (call.batch, 1, -(-call.seqlen_kv // call.page_size), 1)
        strides = (strided.columns, strided.columns, 1, 1)
        for name, role in (("k", "page_table"), ("v", "page_table_v")):
            options[f"paged_attention_{name}_table"] = description.tensor(
                role, table, strides, torch.int32
            )
        options["paged_attention_max_seq_len_kv"] = call.seqlen_kv
    else:
        k = tensors.given("k", call.groups, call.head_dim_qk, strided.k, False)
        v = tensors.given("v", call.groups, call.head_dim_v, strided.v, False)
    if has_dense_bias(call):
        options["bias"] = tensors.bias()
    if call.softmax != "vanilla":
        options["sink_token"] = tensors.sink()
    if call.max_logit:
        shape, strides, ragged = tensors.row_statistics()
        for option, role in (("score_max", "score_max"), ("score_sum_exp", "score_sum")):
            options[option] = description.tensor(role, shape, strides, ragged=ragged).set_output(
                True
            )
    if strided.modifier is not None:
        options.update(strided.modifier.callbacks(description, with_gradient=False))
    keeps_stats = call.needs_gradient and not call.max_logit
    output, stats = description.graph.sdpa(q=q, k=k, v=v, generate_stats=keeps_stats, **options)
    tensors.dense("output", call.heads, call.head_dim_v, True, output)
    if keeps_stats:
        shape, strides, ragged = tensors.row_statistics()
        description.output("stats", stats, shape, strides, ragged=ragged)
    return description


def describe_backward(call: AttentionCall, strided: Strided, **where: Any) -> Description:
    """Describe the graph from q, k, v, output, grad_output and stats to the gradients, bias and sink included."""
    description = Description(call.dtype, **where)
    tensors = Tensors(call, strided, description)
    q = tensors.given("q", call.heads, call.head_dim_qk, strided.q, True)
    k = tensors.given("k", call.groups, call.head_dim_qk, strided.k, False)
    v = tensors.given("v", call.groups, call.head_dim_v, strided.v, False)
    output = tensors.dense("output", call.heads, call.head_dim_v, True)
    assert strided.grad_output is not None
    grad_output = tensors.given(
        "grad_output", call.heads, call.head_dim_v, strided.grad_output, True
    )
    shape, strides, ragged = tensors.row_statistics()
    stats = description.tensor("stats", shape, strides, ragged=ragged)
    options = tensors.options()
    if has_dense_bias(call):
        # Without dBias the library leaves the bias out of the probabilities too.
        assert call.bias_shape is not None
        options["bias"] = tensors.bias()
        options["dBias"] = description.tensor(
            "grad_bias", call.bias_shape, dtype=call.dtype
        ).set_output(True)
    if has_sink_gradient(call):
        # Only the sink's gradient needs the sink: the statistics already include it.
        options["sink_token"] = tensors.sink()
        options["dSink_token"] = description.tensor("grad_sink", (1, call.heads, 1, 1)).set_output(
            True
        )
    if strided.modifier is not None:
        options.update(strided.modifier.callbacks(description, with_gradient=True))
    if call.q_format == "thd":
        options["max_total_seq_len_q"] = strided.tokens_q
    if call.kv_format == "thd":
        options["max_total_seq_len_kv"] = strided.tokens_kv
    grad_q, grad_k, grad_v = description.graph.sdpa_backward(
        q=q,
        k=k,
        v=v,
        o=output,
        dO=grad_output,
        stats=stats,
        use_deterministic_algorithm=call.deterministic,
        **options,
    )
    if strided.gradients is not None:
        of_q, of_k, of_v = strided.gradients
        tensors.given("grad_q", call.heads, call.head_dim_qk, of_q, True, grad_q)
        tensors.given("grad_k", call.groups, call.head_dim_qk, of_k, False, grad_k)
        tensors.given("grad_v", call.groups, call.head_dim_v, of_v, False, grad_v)
        return description
    tensors.dense("grad_q", call.heads, call.head_dim_qk, True, grad_q)
    tensors.dense("grad_k", call.groups, call.head_dim_qk, False, grad_k)
    tensors.dense("grad_v", call.groups, call.head_dim_v, False, grad_v)
    return description
