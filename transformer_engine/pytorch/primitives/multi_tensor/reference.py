"""Requests for operations on tensor lists, and the reference in float32 torch operations on any device.

The reference reads no value on the host, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ....common.operation_settings import CHUNK, Adam, Sgd
from .block_states import FIRST, SECOND, decode, encode, random_words, round_stochastically


class MultiTensorRequest(NamedTuple):
    """One of "scale", "squares", "adam", "sgd" on tensor lists on one device.

    Attributes:
        operation: Operation name.
        kinds: Dtype per list.
        how: Step settings.
        flag: Whether a flag can skip the step.
    """

    operation: str
    device: torch.device
    kinds: tuple[torch.dtype, ...]
    how: Adam | Sgd | None = None
    flag: bool = False


Lists = Sequence[Sequence[Tensor]]


def bind(request: MultiTensorRequest) -> Callable[..., Any]:
    """Return (lists, extents, factor, flag) for "scale", (.., factor) -> sums, or (.., rates, flag) for a step."""
    how = request.how
    if request.operation == "scale":
        return lambda lists, extents, factor, flag: scale(lists, factor, flag)
    if request.operation == "squares":
        return lambda lists, extents, factor: squares(lists[0], factor)
    if isinstance(how, Sgd):
        return lambda lists, extents, rates, flag: sgd(lists, rates, flag, how)
    assert isinstance(how, Adam)
    return lambda lists, extents, rates, flag: adam(lists, rates, flag, how)


def scale(lists: Lists, factor: Tensor, flag: Tensor) -> None:
    """lists[1][i] = lists[0][i] * factor; the flag becomes 1 if an input is not finite."""
    for x, y in zip(*lists, strict=True):
        values = x.to(torch.float32)
        flag.masked_fill_(~torch.isfinite(values).all(), 1)
        y.copy_(values * factor.reshape(()))


def squares(tensors: Sequence[Tensor], factor: Tensor | None) -> Tensor:
    """Return float32 [n]: the sum of (x * factor)^2 of each tensor."""
    sums = []
    for x in tensors:
        values = x.to(torch.float32) if factor is None else x.to(torch.float32) * factor
        sums.append(values.square().sum())
    return torch.stack(sums)


def adam(lists: Lists, rates: Tensor, flag: Tensor | None, how: Adam) -> None:
    """m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, p -= lr (m / c1 / (sqrt(v / c2) + eps) + decay p).

    Args:
        lists: The tensor lists.
        rates: lr, b1, 1 - b1, b2, 1 - b2, eps, decay, c1, c2, gradient factor, step, number of the first chunk.
        flag: int32 [1]: nothing is changed if it is not 0.
        how: Step settings.
    """
    lr, keeps_first, takes_first, keeps_second, takes_second, epsilon, decay, *rest = rates.unbind()
    first_bias, second_bias, factor, seed, chunk = rest
    number = chunk.to(torch.int64) * CHUNK  # of a tensor's first element, for its random bits
    for grad, parameter, *states in zip(*lists, strict=True):
        moments, masters = (
            states[: 4 if how.block_scaled else 2],
            states[4 if how.block_scaled else 2 :],
        )
        halved = bool(masters) and masters[0].dtype == torch.int16
        p = (
            join_halves(parameter, masters[0])
            if halved
            else (masters[0] if masters else parameter).to(torch.float32)
        )
        g = grad.to(torch.float32) * factor
        if not how.decoupled:
            g = g + decay * p
        first, second = _read_moments(moments, how)
        m = keeps_first * first + takes_first * g
        v = keeps_second * second + takes_second * (g * g)
        update = (m / first_bias) / ((v / second_bias).sqrt() + epsilon)
        if how.decoupled:
            update = update + decay * p
        p = p - lr * update
        words = None
        if how.stochastic:
            words = random_words(number, p.numel(), seed, p.device)
            number = number + -(-p.numel() // CHUNK) * CHUNK
        if how.block_scaled:
            codes, exponents = encode(m, FIRST, words)
            second_codes, second_exponents = encode(v, SECOND, words)
            values = (codes, second_codes, exponents, second_exponents)
        else:
            values = (m, v)
        _write(list(zip(moments, values, strict=True)), flag)
        if halved:
            upper, lower = halves(p)
            _write([(parameter, upper), (masters[0], lower)], flag)
        elif words is not None and not masters and parameter.dtype == torch.bfloat16:
            _write([(parameter, round_stochastically(p, words))], flag)
        else:
            _write([(target, p) for target in (parameter, *masters)], flag)


def _read_moments(moments: Sequence[Tensor], how: Adam) -> tuple[Tensor, Tensor]:
    """Both moments in float32."""
    if not how.block_scaled:
        return moments[0].to(torch.float32), moments[1].to(torch.float32)
    codes, second_codes, exponents, second_exponents = moments
    return decode(codes, exponents, FIRST), decode(second_codes, second_exponents, SECOND)


def sgd(lists: Lists, rates: Tensor, flag: Tensor, how: Sgd) -> None:
    """g = scale g (+ decay p), m = momentum m + (1 - dampening) g, p -= lr (nesterov: g + momentum m, otherwise m).

    Args:
        lists: The tensor lists.
        rates: decay, momentum, 1 - dampening, lr, scale.
        flag: int32 [1]: nothing is changed if it is not 0.
        how: Step settings.
    """
    decay, momentum, takes, lr, factor = rates.unbind()
    for grad, parameter, moment, *copy in zip(*lists, strict=True):
        p = parameter.to(torch.float32)
        g = grad.to(torch.float32) * factor
        if not how.late:
            g = g + decay * p
        if how.momentum:
            m = g if how.first else momentum * moment.to(torch.float32) + takes * g
            _write([(moment, m)], flag)
            g = g + momentum * m if how.nesterov else m
        if how.late:
            g = g + decay * p
        p = p - lr * g
        _write([(target, p) for target in (parameter, *copy)], flag)


def join_halves(upper: Tensor, lower: Tensor) -> Tensor:
    """Return float32 numbers from their upper halves (bfloat16, rounded half up) and lower 16 bits (int16)."""
    low = lower.to(torch.int32)
    high = upper.contiguous().view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
    return ((high << 16) | (low & 0xFFFF)).view(torch.float32)


def halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 values into (bfloat16, rounded half up on the bits, and the lower 16 bits as int16)."""
    bits = values.contiguous().view(torch.int32)
    low = (bits << 16) >> 16
    high = (bits >> 16) + (low < 0).to(torch.int32)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def _write(pairs: Sequence[tuple[Tensor, Tensor]], flag: Tensor | None) -> None:
    """Write target = value, unless the flag is set."""
    for target, value in pairs:
        target.copy_(
            value
            if flag is None
            else torch.where(flag.reshape(()) == 0, value.to(target.dtype), target)
        )


BACKEND: Backend[MultiTensorRequest] = Backend("reference", bind=bind)
