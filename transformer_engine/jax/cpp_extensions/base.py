"""Kernel switches under the names of NVIDIA's primitives."""

from __future__ import annotations

from typing import NoReturn

from ..primitives import launching

__all__ = ["BasePrimitive", "register_primitive"]


class BasePrimitive:
    """Switch for one kernel type, under its class name as in NVTE_JAX_CUSTOM_CALLS."""

    @classmethod
    def enabled(cls) -> bool:
        """Whether newly traced programs use the kernel for the calls that it supports."""
        return launching.disabled_reason(cls.__name__) is None

    @classmethod
    def set_enabled(cls, enabled: bool) -> None:
        """Enable or disable the kernel, regardless of the environment; traced programs do not change."""
        launching.switch(cls.__name__, enabled)


def register_primitive(cls: type) -> NoReturn:
    """Raise NotImplementedError, since this package has no compiled functions to lower primitives.

    Args:
        cls: The class of the primitive.
    """
    raise NotImplementedError(
        f"register_primitive({getattr(cls, '__name__', cls)}): this package has no compiled functions; implement the "
        "operation with jax.ffi, or in Triton with transformer_engine.jax.primitives.kernels"
    )
