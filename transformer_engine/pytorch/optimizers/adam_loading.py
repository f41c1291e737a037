"""Checks of a saved state of Adam, made before any part of it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...common.checks import described
from ...common.numbers import to_int
from .adam_checks import check_numbers
from .local import local_of

_PARTS = ("exp_avg", "exp_avg_sq", "master_param")


def check_saved(
    saved: dict[str, Any], groups: Sequence[dict[str, Any]], defaults: dict[str, Any], masters: bool
) -> list[int | None]:
    """The steps of each group as `step_of_torchs` finds them; TypeError or ValueError for what cannot be loaded.

    groups    those to load into, whose number and sizes torch's own load_state_dict holds the saved ones to
    masters   masters are loaded too
    """
    states = saved["state"]
    steps = [step_of_torchs(group, states) for group in saved["param_groups"]]
    has_masters = masters and any(state.get("master_param") is not None for state in states.values())
    parts = _PARTS if has_masters else _PARTS[:2]
    for group, into in zip(saved["param_groups"], groups, strict=False):
        check_numbers({**defaults, **group})
        _check_count(group.get("step", 0))
        for place, parameter in zip(group["params"], into["params"], strict=False):
            if states.get(place):
                _check_parts(place, states[place], parts, local_of(parameter))
    return steps


def step_of_torchs(group: dict[str, Any], of_parameters: dict[Any, dict[str, Any]]) -> int | None:
    """The number of steps of a saved group of torch's optimizers, which count by parameter; None: there is no such."""
    if "step" in group:
        return None
    counts = [of_parameters.get(place, {}).get("step") for place in group["params"]]
    found = {int(count) for count in counts if count is not None}
    if len(found) > 1:
        raise ValueError(
            f"parameters of one group have made {sorted(found)} steps, and FusedAdam counts by group; load into "
            "groups of parameters that have made one number of steps, or go on with torch.optim.AdamW"
        )
    return found.pop() if found else None


def _check_count(step: Any) -> None:
    if isinstance(step, Tensor) and step.numel() != 1:
        raise ValueError(f"step={described(step)} has {step.numel()} numbers; give one a group")
    to_int("step", step, 0)


def _check_parts(place: Any, state: dict[str, Any], parts: tuple[str, ...], local: Tensor) -> None:
    """Each part in the parameter's shape, or in one dimension."""
    for name in parts:
        value = state.get(name)
        if value is None:
            raise ValueError(
                f"the state of parameter {place} has no {name}; give {', '.join(parts)}, or leave out its whole state, "
                "which then begins anew"
            )
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} of parameter {place} is {described(value)}; give a tensor")
        halves = name == "master_param" and value.dtype == torch.int16
        if not (value.is_floating_point() or halves):
            raise TypeError(f"{name} of parameter {place} is {value.dtype}; give floating-point numbers")
        held = local_of(value)
        if held.numel() != local.numel() or held.shape not in (local.shape, (local.numel(),)):
            raise ValueError(
                f"{name} of parameter {place} is {list(held.shape)}, the parameter {list(local.shape)}; load the state "
                "of these parameters, in their order"
            )
