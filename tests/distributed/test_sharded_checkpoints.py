"""A checkpoint that four ranks saved is read by two ranks and by one with the same bits, and training continues."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.distributed.checkpoint_cases import save_and_load
from tests.distributed.ranks import run_on_ranks
from tests.distributed.sharded_cases import RECIPES

CASES = [("delayed", True), ("mxfp8", True)]
OTHERS = [(name, kind) for name in RECIPES for kind in (True, False) if (name, kind) not in CASES]


def check(ranks, name, quantized, size):
    results = [rank[f"{name}-{quantized}"] for rank in ranks]
    saved, read = results[0]["states"][4], results[0]["states"][size]
    assert read.keys() == saved.keys()
    assert any("exp_avg_sq" in key for key in saved) and any("master_param" in key for key in saved)
    assert any("scale_fwd" in key for key in saved) == (name == "delayed")
    for key, expected in saved.items():
        assert torch.equal(read[key], expected), key
    for rank in results[:size]:
        assert torch.equal(rank["steps"][size], rank["steps"][4])
        assert not torch.equal(rank["steps"][4][0], rank["steps"][4][1])


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    function = partial(save_and_load, cases=CASES, directory=tmp_path_factory.mktemp("checkpoints"))
    return run_on_ranks(function, 4, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("size", [2, 1])
@pytest.mark.parametrize(("name", "quantized"), CASES)
def test_training_continues_on_fewer_ranks_with_the_saved_bits(name, quantized, size, results):
    check(results, name, quantized, size)


@pytest.mark.slow
def test_every_recipe_continues_on_fewer_ranks_with_the_saved_bits(tmp_path):
    function = partial(save_and_load, cases=OTHERS, directory=tmp_path)
    ranks = run_on_ranks(function, 4, tmp_path)
    for name, quantized in OTHERS:
        for size in (2, 1):
            check(ranks, name, quantized, size)
