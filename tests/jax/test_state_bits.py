"""The next delayed-scaling state is bitwise equal to PyTorch's, in plain, scanned and recomputed layers."""

from __future__ import annotations

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen as nn

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.bits import assert_same_bytes, torch_step
from tests.jax.compiled import draw_unboxed_variables, draw_variables, normal, zeros
from transformer_engine.common import recipe
from transformer_engine.jax.dense import dense
from transformer_engine.jax.primitives.scale_update import advance_scales
from transformer_engine.jax.quantize import DelayedScaleQuantizer, QuantizerSet

pytestmark = pytest.mark.usefixtures("as_users_compile")

RECIPE = recipe.DelayedScaling(amax_history_len=4, fp8_format=recipe.Format.HYBRID)


def delayed_set(length: int = 4) -> QuantizerSet:
    def quantizer(dtype):
        return DelayedScaleQuantizer(
            q_dtype=jnp.dtype(dtype), amax_history=zeros(length, jnp.float32)
        )

    return QuantizerSet(
        quantizer(jnp.float8_e4m3fn), quantizer(jnp.float8_e4m3fn), quantizer(jnp.float8_e5m2)
    )


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 1, -2])
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.sampled(9)
def test_one_step_has_the_bytes_of_the_torch_reference(algorithm, margin, length):
    rng = np.random.default_rng(0)
    history = np.ldexp(
        rng.random((length, 12), np.float32), rng.integers(-150, 128, (length, 12))
    ).astype(np.float32)
    history[0, :5] = [0.0, np.inf, np.nan, 1e-45, 3e38]
    history[1:, :2] = 0
    scale = rng.random(12, np.float32)
    histories, scales = advance_scales(
        jnp.asarray(history.T),
        jnp.asarray(scale),
        jnp.asarray(history[0]),
        algorithm,
        (448.0,) * 12,
        margin,
    )
    want_history, want_scale = torch_step(history, scale, algorithm, 448.0, margin)
    assert_same_bytes(histories, want_history.t(), "history")
    assert_same_bytes(scales, want_scale, "scale")


def test_the_cotangent_of_a_state_is_its_next_state():
    x, kernel = normal(jax.random.key(0), (2, 32, 16))
    kernel = kernel.T

    def loss(x, kernel, quantizers):
        return (dense(x, kernel, quantizer_set=quantizers) ** 2).sum()

    quantizers = delayed_set()
    dy = 2 * jax.jit(lambda q: dense(x, kernel, quantizer_set=q))(quantizers)
    following = jax.jit(jax.grad(loss, argnums=2))(x, kernel, quantizers)
    for name, tensor in (("x", x), ("kernel", kernel), ("dgrad", dy)):
        state = getattr(following, name)
        amax = np.abs(np.asarray(tensor)).max()
        np.testing.assert_array_equal(np.asarray(state.amax_history), [0, 0, 0, amax])
        maximum = 57344 if name == "dgrad" else 448
        assert np.asarray(state.scale)[0] == np.float32(maximum) / amax


def _torch_state(model, forward: bool) -> tuple[np.ndarray, np.ndarray]:
    meta = model.fp8_meta["scaling_fwd" if forward else "scaling_bwd"]
    return meta.scale.numpy().copy(), meta.amax_history.numpy().copy()


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_ten_steps_leave_the_scales_and_histories_of_the_torch_layer(algorithm):
    import transformer_engine.pytorch as te_torch

    settings = recipe.DelayedScaling(amax_history_len=4, amax_compute_algo=algorithm)
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((10, 32, 48)).astype(np.float32)
    inputs *= np.ldexp(1.0, rng.integers(-3, 4, (10, 1, 1))).astype(np.float32)
    gradients = rng.standard_normal((10, 32, 16)).astype(np.float32) * rng.random(
        (10, 1, 1), np.float32
    )
    weight = rng.standard_normal((16, 48)).astype(np.float32)
    reference = te_torch.Linear(48, 16, bias=False, params_dtype=torch.float32, device="cpu")
    with torch.no_grad():
        reference.weight.copy_(torch.from_numpy(weight))
    with te.autocast(True, settings):
        model = te_flax.DenseGeneral(features=16, use_bias=False)
        state = flax.core.pop(draw_variables(model, jnp.asarray(inputs[0])), "params")[0]
        params = {"kernel": jnp.asarray(weight.T)}

        @jax.jit
        def step(state, x, dy):
            def objective(state):
                return (model.apply({"params": params, **state}, x) * dy).sum()

            return jax.grad(objective)(state)

        for x, dy in zip(inputs, gradients, strict=True):
            state = step(state, jnp.asarray(x), jnp.asarray(dy))
            with te_torch.autocast(enabled=True, recipe=settings):
                out = reference(torch.from_numpy(x))
            out.backward(torch.from_numpy(dy))
            metas = state["fp8_metas"]
            for forward, index, name in ((True, 0, "x"), (True, 1, "kernel"), (False, 0, "grad")):
                scale, history = _torch_state(reference, forward)
                np.testing.assert_array_equal(
                    np.asarray(metas[f"{name}_scale"]), scale[index : index + 1]
                )
                np.testing.assert_array_equal(
                    np.asarray(metas[f"{name}_amax_history"]), history[:, index]
                )


LAYERS = 4


class Stack(nn.Module):
    """Dense layers: written out or scanned, with or without recomputation."""

    scanned: bool
    remat: bool

    @nn.compact
    def __call__(self, x):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return jnp.tanh(te_flax.DenseGeneral(features=x.shape[-1], name="dense")(x)), None

        block = nn.remat(Block) if self.remat else Block
        if self.scanned:
            layers = nn.scan(
                block,
                length=LAYERS,
                variable_axes={"params": 0, "fp8_metas": 0},
                split_rngs={"params": True},
                metadata_params={nn.PARTITION_NAME: None},
            )
            return layers(name="layers")(x, None)[0]
        for i in range(LAYERS):
            x, _ = block(name=f"layer{i}")(x, None)
        return x


def _train(scanned: bool, remat: bool, params, state, x) -> tuple[list[float], dict]:
    """Losses of ten steps, and the state behind them; a step is traced once."""
    model, traces = Stack(scanned, remat), []

    @jax.jit
    def step(params, state):
        traces.append(1)

        def loss(params, state):
            return (model.apply({"params": params, **state}, x) ** 2).mean()

        value, (grads, state) = jax.value_and_grad(loss, argnums=(0, 1))(params, state)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state

    losses = []
    for _ in range(10):
        value, params, state = step(params, state)
        losses.append(float(value))
    assert len(traces) == 1
    return losses, state["fp8_metas"]


def _stack_states(layers: dict) -> dict:
    return jax.tree.map(
        lambda *leaves: np.stack(leaves), *(layers[f"layer{i}"] for i in range(LAYERS))
    )


def check_same_state(*forms: tuple[bool, bool]) -> None:
    """Compare Stack(scanned, remat) with the plain layers: losses and states after ten steps."""
    with te.autocast(True, RECIPE):
        x = normal(jax.random.key(1), (16, 32))
        state, params = flax.core.pop(draw_unboxed_variables(Stack(False, False), x), "params")
        losses, after = _train(scanned=False, remat=False, params=params, state=state, x=x)
        stacked = {"layers": _stack_states(params)}
        stacked_state = {"fp8_metas": {"layers": _stack_states(state["fp8_metas"])}}
        for scanned, remat in forms:
            first = (stacked, stacked_state) if scanned else (params, state)
            same_losses, same = _train(scanned, remat, *first, x)
            assert losses == same_losses
            expected, got = (_stack_states(after), same["layers"]) if scanned else (after, same)
            jax.tree.map(np.testing.assert_array_equal, expected, got)
    assert losses[-1] < losses[0]


# test_state.py trains scanned and recomputed layers, compiled without optimizations, in every run.
@pytest.mark.slow
def test_scanned_and_recomputed_layers_keep_the_same_state():
    check_same_state((False, True), (True, False), (True, True))
