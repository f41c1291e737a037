"""The cuDNN backends' rules against the library's own answers for every GPU, asked without a device.

`cudnn_engines.json` has the answers by version, recorded by `cudnn_without_device`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.attention.cudnn_without_device import CASES, attention_call
from tests.attention.test_cudnn import installed  # noqa: F401
from tests.support import programs
from transformer_engine.common import optional
from transformer_engine.common.hardware import ROWS
from transformer_engine.pytorch.primitives.attention.backends import cudnn, cudnn_blocks, cudnn_fp8

HERE = Path(__file__).parent
RECORDS = json.loads((HERE / "cudnn_engines.json").read_text())
NVIDIA = {row.architecture: row for row in ROWS if row.vendor == "nvidia"}
# Engines that the rules leave unused, keyed by words in the reason.
UNUSED = {
    # The original rejects both.
    "has no cudnn deterministic attention",
    "has no cudnn fp8 attention",
    # cuDNN 9.28.1 has a forward engine for codes with head size 256 on 10.x to 11.0, and no backward engine.
    "supported: up to 128, and 192/128",
    # No documentation specifies the order of these heads' scales along the tokens.
    "scales along the tokens of more than 128 columns",
}


def rejection(
    case: str, architecture: str, version: tuple[int, ...], gradients: bool, monkeypatch
) -> str | None:
    """A backend's rejection reason for a case, or None."""
    for module in (cudnn, cudnn_fp8, cudnn_blocks):
        monkeypatch.setattr(module, "get_cudnn_version", lambda: version)
    monkeypatch.setattr(cudnn_blocks, "_unsupported_library", lambda: None)
    monkeypatch.setattr(cudnn_blocks, "untested_reason", lambda path: None)
    call = replace(attention_call(case, NVIDIA[architecture]), needs_gradient=gradients)
    if call.fp8 is None:
        return cudnn.BACKEND.rejection_reason(call)
    backend = cudnn_blocks if call.fp8 == "mxfp8" else cudnn_fp8
    return backend.unsupported_backward(call) if gradients else backend.unsupported_reason(call)


def answers() -> Iterator[tuple[str, str, str]]:
    for version, engines in RECORDS.items():
        for architecture in engines:
            for case in engines[architecture]:
                yield version, architecture, case


def test_the_recording_covers_every_gpu_in_the_table_and_every_case():
    assert len(RECORDS) >= 2
    for engines in RECORDS.values():
        assert engines.keys() == NVIDIA.keys()
        assert all(result.keys() == CASES.keys() for result in engines.values())


@pytest.mark.parametrize("version", RECORDS)
@pytest.mark.parametrize("architecture", NVIDIA)
def test_the_rules_accept_what_cudnn_has_engines_for(version, architecture, installed, monkeypatch):  # noqa: F811
    numbers = tuple(map(int, version.split(".")))
    wrong = []
    for case, passes in RECORDS[version][architecture].items():
        engines = {False: not passes["forward"], True: not any(passes.values())}
        for gradients, engine in engines.items():
            reason = rejection(case, architecture, numbers, gradients, monkeypatch)
            unused = reason is not None and any(words in reason for words in UNUSED)
            if engine != (reason is None) and not (engine and unused):
                wrong.append((case, gradients, engine, reason))
    assert wrong == []


@pytest.mark.skipif(
    not optional.installed("cudnn"), reason="nvidia-cudnn-frontend is not installed"
)
def test_an_installed_cudnn_agrees_with_the_recording():
    printed = programs.output(
        ["-W", "ignore", "-m", "tests.attention.cudnn_without_device", "10.0", "12.0"],
        programs.ROOT,
        {**os.environ, "PYTHONPATH": programs.search_path()},
        patience=600,
    )
    result = json.loads(printed)
    ((version, engines),) = result.items()
    if version not in RECORDS:
        pytest.skip(f"cuDNN {version} is not among the recorded versions")
    for architecture, cases in engines.items():
        for case, passes in cases.items():
            recorded = RECORDS[version][architecture][case]
            assert {name: not reason for name, reason in passes.items()} == {
                name: not reason for name, reason in recorded.items()
            }, (architecture, case)
