"""Compile the mixture-of-experts kernels for sm90, without a GPU; print PTX and memory sizes as JSON."""

from __future__ import annotations

import json

from tests.kernels.compile_cases import compile_ptx
from tests.kernels.written_cases import experts


def main() -> None:
    facts = {}
    for name, launch, inputs in experts():
        names = launch.kernel.arg_names
        pointers = dict(zip(names, inputs, strict=False))
        kinds = {"bfloat16": "*bf16", "float32": "*fp32", "int32": "*i32", "uint8": "*u8"}
        for argument, output in zip(names[launch.inputs :], launch.outputs, strict=False):
            pointers[argument] = None if output is None else kinds[output.dtype]
        ptx, shared = compile_ptx(launch, pointers, 90)
        facts[name] = {"ptx": len(ptx), "shared": shared}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
