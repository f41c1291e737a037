"""Every launch of common/kernels that takes arrays, lowered for CUDA through the bridge: {name: facts} as JSON."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp

from tests.kernels import written_cases
from transformer_engine.common.kernels.launch import Launch
from transformer_engine.jax.primitives import launching

DTYPES = {
    "*bf16": jnp.bfloat16,
    "*fp16": jnp.float16,
    "*fp32": jnp.float32,
    "*fp8e4nv": jnp.float8_e4m3fn,
    "*fp8e5": jnp.float8_e5m2,
    "*u8": jnp.uint8,
    "*i32": jnp.int32,
    "*i64": jnp.int64,
}


def lowering_facts(launch: Launch, kinds: tuple[str | None, ...]) -> dict:
    # Lowering does not depend on the extents of inputs: scalars tell a kernel how much to read.
    inputs = [
        None if kind is None else jax.ShapeDtypeStruct((4096,), DTYPES[kind]) for kind in kinds
    ]
    shapes = [
        None
        if output is None or (output.shape is not None and output.dtype is not None)
        else jax.ShapeDtypeStruct(output.shape or (4096,), jnp.dtype(output.dtype or "float32"))
        for output in launch.outputs
    ]
    args = [x for x in inputs if x is not None]

    def call(*arrays):
        remaining = iter(arrays)
        answers = launching.run(
            launch, [None if x is None else next(remaining) for x in inputs], shapes
        )
        return [answer for answer in answers if answer is not None]

    text = jax.jit(call).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return {
        "kernel": launch.kernel.fn.__name__,
        "calls": text.count("triton_kernel_call_ffi"),
        "text": len(text),
    }


def main() -> None:
    groups = (
        written_cases.casts,
        written_cases.activations,
        written_cases.norms,
        written_cases.others,
        written_cases.grouped,
        written_cases.attentions,
    )
    # One launch per kernel, or all launches.
    everything = "--all" in sys.argv
    records, result, unsupported = set(), {}, {}
    for group in groups:
        for name, launch, kinds in group():
            if launch.kernel in records and not everything:
                continue
            if launch.tables:
                unsupported[name] = "table"
            elif launch.dependent or launch.cooperative:
                unsupported[name] = "dependent"
            elif not DTYPES.keys() >= set(kinds) - {None}:
                # float64, which JAX supports only if it is enabled for the whole process
                unsupported[name] = "dtype"
            else:
                records.add(launch.kernel)
                result[name] = lowering_facts(launch, kinds)
    print(json.dumps({"lowered": result, "unsupported": unsupported}))


if __name__ == "__main__":
    main()
