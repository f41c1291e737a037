"""A pytest plugin: with TRITON_INTERPRET=1 the kernels' tests run on the CPU, in Triton's repaired interpreter."""

from __future__ import annotations

import numpy as np
from interpreter import repair
from triton.runtime import interpreter

from transformer_engine.pytorch.primitives import launching


def pytest_configure() -> None:
    repair()
    _let_loops_start_at_a_program_id()
    launching.processors = lambda device: launching.Processors(
        2, 1 << 16
    )  # several programs share the rows, each has several


def _let_loops_start_at_a_program_id() -> None:
    """numpy 2.4 makes no int of a one-element array, which is what the interpreter's scalars are."""
    original = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        original(tensor, scope)
        tensor.__index__ = lambda self: int(np.asarray(self.handle.data).item())

    interpreter._patch_lang_tensor = patch
