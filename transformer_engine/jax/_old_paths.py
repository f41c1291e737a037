"""`OLD_PATHS`: modules that have moved. Both paths import the same module."""

from ..common import absent

_PACKAGE = "transformer_engine.jax"
_FUNCTIONS = (
    "ep_exchange",
    "grouped_dense",
    "moe_experts",
    "products",
    "quantized_mlp",
    "ragged_exchange",
    "sources",
)
_RUNTIME = (
    "blocks",
    "checks",
    "code_bits",
    "explicit_axes",
    "manual_axes",
    "platform",
    "residual",
    "undifferentiated",
)
OLD_PATHS = {
    **{f"{_PACKAGE}.{name}": f"{_PACKAGE}.functions.{name}" for name in _FUNCTIONS},
    **{f"{_PACKAGE}.{name}": f"{_PACKAGE}.runtime.{name}" for name in _RUNTIME},
}
absent.moved.update(OLD_PATHS)
