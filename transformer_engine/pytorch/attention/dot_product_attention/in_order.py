"""ordered = in_order(config, arguments, qkv): a call's arguments as a key takes them, and what a cache will give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..inference import CachedKeysValues
from .arguments import check_cache, check_slopes, check_tensors, settled
from .prepare import mask_name, sequences_of
from .sequences import Cached, Sequences, are_same, with_longest
from .settings import NOTHING_GIVEN, AttentionConfig, CallArguments


class InOrder(NamedTuple):
    """The arguments of a call as a key takes them.

    same       `are_same` of them
    upcoming   what a cache will give the step, nothing written yet; None where there is none, and where its custom
               manager alone knows
    cached     the facts of that
    """

    arguments: CallArguments
    same: bool = True
    upcoming: CachedKeysValues | None = None
    cached: Cached | None = None


Shapes = Callable[[], tuple[Any, Any, Any]]


def in_order(
    config: AttentionConfig, arguments: CallArguments, qkv: Shapes, tracing: bool = False
) -> InOrder:
    """The arguments checked as far as a key cannot have them; qkv(): shapes will do, and are rarely asked for."""
    a = settled(config, arguments)
    same = are_same(a)
    tensor_format = config.qkv_format if a.qkv_format is None else a.qkv_format
    if a.alibi_slopes is not None:
        check_slopes(a.alibi_slopes, qkv()[0], config.heads)
    if a.inference_params is not None:
        return _over_cache(config, a, same, tensor_format, qkv, tracing)
    if tensor_format == "thd" and (a.max_seqlens[0] is None or a.max_seqlens[1] is None):
        a = with_longest(sequences_of(config, qkv(), a, None, same)[1], a)
    return InOrder(a, same)


def _over_cache(
    config: AttentionConfig, a: CallArguments, same: bool, tensor_format: str, qkv: Shapes, tracing: bool
) -> InOrder:
    """Those of a step. What its keys and values have to be like is judged with the call: `Cached` has it."""
    cache: Any = a.inference_params
    number = config.layer_number
    if not tracing and number is not None:
        foreseen = cache.foreseen(number, tensor_format, Cached.of)
        if foreseen is not None:
            return InOrder(a, same, foreseen.upcoming, foreseen.described)
    q, k, v = qkv()
    check_tensors(q, k, v, tensor_format, config)
    if "arbitrary" in (a.attn_mask_type or config.attn_mask_type):
        mask_name(config, a)  # refuses it
    number = check_cache(number, cache.dtype, q.dtype)
    if not cache.foresees:
        return InOrder(a, same)
    limits = cache.limits(tensor_format)
    limits.check(k, v, tensor_format)
    cache.allocate_memory(number)
    upcoming = cache.upcoming(number)
    return InOrder(a, same, upcoming, Cached.of(upcoming, limits))


class Judged(NamedTuple):
    """A call that its layer has judged before there were q, k and v.

    facts       `facts_of` the arguments
    sequences   those that the numbers in its lengths were looked at for
    """

    ordered: InOrder
    facts: tuple[Any, ...] | None = None
    sequences: Sequences | None = None


PLAIN = Judged(InOrder(NOTHING_GIVEN))
