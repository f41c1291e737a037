"""Host costs of autograd: applying a function, and the thread that runs backward passes.

`Function.apply` checks in every call whether the function has a `setup_context`, which no function here has, and
unwraps its arguments with a generator. Without both, a warm forward and backward pass takes 2 to 4 percent less host
time: Linear 137 us instead of 140, LayerNormMLP 183 us instead of 190 (bfloat16, `benchmarks/pretended_gpu.py`).

torch runs the backward pass of CUDA tensors on one thread per GPU, so that several GPUs of one process work at once.
With one GPU this thread gains nothing and costs two wake-ups and, for nodes written in Python, every cache line that
the forward pass has warmed on another core: 0.76 ms instead of 1.30 ms without it for the backward pass of a small
layer on an H200 host. `torch.autograd.set_multithreading_enabled(False)` disables it for the calling thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ...common import env

_transforms_are_active = torch._C._are_functorch_transforms_active
_unwrapped = torch._C._functorch.unwrap_if_dead  # pyright: ignore[reportAttributeAccessIssue]


class _Thread(threading.local):
    switched = False


_thread = _Thread()


def applier(function: type[Function]) -> Callable[..., Any]:
    """Return a faster function.apply; compilers and the transforms of functorch get function.apply itself."""
    node: Any = super(Function, function).apply  # pyright: ignore[reportAttributeAccessIssue]

    def apply(*args: Any) -> Any:
        if torch.compiler.is_compiling() or _transforms_are_active():
            return function.apply(*args)
        return node(*[_unwrapped(value) if isinstance(value, Tensor) else value for value in args])

    return apply


def run_backward_on_calling_thread() -> None:
    """Run the backward passes of the calling thread on this thread, unless it may feed several GPUs.

    Applies if one GPU is visible or a process group is initialized (one process per GPU), and
    TE_BACKWARD_THREADS=1 is not set. Switches once per thread: a caller that enables torch's threads again keeps them.
    """
    if env.flag("TE_BACKWARD_THREADS"):
        return
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if (distributed or torch.cuda.device_count() == 1) and not _thread.switched:
        _thread.switched = True
        torch.autograd.set_multithreading_enabled(False)


def in_first_run() -> bool:
    """Return whether an autograd function is computing its forward pass, as the first run of a reentrant checkpoint.

    torch disables gradients and forward-mode gradients there, for the checkpoints of every library; `torch.no_grad()`
    leaves the second mode enabled, and inference mode admits no backward pass.
    """
    return not torch.is_grad_enabled() and gradients_expected(training=False)


def gradients_expected(training: bool) -> bool:
    """Return whether a call without recorded gradients may have a second run with them, whose results must be equal.

    True for modules in training mode and for the first run of a reentrant checkpoint, outside of inference mode.
    """
    return (training or not torch._C._is_fwd_grad_enabled()) and not torch.is_inference_mode_enabled()
