"""cuDNN's fused attention of packed rows, or of parts: the only reader of the private module of jax that has it."""

from __future__ import annotations

import functools
import inspect
from importlib.metadata import version
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ....common import optional
from .alike import alike, apart
from .seen import cleared

_MODULE = "jax._src.cudnn.fused_attention_stablehlo"
_WANTED = ("q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "scale", "mask_type", "qkv_layout")


def _module() -> ModuleType:
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


@functools.cache
def failure() -> str | None:
    """Why this jax cannot be asked, None if it can."""
    if (reason := optional.failure(_MODULE)) is not None:
        return reason
    call = getattr(_module(), "dot_product_attention", None)
    known = () if call is None else inspect.signature(call).parameters
    absent = [name for name in _WANTED if name not in known]
    return f"jax {version('jax')} has no {absent[0]} in {_MODULE}" if absent else None


@functools.cache
def library_failure() -> str | None:
    """Why cuDNN itself is not there, None if it is."""
    if (reason := optional.failure(_MODULE)) is not None:
        return reason
    try:
        _module().check_cudnn_version()
    except RuntimeError as error:
        return f"this process has no cuDNN ({error})"
    return None


def library_version() -> int:
    """The version of cuDNN as one number, 91900 for 9.19; of a process that has it."""
    return int(_module().check_cudnn_version())


def attend(
    query: Array,
    key: Array,
    value: Array,
    bounds: tuple[Array, Array, Array, Array],
    scale: float,
    causal: bool,
) -> Array:
    """out [b, q, h, d]; bounds as `SequenceDescriptor.bounds` makes them; rows of no sequence are zero."""
    lengths_q, lengths_kv, starts_q, starts_kv = bounds
    seen = _inside(starts_q, lengths_q, query.shape[1]), _inside(starts_kv, lengths_kv, key.shape[1])
    given = (
        _or_absent(lengths_q, lengths_q), _or_absent(lengths_kv, lengths_q),
        _with_end(_or_absent(starts_q, lengths_q)), _with_end(_or_absent(starts_kv, lengths_q)), *seen,
    )  # fmt: skip
    query, key, value, _, given = alike(query, key, value, None, given)
    return apart(_packed(query, key, value, given, float(scale), causal), key.shape[2])


Given = tuple[Array, ...]  # lengths and starts of queries and keys, and which tokens are a sequence's


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _packed(query: Array, key: Array, value: Array, given: Given, scale: float, causal: bool) -> Array:
    """jax's call; where nobody is cuDNN leaves what lay in memory, in the result and in gradients: zero here.

    The backward pass is given the cleared result, so that it is cleared where it lies; jax's own rule would keep the
    other one for it, and what is kept is not written.
    """
    return cleared(_call(query, key, value, given, scale, causal, False), given[4], key.shape[2])


def _call(
    query: Array, key: Array, value: Array, given: Given, scale: float, causal: bool, levels: bool
) -> Any:
    return _module().dot_product_attention(
        query, key, value, q_seqlen=given[0], kv_seqlen=given[1], q_offsets=given[2], kv_offsets=given[3],
        scale=scale, mask_type=_mask_of(causal), qkv_layout="BTNH", return_residual=levels,
    )  # fmt: skip


def _mask_of(causal: bool) -> Any:
    kinds = _module().MaskType
    return kinds.PADDING_CAUSAL if causal else kinds.PADDING


def _forward(
    query: Array, key: Array, value: Array, given: Given, scale: float, causal: bool
) -> tuple[Array, Any]:
    out, level = _call(query, key, value, given, scale, causal, True)
    out = cleared(out, given[4], key.shape[2])
    return out, (query, key, value, given, out, level)


def _backward(scale: float, causal: bool, saved: Any, dout: Array) -> tuple[Any, ...]:
    query, key, value, given, out, level = saved
    absent = jnp.zeros(0, query.dtype)
    *bounds, seen_q, seen_kv = given
    groups = key.shape[2]
    others = (absent, *bounds, absent, absent)
    dout = cleared(dout, seen_q, groups)
    dq, dk, dv = _gradients(query, key, value, others, out, level, dout, scale, _mask_of(causal))
    seen = (seen_q, seen_kv, seen_kv)
    return *(cleared(dx, of, groups) for dx, of in zip((dq, dk, dv), seen, strict=True)), None


_packed.defvjp(_forward, _backward)


_RULE = "_dot_product_attention_bwd_rule"
_RULE_KNOWN = {
    "scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length", "return_residual",
    "res", "grad_output",
}  # fmt: skip
_RULE_OPTIONAL = {"is_training", "cudnn_version", "score_mod"}  # jax 0.10 and 0.11, and 0.12


@functools.cache
def part_failure() -> str | None:
    """Why this jax cannot be asked for parts of an attention, None if it can."""
    if (reason := failure()) is not None:
        return reason
    if "return_residual" not in inspect.signature(_module().dot_product_attention).parameters:
        return f"jax {version('jax')} has no return_residual in {_MODULE}"
    rule = getattr(_module(), _RULE, None)
    known = set() if rule is None else set(inspect.signature(rule).parameters)
    if not known >= _RULE_KNOWN or known - _RULE_KNOWN - _RULE_OPTIONAL:
        return f"jax {version('jax')} has another {_RULE} in {_MODULE}"
    return None


def forward_part(query: Array, key: Array, value: Array, scale: float, causal: bool) -> tuple[Array, Array]:
    """See `Parts`."""
    module = _module()
    mask = module.MaskType.CAUSAL if causal else module.MaskType.NO_MASK
    return module.dot_product_attention(
        query, key, value, scale=float(scale), mask_type=mask, qkv_layout="BTNH", return_residual=True
    )


def backward_part(
    query: Array, key: Array, value: Array, out: Array, level: Array, dout: Array, scale: float, causal: bool
) -> tuple[Array, Array, Array]:  # fmt: skip
    """See `Parts`: jax's rule of the gradient, given an output and a level that other keys have a share in."""
    mask = _module().MaskType.CAUSAL if causal else _module().MaskType.NO_MASK
    absent = (jnp.zeros(0, query.dtype),) * 7
    return _gradients(query, key, value, absent, out, level, dout, float(scale), mask)


def _gradients(
    query: Array, key: Array, value: Array, others: tuple[Array, ...], out: Array, level: Array, dout: Array,
    scale: float, mask: Any,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """dq, dk, dv by jax's rule; others: bias, lengths and starts of queries and keys, two tables of pages."""
    module = _module()
    rule = getattr(module, _RULE)
    names = inspect.signature(rule).parameters
    own = ((),) if "score_mod" in names else ()  # what a score_mod reads
    values = {
        "scale": scale, "seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False), "mask_type": mask,
        "layout": module._normalize_layout("BTNH").value, "sliding_window_length": None, "score_mod": None,
        "is_training": library_version(), "cudnn_version": library_version(), "return_residual": False,
        "res": (query, key, value, *others, *own, level, out), "grad_output": dout,
    }  # fmt: skip
    dq, dk, dv, *_ = rule(**{name: values[name] for name in names})
    return dq, dk, dv


def _inside(starts: Array, lengths: Array, tokens: int) -> Array:
    """[b, tokens]: does a token belong to a sequence?"""
    place = jnp.arange(tokens, dtype=jnp.int32)
    begins = starts[:, :, None]
    return ((place >= begins) & (place < begins + lengths[:, :, None])).any(axis=1)


def _or_absent(values: Array, lengths: Array) -> Array:
    """-1 where there is no sequence."""
    return jnp.where(lengths > 0, values, -1)


def _with_end(starts: Array) -> Array:
    return jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)
