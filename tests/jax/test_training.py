"""optax and orbax: an optimizer with the state of delayed scaling, and a run that stops and continues bit for bit."""

from __future__ import annotations

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import draw_unboxed_variables, init_variables, normal
from transformer_engine.common import recipe

RECIPE = recipe.DelayedScaling(amax_history_len=4)
OPTIMIZER = optax.adamw(1e-2)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden, _ = te_flax.LayerNormMLP(intermediate_dim=32, name="mlp")(x, deterministic=True)
        return te_flax.DenseGeneral(1, name="head")(hidden)


def batch(step: int):
    return normal(jax.random.key(step), (16, 8))


def begin(draw=lambda: draw_unboxed_variables(Model(), batch(0))):
    with te.autocast(True, RECIPE):
        state, params = flax.core.pop(draw(), "params")
    return {"params": params, "state": state, "optimizer": OPTIMIZER.init(params)}


@jax.jit
def step(run, x):
    with te.autocast(True, RECIPE):

        def loss(params, state):
            return ((Model().apply({"params": params, **state}, x)[:, 0] - x.sum(-1)) ** 2).mean()

        value, (gradients, state) = jax.value_and_grad(loss, argnums=(0, 1))(
            run["params"], run["state"]
        )
    updates, optimizer = OPTIMIZER.update(gradients, run["optimizer"], run["params"])
    params = optax.apply_updates(run["params"], updates)
    return {"params": params, "state": state, "optimizer": optimizer}, value


def train_model(run, steps):
    losses = []
    for number in steps:
        run, value = step(run, batch(number))
        losses.append(float(value))
    return run, losses


def test_adamw_trains_and_the_state_is_replaced_not_optimised():
    begun = begin(lambda: init_variables(Model(), jax.random.key(0), batch(0)))
    run, losses = train_model(begun, range(30))
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    moments = jax.tree_util.tree_leaves_with_path(run["optimizer"])
    assert not any("scale" in str(path[-1]) and "amax" in str(path) for path, _ in moments)
    history = run["state"]["fp8_metas"]["mlp"]["x_0_amax_history"]
    assert np.asarray(history)[1:].all() and history[0] == 0


def test_a_train_state_overwrites_the_state_by_its_gradient():
    class Dense(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, dot_general=te_flax.make_dot_general_cls(RECIPE)())(x)

    x = batch(0)
    variables = draw_unboxed_variables(Dense(), x)
    train_state = TrainState.create(apply_fn=Dense().apply, params=dict(variables), tx=OPTIMIZER)

    @jax.jit
    def update(train_state, x):
        gradients = jax.grad(lambda v: (train_state.apply_fn(v, x) ** 2).mean())(train_state.params)
        return train_state.apply_gradients(grads=gradients)

    after = update(train_state, x)
    state = jax.tree.leaves(after.params["_overwrite_with_gradient"], is_leaf=lambda leaf: False)
    assert any(float(leaf.max()) == float(jnp.abs(x).max()) for leaf in state)
    assert "_overwrite_with_gradient" not in str(jax.tree_util.tree_structure(after.opt_state))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_resumed_run_is_equal_bit_for_bit(tmp_path, sharded):
    _, undisturbed = train_model(begin(), range(6))
    stopped, _ = train_model(begin(), range(3))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", stopped)
        checkpointer.wait_until_finished()
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), stopped)
        if sharded:
            # Onto a mesh that the run did not know.
            mesh = Mesh(np.asarray(jax.devices()[:1]), ("dp",), axis_types=(AxisType.Auto,))
            laid = NamedSharding(mesh, PartitionSpec())
            shapes = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=laid), shapes
            )
        restored = checkpointer.restore(tmp_path / "run", shapes)
    jax.tree.map(np.testing.assert_array_equal, restored, stopped)
    _, after = train_model(restored, range(3, 6))
    assert after == undisturbed[3:]
