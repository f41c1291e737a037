"""mcore-bridge, from which ms-swift takes Megatron's models, on a CPU. test_llamafactory.py has the installation."""

from __future__ import annotations

import json
from pathlib import Path

from tests.clients import installed, processes
from tests.support import forked

pytestmark = installed.needs("mcore_bridge", "modelscope", "megatron", "transformers")
PROGRAM = str(Path(__file__).with_name("mcore_bridge_cases.py"))


def test_a_model_equals_that_of_transformers_and_trains_in_fp8(tmp_path: Path):
    environment = processes.environment(
        CUDA_VISIBLE_DEVICES="", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0"
    )
    printed = forked.output([PROGRAM, str(tmp_path)], tmp_path, environment)
    result = json.loads(
        next(line for line in printed.splitlines() if line.startswith('{"difference"'))
    )
    assert result["difference"] < 1e-5
    installed.assert_falls(result["losses"], least=1.0)
    assert {
        "transformer_engine.pytorch.module.linear",
        "transformer_engine.pytorch.module.layernorm_linear",
        "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention",
    } <= set(result["classes"])
