"""Hooks of modules, found again by what they are: handles do not survive a copy of the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch import nn

_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# Where transformers' recorders of hidden states and attentions are made, and the flag of a model that has them.
_RECORDERS, _RECORDS = "transformers.utils.output_capturing", "_output_capturing_hooks_installed"


def drop_hooks(hooks: MutableMapping[int, Any], is_ours: Callable[[Any], bool]) -> list[int]:
    """Take those that are ours out of a module's hooks; their numbers."""
    numbers = [number for number, hook in hooks.items() if is_ours(hook)]
    for number in numbers:
        del hooks[number]
    return numbers


def of_callers(module: nn.Module) -> Iterator[str]:
    """Names of parts and parameters of a module that carry a hook of somebody's; transformers' recorders are not."""
    for name, part in module.named_modules():
        if any(not _records(hook) for kind in _OF_MODULES for hook in getattr(part, kind).values()):
            yield name
    for name, parameter in module.named_parameters():
        if any(getattr(parameter, kind, None) for kind in _OF_PARAMETERS):
            yield name


def renew_recorders(model: nn.Module) -> None:
    """Have transformers put its recorders into a model anew at its next forward, into layers that are new as well."""
    for module in model.modules():
        drop_hooks(module._forward_hooks, _records)
        if getattr(module, _RECORDS, False):
            setattr(module, _RECORDS, False)


def _records(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == _RECORDERS
