"""A Flax model with its optimizer and computation recipe; a step is one compiled program."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from transformer_engine import jax as te

from . import flax_checkpoint
from .config import BETAS, CLIP, DECAY, Execution, RunConfig, make_recipe
from .data import Batch
from .flax_model import FlaxByteGPT, initial_variables, mean_loss

PLAINLY = Execution()
leads = True  # this process writes the metrics
TEMPERATURE = 0.7  # for samples
load, save = flax_checkpoint.load, flax_checkpoint.save


class TrainingState(NamedTuple):
    """Everything that a step changes: parameters, scales and histories, and the optimizer's moments.

    Attributes:
        params: Parameters.
        scaling: Scales and amax histories.
        optimizer: Optimizer state.
    """

    params: Any
    scaling: Any
    optimizer: Any


class FlaxRun:
    """Trains one model; the parameters are float32, the computation has the precision of the config."""

    observation = None

    def __init__(self, name: str, config: RunConfig, execution: Execution = PLAINLY):
        execution.check(config)
        self.name, self.config = name, config
        with self._device():
            self.key = jax.random.key(config.seed % 2**32)
            self.state = _initial_state(self.key, config=config, name=name)

    def _device(self) -> AbstractContextManager[Any]:
        platform = "gpu" if self.config.device == "cuda" else "cpu"
        return jax.default_device(jax.local_devices(backend=platform)[0])

    @property
    def parameters(self) -> int:
        """Number of parameters in the model."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.state.params))

    def train(self, batches: Sequence[Batch], rates: Sequence[float], first: int) -> list[float]:
        """Train from step `first` on, one batch per step; return each loss before its optimizer step."""
        losses = []
        with self._device():
            for step, (batch, rate) in enumerate(zip(batches, rates, strict=True), start=first):
                key = jax.random.fold_in(self.key, step)
                self.state, loss = _step(
                    self.state,
                    *_place_batch(batch),
                    jnp.float32(rate),
                    key,
                    config=self.config,
                    name=self.name,
                )
                losses.append(loss)
        return [float(loss) for loss in losses]

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Compute the mean loss over batches, without updating scales."""
        params, scaling, _ = self.state
        with self._device():
            losses = [
                _loss(
                    params,
                    scaling,
                    *_place_batch(batch),
                    self.key,
                    config=self.config,
                    name=self.name,
                )
                for batch in batches
            ]
        return float(np.mean([np.float32(loss) for loss in losses]))

    def sample(self, prompt: bytes, count: int) -> bytes:
        """Sample the bytes that follow a prompt, with a KV cache, outside any recipe."""
        text = list(prompt)
        with self._device():
            tokens = jnp.zeros((1, len(prompt) + count), jnp.int32)
            initialize = functools.partial(FlaxByteGPT(self.config).init, decode=True)
            variables = jax.eval_shape(initialize, jax.random.key(0), tokens)
            cache: Any = jax.tree.map(
                lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), variables["cache"]
            )
            for index in range(len(prompt) + count - 1):
                key = jax.random.fold_in(self.key, index)
                cache, drawn = _following(
                    self.state.params, cache, jnp.int32(text[index]), key, config=self.config
                )
                if index >= len(prompt) - 1:
                    text.append(int(drawn))
        return bytes(text[len(prompt) :])

    def observe(self, log: Path) -> None:
        """Unsupported; `Execution.check` rejects it earlier."""
        raise NotImplementedError("--observe needs the PyTorch model; use --framework torch")

    def state_dict(self) -> dict[str, Any]:
        """Collect {path: array}."""
        return flax_checkpoint.flatten(self.state)

    def mismatch(self, state: dict[str, Any] | None) -> str | None:
        """Reason why a state does not belong to this model and optimizer, or None."""
        return flax_checkpoint.misfit(state, self.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._device():
            self.state = flax_checkpoint.rebuilt(state, self.state)


Run = FlaxRun  # name under which the trainer finds the runs of a framework


def continue_from(state: dict[str, Any]) -> None:
    """Do nothing: random numbers depend on the seed and the step only."""


def _precision(name: str) -> AbstractContextManager[Any]:
    """Build the autocast of a recipe; raise ValueError, with the reason, if it is unsupported here."""
    recipe = make_recipe(name)
    return te.autocast(enabled=recipe is not None, recipe=recipe)


def _adamw() -> optax.GradientTransformation:
    """Build AdamW without its learning rate, which the step multiplies; only matrices have weight decay."""
    matrices = functools.partial(jax.tree.map, lambda weight: weight.ndim >= 2)
    return optax.chain(
        optax.clip_by_global_norm(CLIP),
        optax.scale_by_adam(*BETAS),
        optax.add_decayed_weights(DECAY, mask=matrices),
    )


@functools.partial(jax.jit, static_argnames=("config", "name"))
def _initial_state(key: Array, *, config: RunConfig, name: str) -> TrainingState:
    with _precision(name):
        variables = initial_variables(config, key)
    params = variables.pop("params")
    return TrainingState(params, variables, _adamw().init(params))


def _compute_loss(
    params: Any,
    scaling: Any,
    inputs: Array,
    targets: Array,
    key: Array,
    config: RunConfig,
    name: str,
) -> Array:
    with _precision(name):
        return mean_loss(config, {"params": params, **scaling}, inputs, targets, key)


_loss = jax.jit(_compute_loss, static_argnames=("config", "name"))


@functools.partial(jax.jit, static_argnames=("config", "name"), donate_argnums=0)
def _step(
    state: TrainingState,
    inputs: Array,
    targets: Array,
    rate: Array,
    key: Array,
    *,
    config: RunConfig,
    name: str,
) -> tuple[TrainingState, Array]:
    """Compute the next state and the loss before it; scales and histories have their next value as gradient."""
    differentiated = jax.value_and_grad(_compute_loss, argnums=(0, 1))
    loss, (gradients, scaling) = differentiated(
        state.params, state.scaling, inputs, targets, key, config, name
    )
    updates, optimizer = _adamw().update(gradients, state.optimizer, state.params)
    params = jax.tree.map(lambda weight, update: weight - rate * update, state.params, updates)
    return TrainingState(params, scaling, optimizer), loss


@functools.partial(jax.jit, static_argnames="config", donate_argnums=1)
def _following(
    params: Any, cache: Any, byte: Array, key: Array, *, config: RunConfig
) -> tuple[Any, Array]:
    """Extend the cache by one byte, and sample the next byte."""
    variables = {"params": params, "cache": cache}
    logits, changed = FlaxByteGPT(config).apply(
        variables, byte[None, None], decode=True, mutable=["cache"]
    )
    return changed["cache"], jax.random.categorical(key, jnp.float32(logits[0, 0]) / TEMPERATURE)


def _place_batch(batch: Batch) -> tuple[Array, Array]:
    inputs, targets = (jnp.asarray(part.astype(np.int32)) for part in batch)
    return inputs, targets
