"""The page of mixtures of experts: its example runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "experts.md"


def test_the_example_runs_as_printed_and_every_parameter_gets_a_gradient():
    program, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(program, str(PAGE), "exec"), names)
    assert torch.isfinite(names["y"]).all() and names["y"].shape == names["x"].shape
    layers = (names["router"], names["fc1"], names["fc2"])
    assert all(p.grad is not None for layer in layers for p in layer.parameters())
    assert names["x"].grad.abs().sum() > 0
