"""The providers that run in JAX: this engine's Flax modules, and plain JAX. They are measured where they are named.

JAX is imported when the first case is built: without it, or without a case of theirs, nothing here needs it.
"""

from __future__ import annotations

from importlib import import_module

import torch

from ....common import optional
from ..cases import QUANTIZATIONS, RECIPES, Case
from .provider import Builder, Provider

# Section by section what both have; families of torch alone (graphs, offloading, optimizers) are not among them.
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


def _builders(module: str, *more: str) -> dict[str, Builder]:
    def build(case: Case, device: torch.device):
        return import_module(module, __package__).BUILDERS[case.family](case, device)

    return dict.fromkeys((*_BOTH, *more), build)


def _refuses(device: torch.device) -> str | None:
    """Both frameworks have to compute on the same kind of device, or figures would stand beside others' of another."""
    if not optional.installed("flax"):
        return f"flax is not installed; {optional.install_command('jax')}"
    has_gpu = import_module("transformer_engine.jax.platform").has_gpu()
    if has_gpu and device.type != "cuda":
        return "jax finds a GPU but torch finds none; install torch for CUDA, or set JAX_PLATFORMS=cpu"
    if device.type == "cuda" and not has_gpu:
        return f"jax finds no GPU; {optional.install_command('jax-cuda13')}"
    return None


_OPTIONS = {"module": "jax", "remedy": optional.install_command("jax")}

JAX = Provider(
    "jax",
    RECIPES,
    _builders(".jax_engine", "kernel"),
    quantizations=tuple(QUANTIZATIONS),
    refuses=_refuses,
    on_request=True,
    **_OPTIONS,
)
XLA = Provider(
    "xla",
    ("bf16",),
    _builders(".xla"),
    quantizations=("delayed",),
    refuses=_refuses,
    on_request=True,
    **_OPTIONS,
)
