"""Duration of a step with offloading compared with its computation and copies, on simulated clocks instead of a GPU."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.link import TimedLink
from transformer_engine.pytorch.functions import linear, weight_gradient
from transformer_engine.pytorch.offload import marks
from transformer_engine.pytorch.offload.hooks import OffloadContext
from transformer_engine.pytorch.offload.synchronizer import DefaultOffloadSynchronizer

LAYERS, OFFLOADED, HIDDEN, TOKENS = 8, 6, 64, 128
PRODUCT = 1.0  # seconds of each of a linear layer's three products


@pytest.fixture
def clocked(monkeypatch):
    """Products that take time on the link's clock of the computation."""
    monkeypatch.setattr(marks, "SMALLEST", 512)

    def select(link):
        def taking_time(product):
            def time_calls(*arguments, **options):
                result = product(*arguments, **options)
                link.now += PRODUCT
                return result

            return time_calls

        for module in (linear, weight_gradient):
            monkeypatch.setattr(module, "multiply", taking_time(module.multiply))

    return select


def _step(link, seconds_a_layer, steps=2):
    """Return the seconds of the last step and of its copies for linear layers that each save their input."""
    model = torch.nn.ModuleList(
        [te.Linear(HIDDEN, HIDDEN, bias=False, device="cpu") for _ in range(LAYERS)]
    )
    context = OffloadContext(DefaultOffloadSynchronizer(LAYERS, OFFLOADED, link=link))
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    took = 0.0
    for _ in range(steps):
        before, y = link.now, x
        for layer in model:
            with context:
                y = layer(y)
            y = context.synchronize(y)
        y.sum().backward()
        took = link.now - before
    return took, 2 * OFFLOADED * seconds_a_layer


def _link(seconds_a_layer):
    return TimedLink(seconds_a_layer / (TOKENS * HIDDEN * 4))


def test_copies_that_are_shorter_than_the_computation_cost_nothing(clocked):
    link = _link(0.5 * PRODUCT)
    clocked(link)
    took, _ = _step(link, 0.5 * PRODUCT)
    assert took == pytest.approx(3 * LAYERS * PRODUCT)


@pytest.mark.parametrize("seconds", [4.0, 10.0])
def test_a_slow_link_waits_only_for_the_last_layers_passes_and_the_first_ones_last_product(
    clocked, seconds
):
    """Memory for two layers requires that the last layer runs forward and backward alone between the two directions."""
    link = _link(seconds * PRODUCT)
    clocked(link)
    took, copying = _step(link, seconds * PRODUCT)
    last_forward, last_backward, first_weight_gradient = PRODUCT, 2 * PRODUCT, PRODUCT
    assert took == pytest.approx(copying + last_forward + last_backward + first_weight_gradient)


def test_a_host_that_is_steps_ahead_pins_memory_in_the_first_step_only(clocked):
    link = _link(PRODUCT)
    clocked(link)
    _step(link, PRODUCT, steps=4)
    assert link.log.count("out") == 4 * OFFLOADED
    assert link.log.count("buffer") == OFFLOADED
