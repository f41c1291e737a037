"""thd_attention_policies: a mask and a window for each sequence of a packed batch.

A policy is a dictionary: "sequence_ids" (int32 or int64 [n], ascending), "mask_type" (a padding type), "window_size" (a
pair or None) and optionally "bottom_right_diagonal". The policies of a call contain every sequence exactly once.

The attention runs once per policy. With the dispatch "auto" it reads the whole buffer, where the sequences of other
policies count as padding. With "grouped", or if no backend supports padding between sequences, it reads the gathered
tokens of the policy. The output is zero for the other tokens, so that the outputs of all policies are added.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ....common.checks import check_option, described
from ...primitives.attention.choose import NoBackend
from ...primitives.attention.mask import canonical_name, check_set_window_size
from ...primitives.attention.packed import cumulative, sequence_lengths
from ...quantization.autocast import AutocastState
from ...runtime.operator_definition import define_operator
from ...runtime.tracing import run_eagerly
from ...runtime.warn_once import warn_once
from .arguments import DISPATCHES
from .fp8_recipe import attention_recipe
from .settings import AttentionArguments, AttentionConfig

NO_POLICIES: dict[str, Any] = {
    "thd_attention_policies": None,
    "thd_attention_policy_dispatch": "auto",
}
_REQUIRED = ("sequence_ids", "mask_type", "window_size")
_OPTIONAL = "bottom_right_diagonal"


class Policy(NamedTuple):
    """A checked policy."""

    ids: Tensor
    mask_type: str
    window_size: tuple[int, int]
    bottom_right_diagonal: bool | None


Attend = Callable[..., Any]


def check_policies(
    config: AttentionConfig,
    a: AttentionArguments,
    device: torch.device,
    state: AutocastState,
    fp8_output: bool,
) -> list[Policy]:
    """Check the policies of a call, as far as shapes and settings decide.

    Args:
        config: Attention settings.
        a: Call arguments.
        device: Query device.
        state: autocast state.
        fp8_output: The output is requested as a Float8Tensor.

    Raises:
        ValueError: A policy or another call argument cannot be used.
    """
    policies: Any = a.thd_attention_policies
    if not isinstance(policies, (list, tuple)) or not policies:
        raise ValueError(
            f"thd_attention_policies={described(policies)} is not a non-empty list; give a list of "
            f"dictionaries, or None"
        )
    check_option("thd_attention_policy_dispatch", a.thd_attention_policy_dispatch, DISPATCHES)
    tensor_format = config.qkv_format if a.qkv_format is None else a.qkv_format
    fp8 = state.enabled and attention_recipe(state.recipe) is not None
    for wrong, argument, remedy in (
        (
            a.attn_mask_type is not None,
            f"attn_mask_type={a.attn_mask_type!r}",
            "policies have mask types",
        ),
        (a.window_size is not None, f"window_size={a.window_size!r}", "policies have windows"),
        (tensor_format != "thd", f"qkv_format={tensor_format!r}", "give packed sequences, 'thd'"),
        (a.cu_seqlens_q is None, "cu_seqlens_q=None", "give the bounds of the sequences"),
        (
            config.attention_type == "cross" and a.cu_seqlens_kv is None,
            "cu_seqlens_kv=None of a cross attention",
            "give the bounds of the keys' sequences",
        ),
        (a.attention_mask is not None, "attention_mask", "leave it None"),
        (
            a.core_attention_bias is not None or a.core_attention_bias_type != "no_bias",
            f"core_attention_bias_type={a.core_attention_bias_type!r}",
            "use 'no_bias'",
        ),
        (a.alibi_slopes is not None, "alibi_slopes", "leave it None"),
        (a.inference_params is not None, "inference_params", "leave it None"),
        (a.score_mod is not None, "score_mod", "leave it None"),
        (fp8_output, "fp8_output=True", "set it to False"),
        (fp8, "FP8 attention", "set fp8_dpa and fp8_mha of the recipe to False"),
        (config.return_max_logit, "return_max_logit=True", "construct the attention without it"),
        (config.context is not None, "a context-parallel group", "set the group to None"),
    ):
        if wrong:
            raise ValueError(f"thd_attention_policies with {argument}; {remedy}")
    return [_check_policy(index, policy, a, device) for index, policy in enumerate(policies)]


def _check_policy(index: int, policy: Any, a: AttentionArguments, device: torch.device) -> Policy:
    """Check the ids, mask type and window of one policy; raise ValueError or TypeError."""
    name = f"thd_attention_policies[{index}]"
    if not isinstance(policy, dict):
        raise ValueError(
            f"{name}={described(policy)} is not a dictionary; give one with {', '.join(_REQUIRED)}"
        )
    missing = [key for key in _REQUIRED if key not in policy]
    unknown = [key for key in policy if key not in (*_REQUIRED, _OPTIONAL)]
    if missing or unknown:
        raise ValueError(
            f"{name} has the keys {sorted(map(str, policy))}; give {', '.join(_REQUIRED)} and optionally {_OPTIONAL}"
        )
    ids = policy["sequence_ids"]
    if not isinstance(ids, Tensor) or ids.ndim != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name}: sequence_ids={described(ids)} must be a tensor [n] of int32 or int64"
        )
    if ids.device != device:
        raise ValueError(
            f"{name}: sequence_ids is on {ids.device}, the queries are on {device}; move one of them"
        )
    mask_type = policy["mask_type"]
    if mask_type == "causal_padding":
        mask_type = "padding_causal"
    mask_type = canonical_name(mask_type, f"{name}: mask_type")
    if not mask_type.startswith("padding"):
        raise ValueError(
            f"{name}: mask_type={mask_type!r}; give 'padding', 'padding_causal' or 'padding_causal_bottom_right'"
        )
    diagonal = policy.get(_OPTIONAL)
    if diagonal is not None and not isinstance(diagonal, bool):
        raise ValueError(
            f"{name}: bottom_right_diagonal={described(diagonal)}; give True, False or None"
        )
    return Policy(
        ids,
        mask_type,
        check_set_window_size(mask_type, policy["window_size"]),
        a.bottom_right_diagonal if diagonal is None else diagonal,
    )


# Checked ids: ids of the first policy -> (weak references to the ids of all policies, their versions, sequence count).
_COVERED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def check_coverage(ids: list[Tensor], batch: int) -> None:
    """Check that the ids of the policies contain each of `batch` sequences once, in ascending order.

    Values are read on the host once for the same unchanged tensors, and at each call for inference tensors.

    Raises:
        RuntimeError: A CUDA graph is captured, and the tensors were not checked before or are inference tensors.
        ValueError: A sequence is missing, repeated or out of order.
    """
    versions = None if any(x.is_inference() for x in ids) else tuple(x._version for x in ids)
    cached = _COVERED.get(ids[0])
    if cached is not None and versions is not None:
        references, cached_versions, cached_batch = cached
        same = len(references) == len(ids) and all(
            r() is x for r, x in zip(references, ids, strict=True)
        )
        if same and (cached_versions, cached_batch) == (versions, batch):
            return
    if ids[0].is_cuda and torch.cuda.is_current_stream_capturing():
        remedy = "call the attention with the same tensors once before the capture"
        if versions is None:
            inference = [index for index, x in enumerate(ids) if x.is_inference()]
            remedy = (
                f"those of policies {inference} are inference tensors, whose writes torch does not count, so no "
                "earlier call helps; make sequence_ids outside of torch.inference_mode(), or copy them there by clone()"
            )
        raise RuntimeError(
            "sequence_ids of thd_attention_policies are read on the host, which a CUDA graph cannot capture; "
            + remedy
        )
    covered: list[int] = []
    for index, x in enumerate(ids):
        values = x.tolist()
        for sequence in values:
            if not 0 <= sequence < batch:
                raise ValueError(
                    f"thd_attention_policies[{index}]: sequence {sequence} is outside 0..{batch - 1}, the sequences of "
                    "cu_seqlens_q"
                )
        if any(after <= before for before, after in pairwise(values)):
            raise ValueError(
                f"thd_attention_policies[{index}]: sequence_ids {values} are not strictly ascending"
            )
        covered += values
    if sorted(covered) != list(range(batch)):
        absent, repeated = (
            set(range(batch)) - set(covered),
            {x for x in covered if covered.count(x) > 1},
        )
        raise ValueError(
            f"thd_attention_policies do not contain each of the {batch} sequences once: missing {sorted(absent)}, "
            f"repeated {sorted(repeated)}"
        )
    if versions is not None:
        _COVERED[ids[0]] = ([weakref.ref(x) for x in ids], versions, batch)


def _copy_checked_ids(ids: list[Tensor], sequences: int) -> list[Tensor]:
    """Check the ids, and return copies: an operator, because a compiled graph cannot read values itself."""
    check_coverage(ids, sequences)
    return [x.clone() for x in ids]


define_operator(
    "transformer_engine",
    "sequence_ids_of_policies(Tensor[] ids, int sequences) -> Tensor[]",
    "CompositeExplicitAutograd",
    _copy_checked_ids,
    lambda ids, sequences: [torch.empty_like(x) for x in ids],
    (torch.Tag.cudagraph_unsafe,),
)


class _Packed(NamedTuple):
    """Query tensors, or key and value tensors, with their sequences' lengths [b] and starts [b + 1] in the buffer."""

    tensors: tuple[Tensor, ...]
    lengths: Tensor
    starts: Tensor


def attend_by_policies(
    attend: Attend,
    policies: list[Policy],
    qkv: tuple[Tensor, Tensor, Tensor],
    a: AttentionArguments,
) -> Tensor:
    """Compute attention whose sequences are masked by their policies.

    Args:
        attend: Computes attention for q, k, v with masks and bounds by keyword.
        policies: Result from `check_policies`.
        qkv: Queries [t, h, d], keys [t, g, d] and values [t, g, d_v].
        a: Call arguments.

    Returns:
        Output [t, h * d_v]; zero for tokens outside the sequences.
    """
    if a.softcap is not None:
        warn_once(
            "softcap with thd_attention_policies",
            "softcap of a call has no effect with thd_attention_policies; set the softcap of the constructor",
        )
    cu_q = a.cu_seqlens_q
    assert cu_q is not None
    ids, sequences = [policy.ids for policy in policies], cu_q.shape[0] - 1
    if torch.compiler.is_compiling():
        ids = torch.ops.transformer_engine.sequence_ids_of_policies(ids, sequences)
    else:
        check_coverage(ids, sequences)
    # Not `_replace`, whose result torch 2.11 rebuilds as an empty tuple where a compiled graph ends.
    nonempty = [
        Policy(x, *policy[1:])
        for policy, x in zip(policies, ids, strict=True)
        if policy.ids.shape[0]
    ]
    q, k, v = qkv
    if not q.shape[0] or not nonempty:  # without sequences, all tokens are padding
        return _zeros(q, k, v)
    cu_kv, padded_kv = a.cu_seqlens_kv, a.cu_seqlens_kv_padded
    if len(nonempty) == 1 and a.thd_attention_policy_dispatch != "grouped":
        return _attend(attend, nonempty[0], qkv, (cu_q, cu_kv, a.cu_seqlens_q_padded, padded_kv), a)
    queries = _Packed(
        (q,),
        sequence_lengths(cu_q),
        cu_q if a.cu_seqlens_q_padded is None else a.cu_seqlens_q_padded,
    )
    # Later checks recognize keys with the queries' bounds by the identity of `starts` and `lengths`.
    keys = _Packed((k, v), queries.lengths, queries.starts if padded_kv is None else padded_kv)
    if cu_kv is not None and not (cu_kv is cu_q and padded_kv is a.cu_seqlens_q_padded):
        keys = _Packed((k, v), sequence_lengths(cu_kv), cu_kv if padded_kv is None else padded_kv)
    if a.thd_attention_policy_dispatch == "grouped":
        return _sum_of_gathered(attend, nonempty, queries, keys, a)
    outputs = [
        _attend_in_place_or_gathered(attend, policy, queries, keys, a) for policy in nonempty
    ]
    return functools.reduce(torch.add, outputs)


def _zeros(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Zeros [t, h * d_v] that depend on the inputs, for autograd."""
    nothing = q[:0].sum() + k[:0].sum() + v[:0].sum()
    return q.new_zeros(q.shape[0], q.shape[1] * v.shape[2]) + nothing


def _attend_in_place_or_gathered(
    attend: Attend, policy: Policy, queries: _Packed, keys: _Packed, a: AttentionArguments
) -> Tensor:
    """Attention for a policy's sequences, in the whole buffer if a backend supports padding between sequences."""
    if torch.compiler.is_compiling():
        return _in_place(attend, policy, queries, keys, a)
    try:
        return _in_place(attend, policy, queries, keys, a)
    except NoBackend:
        return _gathered(attend, policy, queries, keys, a)


@run_eagerly(
    "thd_attention_policy_dispatch='grouped' gathers tokens, whose number depends on values; use 'auto'"
)
def _sum_of_gathered(
    attend: Attend, policies: list[Policy], queries: _Packed, keys: _Packed, a: AttentionArguments
) -> Tensor:
    outputs = [_gathered(attend, policy, queries, keys, a) for policy in policies]
    return functools.reduce(torch.add, outputs)


def _attend(
    attend: Attend,
    policy: Policy,
    qkv: tuple[Tensor, Tensor, Tensor],
    bounds: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    a: AttentionArguments,
) -> Tensor:
    bounds_fields = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    arguments = a._replace(
        **dict(zip(bounds_fields, bounds, strict=True)),
        attn_mask_type=policy.mask_type,
        window_size=policy.window_size,
        bottom_right_diagonal=policy.bottom_right_diagonal,
        pad_between_seqs=a.pad_between_seqs if bounds[2] is None else True,
        softcap=None,
        **NO_POLICIES,
    )
    return attend(*qkv, **arguments._asdict())


def _in_place(
    attend: Attend, policy: Policy, queries: _Packed, keys: _Packed, a: AttentionArguments
) -> Tensor:
    """Attention for a policy's sequences in the whole buffer; the other sequences are empty, their tokens padding."""

    def policy_bounds(side: _Packed) -> Tensor:
        return cumulative(
            side.lengths * torch.zeros_like(side.lengths).index_fill(0, policy.ids.long(), 1)
        )

    bounds_q = policy_bounds(queries)
    bounds_kv = bounds_q if keys.lengths is queries.lengths else policy_bounds(keys)
    (q,), (k, v) = queries.tensors, keys.tensors
    bounds = (bounds_q, bounds_kv, queries.starts, keys.starts)
    return _attend(attend, policy, (q, k, v), bounds, a)


def _gathered(
    attend: Attend, policy: Policy, queries: _Packed, keys: _Packed, a: AttentionArguments
) -> Tensor:
    """Attention of the gathered tokens of a policy, scattered into zeros."""

    def gathered(side: _Packed) -> tuple[Tensor, Tensor]:
        ids, tokens = policy.ids.long(), side.tensors[0].shape[0]
        position = torch.arange(tokens, device=ids.device)
        is_gathered = torch.zeros_like(side.lengths, dtype=torch.bool).index_fill(0, ids, True)
        starts = side.starts.long()
        sequence = (torch.searchsorted(starts, position, right=True) - 1).clamp(
            0, starts.shape[0] - 2
        )
        real = (position >= starts[sequence]) & (
            position < starts[sequence] + side.lengths[sequence]
        )
        return (real & is_gathered[sequence]).nonzero().flatten(), cumulative(side.lengths[ids])

    places, bounds_q = gathered(queries)
    same = keys.starts is queries.starts and keys.lengths is queries.lengths
    places_kv, bounds_kv = (places, bounds_q) if same else gathered(keys)
    (q,), (k, v) = queries.tensors, keys.tensors
    if not places.numel():
        return _zeros(q, k, v)
    rows = (q[places], k[places_kv], v[places_kv])
    attended = _attend(attend, policy, rows, (bounds_q, bounds_kv, None, None), a)
    return attended.new_zeros(q.shape[0], attended.shape[1]).index_copy(0, places, attended)
