"""demand(rule, tensors, *facts): checks numbers in tensors without waiting for a device.

A rule is a function on host numbers (lists as returned by `Tensor.tolist`) that raises ValueError. For tensors on
the CPU it runs at once, before anything is changed. Numbers on a GPU are not checked by default, because the host
would have to wait for them. With TE_CHECK=1, they are copied to pinned memory on the stream, and the rule runs in a
later call that finds the copy finished, in `check()`, or when the process ends. The checked call itself continues,
and a kernel that reads outside its tensors may end the process first. With TE_CHECK=2, the call waits and runs the
rule before anything else. Nothing is checked while a compiler traces or a CUDA graph is captured.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common import env

Rule = Callable[..., None]

_switch = env.watch_in_eager_mode("TE_CHECK")
# Classes whose tensors hold numbers; tensors of tracer classes do not.
_PLAIN = (Tensor, torch.nn.Parameter)


class Waiting(NamedTuple):
    """A check whose numbers are being copied: arrived() returns whether the copy has finished, wait() waits for it."""

    rule: Rule
    numbers: list[Tensor | None]
    facts: tuple[Any, ...]
    arrived: Callable[[], bool]
    wait: Callable[[], object]


_waiting: deque[Waiting] = deque()
_lock = threading.Lock()
_registered = False


def demand(rule: Rule, tensors: tuple[Tensor | None, ...], *facts: Any) -> None:
    """Run rule(*tensor numbers, *facts) at once; for tensors on a GPU as TE_CHECK selects: never, later or at once.

    A tensor that is None stays None. Raises the ValueError of the rule, or of an earlier check
    whose numbers have been copied.
    """
    if torch.compiler.is_compiling():
        return
    on_device, plain = False, True
    for tensor in tensors:
        if tensor is None:
            continue
        plain = plain and type(tensor) in _PLAIN
        if tensor.is_cpu:
            continue
        if not tensor.is_cuda:
            return
        on_device = True
    level = env.get("TE_CHECK") if on_device and _switch() is not None else "0"
    if on_device and (level == "0" or torch.cuda.is_current_stream_capturing()):
        return
    if not plain:
        return
    if level == "1":
        _run_arrived_checks(wait=False)
        numbers: list[Tensor | None] = []
        for tensor in tensors:
            if tensor is not None:
                pinned = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu"
                )
                tensor = pinned.copy_(tensor.detach(), non_blocking=True)
            numbers.append(tensor)
        event = torch.cuda.Event()
        event.record()
        collect(Waiting(rule, numbers, facts, event.query, event.synchronize))
    else:
        rule(*[None if tensor is None else tensor.tolist() for tensor in tensors], *facts)


def check() -> None:
    """Wait for all pending checks; raise the ValueError of the first that fails, and drop the others.

    With TE_CHECK=1, sequence lengths, positions and pages on a GPU are checked after the call that received them; with
    TE_CHECK=2, by the call itself.
    """
    _run_arrived_checks(wait=True)


def collect(waiting: Waiting) -> None:
    """Keep a check until its numbers have been copied."""
    global _registered
    with _lock:
        if not _registered:
            atexit.register(_print_pending)
            _registered = True
        _waiting.append(waiting)


def _run_arrived_checks(wait: bool) -> None:
    """Run the rules whose numbers have been copied, or with `wait` all rules, the oldest first."""
    while True:
        with _lock:
            if not _waiting or not (wait or _waiting[0].arrived()):
                return
            first = _waiting.popleft()
        if wait:
            first.wait()
        try:
            first.rule(*(None if x is None else x.tolist() for x in first.numbers), *first.facts)
        except ValueError as error:
            with _lock:
                _waiting.clear()
            raise ValueError(f"found by TE_CHECK=1 in an earlier call: {error}") from None


def _print_pending() -> None:
    """Print the errors of pending checks: at process end, no caller could catch an exception."""
    try:
        _run_arrived_checks(wait=True)
    except ValueError as error:
        print(f"transformer_engine: {error}", file=sys.stderr)
