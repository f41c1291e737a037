"""Python calls and microseconds in a warm attention call around its backends, on a machine without a GPU.

    python benchmarks/host_calls_attention.py [--json FILE] [--only TEXT] [--base TREE] [--rounds N]

calls     Python functions that the attention's own code enters, itself among them. Backends compute, and projections
          are separate layers: neither they nor their callees are counted
before    functions entered until the first backend or projection begins
us        the best call over all rounds, on tensors so small that computing them costs little; it holds everything
--base    another package checkout, run in turns with this one in separate processes
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from shortest import shortest

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Recipe

BATCH, TOKENS, HEADS, SIZE = 2, 8, 2, 16
WARM, TIMED = 5, 60
# Code that is not counted: backends in tables, code that only they call, and linear layers.
APART = re.compile(
    r"/backends/|/primitives/(?:\w+/)*(?:reference|triton|matmul|widen|scaled_mm\w*|cublaslt\w*|composed)\.py$"
    r"|/module/(?:layernorm_)?linear\w*\.py$|/functions/(?:norm_)?linear\w*\.py$|/functions/saving\.py$|/fp8_(?:emulation|cudnn)\.py$"
)
OURS = str(Path(te.__file__).parents[1])

RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "current": Float8CurrentScaling(fp8_dpa=True),
    "delayed": DelayedScaling(amax_history_len=4, fp8_dpa=True),
}


class Case(NamedTuple):
    """One table line: a call, within autocast, with or without gradients."""

    name: str
    call: Callable[[], object]
    recipe: Recipe | None = None
    gradients: bool = True


class Counted(NamedTuple):
    """Python calls of one call: before the first backend or projection begins, and in total."""

    before: int
    calls: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--base", type=Path, help="a checkout to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each checkout")
    chosen = parser.parse_args()
    if chosen.base is None:
        rows = measured(chosen.only)
        show({"": rows})
    else:
        current = Path(te.__file__).parents[2]
        trees = {"base": chosen.base, "": current}
        rows = {name: {} for name in trees}
        for _ in range(chosen.rounds):
            for name, tree in trees.items():
                keep_best(rows[name], measure_checkout(tree, chosen.only))
        show(rows)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(rows, indent=1))


def measured(only: str) -> dict[str, dict[str, float]]:
    """{case: its figures} for the package that this process has imported."""
    torch.set_num_threads(1)
    rows = {}
    for case in cases():
        if only in case.name:
            block = te.autocast(enabled=case.recipe is not None, recipe=case.recipe)
            with block, torch.set_grad_enabled(case.gradients):
                for _ in range(WARM):
                    case.call()
                counted = count(case.call)
                rows[case.name] = {**counted._asdict(), "us": shortest(case.call, TIMED)}
    return rows


def measure_checkout(tree: Path, only: str) -> dict[str, dict[str, float]]:
    """Measure another checkout in a separate process."""
    script = f"import json, host_calls_attention as h; print(json.dumps(h.measure({only!r})))"
    paths = os.pathsep.join((str(tree), str(Path(__file__).parent)))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tree,  # which Python looks into first
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def keep_best(saved: dict[str, dict[str, float]], found: dict[str, dict[str, float]]) -> None:
    """Minimum of each figure over rounds."""
    for case, figures in found.items():
        best_of = saved.setdefault(case, figures)
        for name, value in figures.items():
            best_of[name] = min(best_of[name], value)


def show(rows: dict[str, dict[str, dict[str, float]]]) -> None:
    names = [f"{tree} {figure}".strip() for figure in ("before", "calls", "us") for tree in rows]
    print(f"{'case':44} " + " ".join(f"{name:>12}" for name in names))
    for case in next(iter(rows.values())):
        figures = [
            rows[tree][case][figure] for figure in ("before", "calls", "us") for tree in rows
        ]
        print(f"{case:44} " + " ".join(f"{value:12.0f}" for value in figures), flush=True)


def count(call: Callable[[], object]) -> Counted:
    """Python calls that the attention makes in call()."""
    entered: list[str] = []
    before: list[int] = []
    depths = {
        "ours": 0,
        "apart": 0,
    }  # open functions below the first that is ours, and that is apart

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event == "return":
            for kind in depths:
                depths[kind] -= depths[kind] > 0
        elif event == "call":
            file = frame.f_code.co_filename
            if depths["apart"] or APART.search(file):
                before.append(len(entered))
                depths["apart"] += 1
            elif depths["ours"] or file.startswith(OURS):
                entered.append(f"{file}:{frame.f_code.co_name}")
            depths["ours"] += depths["ours"] > 0 or file.startswith(OURS)

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    if os.environ.get("SHOW_CALLS"):
        print("\n".join(entered))
    return Counted(before[0] if before else len(entered), len(entered))


def cases() -> Iterator[Case]:
    for recipe in RECIPES:
        for layout in ("sbhd", "bshd", "thd"):
            yield from _both(
                f"DotProductAttention {layout} {recipe}", *_core(layout), RECIPES[recipe]
            )
        for layout in ("sbhd", "thd"):
            yield from _both(
                f"MultiheadAttention {layout} {recipe}", *_layer(layout), RECIPES[recipe]
            )
    yield from _both("MultiheadAttention sbhd rotary none", *_layer("sbhd", rotary=True), None)
    yield Case("MultiheadAttention bshd step of a cache f", _step(), gradients=False)


def _both(
    name: str,
    forward: Callable[[], torch.Tensor],
    leaves: list[torch.Tensor],
    recipe: Recipe | None,
) -> Iterator[Case]:
    """A forward without gradients, and a forward with its backward."""
    gradient = torch.ones_like(forward().detach())

    def with_gradient() -> None:
        for leaf in leaves:
            leaf.grad = None
        forward().backward(gradient)

    yield Case(f"{name} f", forward, recipe, gradients=False)
    yield Case(f"{name} fb", with_gradient, recipe)


def _shape(layout: str) -> tuple[int, ...]:
    return {"sbhd": (TOKENS, BATCH), "bshd": (BATCH, TOKENS), "thd": (BATCH * TOKENS,)}[layout]


def _lengths(layout: str) -> dict[str, Any]:
    """Attention arguments for packed sequences."""
    if layout != "thd":
        return {}
    bounds = torch.arange(0, (BATCH + 1) * TOKENS, TOKENS, dtype=torch.int32)
    return {
        "cu_seqlens_q": bounds,
        "cu_seqlens_kv": bounds,
        "max_seqlen_q": TOKENS,
        "max_seqlen_kv": TOKENS,
    }


def _mask(layout: str) -> str:
    return "padding_causal" if layout == "thd" else "causal"


def _core(layout: str) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    layer = te.DotProductAttention(HEADS, SIZE, qkv_format=layout, attn_mask_type=_mask(layout))
    q, k, v = (
        torch.randn(*_shape(layout), HEADS, SIZE, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    options = _lengths(layout)
    return lambda: layer(q, k, v, **options), [q, k, v]


def _layer(
    layout: str, rotary: bool = False
) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    layer = te.MultiheadAttention(
        HEADS * SIZE,
        HEADS,
        attention_dropout=0.0,
        qkv_format=layout,
        attn_mask_type=_mask(layout),
        params_dtype=torch.bfloat16,
        device="cpu",
    )
    x = torch.randn(*_shape(layout), HEADS * SIZE, dtype=torch.bfloat16, requires_grad=True)
    options = _lengths(layout)
    if rotary:
        options["rotary_pos_emb"] = te.RotaryPositionEmbedding(SIZE)(TOKENS)
    return lambda: layer(x, **options), [x, *layer.parameters()]


def _step() -> Callable[[], object]:
    """One step with one token per sequence on all cached tokens."""
    layer = te.MultiheadAttention(
        HEADS * SIZE,
        HEADS,
        attention_dropout=0.0,
        qkv_format="bshd",
        layer_number=1,
        params_dtype=torch.bfloat16,
        device="cpu",
    ).eval()
    longest = 2 * (WARM + TIMED)
    cache = te.InferenceParams(
        BATCH,
        longest,
        num_heads_kv=HEADS,
        head_dim_k=SIZE,
        dtype=torch.bfloat16,
        max_ctx_len=1,
        qkv_format="bshd",
    )
    cache.allocate_memory(1)
    x = torch.randn(BATCH, 1, HEADS * SIZE, dtype=torch.bfloat16)

    def call() -> None:
        with torch.no_grad():
            cache.pre_step(dict.fromkeys(range(BATCH), 1))
            layer(x, inference_params=cache, attn_mask_type="padding_causal")

    return call


if __name__ == "__main__":
    main()
