"""Quantize random matrices by the NVFP4 variants' kernels in the interpreter; print differences as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.kernels import interpreter
from tests.support.nvfp4_random import cases, differing
from transformer_engine.pytorch.runtime import launching


def main() -> None:
    interpreter.repair()
    torch.set_num_threads(1)
    launching.processors = lambda device: launching.Processors(3, 1 << 16)
    compared, result = 0, {}
    for name, spec, x in cases(int(sys.argv[1])):
        compared += 1
        if fields := differing(spec, x):
            result[name] = fields
    print(json.dumps({"compared": compared, "differing": result}))


if __name__ == "__main__":
    main()
