"""Flax's logical axis rules with those of this engine's axis names behind them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...common.checks import described
from ..sharding import get_sharding_map_logic_axis_to_mesh_axis

Rules = Sequence[tuple[str, str | None]]


def extend_logical_axis_rules(rules: Rules) -> tuple[tuple[str, str | None], ...]:
    """The rules, and behind them a rule for each axis name of transformer_engine.jax.sharding.

    Raises ValueError where a name of this engine is mapped to another mesh axis than the MeshResource says, and
    TypeError for rules that are no pairs of names.
    """
    ours = get_sharding_map_logic_axis_to_mesh_axis()
    extended: list[tuple[str, str | None]] = []
    if isinstance(rules, (str, Mapping)) or not isinstance(rules, Iterable):
        raise TypeError(f"rules={described(rules)}; give a sequence of pairs of an axis name and a mesh axis")
    for rule in rules:
        if (
            not isinstance(rule, (tuple, list))
            or len(rule) != 2
            or not isinstance(rule[0], str)
            or not (rule[1] is None or isinstance(rule[1], str))
        ):
            raise TypeError(
                f"rules hold {described(rule)}; give pairs of an axis name and a mesh axis or None"
            )
        name, axis = rule
        if name in ours and ours[name] != axis:
            raise ValueError(
                f"rules map {name!r} to {axis!r}, the MeshResource to {ours[name]!r}; leave the rule out"
            )
        extended.append((name, axis))
    known = {name for name, _ in extended}
    return (*extended, *((name, axis) for name, axis in ours.items() if name not in known))
