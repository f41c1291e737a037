"""A recorder for machines without a GPU: a replay runs the body again, and writes into the first run's results."""

from __future__ import annotations

import contextlib
import gc

import torch


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
        made = self.body()
        for static, result in zip(self.results, made, strict=True):
            assert (static is None) == (result is None)
            if static is not None:
                static.copy_(result.detach())

    def reset(self):
        self.results = ()
        self.body = None


class RerunRecorder:
    """Records bodies as `RerunRecording`; log: the names of the replayed bodies in order."""

    def __init__(self):
        self.log = []
        self.recordings = []
        self.warm_ups = 0

    def warming(self):
        self.warm_ups += 1
        return contextlib.nullcontext()

    def on_capture_stream(self):
        return contextlib.nullcontext()

    def record(self, body):
        with torch.enable_grad():
            recording = RerunRecording(body, self.log)
        self.recordings.append((body.__name__, recording))
        return recording


class CaptureRecorder(RerunRecorder):
    """Records without an effect on memory, like a capture: every tensor keeps the value it had before.

    New tensors of the body, such as gradients and states, hold whatever the body computed; nothing may read them before
    the first replay.
    """

    pool = None

    def record(self, body):
        memories = {}
        with torch._C.DisableTorchFunctionSubclass():  # the step's reads are watched, not these
            for tensor in [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]:
                for one in (tensor, tensor.grad if tensor.is_leaf else None):
                    if one is not None and one.layout == torch.strided and one.device.type == "cpu":
                        storage = one.untyped_storage()
                        memories[storage.data_ptr()] = storage, storage.clone()
        random = torch.get_rng_state()
        try:
            return super().record(body)
        finally:
            for storage, before in memories.values():
                storage.copy_(before)
            torch.set_rng_state(random)
