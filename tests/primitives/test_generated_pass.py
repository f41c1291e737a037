"""A generated pass launches the work that a function on symbols lists, on other tensors."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from transformer_engine.common.kernels import launch as records
from transformer_engine.common.kernels.launch import Handle, Launch, Output
from transformer_engine.pytorch.fast.generated_pass import generate
from transformer_engine.pytorch.fast.scratch_plan import Lifetime, plan_scratch
from transformer_engine.pytorch.fast.symbols import Instructions, NotRecordable
from transformer_engine.pytorch.runtime.launching import run, run_program_into

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

CPU = torch.device("cpu")


class _Kernel:
    """The attributes of a kernel that a launch reads: its name and the names of its arguments."""

    def __init__(self, name: str, arguments: int):
        self.fn = self
        self.__name__ = name
        self.arg_names = [f"a{index}" for index in range(arguments)]


def record(name: str, inputs: int, *outputs: Output | None) -> Launch:
    return Launch(_Kernel(name, inputs + len(outputs)), (1, 1, 1), outputs, (), (), 1)


@pytest.fixture
def started(monkeypatch) -> list[tuple[str, list[int]]]:
    """A list that receives (kernel, addresses) for every launch; nothing is computed."""
    calls = []

    def compiled(launch, tensors):
        def start(columns, rows, planes, stream, *addresses):
            calls.append((launch.kernel.__name__, list(addresses)))

        return Handle(start, launch.grid, lambda device: 0, (), ())

    for launch in (SQUARED, ADDED):
        launch.handles.clear()  # which write into another test's list
    monkeypatch.setattr(records, "_compile", compiled)
    return calls


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.zeros(8, 16) for _ in range(count)]


def generate_pass(work, argument):
    """Generated pass for work(*given), which is evaluated on symbols."""
    instructions = Instructions(argument, CPU)
    results = work(*instructions.symbols())
    return generate(instructions, [instructions.symbol(result) for result in results])


SQUARED = record("squared", 1, Output((8, 16), "float32"))
ADDED = record("added", 2, Output((8, 16), "float32"), Output((8,), "float32"))


def add_squares(x, y):
    (squared,) = run(SQUARED, (x.view(-1, 16),))
    total, sums = run(ADDED, (squared, y))
    return total.view(2, 4, 16), None, x, sums


def test_a_generated_pass_launches_the_same_kernels_on_its_inputs(started):
    generated = generate_pass(add_squares, tensors(2))
    assert started == []
    x, y = tensors(2)
    inputs = [x, y]
    total, nothing, same, sums = generated(inputs)
    assert inputs == [] and nothing is None and same is x
    assert total.shape == (2, 4, 16) and total.is_contiguous() and sums.shape == (8,)
    (first, (of_x, squared)), (second, (read, of_y, result, of_sums)) = started
    assert (first, second) == ("squared", "added")
    assert of_x == x.data_ptr() and of_y == y.data_ptr() and read == squared
    assert result == total.data_ptr() and of_sums == sums.data_ptr()


def test_every_call_allocates_new_tensors(started):
    generated = generate_pass(add_squares, tensors(2))
    first, second = generated(tensors(2)), generated(tensors(2))
    assert first[0].data_ptr() != second[0].data_ptr()


def test_a_generated_pass_returns_none_for_tensors_that_are_not_aligned(started):
    generated = generate_pass(add_squares, tensors(2))
    started.clear()
    inputs = [torch.zeros(129)[1:].view(8, 16), *tensors(1)]
    assert generated(inputs) is None
    assert len(inputs) == 2 and started == []


def test_small_buffers_in_a_pass_share_memory(started):
    chained = record("chained", 1, Output((8, 16), "float32"))

    def work(x):
        for _ in range(4):
            (x,) = run(chained, (x,))
        return (x,)

    generated = generate_pass(work, tensors(1))
    assert generated.source.count("empty(") == 2  # the scratch and the result
    started.clear()
    generated(tensors(1))
    places = [addresses[1] for _, addresses in started[:3]]
    assert places[0] != places[1] and places[0] == places[2]


def square_of_torch_sum(x, y):
    return run(SQUARED, (x + y,))


def square_of_concatenation(x, y):
    return run(SQUARED, (torch.cat([x, y]),))


def square_after_write(x, y):
    x.add_(1)
    return run(SQUARED, (x,))


def square_after_fill(x, y):
    x[0] = 1
    return run(SQUARED, (x,))


def square_of_copy(x, y):
    return run(SQUARED, (x.t().contiguous(),))


def square_into_argument(x, y):
    run_program_into(SQUARED, (x, y), CPU)
    return (x,)


def add_global_tensor(x, y):
    return run(ADDED, (x, KEPT))


KEPT = torch.zeros(8, 16)


@pytest.mark.parametrize(
    ("work", "reason"),
    (
        (square_of_torch_sum, "__add__"),
        (square_of_concatenation, "torch computes with a tensor of the pass"),
        (square_after_write, "add_"),
        (square_after_fill, "__setitem__"),
        (square_of_copy, "copied because it is not contiguous"),
        (square_into_argument, "data_ptr"),
        (add_global_tensor, "a tensor that is neither an input nor a result"),
    ),
)
def test_a_function_that_does_more_than_launch_kernels_is_not_recorded(work, reason, started):
    with pytest.raises(NotRecordable, match=reason):
        generate_pass(work, tensors(2))
    assert started == [] and all(not tensor.any() for tensor in tensors(2))


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize("argument", [torch.zeros(8, 16).as_subclass(Marked), torch.zeros(0, 16)])
def test_subclass_tensors_and_empty_tensors_are_not_recorded(argument):
    with pytest.raises(NotRecordable, match="a tensor is"):
        Instructions([argument], CPU)


def test_a_state_tensor_is_replaced_by_the_passed_tensor(started):
    (state,) = tensors(1)

    def work(x, _):
        return run(ADDED, (x, state))

    generated = generate_pass(work, [*tensors(1), state])
    x, other = tensors(2)
    generated([x, other])
    ((_, addresses),) = started
    assert addresses[:2] == [x.data_ptr(), other.data_ptr()]


def test_reused_memory_belongs_to_its_second_buffer(started):
    def work(x):
        run(SQUARED, (x,))
        return run(SQUARED, (x,))

    generated = generate_pass(work, tensors(1))
    started.clear()
    (second,) = generated(tensors(1))
    assert [addresses[1] == second.data_ptr() for _, addresses in started] == [False, True]


def test_scratch_buffers_with_overlapping_lifetimes_do_not_share_memory():
    lives = [
        Lifetime(buffer=0, first=0, last=3, bytes=1000),
        Lifetime(1, 1, 2, 500),
        Lifetime(2, 3, 5, 400),
        Lifetime(3, 4, 6, 2000),
        Lifetime(4, 6, 7, 10),
    ]
    offsets, total = plan_scratch(lives)
    for a in lives:
        for b in lives:
            if a.buffer < b.buffer and a.first <= b.last and b.first <= a.last:
                first, second = offsets[a.buffer], offsets[b.buffer]
                assert first + a.bytes <= second or second + b.bytes <= first
    assert all(offset % 256 == 0 for offset in offsets.values())
    assert total < sum(life.bytes for life in lives)
