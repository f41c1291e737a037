"""Inputs, settings and requests of linear attention by delta rules."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....common.hardware import Hardware
from ...runtime.device import current_hardware

# Rules of the recurrence.
GDN, GDN2, GDP = "gated_delta_net", "gated_delta_net_2", "gated_delta_product"
TITLES = {GDN: "Gated DeltaNet", GDN2: "Gated DeltaNet 2", GDP: "Gated DeltaProduct"}

# Options of a call.
FINAL_STATE = "final_state"  # return the state after the last token
L2_NORM = "qk_l2norm"  # normalize the rows of q and k
SIGMOID = "beta_sigmoid"  # beta contains logits
NEGATIVE = "negative_eigenvalues"  # beta = 2 sigmoid(logits)
GUARD = "beta_guard"  # shrink erase gates that would enlarge the state
SAFE_GATE = "safe_gate"  # g contains logits
LINEAR_GATE = "linear_gate"  # g contains the decay itself instead of its logarithm
OPTIONS = (FINAL_STATE, L2_NORM, SIGMOID, NEGATIVE, GUARD, SAFE_GATE, LINEAR_GATE)

# Features besides rules.
PACKED, INITIAL_STATE = "packed sequences", "an initial state"
ALL_FEATURES = frozenset({*TITLES.values(), PACKED, INITIAL_STATE})


class LinearAttentionSpec(NamedTuple):
    """Settings of a call; texts, because a compiled graph stores them as constants.

    Attributes:
        rule: `GDN`, `GDN2` or `GDP`.
        scale: Factor of the queries, as written by `float.hex`.
        options: The active `OPTIONS`, in their order.
    """

    rule: str
    scale: str
    options: tuple[str, ...] = ()

    @property
    def factor(self) -> float:
        """Factor of the queries."""
        return float.fromhex(self.scale)


class LinearAttentionInputs(NamedTuple):
    """Tensors of a call, [B, T, ..], where packed sequences are one row, B = 1.

    Attributes:
        q: Queries [B, T, H, dk].
        k: Keys [B, T, H, dk]; GDP [B, T, n, H, dk].
        v: Values [B, T, H, dv]; GDP [B, T, n, H, dv].
        g: Decay gates [B, T, H]; GDN2 [B, T, H, dk].
        beta: Gates of the update [B, T, H]; GDN2 erase gates [B, T, H, dk]; GDP [B, T, n, H].
        w: Write gates [B, T, H, dv] of GDN2.
        a_log: Logarithm of the amplitude of a safe gate [H].
        dt_bias: Bias of a safe gate [H].
        initial_state: State before the first token [N, H, dv, dk] of N sequences.
        cu_seqlens: Bounds of packed sequences, int32 [N + 1].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    w: Tensor | None = None
    a_log: Tensor | None = None
    dt_bias: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None


class LinearAttentionRequest(NamedTuple):
    """The properties of a call.

    Attributes:
        spec: Settings.
        q: Shape of the queries [B, T, H, dk].
        v_size: Size of a value, dv.
        updates: Updates of the state per token, n.
        sequences: Number of packed sequences; None for rows of equal length.
        dtype: Dtype of q, k and v.
        device_type: Device of all tensors.
        has_state: Whether there is an initial state.
        needs_gradient: Whether autograd records the call.
    """

    spec: LinearAttentionSpec
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
        """Row of the current GPU in the table of hardware."""
        return current_hardware()


# (output [B, T, H, dv] in the dtype of q, state after the last token [N, H, dv, dk] with `FINAL_STATE`)
LinearAttentionResult = tuple[Tensor, Tensor | None]


def key_of(inputs: LinearAttentionInputs, spec: LinearAttentionSpec) -> tuple[object, ...]:
    """Return the fields of the request of a call."""
    q, cu_seqlens = inputs.q, inputs.cu_seqlens
    return (
        spec,
        tuple(q.shape),
        inputs.v.shape[-1],
        inputs.k.shape[2] if spec.rule == GDP else 1,
        None if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        q.dtype,
        q.device.type,
        inputs.initial_state is not None,
        torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs),
    )


def compute_dtype(inputs: LinearAttentionInputs) -> torch.dtype:
    """Dtype of the state: float32, or float64 for float64 queries."""
    return torch.promote_types(inputs.q.dtype, torch.float32)


def unsupported_by_kernels(request: LinearAttentionRequest) -> str | None:
    """Return the reason why 16-bit kernels on CUDA do not support the tensors of a call; None if they do."""
    if request.device_type != "cuda":
        return f"it needs a CUDA device, the tensors are on {request.device_type}"
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"the tensors are {request.dtype}; it takes float16 and bfloat16"
    if 0 in request.q or request.v_size == 0 or request.sequences == 0:
        return "there are no tokens, heads or sequences"
    return None
