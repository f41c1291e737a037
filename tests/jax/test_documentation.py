"""The examples on the JAX pages run as printed."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import jax
import pytest

from tests.support import forked
from tests.support.pages import examples
from tests.support.programs import ROOT, search_path


@pytest.mark.slow
def test_an_encoder_learns_to_name_images():
    names: dict[str, Any] = {}
    exec(examples("jax_examples.md")[0], names)
    assert names["accuracy"] > 0.9
    assert set(names["state"]["fp8_metas"]) == {"DenseGeneral_0", "TransformerLayer_0"}


def keys_and_values(names: dict[str, Any]) -> jax.Array:
    return names["params"]["blocks"]["TransformerLayer_0"]["attention"]["kv"]["kernel"]


# The next test traces the example, and test_state.py trains scanned layers with recomputation.
@pytest.mark.slow
def test_a_scanned_decoder_with_rope_and_grouped_queries_learns_to_count():
    names: dict[str, Any] = {}
    exec(examples("jax_examples.md")[1], names)
    assert names["losses"][-1] < 0.1 * names["losses"][0]
    assert keys_and_values(names).shape == (2, 64, 2, 32)


def test_a_step_of_the_scanned_decoder_traces_and_leaves_a_state_of_the_same_kind():
    program = examples("jax_examples.md")[1]
    for printed, traced in (
        ("jax.jit", "traced"),
        ("range(60)", "range(2)"),
        ("float(loss)", "state"),
    ):
        assert printed in program
        program = program.replace(printed, traced)
    names: dict[str, Any] = {"traced": lambda function: functools.partial(jax.eval_shape, function)}
    exec(program, names)
    assert keys_and_values(names).shape == (2, 64, 2, 32)
    assert (names["loss"].shape, names["loss"].dtype) == ((), "float32")
    first, second = names["losses"]
    assert jax.tree.map(str, first) == jax.tree.map(str, second)


@pytest.mark.slow
def test_experts_on_four_devices_learn():
    program = examples("jax_examples.md")[2].replace(
        "import flax\n",
        "from tests.jax.compiled import compile_quickly\ncompile_quickly(True)\nimport flax\n",
        1,
    )
    checks = (
        "\nassert losses[-1] < 0.8 * losses[0], losses"
        "\nassert received.shape == (4,) and int(received.sum()) == 2 * 8 * 16"
    )
    done = subprocess.run(
        [sys.executable, "-c", program + checks],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": search_path(), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr


def test_a_resumed_run_has_the_same_losses():
    names: dict[str, Any] = {}
    exec(examples("jax_examples.md")[3], names)
    assert names["resumed"] == names["losses"][5:] and len(names["resumed"]) == 5
    assert names["losses"][-1] < names["losses"][0]


def test_the_quickstart_runs_as_printed_without_torch_and_triton():
    (program,) = [example for example in examples("quickstart.md") if "import jax" in example]
    start = (
        "import sys; sys.modules['torch'] = sys.modules['triton'] = None\n"
        "from tests.jax.compiled import compile_quickly; compile_quickly(True)\n"
    )
    checks = (
        "\nassert losses[-1] < 0.9 * losses[0], losses"
        "\nassert jax.tree.structure(state) == jax.tree.structure({'fp8_metas': variables['fp8_metas']})"
        "\nassert float(state['fp8_metas']['x_scale'][0]) != 1.0"
    )
    environment = os.environ | {"PYTHONPATH": search_path()}
    printed = forked.output(["-c", start + program + checks], ROOT, environment, framework="jax")
    assert printed.strip() and printed in (ROOT / "docs" / "quickstart.md").read_text()


def test_a_program_with_the_older_name_of_autocast_runs():
    """`fp8_autocast(fp8_recipe=)`, all other collections differentiated together, operation by operation."""
    import flax
    import jax.numpy as jnp

    import transformer_engine.jax as te
    import transformer_engine.jax.flax as te_flax
    from transformer_engine.common import recipe

    x = jax.random.normal(jax.random.PRNGKey(3), [4, 16, 32], jnp.float32)
    with te.fp8_autocast(
        enabled=True, fp8_recipe=recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.HYBRID)
    ):
        dense = te_flax.DenseGeneral(features=32)
        rest, params = flax.core.pop(dense.init(jax.random.PRNGKey(4), x), "params")
        step = jax.value_and_grad(
            lambda params, remaining: dense.apply({"params": params, **remaining}, x).mean(), (0, 1)
        )
        for _ in range(2):
            loss, (gradients, other_gradients) = step(params, rest)
    assert jnp.isfinite(loss)
    shapes = jax.tree.map(jnp.shape, flax.linen.meta.unbox(gradients))
    assert shapes == {"kernel": (32, 32), "bias": (32,)}
    assert other_gradients["fp8_metas"].keys() == rest["fp8_metas"].keys()


@pytest.mark.slow
def test_the_other_examples_of_the_page_run_as_printed_one_after_the_other():
    program = "\n".join([*examples("jax_devices.md"), *examples("jax.md")[2:]])
    checks = (
        "\nassert y.shape == (2, 16, 4, 8) and balance.shape == () and int(received) == 2 * 2 * 16"
        "\nassert int(cache['attention']['cache_index']) == 3"
        "\nassert y_sharded.shape == (8, 32) and bool(jnp.isfinite(y_sharded).all())"
        "\njax.tree.map(np.testing.assert_array_equal, restored, run)"
    )
    quickly = os.environ | {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"
    }  # operation by operation, each is a program
    done = subprocess.run(
        [sys.executable, "-c", program + checks], capture_output=True, text=True, env=quickly
    )
    assert done.returncode == 0, done.stderr
    assert "jax_gemm: " in done.stdout


def test_the_train_step_of_the_page_trains():
    names: dict[str, Any] = {}
    exec(examples("jax.md")[0], names)
    inp, losses, other_variables = (names[name] for name in ("inp", "losses", "other_variables"))
    exec(examples("jax.md")[1], names)
    assert losses[-1] < 0.2 * losses[0]
    amax = jax.numpy.abs(inp).max()
    assert names["other_variables"]["fp8_metas"]["x_amax_history"][-1] == 2 * amax
    assert other_variables["fp8_metas"]["x_scale"][0] == jax.numpy.float32(448) / amax
