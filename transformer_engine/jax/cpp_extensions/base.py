"""The original's primitives by their names: whether the kernels in their place are used."""

from __future__ import annotations

from typing import NoReturn

from ..primitives import custom_calls

__all__ = ["BasePrimitive", "register_primitive"]


class BasePrimitive:
    """A kernel by the name of its class, which NVTE_JAX_CUSTOM_CALLS knows too."""

    @classmethod
    def enabled(cls) -> bool:
        """Are programs that are traced from here on given this kernel, where it takes them?"""
        return custom_calls.switched_off(cls.__name__) is None

    @classmethod
    def set_enabled(cls, enabled: bool) -> None:
        """Say so, over what the environment says; what has been traced before keeps what it has."""
        custom_calls.switch(cls.__name__, enabled)


def register_primitive(cls: type) -> NoReturn:
    """Refuse: primitives of a caller have no foreign functions here to be lowered to."""
    raise NotImplementedError(
        f"register_primitive({cls.__name__}): there is no extension of compiled functions here; make the "
        "operation with jax.ffi, or in Triton with transformer_engine.jax.primitives.kernels"
    )
