"""cuDNN's fused attention of packed rows, or of parts: the only reader of the private module of jax that has it."""

from __future__ import annotations

import functools
import inspect
from importlib.metadata import version
from types import ModuleType

import jax
import jax.numpy as jnp
from jax import Array

from ....common import optional
from .alike import alike, apart

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
    module = _module()
    seen_q = _inside(starts_q, lengths_q, query.shape[1])
    seen_kv = _inside(starts_kv, lengths_kv, key.shape[1])
    query, key, value = (_within(x, seen) for x, seen in ((query, seen_q), (key, seen_kv), (value, seen_kv)))
    given = (
        _or_absent(lengths_q, lengths_q), _or_absent(lengths_kv, lengths_q),
        _with_end(_or_absent(starts_q, lengths_q)), _with_end(_or_absent(starts_kv, lengths_q)),
    )  # fmt: skip
    query, key, value, _, given = alike(query, key, value, None, given)
    out = module.dot_product_attention(
        query, key, value, q_seqlen=given[0], kv_seqlen=given[1], q_offsets=given[2], kv_offsets=given[3],
        scale=scale, mask_type=module.MaskType.PADDING_CAUSAL if causal else module.MaskType.PADDING, qkv_layout="BTNH",
    )  # fmt: skip
    return jnp.where(seen_q, apart(out, key.shape[2]), 0)


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
    module = _module()
    rule = getattr(module, _RULE)
    names = inspect.signature(rule).parameters
    absent = (jnp.zeros(0, query.dtype),) * 7  # bias, lengths, offsets, page tables
    own = ((),) if "score_mod" in names else ()  # what a score_mod reads
    values = {
        "scale": float(scale), "seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False),
        "mask_type": module.MaskType.CAUSAL if causal else module.MaskType.NO_MASK,
        "layout": module._normalize_layout("BTNH").value, "sliding_window_length": None, "score_mod": None,
        "is_training": library_version(), "cudnn_version": library_version(), "return_residual": False,
        "res": (query, key, value, *absent, *own, level, out), "grad_output": dout,
    }  # fmt: skip
    dq, dk, dv, *_ = rule(**{name: values[name] for name in names})
    return dq, dk, dv


def _inside(starts: Array, lengths: Array, tokens: int) -> Array:
    """[b, tokens, 1, 1]: does a token belong to a sequence?"""
    place = jnp.arange(tokens, dtype=jnp.int32)
    begins = starts[:, :, None]
    return ((place >= begins) & (place < begins + lengths[:, :, None])).any(axis=1)[:, :, None, None]


@jax.custom_vjp
def _within(x: Array, seen: Array) -> Array:
    """x, whose gradient is zero where nobody is: cuDNN leaves there what lay in memory."""
    return x


_within.defvjp(lambda x, seen: (x, seen), lambda seen, dy: (jnp.where(seen, dy, 0), None))


def _or_absent(values: Array, lengths: Array) -> Array:
    """-1 where there is no sequence."""
    return jnp.where(lengths > 0, values, -1)


def _with_end(starts: Array) -> Array:
    return jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)
