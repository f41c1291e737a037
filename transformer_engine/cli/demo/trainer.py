"""The same model, seed and batches under a recipe and in high precision, in lockstep."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import pytorch as te
from ...pytorch.quantization import check_recipe_support
from ..failure import writing
from . import checkpoint
from .config import Config, Execution, make_recipe
from .data import Corpus
from .model import ByteGPT
from .optimizer import OPTIMIZERS, learning_rate

EVALUATION_BATCHES = 32
PLAINLY = Execution()


@dataclass(frozen=True)
class Progress:
    """Where the training stands: one record of metrics.jsonl, losses and seconds by the run's name."""

    step: int
    learning_rate: float
    loss: dict[str, float]
    seconds: dict[str, float]
    validation: dict[str, float] | None = None

    def as_json(self) -> str:
        record = {name: value for name, value in vars(self).items() if value is not None}
        return json.dumps(record) + "\n"


class Run:
    """One model with its optimizer and the recipe it computes under."""

    def __init__(self, name: str, config: Config, execution: Execution = PLAINLY):
        self.recipe = make_recipe(name)
        supported, reason = (True, "") if self.recipe is None else check_recipe_support(self.recipe)
        if not supported:
            raise ValueError(f"the recipe {name} does not run here: {reason}")
        torch.manual_seed(config.seed)
        self.model = ByteGPT(config, execution.offload_layers)
        self.optimizer = OPTIMIZERS[config.optimizer](self.model.parameters())
        self.observation: te.Observation | None = None
        if execution.graphs:
            te.graphed(self.model)

    def observe(self, log: Path) -> None:
        """Look at the tensors of the first of every ten steps from here on."""
        self.observation = te.observe(self.model, log=log)

    def precision(self) -> te.autocast:
        return te.autocast(enabled=self.recipe is not None, recipe=self.recipe)

    def step(self, inputs: Tensor, targets: Tensor, rate: float) -> Tensor:
        """The loss of one batch before its optimizer step."""
        with self.precision():
            loss = self.model.loss(inputs, targets)
        loss.backward()
        self.optimizer.step(rate)
        if self.observation is not None:
            self.observation.step()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, batches: list[tuple[Tensor, Tensor]]) -> float:
        """Mean loss over batches."""
        self.model.eval()
        paused = nullcontext() if self.observation is None else self.observation.paused()
        with paused, self.precision():
            losses = [self.model.loss(inputs, targets) for inputs, targets in batches]
        self.model.train()
        return torch.stack(losses).mean().item()

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def refusal(self, state: dict[str, Any] | None) -> str | None:
        """Why a state is not one of this model and optimizer; None when it is."""
        if state is None:
            return "it has no such run"
        return checkpoint.misfit(state["model"], self.model.state_dict()) or self.optimizer.refusal(
            state["optimizer"]
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Trainer:
    """Trains every run of a Config and writes folder/metrics.jsonl and folder/checkpoint.

    Of an execution that observes, the first run is observed, to folder/observed.jsonl.
    """

    def __init__(self, config: Config, corpus: Corpus, folder: Path, execution: Execution = PLAINLY):
        execution.check(config)
        self.config, self.corpus, self.folder, self.execution = config, corpus, folder, execution
        self.step = 0
        self.history: list[Progress] = []
        self.runs = {name: Run(name, config, execution) for name in config.runs}
        self.device = torch.device(config.device)
        batches = corpus.validation_batches(EVALUATION_BATCHES, config.batch, config.sequence)
        self.validation = [self._to_device(batch) for batch in batches]

    @property
    def checkpoint_path(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def metrics_path(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def observed_path(self) -> Path:
        return self.folder / "observed.jsonl"

    @property
    def observation(self) -> te.Observation | None:
        """Of the first run, where it is observed."""
        return self.runs[self.config.runs[0]].observation

    @property
    def finished(self) -> bool:
        return self.step >= self.config.steps

    def train(
        self,
        observe: Callable[[Progress], None] = lambda progress: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Train to the last step or until stop() is true; save a checkpoint either way. True: finished."""
        if self.execution.observe and self.observation is None:
            with writing(self.observed_path, "free some space there, or choose another --out"):
                self.folder.mkdir(parents=True, exist_ok=True)
                self.runs[self.config.runs[0]].observe(self.observed_path)
        while not self.finished and not stop():
            records = self._advance()
            self._note(records)
            self.history.extend(records)
            observe(records[-1])
            if self.step % max(1, self.config.steps // 4) == 0 and not self.finished:
                self.save()
        self.save()
        return self.finished

    def _note(self, records: list[Progress]) -> None:
        """Append records to the metrics; Failure where that cannot be written."""
        with writing(
            self.metrics_path, "free some space there and continue with --resume, or choose another --out"
        ):
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.metrics_path.open("a") as metrics:
                metrics.writelines(record.as_json() for record in records)

    def _advance(self) -> list[Progress]:
        """Every run takes the next few steps, up to the next evaluation at most."""
        # A CUDA device is read back once in a chunk, so that its queue never drains.
        interval = max(1, self.config.steps // 10)
        chunk = 1 if self.device.type == "cpu" else 10
        end = min(self.step + chunk, self.config.steps, (self.step // interval + 1) * interval)
        steps = range(self.step, end)
        rates = [learning_rate(step, self.config.steps, self.config.learning_rate) for step in steps]
        batches = [self._to_device(self._batch(step)) for step in steps]
        losses: dict[str, list[float]] = {}
        seconds: dict[str, float] = {}
        for name, run in self.runs.items():
            start = time.perf_counter()
            taken = [run.step(*batch, rate) for batch, rate in zip(batches, rates, strict=True)]
            losses[name] = torch.stack(taken).tolist()
            seconds[name] = (time.perf_counter() - start) / len(steps)
        self.step = end
        evaluates = end % interval == 0 or self.finished
        validation = (
            {name: run.evaluate(self.validation) for name, run in self.runs.items()} if evaluates else None
        )
        return [
            Progress(
                step=step + 1,
                learning_rate=rate,
                loss={name: values[index] for name, values in losses.items()},
                seconds=seconds,
                validation=validation if step + 1 == end else None,
            )
            for index, (step, rate) in enumerate(zip(steps, rates, strict=True))
        ]

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self.corpus.batch(self.config.seed, step, self.config.batch, self.config.sequence)

    def _to_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0].to(self.device), batch[1].to(self.device)

    def save(self) -> None:
        """Everything the next step depends on, in one file."""
        state = {
            "config": self.config.as_dict(),
            "fingerprint": self.corpus.fingerprint,
            "step": self.step,
            "random": checkpoint.random_state(),
            "runs": {name: run.state_dict() for name, run in self.runs.items()},
        }
        checkpoint.save(self.checkpoint_path, state)

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state: the losses that follow are those of an uninterrupted run."""
        if state["fingerprint"] != self.corpus.fingerprint:
            raise ValueError(
                f"the text of {self.corpus.source} is not the one this checkpoint was trained on; "
                f"give the same text with --data, or start another run with --name"
            )
        for name, run in self.runs.items():
            refusal = run.refusal(state["runs"].get(name))
            if refusal is not None:
                raise ValueError(
                    f"{self.checkpoint_path} does not fit the run {name}: {refusal}; leave --resume out to start "
                    "this run again, or start another with --name"
                )
        history = read_metrics(self.metrics_path, last_step=state["step"])
        if any(
            set(record.loss) != set(self.runs) or set(record.seconds) != set(self.runs) for record in history
        ):
            raise ValueError(
                f"{self.metrics_path} has records of other runs than {', '.join(self.runs)}; {_WITHOUT_METRICS}"
            )
        self.step = state["step"]
        for name, run in self.runs.items():
            run.load_state_dict(state["runs"][name])
        self.history = history
        partial = self.metrics_path.with_name("metrics.jsonl.partial")
        with writing(self.metrics_path, "free some space there, or make the folder writable"):
            partial.write_text("".join(record.as_json() for record in self.history))
            os.replace(partial, self.metrics_path)
        checkpoint.set_random_state(state["random"])


def read_metrics(path: Path, last_step: int | None = None) -> list[Progress]:
    """The records of a metrics.jsonl up to last_step; a line cut short by a crash is left out.

    ValueError, with the file and the line, for one that is damaged otherwise.
    """
    if not path.is_file():
        return []
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}; {_WITHOUT_METRICS}") from None
    records = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if line.endswith("\n"):
            records.append(_record(path, number, line))
    return [record for record in records if last_step is None or record.step <= last_step]


_WITHOUT_METRICS = (
    "remove the file or what is damaged in it: the curve loses those steps, the training goes on exactly"
)


def _is(kind: type, value: Any) -> bool:
    """Is value of a kind, a dict one of numbers?"""
    if kind is dict:
        return isinstance(value, dict) and all(isinstance(number, (int, float)) for number in value.values())
    return isinstance(value, kind) and not isinstance(value, bool)


def _record(path: Path, number: int, line: str) -> Progress:
    """The record in a line of a metrics file."""
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} of {path} is no JSON ({error.msg}); {_WITHOUT_METRICS}") from None
    kinds = {"step": int, "learning_rate": float, "loss": dict, "seconds": dict, "validation": dict}
    known = content if isinstance(content, dict) else {}
    optional = {"validation": {}}
    wrong = [name for name, kind in kinds.items() if not _is(kind, {**optional, **known}.get(name))]
    wrong += [name for name in known if name not in kinds]
    if wrong:
        raise ValueError(f"line {number} of {path} has no good {wrong[0]!r}; {_WITHOUT_METRICS}")
    return Progress(**known)


@dataclass(frozen=True)
class Result:
    """How one run ended: losses in nats a byte, speed over all its steps without evaluation."""

    name: str
    train: float
    validation: float
    tokens_a_second: float
    seconds: float


def summarize(config: Config, history: list[Progress]) -> list[Result]:
    """One Result a run: the training loss is the mean of the last twentieth of the steps (at least ten).

    The tokens a second are those of the median step: the first ones compile kernels.
    """
    last = history[-max(10, len(history) // 20) :]
    final = history[-1].validation or {}
    results = []
    for name in config.runs:
        seconds = [record.seconds[name] for record in history]
        results.append(
            Result(
                name=name,
                train=sum(record.loss[name] for record in last) / len(last),
                validation=final.get(name, float("nan")),
                tokens_a_second=config.tokens_a_step / statistics.median(seconds),
                seconds=sum(seconds),
            )
        )
    return results
