"""The state on the host that a training step reads: a capture freezes it, and a replay does not change it.

`StepState` collects it as named facts. A step call that changes a fact cannot be replayed;
`change_between` names the fact. `SavedHostState` restores what a failed capture has changed on the
host; a capture changes nothing on the device.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...common.numbers import with_article
from ..runtime.checks import MODULE_HOOKS, PARAMETER_HOOKS
from .references import References
from .signature import PLAIN_TYPES, SameObject, module_standing, tensor_addresses

Facts = list[tuple[str, Any]]


@dataclass(frozen=True)
class StepState:
    """The modules, optimizers and variables of a step.

    Attributes:
        facts: (name, value) for everything on the host that a capture freezes.
        modules: Modules that the step calls.
        optimizers: Optimizers that the step calls.
        generators: (name, host random generator) among the variables.
        parameters: Parameters of both, each once.
        obstacle: Reason why no graph can be captured, or None.
    """

    facts: Facts
    modules: list[torch.nn.Module]
    optimizers: list[torch.optim.Optimizer]
    generators: list[tuple[str, Any]]
    parameters: list[Tensor]
    obstacle: str | None

    @staticmethod
    def of(
        function: Callable[..., Any], observed: Sequence[torch.optim.Optimizer] = ()
    ) -> StepState:
        """Read the state of a function.

        Args:
            function: The step.
            observed: Optimizers that earlier calls stepped; the variables of the function need not hold them.
        """
        references = References.of(function)
        optimizers = [
            *references.optimizers,
            *(o for o in observed if not any(o is f for f in references.optimizers)),
        ]
        facts = list(references.facts)
        obstacle: str | None = None
        for module in references.modules:
            status = module_standing(module)
            if any(module.__dict__[kind] for kind in MODULE_HOOKS):
                obstacle = (
                    obstacle
                    or f"{with_article(type(module))} has hooks, which a replay would not call"
                )
            obstacle = obstacle or status.obstacle
            facts += [
                (f"a setting, parameter or buffer of {type(module).__name__}", f)
                for f in status.facts
            ]
            facts += _result_facts(module)
        for optimizer in optimizers:
            obstacle = obstacle or _optimizer_obstacle(optimizer)
            facts += _optimizer_facts(optimizer)
        candidates: list[Tensor] = [
            parameter for module in references.modules for parameter in module.parameters()
        ]
        candidates += [p for o in optimizers for group in o.param_groups for p in group["params"]]
        parameters = list({id(p): p for p in candidates}.values())
        if any(getattr(p, kind, None) for p in parameters for kind in PARAMETER_HOOKS):
            obstacle = obstacle or "a parameter has hooks, which a replay would not call"
        sums = [getattr(parameter, "main_grad", None) for parameter in parameters]
        facts += [
            ("main_grad of a parameter", tensor_addresses(s)) for s in sums if isinstance(s, Tensor)
        ]
        return StepState(
            facts, references.modules, optimizers, references.generators, parameters, obstacle
        )

    @property
    def signature(self) -> tuple[Any, ...]:
        """The facts, and which parameters have a gradient: without one, a backward pass does not accumulate."""
        return tuple(self.facts), tuple([parameter.grad is None for parameter in self.parameters])


def _result_facts(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Iterate over the autograd results that layers hold: the next step may read them, and a replay the first."""
    for layer in module.modules():
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                yield f"{name} of {type(layer).__name__}", SameObject(value)


def _optimizer_obstacle(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why the steps of an optimizer cannot be captured, or None."""
    name = type(optimizer).__name__
    on_gpu = any(p.is_cuda for group in optimizer.param_groups for p in group["params"])
    if not on_gpu:
        return None
    if any(group.get("capturable") is False for group in optimizer.param_groups):
        return f"{name} counts its steps on the host; construct it with capturable=True"
    if type(optimizer).__module__.startswith("transformer_engine.") and not getattr(
        optimizer, "capturable", False
    ):
        return f"{name} computes its rates on the host; construct FusedAdam or torch.optim.AdamW with capturable=True"
    return None


def _optimizer_facts(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Iterate over the settings of an optimizer, and its parameter and state addresses."""
    name = type(optimizer).__name__
    for key, value in vars(optimizer).items():
        if type(value) in PLAIN_TYPES:
            yield f"{key} of {name}", (type(value), value)
    for group in optimizer.param_groups:
        device = next((p.device.type for p in group["params"]), "cpu")
        for key, value in group.items():
            if key != "params":
                yield f"{key} of {name}", _optimizer_value(value, device)
        for parameter in group["params"]:
            yield f"a parameter of {name}", (tensor_addresses(parameter), parameter.requires_grad)
            for key, value in optimizer.state.get(parameter, {}).items():
                yield f"the state {key} of {name}", _optimizer_value(value, device)


def _optimizer_value(value: Any, device: str) -> Any:
    """Return a number by value and a tensor by address; a number on the host beside a GPU is frozen like a number."""
    if isinstance(value, Tensor):
        if value.device.type != device and value.numel() == 1:
            return value.dtype, value.item()
        return tensor_addresses(value)
    if isinstance(value, (list, tuple)):
        return tuple([_optimizer_value(element, device) for element in value])
    return value if type(value) in PLAIN_TYPES else SameObject(value)


_REMEDIES = {
    "lr": "keep it in a tensor on the GPU, with capturable=True, and write it with fill_()",
    "step": "construct the optimizer with capturable=True",
    "the state step": "construct the optimizer with capturable=True",
}


def change_between(before: Facts, after: Facts) -> str | None:
    """Return the name of the first differing fact, with the remedy where there is one, or None."""
    if before == after:
        return None
    names = [a[0] for a, b in zip(before, after, strict=False) if a != b]
    longer = max(before, after, key=len)
    names += [name for name, _ in longer[min(len(before), len(after)) :]]
    remedy = _REMEDIES.get(names[0].partition(" of ")[0])
    return names[0] if remedy is None else f"{names[0]}; {remedy}"


def host_random_state(generators: Sequence[tuple[str, Any]]) -> Facts:
    """Return the states of the host random generators, which a replay does not advance.

    Args:
        generators: (name, generator) for generators that the step reads, besides the global ones.
    """
    states: Facts = [("random", random.getstate()), ("torch", bytes(torch.get_rng_state().numpy()))]
    if "numpy" in sys.modules:
        states.append(("numpy.random", pickle.dumps(sys.modules["numpy"].random.get_state())))
    return states + [(name, _generator_state(generator)) for name, generator in generators]


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().numpy())
    if isinstance(generator, random.SystemRandom):
        return object()  # it has no state, and each call differs
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits = getattr(generator, "bit_generator", None)
    return pickle.dumps(generator.get_state() if bits is None else bits.state)


@contextmanager
def observe_optimizers() -> Iterator[list[torch.optim.Optimizer]]:
    """Yield a list to which the optimizers are appended that make a step inside the block."""
    optimizers: list[torch.optim.Optimizer] = []

    def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not any(optimizer is other for other in optimizers):
            optimizers.append(optimizer)

    handle = register_optimizer_step_post_hook(note)
    try:
        yield optimizers
    finally:
        handle.remove()


class SavedHostState:
    """References that a step may replace on the host: gradients, buffers, optimizer groups and states."""

    def __init__(self, state: StepState):
        self._gradients = [(parameter, parameter.grad) for parameter in state.parameters]
        layers = {
            id(layer): layer for module in state.modules for layer in module.modules()
        }.values()
        self._dictionaries: list[tuple[dict[Any, Any], dict[Any, Any]]] = [
            (layer._buffers, dict(layer._buffers)) for layer in layers
        ]
        for optimizer in state.optimizers:
            self._dictionaries += [(group, dict(group)) for group in optimizer.param_groups]
            self._dictionaries += [
                (parameter_state, dict(parameter_state))
                for parameter_state in optimizer.state.values()
            ]
            self._dictionaries.append((optimizer.state, dict(optimizer.state)))

    def restore(self) -> None:
        """Restore the references."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for dictionary, saved in self._dictionaries:
            dictionary.clear()
            dictionary.update(saved)
