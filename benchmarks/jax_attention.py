"""Attention from JAX by our kernels and by cuDNN on one GPU.

    XLA_FLAGS=--xla_gpu_enable_triton_gemm=false python benchmarks/jax_attention.py attention.json

Forward and backward in bfloat16, as `te bench` measures. Cases that cuDNN does not support are compared with its rate
on another case of their layout. Rows are written one by one. --quick: small sizes by the reference, on any machine.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch

from transformer_engine.common.dispatch import use_backend
from transformer_engine.jax import attention
from transformer_engine_tools.bench.jax_workload import JaxWorkload
from transformer_engine_tools.bench.measure import FULL, QUICK

HEADS, GROUPS, DIM, SEGMENTS = 32, 8, 128, 8
VANILLA, SINKS = (
    attention.AttnSoftmaxType.VANILLA_SOFTMAX,
    attention.AttnSoftmaxType.LEARNABLE_SOFTMAX,
)
WHOLE, PACKED = attention.QKVLayout.BSHD_BSHD_BSHD, attention.QKVLayout.THD_THD_THD
# {case: (mask, softmax, layout, backends)}; the others are compared with the first case of their layout by cuDNN.
CASES = {
    "causal": (attention.AttnMaskType.CAUSAL_MASK, VANILLA, WHOLE, ("cudnn", "triton")),
    "bottom_right": (attention.AttnMaskType.CAUSAL_BOTTOM_RIGHT_MASK, VANILLA, WHOLE, ("triton",)),
    "sinks": (attention.AttnMaskType.CAUSAL_MASK, SINKS, WHOLE, ("triton",)),
    "packed": (attention.AttnMaskType.PADDING_CAUSAL_MASK, VANILLA, PACKED, ("cudnn", "triton")),
    "packed_sinks": (attention.AttnMaskType.PADDING_CAUSAL_MASK, SINKS, PACKED, ("triton",)),
}


def workload(case: str, batch: int, tokens: int) -> JaxWorkload:
    """The case on [batch, tokens]; packed: all tokens in one row, as sequences with equal lengths."""
    mask, softmax, layout, _ = CASES[case]
    packed = layout is PACKED
    rows = (1, batch * tokens) if packed else (batch, tokens)
    length = rows[1] // SEGMENTS

    def function(params: Any, state: Any, *arrays: jax.Array) -> jax.Array:
        descriptor = None
        if packed:
            ids = jnp.repeat(jnp.arange(1, SEGMENTS + 1, dtype=jnp.int32), length)[None]
            places = jnp.tile(jnp.arange(length, dtype=jnp.int32), SEGMENTS)[None]
            descriptor = attention.SequenceDescriptor.from_segment_ids_and_pos(ids, places)
        return attention.fused_attn(
            arrays[:3],
            None,
            descriptor,
            None,
            attention.AttnBiasType.NO_BIAS,
            mask,
            layout,
            softmax,
            DIM**-0.5,
            0.0,
            True,
            max_segments_per_seq=SEGMENTS if packed else 1,
            softmax_offset=arrays[3] if softmax is SINKS else None,
        )

    keys = jax.random.split(jax.random.key(0), 3)
    qkv = tuple(
        jax.random.normal(key, (*rows, heads, DIM), jnp.bfloat16)
        for key, heads in zip(keys, (HEADS, GROUPS, GROUPS), strict=True)
    )
    return JaxWorkload(function, (*qkv, jnp.zeros((1, HEADS, 1, 1))) if softmax is SINKS else qkv)


def measure(quick: bool) -> Iterator[dict[str, Any]]:
    """Yield one row per case and backend; the rate is cuDNN's GPU time on the same layout over the row's GPU time."""
    batch, tokens = (1, 64) if quick else (2, 8192)
    device, library = torch.device("cpu" if quick else "cuda"), {}
    for case, (_, _, layout, backends) in CASES.items():
        for backend in backends:
            work = workload(case, batch, tokens)
            forced = functools.partial(use_backend, jax_attention="reference" if quick else backend)
            work = JaxWorkload(work.function, work.inputs, context=forced)
            figures = work.measured(True, device, QUICK if quick else FULL)
            time_ms = figures.timing.eager_ms if quick else figures.timing.gpu_ms
            library.setdefault(layout, time_ms)
            rate = library[layout] / time_ms if time_ms and library[layout] else None
            row = {
                "case": f"dpa_fb/bf16/{case}_b{batch}_s{tokens}_h{HEADS}_{GROUPS}_d{DIM}",
                "by": "reference" if quick else backend,
            }
            yield row | {
                "gpu_ms": figures.timing.gpu_ms,
                "eager_ms": figures.timing.eager_ms,
                "rate": rate,
            }


def main() -> None:
    instance = argparse.ArgumentParser(description=__doc__)
    instance.add_argument("json", type=Path, help="where the rows are written")
    instance.add_argument(
        "--quick", action="store_true", help="small sizes by the reference: shows that it runs"
    )
    chosen = instance.parse_args()
    if not chosen.quick and jax.default_backend() == "cpu":
        raise SystemExit(
            "these figures need a GPU, and jax finds none; --quick shows that the script runs"
        )
    rows = []
    for row in measure(chosen.quick):
        rows.append(row)
        print(row)
        content = {"machine": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": rows}
        chosen.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
