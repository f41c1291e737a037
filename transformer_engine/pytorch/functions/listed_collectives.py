"""Collectives of a pass that is being listed: a compiled pass calls their steps on its tensors.

A collective's step is a function of Python. Listing appends an instruction that calls it, and predicts the forms of its
results. Between the halves of a collective the compiled pass holds the pending object of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ...common.passes.vocabulary import Collective, OverlappedProduct
from ..distributed.faults import check_collective
from ..distributed.tensor_parallel import TensorParallel
from ..primitives.operand import Operand
from ..runtime.symbols import Form, Instructions, NotListed, Object, Symbol
from ..tensor.quantizer import Matrix
from .linear_spec import Environment

Step = Callable[..., "tuple[Any, ...]"]


class Buffers(NamedTuple):
    """The symbols of a buffer of a pass, and the function from as many tensors to such a buffer."""

    symbols: list[Any]
    join: Callable[[Sequence[Any]], Any]

    @staticmethod
    def of(value: Any) -> Buffers:
        if type(value) is Symbol:
            return Buffers([value], lambda parts: parts[0])
        if isinstance(value, Matrix):
            return Buffers([value.values], lambda parts: Matrix(parts[0]))
        if type(value) is Operand:  # a subclass of a custom format has other fields
            _, _, form, _, dtype = value
            symbols = [value.codes, value.scale, value.amax]
            return Buffers(symbols, lambda parts: Operand(parts[0], parts[1], form, parts[2], dtype))
        raise NotListed(f"a collective sends {type(value).__name__}")


class ListedPending(NamedTuple):
    """A collective between its halves.

    Attributes:
        started: The pending object of the compiled pass.
        forms: Forms of the tensors that the collective makes.
        join: Returns the buffer of the result, of these tensors.
    """

    started: Object
    forms: tuple[Form, ...]
    join: Callable[[Sequence[Any]], Any]


def is_listed(value: Any) -> bool:
    """Return whether a buffer of a pass consists of symbols."""
    return type(value) in (Symbol, ListedPending) or (
        isinstance(value, (Operand, Matrix)) and type(value[0]) is Symbol
    )


def list_check(parallel: TensorParallel, collective: str, x: Symbol) -> None:
    """Append the comparison of a collective over its ranks; see `check_collective`."""

    def check(tensor: Tensor) -> tuple[()]:
        check_collective(parallel, collective, tensor)
        return ()

    x.instructions.apply(check, [x], [])


def list_begin(begin: Step, collective: str, env: Environment, s: Collective, x: Any) -> ListedPending:
    """Append the first half of a collective.

    Args:
        begin: The step (environment, settings, x) -> (pending,).
        collective: "all_gather", "all_reduce" or "reduce_scatter".
        env: Environment of the pass.
        s: Settings of the step.
        x: The buffer that is sent.
    """
    given = Buffers.of(x)
    join_given = given.join  # the function must not hold symbols, which hold the tensors of this call
    (started,) = _instructions(given).apply(
        lambda *tensors: begin(env, s, join_given(tensors)), given.symbols, [None]
    )
    ranks = env.linears[s.group].parallel.size
    sent, join = [given.symbols[0]], given.join
    if isinstance(x, Operand):
        blocks = x.has_block_scales
        sent += [x.scale] if blocks else []
        join = lambda parts: x._replace(codes=parts[0], scale=parts[1] if blocks else x.scale)  # noqa: E731
    forms = tuple([_received(collective, symbol.form, ranks, s.axis) for symbol in sent])
    return ListedPending(started, forms, join)


def _received(collective: str, form: Form, ranks: int, axis: int) -> Form:
    """Return the form of a collective's result."""
    shape = list(form.shape)
    if collective == "all_gather":
        shape[axis] *= ranks
    elif collective == "reduce_scatter":
        if shape[0] % ranks:
            raise NotListed(f"{ranks} ranks do not divide {shape[0]} rows")
        shape[0] //= ranks
    return Form.contiguous(shape, form.dtype)


def list_wait(wait: Step, env: Environment, s: Collective, pending: ListedPending) -> Any:
    """Append the second half of a collective; return the buffer of its result."""
    instructions = pending.started.instructions
    made = instructions.apply(lambda given: _parts(wait(env, s, given)[0]), [pending.started], pending.forms)
    return pending.join(made)


def _parts(whole: Any) -> tuple[Any, ...]:
    """Return the tensors that a collective has made."""
    if isinstance(whole, Operand):
        return (whole.codes, whole.scale) if whole.has_block_scales else (whole.codes,)
    return (whole,)


def list_gathered_product(
    step: Step,
    env: Environment,
    s: OverlappedProduct,
    pending: ListedPending,
    b: Any,
    bias: Any,
    columns: int,
) -> tuple[Any, Any]:
    """Append a product of gathered rows; return its result and the gathered matrix.

    Args:
        step: The step (environment, settings, pending, b, bias) -> (y, gathered).
        env: Environment of the pass.
        s: Settings of the step.
        pending: The gather of the rows.
        b: The other operand.
        bias: Bias of the product, or None.
        columns: Number of columns of the product.
    """
    other = Buffers.of(b)
    join_other = other.join
    rows = math.prod(pending.forms[0].shape[:-1])
    form = Form.contiguous((rows, columns), env.linears[s.product.layer].dtype)

    def call(given: Any, added: Any, *tensors: Any) -> tuple[Any, ...]:
        y, whole = step(env, s, given, join_other(tensors), added)
        return (y, *_parts(whole))

    y, *whole = pending.started.instructions.apply(
        call, [pending.started, bias, *other.symbols], [form, *pending.forms]
    )
    return y, pending.join(whole)


def list_scattered_product(
    step: Step, env: Environment, s: OverlappedProduct, a: Any, b: Any, shape: tuple[int, int]
) -> ListedPending:
    """Append a product whose rows are summed over the ranks.

    Args:
        step: The step (environment, settings, a, b) -> (pending,).
        env: Environment of the pass.
        s: Settings of the step.
        a: The operand whose rows are those of the product.
        b: The other operand.
        shape: Shape of the product.
    """
    left, right = Buffers.of(a), Buffers.of(b)
    count, join_left, join_right = len(left.symbols), left.join, right.join
    (started,) = _instructions(left).apply(
        lambda *tensors: step(env, s, join_left(tensors[:count]), join_right(tensors[count:])),
        [*left.symbols, *right.symbols],
        [None],
    )
    form = Form.contiguous(shape, env.linears[s.product.layer].dtype)
    ranks = env.linears[s.collective.group].parallel.size
    return ListedPending(started, (_received("reduce_scatter", form, ranks, 0),), lambda parts: parts[0])


def _instructions(given: Buffers) -> Instructions:
    return given.symbols[0].instructions
