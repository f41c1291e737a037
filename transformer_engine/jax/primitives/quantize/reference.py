"""Every format in plain jnp operations: float32, literal, on any device, for any request."""

from __future__ import annotations

import functools

import jax
from jax import Array

from ....common.dispatch import Backend
from .formats import FORMATS
from .spec import Given, Quantized, QuantizeSpec, Request


# Compiled as one program also where the caller is eager: operation by operation it takes seconds.
@functools.partial(jax.jit, static_argnames=("spec",))
def run(x: Array, given: Given, spec: QuantizeSpec) -> Quantized:
    """x [M, K] -> the directions that spec asks for."""
    return FORMATS[spec.format.name].quantize(x, spec, given)


BACKEND = Backend[Request]("reference", bind=lambda request: functools.partial(run, spec=request.spec))
