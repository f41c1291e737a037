"""accelerate with DeepSpeed's ZeRO trains a Llama in FP8 on two gloo processes of a CPU.

DeepSpeed is a source distribution, which needs torch while it is built, so `make clients` does not install it:
`DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients import installed, processes

pytestmark = installed.needs("deepspeed", "accelerate", "transformers")
PROGRAM = str(Path(__file__).with_name("deepspeed_cases.py"))


def run(stage: int) -> dict[str, Any]:
    """Run two ranks with a ZeRO stage."""
    printed = processes.once([PROGRAM, str(stage)], 2, DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    return json.loads(next(line for line in printed.splitlines() if line.startswith('{"losses"')))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_llama_trains_under_zero(stage: int):
    found = run(stage)
    assert found["layers"] == 15  # seven products in each layer, and the head
    installed.assert_falls(found["losses"])


@pytest.mark.parametrize("stage", [2, 3])
def test_a_stage_does_not_change_the_losses(stage: int):
    assert run(stage)["losses"] == pytest.approx(run(1)["losses"], abs=2e-3)
