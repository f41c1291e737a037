"""Compile the norms' forward kernels without a GPU; print as JSON how each distributes and sums rows."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from transformer_engine.common.formats import E4M3, FLOAT32_MAX
from transformer_engine.common.kernels import norm
from transformer_engine.common.kernels.block_cast import Blocks

VALUES, SCALAR, CODES = "*bf16", "*fp32", "*fp8e4nv"
WIDTHS = (130, 1000, 1024, 4096, 4097, 5000, 5120, 8192, 9000, 12288, 17000, 32768)
BLOCKS = Blocks(
    E4M3, columnwise=False, square=False, power_of_two=True, epsilon=0.0, value_for_inf=FLOAT32_MAX
)


def sums(width: int, centered: bool, codes: str | None, records: bool) -> list[str]:
    """Written-out layouts for the summed float32 tensors; codes: one scale for all, or "blocks"."""
    blocks = BLOCKS if codes == "blocks" else None
    element = E4M3 if codes == "one scale" else None
    rows = norm.NormRows(8192, width, width, "bfloat16", 1e-5, False, centered, 132)
    launch = norm.forward(rows, element, blocks)
    pointers = {
        "x": VALUES,
        "gamma": VALUES,
        "beta": VALUES if centered else None,
        "multiplier": SCALAR if codes == "one scale" else None,
        "amax": SCALAR if records else None,
        "codes": codes and CODES,
        "scale": codes and SCALAR,
        "y": None if codes else VALUES,
        "mean": SCALAR if centered else None,
        "rstdev": SCALAR,
    }
    names = launch.kernel.arg_names
    constants = dict(
        zip(names[len(names) - len(launch.constants) :], launch.constants, strict=True)
    )
    constants |= {name: None for name, kind in pointers.items() if kind is None}
    kinds = dict.fromkeys(names, "i32") | {"eps": "fp32"} | {n: k for n, k in pointers.items() if k}
    signature = {name: "constexpr" if name in constants else kinds[name] for name in names}
    even = {*pointers, *(("width", "x_stride") if width % 16 == 0 else ())} - set(constants)
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in even}
    compiled = triton.compile(
        ASTSource(launch.kernel, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": launch.warps, "num_stages": 1},
    )
    text = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"(#blocked\d*) = (#ttg.blocked<.*)", text))
    summed = re.findall(r"\}\) : \(tensor<\d[\dx]*xf32, (#\w+)>\)", text)
    return [layouts[name] for name in summed]


def stop_at_layouts(backend=None, stages=None, options=None, language=None, capability=None) -> Any:
    """Leave out LLVM and ptxas, which follow the representation that has the layouts.

    Called without arguments, return the key and the hash that distinguish these compilations from complete ones.
    """
    if stages is None:
        return "layouts", "layouts"

    def nothing(module, metadata):
        metadata |= {"shared": 0, "name": "none"}
        return b""

    stages.update(dict.fromkeys(("llir", "ptx", "cubin"), nothing))


def main() -> None:
    knobs.runtime.add_stages_inspection_hook = stop_at_layouts
    print(
        json.dumps(
            {
                f"{'layernorm' if centered else 'rmsnorm'} {width}": [
                    sums(width, centered, codes=None, records=False),
                    sums(width, centered, "one scale", True),
                    sums(width, centered, codes=None, records=True),
                    sums(width, centered, "blocks", False),
                ]
                for width in WIDTHS
                for centered in (False, True)
            }
        )
    )


if __name__ == "__main__":
    main()
