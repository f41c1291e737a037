"""Layers of this package in the place of others: on the same device, in the same dtype, before they hold weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...conversion import DecoderConfig


def place_of(weight: Tensor) -> dict[str, Any]:
    """The keywords of a layer that lies where weight does."""
    return {"device": weight.device, "params_dtype": weight.dtype}


def norm_place_of(weight: Tensor) -> dict[str, Any]:
    """The same for a norm by itself."""
    return {"device": weight.device, "dtype": weight.dtype}


def norm_of(config: DecoderConfig) -> dict[str, Any]:
    """The keywords of the norm that a layer begins with."""
    return {
        "normalization": config.norm,
        "eps": config.epsilon,
        "zero_centered_gamma": config.zero_centered,
    }


def unfilled(weight: Tensor) -> None:
    """An init_method for weights that are copied next."""
