"""Names that `te bench --help` lists, without the frameworks that their tables import."""

from __future__ import annotations

RECIPES = ("bf16", "delayed", "current", "block", "mxfp8", "nvfp4")
PROVIDERS = ("te", "torch", "torch.compile", "torchao", "liger", "quack", "jax", "xla")
FAMILIES = (
    "quantize",
    "norm",
    "linear",
    "dense",
    "layernorm_linear",
    "layernorm_mlp",
    "grouped_linear",
    "ops",
    "attention",
    "layer",
    "layer_small",
    "layer_graphed",
    "layer_recomputed",
    "layer_observed",
    "offload",
    "rope",
    "permute",
    "padding",
    "router",
    "cross_entropy",
    "linear_cross_entropy",
    "adam",
    "sgd",
    "kernel",
)
RANKS_FAMILIES = (
    "collective",
    "attention_cp",
    "layer_tp",
    "layer_sp",
    "layer_ub",
    "layer_cp",
    "layers_fsdp",
)
