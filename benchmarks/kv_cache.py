"""Times of a cached decoding step: appending to the cache, its lengths on the host, and a whole attention layer.

    python benchmarks/kv_cache.py [--json FILE]

GPU times are of ten calls in a CUDA graph, replayed; host times of calls that nobody waits for. 8 key heads of 128 in
bfloat16; the layer has 32 query heads, hidden size 4096, and 64 sequences of 8000 cached tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.primitives.kv_cache import append

HEADS, GROUPS, SIZE, HIDDEN = 32, 8, 128, 4096
BATCH, LENGTH, PAGE = 64, 8192, 64


class Case(NamedTuple):
    """New tokens that are appended."""

    name: str
    batch: int
    tokens: int
    tensor_format: str
    paged: bool


APPENDED = (
    Case("decode b64", 64, 1, "bshd", False),
    Case("decode b64 paged", 64, 1, "bshd", True),
    Case("prefill 8x4096", 8, 4096, "bshd", False),
    Case("prefill 8x4096 paged", 8, 4096, "bshd", True),
    Case("prefill 8x4096 sbhd paged", 8, 4096, "sbhd", True),
    Case("prefill 8x4096 thd paged", 8, 4096, "thd", True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the figures to this file")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("these figures need a CUDA device; torch.cuda.is_available() is False")
    figures = {
        "device": torch.cuda.get_device_name(),
        "append": {case.name: appended(case) for case in APPENDED},
        "lengths": {"contiguous": lengths(False), "paged": lengths(True)},
        "layer": {"contiguous": layer(False), "paged": layer(True)},
    }
    print(json.dumps(figures, indent=1))
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump(figures, file, indent=1)


def appended(case: Case) -> dict[str, float]:
    """Milliseconds, TB/s read and written, and microseconds of the host for keys and values."""
    _, batch, tokens, tensor_format, paged = case
    shape = {"bshd": (batch, tokens), "sbhd": (tokens, batch), "thd": (batch * tokens,)}[tensor_format]
    new = torch.randn(*shape, GROUPS, SIZE, device="cuda", dtype=torch.bfloat16)
    rows = (batch * LENGTH // PAGE, PAGE) if paged else (batch, LENGTH)
    k, v = (torch.zeros(*rows, GROUPS, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table = torch.randperm(rows[0], device="cuda").to(torch.int32).view(batch, -1) if paged else None
    count = torch.arange(batch + 1, device="cuda", dtype=torch.int32)

    cu_new, cu_cached = count * tokens, count * (tokens + 100)

    def run() -> None:
        append(new, new, k, v, table, cu_new, cu_cached, tensor_format, tokens)

    ms = gpu_ms(run)
    return {"gpu_ms": ms, "tb_s": 4 * new.numel() * new.element_size() / ms / 1e9, "host_us": host_us(run)}


def lengths(paged: bool) -> dict[str, float]:
    """Microseconds of the host: pre_step, once a step, and step, once a layer."""
    cache = te.InferenceParams(BATCH, LENGTH, GROUPS, SIZE, is_paged=paged)
    cache.allocate_memory(1)
    new = torch.randn(BATCH, 1, GROUPS, SIZE, device="cuda", dtype=torch.bfloat16)
    one_each = dict.fromkeys(range(BATCH), 1)
    return {
        "pre_step_us": host_us(lambda: cache.pre_step(one_each)),
        "step_us": host_us(lambda: cache.step(1, new, new, "bshd")),
    }


@torch.no_grad()
def layer(paged: bool) -> dict[str, float]:
    """Milliseconds of one layer's step, replayed and eager, and microseconds of the host."""
    module = te.MultiheadAttention(
        HIDDEN,
        HEADS,
        num_gqa_groups=GROUPS,
        attention_dropout=0.0,
        layer_number=1,
        qkv_format="bshd",
        params_dtype=torch.bfloat16,
        fuse_qkv_params=True,
        bias=False,
    ).eval()
    angles = te.attention.RotaryPositionEmbedding(SIZE)(LENGTH)
    cache = te.InferenceParams(BATCH, LENGTH, GROUPS, SIZE, is_paged=paged)
    cache.allocate_memory(1)
    cache.pre_step(dict.fromkeys(range(BATCH), 8000))
    cache.pre_step(dict.fromkeys(range(BATCH), 1))
    x = torch.randn(BATCH, 1, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        module(x, inference_params=cache, rotary_pos_emb=angles)

    replayed, host = gpu_ms(run), host_us(run)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        run()
    torch.cuda.synchronize()
    return {"graph_ms": replayed, "eager_ms": (time.perf_counter() - start) / 20 * 1e3, "host_us": host}


def gpu_ms(run: Callable[[], object], calls: int = 10, replays: int = 5) -> float:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / (calls * replays)


def host_us(run: Callable[[], object], calls: int = 100) -> float:
    for _ in range(10):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls * 1e6


if __name__ == "__main__":
    main()
