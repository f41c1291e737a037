"""One launch over the elements of many tensors, through an address table with one row per tensor chunk.

Table row i is [chunk elements, address of its first element in list 0, in list 1, ..], so that a program reads only its
own row. If every address and size is a multiple of 16 (aligned), a thread moves 16 bytes at once. Numbers that change
between steps (rates) are in a float32 tensor instead of the launch, so that a launch is compiled once and a captured
graph reads the current values.

* scale: y = x * factor, and a flag if an x is not finite.
* squares: partials [chunks] = sum((x * factor)^2).
* adam: p, m, v after one Adam step; see `_adam`. Moments may be block-scaled codes; see `block_states`.
* sgd: p and its momentum after one gradient-descent step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..operation_settings import CHUNK, STATE_BLOCK, Adam, Sgd
from . import block_states
from .launch import NUMBER, READ, WRITTEN, AddressTable, Launch, Output

# Elements at once: with 256 threads, two 16-byte accesses per thread and float32 list.
_BLOCK = 2048
_WARPS = 8
_BITS = tl.constexpr(0xFFFF)


@triton.jit
def _tensor(
    table, column: tl.constexpr, columns: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr
):
    """Address of this program's chunk in a list."""
    address = tl.load(table + tl.program_id(0).to(tl.int64) * columns + column)
    if KIND == "float32":
        pointer = address.to(tl.pointer_type(tl.float32))
    elif KIND == "float16":
        pointer = address.to(tl.pointer_type(tl.float16))
    elif KIND == "bfloat16":
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    elif KIND == "uint8":
        pointer = address.to(tl.pointer_type(tl.uint8))
    else:
        tl.static_assert(KIND == "int16")
        pointer = address.to(tl.pointer_type(tl.int16))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _count(table, flag, columns: tl.constexpr, ALIGNED: tl.constexpr):
    """Element count of this program's chunk; 0 if a flag is not 0."""
    count = tl.load(table + tl.program_id(0).to(tl.int64) * columns).to(tl.int32)
    if flag is not None:
        count = tl.where(tl.load(flag) == 0, count, 0)
    if ALIGNED:
        count = tl.multiple_of(count, 16)
    return count


@triton.jit
def _chunk_addresses(
    table,
    flag,
    G: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Size of this program's chunk, and its gradient, parameter and first-state addresses."""
    count = _count(table, flag, COLUMNS, ALIGNED)
    g = _tensor(table, 1, COLUMNS, G, ALIGNED)
    p = _tensor(table, 2, COLUMNS, P, ALIGNED)
    m = _tensor(table, 3, COLUMNS, M, ALIGNED)
    return count, g, p, m


@triton.jit
def _scale(
    table,
    factor,
    flag,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    count = _count(table, None, 3, ALIGNED)
    x = _tensor(table, 1, 3, FROM, ALIGNED)
    y = _tensor(table, 2, 3, TO, ALIGNED)
    by = tl.load(factor)
    bad = 0
    for first in range(0, SIZE, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        inside = offsets < count
        value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
        finite = tl.abs(value) < float("inf")
        bad = tl.maximum(bad, tl.max(1 - finite.to(tl.int32), 0))
        tl.store(y + offsets, (value * by).to(y.dtype.element_ty), mask=inside)
    tl.store(flag, 1, mask=bad != 0)


@triton.jit
def _squares(
    table,
    factor,
    partials,
    FROM: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    count = _count(table, None, 2, ALIGNED)
    x = _tensor(table, 1, 2, FROM, ALIGNED)
    by = 1.0
    if factor is not None:
        by = tl.load(factor)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, SIZE, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        value = tl.load(x + offsets, mask=offsets < count, other=0.0).to(tl.float32) * by
        total += value * value
    tl.store(partials + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _join_halves(upper, lower):
    """Join a rounded upper half, decremented if it was rounded up, and a lower half to float32 numbers."""
    high = upper.to(tl.int32)
    low = lower.to(tl.int32)
    high = tl.where(low < 0, high - 1, high)
    return ((high << 16) | (low & _BITS)).to(tl.float32, bitcast=True)


@triton.jit
def _adam(
    table,
    rates,
    flag,
    G: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    MASTER: tl.constexpr,
    COLUMNS: tl.constexpr,
    DECOUPLED: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, p -= lr (m / c1 / (sqrt(v / c2) + eps) + decay p).

    Args:
        rates: lr, b1, 1 - b1, b2, 1 - b2, eps, decay, c1, c2, gradient multiplier, step, number of the first chunk.
        STATE_BLOCK: Moments are codes, and this many values have one exponent; None: they are numbers.
        STOCHASTIC: Round codes and bfloat16 parameters without masters stochastically.
    """
    count, g_ptr, p_ptr, m_ptr = _chunk_addresses(table, flag, G, P, M, COLUMNS, ALIGNED)
    v_ptr = _tensor(table, 4, COLUMNS, V, ALIGNED)
    master_ptr = p_ptr
    if MASTER is not None:
        master_ptr = _tensor(table, COLUMNS - 1, COLUMNS, MASTER, ALIGNED)
    if STATE_BLOCK is not None:
        m_exponent_ptr = _tensor(table, 5, COLUMNS, "uint8", ALIGNED)
        v_exponent_ptr = _tensor(table, 6, COLUMNS, "uint8", ALIGNED)
    lr = tl.load(rates)
    keeps_first = tl.load(rates + 1)
    takes_first = tl.load(rates + 2)
    keeps_second = tl.load(rates + 3)
    takes_second = tl.load(rates + 4)
    epsilon = tl.load(rates + 5)
    decay = tl.load(rates + 6)
    first_bias = tl.load(rates + 7)
    second_bias = tl.load(rates + 8)
    by = tl.load(rates + 9)
    seed = tl.load(rates + 10).to(tl.int32)
    number = (tl.program_id(0) + tl.load(rates + 11).to(tl.int32)) * SIZE
    for first in range(0, SIZE, BLOCK):
        if STATE_BLOCK is None:
            offsets = first + tl.arange(0, BLOCK)
        else:
            rows = tl.arange(0, BLOCK // STATE_BLOCK)
            offsets = first + rows[:, None] * STATE_BLOCK + tl.arange(0, STATE_BLOCK)[None, :]
            blocks = first // STATE_BLOCK + rows
            has_elements = blocks * STATE_BLOCK < count
        inside = offsets < count
        words = offsets
        if STOCHASTIC:
            words = block_states.random_words(number + offsets, seed)
        g = tl.load(g_ptr + offsets, mask=inside, other=0.0).to(tl.float32) * by
        m = tl.load(m_ptr + offsets, mask=inside, other=0)
        v = tl.load(v_ptr + offsets, mask=inside, other=0)
        if STATE_BLOCK is None:
            m = m.to(tl.float32)
            v = v.to(tl.float32)
        else:
            exponents = tl.load(m_exponent_ptr + blocks, mask=has_elements, other=16)
            m = block_states.decode(m, exponents, True)
            exponents = tl.load(v_exponent_ptr + blocks, mask=has_elements, other=16)
            v = block_states.decode(v, exponents, False)
        if MASTER == "int16":
            upper = tl.load(p_ptr + offsets, mask=inside, other=0)
            p = _join_halves(upper, tl.load(master_ptr + offsets, mask=inside, other=0))
        else:
            p = tl.load(master_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        if not DECOUPLED:
            g += decay * p
        m = keeps_first * m + takes_first * g
        v = keeps_second * v + takes_second * (g * g)
        update = (m / first_bias) / (tl.sqrt_rn(v / second_bias) + epsilon)
        if DECOUPLED:
            update += decay * p
        p -= lr * update
        if STATE_BLOCK is not None:
            m, exponents = block_states.encode(m, words, True, STOCHASTIC)
            tl.store(m_exponent_ptr + blocks, exponents, mask=has_elements)
            v, exponents = block_states.encode(v, words, False, STOCHASTIC)
            tl.store(v_exponent_ptr + blocks, exponents, mask=has_elements)
        tl.store(m_ptr + offsets, m.to(m_ptr.dtype.element_ty), mask=inside)
        tl.store(v_ptr + offsets, v.to(v_ptr.dtype.element_ty), mask=inside)
        if MASTER == "int16":
            bits = p.to(tl.int32, bitcast=True)
            lower = bits.to(tl.int16)
            high = bits >> 16
            high = tl.where(lower < 0, high + 1, high)
            tl.store(p_ptr + offsets, high.to(tl.int16), mask=inside)
            tl.store(master_ptr + offsets, lower, mask=inside)
        elif STOCHASTIC and MASTER is None and P == "bfloat16":
            tl.store(p_ptr + offsets, block_states.round_stochastically(p, words), mask=inside)
        else:
            tl.store(p_ptr + offsets, p.to(p_ptr.dtype.element_ty), mask=inside)
            if MASTER is not None:
                tl.store(master_ptr + offsets, p.to(master_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sgd(
    table,
    rates,
    flag,
    G: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    COPY: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    FIRST: tl.constexpr,
    LATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """g = scale g (+ decay p), m = momentum m + (1 - dampening) g, p -= lr (nesterov: g + momentum m, otherwise m).

    Args:
        rates: decay, momentum, 1 - dampening, lr, scale.
    """
    count, g_ptr, p_ptr, m_ptr = _chunk_addresses(table, flag, G, P, M, COLUMNS, ALIGNED)
    copy_ptr = p_ptr
    if COPY is not None:
        copy_ptr = _tensor(table, 4, COLUMNS, COPY, ALIGNED)
    decay = tl.load(rates)
    momentum = tl.load(rates + 1)
    takes = tl.load(rates + 2)
    lr = tl.load(rates + 3)
    by = tl.load(rates + 4)
    for first in range(0, SIZE, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        inside = offsets < count
        g = tl.load(g_ptr + offsets, mask=inside, other=0.0).to(tl.float32) * by
        p = tl.load(p_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        if not LATE:
            g += decay * p
        if MOMENTUM:
            if FIRST:
                m = g
            else:
                m = (
                    momentum * tl.load(m_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
                    + takes * g
                )
            tl.store(m_ptr + offsets, m.to(m_ptr.dtype.element_ty), mask=inside)
            if NESTEROV:
                g += momentum * m
            else:
                g = m
        if LATE:
            g += decay * p
        p -= lr * g
        tl.store(p_ptr + offsets, p.to(p_ptr.dtype.element_ty), mask=inside)
        if COPY is not None:
            tl.store(copy_ptr + offsets, p.to(copy_ptr.dtype.element_ty), mask=inside)


def scale(chunks: int, kinds: tuple[str, ...], aligned: bool) -> Launch:
    """Launch (table [chunks, 3], factor float32 [1], flag int32 [1]) that writes outputs and flag."""
    tables = (AddressTable(0, (NUMBER, READ, WRITTEN)),)
    constants = (*kinds, aligned, CHUNK, _BLOCK)
    return Launch(_scale, (chunks, 1, 1), (), (), constants, _WARPS, in_place=(2,), tables=tables)


def squares(chunks: int, kind: str, aligned: bool) -> Launch:
    """Launch (table [chunks, 2], factor float32 [1] | None) -> partials float32 [chunks]."""
    tables = (AddressTable(0, (NUMBER, READ)),)
    outputs = (Output((chunks,), "float32"),)
    return Launch(
        _squares, (chunks, 1, 1), outputs, (), (kind, aligned, CHUNK, _BLOCK), _WARPS, tables=tables
    )


def adam(chunks: int, kinds: tuple[str, ...], how: Adam, aligned: bool) -> Launch:
    """Launch (table, rates float32 [12], flag int32 [1] | None) that writes parameters and states.

    Args:
        chunks: Number of table rows.
        kinds: Dtypes of gradients, parameters, first and second moments, both moments' exponents if they are
            block-scaled, and masters, if present. "int16" masters are the lower halves of float32 numbers whose upper
            halves are the parameters.
        how: Step settings.
        aligned: Every address and size is a multiple of 16.
    """
    lists = len(kinds)
    grads, parameters, first, second, *masters = kinds[:4] + kinds[6 if how.block_scaled else 4 :]
    master = masters[0] if masters else None
    if master == "int16":
        parameters = "int16"  # bits of a bfloat16
    constants = (
        *(grads, parameters, first, second, master, lists + 1),
        how.decoupled,
        STATE_BLOCK if how.block_scaled else None,
        how.stochastic,
        aligned,
        CHUNK,
        _BLOCK,
    )
    tables = (AddressTable(0, (NUMBER, READ, *(WRITTEN,) * (lists - 1))),)
    # Codes have the reference's bits only if products are rounded before they are added.
    fuses = not how.block_scaled
    return Launch(_adam, (chunks, 1, 1), (), (), constants, _WARPS, fuses=fuses, tables=tables)


def sgd(chunks: int, kinds: tuple[str, ...], how: Sgd, aligned: bool) -> Launch:
    """Launch (table, rates float32 [5], flag int32 [1]) that writes parameters, momenta and copies.

    Args:
        chunks: Number of table rows.
        kinds: Dtypes of gradients, parameters, momenta, and parameter copies, if present.
        how: Step settings.
        aligned: Every address and size is a multiple of 16.
    """
    lists = len(kinds)
    if lists == 3:
        kinds = (*kinds, None)
    constants = (
        *kinds,
        lists + 1,
        how.momentum,
        how.nesterov,
        how.first,
        how.late,
        aligned,
        CHUNK,
        _BLOCK,
    )
    columns = (NUMBER, READ, WRITTEN, WRITTEN if how.momentum else READ, *(WRITTEN,) * (lists - 3))
    return Launch(
        _sgd, (chunks, 1, 1), (), (), constants, _WARPS, tables=(AddressTable(0, columns),)
    )
