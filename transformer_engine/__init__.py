"""Transformer Engine in pure Python: FP8, MXFP8 and NVFP4 for Transformers on any machine.

The frameworks are attributes that are imported on first access, so that a user of one framework neither waits for the
other nor needs it.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from . import common
from ._version import __version__
from .common import absent, frameworks

if TYPE_CHECKING:
    from . import jax as jax
    from . import pytorch as pytorch

__all__ = ["__version__", "common"]

_FRAMEWORKS = {framework.module: framework for framework in (frameworks.PYTORCH, frameworks.JAX)}


def _import_framework(framework: frameworks.Framework) -> Any:
    frameworks.demand(framework)
    return importlib.import_module(f"{__name__}.{framework.module}")


absent.install_getter(
    __name__,
    {
        name: functools.partial(_import_framework, framework)
        for name, framework in _FRAMEWORKS.items()
    },
)
absent.install()


def is_nccl_ep_available() -> bool:
    """Whether NCCL's device API computes expert parallelism; it does not here: collectives of PyTorch and XLA do."""
    return False


def require_nccl_ep() -> None:
    """Raise RuntimeError, as expert parallelism does not use NCCL's device API."""
    raise RuntimeError(
        "NCCL's device API is not used; transformer_engine.pytorch.ep and transformer_engine.jax.ep run without it"
    )


def __dir__() -> list[str]:
    return sorted({*__all__, *_FRAMEWORKS, "is_nccl_ep_available", "require_nccl_ep"})
