"""Debug sessions for tests: a configuration for all layers, and a logger that keeps the statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as debug_api
import torch
from nvdlfw_inspect.logging import BaseLogger

import transformer_engine.debug
import transformer_engine.pytorch as te
from tests.support.layers import RECIPES, make_layer

FEATURES = Path(transformer_engine.debug.__file__).parent / "features"
GEMMS = ["fprop", "dgrad", "wgrad"]
TENSORS = ["activation", "weight", "gradient", "output", "dgrad", "wgrad"]
LAYERS = ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "TransformerLayer"]


class Recorder(BaseLogger):
    """Store {(name, iteration): value}."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, int], float] = {}

    def log_scalar(self, name: str, value: float, iteration: int, **kwargs: Any) -> None:
        assert (name, iteration) not in self.values
        self.values[name, iteration] = value

    def iterations(self, name: str) -> list[int]:
        return sorted(iteration for logged, iteration in self.values if logged == name)


@contextmanager
def session(
    folder: Path, features: dict[str, Any], pattern: str = ".*", *extra: Path
) -> Iterator[Recorder]:
    """Open a session with these features for the layers whose names match."""
    recorder = Recorder()
    enabled = {name: {"enabled": True, **settings} for name, settings in features.items()}
    config = {
        "section": {
            "enabled": True,
            "layers": {"layer_name_regex_pattern": pattern},
            "transformer_engine": enabled,
        }
    }
    try:
        debug_api.initialize(
            config,
            feature_dirs=[str(FEATURES), *map(str, extra)],
            log_dir=str(folder),
            statistics_logger=recorder,
        )
        yield recorder
    finally:
        debug_api.end_debug()


def call_layer(layer: torch.nn.Module, x: torch.Tensor, **options: Any) -> torch.Tensor:
    if isinstance(layer, te.GroupedLinear):
        return layer(x, [x.shape[0] // 2] * 2, **options)
    if isinstance(layer, te.TransformerLayer):
        return layer(x.view(-1, 4, x.shape[-1]), **options)
    return layer(x, **options)


def train_layer(
    kind: str, recipe: str, steps: int = 2, device: torch.device | None = None
) -> list[torch.Tensor]:
    """Return outputs and gradients of steps that update the parameters, by default on the CPU, with fixed seeds."""
    device = device or torch.device("cpu")
    layer = make_layer(kind, device=device)
    generator = torch.Generator().manual_seed(7)
    results = []
    for _ in range(steps):
        x = torch.randn(64, 64, generator=generator).to(device).requires_grad_()
        with te.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
            y = call_layer(layer, x)
        y.backward(torch.randn(y.shape, generator=generator).to(y))
        results += [y.detach().clone(), x.grad, *(p.grad.clone() for p in layer.parameters())]
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
        if debug_api.DEBUG_MANAGER is not None:
            debug_api.step()
    return results


def assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def quantize_float8(x: torch.Tensor, block: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x to E4M3 with one scale, or a power of two per block of a row; return values and inverse scales."""
    if block is None:
        inverse = x.abs().max() / 448.0
        scale = 448.0 / x.abs().max()
        return (x * scale).to(torch.float8_e4m3fn).float() / scale, inverse.reshape(1)
    blocks = x.reshape(-1, block)
    inverse = (blocks.abs().amax(1, keepdim=True) / 448.0).log2().ceil().exp2()
    return ((blocks / inverse).to(torch.float8_e4m3fn).float() * inverse).view_as(
        x
    ), inverse.flatten()
