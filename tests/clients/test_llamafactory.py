"""LlamaFactory's trainer in FP8 on a CPU.

It has many requirements, which `make clients` does not install. In a folder on PYTHONPATH:
`pip install --no-deps --target FOLDER -r tests/clients/requirements_trainers.txt`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients import installed, processes
from tests.support import forked

pytestmark = installed.needs("llamafactory", "datasets", "trl", "transformers")
PROGRAM = str(Path(__file__).with_name("llamafactory_cases.py"))
LINEAR = {"fp8": "transformer_engine.pytorch.module.linear", "no": "torch.nn.modules.linear"}


@pytest.mark.parametrize("precision", LINEAR)
def test_the_trainer_uses_fp8_layers_if_accelerate_selects_fp8(precision: str, tmp_path: Path):
    """The variable selects FP8: the trainer of transformers reads it before LlamaFactory sets it."""
    environment = processes.environment(
        DISABLE_VERSION_CHECK="1", CUDA_VISIBLE_DEVICES="", ACCELERATE_MIXED_PRECISION=precision
    )
    printed = forked.output([PROGRAM, str(tmp_path)], tmp_path, environment)
    result = json.loads(next(line for line in printed.splitlines() if line.startswith('{"losses"')))
    installed.assert_falls(result["losses"], least=2.0)
    assert result["classes"] == [LINEAR[precision]]
