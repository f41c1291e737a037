"""A line repeats what was recorded, on other tensors; what cannot be repeated is no line, and says why."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from transformer_engine.common.kernels import launch as records
from transformer_engine.common.kernels.launch import Handle, Launch, Output
from transformer_engine.pytorch.runtime.launching import run, run_into
from transformer_engine.pytorch.runtime.recording import Recording
from transformer_engine.pytorch.runtime.scratch import Life, plan
from transformer_engine.pytorch.runtime.straight_line import straight_line

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

CPU = torch.device("cpu")


class _Kernel:
    """What a record reads of a kernel: its name and those of its arguments."""

    def __init__(self, name: str, arguments: int):
        self.fn = self
        self.__name__ = name
        self.arg_names = [f"a{place}" for place in range(arguments)]


def record(name: str, inputs: int, *outputs: Output | None) -> Launch:
    return Launch(_Kernel(name, inputs + len(outputs)), (1, 1, 1), outputs, (), (), 1)


@pytest.fixture
def started(monkeypatch) -> list[tuple[str, list[int]]]:
    """(kernel, addresses) of every start; nothing is computed."""
    seen = []

    def compiled(launch, tensors):
        def start(columns, rows, planes, stream, *addresses):
            seen.append((launch.kernel.__name__, list(addresses)))

        return Handle(start, launch.grid, lambda device: 0, (), ())

    for launch in (SQUARED, ADDED):
        launch.handles.clear()  # which write into another test's list
    monkeypatch.setattr(records, "_compile", compiled)
    return seen


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.zeros(8, 16) for _ in range(count)]


def recorded(work, given):
    """(recording, line or None) of work(*given)."""
    with Recording(given, CPU) as recording:
        results = work(*given)
    answered = recording.results(results)
    line = straight_line(recording, answered) if recording.refusal is None else None
    return recording, line if recording.refusal is None else None


SQUARED = record("squared", 1, Output((8, 16), "float32"))
ADDED = record("added", 2, Output((8, 16), "float32"), Output((8,), "float32"))


def added(x, y):
    (squared,) = run(SQUARED, (x.view(-1, 16),))
    total, sums = run(ADDED, (squared, y))
    return total.view(2, 4, 16), None, x, sums


def test_a_line_starts_the_same_kernels_on_what_it_is_given(started):
    _, line = recorded(added, tensors(2))
    assert line is not None
    started.clear()
    x, y = tensors(2)
    given = [x, y]
    total, nothing, same, sums = line(given)
    assert given == [] and nothing is None and same is x
    assert total.shape == (2, 4, 16) and total.is_contiguous() and sums.shape == (8,)
    (first, (of_x, squared)), (second, (read, of_y, made, of_sums)) = started
    assert (first, second) == ("squared", "added")
    assert of_x == x.data_ptr() and of_y == y.data_ptr() and read == squared
    assert made == total.data_ptr() and of_sums == sums.data_ptr()


def test_every_call_makes_tensors_of_its_own(started):
    _, line = recorded(added, tensors(2))
    first, second = line(tensors(2)), line(tensors(2))
    assert first[0].data_ptr() != second[0].data_ptr()


def test_a_line_leaves_alone_what_is_not_aligned(started):
    _, line = recorded(added, tensors(2))
    started.clear()
    given = [torch.zeros(129)[1:].view(8, 16), *tensors(1)]
    assert line(given) is None
    assert len(given) == 2 and started == []


def test_small_buffers_that_nobody_sees_share_memory(started):
    chained = record("chained", 1, Output((8, 16), "float32"))

    def work(x):
        for _ in range(4):
            (x,) = run(chained, (x,))
        return (x,)

    _, line = recorded(work, tensors(1))
    assert line.source.count("empty(") == 2  # the scratch and the result
    started.clear()
    line(tensors(1))
    places = [addresses[1] for _, addresses in started[:3]]
    assert places[0] != places[1] and places[0] == places[2]


def computed(x, y):
    return run(SQUARED, (x + y,))


def written(x, y):
    x.add_(1)
    return run(SQUARED, (x,))


def filled(x, y):
    x[0] = 1
    return run(SQUARED, (x,))


def into(x, y):
    run_into(SQUARED, (x, y), CPU)
    return (x,)


def remembered(x, y):
    return run(ADDED, (x, KEPT))


def subclass(x, y):
    return (x.as_subclass(Marked),)


class Marked(torch.Tensor):
    pass


KEPT = torch.zeros(8, 16)


@pytest.mark.parametrize(
    ("work", "refusal"),
    (
        (computed, "a tensor that it was not given"),
        (written, "torch's add_ writes"),
        (filled, "torch's __setitem__ writes"),
        (into, "a launch writes to what its caller has made"),
        (remembered, "a tensor that it was not given"),
        (subclass, "no plain tensor"),
    ),
)
def test_what_a_line_would_not_repeat_is_refused(work, refusal, started):
    recording, line = recorded(work, tensors(2))
    assert line is None and refusal in recording.refusal and not recording.passing


def test_a_tensor_that_is_given_twice_is_refused_this_time_only(started):
    (x,) = tensors(1)
    recording, line = recorded(added, [x, x.view(16, 8)])
    assert line is None and "share memory" in recording.refusal and recording.passing


def test_memory_that_is_used_again_is_that_of_its_second_buffer(started):
    def work(x):
        run(SQUARED, (x,))
        return run(SQUARED, (x,))

    _, line = recorded(work, tensors(1))
    started.clear()
    (second,) = line(tensors(1))
    assert [addresses[1] == second.data_ptr() for _, addresses in started] == [False, True]


def test_scratch_lies_apart_while_it_lives_together():
    lives = [
        Life(0, 0, 3, 1000),
        Life(1, 1, 2, 500),
        Life(2, 3, 5, 400),
        Life(3, 4, 6, 2000),
        Life(4, 6, 7, 10),
    ]
    planned = plan(lives)
    for a in lives:
        for b in lives:
            if a.buffer < b.buffer and a.first <= b.last and b.first <= a.last:
                first, second = planned.offsets[a.buffer], planned.offsets[b.buffer]
                assert first + a.bytes <= second or second + b.bytes <= first
    assert all(offset % 256 == 0 for offset in planned.offsets.values())
    assert planned.bytes < sum(life.bytes for life in lives)
