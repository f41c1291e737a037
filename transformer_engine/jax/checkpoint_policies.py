"""jax.checkpoint policies that save this package's matrix products, which are tagged with names."""

from __future__ import annotations

import jax

from .primitives.gemm import NAME

__all__ = [
    "checkpoint_dots_and_te_gemms",
    "dots_and_te_gemms_with_no_batch_dims",
    "te_gemms_saveable",
]

te_gemms_saveable = jax.checkpoint_policies.save_only_these_names(NAME)
"""Policy of `jax.checkpoint`: save the results of this package's products, and recompute everything else."""
dots_and_te_gemms_with_no_batch_dims = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable, te_gemms_saveable
)
"""Policy of `jax.checkpoint`: also save plain products without batch dimensions."""
checkpoint_dots_and_te_gemms = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_saveable, te_gemms_saveable
)
"""Policy of `jax.checkpoint`: also save all plain products."""
