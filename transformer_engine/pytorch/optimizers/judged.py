"""Checks of the numbers of parameter groups, repeated only if a group holds other objects than before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

from torch import Tensor

Group = dict[str, Any]
# What torch's optimizers read of a group beside numbers, and no kernel here computes.
ABSENT = ("maximize", "amsgrad", "differentiable")


class JudgedGroups:
    """judge(group) has been asked of these numbers of each group.

    Whoever owns an optimizer may write into its groups between any two steps. A number that can change while it stays
    the same object, in a list or in a tensor on the host, is judged in every step.
    """

    def __init__(self, names: Sequence[str], judge: Callable[[Group], None]) -> None:
        self.names = (*names, *ABSENT)
        self.judge = judge
        self.known: list[list[Any]] = []

    def check(self, groups: Sequence[Group]) -> None:
        """TypeError, ValueError or RuntimeError by the first number that no step can be made with."""
        given = [list(map(group.get, self.names)) for group in groups]
        known = self.known
        if len(known) == len(given) and all(
            all(map(is_, ours, theirs)) for ours, theirs in zip(given, known, strict=True)
        ):
            return
        for group in groups:
            self.judge(group)
        self.known = (
            [] if any(map(_can_change, (value for of_group in given for value in of_group))) else given
        )


def refuse_absent(group: Group, ours: str, theirs: str) -> None:
    """Raise RuntimeError for a setting of torch's optimizers that changes a step."""
    for name in ABSENT:
        if group.get(name):
            raise RuntimeError(
                f"{name}={group[name]} stands in a parameter group, and {ours} computes nothing of it; use "
                f"{theirs}, or set the group's {name} to False"
            )


def _can_change(value: Any) -> bool:
    """Whether the number may change while it stays the same object: in a list, an array or a tensor on the host."""
    if isinstance(value, Tensor):
        return value.is_cpu
    if isinstance(value, tuple):
        return any(map(_can_change, value))
    return not (value is None or isinstance(value, (int, float)))
