"""What the two frameworks answer before one is chosen: is it installed, has it a GPU, which recipes are there?

A command that is given one framework works where the other is not installed, so neither is imported at the top.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...common import optional
from ...common.recipe import Recipe

# What a run in each needs, and the extra that brings it.
NEEDED = {
    "torch": (("torch",), "cli"),
    "jax": (("jax", "flax", "optax", "orbax"), "cli-jax"),
}
FRAMEWORKS = tuple(NEEDED)


def default_framework() -> str:
    """torch where it is installed."""
    return FRAMEWORKS[0] if optional.installed(FRAMEWORKS[0]) else FRAMEWORKS[1]


def missing_for(framework: str) -> str | None:
    """Which libraries a run lacks and what brings them; None where all are there."""
    names, extra = NEEDED[framework]
    missing = [name for name in names if not optional.installed(name)]
    if not missing:
        return None
    return (
        f"--framework {framework} needs {', '.join(missing)}; install with {optional.install_command(extra)}"
    )


def has_gpu(framework: str) -> bool:
    """Does the framework compute on a GPU?"""
    if framework == "torch":
        return import_module("torch").cuda.is_available()
    return import_module("transformer_engine.jax.platform").has_gpu()


def recipes_here() -> dict[str, type[Recipe]]:
    """{name on the command line: recipe} of the framework that is installed; of torch's side where both are."""
    if optional.installed("torch"):
        families: Any = import_module("transformer_engine.pytorch.quantization").all_families()
        return {family.name: family.recipe for family in families if family.samples}
    rows: Any = import_module("transformer_engine.jax.quantize.recipes").FAMILIES
    return {family.name: family.recipe for family in rows.values()}
