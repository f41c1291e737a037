"""One model in Flax with its optimizer and the recipe it computes under, compiled as one step."""

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

from ... import jax as te
from . import flax_checkpoint
from .config import Config, Execution, make_recipe
from .data import Batch
from .flax_model import ByteGPT, initial_variables, mean_loss
from .schedule import BETAS, CLIP, DECAY

PLAINLY = Execution()
load, save = flax_checkpoint.load, flax_checkpoint.save


class State(NamedTuple):
    """All that a step changes: parameters, scales and histories, and the optimizer's moments."""

    params: Any
    scaling: Any
    optimizer: Any


def adamw() -> optax.GradientTransformation:
    """AdamW without its learning rate: the step multiplies by it. Only matrices decay."""
    return optax.chain(
        optax.clip_by_global_norm(CLIP),
        optax.scale_by_adam(*BETAS),
        optax.add_decayed_weights(DECAY, mask=functools.partial(jax.tree.map, lambda weight: weight.ndim >= 2)),
    )


class Run:
    """Trains one model; the parameters are float32, computed with in the precision of the config."""

    observation = None

    def __init__(self, name: str, config: Config, execution: Execution = PLAINLY):
        execution.check(config)
        self.config, self.recipe = config, make_recipe(name)
        self.key = jax.random.key(config.seed % 2**32)
        with self._computing():
            params, scaling = _parted(initial_variables(config, self.key))
            self.state = State(params, scaling, adamw().init(params))
        self._step = jax.jit(self._stepped, donate_argnums=0)
        self._loss = jax.jit(lambda state, *batch: self._loss_of(state.params, state.scaling, *batch, self.key))

    def _computing(self) -> AbstractContextManager[Any]:
        """The recipe for what is traced, refused with its reason where it does not run, and the device."""
        platform = "gpu" if self.config.device == "cuda" else "cpu"
        return _both(
            jax.default_device(jax.local_devices(backend=platform)[0]),
            te.autocast(enabled=self.recipe is not None, recipe=self.recipe),
        )

    def _loss_of(self, params: Any, scaling: Any, inputs: Array, targets: Array, key: Array) -> Array:
        return mean_loss(self.config, {"params": params, **scaling}, inputs, targets, key)

    def _stepped(
        self, state: State, inputs: Array, targets: Array, rate: Array, step: Array
    ) -> tuple[State, Array]:
        """The gradient with respect to scales and histories is what they are in the next step."""
        key = jax.random.fold_in(self.key, step)
        loss, (gradients, scaling) = jax.value_and_grad(self._loss_of, argnums=(0, 1))(
            state.params, state.scaling, inputs, targets, key
        )
        updates, optimizer = adamw().update(gradients, state.optimizer, state.params)
        params = jax.tree.map(lambda weight, update: weight - rate * update, state.params, updates)
        return State(params, scaling, optimizer), loss

    @property
    def parameters(self) -> int:
        """How many numbers the model learns."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.state.params))

    def train(self, batches: Sequence[Batch], rates: Sequence[float], first: int) -> list[float]:
        """The losses of the steps from `first` on, one a batch, each before its optimizer step."""
        losses = []
        with self._computing():
            for step, (batch, rate) in enumerate(zip(batches, rates, strict=True), start=first):
                self.state, loss = self._step(self.state, *_placed(batch), jnp.float32(rate), jnp.uint32(step))
                losses.append(loss)
        return [float(loss) for loss in losses]

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Mean loss over batches, by the scales as they are."""
        with self._computing():
            losses = [self._loss(self.state, *_placed(batch)) for batch in batches]
        return float(np.mean([np.float32(loss) for loss in losses]))

    def sample(self, prompt: bytes, count: int) -> bytes:
        """The bytes that follow a prompt, drawn with a KV cache at temperature 0.7, outside of any recipe."""
        model = ByteGPT(self.config)
        empty = jnp.zeros((1, len(prompt) + count), jnp.int32)
        with _both(self._computing(), te.autocast(enabled=False)):
            shapes = jax.eval_shape(lambda key: model.init(key, empty, decode=True), self.key)["cache"]
            cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

            @functools.partial(jax.jit, donate_argnums=1)
            def following(params: Any, cache: Any, byte: Array, key: Array) -> tuple[Any, Array]:
                variables = {"params": params, "cache": cache}
                logits, changed = model.apply(variables, byte[None, None], decode=True, mutable=["cache"])
                return changed["cache"], jax.random.categorical(key, jnp.float32(logits[0, 0]) / 0.7)

            text = list(prompt)
            for place in range(len(prompt) + count - 1):
                key = jax.random.fold_in(self.key, place)
                cache, drawn = following(self.state.params, cache, jnp.int32(text[place]), key)
                if place >= len(prompt) - 1:
                    text.append(int(drawn))
        return bytes(text[len(prompt) :])

    def observe(self, log: Path) -> None:
        """Execution refuses it."""
        raise NotImplementedError("--observe is of the demonstration in torch; take --framework torch")

    def state_dict(self) -> dict[str, Any]:
        """{path: array}."""
        return flax_checkpoint.flattened(self.state)

    def refusal(self, state: dict[str, Any] | None) -> str | None:
        """Why a state is not one of this model and optimizer; None when it is."""
        return flax_checkpoint.misfit(state, self.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._computing():
            self.state = flax_checkpoint.rebuilt(state, self.state)


def continue_from(state: dict[str, Any]) -> None:
    """Nothing: random numbers follow from the seed and the step."""


def _parted(variables: dict[str, Any]) -> tuple[Any, Any]:
    """Parameters, and the other collections."""
    return variables["params"], {name: tree for name, tree in variables.items() if name != "params"}


def _placed(batch: Batch) -> tuple[Array, Array]:
    inputs, targets = (jnp.asarray(part.astype(np.int32)) for part in batch)
    return inputs, targets


def _both(*contexts: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """All of the contexts, entered in this order."""
    from contextlib import ExitStack

    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack
