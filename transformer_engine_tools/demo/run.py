"""A torch model with its optimizer and computation recipe, and its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_engine import pytorch as te
from transformer_engine.pytorch.quantization import check_recipe_support

from . import checkpoint
from .config import Execution, RunConfig, make_recipe
from .data import Batch
from .model import ByteGPT
from .optimizer import OPTIMIZERS
from .sample import generate

PLAINLY = Execution()
leads = True  # this process writes the metrics


class Run:
    """One model with its optimizer and computation recipe."""

    def __init__(self, name: str, config: RunConfig, execution: Execution = PLAINLY):
        self.config, self.recipe = config, make_recipe(name)
        supported, reason = (True, "") if self.recipe is None else check_recipe_support(self.recipe)
        if not supported:
            raise ValueError(f"the recipe {name} does not run here: {reason}")
        torch.manual_seed(config.seed)
        self.model = ByteGPT(config, execution.offload_layers)
        self.optimizer = OPTIMIZERS[config.optimizer](self.model.parameters())
        self.observation: te.Observation | None = None
        self._update = (
            te.graphed(self._eager_update) if execution.captures(config) else self._eager_update
        )

    def observe(self, log: Path) -> None:
        """Observe the tensors in every tenth step from now on."""
        self.observation = te.observe(self.model, log=log)

    def precision(self) -> te.autocast:
        return te.autocast(enabled=self.recipe is not None, recipe=self.recipe)

    @property
    def parameters(self) -> int:
        """Number of parameters in the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def train(self, batches: Sequence[Batch], rates: Sequence[float], first: int) -> list[float]:
        """Train from step `first` on, one batch per step; return each loss before its optimizer step.

        A GPU is synchronized once, so that its queue never becomes empty.
        """
        return torch.stack(
            [self.step(*batch, rate) for batch, rate in zip(batches, rates, strict=True)]
        ).tolist()

    def step(self, inputs: Any, targets: Any, rate: float) -> Tensor:
        """Compute the loss of one batch before its optimizer step."""
        self.optimizer.set_rate(rate)
        loss = self._update(*self._placed((inputs, targets)))
        if self.observation is not None:
            self.observation.step()
        return loss

    def _eager_update(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Update the parameters for one batch on the device, and return its loss."""
        with self.precision():
            loss = self.model.loss(inputs, targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Compute the mean loss over batches."""
        self.model.eval()
        paused = nullcontext() if self.observation is None else self.observation.pause()
        with paused, self.precision():
            losses = [self.model.loss(*self._placed(batch)) for batch in batches]
        self.model.train()
        return torch.stack(losses).mean().item()

    def sample(self, prompt: bytes, count: int) -> bytes:
        """Sample the bytes that follow a prompt, with a KV cache."""
        return generate(self.model, self.config, prompt, count, seed=self.config.seed)

    def _placed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        inputs, targets = (torch.as_tensor(part, device=self.config.device) for part in batch)
        return inputs, targets

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def mismatch(self, state: dict[str, Any] | None) -> str | None:
        """Reason why a state does not belong to this model and optimizer, or None."""
        if state is None:
            return "it has no such run"
        return checkpoint.misfit(
            state["model"], self.model.state_dict()
        ) or self.optimizer.mismatch(state["optimizer"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def save(path: Path, state: dict[str, Any]) -> None:
    """Save a checkpoint for runs, with the random generators' state."""
    checkpoint.save(path, {**state, "random": checkpoint.random_state()})


def load(path: Path) -> dict[str, Any]:
    return checkpoint.load(path)


def continue_from(state: dict[str, Any]) -> None:
    """Restore the random generators from the checkpoint."""
    checkpoint.set_random_state(state["random"])
