"""observation = observe(model): quantization errors for every tensor in a training step, and the source of a NaN.

In every n-th step the quantizers of the model's layers are wrapped in `Observing`, and hooks read
module outputs and their gradients. The model is unchanged in all other steps. Layers contain no
observation code, and no step waits for the device before its end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...common.checks import described, suggests_keywords, whole
from ...common.numbers import with_article
from ..functions.linear_spec import ProductQuantizers
from ..functions.scale_update import is_backward_pass
from ..module.linear_base import ProductsModule
from ..module.products import ModuleRecipe
from ..primitives.operand import Operand
from ..tensor.observing import Observing
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.storage.quantized_tensor_storage import plain_matrix
from . import observation_report as views
from .observation_report import StepReport
from .observed_rows import ObservedRows

_ROLES = ("input", "weight", "output", "grad_output", "grad_input")
_OF_FORWARD = frozenset({"input", "weight", "output"})
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_COMPILED = (
    "{name} is compiled, and a compiled graph shows no tensors; observe the model in eager mode"
)
_KEPT = 1000  # reports that an observation holds


class Observation:
    """Reports on the observed steps of a model, which `observe` returns.

    Call `step()` after each step and `close()` at the end, or use `with`. `reports` holds the reports on the last
    thousand observed steps, the newest last. `first_nonfinite` is the first report with a NaN or an infinity.

    Args:
        model: The observed model.
        every: Observe each step whose number is a multiple of this.
        log: File that receives the reports as JSON lines, or None.
        board: TensorBoard writer, or None.
    """

    def __init__(self, model: nn.Module, every: int, log: Path | None, board: Any):
        self.every, self.log, self.board = every, log, board
        self.steps = 0
        self.reports: deque[StepReport] = deque(maxlen=_KEPT)
        self.first_nonfinite: StepReport | None = None
        self._model: nn.Module | None = model
        self._rows = ObservedRows()
        self._observers: dict[str, Callable[[ModuleRecipe], ModuleRecipe]] = {}  # by module
        self._hooks: list[Any] = []
        self._serial = 0  # observed step number, to ignore gradients from earlier steps
        self._observes = False
        self._begin()

    @property
    def report(self) -> StepReport | None:
        """Report on the last observed step."""
        return self.reports[-1] if self.reports else None

    def step(self) -> StepReport | None:
        """End a step. Returns its report if the step was observed; this waits for the device."""
        if self._model is None:
            raise ValueError("the observation is closed; observe(model) begins another")
        self.steps += 1
        rows = None
        if self._observes:
            rows = self._rows.take_out()
            self._end(self._model)
        if self.steps % self.every == 0:
            self._begin()
        if rows is None:
            return None
        report = StepReport(self.steps, rows.read())  # waits for the device
        self.reports.append(report)
        if self.first_nonfinite is None and report.first_nonfinite is not None:
            self.first_nonfinite = report
        if self.log is not None:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(report.as_json())
        if self.board is not None:
            writer = self.board
            for tensor in report.tensors:
                writer.add_scalar(f"maximum/{tensor.name}", tensor.maximum, report.step)
                if tensor.format is not None:
                    writer.add_scalar(f"underflow/{tensor.name}", tensor.underflow, report.step)
                    writer.add_scalar(f"saturation/{tensor.name}", tensor.saturation, report.step)
                if tensor.sqnr is not None and math.isfinite(tensor.sqnr):
                    writer.add_scalar(f"sqnr/{tensor.name}", tensor.sqnr, report.step)
            writer.add_scalar(
                "nonfinite", sum(tensor.nonfinite for tensor in report.tensors), report.step
            )
        return report

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop observing inside the block, for example during evaluation."""
        previous, self._observes = self._observes, False
        try:
            yield
        finally:
            self._observes = previous

    def close(self) -> None:
        """End the observation of the model; the reports remain."""
        if self._model is not None:
            self._end(self._model)
            self._model = None
            if self.board is not None:
                self.board.close()

    def table(self) -> Any:
        """Return the last report as a `rich` table."""
        return views.table(self._last())

    def plot(self, path: str | Path) -> None:
        """Plot the worst SQNR, underflow and saturation per tensor kind over the steps."""
        self._last()
        views.plot(tuple(self.reports), Path(path))

    def __str__(self) -> str:
        return str(self._last())

    def __enter__(self) -> Observation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _last(self) -> StepReport:
        if self.report is None:
            raise ValueError("no step has been observed to its end; run one and call step()")
        return self.report

    def _begin(self) -> None:
        self._rows.clear()
        self._observes = True
        self._serial += 1
        assert self._model is not None
        for name, module in self._model.named_modules():
            if isinstance(module, ProductsModule):
                module.numerics.observe(
                    self._observers.setdefault(name, partial(self._observe_recipe, name))
                )
            if isinstance(module, ProductsModule) or not any(True for _ in module.children()):
                self._hooks.append(
                    module.register_forward_hook(_OutputHook(partial(self._see_output, name)))
                )

    def _end(self, model: nn.Module) -> None:
        self._observes = False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for module in model.modules():
            if isinstance(module, ProductsModule) and module.numerics.observer is not None:
                module.numerics.observe(None)

    def _observe_recipe(self, name: str, recipe: ModuleRecipe) -> ModuleRecipe:
        """Return the recipe with observing quantizers."""

        def record(role: str, tensor: str, x: Tensor, operand: Operand | None) -> None:
            recomputed = role in _OF_FORWARD and is_backward_pass()
            if self._observes and not recomputed:
                self._rows.add_rows(name, tensor, x, operand)

        products = []
        for index, product in enumerate(recipe.products):
            prefix = f"{index + 1}." if len(recipe.products) > 1 else ""
            quantizers = [
                Observing(getattr(product, role), partial(record, role, prefix + role))
                for role in _ROLES
            ]
            products.append(ProductQuantizers(*quantizers))
        return recipe.with_products(tuple(products))

    def _see_output(self, name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            raise ValueError(_COMPILED.format(name=name or "the model"))
        value = _plain_tensor(output[0] if isinstance(output, (tuple, list)) and output else output)
        if not self._observes or is_backward_pass() or value is None:
            return
        self._rows.add_rows(name, "forward", plain_matrix(value.detach()), None)
        if not value.requires_grad:
            return
        serial = self._serial

        def see_gradient(gradient: Tensor) -> None:
            tensor = _plain_tensor(gradient)
            if self._observes and serial == self._serial and tensor is not None:
                self._rows.add_rows(name, "backward", plain_matrix(tensor.detach()), None)

        value.register_hook(see_gradient)


class _OutputHook:
    """A forward hook that calls `see`; module copies and pickles are not observed."""

    def __init__(self, see: Callable[[nn.Module, Any, Any], None]):
        self.see = see

    def __call__(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self.see(module, arguments, output)

    def __reduce__(self) -> tuple[Any, ...]:
        return _OutputHook, (_empty_hook,)


def _empty_hook(module: nn.Module, arguments: Any, output: Any) -> None:
    pass


@suggests_keywords
def observe(
    model: nn.Module,
    every: int = 10,
    log: str | Path | None = None,
    tensorboard: str | Path | None = None,
) -> Observation:
    """Observe a model in the first of every `every` steps; see `Observation`.

    Results are unchanged. An observed step is slower: fused quantization kernels are replaced by separate kernels,
    grouped layers compute one group at a time, and every tensor is read once more.

    Args:
        model: The model, not compiled.
        every: Steps per observed step.
        log: A file to which every observed step appends a JSON line.
        tensorboard: A folder for TensorBoard, which must be installed.

    Raises:
        ValueError: The model is compiled or already observed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model={described(model)} is {with_article(type(model))}; give an nn.Module"
        )
    whole("every", every)
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(_COMPILED.format(name=name or "the model"))
        if isinstance(module, ProductsModule) and module.numerics.observer is not None:
            raise ValueError(
                f"{name or 'the model'} is observed already; close that observation first"
            )
    if log is not None:
        path = Path(log)
        if path.is_dir():
            raise IsADirectoryError(
                f"log={str(path)!r} is a directory; give the path of a file, such as "
                f"{str(path / 'observation.jsonl')!r}"
            )
        if not path.parent.is_dir():
            raise FileNotFoundError(
                f"log={str(path)!r}: the directory {str(path.parent)!r} does not exist; create it first"
            )
        path.open("a", encoding="utf-8").close()
    return Observation(model, every, None if log is None else Path(log), views.board(tensorboard))


def _plain_tensor(value: object) -> Tensor | None:
    """Return the value if it is a tensor with statistics, else None."""
    if (
        not isinstance(value, Tensor)
        or isinstance(value, QuantizedTensor)
        or torch.compiler.is_compiling()
    ):
        return None
    return value if value.dtype in _DTYPES and value.dim() > 0 else None
