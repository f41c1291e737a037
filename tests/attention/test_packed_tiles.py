"""Packed sequences whose tiles share one grid are bitwise equal to sequences with one grid each."""

from __future__ import annotations

import dataclasses
import math
import os

import pytest
import torch

if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

import triton
import triton.language as tl

from transformer_engine.common.kernels import attention, attention_backward, attention_delta
from transformer_engine.common.kernels.attention_problem import AttentionProblem
from transformer_engine.common.kernels.launch import Launch, Output
from transformer_engine.pytorch.runtime.launching import processors, run_program_into

HEADS, GROUPS, SIZE, SIZE_V = 2, 1, 32, 16
# Lengths around the tile sizes 32 and 64; empty sequences at the start, in the middle and at the end.
LENGTHS_Q = (0, 1, 31, 32, 33, 0, 0, 65, 64, 2, 0)
LENGTHS_KV = (5, 33, 0, 32, 31, 0, 3, 63, 96, 1, 0)
GAPS = (3, 0, 7, 0, 1, 2, 0, 0, 9, 0, 0)
BEHIND = 5

CASES = {
    "bottom right": {"window": (-1, 0), "bottom_right": True},
    "a window": {"window": (20, 9), "bottom_right": True},
    "a sink": {"sink": True},
    "dropout": {"window": (-1, 0), "dropout": 0.3},
}


def _starts(lengths: tuple[int, ...]) -> tuple[list[int], int]:
    """Sequence starts after their gaps, and the total token count."""
    starts, end = [], 0
    for length, gap in zip(lengths, GAPS, strict=True):
        starts.append(end + gap)
        end += gap + length
    return starts, end + BEHIND


def _problem(tokens: tuple[int, int], case: dict, device: torch.device) -> AttentionProblem:
    q, k, v = (
        (0, heads * size, size) for heads, size in ((HEADS, SIZE), (GROUPS, SIZE), (GROUPS, SIZE_V))
    )
    out = (0, HEADS * SIZE_V, SIZE_V)
    return AttentionProblem(
        dtype="float32",
        batch=len(LENGTHS_Q),
        heads=HEADS,
        groups=GROUPS,
        seqlen_q=tokens[0],
        seqlen_kv=tokens[1],
        size_qk=SIZE,
        size_v=SIZE_V,
        scales=(0.3, 1.0),
        window=case.get("window", (-1, -1)),
        bottom_right=case.get("bottom_right", False),
        dropout=case.get("dropout", 0.0),
        page_size=0,
        q=q,
        k=k,
        v=v,
        out=out,
        lse=(0, HEADS, 1),
        masked=(0,) * 4,
        bias=(0,) * 4,
        outer=(0, 0),
        varied=False,
        shared_memory=processors(device.index).shared_memory if device.type == "cuda" else 1 << 16,
    )


def _launch_outputs(
    launch: Launch, inputs: tuple, like: tuple, device: torch.device
) -> list[torch.Tensor | None]:
    """The launch's outputs, filled with their required initial value or with 7."""
    outputs = []
    for output, shape in zip(launch.outputs, like, strict=True):
        if output is not None:
            begins = 7.0 if output.begins is None else output.begins
            outputs.append(
                torch.full(output.shape or shape, begins, dtype=torch.float32, device=device)
            )
        else:
            outputs.append(None)
    run_program_into(launch, (*inputs, *outputs), inputs[0].device)
    return outputs


def _results(
    problem: AttentionProblem, tokens: tuple[int, int], case: dict, device: torch.device
) -> list[torch.Tensor]:
    """out, lse, tops, delta, [dsink], dq, dk, dv."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    queries, keys = tokens
    q, k, v = normal(queries, HEADS, SIZE), normal(keys, GROUPS, SIZE), normal(keys, GROUPS, SIZE_V)
    dout, sink = normal(queries, HEADS, SIZE_V), normal(HEADS)
    bounds = [
        torch.tensor(lengths, dtype=torch.int32, device=device)
        for lengths in (LENGTHS_Q, LENGTHS_KV)
    ]
    bounds += [
        torch.tensor(_starts(lengths)[0], dtype=torch.int32, device=device)
        for lengths in (LENGTHS_Q, LENGTHS_KV)
    ]
    args = (q, k, v, *bounds, None, None, None, None, None)
    sink = sink if case.get("sink") else None
    rng = torch.tensor([5, 1 << 33], device=device) if case.get("dropout") else None
    forward = attention.forward(problem, max_logit=True, keeps_lse=True, packed=True)
    result = _launch_outputs(
        forward, (*args, sink, rng, None), (dout.shape, (queries, HEADS), None), device
    )
    out, lse, tops = result
    first = attention_delta.delta(problem, problem.out, sink is not None)
    rows = (out, dout, lse, sink, bounds[0], bounds[2], None)
    delta, dsink = _launch_outputs(first, rows, ((queries, HEADS), None), device)
    context = (*args, rng, dout, lse, delta)
    (dq,) = _launch_outputs(
        attention_backward.queries(problem, problem.q, True), context, (q.shape,), device
    )
    second = attention_backward.keys(problem, (0, *problem.k), (0, *problem.v), 1, True)
    dk, dv = _launch_outputs(second, context, (k.shape, v.shape), device)
    return [x for x in (out, lse, tops, delta, dsink, dq, dk, dv) if x is not None]


@pytest.mark.parametrize("name", CASES)
def test_tiles_in_one_grid_are_bitwise_equal_to_one_grid_per_sequence(name, device):
    case, tokens = CASES[name], (_starts(LENGTHS_Q)[1], _starts(LENGTHS_KV)[1])
    problem = _problem(tokens, case, device)
    shared = dataclasses.replace(problem, tokens=tokens)
    for rows in (16, 32, 64):
        assert shared.query_tiles(rows)[1] == shared.key_tiles(rows)[1] == len(LENGTHS_Q)
        assert problem.query_tiles(rows)[1] == problem.key_tiles(rows)[1] == 0
    before, after = (_results(one, tokens, case, device) for one in (problem, shared))
    assert len(before) == (8 if case.get("sink") else 7)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)
    assert any((x != 0).any() for x in after[-3:])
    owned = torch.zeros(tokens[0], dtype=torch.bool, device=device)
    for start, length in zip(_starts(LENGTHS_Q)[0], LENGTHS_Q, strict=True):
        owned[start : start + length] = True
    out, lse = after[:2]
    assert (out[~owned] == 0).all() and (lse[~owned] == -torch.inf).all()
    assert torch.isfinite(out).all() and (out[owned] != 0).any()


def test_every_tile_has_a_program_and_few_programs_have_no_tile():
    """The programs suffice for every token distribution; the grid per sequence is kept if it is smaller."""
    generator = torch.Generator().manual_seed(1)
    problem = _problem((1000, 1000), {}, torch.device("cpu"))
    for rows in (16, 100, 128):
        shared = dataclasses.replace(problem, tokens=(1000, 1000)).query_tiles(rows)[0]
        for _ in range(50):
            cuts = (
                torch.randint(0, 1001, (len(LENGTHS_Q) - 1,), generator=generator)
                .sort()
                .values.tolist()
            )
            lengths = [b - a for a, b in zip([0, *cuts], [*cuts, 1000], strict=True)]
            assert sum(-(-length // rows) for length in lengths) <= shared
    alone = dataclasses.replace(problem, batch=1, tokens=(1000, 1000))
    assert alone.query_tiles(100) == (10, 0)
    many = dataclasses.replace(problem, batch=2000, tokens=(1000, 1000))
    assert many.key_tiles(100) == (10, 0)


def test_query_heads_share_key_tiles_if_the_batch_has_few_tiles():
    """A group with eight heads, 16 sequences in 8192 tokens: 144 programs, not 2048, for 132 SMs."""
    problem = _problem((8192, 8192), {}, torch.device("cpu"))
    problem = dataclasses.replace(problem, batch=16, heads=8, groups=1)
    packed = dataclasses.replace(problem, tokens=(8192, 8192))
    assert packed.key_parts(64, 132) == 8 and problem.key_parts(64, 132) == 1
    rows = attention_backward.keys_tile(problem)[1]
    for one, programs in ((packed, 8192 // rows + 16), (problem, 8192 // rows * 16)):
        launch = attention_backward.keys(one, (0, *one.k), (0, *one.v), 1, True)
        assert math.prod(launch.grid) == programs
        assert one.key_parts(rows, programs // 2) == 1, "two programs a multiprocessor suffice"
        assert one.key_parts(rows, programs // 2 + 1) == 8


@triton.jit
def places(lengths, result, size, ROWS: tl.constexpr, SEQUENCES: tl.constexpr):
    """Store every program's (tile, sequence) in found [programs, 2]."""
    program = tl.program_id(0)
    tile, sequence = attention.owned_tile(lengths, program, size, ROWS, SEQUENCES)
    tl.store(result + 2 * program, tile)
    tl.store(result + 2 * program + 1, sequence)


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("sequences", [2, 3, 33, 129, 300, 1024])
def test_every_tile_has_one_program_for_any_number_of_sequences(sequences, warps, device):
    """The lengths fill part of a warp, all warps once, or several registers per thread."""
    rows, generator = 16, torch.Generator().manual_seed(sequences)
    lengths = torch.randint(0, 4, (sequences,), generator=generator) * 11
    lengths[0] = lengths[-1] = 0
    lengths[sequences // 2] = size = 3 * rows + 1
    tiles = [
        (tile, index) for index, n in enumerate(lengths.tolist()) for tile in range(-(-n // rows))
    ]
    programs = int(lengths.sum()) // rows + sequences
    launch = Launch(
        places,
        (programs, 1, 1),
        (Output((programs, 2), "int32"),),
        (size,),
        (rows, sequences),
        warps,
    )
    result = torch.full((programs, 2), -1, dtype=torch.int32, device=device)
    run_program_into(launch, (lengths.to(device, torch.int32), result), result.device)
    without = [(-(-size // rows), 0)] * (programs - len(tiles))
    assert [tuple(index) for index in result.tolist()] == tiles + without
