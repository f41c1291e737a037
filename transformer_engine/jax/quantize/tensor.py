"""Alias for transformer_engine.jax.quantize.tensors under NVIDIA's path, with grouped tensors."""

from ..sharding import with_sharding_constraint_by_logical_axes
from .grouped_tensors import GroupedNoScaleTensor, GroupedScaledTensor1x
from .scaling_modes import TensorUsage
from .tensors import (
    AbstractBaseTensor,
    AbstractBaseTensor1x,
    NoScaleTensor,
    ScaledTensor,
    ScaledTensor1x,
    ScaledTensor2x,
    ScaledTensorFactory,
)

__all__ = [
    "AbstractBaseTensor",
    "AbstractBaseTensor1x",
    "GroupedNoScaleTensor",
    "GroupedScaledTensor1x",
    "NoScaleTensor",
    "ScaledTensor",
    "ScaledTensor1x",
    "ScaledTensor2x",
    "ScaledTensorFactory",
    "TensorUsage",
    "with_sharding_constraint_by_logical_axes",
]
