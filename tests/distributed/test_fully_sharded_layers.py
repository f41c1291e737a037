"""Layers with quantized parameters under torch's fully_shard train as they do alone, bit for bit, in every format."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import transformer_engine.pytorch as te
from tests.distributed.ranks import run_on_ranks
from tests.distributed.sharded_cases import RECIPES, Run, count_gathered_bytes, train
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

EVERY_FORMAT = {
    "resharded": Run(accumulate=2),
    # Accumulation would trigger a race in torch 2.11's fully_shard on GPUs: after a forward without a backward pass,
    # it prefetches the wrong layer and the gathered values change, even with plain bfloat16 parameters.
    "evaluated": Run(evaluate=True),
    "kept": Run(reshard=False),
    "prefetched": Run(prefetch=True, accumulate=2, recompute=True),
}
# Settings that do not depend on the number of tensors that a format gathers.
TWO_FORMATS = {
    "default": Run(reshard=None),
    "resharded_to_one_rank": Run(reshard=1),
    "kept_prefetched": Run(reshard=False, prefetch=True),
    "replicated": Run(replicated=True),
    "dequantized": Run(autocast=False),
    "three_steps": Run(accumulate=2, steps=3),
}
# Formats whose column-wise codes follow from the row-wise ones.
ROWWISE_ONLY = ("delayed", "current", "block", "nvfp4")
CASES = (
    {f"{name}-{label}": (name, run) for name in RECIPES for label, run in EVERY_FORMAT.items()}
    | {
        f"{name}-{label}": (name, run)
        for name in ("delayed", "block")
        for label, run in TWO_FORMATS.items()
    }
    | {
        f"{name}-rowwise_only": (name, Run(rowwise_only=True, evaluate=True))
        for name in ROWWISE_ONLY
    }
)
RESHARDED = [case for case, (_, run) in CASES.items() if run.reshard is True and run.autocast]


# On two ranks, each format and each way to train always run, and these pairs in the slow tests.
SLOW = (
    *(f"{name}-prefetched" for name in ("current", "block", "hybrid", "nvfp4")),
    # "rowwise_only" evaluates them too
    *(f"{name}-evaluated" for name in ("current", "block", "nvfp4")),
    *(
        f"delayed-{label}"
        for label in ("resharded_to_one_rank", "replicated", "rowwise_only", "three_steps")
    ),
    *(f"block-{label}" for label in ("default", "kept_prefetched", "dequantized", "three_steps")),
)
ON_ONE_RANK = tuple(
    f"delayed-{label}" for label in ("resharded", "kept", "prefetched", "rowwise_only")
)
# (ranks, cases, marks): a single rank gathers nothing from others, so that one format and the settings of every format
# always run on it. Two ranks always run the other settings.
GROUPS = (
    (1, ON_ONE_RANK, ()),
    (1, tuple(case for case in CASES if case not in ON_ONE_RANK), pytest.mark.slow),
    (2, tuple(case for case in CASES if case not in SLOW), ()),
    (2, SLOW, pytest.mark.slow),
)


def _train_sharded(device: torch.device, cases: tuple[str, ...]) -> dict[str, Any]:
    """Train each case sharded, recording outputs and gathered weight bytes after each forward, and unsharded.

    Cases that differ only in weight sharding have the same unsharded model. The first rank trains it; under
    delayed scaling, which reduces maxima over all ranks, every rank does.
    """
    results: dict[str, Any] = {}
    with te.emulate():  # a GPU lacks some formats
        for case in dict.fromkeys((*cases, *map(_case_without_resharding, cases))):
            tokens: list[int] = []
            joint = train(
                *CASES[case],
                device,
                True,
                lambda *observed, held=tokens: held.append(count_gathered_bytes(*observed)),
            )
            results[case] = (joint, torch.tensor(tokens))
        for name, run in sorted({_alone(case) for case in cases}, key=repr):
            if name == "delayed" or torch.distributed.get_rank() == 0:
                results[f"alone {name} {run}"] = train(name, run, device, False)
    return results


def _case_without_resharding(case: str) -> str:
    """The case with the same format whose gathered weights are not freed."""
    return f"{CASES[case][0]}-kept"


def _alone(case: str) -> tuple[str, Run]:
    name, run = CASES[case]
    return name, replace(run, reshard=True, prefetch=False, replicated=False)


@pytest.fixture(scope="module")
def trained() -> dict[tuple[int, tuple[str, ...]], list[dict[str, Any]]]:
    """{(ranks, cases): results of each rank}, filled on demand: both tests read the same runs."""
    return {}


@pytest.fixture
def ranks(request, trained, tmp_path):
    size, cases = request.param
    if request.param not in trained:
        trained[request.param] = run_on_ranks(partial(_train_sharded, cases=cases), size, tmp_path)
    return trained[request.param]


def parametrize_ranks(cases: Collection[str]) -> pytest.MarkDecorator:
    """Parametrize a test by rank groups and by their cases among `cases`."""
    params = [
        pytest.param((size, group), case, id=f"{size}-{case}", marks=marks)
        for size, group, marks in GROUPS
        for case in group
        if case in cases
    ]
    return pytest.mark.parametrize(("ranks", "case"), params, indirect=["ranks"])


@parametrize_ranks(CASES)
def test_sharded_training_equals_unsharded_training(case, ranks):
    name, run = _alone(case)
    for rank in ranks:
        alone, (joint, _) = (
            rank.get(f"alone {name} {run}", ranks[0][f"alone {name} {run}"]),
            rank[case],
        )
        assert torch.equal(alone, joint)
        assert alone.isfinite().all() and not torch.equal(alone[0], alone[-1])


@parametrize_ranks(RESHARDED)
def test_gathered_weights_are_freed_after_the_forward_pass(case, ranks):
    for rank in ranks:
        assert not rank[case][1].any()
        assert rank[_case_without_resharding(case)][
            1
        ].all()  # the same count, for weights that are not freed


def _train_uneven_shards(sharded: bool) -> torch.Tensor:
    """Outputs and weights from steps through layers with 20 and 4 rows, which 3 ranks do not divide."""
    FP8GlobalStateManager.reset()
    torch.manual_seed(3)
    with te.quantized_model_init(recipe=RECIPES["current"]()):
        model = nn.Sequential(
            *[te.Linear(i, o, device="cpu", bias=False) for i, o in ((16, 20), (20, 4))]
        )
    if sharded:
        for layer in model:
            fully_shard(layer, mesh=init_device_mesh("cpu", (3,)))
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(5))
    results = []
    for _ in range(3):
        with te.autocast(recipe=RECIPES["current"]()):
            y = model(x)
        y.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(y.detach().flatten())
    for parameter in model.parameters():
        full = parameter.detach()
        full = full.full_tensor() if isinstance(full, DTensor) else full
        results.append(full.dequantize().flatten())  # pyright: ignore[reportCallIssue]
    return torch.cat(results)


def _uneven(device: torch.device) -> float:
    alone, joint = _train_uneven_shards(False), _train_uneven_shards(True)
    return ((alone - joint).norm() / alone.norm()).item()


def test_unevenly_sharded_rows_train_as_on_one_rank(tmp_path):
    """The last rank has fewer rows, or none; averages over three ranks round gradients."""
    assert max(run_on_ranks(_uneven, 3, tmp_path)) < 1e-6
