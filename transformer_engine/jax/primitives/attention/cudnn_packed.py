"""cuDNN's fused attention for packed rows and for parts: the only file that reads the private JAX module behind it."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ....common import optional
from ..kernels import Kernel, call
from ..launching import kernels_unsupported_reason, run
from ..partitioning import ShardingRule
from .alignment import align, isolate
from .triton_kernels import head_factors

_MODULE = "jax._src.cudnn.fused_attention_stablehlo"
_WANTED = ("q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "scale", "mask_type", "qkv_layout")


def _module() -> ModuleType:
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


@functools.cache
def failure() -> str | None:
    """Reason why this JAX version does not provide the call, or None."""
    if (reason := optional.failure(_MODULE)) is not None:
        return reason
    call = getattr(_module(), "dot_product_attention", None)
    parameters = () if call is None else inspect.signature(call).parameters
    absent = [name for name in _WANTED if name not in parameters]
    return f"jax {version('jax')} has no {absent[0]} in {_MODULE}" if absent else None


@functools.cache
def library_failure() -> str | None:
    """Reason why cuDNN is unavailable, or None."""
    if (reason := optional.failure(_MODULE)) is not None:
        return reason
    try:
        _module().check_cudnn_version()
    except RuntimeError as error:
        return f"this process has no cuDNN ({error})"
    return None


def library_version() -> int:
    """cuDNN version, which must be available, as a number: 91900 for 9.19."""
    return int(_module().check_cudnn_version())


def attend(
    query: Array,
    key: Array,
    value: Array,
    bounds: tuple[Array, Array, Array, Array],
    scale: float,
    causal: bool,
) -> Array:
    """Compute out [b, q, h, d]; bounds: see `SequenceDescriptor.bounds`. Tokens outside any sequence are zero."""
    lengths_q, lengths_kv, starts_q, starts_kv = bounds
    visible = (
        _sequence_mask(starts_q, lengths_q, query.shape[1]),
        _sequence_mask(starts_kv, lengths_kv, key.shape[1]),
    )
    # cuDNN reads -1 as an absent sequence; starts have one more entry, the last sequence's end.
    lengths = [jnp.where(lengths_q > 0, row_lengths, -1) for row_lengths in (lengths_q, lengths_kv)]
    starts = [
        jnp.pad(jnp.where(lengths_q > 0, row_lengths, -1), ((0, 0), (0, 1)), constant_values=-1)
        for row_lengths in (starts_q, starts_kv)
    ]
    query, key, value, _, packed_bounds = align(
        query, key, value, None, (*lengths, *starts, *visible)
    )
    return isolate(_packed(query, key, value, packed_bounds, float(scale), causal), key.shape[2])


PackedBounds = tuple[
    Array, ...
]  # lengths and starts of queries and keys, and which tokens belong to a sequence


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _packed(
    query: Array, key: Array, value: Array, bounds: PackedBounds, scale: float, causal: bool
) -> Array:
    """Call cuDNN, and clear the tokens outside any sequence in the result and in gradients.

    cuDNN leaves these tokens uninitialized.

    The backward pass receives the cleared result, so that the kernel clears it in place. JAX's own rule would save the
    uncleared result, which must not be overwritten.
    """
    return clear_unseen(
        _call(query, key, value, bounds, scale, causal, False), bounds[4], key.shape[2]
    )


def _call(
    query: Array,
    key: Array,
    value: Array,
    bounds: PackedBounds,
    scale: float,
    causal: bool,
    levels: bool,
) -> Any:
    return _module().dot_product_attention(
        query,
        key,
        value,
        q_seqlen=bounds[0],
        kv_seqlen=bounds[1],
        q_offsets=bounds[2],
        kv_offsets=bounds[3],
        scale=scale,
        mask_type=_padding_mask(causal),
        qkv_layout="BTNH",
        return_residual=levels,
    )


def _padding_mask(causal: bool) -> Any:
    kinds = _module().MaskType
    return kinds.PADDING_CAUSAL if causal else kinds.PADDING


def _forward(
    query: Array, key: Array, value: Array, bounds: PackedBounds, scale: float, causal: bool
) -> tuple[Array, Any]:
    out, level = _call(query, key, value, bounds, scale, causal, True)
    out = clear_unseen(out, bounds[4], key.shape[2])
    return out, (query, key, value, bounds, out, level)


def _backward(scale: float, causal: bool, saved: Any, dout: Array) -> tuple[Any, ...]:
    query, key, value, all_bounds, out, level = saved
    absent = jnp.zeros(0, query.dtype)
    *bounds, seen_q, seen_kv = all_bounds
    groups = key.shape[2]
    bound_operands = (absent, *bounds, absent, absent)
    dout = clear_unseen(dout, seen_q, groups)
    dq, dk, dv = _gradients(
        query, key, value, bound_operands, out, level, dout, scale, _padding_mask(causal)
    )
    visible = (seen_q, seen_kv, seen_kv)
    return *(
        clear_unseen(dx, of, groups) for dx, of in zip((dq, dk, dv), visible, strict=True)
    ), None


_packed.defvjp(_forward, _backward)


_RULE = "_dot_product_attention_bwd_rule"
_RULE_KNOWN = {
    "scale",
    "seed",
    "dropout_rate",
    "variadic_args",
    "mask_type",
    "layout",
    "sliding_window_length",
    "return_residual",
    "res",
    "grad_output",
}
_RULE_OPTIONAL = {"is_training", "cudnn_version", "score_mod"}  # jax 0.10 and 0.11, and 0.12


@functools.cache
def part_failure() -> str | None:
    """Reason why this JAX version does not provide partial attention, or None."""
    if (reason := failure()) is not None:
        return reason
    if "return_residual" not in inspect.signature(_module().dot_product_attention).parameters:
        return f"jax {version('jax')} has no return_residual in {_MODULE}"
    rule = getattr(_module(), _RULE, None)
    parameters = set() if rule is None else set(inspect.signature(rule).parameters)
    if not parameters >= _RULE_KNOWN or parameters - _RULE_KNOWN - _RULE_OPTIONAL:
        return f"jax {version('jax')} has another {_RULE} in {_MODULE}"
    return None


def forward_part(
    query: Array, key: Array, value: Array, scale: float, causal: bool
) -> tuple[Array, Array]:
    """See `Parts`."""
    module = _module()
    mask = module.MaskType.CAUSAL if causal else module.MaskType.NO_MASK
    return module.dot_product_attention(
        query,
        key,
        value,
        scale=float(scale),
        mask_type=mask,
        qkv_layout="BTNH",
        return_residual=True,
    )


def backward_part(
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    level: Array,
    dout: Array,
    scale: float,
    causal: bool,
) -> tuple[Array, Array, Array]:
    """See `Parts`: JAX's gradient rule, for an output and a level that also depend on other keys."""
    mask = _module().MaskType.CAUSAL if causal else _module().MaskType.NO_MASK
    absent = (jnp.zeros(0, query.dtype),) * 7
    return _gradients(query, key, value, absent, out, level, dout, float(scale), mask)


def _gradients(
    query: Array,
    key: Array,
    value: Array,
    bound_operands: tuple[Array, ...],
    out: Array,
    level: Array,
    dout: Array,
    scale: float,
    mask: Any,
) -> tuple[Array, Array, Array]:
    """Compute dq, dk, dv by JAX's rule; bound_operands: bias, query and key lengths and starts, two page tables."""
    module = _module()
    rule = getattr(module, _RULE)
    names = inspect.signature(rule).parameters
    extra = ((),) if "score_mod" in names else ()  # score_mod operands
    values = {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": mask,
        "layout": module._normalize_layout("BTNH").value,
        "sliding_window_length": None,
        "score_mod": None,
        "is_training": library_version(),
        "cudnn_version": library_version(),
        "return_residual": False,
        "res": (query, key, value, *bound_operands, *extra, level, out),
        "grad_output": dout,
    }
    dq, dk, dv, *_ = rule(**{name: values[name] for name in names})
    return dq, dk, dv


def _sequence_mask(starts: Array, lengths: Array, tokens: int) -> Array:
    """Mask bool [b, tokens]: whether a token belongs to a sequence."""
    index = jnp.arange(tokens, dtype=jnp.int32)
    begins = starts[:, :, None]
    return ((index >= begins) & (index < begins + lengths[:, :, None])).any(axis=1)


@dataclass(frozen=True)
class ClearUnseen(Kernel):
    """(x [b, s, h, d], seen uint8 [b, s]) -> x, 0 where seen is 0; writes only those tokens, in place.

    Sharded along batches and head groups, like cuDNN's call.

    Attributes:
        groups: Key heads.
        members: Heads of x per key head.
    """

    groups: int
    members: int

    @property
    def rule(self) -> ShardingRule:
        axes = f"b s {head_factors(self.groups, self.members)} d"
        text = f"{axes}, b s -> {axes}"
        replicated = tuple(name for name in ("s", "d", "r") if name in text)
        return ShardingRule(text, replicated, {"g": self.groups, "r": self.members})

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct(operands[0].shape, operands[0].dtype),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import packed_sequences

        x, visible = arrays
        (result,) = run(packed_sequences.zero_unseen(visible.size, prod(x.shape[2:])), [x, visible])
        assert result is not None
        return (result,)


def clear_unseen(x: Array, visible: Array, groups: int) -> Array:
    """Clear the tokens of x that are not visible, bool [b, s]; for programs that are lowered for CUDA."""
    if kernels_unsupported_reason() is not None:
        return jnp.where(visible[:, :, None, None], x, 0)
    return call(ClearUnseen(groups, x.shape[2] // groups), x, visible.astype(jnp.uint8))[0]
