"""How algorithms are chosen: `deterministic()` fixes results between runs, `autotune()` times the candidates."""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import Any

import torch
from torch.utils import deterministic as torch_settings

from ...common import env
from ...common.checks import suggests_keywords, switch
from ..primitives.gemm.request import Switch, requests_tuning
from ..runtime.determinism import is_demanded


class deterministic(ContextDecorator):
    """Require equal bits in every run: te.deterministic(), or for a block: with te.deterministic(): train()

    Backends whose sums have no fixed order are unsupported, for a reason that `te.explain` prints, and
    torch.use_deterministic_algorithms(True) is set, under which torch operations without a deterministic algorithm
    raise an error. Algorithms are not timed, because a choice by time differs between runs: `te.autotune` raises.
    Runs are equal for the same seeds, inputs, shapes, machine, libraries and, on a CPU, thread count.
    NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 requires the same from the backends and leaves torch's switch unchanged.

    Args:
        enabled: False lifts the requirement.

    Raises:
        RuntimeError: `te.autotune()` or NVTE_AUTOTUNE=1 is active.
    """

    @suggests_keywords
    def __init__(self, enabled: bool = True):
        switch("enabled", enabled)
        self._enabled = enabled
        self._made_before: tuple[bool, bool, bool] | None = _settings()
        self._before: list[tuple[bool, bool, bool]] = []
        _set(enabled)

    def __call__(self, function: Any) -> Any:
        """Decorate a function, whose calls run in a block; the decoration itself leaves the settings as before."""
        if self._made_before is not None:
            _restore(self._made_before)
            self._made_before = None
        return super().__call__(function)

    def _recreate_cm(self) -> deterministic:
        """Return a new context, so that each decorated function call sets the mode again."""
        return deterministic(self._enabled)

    def __enter__(self) -> deterministic:
        """Enter the block; the first one restores the settings before the construction, others those before it."""
        previous = self._made_before or _settings()
        _set(self._enabled)
        self._before.append(previous)
        self._made_before = None
        return self

    def __exit__(self, *exception: object) -> None:
        _restore(self._before.pop())


def _settings() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch_settings.fill_uninitialized_memory,  # pyright: ignore[reportAttributeAccessIssue]
    )


def _restore(settings: tuple[bool, bool, bool]) -> None:
    enabled, warns_only, fills = settings
    torch.use_deterministic_algorithms(enabled, warn_only=warns_only)
    torch_settings.fill_uninitialized_memory = fills  # pyright: ignore[reportAttributeAccessIssue]


def _set(enabled: bool) -> None:
    """Set the mode; RuntimeError, before any change, if algorithms are chosen by time."""
    if enabled and requests_tuning():
        how = "te.autotune()" if Switch.depth > 0 else "NVTE_AUTOTUNE=1"
        raise RuntimeError(
            f"{how} chooses algorithms by time, which differs from run to run; end it before te.deterministic()"
        )
    if enabled:
        env.keep_cublas_repeatable()
    torch.use_deterministic_algorithms(enabled)
    # Kernels write their whole result; filling it first would cost as much as many kernels.
    torch_settings.fill_uninitialized_memory = not enabled  # pyright: ignore[reportAttributeAccessIssue]


class autotune:
    """Time the candidate algorithms of every matrix product inside the block, forward and backward, and store choices.

    with te.autotune():
        model(x).sum().backward()

    A choice stays active in this process after the block. It is stored in a file for the GPU's model, the cuBLASLt
    version and the problem (TE_CACHE_DIR, by default ~/.cache/transformer_engine). Later blocks, or NVTE_AUTOTUNE=1
    for a whole process, read it without timing. Without tuning, the first algorithm by the library's heuristic is
    used and results do not depend on measurements. CUDA graphs and compiled functions keep the algorithms that they
    captured: tune first. Has no effect on products by backends other than cublaslt.

    Raises:
        RuntimeError: Results must be deterministic, for example under `te.deterministic()`.
    """

    def __enter__(self) -> autotune:
        if is_demanded():
            raise RuntimeError(
                "deterministic results are asked for (te.deterministic(), torch.use_deterministic_algorithms or "
                "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0), and a choice of algorithms by time differs from run to run; turn "
                "that off, or run without te.autotune()"
            )
        Switch.depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        Switch.depth -= 1
