"""accelerate with DeepSpeed's ZeRO trains a Llama in FP8 on two gloo processes of a CPU, and on two GPUs.

DeepSpeed is a source distribution, which needs torch while it is built, so `make clients` does not install it:
`DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients import installed, processes

pytestmark = installed.needs("deepspeed", "accelerate", "transformers")
PROGRAM = str(Path(__file__).with_name("deepspeed_cases.py"))


ON_CPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def run(stage: int, **environment: str) -> dict[str, Any]:
    """Run two ranks with a ZeRO stage, on a CPU unless the environment names an accelerator."""
    printed = processes.once([PROGRAM, str(stage)], 2, **(environment or ON_CPU))
    return json.loads(next(line for line in printed.splitlines() if line.startswith('{"losses"')))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_llama_trains_under_zero(stage: int):
    result = run(stage)
    assert result["layers"] == 15  # seven products in each layer, and the head
    installed.assert_falls(result["losses"])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_llama_trains_under_zero_on_two_gpus(stage: int):
    result = run(stage, DS_ACCELERATOR="cuda")
    assert result["layers"] == 15
    installed.assert_falls(result["losses"])


@pytest.mark.parametrize("stage", [2, 3])
def test_a_stage_does_not_change_the_losses(stage: int):
    assert run(stage)["losses"] == pytest.approx(run(1)["losses"], abs=2e-3)
