"""The providers that run in JAX: this engine's Flax modules, and plain JAX. They are measured only if they are named.

JAX is imported when the first case is built.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch

from transformer_engine.common import optional

from ..cases import QUANTIZATIONS, RECIPES, Case
from .provider import Provider

# Families in both providers, without torch's own families (graphs, offloading, optimizers).
_BOTH = (
    "quantize",
    "norm",
    "dense",
    "linear",
    "layernorm_linear",
    "layernorm_mlp",
    "grouped_linear",
    "attention",
    "layer",
    "layer_small",
)


def _unsupported_reason(device: torch.device) -> str | None:
    """Reason why JAX cannot run on the same device type as torch, or None."""
    if not optional.installed("flax"):
        return f"flax is not installed; {optional.install_command('jax')}"
    has_gpu = import_module("transformer_engine.jax.runtime.platform").has_gpu()
    if has_gpu and device.type != "cuda":
        return (
            "jax finds a GPU but torch finds none; install torch for CUDA, or set JAX_PLATFORMS=cpu"
        )
    if device.type == "cuda" and not has_gpu:
        return f"jax finds no GPU; {optional.install_command('jax-cuda13')}"
    return None


def _build(module: str, case: Case, device: torch.device) -> Any:
    return import_module(module, __package__).BUILDERS[case.family](case, device)


_OPTIONS = {"module": "jax", "remedy": optional.install_command("jax")}

JAX = Provider(
    "jax",
    RECIPES,
    dict.fromkeys((*_BOTH, "kernel"), partial(_build, ".jax_engine")),
    quantizations=tuple(QUANTIZATIONS),
    unsupported_reason=_unsupported_reason,
    on_request=True,
    **_OPTIONS,
)
XLA = Provider(
    "xla",
    ("bf16",),
    dict.fromkeys(_BOTH, partial(_build, ".xla")),
    quantizations=("delayed",),
    unsupported_reason=_unsupported_reason,
    on_request=True,
    **_OPTIONS,
)
