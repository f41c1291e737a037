"""Ranks with different settings raise an error on every rank, and a rank that ends is named by the others."""

from __future__ import annotations

import os
import re
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import transformer_engine.pytorch as te
from tests.distributed.threaded_ranks import run_on_threads
from tests.support.forked import CONTEXT
from transformer_engine.common import recipe
from transformer_engine.pytorch.distributed import faults

HIDDEN, TOKENS = 32, 16


def rank_errors(body: Callable[[int], object], size: int = 2) -> list[str]:
    """Return the message that each rank raises, "" for none."""

    def run(rank: int) -> str:
        try:
            body(rank)
        except RuntimeError as error:
            return str(error)
        return ""

    return run_on_threads(run, size)


def row_layer(**options: Any) -> te.Linear:
    return te.Linear(
        **{
            "in_features": HIDDEN,
            "out_features": HIDDEN,
            "parallel_mode": "row",
            "tp_group": dist.group.WORLD,
            "tp_size": 2,
            "device": "cpu",
            **options,
        },
    )


def forward(
    rank: int,
    rows: int = TOKENS,
    dtype: torch.dtype = torch.float32,
    used: Any = None,
    **options: Any,
):
    layer = row_layer(params_dtype=dtype, **options)
    with te.autocast(enabled=used is not None, recipe=used):
        return layer(torch.randn(rows, layer.weight.shape[1], dtype=dtype))


def attention(
    rank: int,
    comm: str = "p2p",
    tokens: int = 8,
    heads: int = 4,
    dtype=torch.float32,
    **options: Any,
):
    mask = options.pop("mask", "causal")
    window = options.pop("window", None)
    layer = te.DotProductAttention(heads, 8, attn_mask_type=mask, window_size=window, **options)
    layer.set_context_parallel_group(dist.group.WORLD, list(range(2)), None, comm)
    q, k, v = (torch.randn(tokens, 2, heads, 8, dtype=dtype) for _ in range(3))
    return layer(q, k, v)


def accumulate(rank: int, micro_batches: int) -> None:
    """Two steps with several micro-batches each."""
    layer = row_layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(micro_batches):
            layer(torch.randn(TOKENS, HIDDEN // 2)).sum().backward()
        optimizer.step()


def column(rank: int, rows: int = TOKENS) -> None:
    """A column-parallel layer communicates in the backward pass only."""
    layer = row_layer(parallel_mode="column")
    x = torch.randn(rows, HIDDEN, requires_grad=True)
    layer(x).sum().backward()


def convert_kind(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return x, or x as a quantized tensor."""
    if kind == "values":
        return x
    if kind == "mxfp8":
        return te.MXFP8Quantizer(te.DType.kFloat8E4M3)(x)
    return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device=x.device)(x)


def sequence(rank: int, rows: int = 32, kind: str = "values", used: Any = None) -> None:
    """A column-parallel layer with sequence parallelism, whose input is gathered."""
    layer = row_layer(parallel_mode="column", sequence_parallel=True)
    x = convert_kind(torch.randn(rows, HIDDEN), kind)
    with te.autocast(enabled=used is not None, recipe=used):
        layer(x).sum().backward()


def gather_on_ranks(rank: int, kind: str = "values", rows: int = 32) -> None:
    x = convert_kind(torch.randn(rows, HIDDEN), kind)
    te.distributed.gather_along_first_dim(x, dist.group.WORLD)


def fp8_attention(rank: int, kind: str = "values", used: Any = None) -> None:
    layer = te.DotProductAttention(2, 16)
    layer.set_context_parallel_group(dist.group.WORLD, list(range(2)), None, "p2p")
    q, k, v = (
        convert_kind(torch.randn(16, 2, 2, 16, dtype=torch.bfloat16), kind) for _ in range(3)
    )
    with te.autocast(enabled=used is not None, recipe=used):
        layer(q, k, v)


def micro_batches(
    rank: int, kind: str, frozen: bool = False, without_gradients: bool = False
) -> None:
    """Run two micro-batches; options: input and parameters need no gradients, or gradients are off."""
    if kind in ("column", "row"):
        layer: Any = row_layer(parallel_mode=kind, sequence_parallel=True)
        shape = (TOKENS, HIDDEN if kind == "column" else HIDDEN // 2)
    else:
        layer, shape = te.DotProductAttention(2, 8), (8, 2, 2, 8)
        layer.set_context_parallel_group(dist.group.WORLD, list(range(2)), None, kind)
    layer.requires_grad_(not frozen)
    for _ in range(2):
        with torch.set_grad_enabled(not without_gradients):
            x = torch.randn(shape, requires_grad=not frozen)
            y = layer(x) if kind in ("column", "row") else layer(x, x, x)
        if y.requires_grad:
            y.sum().backward()


CURRENT, DELAYED = recipe.Float8CurrentScaling(), recipe.DelayedScaling(amax_history_len=4)
MXFP8, FP8_ATTENTION = recipe.MXFP8BlockScaling(), recipe.Float8CurrentScaling(fp8_dpa=True)
# {difference: (function, rank 0 arguments, rank 1 arguments, message text)}
MISMATCHES: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any], str]] = {
    "rows": (
        forward,
        {},
        {"rows": 8},
        r"tensor: rank 0: float32 \[16, 32\]; rank 1: float32 \[8, 32\]",
    ),
    "more rows": (forward, {}, {"rows": 32}, r"\[32, 32\]"),
    "output features": (forward, {}, {"out_features": 64}, r"\[16, 64\]"),
    "dtype": (forward, {}, {"dtype": torch.bfloat16}, r"rank 1: bfloat16"),
    "recipe": (forward, {}, {"used": CURRENT}, r"recipe: rank 0: None; rank 1: .*Current"),
    "kind of recipe": (forward, {"used": DELAYED}, {"used": CURRENT}, r"recipe: rank 0: .*Delayed"),
    "option of a recipe": (
        forward,
        {"used": DELAYED},
        {"used": recipe.DelayedScaling(amax_history_len=8)},
        r"amax_history_len=8|len=8",
    ),
    "sequence parallelism": (
        forward,
        {"sequence_parallel": True},
        {},
        "sequence_parallel: rank 0: True",
    ),
    "micro-batches": (
        accumulate,
        {"micro_batches": 3},
        {"micro_batches": 2},
        "number of micro-batches",
    ),
    "fewer micro-batches": (
        accumulate,
        {"micro_batches": 1},
        {"micro_batches": 2},
        "optimizer steps",
    ),
    "one pass more": (
        accumulate,
        {"micro_batches": 4},
        {"micro_batches": 3},
        "rank 0: 0; rank 1: 1",
    ),
    "gradient rows": (column, {}, {"rows": 32}, r"tensor: .*rank 1: float32 \[32, 32\]"),
    "scheme": (attention, {}, {"comm": "all_gather"}, "scheme: rank 0: p2p; rank 1: all_gather"),
    "scheme of heads": (attention, {"comm": "a2a"}, {}, "scheme"),
    "tokens": (attention, {}, {"tokens": 12}, "seqlen_q"),
    "heads": (attention, {}, {"heads": 2}, r"heads: rank 0: 4; rank 1: 2"),
    "dtype of attention": (
        attention,
        {},
        {"dtype": torch.bfloat16},
        "dtype: rank 0: torch.float32",
    ),
    "mask": (attention, {}, {"mask": "no_mask"}, "mask"),
    "window": (attention, {"comm": "a2a"}, {"comm": "a2a", "window": (2, 0)}, "mask"),
    "softmax": (attention, {}, {"softmax_type": "off-by-one"}, "softmax: rank 0: vanilla"),
    "dropout": (attention, {}, {"attention_dropout": 0.1}, "dropout: rank 0: 0.0; rank 1: 0.1"),
    "scale": (attention, {}, {"softmax_scale": 0.5}, "scale"),
    "codes": (
        sequence,
        {"kind": "float8"},
        {},
        r"tensor: rank 0: Float8Tensor \[32, 32\]; rank 1: float32",
    ),
    "codes under a recipe": (
        sequence,
        {"kind": "float8", "used": CURRENT},
        {"used": CURRENT},
        "tensor: rank 0: Float8Tensor",
    ),
    "codes under delayed scaling": (
        sequence,
        {"kind": "float8", "used": DELAYED},
        {"used": DELAYED},
        "tensor: rank 0: Float8Tensor",
    ),
    "codes under MXFP8": (
        sequence,
        {"kind": "mxfp8", "used": MXFP8},
        {"used": MXFP8},
        "tensor: rank 0: MXFP8Tensor",
    ),
    "format of codes": (sequence, {"kind": "float8"}, {"kind": "mxfp8"}, "rank 1: MXFP8Tensor"),
    "rows under a recipe": (
        sequence,
        {"used": CURRENT},
        {"rows": 64, "used": CURRENT},
        r"rank 1: float32 \[64, 32\]",
    ),
    "rows under MXFP8": (
        sequence,
        {"used": MXFP8},
        {"rows": 64, "used": MXFP8},
        r"rank 1: .*\[64, 32\]",
    ),
    "gathered codes": (gather_on_ranks, {"kind": "float8"}, {}, "tensor: rank 0: Float8Tensor"),
    "gathered rows": (gather_on_ranks, {}, {"rows": 64}, r"rank 1: float32 \[64, 32\]"),
    **{
        f"gradients of {kind}, {option}": (
            micro_batches,
            {"kind": kind},
            {"kind": kind, option: True},
            "pass: rank 0: backward",
        )
        for kind in ("column", "row", "p2p", "all_gather", "a2a")
        for option in ("frozen", "without_gradients")
    },
    "recipe of attention": (
        fp8_attention,
        {"used": FP8_ATTENTION},
        {},
        "recipe: rank 0: .*Current.*rank 1: None",
    ),
    "codes of attention": (
        fp8_attention,
        {"used": FP8_ATTENTION, "kind": "float8"},
        {"used": FP8_ATTENTION},
        r"q: rank 0: Float8Tensor \[16, 2, 2, 16\]; rank 1: bfloat16",
    ),
}


@pytest.mark.parametrize("difference", MISMATCHES)
def test_a_difference_is_reported_on_every_rank(difference: str, emulated: None):
    assert len(MISMATCHES) >= 20
    function, first, second, text = MISMATCHES[difference]
    messages = rank_errors(lambda rank: function(rank, **(first, second)[rank]))
    for message in messages:
        assert "the ranks of a process group differ" in message, messages
        assert re.search(text, message), message
        assert "Remedy: give every rank" in message


def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Create a list that receives the size of every tensor that `check_step` gathers."""
    counted: list[int] = []
    gather = dist.all_gather_into_tensor

    def counting(received: torch.Tensor, sent: torch.Tensor, **options: Any):
        if sent.dtype == torch.int64 and sent.numel() == 1:
            counted.append(received.numel())
        return gather(received, sent, **options)

    monkeypatch.setattr(dist, "all_gather_into_tensor", counting)
    return counted


def steps(rank: int, number: int, rows: Callable[[int], int] = lambda step: TOKENS) -> None:
    layer = row_layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(number):
        for _ in range(2):
            layer(torch.randn(rows(step), HIDDEN // 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_settings_are_compared_in_the_first_step_only(monkeypatch: pytest.MonkeyPatch):
    counted = exchanges(monkeypatch)
    run_on_threads(lambda rank: steps(rank, 5), 2)
    # ranks x (two micro-batches, and the first one after the optimizer step)
    assert len(counted) == 2 * 3


def test_every_step_is_compared_with_te_check(monkeypatch: pytest.MonkeyPatch):
    def body(rank: int) -> None:
        steps(rank, 4, lambda step: TOKENS + 8 * rank * (step == 3))

    monkeypatch.setenv("TE_CHECK", "1")
    counted = exchanges(monkeypatch)
    messages = rank_errors(body)
    assert all(
        re.search(r"tensor: rank 0: .*\[16, 32\]; rank 1: .*\[24, 32\]", text) for text in messages
    ), messages
    assert len(counted) == 2 * 7


def test_inference_without_an_optimizer_stops_comparing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(faults, "MAXIMUM_CHECKS", 5)
    counted = exchanges(monkeypatch)

    def body(rank: int) -> None:
        layer = row_layer()
        with torch.no_grad():
            for rows in range(1, 12):
                layer(torch.randn(rows, HIDDEN // 2))

    run_on_threads(body, 2)
    assert len(counted) == 2 * 5


def test_layers_without_communication_may_differ():
    """A column-parallel layer without sequence parallelism communicates in the backward pass only."""

    def body(rank: int) -> torch.Size:
        if rank == 1:
            return torch.Size()
        return row_layer(parallel_mode="column")(torch.randn(3 + rank, HIDDEN)).shape

    assert run_on_threads(body, 2)[0] == (3, HIDDEN // 2)


def test_recipes_with_functions_are_equal_in_different_processes():
    def body(rank: int) -> None:
        def create(role: Any) -> Any:
            return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)

        forward(rank, used=recipe.CustomRecipe(qfactory=create))  # one function object per rank

    assert rank_errors(body) == ["", ""]


def join_pair(rank: int, directory: str, seconds: int) -> None:
    """Initialize a two-rank process group whose collectives fail after a timeout."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=seconds),
    )


def scales_differ(rank: int, directory: str, fault: str) -> None:
    """Ranks reduce the maxima of delayed scaling over all ranks; the second rank has another step or other layers."""
    join_pair(rank, directory, seconds=20)
    warnings.filterwarnings("error", "the ranks of a process group differ")
    layers = [
        te.Linear(HIDDEN, HIDDEN, device="cpu")
        for _ in range(1 + (fault == "layers" and rank == 1))
    ]
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    try:
        for _ in range(2):
            for _ in range(2 - (fault == "micro-batches" and rank == 1)):
                x = torch.randn(TOKENS, HIDDEN)
                with (
                    torch.set_grad_enabled(fault != "no gradients" or rank == 0),
                    te.autocast(recipe=DELAYED),
                ):
                    for layer in layers:
                        x = layer(x)
                if x.requires_grad:
                    x.sum().backward()
                elif fault == "no gradients":
                    te.distributed.gather_along_first_dim(x, dist.group.WORLD)
            optimizer.step()
    except (RuntimeError, UserWarning) as error:
        Path(directory, f"{rank}.message").write_text(str(error))


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("layers", r"number of maxima: rank 0: 3; rank 1: 6"),
        (
            "micro-batches",
            r"optimizer steps: rank 0: 0; rank 1: 1\. Remedy: give every rank the same number of micro",
        ),
        (
            "no gradients",
            r"rank 0: reduction of the maxima of delayed scaling; rank 1: gather_along_first_dim",
        ),
    ],
)
def test_reductions_of_delayed_scaling_are_compared(fault: str, text: str, tmp_path: Path):
    context = CONTEXT
    processes = [
        context.Process(target=scales_differ, args=(rank, str(tmp_path), fault))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert not process.is_alive()
    for rank in range(2):
        message = (tmp_path / f"{rank}.message").read_text()
        assert "the ranks of a process group differ" in message and re.search(text, message), (
            message
        )


def fail_during(rank: int, size: int, directory: str, fault: str) -> None:
    torch.set_num_threads(1)
    faults.RESPONSE_SECONDS = 0.5  # rank 0 waits in vain
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    layer = row_layer(tp_size=size)
    x = torch.randn(TOKENS, HIDDEN // size)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    try:
        for step in range(3):
            if step == 2 and rank == 1:
                if fault == "ends":
                    os.kill(os.getpid(), signal.SIGKILL)
                while not Path(directory, "0.message").exists():
                    time.sleep(0.05)
                return
            if step == 2:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
            layer(x).sum().backward()
            optimizer.step()
    except RuntimeError as error:
        Path(directory, f"{rank}.message").write_text(str(error))


def run_all(processes: list) -> None:
    """Start processes and wait until all have ended."""
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        assert not process.is_alive()


@pytest.mark.parametrize("fault", ["ends", "waits"])
def test_a_rank_that_ends_or_waits_is_named_by_the_others(fault: str, tmp_path: Path):
    context = CONTEXT
    arguments = [(rank, 2, str(tmp_path), fault) for rank in range(2)]
    processes = [context.Process(target=fail_during, args=argument) for argument in arguments]
    run_all(processes)
    message = (tmp_path / "0.message").read_text()
    assert "all_reduce of torch.float32 [16, 32] over ranks [0, 1] failed on rank 0" in message
    assert "rank 1 has ended or does not take part" in message
    assert not (tmp_path / "1.message").exists()


def sharded_fails(rank: int, directory: str) -> None:
    """Train a fully sharded layer; the second rank ends in the second step."""
    from torch.distributed.fsdp import fully_shard

    join_pair(rank, directory, seconds=120)
    faults.RESPONSE_SECONDS = 0.5
    layer = torch.nn.Sequential(
        te.Linear(HIDDEN, HIDDEN, device="cpu"), te.Linear(HIDDEN, HIDDEN, device="cpu")
    )
    for child in layer:
        fully_shard(child)
    fully_shard(layer)
    try:
        for step in range(3):
            if step == 1 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with te.distributed.named_failures():
                layer(torch.randn(TOKENS, HIDDEN)).sum().backward()
    except RuntimeError as error:
        Path(directory, f"{rank}.message").write_text(str(error))


def test_a_rank_that_ends_under_fully_shard_is_named(tmp_path: Path):
    processes = [
        CONTEXT.Process(target=sharded_fails, args=(rank, str(tmp_path))) for rank in range(2)
    ]
    run_all(processes)
    message = (tmp_path / "0.message").read_text()
    assert (
        "a collective over ranks [0, 1] failed on rank 0: rank 1 has ended or does not take part"
        in message
    )


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), ValueError("gloo"), RuntimeError("gloo")]
)
def test_other_errors_and_processes_without_ranks_pass_unchanged(error: Exception):
    with pytest.raises(type(error)) as raised, te.distributed.named_failures():
        raise error
    assert raised.value is error
