"""Rank faults: differing settings are reported before a collective, and collective failures name the ranks.

A collective whose ranks pass different tensors waits forever, or mixes them. In the first step of a
group the ranks therefore exchange a hash of their settings and shapes before each collective in a
tensor- or context-parallel layer, and before each delayed-scaling maxima reduction. If the hashes
differ, they exchange the descriptions, and every rank raises an error with ranks and values. The
exchange ends with the first collective after an optimizer step, at the latest after MAXIMUM_CHECKS
collectives. TE_CHECK=1 continues it in every step.

Collectives of NCCL fail without an error on the host; see `progress`.
"""

from __future__ import annotations

import functools
import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...common import env
from ..constants import dist_group_type
from ..primitives.operand import Operand
from ..quantization.autocast import current
from ..quantization.delayed_scaling import before_reductions
from ..runtime.capture import is_graph_capturing
from ..runtime.warn_once import warn_once
from ..tensor.storage.quantized_tensor_storage import QuantizedTensorStorage
from .progress import watch

MAXIMUM_CHECKS = 256
CHECKED_REDUCTIONS = 16  # for delayed-scaling maxima
OPTIMIZER_STEPS = "optimizer steps"
# How long a rank that has failed waits for the others to report that they have.
RESPONSE_SECONDS = 5.0
_requested = env.watch("TE_CHECK")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_NAMED = "failed on rank"  # in every message that names the missing ranks
_OUTSIDE = -1  # graph task id outside a backward pass


@dataclass(eq=False)
class _GroupChecks:
    """Checks of one group: how many there were, and the thread's optimizer steps at the first one."""

    first_update: int
    count: int = 0
    finished: bool = False


class _Updates(threading.local):
    """Optimizer steps of a thread."""

    count = 0


_updates = _Updates()
_checks: WeakKeyDictionary[Any, _GroupChecks] = WeakKeyDictionary()
_reductions: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_lock = threading.Lock()
# Process settings that all ranks must have in common, besides the settings of the collective.
common_settings: dict[str, object] = {}


def checks_step(group: dist_group_type, x: Any) -> bool:
    """Return whether a collective on x over a group is checked: in its first step, or if TE_CHECK is set.

    The result is the same on all ranks in the group. Nothing is checked for the fake tensors of a
    dry run, while a compiler traces, or in a CUDA graph.
    """
    if (
        group is None
        or torch.compiler.is_compiling()
        or isinstance(x, torch._subclasses.FakeTensor)
    ):
        return False
    record = _checks.get(group)
    return _continues(record is not None and record.finished)


def _continues(finished: bool) -> bool:
    """Return whether a comparison takes place, which is not so in CUDA graphs and, without TE_CHECK, once finished."""
    if finished and _requested() is None:
        return False
    if not dist.is_initialized() or is_graph_capturing():
        return False
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False
    return not finished or env.get("TE_CHECK") != "0"


def transport_device(group: dist_group_type | None, device: torch.device) -> torch.device:
    """Return a device whose tensors the group transfers: `device` if possible, otherwise the current GPU.

    An NCCL-only group transfers no CPU tensors.
    """
    backends = dist.get_backend_config(group).split(",")  # such as "cpu:gloo", "cuda:nccl"
    if device.type == "cpu" and all(backend.startswith("cuda:") for backend in backends):
        return torch.device("cuda", torch.cuda.current_device())
    return device


def check_step(
    group: dist_group_type, settings: Mapping[str, object], device: torch.device
) -> None:
    """Compare settings over the ranks of a group; every rank must call it (see `checks_step`).

    Args:
        group: Process group.
        settings: Names and values that all ranks must have in common.
        device: Tensor device. The hashes travel on a device that the group supports.

    Raises:
        RuntimeError: On every rank: the values differ. The message has the ranks for each value.
    """
    record = _record(group)
    updates = _updates.count - record.first_update
    level = env.get("TE_CHECK")
    _compare(
        group, {**settings, OPTIMIZER_STEPS: updates if level != "0" else min(updates, 1)}, device
    )
    record.count += 1
    record.finished = record.finished or updates > 0 or record.count >= MAXIMUM_CHECKS


def _compare(
    group: Any,
    settings: Mapping[str, object],
    device: torch.device,
    warned_about: str | None = None,
) -> None:
    """Raise RuntimeError on every rank if settings of the ranks differ; warn once if only `warned_about` does."""
    local_settings = {
        name: _ADDRESS.sub("", str(value))
        for name, value in {**settings, **common_settings}.items()
    }
    local_settings["TE_CHECK"] = str(env.get("TE_CHECK"))
    digest = hashlib.sha256(repr(sorted(local_settings.items())).encode()).digest()
    transport = transport_device(group, device)
    sent = torch.tensor([int.from_bytes(digest[:8], "little", signed=True)], device=transport)
    received = sent.new_empty(dist.get_world_size(group))
    with NamedFailures("comparison of settings", sent, group):
        dist.all_gather_into_tensor(received, sent, group=group)
    if len(set(received.tolist())) > 1:
        descriptions: list[Any] = [None] * len(received)
        dist.all_gather_object(descriptions, local_settings, group=group)
        message = _difference(descriptions, dist.get_process_group_ranks(group))
        compared = [{**description, warned_about: None} for description in descriptions]
        if any(description != compared[0] for description in compared):
            raise RuntimeError(message)
        warn_once(f"ranks differ in {warned_about}", message)


def check_collective(parallel: Any, collective: str, x: Any) -> None:
    """Compare a collective in a tensor-parallel layer over its ranks; see `check_step`.

    Args:
        parallel: The layer's TensorParallel.
        collective: Collective name.
        x: This rank's tensor or operand.
    """
    group = parallel.checked_group()
    if not checks_step(group, x):
        return
    settings: dict[str, object] = {
        "collective": collective,
        "parallel_mode": parallel.mode,
        "sequence_parallel": parallel.sequence,
        "tp_size": parallel.size,
        "ub flags": tuple(parallel.overlap),
    }
    if parallel.layer is not None:
        settings |= parallel.layer.shared_settings()
    if torch._C._current_graph_task_id() == _OUTSIDE:
        state = current()
        settings["recipe"] = state.recipe if state.enabled else None
    else:
        settings["pass"] = "backward"
    settings["tensor"] = form(x)
    check_step(group, settings, (x.codes if isinstance(x, Operand) else x).device)


def check_backward(group: dist_group_type, grad: Tensor) -> None:
    """Compare the backward pass of a context-parallel attention over its ranks; see `check_step`.

    Args:
        group: Process group.
        grad: Output gradient on this rank.
    """
    if checks_step(group, grad):
        settings = {
            "collective": "gradients of an attention",
            "pass": "backward",
            "gradient": form(grad),
        }
        check_step(group, settings, grad.device)


def _check_reduction(
    group: dist_group_type, forward: bool, columns: int, device: torch.device
) -> None:
    """Compare the first delayed-scaling maxima reductions of a group over its ranks, all reductions with TE_CHECK.

    Unlike the collectives of a layer, they may involve ranks that run no optimizer: these are warned about.
    """
    if torch.compiler.is_compiling() or not dist.is_initialized():
        return
    count = _reductions.get(group, 0)
    if not _continues(count >= CHECKED_REDUCTIONS):
        return
    settings = {
        "collective": "reduction of the maxima of delayed scaling",
        "pass": "forward" if forward else "backward",
        "number of maxima": columns,
        OPTIMIZER_STEPS: min(_updates.count, 1),
    }
    with _lock:
        _count_updates()
    _compare(group, settings, device, OPTIMIZER_STEPS)
    _reductions[group] = count + 1


before_reductions(_check_reduction)


def form(x: Any) -> str:
    """Return the dtype, quantized tensor class or operand format, and the shape."""
    if isinstance(x, Operand):
        name = "values" if x.format is None else x.format.name
        return f"{name} codes {str(x.codes.dtype).removeprefix('torch.')} {list(x.codes.shape)}"
    kind = (
        type(x).__name__
        if isinstance(x, QuantizedTensorStorage)
        else str(x.dtype).removeprefix("torch.")
    )
    return f"{kind} {list(x.shape)}"


def _record(group: Any) -> _GroupChecks:
    record = _checks.get(group)
    if record is None:
        watch(group)
        with _lock:
            _count_updates()
        record = _checks[group] = _GroupChecks(_updates.count)
    return record


@functools.cache
def _count_updates() -> None:
    """Count the optimizer steps of each thread from the first call on."""
    register_optimizer_step_post_hook(_count_update)


def _count_update(*_: object) -> None:
    _updates.count += 1


def _difference(descriptions: list[dict[str, str]], ranks: list[int]) -> str:
    """Return a message with the values that differ and their ranks."""
    names = dict.fromkeys([name for description in descriptions for name in description])
    lines: list[str] = []
    for name in names:
        values: dict[str, list[int]] = {}
        for number, description in zip(ranks, descriptions, strict=True):
            values.setdefault(description.get(name, "(none)"), []).append(number)
        if len(values) > 1:
            differing_values = "; ".join(
                [f"{_list_ranks(members)}: {value}" for value, members in values.items()]
            )
            lines.append(f"{name}: {differing_values}")
    remedy = (
        "give every rank the same number of micro-batches per step"
        if any(line.startswith(OPTIMIZER_STEPS) for line in lines)
        else "give every rank of the group the same settings and inputs of the same shape"
    )
    return f"the ranks of a process group differ, so that a collective can hang. {'. '.join(lines)}. Remedy: {remedy}"


def _list_ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class NamedFailures:
    """Context manager for a collective: its errors name the operation, the tensor, the group and the missing ranks."""

    def __init__(self, operation: str, x: Tensor, group: dist_group_type | None) -> None:
        # Without the tensor, whose memory may be freed before the collective ends.
        self._operation, self._dtype, self._shape, self._group = operation, x.dtype, x.shape, group

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not torch.compiler.is_compiling():
            ranks, rank = dist.get_process_group_ranks(self._group), dist.get_rank()
            message = (
                f"{self._operation} of {self._dtype} {list(self._shape)} over ranks {ranks} {_NAMED} {rank}: "
                f"{missing_ranks(ranks, rank)}. {error}"
            )
            raise type(error)(message) from error


_BACKENDS_IN_MESSAGES = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")


@contextmanager
def named_failures(group: dist_group_type | None = None) -> Iterator[None]:
    """Name the missing ranks in errors from other libraries' collectives, such as in `fully_shard`.

    with te.distributed.named_failures():
        loss = model(x).sum()
        loss.backward()

    This package's layers name failures in their own collectives; `fully_shard` and
    DistributedDataParallel start collectives outside the layers.

    Args:
        group: Process group for the collectives; None for the default group.

    Raises:
        RuntimeError: A collective has failed. The message has the ranks that do not take part, and the library's error.
            A collective of NCCL raises no error on the host; a thread logs the ranks that the others wait for.
    """
    if dist.is_initialized():
        watch(dist.group.WORLD if group is None else group)
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        failed = isinstance(error, dist.DistError) or any(
            name in text for name in _BACKENDS_IN_MESSAGES
        )
        if not failed or not dist.is_initialized() or _NAMED in text:
            raise
        ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
        missing = missing_ranks(ranks, rank)
        raise type(error)(
            f"a collective over ranks {ranks} {_NAMED} {rank}: {missing}. {text}"
        ) from error


class NamedWork:
    """Handle for an asynchronous collective whose failures are named; other attributes come from the wrapped handle."""

    def __init__(self, work: Any, failures: NamedFailures) -> None:
        self._work, self._failures = work, failures

    def wait(self, *arguments: Any, **options: Any) -> Any:
        """Wait for the collective."""
        with self._failures:
            return self._work.wait(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def started(
    operation: str, x: Tensor, group: dist_group_type | None, start: Callable[[], Any]
) -> NamedWork | None:
    """Start a collective whose failures are named.

    Args:
        operation: Collective name.
        x: This rank's tensor.
        group: Process group.
        start: Starts the collective and returns its handle, or None if it is complete.

    Returns:
        The handle, or None.
    """
    failures = NamedFailures(operation, x, group)
    with failures:
        work = start()
    return None if work is None else NamedWork(work, failures)


def missing_ranks(ranks: list[int], own: int) -> str:
    """Return which ranks do not report a collective failure within RESPONSE_SECONDS.

    Every rank whose collective has failed writes a key to the store of the default process group. A
    rank that has ended, or waits elsewhere, does not.
    """
    gone = "the store of the process group does not respond; the rank that holds it, usually rank 0, has ended"
    store: Any = dist.distributed_c10d._get_default_store()
    missing: list[int] = []
    try:
        store.set(f"transformer_engine/failed/{own}", "1")
    except RuntimeError:
        return gone
    for rank in ranks:
        seconds = RESPONSE_SECONDS if not missing else 0.1
        try:
            store.wait([f"transformer_engine/failed/{rank}"], timedelta(seconds=seconds))
        except dist.DistNetworkError:
            return gone
        except RuntimeError:
            # DistStoreError, or a plain one from a FileStore: the key has not been written
            missing.append(rank)
    if not missing:
        return "every rank reports a failure"
    verb = "have ended or do" if len(missing) > 1 else "has ended or does"
    return f"{_list_ranks(missing)} {verb} not take part"
