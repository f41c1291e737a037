"""The kernels from common/kernels/attention.py and their gradients, as primitives that devices share.

Batches and heads may be sharded. The random numbers for dropout depend on the index of a sequence in the full batch, so
that they do not depend on batch sharding; with dropout, heads are not sharded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...runtime.platform import processors
from ..kernels import Kernel
from ..launching import perform
from ..launching import run as run_launch
from ..partitioning import ShardingRule, broadcast_factors, strides_over_scores

if TYPE_CHECKING:
    from ....common.kernels.attention_problem import AttentionProblem


@dataclass(frozen=True)
class AttentionOptions:
    """Attention options.

    Attributes:
        scale: Factor of the scores.
        pre_scaled: Whether the bias is added before the scores are scaled.
        window: (left, right) visible keys, -1 for no limit; a causal mask is right = 0.
        bottom_right: Whether the diagonal ends at the last query and the last key.
        dropout: Dropout probability.
        packed: Whether rows contain several sequences, given by their lengths and starts.
        max_logit: Whether the forward kernel also returns the largest logits, float32 [b, h].
    """

    scale: float
    pre_scaled: bool
    window: tuple[int, int]
    bottom_right: bool
    dropout: float
    packed: bool
    max_logit: bool = False


class OptionalOperands(NamedTuple):
    """Attention operands besides queries, keys and values.

    Attributes:
        lengths_q: Query sequence lengths, int32 [b]; for packed rows [b, n].
        lengths_kv: Key sequence lengths.
        starts_q: Each query sequence's first token in its packed row, int32 [b, n].
        starts_kv: Each key sequence's first token.
        masked: uint8 [b or 1, h or 1, q, k], 1 hides a key.
        bias: [b or 1, h or 1, q or 1, k or 1].
        sink: float32 [h].
        words: uint32 [3] from a random key.
        row: Index of every row in the batch, int32 [b].
    """

    lengths_q: Array | None = None
    lengths_kv: Array | None = None
    starts_q: Array | None = None
    starts_kv: Array | None = None
    masked: Array | None = None
    bias: Array | None = None
    sink: Array | None = None
    words: Array | None = None
    row: Array | None = None

    def present(self) -> tuple[Array, ...]:
        """Operands that are not None."""
        return tuple(array for array in self if array is not None)

    def described(self, query: Array, key: Array) -> tuple[tuple[str | None, ...], tuple[int, int]]:
        """Factors of the operands, the number of key heads, and the query heads per key head."""
        groups = key.shape[2]
        batch, heads = query.shape[0], query.shape[2]
        head = head_factors(groups, heads // groups)
        scores = (("b", batch), (head, heads), ("s", query.shape[1]), ("t", key.shape[1]))
        factors = []
        for name, array in zip(self._fields, self, strict=True):
            if array is None:
                factors.append(None)
            elif name in ("masked", "bias"):
                factors.append(broadcast_factors(name, array.shape, scores))
            else:
                factors.append(
                    {"sink": head, "words": "w", "row": "b"}.get(
                        name, "b n" if array.ndim == 2 else "b"
                    )
                )
        return tuple(factors), (groups, heads // groups)


def head_factors(groups: int, members: int) -> str:
    """Factors for the query heads, members per group; Shardy rejects a one-element factor."""
    return "g" if members == 1 else "r" if groups == 1 else "(g r)"


@dataclass(frozen=True)
class _AttentionKernel(Kernel):
    """Base class for attention kernels.

    Attributes:
        options: Attention options.
        factors: Factors for the optional operands, None for an absent operand.
        heads: Key heads, and query heads per key head.
    """

    options: AttentionOptions
    factors: tuple[str | None, ...]
    heads: tuple[int, int]

    def sharing(
        self, more: Sequence[str], outputs: Sequence[str], summed: tuple[int, ...] = ()
    ) -> ShardingRule:
        """Build the sharding rule of a kernel with `more` operands after the optional ones, and these outputs."""
        present = [factor for factor in self.factors if factor is not None]
        operands = (f"b s {head_factors(*self.heads)} d", "b t g d", "b t g e", *present, *more)
        text = f"{', '.join(operands)} -> {', '.join(outputs)}"
        never = {"s", "t", "d", "e", "r", "n", "w"} | ({"g"} if self.options.dropout else set())
        sizes = dict(zip("gr", self.heads, strict=True)) if self.heads[1] > 1 else {}
        replicated = tuple(sorted(never.intersection(re.findall(r"\w+", text))))
        return ShardingRule(text, replicated, sizes, summed=summed)

    @property
    def levels(self) -> str:
        """Factors for the log softmax denominators: [b, h, q], in packed rows [b, q, h]."""
        head = head_factors(*self.heads)
        return f"b s {head}" if self.options.packed else f"b {head} s"

    def given(self, arrays: tuple[Array, ...]) -> tuple[OptionalOperands, tuple[Array, ...]]:
        """Split arrays into the optional operands and the arrays after them."""
        remaining = iter(arrays)
        operands = OptionalOperands(
            *(None if factor is None else next(remaining) for factor in self.factors)
        )
        return operands, tuple(remaining)

    def sources(
        self, q: Array, k: Array, v: Array, operands: OptionalOperands
    ) -> list[Array | None]:
        """First inputs for every kernel."""
        bounds: list[Array | None] = [*operands[:4]]
        if self.options.packed:
            lengths, starts = operands[:2], operands[2:4]
            begins = [
                x + jnp.arange(x.shape[0])[:, None] * y.shape[1]
                for x, y in zip(starts, (q, k), strict=True)
                if x is not None
            ]
            bounds = [x.ravel().astype(jnp.int32) for x in (*lengths, *begins)]  # pyright: ignore
        return [q, k, v, *bounds, None, None, operands.masked, operands.bias, None]

    def random(self, q: Array, operands: OptionalOperands) -> Array | None:
        """int64 [2] as uint32 words: a seed, and the random-number offset for this part of the batch."""
        if operands.words is None or operands.row is None:
            return None
        sequences = (
            1
            if operands.lengths_q is None or not self.options.packed
            else operands.lengths_q.shape[1]
        )
        first = operands.row[:1].astype(jnp.uint32) * (sequences * q.shape[2])
        return jnp.concatenate((operands.words, first))

    def problem(self, q: Array, k: Array, v: Array, operands: OptionalOperands) -> AttentionProblem:
        """Extents, strides and options in the form that the kernels take."""
        from ....common.kernels.attention_problem import AttentionProblem

        options = self.options
        (batch, queries, heads, size), (_, keys, groups, _), size_v = q.shape, k.shape, v.shape[3]
        rows = (
            batch if not options.packed or operands.lengths_q is None else operands.lengths_q.size
        )
        levels = (0, heads, 1) if options.packed else (heads * queries, 1, queries)
        return AttentionProblem(
            dtype=q.dtype.name,
            batch=rows,
            heads=heads,
            groups=groups,
            seqlen_q=queries,
            seqlen_kv=keys,
            size_qk=size,
            size_v=size_v,
            scales=(options.scale, options.scale if options.pre_scaled else 1.0),
            window=options.window,
            bottom_right=options.bottom_right,
            dropout=options.dropout,
            page_size=0,
            q=self.strides(queries, heads, size),
            k=self.strides(keys, groups, size),
            v=self.strides(keys, groups, size_v),
            out=self.strides(queries, heads, size_v),
            lse=levels,
            masked=strides_over_scores(operands.masked),
            bias=strides_over_scores(operands.bias),
            outer=(0, 0),
            varied=operands.masked is not None
            or operands.bias is not None
            or options.dropout > 0.0,
            shared_memory=processors().shared_memory,
            tokens=(batch * queries, batch * keys) if options.packed else None,
        )

    def strides(self, tokens: int, heads: int, size: int) -> tuple[int, int, int]:
        """Strides (batch, token, head) for an array [b, tokens, heads, size]."""
        return 0 if self.options.packed else tokens * heads * size, heads * size, size


@dataclass(frozen=True)
class AttentionForward(_AttentionKernel):
    """Forward pass: out [b, q, h, e], lse and, if requested, logit maxima [b, h].

    Operands: q [b, q, h, d], k [b, k, g, d], v [b, k, g, e], then the optional operands.
    """

    @property
    def rule(self) -> ShardingRule:
        head = head_factors(*self.heads)
        return self.sharing(
            [], [f"b s {head} e", self.levels, *[f"b {head}"] * self.options.max_logit]
        )

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        query, _, value = operands[:3]
        batch, queries, heads, _ = query.shape
        out = jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), query.dtype)
        levels = (batch, queries, heads) if self.options.packed else (batch, heads, queries)
        shapes = (levels, *[(batch, heads)] * self.options.max_logit)
        return out, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import attention

        q, k, v, *rest = arrays
        operands, _ = self.given(tuple(rest))
        with_maxima = self.options.max_logit
        launch = attention.forward(
            self.problem(q, k, v, operands), with_maxima, True, self.options.packed
        )
        inputs = [*self.sources(q, k, v, operands), operands.sink, self.random(q, operands), None]
        out, lse, largest = run_launch(launch, inputs, self.results(q, k, v)[:2])
        assert out is not None and lse is not None
        if not with_maxima:
            return out, lse
        # One number per query tile, for each sequence in a row.
        assert largest is not None
        heads = q.shape[2]
        return out, lse, largest.reshape(q.shape[0], -1, heads, largest.shape[2]).max(axis=(1, 3))


@dataclass(frozen=True)
class AttentionBackward(_AttentionKernel):
    """Backward pass: dq, dk, dv and, where the operand exists, dbias and dsink [b, h].

    Operands: the operands of the forward pass, out, dout and lse.
    """

    @property
    def rule(self) -> ShardingRule:
        bias, sink = self.factors[5:7]
        head = head_factors(*self.heads)
        outputs = [f"b s {head} d", "b t g d", "b t g e"]
        outputs += [] if bias is None else [bias]
        outputs += [] if sink is None else [f"b {head}"]
        out = f"b s {head} e"
        return self.sharing([out, out, self.levels], outputs, () if bias is None else (3,))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        q, k, v, *rest = operands
        given, _ = self.given(tuple(rest))
        likes = [q, k, v] if given.bias is None else [q, k, v, given.bias]
        shapes = [jax.ShapeDtypeStruct(like.shape, like.dtype) for like in likes]
        if given.sink is not None:
            shapes.append(jax.ShapeDtypeStruct((q.shape[0], q.shape[2]), jnp.float32))
        return tuple(shapes)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import (
            attention_backward,
            attention_bias,
            attention_delta,
            attention_programs,
        )

        q, k, v, *rest = arrays
        operands, (out, dout, lse) = self.given(tuple(rest))
        problem, packed = self.problem(q, k, v, operands), self.options.packed
        parts = problem.key_parts(attention_backward.keys_tile(problem)[1], processors().count)
        # (part, batch, token, head) for the key and value gradients
        strides = [
            (x.shape[3], *self.strides(x.shape[1], x.shape[2], parts * x.shape[3])) for x in (k, v)
        ]
        bias, bias_shape = None, ()
        if operands.bias is not None:
            bias, bias_shape = attention_bias.added(problem, operands.bias.shape)
        program = attention_programs.gradients(
            attention_delta.delta(problem, problem.out, operands.sink is not None),
            attention_backward.queries(problem, problem.q, packed),
            attention_backward.keys(problem, strides[0], strides[1], parts, packed),
            bias,
        )
        into = {
            "delta": jax.ShapeDtypeStruct(lse.shape, lse.dtype),
            "dq": jax.ShapeDtypeStruct(q.shape, q.dtype),
        }
        for name, x in (("dk", k), ("dv", v)):
            in_parts = jax.ShapeDtypeStruct((*x.shape[:3], parts, x.shape[3]), jnp.float32)
            into[name] = jax.ShapeDtypeStruct(x.shape, x.dtype) if parts == 1 else in_parts
        if operands.bias is not None:
            same_shape = bias_shape == operands.bias.shape
            into["dbias"] = jax.ShapeDtypeStruct(
                bias_shape, operands.bias.dtype if same_shape else jnp.float32
            )
        inputs = [
            *self.sources(q, k, v, operands),
            self.random(q, operands),
            out,
            dout,
            lse,
            operands.sink,
        ]
        outputs: dict[str, Array] = dict(
            zip(program.into, perform(program, inputs, into), strict=True)
        )  # pyright: ignore
        grads = [outputs["dq"]]
        for name, x in (("dk", k), ("dv", v)):
            grads.append(outputs[name] if parts == 1 else outputs[name].sum(axis=3).astype(x.dtype))
        if operands.bias is not None:
            dbias = outputs["dbias"]
            sizes = zip(dbias.shape, operands.bias.shape, strict=True)
            axes = tuple(axis for axis, (size, expected) in enumerate(sizes) if size != expected)
            grads.append(
                dbias.sum(axis=axes, keepdims=True).astype(operands.bias.dtype) if axes else dbias
            )
        if operands.sink is not None:
            grads.append(
                outputs["dsink"].sum(axis=2).reshape(q.shape[0], -1, q.shape[2]).sum(axis=1)
            )
        return tuple(grads)
