"""with autotune(): every product met inside runs the fastest of cuBLASLt's algorithms, timed once and kept on disk."""

from __future__ import annotations

from ..primitives.gemm.request import Switch
from .deterministic import refuse_timing


class autotune:
    """Time the candidates of every matrix product met inside, forward and backward, and keep the choices.

    with te.autotune():
        model(x).sum().backward()

    A choice stays in force in this process after the block, and is stored in a JSON file for the GPU's model and the
    version of cuBLASLt (TE_CACHE_DIR, by default ~/.cache/transformer_engine); a later block, or NVTE_AUTOTUNE=1
    for a whole process, takes it from there without timing. Without tuning the library's own first guess is used and
    results do not depend on what was measured. CUDA graphs and compiled functions keep what they captured: tune
    first. Raises RuntimeError under te.deterministic(). Has no effect where products run on another backend than
    cublaslt.
    """

    def __enter__(self) -> autotune:
        refuse_timing()
        Switch.depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        Switch.depth -= 1
