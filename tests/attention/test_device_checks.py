"""Number checks run at once on the host, otherwise when the numbers arrive, and never twice."""

from __future__ import annotations

import os

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support import forked
from tests.support.programs import search_path
from transformer_engine.pytorch.runtime import device_checks
from transformer_engine.pytorch.runtime.device_checks import Waiting, collect, demand


def below(numbers, limit):
    """A rule: every number is below the limit."""
    if numbers is not None and max(numbers) >= limit:
        raise ValueError(f"{max(numbers)} is not below {limit}; lower it")


class Copy:
    """Numbers that arrive when the test sets them, like those of a GPU."""

    def __init__(self, *numbers):
        self.numbers, self.there, self.waited = torch.tensor(numbers), False, False

    def demand(self, limit):
        collect(Waiting(below, [self.numbers], (limit,), lambda: self.there, self.wait))

    def wait(self):
        self.waited = self.there = True


@pytest.fixture(autouse=True)
def _nothing_under_way():
    device_checks._waiting.clear()
    yield
    device_checks._waiting.clear()


def test_numbers_on_the_host_are_checked_at_once_whatever_the_switch(monkeypatch):
    for value in (None, "0", "1"):
        monkeypatch.delenv("TE_CHECK", raising=False)
        if value is not None:
            monkeypatch.setenv("TE_CHECK", value)
        demand(below, (torch.tensor([1, 2]),), 3)
        demand(below, (None,), 3)
        with pytest.raises(ValueError, match=r"^7 is not below 3; lower it$"):
            demand(below, (torch.tensor([1, 7]),), 3)


def test_a_pending_check_waits_until_its_numbers_arrive():
    late = Copy(5)
    late.demand(3)
    device_checks._run_arrived_checks(wait=False)
    assert len(device_checks._waiting) == 1 and not late.waited
    late.there = True
    with pytest.raises(
        ValueError, match="found by TE_CHECK=1 in an earlier call: 5 is not below 3"
    ):
        device_checks._run_arrived_checks(wait=False)
    assert not late.waited
    te.check()


def test_te_check_waits_for_pending_checks_and_raises_the_first_failure():
    copies = [Copy(1), Copy(8), Copy(9)]
    for copy in copies:
        copy.demand(3)
    with pytest.raises(ValueError, match="8 is not below 3"):
        te.check()
    assert [copy.waited for copy in copies] == [True, True, False]
    te.check()


def test_passed_checks_are_removed():
    for number in range(100):
        copy = Copy(number)
        copy.there = True
        copy.demand(1000)
    device_checks._run_arrived_checks(wait=False)
    assert not device_checks._waiting


def test_meta_and_fake_tensors_are_not_read():
    demand(below, (torch.empty(3, device="meta"),), 0)
    with torch._subclasses.FakeTensorMode():
        demand(below, (torch.zeros(3),), 0)


def test_torch_compile_traces_through_a_check():
    def run(x):
        demand(below, (x,), 0)
        return x + 1

    x = torch.ones(2)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="eager")(x), x + 1)


def test_pending_failures_are_printed_when_the_process_ends(tmp_path):
    program = (
        "import torch; from transformer_engine.pytorch.runtime.device_checks import Waiting, collect\n"
        "def rule(numbers): raise ValueError(f'{numbers} will not do')\n"
        "collect(Waiting(rule, [torch.tensor([4])], (), lambda: False, lambda: None))\n"
    )
    environment = {**os.environ, "PYTHONPATH": search_path()}
    ended = forked.Program(["-c", program], tmp_path, environment)
    assert ended.finish() == 0, ended.errors
    assert (
        "transformer_engine: found by TE_CHECK=1 in an earlier call: [4] will not do"
        in ended.errors
    )


@pytest.mark.gpu
def test_numbers_on_a_gpu_are_checked_without_waiting_for_it(monkeypatch):
    x = torch.tensor([1, 7], device="cuda")
    monkeypatch.delenv("TE_CHECK", raising=False)
    demand(below, (x,), 3)
    te.check()
    monkeypatch.setenv("TE_CHECK", "1")
    torch.cuda._sleep(100_000_000)
    demand(below, (x,), 3)  # the copy waits for the sleeping kernel
    x.zero_()  # the check must read the call's numbers, not later ones
    assert len(device_checks._waiting) == 1
    with pytest.raises(ValueError, match="7 is not below 3"):
        te.check()


@pytest.mark.gpu
def test_a_call_waits_for_its_numbers_on_request(monkeypatch):
    monkeypatch.setenv("TE_CHECK", "2")
    with pytest.raises(ValueError, match=r"^7 is not below 3; lower it$"):
        demand(below, (torch.tensor([1, 7], device="cuda"),), 3)
    assert not device_checks._waiting


@pytest.mark.gpu
def test_a_captured_graph_contains_no_check(monkeypatch):
    monkeypatch.setenv("TE_CHECK", "1")
    x, graph = torch.tensor([1, 7], device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        demand(below, (x,), 3)
        y = x + 1
    graph.replay()
    te.check()
    assert y.tolist() == [2, 8]
