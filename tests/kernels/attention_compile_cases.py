"""Compile the attention kernels for three GPUs, without one, and print PTX counts as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from transformer_engine.common.kernels import (
    attention,
    attention_backward,
    attention_bias,
    attention_decode,
    attention_delta,
)
from transformer_engine.common.kernels.attention_problem import AttentionProblem
from transformer_engine.common.kernels.launch import Launch

# Compute capability -> shared-memory bytes that a program may have.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
VALUES, FLOATS, INTEGERS = "*bf16", "*fp32", "*i32"
POINTERS = {
    **dict.fromkeys(("q", "k", "v", "out", "grad_out", "dk", "dv", "dq", "bias"), VALUES),
    **dict.fromkeys(("lse", "delta", "tops", "dbias", "partial", "level"), FLOATS),
    **dict.fromkeys(("lengths_q", "lengths_kv", "starts_q", "starts_kv", "pages"), INTEGERS),
}


def problem(
    shared_memory: int,
    *,
    queries: int = 4096,
    page: int = 0,
    biased: bool = False,
    softcap: float = 0.0,
) -> AttentionProblem:
    """Sequences with 4096 keys and heads of size 128."""
    heads, groups, size = 32, 8, 128
    strides = (queries * heads * size, heads * size, size)
    keys = (4096 * groups * size, groups * size, size)
    return AttentionProblem(
        dtype="bfloat16",
        batch=2,
        heads=heads,
        groups=groups,
        seqlen_q=queries,
        seqlen_kv=4096,
        size_qk=size,
        size_v=size,
        scales=(size**-0.5, 1.0),
        window=(-1, 0),
        bottom_right=True,
        dropout=0.0,
        page_size=page,
        q=strides,
        k=keys,
        v=keys,
        out=strides,
        lse=(heads * queries, 1, queries),
        masked=(0, 0, 0, 0),
        bias=(0, queries * 4096, 4096, 1) if biased else (0, 0, 0, 0),
        outer=(0, 4096 // page if page else 0),
        varied=biased,
        shared_memory=shared_memory,
        softcap=softcap,
    )


def launches(capability: int) -> Iterator[tuple[str, Launch, tuple[str, ...]]]:
    """(name, record, the tensors that are not given)."""
    shared = SHARED_MEMORY[capability]
    plain, biased = problem(shared), problem(shared, biased=True)
    starts = ("starts_q", "starts_kv")
    yield "forward", attention.forward(plain, True), ("bias", "pages", *starts)
    keys = attention_backward.keys(plain, (0, *plain.k), (0, *plain.v), 1)
    yield "keys", keys, ("bias", *starts)
    yield "pages", attention_decode.stretches(problem(shared, queries=1, page=64), 132)[0], starts
    capped = problem(shared, softcap=30.0)
    yield "softcap-forward", attention.forward(capped, True), ("bias", "pages", *starts)
    yield (
        "softcap-keys",
        attention_backward.keys(capped, (0, *plain.k), (0, *plain.v), 1),
        ("bias", *starts),
    )
    if capability != 90:
        return
    yield "softcap-queries", attention_backward.queries(capped, plain.q), ("bias", *starts)
    one = problem(shared, queries=1, softcap=30.0)
    yield "softcap-decode", attention_decode.stretches(one, 132)[0], ("pages", *starts)
    yield "queries", attention_backward.queries(plain, plain.q), ("bias", *starts)
    yield "delta", attention_delta.delta(plain, plain.q), starts
    yield "bias", attention_bias.added(biased, (1, 32, 4096, 4096))[0], starts
    yield (
        "decode",
        attention_decode.stretches(problem(shared, queries=1), 132)[0],
        ("pages", *starts),
    )
    packed = replace(plain, batch=12, tokens=(4096, 4096))
    yield (
        "packed-forward",
        attention.forward(packed, max_logit=False, keeps_lse=True, packed=True),
        ("bias", "pages", "tops"),
    )
    yield "packed-queries", attention_backward.queries(packed, plain.q, True), ("bias",)
    keys = attention_backward.keys(packed, (0, *plain.k), (0, *plain.v), 1, True)
    yield "packed-keys", keys, ("bias",)
    yield "packed-delta", attention_delta.delta(packed, plain.q), ()


def compiled(launch: Launch, absent: tuple[str, ...], capability: int) -> tuple[str, int]:
    """(PTX, shared-memory bytes) for a launch's kernel."""
    result = compile_kernel(GPUTarget("cuda", capability, 32), launch, absent)
    return result.asm["ptx"], result.metadata.shared


def compile_kernel(target: GPUTarget, launch: Launch, absent: tuple[str, ...]):
    """Compile a launch's kernel for a GPU from either vendor."""
    names = launch.kernel.arg_names
    first = len(names) - len(launch.constants)
    constants = dict(zip(names[first:], launch.constants, strict=True))
    scalars = dict(zip(names[first - len(launch.scalars) : first], launch.scalars, strict=True))
    constants |= {name: 1 for name, value in scalars.items() if value == 1}
    signature, aligned = {}, {}
    for index, name in enumerate(names):
        if name in scalars and name not in constants:
            signature[name] = "fp32" if isinstance(scalars[name], float) else "i32"
        elif name not in constants and name in POINTERS and name not in absent:
            signature[name] = POINTERS[name]
        else:
            constants.setdefault(name, None)
            signature[name] = "constexpr"
            continue
        if name not in scalars or scalars[name] % 16 == 0:
            aligned[(index,)] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(launch.kernel, signature, constants, aligned),
        target=target,
        options={"num_warps": launch.warps, "num_stages": 1},
    )


def main() -> None:
    facts = {}
    for capability in SHARED_MEMORY:
        for name, launch, absent in launches(capability):
            ptx, shared = compiled(launch, absent, capability)
            facts[f"sm{capability}-{name}"] = {
                "fits": shared <= SHARED_MEMORY[capability],
                "double": ptx.count(".f64"),
                "tensor_cores": sum(
                    ptx.count(op) for op in ("wgmma.mma_async", "mma.sync", "tcgen05.mma")
                ),
            }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
