"""Appending to a key-value cache: the reference against a loop over tokens, the Triton kernel against both."""

from __future__ import annotations

import pytest
import torch

from tests.primitives.by_kernels import Kernels
from tests.support.kernels import INTERPRETED
from transformer_engine.common.dispatch import use_backend
from transformer_engine.pytorch.primitives import kv_cache
from transformer_engine.pytorch.primitives.kv_cache import (
    CacheRequest,
    append,
    gather_pages,
    triton,
)


def append_by_reference(*arguments):
    with use_backend(kv_cache="reference"):
        append(*arguments)


DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
KERNEL = pytest.param(
    Kernels(kv_cache, "kv_cache").append, id="triton", marks=() if INTERPRETED else pytest.mark.gpu
)
APPEND = pytest.mark.parametrize("run", [pytest.param(append_by_reference, id="reference"), KERNEL])
FORMATS = pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
PAGED = pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])

LENGTH, PAGE = 12, 4
PAGES = [[7, 2, 0], [3, 1, 0], [0, 0, 0], [5, 8, 4]]
STARTS, NEW = [0, 3, 0, 7], [6, 1, 0, 5]


def cumulative(numbers):
    return torch.tensor([0, *numbers], device=DEVICE).cumsum(0).to(torch.int32)


def sample(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def new_tokens(tensor_format, heads, size, dtype, seed):
    """View into a wider buffer, as from a packed projection; padded sequences end with arbitrary values."""
    longest = max(NEW) + 2
    shape = {"sbhd": (longest, 4), "bshd": (4, longest), "thd": (sum(NEW) + 3,)}[tensor_format]
    return sample(*shape, heads, size + 5, dtype=dtype, seed=seed)[..., 2 : size + 2]


def token(new, tensor_format, sequence, index):
    if tensor_format == "thd":
        return new[sum(NEW[:sequence]) + index]
    return new[index, sequence] if tensor_format == "sbhd" else new[sequence, index]


def caches(paged, heads, sizes, dtype):
    shape = (9, PAGE) if paged else (5, LENGTH)
    return [sample(*shape, heads, size, dtype=dtype, seed=10 + i) for i, size in enumerate(sizes)]


def append_in_a_loop(new, cache, tensor_format, paged):
    cache = cache.clone()
    for sequence, (start, count) in enumerate(zip(STARTS, NEW, strict=True)):
        for index in range(count):
            position = start + index
            row = PAGES[sequence][position // PAGE] if paged else sequence
            location = position % PAGE if paged else position
            cache[row, location] = token(new, tensor_format, sequence, index).to(cache.dtype)
    return cache


def table(paged):
    return torch.tensor(PAGES, dtype=torch.int32, device=DEVICE) if paged else None


def totals():
    return [start + new for start, new in zip(STARTS, NEW, strict=True)]


@APPEND
@PAGED
@FORMATS
@pytest.mark.parametrize(
    "heads, sizes, dtypes",
    [
        (2, (8, 8), (torch.float32, torch.float32)),
        (3, (6, 10), (torch.bfloat16, torch.bfloat16)),
        (1, (5, 3), (torch.float32, torch.bfloat16)),
    ],
    ids=["even", "two-sizes", "narrowed"],
)
def test_tokens_are_appended_to_their_sequences_and_nothing_else_changes(
    run, tensor_format, paged, heads, sizes, dtypes
):
    new = [
        new_tokens(tensor_format, heads, size, dtypes[0], seed) for seed, size in enumerate(sizes)
    ]
    got = caches(paged, heads, sizes, dtypes[1])
    expected = [
        append_in_a_loop(x, cache, tensor_format, paged) for x, cache in zip(new, got, strict=True)
    ]
    run(*new, *got, table(paged), cumulative(NEW), cumulative(totals()), tensor_format, max(NEW))
    for ours, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=0)


@APPEND
@PAGED
def test_tokens_beyond_the_cache_are_left_out(run, paged):
    new = [sample(1, 4, 1, 8, seed=i) for i in range(2)]
    got = caches(paged, 1, (8, 8), torch.float32)
    expected = [cache.clone() for cache in got]
    for cache, x in zip(expected, new, strict=True):
        cache[7 if paged else 0, 3 if paged else LENGTH - 1] = x[0, 0]
    pages = torch.tensor([[1, 2, 7]], dtype=torch.int32, device=DEVICE) if paged else None
    run(*new, *got, pages, cumulative([4]), cumulative([LENGTH + 3]), "bshd", 4)
    for ours, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=0)


@pytest.mark.skipif(not INTERPRETED, reason="large shapes reach several programs on a GPU")
@PAGED
@FORMATS
def test_sequences_split_over_several_programs_are_appended_completely(
    tensor_format, paged, monkeypatch
):
    from transformer_engine.common.kernels import kv_cache as kernels

    monkeypatch.setattr(kernels, "_ELEMENTS", 32)  # two tokens per program
    triton._launch.cache_clear()
    new = [new_tokens(tensor_format, 2, 8, torch.float32, seed) for seed in range(2)]
    got = caches(paged, 2, (8, 8), torch.float32)
    expected = [
        append_in_a_loop(x, cache, tensor_format, paged) for x, cache in zip(new, got, strict=True)
    ]
    run = Kernels(kv_cache, "kv_cache").append
    run(*new, *got, table(paged), cumulative(NEW), cumulative(totals()), tensor_format, max(NEW))
    triton._launch.cache_clear()
    for ours, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=0)


@pytest.mark.parametrize("heads", [8, 32, 128])
@pytest.mark.parametrize("longest", [65_537, 131_072, 1_000_000, 1 << 20])
def test_a_prompt_of_a_million_tokens_fits_the_grid(longest, heads):
    pytest.importorskip("triton")
    request = CacheRequest(
        torch.bfloat16,
        torch.bfloat16,
        torch.device("cuda"),
        (torch.Size((1, longest, heads, 128)),) * 2,
        ((0, heads * 128, 128, 1),) * 2,
        tensor_format="bshd",
        batch=1,
        longest=longest,
        empty=False,
    )
    launch = triton._launch(request._replace(longest=triton._round_length(longest)))
    _, tokens, *_ = launch.constants
    assert longest <= launch.grid[0] * tokens <= longest * 9 // 8 + tokens
    assert launch.grid[1:] == (1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("tensor_format", ["bshd", "thd"])
def test_a_million_tokens_are_appended(tensor_format):
    longest, heads, size = 1_000_003, 8, 128
    shape = (1, longest, heads, size) if tensor_format == "bshd" else (longest, heads, size)
    new = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
    cache = torch.zeros(1, longest + 5, heads, size, dtype=torch.bfloat16, device=DEVICE)
    cu = cumulative([longest])
    Kernels(kv_cache, "kv_cache").append(
        new, new, cache, cache.clone(), None, cu, cu, tensor_format, longest
    )
    assert (
        torch.equal(cache[0, :longest], new.view(longest, heads, size))
        and not cache[0, longest:].any()
    )


@APPEND
def test_a_step_without_tokens_changes_nothing(run):
    got = caches(True, 2, (8, 8), torch.float32)
    expected = [cache.clone() for cache in got]
    for size in (0, 3):
        new = sample(4, size, 2, 8)
        run(new, new, *got, table(True), cumulative([0] * 4), cumulative(STARTS), "bshd", size)
    for ours, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=0)


@APPEND
@pytest.mark.skipif(INTERPRETED, reason="large shapes are for the GPU")
def test_a_long_prompt_and_many_heads_fill_their_pages(run):
    heads, size, page, lengths = 24, 128, 16, [300, 1, 77]
    new = sample(sum(lengths), heads, size, dtype=torch.bfloat16)
    pages = torch.randperm(80, generator=torch.Generator().manual_seed(1))[:60].view(3, 20)
    cache = torch.zeros(80, page, heads, size, dtype=torch.bfloat16, device=DEVICE)
    cu, where = cumulative(lengths), pages.to(DEVICE, torch.int32)
    run(new, new, cache, cache.clone(), where, cu, cu, "thd", max(lengths))
    joint = gather_pages(cache, where)
    for row, part in zip(joint, new.split(lengths), strict=True):
        torch.testing.assert_close(row[: len(part)], part, rtol=0, atol=0)
        assert not row[len(part) :].any()


@pytest.mark.skipif(INTERPRETED, reason="no operator dispatch in the interpreter")
def test_appending_traces_and_writes_in_a_compiled_graph():
    def step(new, k, v, cu):
        append(new * 2, new, k, v, None, cu, cu, "bshd", 3)
        return k.sum() + v.sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    new = sample(4, 3, 2, 8)
    pairs = [caches(False, 2, (8, 8), torch.float32) for _ in range(2)]
    cu = cumulative([3, 1, 2, 0])
    torch.testing.assert_close(compiled(new, *pairs[0], cu), step(new, *pairs[1], cu))
    for ours, reference in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_the_kernel_rejects_with_a_reason(dtype):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert "needs a CUDA device" in str(
        triton.unsupported_reason(CacheRequest(torch.float32, torch.float32, cpu))
    )
    for request in (
        CacheRequest(dtype, torch.float32, cuda),
        CacheRequest(torch.float32, dtype, cuda),
    ):
        assert str(dtype) in str(triton.unsupported_reason(request)) or "triton" in str(
            triton.unsupported_reason(request)
        )
