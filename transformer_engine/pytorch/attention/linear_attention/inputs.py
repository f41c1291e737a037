"""Checks for linear attention tensors, and their conversion to and from [batch, tokens, ..]."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ....common.checks import described
from ...primitives.linear_attention.request import DeltaInputs
from ...runtime import checks
from ...runtime.device_checks import demand

QKV_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The axes before the heads, as error messages print them.
_AXES = {"thd": "[t", "bshd": "[b, s", "sbhd": "[s, b"}


class CallLayout(NamedTuple):
    """Layout of a call.

    Attributes:
        qkv_format: "sbhd", "bshd" or "thd".
        tokens: Leading axis extents: (s, b), (b, s) or (t,).
        heads: Heads on this rank.
        size_qk: Size of a query or key per head.
        size_v: Size of a value per head.
    """

    qkv_format: str
    tokens: tuple[int, ...]
    heads: int
    size_qk: int
    size_v: int

    def batch_first(self, x: Tensor) -> Tensor:
        """Convert a tensor from this layout to [b, s, ..]; packed tokens are one row."""
        if self.qkv_format == "thd":
            return x.unsqueeze(0)
        return x if self.qkv_format == "bshd" else x.transpose(0, 1)

    def output(self, x: Tensor) -> Tensor:
        """Convert [b, s, h, d] to the output [.., h * d] in this layout."""
        x = x.flatten(-2)
        if self.qkv_format == "thd":
            return x.squeeze(0)
        return x if self.qkv_format == "bshd" else x.transpose(0, 1).contiguous()

    def sequences(self, cu_seqlens: Tensor | None) -> int:
        """Sequence count; each sequence has a state."""
        if cu_seqlens is not None:
            return cu_seqlens.shape[0] - 1
        return self.tokens[0 if self.qkv_format == "bshd" else 1]

    def check(self, name: str, x: object, *sizes: int) -> None:
        """Raise TypeError or ValueError unless x has the shape [tokens, *sizes]."""
        checks.tensor(name, x)
        assert isinstance(x, Tensor)
        if tuple(x.shape) != (*self.tokens, *sizes):
            raise ValueError(
                f"{name} is {list(x.shape)}; it must be {[*self.tokens, *sizes]}: the tokens of query_layer "
                f"({_AXES[self.qkv_format]}, ..] for qkv_format={self.qkv_format!r}), then {list(sizes)}"
            )


def call_layout(
    query: object, qkv_format: str, heads: int, size_qk: int, size_v: int
) -> CallLayout:
    """Return the layout of a call by its queries.

    Raises:
        TypeError: The queries are not a tensor in float16, bfloat16, float32 or float64.
        ValueError: Their shape does not fit the module.
    """
    checks.tensor("query_layer", query)
    assert isinstance(query, Tensor)
    leading = 1 if qkv_format == "thd" else 2
    if query.ndim != leading + 2 or tuple(query.shape[leading:]) != (heads, size_qk):
        raise ValueError(
            f"query_layer is {list(query.shape)}; with qkv_format={qkv_format!r} it must be "
            f"{_AXES[qkv_format]}, {heads}, {size_qk}]: heads of this rank and the head size of the module"
        )
    if query.dtype not in QKV_DTYPES:
        raise TypeError(f"query_layer is {query.dtype}; give bfloat16 or float16")
    return CallLayout(qkv_format, tuple(query.shape[:leading]), heads, size_qk, size_v)


def check_dtype(name: str, x: Tensor, query: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    """Raise TypeError unless x has an allowed dtype, or float64 with float64 queries; ValueError for another device."""
    if query.dtype == torch.float64:
        allowed = (*allowed, torch.float64)
    if x.dtype not in allowed:
        raise TypeError(
            f"{name} is {x.dtype}, query_layer {query.dtype}; give {' or '.join(map(str, dict.fromkeys(allowed)))}"
        )
    checks.same_device(name, x, "query_layer", query.device)


def check_qkv(
    layout: CallLayout, query: Tensor, key: Tensor, value: Tensor, updates: tuple[int, ...]
) -> None:
    """Raise an error unless keys and values have the module's shapes, and the queries' dtype and device."""
    layout.check("key_layer", key, *updates, layout.heads, layout.size_qk)
    layout.check("value_layer", value, *updates, layout.heads, layout.size_v)
    for name, x in (("key_layer", key), ("value_layer", value)):
        if x.dtype != query.dtype:
            raise ValueError(f"{name} is {x.dtype}, query_layer {query.dtype}; give one dtype")
        checks.same_device(name, x, "query_layer", query.device)


def check_sequences(layout: CallLayout, query: Tensor, cu_seqlens: Tensor | None) -> None:
    """Raise an error unless `cu_seqlens` fits the layout: given for packed sequences only, with valid bounds.

    Raises:
        TypeError: The bounds are not an int32 tensor.
        ValueError: They are missing, given for a dense format, on another device, or do not delimit
            the tokens. Values on a GPU are only checked with TE_CHECK.
    """
    packed = layout.qkv_format == "thd"
    if cu_seqlens is None:
        if packed:
            raise ValueError(
                "cu_seqlens=None with qkv_format='thd'; give the bounds of the sequences, int32 [b + 1]"
            )
        return
    checks.tensor("cu_seqlens", cu_seqlens)
    if not packed:
        raise ValueError(
            f"cu_seqlens={described(cu_seqlens)} with qkv_format={layout.qkv_format!r}; it is for 'thd', leave it None"
        )
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"cu_seqlens is {cu_seqlens.dtype}; give cu_seqlens.int()")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(
            f"cu_seqlens is {list(cu_seqlens.shape)}; give the bounds of the sequences [b + 1]"
        )
    checks.same_device("cu_seqlens", cu_seqlens, "query_layer", query.device)
    demand(_are_bounds, (cu_seqlens,), layout.tokens[0])


def _are_bounds(bounds: list[int], tokens: int) -> None:
    if bounds[0] != 0 or bounds[-1] > tokens or any(end < begin for begin, end in pairwise(bounds)):
        raise ValueError(
            f"cu_seqlens={described(bounds)}; it must begin with 0, not fall, and end at or before the {tokens} tokens"
        )


def check_state(
    layout: CallLayout, query: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """Raise an error unless the initial state is None or float32 [sequences, heads, v size, k size]."""
    if state is None:
        return
    checks.tensor("initial_state", state)
    shape = (layout.sequences(cu_seqlens), layout.heads, layout.size_v, layout.size_qk)
    if tuple(state.shape) != shape:
        raise ValueError(
            f"initial_state is {list(state.shape)}; it must be {list(shape)}: sequences, heads, size of a value, "
            "size of a key"
        )
    check_dtype("initial_state", state, query, (torch.float32,))


def batch_first(layout: CallLayout, inputs: DeltaInputs) -> DeltaInputs:
    """Return the inputs with token axes in the order [b, s, ..]."""
    w = None if inputs.w is None else layout.batch_first(inputs.w)
    q, k, v, g, beta = (layout.batch_first(x) for x in inputs[:5])
    return inputs._replace(q=q, k=k, v=v, g=g, beta=beta, w=w)
