"""Times for a cached decoding step: appending to the cache, its lengths on the host, and a full attention layer.

    python benchmarks/kv_cache.py [--json FILE]

GPU times are for calls that are queued before they run; host times until a call returns. 8 key heads, head size 128,
in bfloat16; the layer has 32 query heads, hidden size 4096, and 64 sequences with 8000 cached tokens.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import torch
from record import GPU, options, parser, select_cases, write

import transformer_engine.pytorch as te
from transformer_engine.pytorch.primitives.kv_cache import append
from transformer_engine_tools.bench.measure import Effort, Timing, measure

HEADS, GROUPS, SIZE, HIDDEN = 32, 8, 128, 4096
BATCH, LENGTH, PAGE = 64, 8192, 64
EFFORT = Effort(warmup=10, fewest=50, most=100)


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
    chosen = options(parser(__doc__))
    figures = {
        "append": {case.name: measure_append(case) for case in select_cases(APPENDED, chosen.only)},
        "lengths": {"contiguous": lengths(False), "paged": lengths(True)},
        "layer": {"contiguous": layer(False), "paged": layer(True)},
    }
    print(json.dumps(figures, indent=1))
    write(chosen.json, **figures)


def measure_append(case: Case) -> dict[str, float]:
    """Milliseconds, TB/s read and written, and microseconds of the host for keys and values."""
    _, batch, tokens, tensor_format, paged = case
    shape = {"bshd": (batch, tokens), "sbhd": (tokens, batch), "thd": (batch * tokens,)}[
        tensor_format
    ]
    new = torch.randn(*shape, GROUPS, SIZE, device="cuda", dtype=torch.bfloat16)
    rows = (batch * LENGTH // PAGE, PAGE) if paged else (batch, LENGTH)
    k, v = (torch.zeros(*rows, GROUPS, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table = (
        torch.randperm(rows[0], device="cuda").to(torch.int32).view(batch, -1) if paged else None
    )
    count = torch.arange(batch + 1, device="cuda", dtype=torch.int32)

    cu_new, cu_cached = count * tokens, count * (tokens + 100)

    def run() -> None:
        append(new, new, k, v, table, cu_new, cu_cached, tensor_format, tokens)

    timing = measure(run, GPU, EFFORT)
    rate = 4 * new.numel() * new.element_size() / timing.busiest / 1e9
    return {"gpu_ms": timing.busiest, "tb_s": rate, "host_us": host_us(timing)}


def lengths(paged: bool) -> dict[str, float]:
    """Host microseconds: pre_step, once per step, and step, once per layer."""
    cache = te.InferenceParams(BATCH, LENGTH, GROUPS, SIZE, is_paged=paged)
    cache.allocate_memory(1)
    new = torch.randn(BATCH, 1, GROUPS, SIZE, device="cuda", dtype=torch.bfloat16)
    one_each = dict.fromkeys(range(BATCH), 1)
    return {
        "pre_step_us": host_us(measure(lambda: cache.pre_step(one_each), GPU, EFFORT)),
        "step_us": host_us(measure(lambda: cache.step(1, new, new, "bshd"), GPU, EFFORT)),
    }


@torch.no_grad()
def layer(paged: bool) -> dict[str, float]:
    """Milliseconds for one layer's step, on the GPU and in a loop, and host microseconds."""
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

    timing = measure(run, GPU, EFFORT)
    return {"gpu_ms": timing.busiest, "eager_ms": timing.eager_ms, "host_us": host_us(timing)}


def host_us(timing: Timing) -> float:
    """Microseconds until the call returns to the host."""
    assert timing.cpu_ms is not None
    return 1e3 * timing.cpu_ms


if __name__ == "__main__":
    main()
