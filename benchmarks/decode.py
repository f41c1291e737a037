"""Microseconds and TB/s for one decoding step, contiguous and paged, with torch's SDPA and compiled FlexAttention.

    python benchmarks/decode.py [--json FILE] [--only TEXT] [--flex]

32 query heads on 8 key heads of 128 in bfloat16, one new token per sequence, all sequences as long as the context. TB/s
counts the keys and values once, the least that a step must read; the copy's rate is measured in the same way and counts
its reads and writes. GPU times are medians with the L2 cache overwritten before each call; host times are for calls
without synchronization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from record import GPU, copy_rate, options, parser, write
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from transformer_engine.pytorch.primitives.attention import mask
from transformer_engine.pytorch.primitives.attention.backends import triton
from transformer_engine.pytorch.primitives.attention.call import (
    AttentionCall,
    AttentionInputs,
    Switches,
)
from transformer_engine_tools.bench.measure import measure

HEADS, GROUPS, SIZE = 32, 8, 128
BATCHES = (1, 4, 16, 64, 128)
CONTEXTS = (1024, 4096, 8192, 16384, 65536)
PAGE = 64
FLEX = (
    (1, 8192),
    (16, 4096),
    (64, 1024),
    (64, 8192),
    (1, 65536),
)  # compiling takes seconds per shape
DTYPE = torch.bfloat16
LARGEST_CACHE = 20 << 30


class Step(NamedTuple):
    """A library's name and its function for the step."""

    name: str
    call: Callable[[], object]


def main() -> None:
    result = parser(__doc__, "run the cases whose name contains this, as in b64_s8192")
    result.add_argument(
        "--flex", action="store_true", help="FlexAttention too, for some of the shapes"
    )
    chosen = options(result)
    roof = copy_rate(1 << 30)
    print(f"a copy of 1 GiB: {roof:.2f} TB/s")
    rows = []
    for batch in BATCHES:
        for context in CONTEXTS:
            size = 2 * batch * context * GROUPS * SIZE * DTYPE.itemsize
            if f"b{batch}_s{context}".find(chosen.only) < 0 or size > LARGEST_CACHE:
                continue
            for step in steps(batch, context, chosen.flex and (batch, context) in FLEX):
                row = {
                    "case": f"b{batch}_s{context}",
                    "by": step.name,
                    **measure_step(step, size, roof),
                }
                rows.append(row)
                print(
                    " ".join(
                        f"{value:9.2f}" if isinstance(value, float) else f"{value:16}"
                        for value in row.values()
                    ),
                    flush=True,
                )
    write(chosen.json, copy_tb_s=roof, cases=rows)


def measure_step(step: Step, size: int, roof: float) -> dict[str, float | str]:
    """Return a step's figures, or the error if a library does not support it."""
    try:
        gpu_ms, host_ms, _ = measure(step.call, GPU)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        return {"error": str(error).splitlines()[0]}
    assert gpu_ms is not None and host_ms is not None
    rate = size / gpu_ms / 1e9
    return {
        "gpu_us": 1e3 * gpu_ms,
        "host_us": 1e3 * host_ms,
        "tb_s": rate,
        "percent_of_copy": 100.0 * rate / roof,
    }


def steps(batch: int, context: int, flex: bool) -> Iterator[Step]:
    q = torch.randn(batch, 1, HEADS, SIZE, device="cuda", dtype=DTYPE)
    k, v = (torch.randn(batch, context, GROUPS, SIZE, device="cuda", dtype=DTYPE) for _ in range(2))
    yield Step("triton", own(q, k, v, None))
    pages = torch.randperm(batch * context // PAGE, device="cuda").to(torch.int32).view(batch, -1)
    paged = (x.view(-1, PAGE, GROUPS, SIZE) for x in (k, v))
    yield Step("triton, pages", own(q, *paged, pages))
    dense = [x.transpose(1, 2) for x in (q, k, v)]
    yield Step("torch SDPA", lambda: scaled_dot_product_attention(*dense, enable_gqa=True))
    if flex:
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention, dynamic=False)
        yield Step("FlexAttention", lambda: compiled(*dense, enable_gqa=True))


def own(q: Tensor, k: Tensor, v: Tensor, pages: Tensor | None) -> Callable[[], object]:
    batch = q.shape[0]
    context = k.shape[1] if pages is None else pages.shape[1] * PAGE
    request = AttentionCall(
        dtype=DTYPE,
        device_type="cuda",
        batch=batch,
        heads=HEADS,
        groups=GROUPS,
        seqlen_q=1,
        seqlen_kv=context,
        head_dim_qk=SIZE,
        head_dim_v=SIZE,
        q_format="bshd",
        kv_format="bshd",
        mask=mask.resolve("padding_causal_bottom_right", None, None),
        scale=SIZE**-0.5,
        switches=Switches(),
        needs_gradient=False,
        capability=torch.cuda.get_device_capability(),
        page_size=0 if pages is None else PAGE,
        cached=True,
    )
    ones = torch.ones(batch, dtype=torch.int32, device="cuda")
    inputs = AttentionInputs(q, k, v, lengths_q=ones, lengths_kv=ones * context, page_table=pages)
    return lambda: triton.forward(request, inputs)


if __name__ == "__main__":
    main()
