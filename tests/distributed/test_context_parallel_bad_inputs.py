"""Calls that ranks cannot share raise on every rank before communication, with the remedy."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import transformer_engine.pytorch as te
from tests.distributed.context_parallel_cases import Case, create_attention, cumulative
from tests.distributed.threaded_ranks import run_on_threads
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import (
    get_batch_on_this_cp_rank,
    get_cu_seqlens_on_cp_rank,
)


def _qkv(case: Case, tokens: int | None = None, keys: int | None = None) -> list[torch.Tensor]:
    tokens = case.tokens // case.size if tokens is None else tokens
    results = []
    for length, heads in (
        (tokens, case.heads),
        (keys or tokens, case.groups),
        (keys or tokens, case.groups),
    ):
        shape = (
            (length,)
            if case.layout == "thd"
            else (length, 2)
            if case.layout == "sbhd"
            else (2, length)
        )
        results.append(torch.randn(*shape, heads, 8))
    return results


def _bounds(*lengths: int) -> dict[str, torch.Tensor]:
    return {"cu_seqlens_q": cumulative(lengths), "cu_seqlens_kv": cumulative(lengths)}


THD = {"layout": "thd", "mask": "padding_causal"}
# (attention, query tokens per rank, key tokens per rank, arguments, message)
CALLS = {
    "odd number of tokens": (
        Case(),
        7,
        None,
        {},
        "14 tokens of queries cannot be divided into 2 . 2 = 4.*pad the sequence to 16 tokens, 8 per rank",
    ),
    "odd number of tokens under a2a": (
        Case(comm="a2a"),
        5,
        None,
        {},
        "10 tokens of queries.*pad the sequence to 12",
    ),
    "odd number of keys": (
        Case(comm="all_gather", keys=14),
        8,
        7,
        {},
        "14 tokens of keys cannot be divided.*pad the sequence to 16 tokens",
    ),
    "heads under a2a": (
        Case(comm="a2a", heads=3, groups=3),
        None,
        None,
        {},
        "3 query heads cannot be divided among 2 ranks; use a divisor of 3",
    ),
    "groups under a2a": (
        Case(comm="a2a", groups=1),
        None,
        None,
        {},
        "1 key and value heads cannot be divided among 2 ranks",
    ),
    "packed length": (
        Case(**THD),
        8,
        None,
        _bounds(6, 10),
        "sequence 0 has 6 tokens, which cannot be divided into 4.*pad it to 8 tokens.*cu_seqlens_q_padded",
    ),
    "padded packed length": (
        Case(**THD),
        8,
        None,
        _bounds(6, 9)
        | {"cu_seqlens_q_padded": cumulative((6, 10)), "cu_seqlens_kv_padded": cumulative((6, 10))},
        "sequence 0 has 6 tokens, which cannot be divided into 4 chunks",
    ),
    "packed bounds of the rank": (
        Case(**THD),
        8,
        None,
        _bounds(8, 24),
        "cu_seqlens_q ends with 32, the packed tensor has 16",
    ),
    "packed bias": (
        Case(**THD),
        8,
        None,
        _bounds(8, 8)
        | {
            "core_attention_bias_type": "post_scale_bias",
            "core_attention_bias": torch.zeros(1, 1, 16, 16),
            "max_seqlen_q": 16,
            "max_seqlen_kv": 16,
        },
        "post_scale_bias.*with qkv_format='thd' and 2 context-parallel ranks",
    ),
    "bias rows of the whole sequence": (
        Case(),
        None,
        None,
        {
            "core_attention_bias_type": "post_scale_bias",
            "core_attention_bias": torch.zeros(1, 1, 16, 16),
        },
        "core_attention_bias .1, 1, 16, 16. has 16 rows; a context-parallel rank gives the rows of its 8 queries",
    ),
    "mask rows of the whole sequence": (
        Case(mask="arbitrary"),
        None,
        None,
        {"attention_mask": torch.zeros(2, 1, 16, 16, dtype=torch.bool)},
        "attention_mask .2, 1, 16, 16. has 16 rows; a context-parallel rank gives the rows of its 8",
    ),
    "padding mask of the rank's tokens": (
        Case(mask="padding"),
        None,
        None,
        {"attention_mask": torch.zeros(2, 1, 1, 8, dtype=torch.bool)},
        "attention_mask of q is .2, 1, 1, 8., a padding mask is .2, 1, 1, 16.",
    ),
    "unequal packed lengths under a causal mask": (
        Case(**THD),
        8,
        None,
        {
            "cu_seqlens_q": cumulative((8, 8)),
            "cu_seqlens_kv": cumulative((4, 12)),
            "max_seqlen_q": 16,
            "max_seqlen_kv": 16,
        },
        "queries and .* keys; a causal mask of context-parallel ranks needs the same lengths",
    ),
    "packed window without an exchange of heads": (
        Case(layout="thd", mask="padding", window=(2, 2), groups=1),
        8,
        None,
        _bounds(8, 8),
        "No context-parallel scheme is available for cp_comm_type='p2p'.*window_size=.2, 2..*1 key and value heads",
    ),
    "slopes of ALiBi without an exchange of heads": (
        Case(groups=1),
        None,
        None,
        {"core_attention_bias_type": "alibi"},
        "slopes of ALiBi.*1 key and value heads",
    ),
    "score_mod without an exchange of heads": (
        Case(groups=1),
        None,
        None,
        {"score_mod": lambda score, b, h, i, j: score},
        "score_mod reads positions.*1 key and value heads",
    ),
    "codes without a recipe": (
        Case(),
        None,
        None,
        {"fp8_output": True},
        "fp8_output=True needs an FP8 attention",
    ),
    "keys of other sequences": (
        Case(),
        8,
        None,
        {"cu_seqlens_q": cumulative((16,))},
        "cu_seqlens_q has 1 sequences",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_ranks_cannot_share_raises_on_every_rank(name, monkeypatch):
    case, tokens, keys, arguments, message = CALLS[name]
    monkeypatch.setattr(dist, "all_to_all_single", _never)
    monkeypatch.setattr(dist, "all_gather_into_tensor", _never)

    def run(rank):
        module = create_attention(case, dist.group.WORLD)
        with pytest.raises((ValueError, TypeError)) as raised:
            module(*_qkv(case, tokens, keys), **arguments)
        return str(raised.value)

    for result in run_on_threads(run, case.size):
        assert re.search(message, result, re.DOTALL), result


def _never(*_: object, **__: object) -> None:
    raise AssertionError("a collective began before the call was checked")


def test_a_cache_of_whole_sequences_is_not_shared():
    def run(rank):
        module = te.DotProductAttention(2, 8, qkv_format="bshd", layer_number=1)
        module.set_context_parallel_group(dist.group.WORLD, [0, 1], None, "p2p")
        cache = te.InferenceParams(2, 32, 2, 8, torch.float32)
        cache.pre_step({0: 8, 1: 8})
        with pytest.raises(
            ValueError, match=r"inference_params with a context-parallel group of 2 ranks.*None"
        ):
            module(*(torch.randn(2, 8, 2, 8) for _ in range(3)), inference_params=cache)

    run_on_threads(run, 2)


def test_groups_that_do_not_fit_the_communication_change_nothing():
    def run(rank):
        world, module = dist.group.WORLD, te.DotProductAttention(2, 8)
        for group, comm, message in (
            (
                [world, world],
                "p2p",
                "cp_group holds 2 groups, of sizes .2, 2.; cp_comm_type='p2p' takes one group",
            ),
            (world, "a2a+p2p", "cp_group holds 1 groups.*takes a list of two"),
            (world, "ring", "cp_comm_type='ring'; choose one of p2p, all_gather, a2a, a2a.p2p"),
        ):
            with pytest.raises(ValueError, match=message):
                module.set_context_parallel_group(group, [0, 1], None, comm)
        with pytest.raises(TypeError, match="is not a process group"):
            module.set_context_parallel_group(SimpleNamespace(), [0, 1], None, "p2p")
        assert module.cp_group is None and module.cp_comm_type == "p2p"

    run_on_threads(run, 2)


def test_a_process_outside_of_the_group_is_named(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: -1)
    with pytest.raises(ValueError, match="not a member of cp_group"):
        te.DotProductAttention(2, 8).set_context_parallel_group(SimpleNamespace(), [0, 1], None)


def test_a_second_derivative_names_the_operation():
    def run(rank):
        case = Case()
        q, k, v = (x.requires_grad_() for x in _qkv(case))
        out = create_attention(case, dist.group.WORLD)(q, k, v)
        (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="context-parallel attention have no derivative"):
            torch.autograd.grad(grad.sum(), k)

    run_on_threads(run, 2)


def test_helpers_reject_ranks_outside_of_the_group_and_other_formats():
    bounds = cumulative((8, 8))
    with pytest.raises(ValueError, match=r"rank=2 is outside 0..1"):
        get_cu_seqlens_on_cp_rank(bounds, bounds // 2, 2, 2, first_half=True, second_half=True)
    with pytest.raises(ValueError, match="qvk_format='bshd'"):
        get_batch_on_this_cp_rank(
            bounds,
            input_ids_padded=None,
            labels_padded=None,
            position_ids_padded=None,
            qvk_format="bshd",
        )


def test_errors_under_a_recipe_leave_its_state_unchanged():
    def run(rank):
        case = Case(heads=4, groups=4)
        module = create_attention(case, dist.group.WORLD)
        recipe = DelayedScaling(fp8_dpa=True)
        with te.autocast(enabled=True, recipe=recipe), pytest.raises(ValueError, match="14 tokens"):
            module(*_qkv(case, 7))
        return "scaling_fwd" in module.fp8_meta

    assert run_on_threads(run, 2) == [False, False]
