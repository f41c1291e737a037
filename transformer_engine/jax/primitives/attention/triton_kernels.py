"""The kernels of common/kernels/attention.py and their gradients, as primitives that devices may share.

Batches and heads may be cut. The numbers that dropout draws depend on the place of a sequence in the whole batch, so
that they do not depend on how it is cut; heads are not, where it draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...platform import processors
from ..kernels import Kernel
from ..launching import perform
from ..launching import run as run_launch
from ..partitioning import broadcast_factors, strides_over_scores

if TYPE_CHECKING:
    from ....common.kernels.attention_problem import AttentionProblem

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Facts:
    """The options of one attention.

    pre_scaled   the bias is added before scores are scaled
    window       (left, right), -1: unlimited; a causal mask is right = 0
    packed       rows hold several sequences, given by their lengths and starts
    """

    scale: float
    pre_scaled: bool
    window: tuple[int, int]
    bottom_right: bool
    dropout: float
    packed: bool


class Given(NamedTuple):
    """What an attention may be given beside queries, keys and values.

    lengths_q, lengths_kv   int32 [b], of packed rows [b, n]
    starts_q, starts_kv     int32 [b, n], the first token of every sequence in its row
    masked                  uint8 [b or 1, h or 1, q, k], 1 hides a key
    bias                    [b or 1, h or 1, q or 1, k or 1]
    sink                    float32 [h]
    words                   uint32 [3] of a random key
    row                     int32 [b], the place of every row in the batch
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

    def there(self) -> tuple[Array, ...]:
        return tuple(array for array in self if array is not None)

    def described(self, query: Array, key: Array) -> tuple[tuple[str | None, ...], tuple[int, int]]:
        """The factors of what is given, and the heads of keys and of queries a head of keys."""
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
                    {"sink": head, "words": "w", "row": "b"}.get(name, "b n" if array.ndim == 2 else "b")
                )
        return tuple(factors), (groups, heads // groups)


def head_factors(groups: int, members: int) -> str:
    """The factors of the queries' heads, members of them to each of the groups; Shardy refuses one of one element."""
    return "g" if members == 1 else "r" if groups == 1 else "(g r)"


@dataclass(frozen=True)
class _Attention(Kernel):
    """factors: of what is given, None for what is not; heads: of keys, and of queries to each of them"""

    facts: Facts
    factors: tuple[str | None, ...]
    heads: tuple[int, int]

    @property
    def head(self) -> str:
        return head_factors(*self.heads)

    @property
    def operands(self) -> str:
        given = [one for one in self.factors if one is not None]
        return ", ".join((f"b s {self.head} d", "b t g d", "b t g e", *given))

    @property
    def levels(self) -> str:
        return f"b s {self.head}" if self.facts.packed else f"b {self.head} s"

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip("gr", self.heads, strict=True)) if self.heads[1] > 1 else {}

    @property
    def replicated(self) -> tuple[str, ...]:
        words = set(self.rule.replace("(", " ").replace(")", " ").replace(",", " ").split())
        never = {"s", "t", "d", "e", "r", "n", "w"} | ({"g"} if self.facts.dropout else set())
        return tuple(sorted(words & never))

    def given(self, arrays: tuple[Array, ...]) -> tuple[Given, tuple[Array, ...]]:
        """What was given, and what follows it."""
        remaining = iter(arrays)
        found = Given(*(None if one is None else next(remaining) for one in self.factors))
        return found, tuple(remaining)

    def levels_of(self, query: Any) -> jax.ShapeDtypeStruct:
        """lse: [b, h, q], of packed rows [b, q, h]."""
        batch, queries, heads, _ = query.shape
        shape = (batch, queries, heads) if self.facts.packed else (batch, heads, queries)
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def sources(self, q: Array, k: Array, v: Array, given: Given) -> list[Array | None]:
        """What every kernel reads first."""
        bounds: list[Array | None] = [*given[:4]]
        if self.facts.packed:
            lengths, starts = given[:2], given[2:4]
            begins = [
                x + jnp.arange(x.shape[0])[:, None] * y.shape[1]
                for x, y in zip(starts, (q, k), strict=True)
                if x is not None
            ]
            bounds = [x.ravel().astype(jnp.int32) for x in (*lengths, *begins)]  # pyright: ignore
        return [q, k, v, *bounds, None, None, given.masked, given.bias, None]

    def random(self, q: Array, given: Given) -> Array | None:
        """int64 [2] in words: a seed, and where the numbers of this part of the batch begin."""
        if given.words is None or given.row is None:
            return None
        sequences = 1 if given.lengths_q is None or not self.facts.packed else given.lengths_q.shape[1]
        first = given.row[:1].astype(jnp.uint32) * (sequences * q.shape[2])
        return jnp.concatenate((given.words, first))

    def problem(self, q: Array, k: Array, v: Array, given: Given) -> AttentionProblem:
        from ....common.kernels.attention_problem import AttentionProblem

        facts = self.facts
        (batch, queries, heads, size), (_, keys, groups, _), size_v = q.shape, k.shape, v.shape[3]
        rows = batch if not facts.packed or given.lengths_q is None else given.lengths_q.size
        levels = (0, 1, 0) if facts.packed else (heads * queries, 1, queries)
        if facts.packed:
            levels = (0, heads, 1)
        return AttentionProblem(
            dtype=q.dtype.name, batch=rows, heads=heads, groups=groups, seqlen_q=queries, seqlen_kv=keys,
            size_qk=size, size_v=size_v, scales=(facts.scale, facts.scale if facts.pre_scaled else 1.0),
            window=facts.window, bottom_right=facts.bottom_right, dropout=facts.dropout, page_size=0,
            q=self.strides(queries, heads, size), k=self.strides(keys, groups, size),
            v=self.strides(keys, groups, size_v), out=self.strides(queries, heads, size_v), lse=levels,
            masked=strides_over_scores(given.masked), bias=strides_over_scores(given.bias), outer=(0, 0),
            varied=given.masked is not None or given.bias is not None or facts.dropout > 0.0,
            shared_memory=processors().shared_memory,
            tokens=(batch * queries, batch * keys) if facts.packed else None,
        )  # fmt: skip

    def strides(self, tokens: int, heads: int, size: int) -> Triple:
        """(batch, token, head) of an array [b, tokens, heads, size]."""
        return 0 if self.facts.packed else tokens * heads * size, heads * size, size


@dataclass(frozen=True)
class Forward(_Attention):
    """(q [b, q, h, d], k [b, k, g, d], v [b, k, g, e], what is given) -> out [b, q, h, e], lse"""

    @property
    def rule(self) -> str:
        return f"{self.operands} -> b s {self.head} e, {self.levels}"

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        query, _, value = operands[:3]
        out = jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), query.dtype)
        return out, self.levels_of(query)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import attention  # it imports triton

        q, k, v, *rest = arrays
        given, _ = self.given(tuple(rest))
        launch = attention.forward(self.problem(q, k, v, given), False, True, self.facts.packed)
        inputs = [*self.sources(q, k, v, given), given.sink, self.random(q, given), None]
        out, lse, _ = run_launch(launch, inputs, self.results(q, k, v))
        assert out is not None and lse is not None
        return out, lse


@dataclass(frozen=True)
class Backward(_Attention):
    """(what the forward took, out, dout, lse) -> dq, dk, dv, [dbias], [dsink [b, h]]"""

    @property
    def rule(self) -> str:
        bias, sink = self.factors[5:7]
        made = [f"b s {self.head} d", "b t g d", "b t g e"]
        made += [] if bias is None else [bias]
        made += [] if sink is None else [f"b {self.head}"]
        out = f"b s {self.head} e"
        return f"{self.operands}, {out}, {out}, {self.levels} -> {', '.join(made)}"

    @property
    def summed(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return () if self.factors[5] is None else (3,)

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        q, k, v, *rest = operands
        given, _ = self.given(tuple(rest))
        made = [q, k, v] if given.bias is None else [q, k, v, given.bias]
        shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in made]
        if given.sink is not None:
            shapes.append(jax.ShapeDtypeStruct((q.shape[0], q.shape[2]), jnp.float32))
        return tuple(shapes)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import attention_backward, attention_bias, attention_delta, attention_programs

        q, k, v, *rest = arrays
        given, (out, dout, lse) = self.given(tuple(rest))
        problem, packed = self.problem(q, k, v, given), self.facts.packed
        parts = problem.key_parts(attention_backward.keys_tile(problem)[1], processors().count)
        strides = [self._part_strides(x, parts) for x in (k, v)]
        bias, bias_shape = None, ()
        if given.bias is not None:
            bias, bias_shape = attention_bias.added(problem, given.bias.shape)
        program = attention_programs.gradients(
            attention_delta.delta(problem, problem.out, given.sink is not None),
            attention_backward.queries(problem, problem.q, packed),
            attention_backward.keys(problem, strides[0], strides[1], parts, packed),
            bias,
        )
        into = {
            "delta": jax.ShapeDtypeStruct(lse.shape, lse.dtype),
            "dq": jax.ShapeDtypeStruct(q.shape, q.dtype),
        }
        into |= {name: _in_parts(x, parts) for name, x in (("dk", k), ("dv", v))}
        if given.bias is not None:
            whole = bias_shape == given.bias.shape
            into["dbias"] = jax.ShapeDtypeStruct(bias_shape, given.bias.dtype if whole else jnp.float32)
        inputs = [*self.sources(q, k, v, given), self.random(q, given), out, dout, lse, given.sink]
        made: dict[str, Array] = dict(zip(program.into, perform(program, inputs, into), strict=True))  # pyright: ignore
        grads = [made["dq"], *(_summed(made[name], x, parts) for name, x in (("dk", k), ("dv", v)))]
        if given.bias is not None:
            grads.append(_to_size(made["dbias"], given.bias))
        if given.sink is not None:
            grads.append(made["dsink"].sum(axis=2).reshape(q.shape[0], -1, q.shape[2]).sum(axis=1))
        return tuple(grads)

    def _part_strides(self, x: Array, parts: int) -> tuple[int, int, int, int]:
        """(part, batch, token, head) of the gradient of keys or values."""
        _, tokens, heads, size = x.shape
        return size, *self.strides(tokens, heads, parts * size)


def _in_parts(x: Array, parts: int) -> jax.ShapeDtypeStruct:
    if parts == 1:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ShapeDtypeStruct((*x.shape[:3], parts, x.shape[3]), jnp.float32)


def _summed(made: Array, x: Array, parts: int) -> Array:
    return made if parts == 1 else made.sum(axis=3).astype(x.dtype)


def _to_size(made: Array, bias: Array) -> Array:
    """A gradient summed over the axes that the bias has one element for."""
    axes = tuple(i for i, (n, m) in enumerate(zip(made.shape, bias.shape, strict=True)) if n != m)
    return made.sum(axis=axes, keepdims=True).astype(bias.dtype) if axes else made
