"""CPLoadBalancingStrategy: every rank's tokens and bounds, and attention on contiguous pieces in float64."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import transformer_engine.pytorch as te
from tests.distributed.threaded_ranks import run_on_threads
from tests.support import programs
from tests.support.tolerances import ATTENDED
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import (
    attn_forward_func_with_cp,
    get_batch_on_this_cp_rank,
    get_no_load_balance_thd_causal_metadata,
    get_thd_partitioned_indices,
    restore_thd_gathered_kv,
    unrestore_thd_gathered_kv,
    validate_no_load_balance_thd_metadata,
)
from transformer_engine.pytorch.attention.dot_product_attention.utils import (
    get_full_cu_seqlens,
    get_thd_padding_mask,
)

SWAP, CONTIGUOUS = te.CPLoadBalancingStrategy
REAL, PADDED = (
    torch.tensor([0, 7, 21], dtype=torch.int32),
    torch.tensor([0, 8, 24], dtype=torch.int32),
)
HEADS, GROUPS, SIZE = 4, 2, 8


def test_the_members_have_the_names_of_the_original():
    assert (SWAP.name, SWAP.value) == ("DUAL_CHUNK_SWAP", "dual_chunk_swap")
    assert (CONTIGUOUS.name, CONTIGUOUS.value) == ("NO_LOAD_BALANCE", "no_load_balance")


@pytest.mark.parametrize(
    ("strategy", "rank", "tokens"),
    [
        (SWAP, 0, [0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23]),
        (SWAP, 1, [2, 3, 4, 5, *range(12, 20)]),
        (CONTIGUOUS, 0, list(range(12))),
        (CONTIGUOUS, 1, list(range(12, 24))),
    ],
)
def test_tokens_of_a_rank(strategy, rank, tokens):
    result = get_thd_partitioned_indices(PADDED, 24, 2, rank, load_balancing_strategy=strategy)
    assert result.tolist() == tokens and result.dtype == torch.int32


@pytest.mark.parametrize(
    ("rank", "bounds"),
    [(0, ([0, 7, 11], [0, 8, 12], [0, 7, 11])), (1, ([0, 0, 10], [0, 0, 12], [0, 7, 21]))],
)
def test_bounds_of_a_piece(rank, bounds):
    result = get_no_load_balance_thd_causal_metadata(REAL, PADDED, 24, 2, rank)
    assert tuple(part[0].tolist() for part in result) == bounds
    assert all(len(part) == 1 and part[0].dtype == torch.int32 for part in result)


@pytest.mark.parametrize("strategy", [SWAP, CONTIGUOUS])
def test_gathered_keys_are_restored(strategy):
    x = torch.arange(24.0)[:, None]
    gathered = torch.cat(
        [x[get_thd_partitioned_indices(PADDED, 24, 2, r, None, strategy).long()] for r in range(2)]
    )
    assert torch.equal(restore_thd_gathered_kv(gathered, PADDED, 2, strategy), x)
    assert torch.equal(unrestore_thd_gathered_kv(x, PADDED, 2, strategy), gathered)


def test_masks_and_bounds_of_packed_and_full_sequences():
    assert get_thd_padding_mask(26, REAL, PADDED).nonzero().flatten().tolist() == [
        7,
        22,
        23,
        24,
        25,
    ]
    full = get_full_cu_seqlens(3, 5, torch.device("cpu"))
    assert full.tolist() == [0, 5, 10, 15] and full.dtype == torch.int32


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            (REAL, PADDED, 24, 5),
            "24 packed tokens are not a multiple of 5 ranks; pad the buffer to 25",
        ),
        ((REAL, PADDED, 32, 2), "cu_seqlens_padded ends at 24, the buffer has 32 tokens"),
        ((REAL[:2], PADDED, 24, 2), r"cu_seqlens is \[2\] and cu_seqlens_padded \[3\]"),
        ((PADDED, REAL, 24, 2), "do not bound sequences with padding"),
        ((REAL + 1, PADDED, 24, 2), "do not bound sequences with padding"),
    ],
)
def test_bounds_that_ranks_cannot_share_raise(arguments, words):
    with pytest.raises(ValueError, match=words):
        validate_no_load_balance_thd_metadata(*arguments)
    validate_no_load_balance_thd_metadata(REAL, PADDED, 24, 2)


def test_batches_of_a_rank_are_contiguous_pieces(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    ids, labels, positions = get_batch_on_this_cp_rank(
        PADDED,
        torch.arange(24),
        torch.arange(24)[None],
        position_ids_padded=None,
        cp_group=None,
        qvk_format="thd",
        load_balancing_strategy=CONTIGUOUS,
    )
    assert ids is not None and ids.tolist() == list(range(12, 24)) and positions is None
    assert labels is not None and labels.tolist() == [list(range(12, 24))]
    with pytest.raises(
        AssertionError, match="load_balancing_strategy=1 is not a CPLoadBalancingStrategy"
    ):
        get_batch_on_this_cp_rank(
            PADDED,
            torch.arange(24),
            labels_padded=None,
            position_ids_padded=None,
            cp_group=None,
            qvk_format="thd",
            load_balancing_strategy=1,
        )  # pyright: ignore


# Real and padded lengths; pieces of 2, 3 and 4 ranks begin and end within, before and behind sequences.
BUFFERS = {
    "one sequence": ((24,), (24,)),
    "padding at the ends of pieces": ((7, 14), (8, 16)),
    "a piece of padding": ((2, 3, 1), (2, 3, 19)),
    "short and empty sequences": ((3, 0, 5, 1, 9), (3, 4, 5, 2, 10)),
}


OPTIONS: list[dict[str, Any]] = [
    {},
    {"softcap": 0.7, "return_max_logit": True},
    {"softmax_type": "learnable"},
    {"alibi": True},
    {"function": True},
    {"function": True, "softmax_type": "learnable", "return_max_logit": True},
]


def bounds(lengths) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def whole_attention(leaves, real, padded, softcap=0.0, sink=None, slopes=None):
    """Causal attention of each packed sequence, in the leaves' dtype; (out [t, h, d], largest logits [h])."""
    q, k, v = leaves
    k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    rows, best = [], torch.full((HEADS,), -math.inf, dtype=q.dtype)
    start = 0
    for length, extent in zip(real, padded, strict=True):
        a, b, c = (x[start : start + length].transpose(0, 1) for x in (q, k, v))
        scores = a @ b.transpose(1, 2) / math.sqrt(SIZE)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(length)[None] - torch.arange(length)[:, None]
        if slopes is not None:
            scores = scores - slopes[:, None, None] * distance.abs()
        scores = scores.masked_fill(distance > 0, -math.inf)
        if length:
            best = torch.maximum(best, scores.detach().amax((1, 2)))
        column = None if sink is None else sink[:, None, None].expand(-1, length, 1)
        p = (scores if column is None else torch.cat((column, scores), -1)).softmax(-1)
        p = p if column is None else p[..., 1:]
        rows.append((p @ c).transpose(0, 1))
        rows.append(q.new_zeros(extent - length, HEADS, SIZE))
        start += extent
    return torch.cat(rows), best


def rank_attention(buffer: str, size: int, options: dict[str, Any], rank: int):
    real, padded = BUFFERS[buffer]
    generator = torch.Generator().manual_seed(3)
    total = sum(padded)
    full = [
        torch.randn(total, h, SIZE, generator=generator) for h in (HEADS, GROUPS, GROUPS, HEADS)
    ]
    tokens = get_thd_partitioned_indices(bounds(padded), total, size, rank, None, CONTIGUOUS).long()
    q, k, v, grad = (x[tokens].clone() for x in full)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    cu, starts = bounds(real), bounds(padded)
    lengths = {
        "cu_seqlens_q": cu,
        "cu_seqlens_kv": cu,
        "cu_seqlens_q_padded": starts,
        "cu_seqlens_kv_padded": starts,
    }
    sizes = {"max_seqlen_q": max(padded), "max_seqlen_kv": max(padded)}
    options = dict(options)
    function, alibi, sink = options.pop("function", False), options.pop("alibi", False), None
    if options.get("softmax_type") == "learnable":
        sink = torch.linspace(-1, 1, HEADS).requires_grad_()
    if function:
        out = attn_forward_func_with_cp(
            True,
            *leaves,
            cu,
            cu,
            max(padded),
            max(padded),
            starts,
            starts,
            0.0,
            dist.group.WORLD,
            None,
            None,
            "all_gather",
            None,
            "thd",
            "padding_causal",
            softmax_offset=sink,
            load_balancing_strategy=CONTIGUOUS,
            **options,
        )
    else:
        layer = te.DotProductAttention(
            HEADS, SIZE, GROUPS, qkv_format="thd", attn_mask_type="padding_causal", **options
        )
        if sink is not None:
            layer.softmax_offset = torch.nn.Parameter(sink.detach())
            sink = layer.softmax_offset
        layer.set_context_parallel_group(dist.group.WORLD, None, None, "all_gather", CONTIGUOUS)
        kind = {"core_attention_bias_type": "alibi"} if alibi else {}
        out = layer(*leaves, **lengths, **sizes, **kind)
    out, best = out if isinstance(out, tuple) else (out, None)
    out = out.reshape(-1, HEADS, SIZE)
    grads = torch.autograd.grad(out, leaves if sink is None else [*leaves, sink], grad)
    return tokens, full, out.detach(), grads, best


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (3, {}),
        *itertools.product((2, 4), OPTIONS),
    ],
    ids=str,
)
@pytest.mark.parametrize("buffer", BUFFERS)
def test_pieces_compute_the_attention_of_the_whole_buffer(buffer, size, options):
    results = run_on_threads(partial(rank_attention, buffer, size, options), size)
    real, padded = BUFFERS[buffer]
    full = results[0][1]
    leaves = [x.double().requires_grad_() for x in full[:3]]
    sink = (
        torch.linspace(-1, 1, HEADS).double().requires_grad_()
        if "softmax_type" in options
        else None
    )
    slopes = (
        torch.exp2(-8.0 * torch.arange(1, HEADS + 1) / HEADS).double()
        if options.get("alibi")
        else None
    )
    expected, best = whole_attention(
        leaves, real, padded, options.get("softcap", 0.0), sink, slopes
    )
    reference = torch.autograd.grad(
        expected, leaves if sink is None else [*leaves, sink], full[3].double()
    )
    for tokens, _, out, grads, largest in results:
        torch.testing.assert_close(out.double(), expected[tokens].detach(), **ATTENDED)
        for got, exact in zip(grads[:3], reference[:3], strict=True):
            torch.testing.assert_close(got.double(), exact[tokens], **ATTENDED)
        if sink is not None:
            torch.testing.assert_close(grads[3].double(), reference[3], **ATTENDED)
        if options.get("return_max_logit"):
            torch.testing.assert_close(largest.double(), best, **ATTENDED)


def catch_assertion(changes: dict[str, Any], rank: int) -> str:
    """The AssertionError that a call on 2 ranks raises."""
    q, k = torch.randn(12, 2, 16), torch.randn(12, 2, 16)
    options = {"qkv_format": "thd", "attn_mask_type": "padding_causal", **changes.get("layer", {})}
    layer = te.DotProductAttention(2, 16, **options)
    arguments: dict[str, Any] = (
        {"cu_seqlens_q": REAL, "cu_seqlens_kv": REAL} if options["qkv_format"] == "thd" else {}
    )
    arguments |= (
        {"cu_seqlens_q_padded": PADDED, "cu_seqlens_kv_padded": PADDED} if arguments else {}
    )
    arguments |= changes.get("call", {})
    if options["qkv_format"] != "thd":
        q, k = q[:, None], k[:, None]
    state = te.autocast(enabled="recipe" in changes, recipe=changes.get("recipe"))
    with state, pytest.raises(AssertionError) as error:
        layer.set_context_parallel_group(
            dist.group.WORLD,
            None,
            None,
            changes.get("comm", "all_gather"),
            changes.get("strategy", CONTIGUOUS),
        )
        layer(q, k, k, **arguments)
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"strategy": "no_load_balance"},
            "load_balancing_strategy='no_load_balance' is not a CPLoadBalancingStrategy",
        ),
        (
            {"layer": {"qkv_format": "sbhd", "attn_mask_type": "causal"}},
            "qkv_format='sbhd'; it takes 'thd'",
        ),
        ({"comm": "p2p"}, "cp_comm_type='p2p'; it takes 'all_gather'"),
        ({"layer": {"attn_mask_type": "padding"}}, "attn_mask_type='padding'"),
        ({"layer": {"window_size": (3, 0)}}, "window_size=(3, 0)"),
        ({"call": {"cu_seqlens_kv": REAL.clone()}}, "in different tensors"),
        ({"call": {"score_mod": lambda score, *_: score}}, "score_mod"),
        ({"recipe": DelayedScaling(fp8_dpa=True)}, "FP8 attention"),
    ],
    ids=lambda value: "",
)
def test_calls_that_need_balanced_ranks_raise(changes, words):
    for message in run_on_threads(partial(catch_assertion, changes), 2):
        assert words in message, message


def layer_outputs(strategy, rank):
    generator = torch.Generator().manual_seed(5)  # threads share torch's own
    layer = te.MultiheadAttention(
        16,
        2,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        attention_dropout=0.0,
        device="cpu",
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    x, grad = (torch.randn(24, 16, generator=generator) for _ in range(2))
    angles = te.RotaryPositionEmbedding(8)(16).cpu()
    arguments = {
        "cu_seqlens_q": REAL,
        "cu_seqlens_kv": REAL,
        "cu_seqlens_q_padded": PADDED,
        "cu_seqlens_kv_padded": PADDED,
        "max_seqlen_q": 16,
        "max_seqlen_kv": 16,
        "rotary_pos_emb": angles,
    }
    tokens = torch.arange(24)
    if strategy is not None:
        layer.set_context_parallel_group(dist.group.WORLD, None, None, "all_gather", strategy)
        tokens = get_thd_partitioned_indices(PADDED, 24, 2, rank, None, strategy).long()
    x = x[tokens].requires_grad_()
    out = layer(x, **arguments)
    (result,) = torch.autograd.grad(out, x, grad[tokens])
    return tokens, out.detach(), result


@pytest.mark.parametrize("strategy", [SWAP, CONTIGUOUS])
def test_a_layer_rotates_by_the_positions_of_its_tokens(strategy):
    _, expected, reference = layer_outputs(strategy=None, rank=0)
    for tokens, out, grad in run_on_threads(partial(layer_outputs, strategy), 2):
        torch.testing.assert_close(out, expected[tokens], **ATTENDED)
        torch.testing.assert_close(grad, reference[tokens], **ATTENDED)


def create_balanced_function(rank):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(8, 1, h, SIZE, generator=generator) for h in (HEADS, GROUPS, GROUPS))
    tokens = torch.tensor([0, 1, 6, 7] if rank == 0 else [2, 3, 4, 5])
    results = []
    for comm in ("p2p", "all_gather", "a2a"):
        local = [x[tokens] for x in (q, k, v)]
        rest = (0.0, dist.group.WORLD, [0, 1], None, comm, None, "sbhd", "causal")
        results.append(
            attn_forward_func_with_cp(False, *local, None, None, 8, 8, None, None, *rest)
        )
    return tokens, results, te.DotProductAttention(HEADS, SIZE, GROUPS)(q, k, v)


def test_the_function_computes_every_balanced_scheme():
    for tokens, results, expected in run_on_threads(create_balanced_function, 2):
        for out in results:
            assert out.shape == (4, 1, HEADS, SIZE)
            torch.testing.assert_close(out.flatten(-2), expected[tokens], **ATTENDED)


GRAPHS = """
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import transformer_engine.pytorch as te

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
cu_seqlens, padded = (torch.tensor(x, dtype=torch.int32) for x in ([0, 7, 21], [0, 8, 24]))
bounds = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
bounds |= {"cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded, "max_seqlen_q": 16, "max_seqlen_kv": 16}
q = torch.randn(12, 2, 8)
for comm, strategy in zip(("p2p", "all_gather"), te.CPLoadBalancingStrategy):
    layer = te.DotProductAttention(2, 8, qkv_format="thd", attn_mask_type="padding_causal")
    layer.set_context_parallel_group(dist.group.WORLD, None, None, comm, strategy)
    print(list(torch.compile(layer, backend="aot_eager")(q, q, q, **bounds).shape))
    torch._dynamo.reset()
    try:
        torch.compile(layer, backend="aot_eager", fullgraph=True)(q, q, q, **bounds)
    except torch._dynamo.exc.Unsupported as error:
        print("attention of context-parallel ranks communicates" in str(error))
"""


def test_a_compiled_call_communicates_outside_of_graphs_and_states_the_reason(tmp_path):
    program = tmp_path / "graphs.py"
    program.write_text(GRAPHS)
    assert programs.output_without_gpu(str(program)).splitlines() == ["[12, 16]", "True"] * 2
