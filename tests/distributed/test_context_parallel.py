"""Attention over ranks that share a sequence equals float64 attention of the whole sequence, with every gradient."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

import transformer_engine.pytorch as te
from tests.distributed.context_parallel_cases import (
    Case,
    convert_layout,
    create_attention,
    exact,
    packed,
    problem,
    rank_results,
    rank_tokens,
    shared,
)
from tests.distributed.ranks import run_on_ranks
from tests.distributed.threaded_ranks import run_on_threads
from tests.support.tolerances import ATTENDED, assert_as_good_as
from transformer_engine.common.dispatch import tables
from transformer_engine.pytorch.functions.attention.context_parallel.layout import (
    TokenOrder,
    half_of_sequences,
    order_of_ranks,
)
from transformer_engine.pytorch.functions.attention.context_parallel.merge import merge
from transformer_engine.pytorch.functions.attention.context_parallel.schedule import (
    plan_gathered_steps,
    ring_blocks,
)
from transformer_engine.pytorch.primitives.attention.call import AttentionCall
from transformer_engine.pytorch.primitives.attention.mask import Mask

SCHEMES = ("p2p", "all_gather", "a2a")
PACKED = {"layout": "thd", "lengths": (7, 13, 1), "padded": (16, 16, 16)}
ROWS = {"layout": "bshd", "lengths": (9, 16)}

# Attention options, each under every scheme; sizes and layouts alternate so that all pairs occur.
OPTIONS = [
    Case(mask="no_mask"),
    Case(mask="causal", groups=4),
    Case(layout="bshd", groups=4, head_dim=(8, 4)),
    Case(window=(5, 0)),
    Case(mask="no_mask", window=(5, 3), layout="bshd"),
    Case(mask="causal", keys=32),
    Case(mask="causal_bottom_right", keys=32, layout="bshd"),
    Case(mask="causal_bottom_right", keys=8, tokens=16, size=2),
    Case(softmax="off-by-one"),
    Case(softmax="learnable", layout="bshd"),
    Case(softmax="learnable", mask="no_mask", window=(3, 4)),
    Case(bias="bh"),
    Case(bias="1h", layout="bshd", mask="no_mask"),
    Case(bias="11"),
    Case(bias="b1", window=(6, 0), layout="bshd"),
    Case(arbitrary=True, mask="arbitrary"),
    Case(arbitrary=True, mask="arbitrary", window=(7, 7), layout="bshd"),
    Case(max_logit=True, groups=4),
    Case(recompute=True, layout="bshd"),
    Case(softcap=0.7, groups=4, max_logit=True),
    Case(softcap=0.7, bias="1h", window=(6, 0), layout="bshd"),
    Case(softcap=0.7, mask="padding_causal", softmax="learnable", **PACKED),
    Case(
        softcap=1.5, mask="no_mask", window=(5, 3), groups=4, softmax="off-by-one", recompute=True
    ),
    Case(softcap=0.7, mask="padding_causal", window=(4, 0), max_logit=True, **ROWS),
    Case(softcap=0.7, mask="padding_causal", window=(3, 0), groups=4, head_dim=(8, 4), **PACKED),
    Case(softcap=1.5, mask="causal_bottom_right", keys=32, bias="bh", layout="bshd"),
    Case(mask="padding", **ROWS),
    Case(mask="padding_causal", **ROWS),
    Case(mask="padding_causal", mask_tensor=True, **ROWS),
    Case(mask="padding_causal", window=(4, 0), **ROWS),
    Case(mask="padding", window=(4, 2), softmax="off-by-one", **ROWS),
    Case(mask="padding", layout="thd", lengths=(16, 0, 32, 16)),
    Case(mask="padding_causal", layout="thd", lengths=(0, 16, 32, 0), groups=4, head_dim=(8, 16)),
    Case(mask="padding_causal", **PACKED),
    Case(mask="padding", softmax="learnable", **PACKED),
    Case(mask="padding_causal", window=(3, 0), **PACKED),
    Case(mask="padding_causal", max_logit=True, **PACKED),
    Case(mask="padding_causal_bottom_right", keys_lengths=(8, 16, 3), **PACKED),
]
# Options for which the requested scheme is replaced by an exchange of heads.
BY_HEADS = [
    Case(alibi=True),
    Case(alibi=True, mask="no_mask", layout="bshd"),
    Case(mask="padding", window=(3, 2), **PACKED),
    Case(softcap=0.7, alibi=True, layout="bshd"),
    Case(softcap=0.7, alibi=True, mask="padding_causal", **PACKED),
]


def _sample_cases() -> list[Case]:
    """Every option under every scheme on 2 and 4 ranks by turns, some on 8."""
    cases = []
    for index, option in enumerate(OPTIONS + BY_HEADS):
        for scheme, comm in enumerate(SCHEMES):
            small = option.tokens == 16 and option.keys == 8
            size = 2 if small else (2, 4)[(index + scheme) % 2]
            cases.append(replace(option, comm=comm, size=size))
    cases += [Case(comm=comm, size=8, tokens=32, layout="bshd") for comm in SCHEMES]
    return cases


def _remaining() -> list[Case]:
    cases = []
    for index, option in enumerate(OPTIONS + BY_HEADS):
        for scheme, comm in enumerate(SCHEMES):
            if option.keys == 8:
                continue
            cases.append(replace(option, comm=comm, size=(4, 2)[(index + scheme) % 2]))
            if option.layout == "thd" or option.lengths:
                continue
            keys = None if option.keys is None else 64
            heads = {"groups": 8} if comm == "a2a" else {}
            cases.append(replace(option, comm=comm, size=8, tokens=32, keys=keys, **heads))
    return cases


# Heads are exchanged within groups of a ring. All options always run under each exchange alone, so that every second
# case is slow.
HIERARCHICAL = [
    replace(option, comm="a2a+p2p", size=4)
    for option in OPTIONS
    if option.keys != 8 and (option.mask != "padding_causal_bottom_right" or option.layout != "thd")
]
LARGE_HIERARCHY = [
    Case(comm="a2a+p2p", size=8, tokens=32),
    Case(comm="a2a+p2p", size=8, mask="padding_causal", **PACKED),
]


def _check(case: Case) -> None:
    full = exact(case)
    results = run_on_threads(partial(shared, case), case.size)
    for rank, result in enumerate(results):
        for name, expected in rank_results(case, full, rank).items():
            message = partial("rank {}, {}: {}".format, rank, name)
            torch.testing.assert_close(
                result[name].double(), expected.double(), **ATTENDED, msg=message
            )


@pytest.mark.parametrize("case", [*_sample_cases(), *HIERARCHICAL[::2], *LARGE_HIERARCHY], ids=str)
def test_ranks_compute_full_sequence_attention(case):
    _check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*_remaining(), *HIERARCHICAL[1::2]], ids=str)
def test_ranks_compute_full_sequence_attention_at_other_sizes(case):
    _check(case)


@pytest.mark.parametrize("comm", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_low_precision_errors_are_at_most_twice_the_one_device_errors(comm, dtype):
    case = Case(comm=comm, size=4, tokens=64, groups=4, dtype=dtype)
    full = exact(case)
    plain = run_on_threads(partial(shared, replace(case, size=1)), 1)[0]
    for rank, result in enumerate(run_on_threads(partial(shared, case), case.size)):
        alone = rank_results(case, plain, rank)
        for name, expected in rank_results(case, full, rank).items():
            assert_as_good_as(result[name], alone[name], expected)


def _run_on_processes(device: torch.device) -> list[torch.Tensor]:
    results = []
    for comm in SCHEMES:
        case = Case(comm=comm, groups=4)
        results += shared(case, dist.get_rank(), device).values()
    outputs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        outputs.append(_dropout_results(dist.get_rank(), device)[0])
    # Dropout depends only on each rank's seed.
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    return results


def test_processes_compute_full_sequence_attention(tmp_path):
    full = exact(Case(groups=4))
    for rank, result in enumerate(run_on_ranks(_run_on_processes, 2, tmp_path)):
        expected = list(rank_results(Case(groups=4), full, rank).values()) * len(SCHEMES)
        for actual, reference in zip(result, expected, strict=True):
            torch.testing.assert_close(actual.double(), reference, **ATTENDED)


def _run_on_four_processes(device: torch.device) -> list[torch.Tensor]:
    results = []
    for comm in (*SCHEMES, "a2a+p2p"):
        case = Case(comm=comm, size=4, tokens=64, groups=4)
        results += shared(case, dist.get_rank(), device).values()
    return results


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_four_gpus_compute_full_sequence_attention(tmp_path):
    alone = Case(size=4, tokens=64, groups=4)
    full = exact(alone)
    for rank, result in enumerate(run_on_ranks(_run_on_four_processes, 4, tmp_path)):
        expected = list(rank_results(alone, full, rank).values()) * (len(SCHEMES) + 1)
        for actual, reference in zip(result, expected, strict=True):
            torch.testing.assert_close(actual.double(), reference, **ATTENDED)


# Layers


def _layer(layout: str) -> te.TransformerLayer:
    mask = "padding_causal" if layout == "thd" else "causal"
    return te.TransformerLayer(
        32,
        64,
        4,
        num_gqa_groups=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type=mask,
        attn_input_format=layout,
        device="cpu",
        params_dtype=torch.float32,
        fuse_qkv_params=True,
    )


@pytest.mark.parametrize(
    ("layout", "comm"), [("sbhd", "p2p"), ("bshd", "all_gather"), ("thd", "p2p"), ("thd", "a2a")]
)
def test_a_layer_rotates_and_attends_by_the_positions_of_its_rank(layout, comm):
    lengths = (8, 16) if layout == "thd" else (16,)
    shape = (24,) if layout == "thd" else (16, 2) if layout == "sbhd" else (2, 16)
    x = torch.randn(*shape, 32, generator=torch.Generator().manual_seed(1))
    angles = te.attention.RotaryPositionEmbedding(8)(16).cpu()
    bounds = torch.tensor([0, 8, 24], dtype=torch.int32)
    options = {"rotary_pos_emb": angles}
    if layout == "thd":
        options |= {
            "cu_seqlens_q": bounds,
            "cu_seqlens_kv": bounds,
            "max_seqlen_q": 16,
            "max_seqlen_kv": 16,
        }
    full, layers = _layer(layout), [_layer(layout) for _ in range(2)]
    for layer in layers:
        layer.load_state_dict(full.state_dict())
    alone = x.clone().requires_grad_()
    y = full(alone, **options)
    y.square().sum().backward()
    axis = 1 if layout == "bshd" else 0

    def run(rank):
        layers[rank].set_context_parallel_group(dist.group.WORLD, [0, 1], None, comm)
        tokens = torch.tensor(rank_tokens(lengths, 2, rank))
        local = x.index_select(axis, tokens).requires_grad_()
        out = layers[rank](local, **options)
        out.square().sum().backward()
        assert local.grad is not None and alone.grad is not None
        torch.testing.assert_close(out, y.index_select(axis, tokens), **ATTENDED)
        torch.testing.assert_close(local.grad, alone.grad.index_select(axis, tokens), **ATTENDED)
        return {name: parameter.grad for name, parameter in layers[rank].named_parameters()}

    first, second = run_on_threads(run, 2)
    for name, parameter in full.named_parameters():
        torch.testing.assert_close(first[name] + second[name], parameter.grad, rtol=2e-5, atol=2e-4)


# Dropout, determinism, explanations


def _dropout_results(
    rank: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of a rank with dropout, and <dout, out> and <dv, v>, summed over the ranks."""
    case = Case(comm="p2p", size=2, tokens=32)
    argument, rows = problem(case, device), rank_tokens((32, 32), 2, rank)
    q, k, v = (
        convert_layout(argument[name][rows], "sbhd", 2).double().requires_grad_() for name in "qkv"
    )
    module = create_attention(case, dist.group.WORLD)
    module.attention_dropout = 0.5
    out = module(q, k, v)
    (grad_v,) = torch.autograd.grad(out.sum(), v)
    sums = torch.stack((out.sum().detach(), (grad_v * v).sum().detach()))
    dist.all_reduce(sums)
    return out.detach(), sums


def test_dropout_of_both_passes_is_the_same():
    # The output is linear in v: <dout, out(v)> = <dv, v> if both passes have the same dropout mask.
    for out, (product, gradient) in run_on_threads(_dropout_results, 2):
        assert bool((out != 0).any())
        torch.testing.assert_close(product, gradient, rtol=1e-5, atol=1e-5)


def test_explain_names_the_scheme_and_why_others_are_not_used():
    table = tables["context_parallel"]
    call = _call(Mask("padding_causal", (3, 0), False), q_format="thd", kv_format="thd")
    verdicts = {
        verdict.backend: verdict for verdict in table.explain(table.described((call, "p2p", 1, 2)))
    }
    assert "window_size=(3, 0)" in (verdicts["p2p"].reason or "")
    assert verdicts["all_gather"].chosen


def test_the_backward_pass_saves_only_the_ranks_own_tensors():
    def run(rank):
        case = Case(comm="p2p", size=4, tokens=32)
        argument, rows = problem(case), rank_tokens((32, 32), 4, rank)
        q, k, v = (
            convert_layout(argument[name][rows], "sbhd", 2).requires_grad_() for name in "qkv"
        )
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            out = create_attention(case, dist.group.WORLD)(q, k, v)
        # q, k, v and the output, and the log-sum-exp: one number per query and head.
        return sum(
            x.numel() for x in saved
        ), q.numel() + k.numel() + v.numel() + out.numel() + q.numel() // 8

    for saved, expected in run_on_threads(run, 4):
        assert saved == expected


# Parts


def _call(mask: Mask, length: int = 16, **fields) -> AttentionCall:
    formats = {"q_format": "sbhd", "kv_format": "sbhd"} | fields
    return AttentionCall.on(
        "cpu",
        False,
        dtype=torch.float32,
        batch=1,
        heads=2,
        groups=2,
        seqlen_q=length,
        seqlen_kv=length,
        head_dim_qk=8,
        head_dim_v=8,
        mask=mask,
        scale=1.0,
        **formats,
    )


def _visible_pairs(
    block, length_q: int, length_k: int, rows: list[int], columns: list[int]
) -> torch.Tensor:
    """Query-key pairs in the full sequence that a block computes."""
    i = torch.tensor(rows[block.queries.first : block.queries.stop])
    j = torch.tensor(columns[block.keys.first : block.keys.stop])
    a, b = torch.arange(len(i))[:, None], torch.arange(len(j))[None]
    distance = b - a - (len(j) - len(i) if block.mask.bottom_right else 0)
    left, right = block.mask.window
    visible = torch.ones(len(i), len(j), dtype=torch.bool)
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    pairs = torch.zeros(length_q, length_k, dtype=torch.int)
    pairs[i[:, None], j[None]] = visible.int()
    return pairs


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "window", [(-1, -1), (-1, 0), (0, 0), (3, 0), (9, 0), (4, 2), (-1, 5), (0, 7), (40, 40)]
)
@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("square", [False, True])
def test_blocks_on_all_ranks_cover_every_visible_pair_once(size, window, bottom_right, square):
    length_q = 4 * size
    length_k = length_q if square else 6 * size
    name = "causal" if window[1] == 0 else "no_mask"
    call = replace(_call(Mask(name, window, bottom_right)), seqlen_q=length_q, seqlen_kv=length_k)
    distance = torch.arange(length_k)[None] - torch.arange(length_q)[:, None]
    distance = distance - (length_k - length_q if bottom_right else 0)
    visible = (distance >= -window[0]) | (window[0] < 0)
    visible = visible & ((distance <= window[1]) | (window[1] < 0))
    of_ring = torch.zeros_like(distance, dtype=torch.int)
    of_gather = torch.zeros_like(of_ring)
    for rank in range(size):
        rows = rank_tokens((length_q,), size, rank)
        for owner in range(size):
            columns = rank_tokens((length_k,), size, owner)
            for block in ring_blocks(call, size, rank, owner):
                of_ring += _visible_pairs(block, length_q, length_k, rows, columns)
        *local, last = plan_gathered_steps(call, size, rank)
        for step in local:
            for block in step:
                of_gather += _visible_pairs(
                    block, length_q, length_k, rows, rank_tokens((length_k,), size, rank)
                )
        for block in last:
            of_gather += _visible_pairs(block, length_q, length_k, rows, list(range(length_k)))
    assert torch.equal(of_ring, visible.int())
    assert torch.equal(of_gather, visible.int())


def test_causal_work_is_balanced_over_ranks_and_steps():
    call = _call(Mask("causal", (-1, 0), False), 64)
    for size in (2, 4, 8):
        for rank in range(size):
            for step in range(1, size):
                (block,) = ring_blocks(call, size, rank, (rank - step) % size)
                rows, columns = (part.stop - part.first for part in (block.queries, block.keys))
                assert rows * columns == (64 // size) ** 2 // 2


def test_gathered_causal_work_is_balanced_and_has_one_masked_square_per_rank():
    call = _call(Mask("causal", (-1, 0), False), 64)
    for size in (2, 4, 8):
        works = []
        for rank in range(size):
            local, rest = plan_gathered_steps(call, size, rank)
            assert [block.mask.name for block in local] == ["causal"]
            assert {block.mask.name for block in rest} == {"no_mask"}
            sizes = [
                [part.stop - part.first for part in (block.queries, block.keys)] for block in rest
            ]
            works.append(sum(rows * columns for rows, columns in sizes))
        assert len(set(works)) == 1


def test_merged_attention_ignores_fully_masked_keys():
    out, other = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    lse = torch.tensor([[0.3, -torch.inf, -torch.inf], [0.1, 2.0, -torch.inf]])
    nothing = torch.full_like(lse, -torch.inf)
    same, same_lse = merge(out, lse, other, nothing, 0)
    assert torch.equal(same, out) and torch.equal(same_lse, lse)
    selection, taken_lse = merge(torch.zeros_like(out), nothing, other, lse, 0)
    visible = (lse > -torch.inf).t()[..., None]
    assert torch.equal(selection, torch.where(visible, other, 0.0)) and torch.equal(taken_lse, lse)


def test_token_orders_are_inverses_and_halves_are_all_tokens():
    bounds = torch.tensor([0, 8, 24, 32], dtype=torch.int32)
    for tensor_format, full in (
        ("sbhd", torch.randn(16, 2, 3, 1)),
        ("bshd", torch.randn(2, 16, 3, 1)),
        ("thd", torch.randn(40, 3, 1)),  # 8 tokens behind the last sequence
    ):
        order = TokenOrder(tensor_format, 4, bounds)
        assert torch.equal(order.whole(order.parts(full)), full)
    assert order_of_ranks(bounds, 40, 4).sort().values.tolist() == list(range(40))
    halves = torch.cat([half_of_sequences(bounds, 40, half) for half in (0, 1)])
    assert halves.sort().values.tolist() == list(range(40))
    assert packed(
        convert_layout(torch.arange(24.0).reshape(24, 1, 1), "sbhd", 2), "sbhd"
    ).flatten().tolist() == list(range(24))
