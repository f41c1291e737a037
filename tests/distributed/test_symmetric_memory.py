"""All-reduce over symmetric memory: its schedule on simulated thread memory, and backend selection."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import transformer_engine.pytorch as te
from tests.distributed.pretended_memory import Memory
from tests.distributed.ranks import run_on_ranks
from tests.distributed.threaded_ranks import run_on_threads
from transformer_engine.pytorch.distributed import (
    get_symmetric_memory_tensor,
    symmetric_all_reduce,
    symmetric_memory,
)
from transformer_engine.pytorch.distributed.symmetric_memory import (
    ALL_REDUCE,
    PROCESS_GROUP,
    SYMMETRIC,
    Reduction,
    reduce_values,
    unsupported_reason,
)


def draw_values(rank: int, count: int, dtype: torch.dtype, turn: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randn(count, generator=generator).to(dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("two_shots", [False, True])
def test_all_ranks_get_the_float32_sum_in_the_order_of_ranks(size, two_shots):
    memory = Memory(size)
    counts = (1, size - 1 or 1, 7, 64)
    result: list[Any] = [None] * size

    def run(rank: int) -> None:
        buffer = torch.full((64,), float("nan"), dtype=torch.bfloat16)
        peers = memory.peers(rank, buffer)
        results = []
        # the second message overwrites the first message's buffer
        for turn, count in enumerate(counts):
            values = draw_values(rank, count, torch.bfloat16, turn)
            reduce_values(peers, buffer, values, two_shots)
            results.append(values)
        result[rank] = results

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for turn, count in enumerate(counts):
        total = torch.zeros(count)
        for rank in range(size):
            total += draw_values(rank, count, torch.bfloat16, turn).float()
        for rank in range(size):
            assert torch.equal(result[rank][turn], total.to(torch.bfloat16)), (turn, rank)


def test_a_row_parallel_layer_sums_over_symmetric_memory_where_it_is_available(monkeypatch):
    memories: dict[Any, Memory] = {}
    lock = threading.Lock()

    def allocate(numel: int, dtype: torch.dtype, device: torch.device, group: Any) -> Any:
        with lock:
            memory = memories.setdefault(numel, Memory(2))
        values = torch.zeros(numel, dtype=dtype)
        return values, memory.peers(dist.get_rank(group), values)

    buffers = threading.local()

    def buffer(numel: int, dtype: torch.dtype, device: torch.device, group: Any, tag: Any) -> Any:
        recognized = vars(buffers).setdefault("made", {})
        if numel not in recognized:
            recognized[numel] = symmetric_memory._SharedBuffer(
                *allocate(numel, dtype, device, group), group
            )
        return recognized[numel]

    monkeypatch.setattr(symmetric_memory, "_buffer", buffer)
    monkeypatch.setattr(
        ALL_REDUCE, "choose", lambda key: PROCESS_GROUP if key[0] is None else SYMMETRIC
    )

    def run(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layer = te.Linear(
            32,
            16,
            parallel_mode="row",
            tp_group=dist.group.WORLD,
            symmetric_ar_type="two_shot",
            device="cpu",
        )
        with torch.no_grad():
            layer.weight.copy_(draw_values(rank, 16 * 16, torch.float32).view(16, 16))
            layer.bias.fill_(rank * 0 + 1)
        x = draw_values(rank + 7, 5 * 16, torch.float32).view(5, 16).requires_grad_()
        y = layer(x)
        y.sum().backward()
        expected = x.detach() @ layer.weight.detach().T
        dist.all_reduce(expected)
        assert x.grad is not None
        torch.testing.assert_close(x.grad, layer.weight.detach().sum(0).expand(5, 16))
        return y.detach(), expected + 1, expected

    for actual, expected, _ in run_on_threads(run, 2):
        torch.testing.assert_close(actual, expected)
    assert memories, "no symmetric memory was used"


def _run_on_ranks(device: torch.device) -> dict[str, Any]:
    rank = dist.get_rank()
    sums = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for kind in ("one_shot", "two_shot", "multimem_all_reduce", "nccl", None):
            for count in (1, 33, 4096):
                values = draw_values(rank, count, torch.bfloat16).to(device)
                result, handle = symmetric_all_reduce(values, None, all_reduce_type=kind)
                assert result is values and handle is None
                sums[f"{kind}/{count}"] = result.clone()
    values = draw_values(rank, 4, torch.float32).to(device)
    result, handle = symmetric_all_reduce(values, None, async_op=True, all_reduce_type="two_shot")
    assert handle is not None
    handle.wait()
    sums["later"] = result
    report = [
        str(warning.message) for warning in caught if "symmetric_ar_type" in str(warning.message)
    ]
    return {"sums": sums, "told": len(report), "cuda": device.type == "cuda"}


def test_every_type_computes_the_sum_and_one_without_effect_is_warned_about_once(tmp_path):
    """On two GPUs this runs over symmetric memory."""
    ranks = run_on_ranks(_run_on_ranks, 2, tmp_path)
    for actual in ranks:
        assert actual["told"] == (0 if actual["cuda"] else 1)
        for name, result in actual["sums"].items():
            count = 4 if name == "later" else int(name.split("/")[1])
            dtype = torch.float32 if name == "later" else torch.bfloat16
            expected = draw_values(0, count, dtype).float() + draw_values(1, count, dtype).float()
            torch.testing.assert_close(result.float(), expected.to(dtype).float())


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Reduction(None, "cuda", torch.bfloat16, "cuda:nccl", False), "own all-reduce"),
        (Reduction("two_shot", "cpu", torch.bfloat16, "cpu:gloo", False), "on cpu"),
        (
            Reduction("two_shot", "cuda", torch.bfloat16, "cuda:gloo", False),
            "requires an NCCL group",
        ),
        (Reduction("two_shot", "cuda", torch.int32, "cuda:nccl", False), "int32"),
        (Reduction("two_shot", "cuda", torch.bfloat16, "cuda:nccl", True), "compiler"),
        (Reduction("two_shot", "cuda", torch.bfloat16, "cpu:gloo,cuda:nccl", False), None),
    ],
)
def test_unavailable_symmetric_memory_has_a_reason(request_, reason):
    result = unsupported_reason(request_)
    assert result is None if reason is None else result is not None and reason in result
    chosen = [verdict.backend for verdict in ALL_REDUCE.explain(request_) if verdict.chosen]
    assert chosen == [SYMMETRIC if reason is None else PROCESS_GROUP]


def test_a_vector_in_symmetric_memory_is_made_once_for_a_group(monkeypatch):
    class Group:
        group_name = "tensor-parallel"

    outputs = []

    def allocate(numel: int, dtype: torch.dtype, device: torch.device, group: Any) -> Any:
        outputs.append(group)
        return torch.zeros(numel, dtype=dtype), None

    monkeypatch.setattr(symmetric_memory, "allocate_together", allocate)
    monkeypatch.setattr(symmetric_memory, "_buffers", {})
    group: Any = Group()
    device = torch.device("cuda")
    first = get_symmetric_memory_tensor(8, torch.float32, device, group)
    assert get_symmetric_memory_tensor(8, torch.float32, device, group) is first
    assert get_symmetric_memory_tensor(8, torch.float32, device, group, tag="other") is not first
    other: Any = Group()  # with the same name, after the first was destroyed
    assert get_symmetric_memory_tensor(8, torch.float32, device, other) is not first
    assert outputs == [group, group, other]
    with pytest.raises(ValueError, match=r"device='cpu'.*give a CUDA device"):
        get_symmetric_memory_tensor(8, torch.float32, torch.device("cpu"), group)
