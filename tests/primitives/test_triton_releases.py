"""Training steps on a simulated GPU that the installed Triton does not compile for: no kernel starts, for a reason."""

from __future__ import annotations

import json
import os

import pytest

from tests.support import forked, programs

PROGRAM = """
import json
from tests.support.simulated_gpu import simulate
from transformer_engine.common import optional
from transformer_engine.common.hardware import nvidia
from transformer_engine.common.kernels import launch
from transformer_engine.pytorch.runtime import launching

real = launch.unavailable_reason, optional.triton_problem
simulation = simulate(nvidia(11, 0), libraries=False)
launch.unavailable_reason, optional.triton_problem = real
launching.unavailable_reason = launch.unavailable_reason
launch.MISSING = None
optional.failure = lambda *names: None
release = optional.release
optional.release = lambda name: (3, 6) if name == "triton" else release(name)

from tests.primitives import hardware_layers
from transformer_engine.common.dispatch import observing, tables

reasons, seen = {}, set()
def see(operation, request):
    if repr((operation, request)) in seen:
        return
    seen.add(repr((operation, request)))
    for verdict in tables[operation].explain(request):
        if verdict.backend.startswith(("triton", "flex")):
            reasons.setdefault(f"{operation} {verdict.backend}", set()).add(str(verdict.reason))

with observing(see):
    for layer, name, recipe in hardware_layers.cases():
        if layer in ("TransformerLayer", "GroupedLinear") and name != "current":
            for _ in hardware_layers.train(layer, recipe):
                pass
started = {recorded.launch.kernel.fn.__name__ for recorded in simulation.launches.values()}
print(json.dumps([sorted(started), {key: sorted(values) for key, values in reasons.items()}]))
"""
REASON = (
    "Triton 3.6 does not compile for compute capability 11.0; pip install --upgrade 'triton>=3.7'"
)


@pytest.fixture(scope="module")
def steps():
    environment = {**os.environ, "PYTHONPATH": programs.search_path()}
    return json.loads(
        forked.output(["-W", "ignore", "-c", PROGRAM], programs.ROOT, environment, 300)
    )


def test_no_kernel_launches_that_triton_does_not_compile(steps):
    started, _ = steps
    assert started == []


def test_every_triton_backend_names_the_release_and_the_remedy(steps):
    _, reasons = steps
    assert reasons.keys() >= {"gemm triton", "norm triton", "quantize triton", "attention triton"}
    assert {name: result for name, result in reasons.items() if REASON not in result} == {}
