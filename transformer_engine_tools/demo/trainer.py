"""Lockstep training of one model, with equal seeds and batches, under a recipe and in high precision."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from ..failure import writing
from .config import Execution, RunConfig, learning_rate
from .data import Batch, Corpus
from .records import WITHOUT_METRICS, Progress, read_metrics

EVALUATION_BATCHES = 32
PLAINLY = Execution()


class ModelRun(Protocol):
    """One model with its optimizer and computation recipe."""

    observation: Any

    def __init__(self, name: str, config: RunConfig, execution: Execution = PLAINLY): ...

    @property
    def parameters(self) -> int:
        """Number of parameters in the model."""
        ...

    def train(self, batches: Sequence[Batch], rates: Sequence[float], first: int) -> list[float]:
        """Train from step `first` on, one batch per step; return each loss before its optimizer step."""
        ...

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Compute the mean loss over batches."""
        ...

    def sample(self, prompt: bytes, count: int) -> bytes:
        """Sample the bytes that follow a prompt."""
        ...

    def observe(self, log: Path) -> None:
        """Observe the tensors in every tenth step from now on."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def mismatch(self, state: dict[str, Any] | None) -> str | None:
        """Reason why a state does not belong to this model and optimizer, or None."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Runs(Protocol):
    """A framework's runs and the storage for their checkpoints."""

    Run: type[ModelRun]
    leads: bool  # this process writes the metrics; with several ranks the first

    @staticmethod
    def save(path: Path, state: dict[str, Any]) -> None:
        """Write the state of the runs to path; an earlier checkpoint is replaced once the new one is complete."""
        ...

    @staticmethod
    def load(path: Path) -> dict[str, Any]:
        """Load the state; raise ValueError for a path that te train did not write."""
        ...

    @staticmethod
    def continue_from(state: dict[str, Any]) -> None:
        """Restore the state of the process, such as random numbers, from the checkpoint."""
        ...


_MODULES = {"torch": ".run", "jax": ".flax_run"}


def framework_runs(framework: str) -> Runs:
    """Load the runs of a framework, which is imported here: the other one need not be installed."""
    return cast(Runs, import_module(_MODULES[framework], __package__))


class Trainer:
    """Trains every run in a RunConfig and writes folder/metrics.jsonl and folder/checkpoint.

    If the execution observes, the first run is observed, to folder/observed.jsonl.

    Args:
        config: Run settings.
        corpus: Text for training and evaluation.
        folder: Folder for the results.
        execution: Execution options.
        runs: The framework's runs, or the runs on several ranks; by default the runs for `config.framework`.
    """

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        folder: Path,
        execution: Execution = PLAINLY,
        runs: Any = None,
    ):
        execution.check(config)
        self.config, self.corpus, self.folder, self.execution = config, corpus, folder, execution
        self.step = 0
        self.history: list[Progress] = []
        self.framework: Any = runs or framework_runs(config.framework)
        self.runs = {name: self.framework.Run(name, config, execution) for name in config.runs}
        self.validation = corpus.validation_batches(
            EVALUATION_BATCHES, config.batch, config.sequence
        )

    @property
    def checkpoint_path(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def metrics_path(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def observation_path(self) -> Path:
        return self.folder / "observed.jsonl"

    @property
    def observation(self) -> Any:
        """Observation of the first run, or None."""
        return self.runs[self.config.runs[0]].observation

    @property
    def finished(self) -> bool:
        return self.step >= self.config.steps

    def train(
        self,
        observe: Callable[[Progress], None] = lambda progress: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Train to the last step or until stop() is true, and save a checkpoint; return True if finished."""
        if self.execution.observe and self.observation is None:
            with writing(self.observation_path, "free some space there, or choose another --out"):
                self.folder.mkdir(parents=True, exist_ok=True)
                self.runs[self.config.runs[0]].observe(self.observation_path)
        while not self.finished and not stop():
            records = self._advance()
            with writing(
                self.metrics_path,
                "free some space there and continue with --resume, or choose another --out",
            ):
                self.folder.mkdir(parents=True, exist_ok=True)
                if self.framework.leads:
                    with self.metrics_path.open("a", encoding="utf-8") as metrics:
                        metrics.writelines(record.as_json() for record in records)
            self.history.extend(records)
            observe(records[-1])
            if self.step % max(1, self.config.steps // 4) == 0 and not self.finished:
                self.save()
        self.save()
        return self.finished

    def _advance(self) -> list[Progress]:
        """Train every run for the next few steps, up to the next evaluation at most."""
        # A GPU is synchronized once per chunk.
        interval = max(1, self.config.steps // 10)
        chunk = 1 if self.config.device == "cpu" else 10
        end = min(self.step + chunk, self.config.steps, (self.step // interval + 1) * interval)
        steps = range(self.step, end)
        rates = [
            learning_rate(step, self.config.steps, self.config.learning_rate) for step in steps
        ]
        batches = [
            self.corpus.batch(self.config.seed, step, self.config.batch, self.config.sequence)
            for step in steps
        ]
        losses: dict[str, list[float]] = {}
        seconds: dict[str, float] = {}
        for name, run in self.runs.items():
            start = time.perf_counter()
            losses[name] = run.train(batches, rates, steps.start)
            seconds[name] = (time.perf_counter() - start) / len(steps)
        self.step = end
        evaluates = end % interval == 0 or self.finished
        validation = (
            {name: run.evaluate(self.validation) for name, run in self.runs.items()}
            if evaluates
            else None
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

    def save(self) -> None:
        """Save everything on which the next step depends."""
        state = {
            "config": self.config.as_dict(),
            "fingerprint": self.corpus.fingerprint,
            "step": self.step,
            "runs": {name: run.state_dict() for name, run in self.runs.items()},
        }
        self.framework.save(self.checkpoint_path, state)

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state: the next losses equal an uninterrupted run's."""
        if state["fingerprint"] != self.corpus.fingerprint:
            raise ValueError(
                f"the text of {self.corpus.source} is not the one this checkpoint was trained on; "
                f"give the same text with --data, or start another run with --name"
            )
        for name, run in self.runs.items():
            mismatch = run.mismatch(state["runs"].get(name))
            if mismatch is not None:
                raise ValueError(
                    f"{self.checkpoint_path} does not fit the run {name}: {mismatch}; leave --resume out to start "
                    "this run again, or start another with --name"
                )
        history = read_metrics(self.metrics_path, last_step=state["step"])
        if any(
            set(record.loss) != set(self.runs) or set(record.seconds) != set(self.runs)
            for record in history
        ):
            raise ValueError(
                f"{self.metrics_path} has records of other runs than {', '.join(self.runs)}; {WITHOUT_METRICS}"
            )
        self.step = state["step"]
        for name, run in self.runs.items():
            run.load_state_dict(state["runs"][name])
        self.history = history
        partial = self.metrics_path.with_name("metrics.jsonl.partial")
        if self.framework.leads:
            with writing(self.metrics_path, "free some space there, or make the folder writable"):
                partial.write_text(
                    "".join(record.as_json() for record in self.history), encoding="utf-8"
                )
                os.replace(partial, self.metrics_path)
        self.framework.continue_from(state)
