"""Recorders for machines without a GPU.

A replay of `RerunRecorder` runs the body again and writes into the first run's results. A replay of `CaptureRecorder`
repeats the first run's operations, with the numbers that the host computed then.
"""

from __future__ import annotations

import contextlib
import gc

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Operations by which the host reads a device value.
WAITING = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default})


class RerunRecording:
    """A recording with static results: every replay writes new values into them, as a graph does."""

    def __init__(self, body, log):
        self.body = body
        self.log = log
        self.replays = 0
        self.results = [None if r is None else r.detach().clone() for r in body()]

    def replay(self, stream=None, event=None):
        self.replays += 1
        self.log.append(self.body.__name__)
        output = self.body()
        for static, result in zip(self.results, output, strict=True):
            assert (static is None) == (result is None)
            if static is not None:
                static.copy_(result.detach())

    def reset(self):
        self.results = ()
        self.body = None


class RerunRecorder:
    """Records bodies as `RerunRecording`.

    Attributes:
        log: Names of replayed bodies in order.
        recordings: (name, recording) per body.
        warm_ups: Number of warm-ups.
        handed_over: Tensors that the current stream reads after the recordings' stream has computed them.
        pool: Memory pool for the next recording.
    """

    recording_type = RerunRecording

    def __init__(self):
        self.log = []
        self.recordings = []
        self.warm_ups = 0
        self.handed_over = []
        self.pool = None

    def warming(self):
        self.warm_ups += 1
        return contextlib.nullcontext()

    def capture_stream_context(self):
        return contextlib.nullcontext()

    def keep_until_read(self, tensors):
        self.handed_over += tensors

    def in_pool(self, pool=None):
        """Return this recorder for a memory pool; None: a new pool."""
        self.pool = object() if pool is None else pool
        return self

    def record(self, body):
        with torch.enable_grad():
            recording = self.recording_type(body, self.log)
        self.recordings.append((body.__name__, recording))
        return recording


class OperationTape(TorchDispatchMode):
    """A body's operations with their arguments, which a replay repeats on the same memory.

    The host's numbers and decisions are constants in the tape, as in a CUDA graph.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(
            kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for kind in types
        ):
            return NotImplemented  # a quantized tensor: its own operations are recorded
        kwargs = kwargs or {}
        if func in WAITING:
            raise RuntimeError(f"operation {func} not permitted when stream is capturing")
        result = func(*args, **kwargs)
        inputs = [
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        ]
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        memories = {tensor.untyped_storage()._cdata for tensor in inputs}
        fresh = [output.untyped_storage()._cdata not in memories for output in outputs]
        if func._schema.is_mutable or any(fresh):
            self.calls.append((func, *plain((args, kwargs, outputs)), fresh))
        return result

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, outputs, fresh in self.calls:
                result = func(*args, **kwargs)
                repeated = [
                    leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)
                ]
                for output, value, is_fresh in zip(outputs, repeated, fresh, strict=True):
                    if is_fresh:
                        output.copy_(value)


def plain(values):
    """Tensors detached from autograd, on the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach(), values)


class TapeRecording:
    """A body's tape and its results, which every replay overwrites."""

    def __init__(self, body, log):
        self.name = body.__name__
        self.log = log
        self.tape = OperationTape()
        with self.tape:
            self.results = body()

    def replay(self, stream=None, event=None):
        self.log.append(self.name)
        self.tape.replay()

    def reset(self):
        self.results = ()
        self.tape.calls.clear()


# Tensors of a compiler, which other tests may have left in its caches.
WITHOUT_MEMORY = (FakeTensor, FunctionalTensor)


class CaptureRecorder(RerunRecorder):
    """Records operations without an effect on memory, like a capture: every tensor keeps the value it had before.

    The body's new tensors, such as gradients and states, hold whatever the body computed; nothing may read
    them before the first replay.
    """

    recording_type = TapeRecording

    def record(self, body):
        memories = {}
        with torch._C.DisableTorchFunctionSubclass():  # the step's reads are watched, not these
            for tensor in [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]:
                for one in (tensor, tensor.grad if tensor.is_leaf else None):
                    if one is None or isinstance(one, WITHOUT_MEMORY):
                        continue
                    if one.layout == torch.strided and one.device.type == "cpu":
                        storage = one.untyped_storage()
                        memories[storage.data_ptr()] = storage, storage.clone()
        random = torch.get_rng_state()
        try:
            return super().record(body)
        finally:
            for storage, before in memories.values():
                storage.copy_(before)
            torch.set_rng_state(random)
