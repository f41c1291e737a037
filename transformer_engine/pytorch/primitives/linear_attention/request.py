"""Inputs, settings and requests for linear attention by delta rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ....common.hardware import Hardware
from ...runtime.device import current_hardware


class Rule:
    """Recurrence names."""

    GDN = "gated_delta_net"
    GDN2 = "gated_delta_net_2"
    GDP = "gated_delta_product"


class Option:
    """Call options.

    Attributes:
        FINAL_STATE: Return the state after the last token.
        L2_NORM: Normalize the rows of q and k.
        SIGMOID: beta contains logits.
        NEGATIVE: beta = 2 sigmoid(logits), for negative eigenvalues.
        GUARD: Shrink erase gates that would enlarge the state.
        SAFE_GATE: g contains logits.
        LINEAR_GATE: g contains the decay itself instead of its logarithm.
    """

    FINAL_STATE = "final_state"
    L2_NORM = "qk_l2norm"
    SIGMOID = "beta_sigmoid"
    NEGATIVE = "negative_eigenvalues"
    GUARD = "beta_guard"
    SAFE_GATE = "safe_gate"
    LINEAR_GATE = "linear_gate"


TITLES = {
    Rule.GDN: "Gated DeltaNet",
    Rule.GDN2: "Gated DeltaNet 2",
    Rule.GDP: "Gated DeltaProduct",
}
# Features besides rules.
PACKED, INITIAL_STATE = "packed sequences", "an initial state"
ALL_FEATURES = frozenset({*TITLES.values(), PACKED, INITIAL_STATE})


class DeltaSpec(NamedTuple):
    """Call settings, all strings, because a compiled graph stores them as constants.

    Attributes:
        rule: A `Rule` name.
        scale: Query factor, as written by `float.hex`.
        options: The active `Option` names.
    """

    rule: str
    scale: str
    options: tuple[str, ...] = ()

    @property
    def factor(self) -> float:
        """Query factor."""
        return float.fromhex(self.scale)


class DeltaInputs(NamedTuple):
    """Tensors of a call, [B, T, ..], where packed sequences are one row, B = 1.

    Attributes:
        q: Queries [B, T, H, dk].
        k: Keys [B, T, H, dk]; GDP [B, T, n, H, dk].
        v: Values [B, T, H, dv]; GDP [B, T, n, H, dv].
        g: Decay gates [B, T, H]; GDN2 [B, T, H, dk].
        beta: Update gates [B, T, H]; GDN2 erase gates [B, T, H, dk]; GDP [B, T, n, H].
        w: GDN2 write gates [B, T, H, dv].
        a_log: Log amplitude of a safe gate [H].
        dt_bias: Safe gate bias [H].
        initial_state: State before the first token [N, H, dv, dk] for N sequences.
        cu_seqlens: Packed sequence bounds, int32 [N + 1].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    w: Tensor | None
    a_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None


class DeltaRequest(NamedTuple):
    """The properties of a call.

    Attributes:
        spec: Settings.
        q: Query shape [B, T, H, dk].
        v_size: Value size, dv.
        updates: State updates per token, n.
        sequences: Packed sequence count; None for equally long rows.
        dtype: Dtype of q, k and v.
        device_type: Device of all tensors.
        has_state: Whether there is an initial state.
        needs_gradient: Whether autograd records the call.
    """

    spec: DeltaSpec
    q: tuple[int, ...]
    v_size: int
    updates: int
    sequences: int | None
    dtype: torch.dtype
    device_type: str
    has_state: bool
    needs_gradient: bool

    @property
    def features(self) -> tuple[str, ...]:
        """Features that a backend must support."""
        features = [TITLES[self.spec.rule]]
        if self.sequences is not None:
            features.append(PACKED)
        if self.has_state:
            features.append(INITIAL_STATE)
        return tuple(features)

    @property
    def hardware(self) -> Hardware:
        """Row of the current GPU in the hardware table."""
        return current_hardware()


# Output [B, T, H, dv] in the dtype of q; state after the last token [N, H, dv, dk], None without Option.FINAL_STATE.
DeltaResult = tuple[Tensor, Tensor | None]


def compute_dtype(inputs: DeltaInputs) -> torch.dtype:
    """State dtype: float32, or float64 for float64 queries."""
    return torch.promote_types(inputs.q.dtype, torch.float32)


Compute = Callable[[DeltaInputs, DeltaSpec], DeltaResult]


def binder(compute: Compute) -> Callable[[DeltaRequest], Callable[..., DeltaResult]]:
    """Return `bind` for a backend: request -> function that takes `DeltaInputs` tensors."""

    def bind(request: DeltaRequest) -> Callable[..., DeltaResult]:
        spec = request.spec
        return lambda *tensors: compute(DeltaInputs(*tensors), spec)

    return bind
