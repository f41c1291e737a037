"""observation = observe(model): what quantization does to every tensor of a training step, and where NaN comes from.

Every so many steps the quantizers of the model's layers are put into `Observing`, and hooks look at what modules
return and at the gradients that come back. Between these steps the model is as it was. Nothing in a layer knows of it,
no step waits for the device before its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...common.checks import described, whole
from ..functions.scale_update import in_a_backward
from ..module.linear_base import ProductsModule
from ..module.products import ModuleRecipe, ProductQuantizers
from ..primitives.operand import Operand
from ..tensor.observing import Observing
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.storage.quantized_tensor_storage import plain_matrix
from . import observation_views as views
from .observation_report import StepReport
from .observed_rows import ObservedRows

_ROLES = ("input", "weight", "output", "grad_output", "grad_input")
_OF_FORWARD = frozenset({"input", "weight", "output"})
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_COMPILED = "{name} is compiled, and a compiled graph shows no tensors; observe the model in eager mode"
_KEPT = 1000  # reports that an observation holds


class Observation:
    """The reports of a model's observed steps. Call `step()` at the end of each; `close()`, or leave a block of it.

    reports           of the last thousand observed steps, the newest last
    first_nonfinite   the report of the first of them with a NaN or an infinity
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
        self._serial = 0  # of the observed stretch: gradients of an earlier one are none of this one's
        self._observes = False
        self._begin()

    @property
    def report(self) -> StepReport | None:
        """Of the last observed step."""
        return self.reports[-1] if self.reports else None

    def step(self) -> StepReport | None:
        """End a step; its report if it was observed, which is read from the device here."""
        model = self._opened()
        self.steps += 1
        taken = None
        if self._observes:
            taken = self._rows.take_out()
            self._end(model)
        if self.steps % self.every == 0:
            self._begin()
        if taken is None:
            return None
        report = StepReport(self.steps, taken.read())  # after all that the device need not be waited for
        self._keep(report)
        return report

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not look inside of this block, for example while the model is evaluated."""
        before, self._observes = self._observes, False
        try:
            yield
        finally:
            self._observes = before

    def close(self) -> None:
        """Leave the model as it was; the reports stay."""
        if self._model is not None:
            self._end(self._model)
            self._model = None
            if self.board is not None:
                self.board.close()

    def table(self) -> Any:
        """The last report as a table of `rich`."""
        return views.table(self._last())

    def plot(self, path: str | Path) -> None:
        """Draw the worst SQNR, underflow and saturation of each kind of tensor over the steps."""
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

    def _opened(self) -> nn.Module:
        if self._model is None:
            raise ValueError("the observation is closed; observe(model) begins another")
        return self._model

    def _keep(self, report: StepReport) -> None:
        self.reports.append(report)
        if self.first_nonfinite is None and report.first_nonfinite is not None:
            self.first_nonfinite = report
        if self.log is not None:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(report.as_json())
        if self.board is not None:
            views.write_scalars(self.board, report)

    def _begin(self) -> None:
        self._rows.clear()
        self._observes = True
        self._serial += 1
        for name, module in self._opened().named_modules():
            if isinstance(module, ProductsModule):
                module.numerics.observe(self._observers.setdefault(name, partial(self._observed, name)))
            if isinstance(module, ProductsModule) or not any(True for _ in module.children()):
                self._hooks.append(module.register_forward_hook(_OutputHook(partial(self._see_output, name))))

    def _end(self, model: nn.Module) -> None:
        self._observes = False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for module in model.modules():
            if isinstance(module, ProductsModule) and module.numerics.observer is not None:
                module.numerics.observe(None)

    def _observed(self, name: str, recipe: ModuleRecipe) -> ModuleRecipe:
        """The recipe by observing quantizers."""
        several = len(recipe.products) > 1
        return recipe.with_products(
            tuple(
                ProductQuantizers(
                    *(
                        Observing(quantizer, self._recorder(name, f"{index + 1}.{role}" if several else role))
                        for role, quantizer in zip(_ROLES, _quantizers(product), strict=True)
                    )
                )
                for index, product in enumerate(recipe.products)
            )
        )

    def _recorder(self, module: str, tensor: str) -> Callable[[Tensor, Operand | None], None]:
        runs_forward = tensor.rpartition(".")[2] in _OF_FORWARD

        def record(x: Tensor, operand: Operand | None) -> None:
            if self._observes and not (runs_forward and in_a_backward()):  # which computes it again
                self._rows.take_in(module, tensor, x, operand)

        return record

    def _see_output(self, name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            raise ValueError(_COMPILED.format(name=name or "the model"))
        value = _plain_of(output[0] if isinstance(output, (tuple, list)) and output else output)
        if not self._observes or in_a_backward() or value is None:
            return
        self._see(name, "forward", value)
        if value.requires_grad:
            value.register_hook(partial(self._see_gradient, name, self._serial))

    def _see_gradient(self, name: str, serial: int, gradient: Tensor) -> None:
        value = _plain_of(gradient)
        if self._observes and serial == self._serial and value is not None:
            self._see(name, "backward", value)

    def _see(self, name: str, tensor: str, value: Tensor) -> None:
        self._rows.take_in(name, tensor, plain_matrix(value.detach()), None)


class _OutputHook:
    """see(module, arguments, output) of a module; a copy of the module, or its pickle, is not observed."""

    def __init__(self, see: Callable[[nn.Module, Any, Any], None]):
        self.see = see

    def __call__(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self.see(module, arguments, output)

    def __reduce__(self) -> tuple[Any, ...]:
        return _OutputHook, (_sees_nothing,)


def _sees_nothing(module: nn.Module, arguments: Any, output: Any) -> None:
    pass


def observe(
    model: nn.Module,
    every: int = 10,
    log: str | Path | None = None,
    tensorboard: str | Path | None = None,
) -> Observation:
    """Look at the first of every so many steps of a model; see `Observation`.

    log           a file to which every observed step adds a line of JSON
    tensorboard   a folder for TensorBoard, where that is installed
    Results are those of the model without it. An observed step is slower: kernels that quantize what they make give
    way to two steps, grouped layers go one by one, and every tensor is read once more.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={described(model)} is a {type(model).__name__}; give an nn.Module")
    whole("every", every)
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(_COMPILED.format(name=name or "the model"))
        if isinstance(module, ProductsModule) and module.numerics.observer is not None:
            raise ValueError(f"{name or 'the model'} is observed already; close that observation first")
    if log is not None:
        _check_log(Path(log))
    return Observation(model, every, None if log is None else Path(log), views.board(tensorboard))


def _check_log(log: Path) -> None:
    """Raise OSError now rather than at the end of a step if lines cannot be appended to the file."""
    if log.is_dir():
        raise IsADirectoryError(
            f"log={str(log)!r} is a directory; give the path of a file, such as {str(log / 'observation.jsonl')!r}"
        )
    if not log.parent.is_dir():
        raise FileNotFoundError(
            f"log={str(log)!r}: the directory {str(log.parent)!r} does not exist; create it first"
        )
    log.open("a", encoding="utf-8").close()


def _quantizers(product: ProductQuantizers) -> tuple[Any, ...]:
    return tuple(getattr(product, role) for role in _ROLES)


def _plain_of(value: object) -> Tensor | None:
    """The value, if it is a tensor of numbers that statistics can be made of."""
    if not isinstance(value, Tensor) or isinstance(value, QuantizedTensor) or torch.compiler.is_compiling():
        return None
    return value if value.dtype in _DTYPES and value.dim() > 0 else None
