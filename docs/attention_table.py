"""Write the tables in docs/attention.md: backend features and measurements; --check only compares.

python docs/attention_table.py [--check]

Calls simulate an H200 with every optional package installed; no GPU and no package is needed.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch
from generated import ROOT, write

from transformer_engine.common import optional
from transformer_engine.common.hardware import nvidia
from transformer_engine.pytorch.attention.dot_product_attention.score_mod import GraphScoreMod
from transformer_engine.pytorch.primitives.attention.backends import (
    cudnn,
    flash2,
    flash3,
    flash4,
    flex,
    triton,
)
from transformer_engine.pytorch.primitives.attention.call import AttentionCall, Switches
from transformer_engine.pytorch.primitives.attention.choose import TABLE, preference
from transformer_engine.pytorch.primitives.attention.mask import resolve

PAGE = ROOT / "docs" / "attention.md"
MEASURED = ROOT / "benchmarks" / "results" / "attention_backends_h200.json"


def plain(**changes: Any) -> AttentionCall:
    """Causal attention with a gradient, [2, 4096, 16, 128] in bfloat16, with changes."""
    call = AttentionCall(
        dtype=torch.bfloat16,
        device_type="cuda",
        batch=2,
        heads=16,
        groups=16,
        seqlen_q=4096,
        seqlen_kv=4096,
        head_dim_qk=128,
        head_dim_v=128,
        q_format="bshd",
        kv_format="bshd",
        mask=resolve("causal", window_size=None, bottom_right_diagonal=None),
        scale=0.1,
        switches=Switches(),
        hardware=nvidia(9, 0),
    )
    return replace(call, **changes)


def masked(name: str, window: tuple[int, int] | None = None, **changes: Any) -> AttentionCall:
    return plain(mask=resolve(name, window, None), **changes)


def packed(**changes: Any) -> AttentionCall:
    mask = resolve("padding_causal", window_size=None, bottom_right_diagonal=None)
    return plain(
        **{"q_format": "thd", "kv_format": "thd", "mask": mask, "same_lengths": True, **changes}
    )


def decoding(**changes: Any) -> AttentionCall:
    mask = resolve("padding_causal_bottom_right", window_size=None, bottom_right_diagonal=None)
    return plain(seqlen_q=1, groups=4, mask=mask, needs_gradient=False, cached=True, **changes)


def identity(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return score


def graph_identity(graph: Any, score: Any, tensors: Any) -> Any:
    return score


SQUARE = (1, 16, 4096, 4096)
ROWS: dict[str, AttentionCall] = {
    "bshd, sbhd, packed `qkv_layer`, causal": plain(),
    "no mask": masked("no_mask"),
    "bottom-right causal, more keys than queries": masked("causal_bottom_right", seqlen_q=1024),
    "top-left causal, more keys than queries": masked("causal", seqlen_q=1024),
    "sliding window": masked("causal", (512, 0)),
    "padding by `cu_seqlens`": masked("padding", same_lengths=True),
    "padding by mask tensors": masked("padding", padding_tensors=True),
    "causal padding, lengths of queries and keys differ": masked("padding_causal"),
    "arbitrary mask tensor": masked("arbitrary", masked_shape=(2, 1, 4096, 4096)),
    "thd": packed(),
    "thd with tokens between the sequences": packed(padded_between=True),
    "grouped heads": plain(groups=4),
    "heads of 256": plain(head_dim_qk=256, head_dim_v=256),
    "heads of 192 and 128": plain(head_dim_qk=192),
    "heads of 40": plain(head_dim_qk=40, head_dim_v=40),
    "heads of 576 and 512, no gradient": plain(
        head_dim_qk=576, head_dim_v=512, needs_gradient=False
    ),
    "bias and its gradient": plain(bias="post_scale_bias", bias_shape=SQUARE, bias_gradient=True),
    "bias with lengths": masked(
        "padding", bias="pre_scale_bias", bias_shape=SQUARE, same_lengths=True
    ),
    "ALiBi": plain(bias="alibi", slopes_shape=(16,)),
    "ALiBi with slopes for every sequence": plain(
        bias="alibi", slopes_shape=(2, 16), slopes_given=True
    ),
    "`softcap`": plain(softcap=30.0),
    "`softcap`, no mask": masked("no_mask", softcap=30.0),
    "`softcap`, thd": packed(softcap=30.0),
    "`softcap` with a bias": plain(
        softcap=30.0, bias="post_scale_bias", bias_shape=SQUARE, bias_gradient=True
    ),
    "`softcap` with ALiBi": plain(softcap=30.0, bias="alibi", slopes_shape=(16,)),
    "off-by-one softmax": plain(softmax="off-by-one"),
    "learnable softmax and its gradient": plain(softmax="learnable"),
    "learnable softmax, thd": packed(softmax="learnable"),
    "dropout": plain(dropout=0.1),
    "`return_max_logit`": plain(max_logit=True),
    "deterministic gradients": plain(deterministic=True),
    "`score_mod` of indices": plain(score_mod=identity),
    "`score_mod` of a graph, no mask": masked(
        "no_mask", score_mod=GraphScoreMod(graph_identity, {}, None, {})
    ),
    "float32": plain(dtype=torch.float32),
    "one new token, contiguous cache": decoding(),
    "one new token, pages of 64": decoding(page_size=64),
    "one new token, `softcap`": decoding(softcap=30.0),
}


def table() -> str:
    """One row per option, one column per backend in the plain call's order of preference."""
    flash4.VERSION, flash2.VERSION, flash3.INSTALLED = "4.0.0", "2.8.3", True
    flash3._softcap_failure = lambda: None
    triton.missing = flex.missing = lambda hardware: None
    cudnn.missing = lambda: None
    optional.failure = lambda *_: None
    names = preference(plain())
    lines = [f"| | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    for title, call in ROWS.items():
        order = preference(call)
        takes = {name: TABLE.named(name).rejection_reason(call) is None for name in names}
        first = next(name for name in order if takes[name])
        cells = ("**yes**" if name == first else "yes" if takes[name] else "" for name in names)
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def measurements() -> str:
    """Milliseconds for the forward pass and for both passes, one row per shape and one column per backend."""
    measured = json.loads(MEASURED.read_text())
    cells = {(row["case"], row["backend"]): row for row in measured["results"]}
    cases = list(dict.fromkeys(case for case, _ in cells))
    columns = preference(plain())
    names = [name for name in columns if any(backend == name for _, backend in cells)]
    names += dict.fromkeys(backend for _, backend in cells if backend not in columns)  # FP8, say
    lines = [f"| | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    for case in cases:
        results = [cells.get((case, name)) for name in names]
        times = (
            f"{x['forward_ms']:.3g} / {x['forward_backward_ms']:.3g}" if x else "" for x in results
        )
        lines.append(f"| {case.replace('_', ' ')} | {' | '.join(times)} |")
    versions = f"torch {measured['torch']}, cuDNN {measured['cudnn']}, flash-attn-4 {measured['flash_attn_4']}"
    caption = (
        f"\nMilliseconds of the forward pass / of forward and backward on an {measured['device']} ({versions}); "
        "b sequences of s tokens, h query heads and groups of heads, size d.\n"
    )
    return "\n".join(lines) + "\n" + caption


if __name__ == "__main__":
    sys.exit(write(__file__, {PAGE: {"attention table": table(), "measurements": measurements()}}))
