"""The cheapest model options with which its planned peak memory fits a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol, TypeVar

from torch import nn

from ...common.dispatch import Unsupported, use_backend
from ..module.layernorm_mlp import LayerNormMLP

RECOMPUTED = ("weight_columns", "norm_columns")


class Options(NamedTuple):
    """Options that reduce memory.

    Attributes:
        recomputed: Operations in `RECOMPUTED` that use the backend "recomputed": equal bits; the
            backward pass casts columns again.
        caches_inputs: `cache_quantized_activation_input=True` for every LayerNormMLP: gradients are rounded.
        checkpointed: `checkpoint=True` for the first so many LayerNormMLPs: equal bits; the norm,
            fc1 and the activation run again.
    """

    recomputed: tuple[str, ...] = ()
    caches_inputs: bool = False
    checkpointed: int = 0

    def context(self) -> AbstractContextManager[None]:
        """Context in which the model runs with the backend options."""
        return use_backend(**self._backends()) if self.recomputed else nullcontext()

    def _backends(self) -> dict[str, str]:
        return dict.fromkeys(self.recomputed, "recomputed")

    def apply(self, model: nn.Module) -> None:
        """Set module options."""
        for number, (_, layer) in enumerate(norm_mlps(model)):
            if self.caches_inputs:
                layer.cache_quantized_activation_input = True
            if number < self.checkpointed:
                layer.checkpoint = True

    def lines(self, model: nn.Module) -> tuple[str, ...]:
        """The options as their settings are written."""
        names = [name or "(model)" for name, _ in norm_mlps(model)]
        text_lines: list[str] = []
        if self.recomputed:
            backends = ", ".join(
                f'{name}="{backend}"' for name, backend in self._backends().items()
            )
            text_lines.append(f"te.use_backend({backends})")
        if self.caches_inputs:
            text_lines.append(f"cache_quantized_activation_input=True of {', '.join(names)}")
        if self.checkpointed:
            text_lines.append(f"checkpoint=True of {', '.join(names[: self.checkpointed])}")
        return tuple(text_lines)


class HasPeak(Protocol):
    """A plan with a peak in bytes."""

    @property
    def peak(self) -> int: ...


P = TypeVar("P", bound=HasPeak)


def norm_mlps(model: nn.Module) -> Iterator[tuple[str, LayerNormMLP]]:
    """Names and modules of the LayerNormMLPs of a model."""
    for name, module in model.named_modules():
        if isinstance(module, LayerNormMLP):
            yield name, module


def cheapest(plan: Callable[[Options], P], layers: int, budget: int) -> tuple[P, Options]:
    """Return the plan with the cheapest options whose peak fits, otherwise the plan with the lowest peak.

    Columns are recomputed before inputs are cached, and as few layers as possible are checkpointed. An option that does
    not lower the peak is left out.

    Args:
        plan: Plans the model with options.
        layers: LayerNormMLP count.
        budget: Bytes.
    """
    best, chosen = plan(Options()), Options()
    for option in (*RECOMPUTED, "caches_inputs"):
        if best.peak <= budget:
            return best, chosen
        if option in RECOMPUTED:
            tried = chosen._replace(recomputed=(*chosen.recomputed, option))
        else:
            tried = chosen._replace(caches_inputs=True)
        options = _plan_if_supported(plan, tried)
        if options is not None and options.peak < best.peak:
            best, chosen = options, tried
    if best.peak <= budget or not layers:
        return best, chosen
    return _fewest_checkpoints(plan, layers, budget, best, chosen)


def _plan_if_supported(plan: Callable[[Options], P], options: Options) -> P | None:
    """Plan the model with options; None if a backend is not supported by all layers, as with quantized parameters."""
    try:
        return plan(options)
    except Unsupported:
        return None


def _fewest_checkpoints(
    plan: Callable[[Options], P], layers: int, budget: int, best: P, chosen: Options
) -> tuple[P, Options]:
    """Bisect the checkpointed layer count between 0, which does not fit, and all layers.

    A checkpointed layer saves its input only, and does not support every column option; the last
    ones are left out until it does.
    """
    above, within = 0, layers
    everything = chosen._replace(checkpointed=layers)
    supported = _plan_if_supported(plan, everything)
    while supported is None and everything.recomputed:
        everything = everything._replace(recomputed=everything.recomputed[:-1])
        supported = _plan_if_supported(plan, everything)
    if supported is None or supported.peak >= best.peak:
        return best, chosen
    best, options = supported, everything
    while best.peak <= budget and within - above > 1:
        middle = (above + within) // 2
        tried = everything._replace(checkpointed=middle)
        supported = plan(tried)
        if supported.peak <= budget:
            best, options, within = supported, tried, middle
        else:
            above = middle
    return best, options
