"""Launches and programs on torch tensors: allocated and passed tensors, and their order."""

from __future__ import annotations

import importlib.util
import math
import threading

import pytest
import torch

from transformer_engine.common.kernels import launch as records
from transformer_engine.common.kernels.launch import Launch, Output
from transformer_engine.common.kernels.program import Program, ProgramStep
from transformer_engine.pytorch.runtime import device
from transformer_engine.pytorch.runtime.launching import perform, run, run_program_into

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


class _Kernel:
    """The attributes of a kernel that a record reads: its name and the names of its arguments."""

    def __init__(self, name: str, arguments: int):
        self.fn = self
        self.__name__ = name
        self.arg_names = [f"a{index}" for index in range(arguments)]


def record(name: str, inputs: int, *outputs: Output | None, **rest) -> Launch:
    return Launch(_Kernel(name, inputs + len(outputs)), (1, 1, 1), outputs, (), (), 1, **rest)


@pytest.mark.parametrize("grid", [(1, 65536, 1), (1, 1, 65536), (2**31, 1, 1)])
def test_a_grid_that_cuda_cannot_launch_is_rejected(grid):
    with pytest.raises(
        ValueError, match=rf"^one needs a grid of \({grid[0]}, .* at most .* split the batch"
    ):
        Launch(_Kernel("one", 1), grid, (), (), (), 1)
    Launch(_Kernel("one", 1), (2**31 - 1, 65535, 65535), (), (), (), 1)


@pytest.fixture
def started(monkeypatch) -> list[tuple[str, list[torch.Tensor | None]]]:
    """(kernel, tensors) for every launch; nothing is computed."""
    calls = []

    def compiled(launch, tensors):
        records._check(launch, tensors)

        def start(device, pointers, args, result):
            every = [*args, *result]
            assert [*pointers] == [
                None if tensor is None else tensor.data_ptr() for tensor in every
            ]
            calls.append((launch.kernel.__name__, every))

        return start

    monkeypatch.setattr(records, "_compile", compiled)
    return calls


def test_outputs_are_allocated_as_the_record_declares(started, device):
    x = torch.ones(3, device=device)
    codes, nothing, transposed, zero, low = run(
        record(
            "made",
            1,
            Output((4, 6), "float8_e4m3fn"),
            None,
            Output((2, 5), "float32", transposed=True),
            Output((1,), "float32", begins=0.0),
            Output((7,), "float32", begins=-math.inf),
        ),
        (x,),
    )
    assert nothing is None and codes.dtype == torch.float8_e4m3fn and codes.is_contiguous()
    assert transposed.shape == (5, 2) and transposed.t().is_contiguous()
    assert zero.tolist() == [0.0] and low.tolist() == [-math.inf] * 7
    assert {tensor.device for tensor in (codes, transposed, zero, low)} == {x.device}
    (name, tensors), repeated = (
        started[0],
        run(record("again", 1, Output((1,), "float32", begins=0.0)), (x,)),
    )
    assert name == "made" and tensors[0] is x and tensors[1] is codes
    assert repeated[0].data_ptr() != zero.data_ptr()


def test_a_second_call_allocates_new_tensors(started, device):
    launch, x = record("made", 1, Output((4,), "float32")), torch.ones(3, device=device)
    (first,), (second,) = run(launch, (x,)), run(launch, (x,))
    assert first.data_ptr() != second.data_ptr() and len(launch.handles) == 1


def test_a_launch_without_output_allocation_writes_the_callers_outputs(started, device):
    x, out = torch.ones(3, device=device), torch.empty(2, 2, device=device)
    launch = record("given", 1, Output(None, "float32"))
    run_program_into(launch, (x, out), x.device)
    assert started == [("given", [x, out])]
    with pytest.raises(AssertionError, match=r"use run_program_into"):
        run(launch, (x,))


def test_other_input_dtypes_and_alignments_are_compiled_separately(started, device):
    launch = record("made", 1, Output((4,), "float32"))
    full = torch.ones(64, device=device)
    for x in (full[:32], full[4:36], full[1:33], full.half()):
        run(launch, (x,))
    assert len(launch.handles) == 3  # at multiples of 16 bytes, elsewhere, float16


def test_scratch_memory_is_allocated_by_torch_in_every_thread_and_not_for_the_callers_kernels(
    monkeypatch,
):
    triton = pytest.importorskip("triton")
    from triton.runtime import _allocation

    allocated, arguments = [], []
    monkeypatch.setattr(records, "_scratch", lambda *of_kernel: allocated.append(of_kernel))

    def start_kernel(*args):
        _allocation._allocator.get()(640, 128, None)
        arguments.append(args)

    start = records._with_scratch(start_kernel)
    before = _allocation._allocator.get()
    triton.set_allocator(actual := lambda size, alignment, stream: None)
    start(0, [1])
    assert _allocation._allocator.get() is actual
    triton.set_allocator(before)
    thread = threading.Thread(target=start, args=(0, [2]))
    thread.start()
    thread.join()
    assert allocated == [(640, 128, None)] * 2 and arguments == [(0, [1]), (0, [2])]


def test_a_program_passes_buffers_between_steps_and_returns_the_listed_results(started, device):
    first = record("first", 2, Output((4,), "float32"), None)
    second = record("second", 3, Output((2,), "float32", begins=0.0), Output((3,), "float32"))
    program = Program(
        ("x", "y"),
        (
            ProgramStep(first, ("x", None), ("scratch", None)),
            ProgramStep(second, ("scratch", "y", "x"), ("sums", "other")),
        ),
        ("other", None, "sums"),
    )
    x, y = torch.ones(3, device=device), torch.ones(2, device=device)
    other, nothing, sums = perform(program, (x, y))
    assert nothing is None and other.shape == (3,) and sums.tolist() == [0.0, 0.0]
    (_, one), (_, two) = started
    assert one[0] is x and one[1] is None and one[3] is None
    assert two[0] is one[2] and two[1] is y and two[2] is x and two[3] is sums and two[4] is other


def test_a_program_writes_into_the_callers_buffer(started, device):
    first = record("first", 1, Output((1,), "float32", begins=0.0))
    second = record("second", 2, Output(None, "uint8"), None, Output((1,), "float32"))
    program = Program(
        ("x",),
        (
            ProgramStep(first, ("x",), ("amax",)),
            ProgramStep(second, ("x", "amax"), ("codes", None, "scale")),
        ),
        ("scale", "amax"),
        into=("codes",),
    )
    x, codes = torch.ones(3, device=device), torch.empty(5, dtype=torch.uint8, device=device)
    for _ in range(2):
        scale, amax = perform(program, (x, codes))
        (_, measured), (_, tensors) = started[-2:]
        assert measured[1] is amax and amax.tolist() == [0.0]
        assert (
            tensors[1] is amax
            and tensors[2] is codes
            and tensors[3] is None
            and tensors[4] is scale
        )
    with pytest.raises(ValueError, match=r"no step makes the result 'others'"):
        Program(("x",), (ProgramStep(first, ("x",), ("amax",)),), ("amax",), into=("others",))


def test_compiled_code_reads_hardware_capabilities(monkeypatch):
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.setattr(device, "_architecture", lambda index: ("nvidia", "9.0"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def scaled(x):
        factor = 2.0 if device.current_hardware().has("fp8 products") else 3.0
        if (reason := device.current_hardware().lacks("mxfp8 products")) is not None:
            reason = f"{reason}: it multiplies in bfloat16"
        return x * factor if reason is None else x * factor + 1

    x = torch.ones(2)
    compiled = torch.compile(scaled, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), x * 2 + 1)
