"""Layers with quantized parameters under torch's fully_shard train as they do alone, bit for bit, in every format."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from tests.distributed.ranks import run_on_ranks
from tests.distributed.sharded_cases import RECIPES, Run, gathered_bytes, train

EVERY_FORMAT = {
    "resharded": Run(accumulate=2),
    # Accumulating as well would meet a race of torch 2.11's fully_shard on GPUs: after a forward without a backward
    # it gathers a wrong layer ahead, and what it has gathered changes, of plain bfloat16 parameters too.
    "evaluated": Run(evaluate=True),
    "kept": Run(reshard=False),
    "prefetched": Run(prefetch=True, accumulate=2, recompute=True),
}
# What has nothing to do with how many tensors a format gathers.
TWO_FORMATS = {
    "default": Run(reshard=None),
    "resharded_to_one_rank": Run(reshard=1),
    "kept_prefetched": Run(reshard=False, prefetch=True),
    "replicated": Run(replicated=True),
    "dequantized": Run(autocast=False),
}
# Formats whose column-wise codes follow from the row-wise ones.
ROWWISE_ONLY = ("delayed", "current", "block", "nvfp4")
CASES = (
    {f"{name}-{label}": (name, run) for name in RECIPES for label, run in EVERY_FORMAT.items()}
    | {f"{name}-{label}": (name, run) for name in ("delayed", "block") for label, run in TWO_FORMATS.items()}
    | {f"{name}-rowwise_only": (name, Run(rowwise_only=True, evaluate=True)) for name in ROWWISE_ONLY}
)
RESHARDED = [case for case, (_, run) in CASES.items() if run.reshard is True and run.autocast]


def _trained(device):
    """Of each case: outputs alone, outputs sharded, and the bytes of gathered weights after each forward."""
    found = {}
    with te.emulate():  # a GPU lacks some of the formats
        for case, (name, run) in CASES.items():
            held: list[int] = []
            together = train(
                name, run, device, True, lambda *seen, held=held: held.append(gathered_bytes(*seen))
            )
            found[case] = (train(name, run, device, False), together, torch.tensor(held))
    return found


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request, tmp_path_factory):
    return run_on_ranks(_trained, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_sharded_training_is_training(case, ranks):
    for alone, together, _ in (rank[case] for rank in ranks):
        assert torch.equal(alone, together)
        assert alone.isfinite().all() and not torch.equal(alone[0], alone[-1])


@pytest.mark.parametrize("case", RESHARDED)
def test_no_gathered_weight_outlives_the_forward_that_read_it(case, ranks):
    for rank in ranks:
        assert not rank[case][2].any()
        assert rank[f"{case.split('-')[0]}-kept"][2].all()  # the same count, of weights that are to stay
