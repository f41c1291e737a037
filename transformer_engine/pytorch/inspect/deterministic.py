"""deterministic(): two runs of a program on one machine give the same bits, or what cannot says its name."""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import Any

import torch

from ...common import env
from ...common.checks import switch
from ..primitives.gemm.request import Switch, wanted
from ..runtime.determinism import is_demanded


class deterministic(ContextDecorator):
    """te.deterministic(), from here on; or for a block: with te.deterministic(): train()

    enabled   False: leave torch and the backends free again

    Under it every backend whose sums have no fixed order refuses, by a sentence that `te.explain` prints too, and
    torch.use_deterministic_algorithms(True) holds, whose operations raise by name where they cannot. Algorithms are not
    timed, because a choice by time differs from run to run: `te.autotune` raises. What is equal: seeds, inputs, shapes,
    the machine, its libraries and, on a CPU, the number of threads. NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 demands the same
    of our backends and leaves torch's switch alone.
    """

    def __init__(self, enabled: bool = True):
        switch("enabled", enabled)
        self._enabled = enabled
        self._made_before: tuple[bool, bool, bool] | None = _settings()
        self._before: list[tuple[bool, bool, bool]] = []
        _set(enabled)

    def _recreate_cm(self) -> deterministic:
        """As a decorator every call of the function sets it anew."""
        return deterministic(self._enabled)

    def __enter__(self) -> deterministic:
        """The first block gives back what was before the object was made, any other what was before the block."""
        before = self._made_before or _settings()
        _set(self._enabled)
        self._before.append(before)
        self._made_before = None
        return self

    def __exit__(self, *exception: object) -> None:
        _restore(*self._before.pop())


def _settings() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        _torch_settings().fill_uninitialized_memory,
    )


def _restore(enabled: bool, warns_only: bool, fills: bool) -> None:
    torch.use_deterministic_algorithms(enabled, warn_only=warns_only)
    _torch_settings().fill_uninitialized_memory = fills


def _set(enabled: bool) -> None:
    """RuntimeError where algorithms are chosen by time, before anything is set."""
    if enabled and wanted():
        how = "te.autotune()" if Switch.depth > 0 else "NVTE_AUTOTUNE=1"
        raise RuntimeError(
            f"{how} chooses algorithms by time, which differs from run to run; end it before te.deterministic()"
        )
    if enabled:
        env.keep_cublas_repeatable()
    torch.use_deterministic_algorithms(enabled)
    # Every kernel writes all of its result: filling it before would cost as much as many of them.
    _torch_settings().fill_uninitialized_memory = not enabled


def _torch_settings() -> Any:
    return torch.utils.deterministic


def refuse_timing() -> None:
    """RuntimeError where results have to be the same in every run: a choice by time is none."""
    if is_demanded():
        raise RuntimeError(
            "deterministic results are asked for (te.deterministic(), torch.use_deterministic_algorithms or "
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0), and a choice of algorithms by time differs from run to run; turn "
            "that off, or run without te.autotune()"
        )
