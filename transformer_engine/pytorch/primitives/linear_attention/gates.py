"""Gates of delta rules: decay, erase and write gates of the recurrence from the inputs of a call.

All functions compute in float32, or in float64 for float64 inputs, and are differentiable.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .request import DeltaInputs, DeltaSpec, Option, Rule, compute_dtype

NORM_EPSILON = 1e-6
DECAY_FLOOR = 1e-10
# The guard shrinks gates to this share of the allowed contrast, so that rounding rarely exceeds the limit.
_GUARD_SHARE = 1.0 - 1.0 / 32.0
_GUARD_TOLERANCE = 4.0  # in units of the dtype's epsilon, for rounded gates


class Gated(NamedTuple):
    """Recurrence inputs; see `reference`.

    Attributes:
        q: Scaled queries [B, T, H, dk].
        k: Keys [B, T, n, H, dk].
        v: Values [B, T, n, H, dv].
        decay: Log decay [B, T, H, 1], GDN2 [B, T, H, dk].
        erase: Erase gates [B, T, n, H, 1], GDN2 [B, T, n, H, dk].
        write: Write gates [B, T, n, H, 1], GDN2 [B, T, n, H, dv].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    erase: Tensor
    write: Tensor


def gated(inputs: DeltaInputs, spec: DeltaSpec) -> Gated:
    """Compute the inputs of the recurrence."""
    dtype = compute_dtype(inputs)
    q, k, v = inputs.q.to(dtype), inputs.k.to(dtype), inputs.v.to(dtype)
    if Option.L2_NORM in spec.options:
        q, k = normalized(q), normalized(k)
    decay, erase = log_decay(inputs, spec), erase_gate(inputs, spec)
    if spec.rule == Rule.GDN2:
        assert inputs.w is not None
        write = inputs.w.to(dtype)
    else:
        decay, erase = decay.unsqueeze(-1), erase.unsqueeze(-1)
        write = erase
    if spec.rule != Rule.GDP:
        k, v, erase, write = k.unsqueeze(2), v.unsqueeze(2), erase.unsqueeze(2), write.unsqueeze(2)
    return Gated(q * spec.factor, k, v, decay, erase, write)


def normalized(x: Tensor) -> Tensor:
    """x / sqrt(sum of x^2 + 1e-6) per row."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)


def log_decay(inputs: DeltaInputs, spec: DeltaSpec) -> Tensor:
    """Log decay: g, log(max(g, 0) + 1e-10) for a linear gate, -exp(a_log) softplus(g + dt_bias) for a safe one."""
    dtype = compute_dtype(inputs)
    g = inputs.g.to(dtype)
    if Option.LINEAR_GATE in spec.options:
        return torch.log(g.clamp(min=0.0) + DECAY_FLOOR)
    if Option.SAFE_GATE not in spec.options:
        return g
    if inputs.dt_bias is not None:
        g = g + inputs.dt_bias.to(dtype)
    decay = -F.softplus(g)
    return decay if inputs.a_log is None else decay * torch.exp(inputs.a_log.to(dtype))


def erase_gate(inputs: DeltaInputs, spec: DeltaSpec) -> Tensor:
    """beta or its sigmoid (times 2 for negative eigenvalues), limited by `shrink_gates` if the call has a guard."""
    beta = inputs.beta.to(compute_dtype(inputs))
    if Option.SIGMOID in spec.options:
        beta = torch.sigmoid(beta)
        if Option.NEGATIVE in spec.options:
            beta = 2.0 * beta
    if Option.GUARD in spec.options:
        with torch.no_grad():
            limited = shrink_gates(beta, inputs, spec)
        # The gradient passes the guard unchanged.
        beta = beta + (limited - beta).detach()
    return beta


def shrink_gates(beta: Tensor, inputs: DeltaInputs, spec: DeltaSpec) -> Tensor:
    """Shrink the erase gates [.., dk] of each token and head that would enlarge the state, rounded to q's dtype.

    With the normalized key k, n = sum k^2, a = sum beta k^2, nu = sum beta^2 k^2 and c^2 = exp(-2 max g), an update
    after the decay enlarges no state if the contrast n nu - a^2 <= (c^2 - 1) (1 - (1 - a)^2 / c^2). Other gates
    move towards their mean a / n, which preserves a, and become that mean if their rounded values violate the limit.
    """
    dtype, rounded = beta.dtype, inputs.q.dtype
    weight = normalized(inputs.k.to(dtype)).square()
    inverse = torch.exp(2.0 * log_decay(inputs, spec).amax(-1, keepdim=True))  # 1 / c^2

    def moments(gates: Tensor) -> tuple[Tensor, Tensor]:
        return (gates * weight).sum(-1, keepdim=True), (gates.square() * weight).sum(
            -1, keepdim=True
        )

    def contrast_and_limit(a: Tensor, nu: Tensor) -> tuple[Tensor, Tensor]:
        limit = (1.0 / inverse - 1.0) * (1.0 - (1.0 - a).square() * inverse)
        return (n * nu - a.square()).clamp(min=0.0), limit.clamp(min=0.0)

    n = weight.sum(-1, keepdim=True)
    a, nu = moments(beta)
    contrast, limit = contrast_and_limit(a, nu)
    violates = (contrast > limit) & (n > 1e-20)
    mean = a / n.clamp(min=1e-20)
    share = torch.sqrt(_GUARD_SHARE * limit / contrast.clamp(min=1e-30)).clamp(max=1.0)
    shrunk = torch.where(violates, mean + share * (beta - mean), beta).to(rounded).to(dtype)
    a, nu = moments(shrunk)
    contrast, limit = contrast_and_limit(a, nu)
    tolerance = _GUARD_TOLERANCE * torch.finfo(rounded).eps * (n * nu + a.square())
    mean = (a / n.clamp(min=1e-20)).to(rounded).to(dtype)
    return torch.where(violates & (contrast > limit + tolerance), mean, shrunk)
