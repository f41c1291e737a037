"""A dense layer under delayed scaling on a GPU, with XLA's default flags and the recommended one: the loss of a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from transformer_engine.jax.runtime.platform import has_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not has_gpu(), reason="what XLA compiles for CUDA is looked at, on a GPU alone"
    ),
]
RECOMMENDED = "--xla_gpu_enable_triton_gemm=false"
PROGRAM = """
import json
from collections import Counter
import flax, jax, jax.numpy as jnp
import transformer_engine.jax as te, transformer_engine.jax.flax as te_flax
from transformer_engine.common import recipe
inp = jax.random.normal(jax.random.key(1), (32, 128, 1024), jnp.float32)
fp8_recipe = recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID)
with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
    model = te_flax.DenseGeneral(features=1024)
    other_variables, params = flax.core.pop(model.init(jax.random.key(0), inp), "params")
    def loss_fn(params, others, inp):
        return model.apply({"params": params, **others}, inp).mean()
    fwd_bwd_fn = jax.value_and_grad(loss_fn, argnums=(0, 1))
    loss, _ = fwd_bwd_fn(params, other_variables, inp)
with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
    of_all = jax.value_and_grad(loss_fn, argnums=(0, 1, 2))
    texts = [jax.jit(f).lower(params, other_variables, inp).compile().as_text() for f in (fwd_bwd_fn, of_all)]
    said = te.explain(fwd_bwd_fn, params, other_variables, inp, backward=False)
here = "cpu" if jax.default_backend() == "cpu" else "cuda"
products = Counter()
for decision in said.decisions:
    if decision.operation == "jax_gemm" and decision.request.platform == here:
        products[decision.chosen] += decision.count
print(json.dumps({
    "loss": float(loss), "products": products,
    "library": [text.count('custom_call_target="__cublas$lt$matmul$f8"') for text in texts],
}))
"""


def ran(**environment: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def loss_on_a_cpu() -> float:
    return ran(JAX_PLATFORMS="cpu", XLA_FLAGS="")["loss"]


@pytest.mark.parametrize("flags", ["", RECOMMENDED], ids=["default", "recommended"])
def test_gpu_loss_equals_the_cpu_and_the_step_has_three_fp8_products(flags, loss_on_a_cpu):
    result = ran(XLA_FLAGS=flags)
    assert result["loss"] == pytest.approx(loss_on_a_cpu, abs=1e-5)
    if flags:
        # The input gradient is unused, and XLA removes its product.
        assert result["library"] == [2, 3]
    else:
        assert result["products"] == {"triton": 3}, "without the flag our kernels compute them"
