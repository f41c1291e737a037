"""Host time optimizations. Results are bit-identical without them.

`TE_FAST=0` disables all optimizations: the plain functions of `pytorch/functions` then run in every
call, and environment variables are read through `os.environ`. The variable is read once, at import.
Spec, plan and backend caches are not affected.

| piece | used by | docstring with its gain |
| --- | --- | --- |
| a warm pass as one generated function | `functions/layer.py`, `ops/prepared_chain.py` | `compiled.py` |
| symbolic tensors, which record a pass | operations below `functions` | `compiled.py` |
| products in such a function | `functions/linear_operands.py` | `compiled.py` |
| collectives in such a function | `functions/communication.py` | `recorded_collectives.py` |
| the source of such a function | `compiled.py` | `generated_pass.py` |
| backward passes on the calling thread | specs of layers and attention plans | `run_backward_on_calling_thread` |
| reads of environment variables | keys of caches | `_readers` in `common/env.py` |

`LayerSpec.compiled` and `PreparedChain.compiled` hold a `CompiledLayer`, or None. Operations below
`functions` recognize a `Symbol` among their inputs. A piece that saves less than 3 % of a small layer's host time is
removed; `benchmarks/fast_pieces.py` measures all pieces in one process without a GPU.
"""

from __future__ import annotations

import threading

import torch

from ...common import env

ENABLED = env.FAST


class _Thread(threading.local):
    switched = False


_thread = _Thread()


def run_backward_on_calling_thread() -> None:
    """Run the calling thread's backward passes on this thread, unless it may feed several GPUs.

    Applies if one GPU is visible or a process group is initialized (one process per GPU), and
    TE_BACKWARD_THREADS=1 is not set. Switches once per thread: a caller that enables torch's threads again keeps them.

    torch runs the backward pass for CUDA tensors on one thread per GPU, so that several GPUs in one
    process work at once. With one GPU the extra thread only costs time: two wake-ups, and cold
    caches for nodes written in Python. Without it the backward pass of a small layer takes 42 %
    less host time: 0.76 ms instead of 1.30 ms on an H200 host, wall time.
    """
    if not ENABLED or env.flag("TE_BACKWARD_THREADS"):
        return
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if (distributed or torch.cuda.device_count() == 1) and not _thread.switched:
        _thread.switched = True
        torch.autograd.set_multithreading_enabled(False)
