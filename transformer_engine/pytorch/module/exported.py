"""Settings for a layer's products in a forward pass for export, and checks for such a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..quantization.autocast import current
from ..quantization.family import find_family
from ..tensor.quantizer import Quantizer
from .arguments import CallSwitches
from .linear_base import ProductsModule
from .products import unquantized
from .specs import computing_dtype, quantizers_of_call

# Rows that every format can quantize, in place of a dynamic row count.
_ANY_ROWS = 128


def export_products(
    module: ProductsModule,
    inp: Tensor,
    tensors: tuple[Tensor | None, ...],
    switches: CallSwitches,
    shapes: tuple[tuple[int, int], ...],
) -> tuple[torch.dtype, list[tuple[Quantizer, Quantizer]]]:
    """Return the dtype that a layer computes in, and the input and weight quantizers per product.

    Args:
        module: The layer.
        inp: Its input [.., in_features].
        tensors: Its parameters, named by `config._tensors`.
        switches: Call switches.
        shapes: (in_features, out_features) of each product's weight.

    Raises:
        TypeError, ValueError: The call cannot be computed.
        NotImplementedError: The layer is sharded, or a quantized result is requested.
        RuntimeError: The layer has no scales for the recipe yet.
    """
    module._check_call(inp, tensors, switches)
    config, name = module._config, type(module).__name__
    if config.is_sharded:
        raise NotImplementedError(
            f"{name} with tp_size={config.tp_size} cannot be exported: ONNX has no collectives; export a model with "
            "tp_size=1"
        )
    if switches.fp8_output or switches.fp8_grad:
        raise NotImplementedError(
            f"{name} cannot export a quantized result; leave fp8_output and fp8_grad False"
        )
    state, active = current(), unquantized(module.num_products)
    if state.enabled:
        assert state.recipe is not None
        _check_warm(module, state)
        active = module.numerics.of_call(module, state)
    call = module._build_uncached_call(inp, tensors, switches, active)
    dtype = computing_dtype(call)
    if not isinstance(call.rows, int):
        shape = torch.Size((_ANY_ROWS, inp.shape[-1]))
        call = call._replace(input=call.input._replace(shape=shape))
    return dtype, [(product.input, product.weight) for product in quantizers_of_call(call, shapes)]


def _check_warm(module: ProductsModule, state: Any) -> None:
    """Raise RuntimeError for a recipe with scales from earlier steps, which the layer does not have."""
    active = module.numerics.cached.recipe
    served = active is not None and active.matches_recipe(state.recipe, state.group)
    if find_family(state.recipe).stateful and not served:
        raise RuntimeError(
            f"{type(module).__name__} has no scales for {type(state.recipe).__name__}; run one forward pass, or load a "
            "checkpoint and run one, under the same recipe before the export"
        )
